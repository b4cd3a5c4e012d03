"""Plans along one axis of a mesh, and their products: `data_parallel:2 x tensor_parallel:4`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from math import prod
from types import FrameType
from typing import Any, NamedTuple, Protocol, cast

from superscaler.errors import InputError, brief, named
from superscaler.verbs import Cluster, Graph, Mesh, op_assign, sprogram

SProgram = Callable[..., Any]
# Plans that cut the weights themselves, each in its own way.
_SLICING = {"zero", "fsdp"}


class MeshAxis(NamedTuple):
    """The mesh axis of a factor of a product, passed to it instead of a cluster. Its size is divided over servers
    first, then over the devices of a server.
    """

    name: str
    sizes: tuple[int, ...]


class AlongAxis(Protocol):
    """A plan along one axis: with a cluster it is a whole plan, with a `MeshAxis` a factor of a product."""

    cut: SProgram
    priority: tuple[int, bool]
    recomputes: bool

    def __call__(self, graph: Graph, cluster: Cluster | MeshAxis, **options: Any) -> None: ...


def along_axis(
    *bare: Any,
    first: bool = False,
    batches: bool = False,
    recomputes: bool = False,
    last: bool = False,
    nests: bool = False,
) -> Callable[[SProgram], AlongAxis]:
    """Make an sProgram of `cut(graph, n, axis, **options)`, which cuts ops into `n` along the mesh axis of that name.

    It assigns nothing: alone it gets all devices as one axis, in a product its share of them. Ops without any cut in a
    product are replicated; uncut updates follow the readers of their weight. The order in a product does not depend on
    the order in the text. `first`: the plan replaces ops. `batches`: it makes microbatches, which others cut further.
    `recomputes`: it recomputes. `last`: it follows the cuts of others (`graph.follow`). `nests`: cutting into a and
    then into b equals cutting into a * b, and is done so on several servers. `.cut` is the function itself. What comes
    after a `yield` in it is done after all other plans of a product.

    @ss.along_axis(nests=True)
    def data_parallel(graph, n, axis):
        ss.op_trans(graph, graph.forward_ops, ss.Split("batch", n, axis=axis))
    """

    where = _line(sys._getframe(1))
    flags = {"first": first, "batches": batches, "recomputes": recomputes, "last": last, "nests": nests}
    if wrong := [name for name, value in flags.items() if not isinstance(value, bool)]:
        raise InputError(f"{where}: {wrong[0]} of along_axis is {named(flags[wrong[0]])}; give True or False.")
    if bare:
        raise InputError(f"{where}: along_axis is given {named(bare[0])}; write @ss.along_axis() above a def.")

    def decorate(cut: SProgram) -> AlongAxis:
        _check_cut(cut, _line(sys._getframe(1)))

        @functools.wraps(cut)
        def run(graph: Graph, cluster: Cluster | MeshAxis, **options: Any) -> list[Iterator[None]]:
            if isinstance(cluster, MeshAxis):
                sizes = cluster.sizes if nests else [prod(cluster.sizes)]
                return [rest for n in sizes if (rest := _begun(cut, graph, n, cluster.name, **options))]
            _multiply(graph, cluster.mesh(**{cut.__name__: -1}), {cut.__name__: functools.partial(run, **options)})
            return []

        graph, _, _, *rest = inspect.signature(cut).parameters.values()
        signature = inspect.Signature([graph, graph.replace(name="cluster"), *rest])
        priority = 2 * last + recomputes - first, not batches
        vars(run).update(__signature__=signature, cut=cut, priority=priority, recomputes=recomputes)
        return cast(AlongAxis, sprogram(run))

    return decorate


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _check_cut(cut: SProgram, where: str) -> None:
    """Raise InputError unless a function takes a graph, a number and an axis."""
    try:
        inspect.signature(cut).bind(None, 2, "axis")
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{where}: along_axis needs a function of a graph, a number of parts and an axis, not {named(cut)} "
            f"({brief(error)}); write def name(graph, n, axis)."
        ) from None


def product(spec: str, terms: Mapping[str, tuple[int, SProgram]]) -> SProgram:
    """Return the sProgram that cuts along several axes, the outer first: per name the size and the plan along it.

    One size may be -1: the devices that the others leave. If several are, plans that recompute get 1. Raises InputError
    for a plan that is not along one axis, or if several sizes are still -1.
    """
    whole = [name for name, (_, plan) in terms.items() if _mark(plan, "cut") is None]
    if whole:
        raise InputError(
            f"'{spec}': {whole[0]} places all ops itself, so it cannot be multiplied; only plans along one axis can, "
            "as data_parallel and tensor_parallel."
        )
    if terms.keys() >= _SLICING:
        raise InputError(
            f"'{spec}': {' and '.join(sorted(_SLICING))} both cut the weights over their devices; choose one: fsdp has "
            "all weights in slices, as zero:stage=3, and zero the optimizer's state alone."
        )
    sizes = {name: size for name, (size, _) in terms.items()}
    for name in (name for name in reversed([*terms]) if sizes[name] == -1 and _mark(terms[name][1], "recomputes")):
        sizes[name] = 1 if [*sizes.values()].count(-1) > 1 else -1
    unsized = [name for name, size in sizes.items() if size == -1]
    if len(unsized) > 1:
        raise InputError(
            f"'{spec}': {' and '.join(unsized)} have no number of devices; write it for all but one, as {unsized[0]}:2."
        )

    def run(graph: Graph, cluster: Cluster) -> None:
        mesh = cluster.mesh(**sizes)
        _multiply(graph, mesh, {name: plan for name, (_, plan) in terms.items()})

    vars(run).update(__name__=spec, spec=spec, sizes=sizes)
    return run


def _begun(cut: Callable[..., Any], *given: Any, **options: Any) -> Iterator[None] | None:
    """Run a plan along one axis. Return the rest of one that yields, for the end."""
    found: Any = cut(*given, **options)
    if not inspect.isgenerator(found):
        return None
    next(found, None)
    return cast(Iterator[None], found)


def _multiply(graph: Graph, mesh: Mesh, plans: Mapping[str, Callable[..., Any]]) -> None:
    rests = list[Iterator[None]]()
    for name, plan in sorted(plans.items(), key=lambda item: _mark(item[1], "priority")):
        rests += plan(graph, MeshAxis(name, mesh.by_server(name))) or ()
    for rest in rests:
        next(rest, None)
    # Copies that none cuts are where they are read; on the hosts of their devices, if a plan says so.
    hosted = [op for op in graph.ops if op.name in graph.policy.hosted]
    chosen = (op for op in graph.ops if (op.is_forward and not op.is_copy) or graph.grids[op.name].is_touched)
    op_assign(graph, list(chosen), mesh)
    if hosted:
        op_assign(graph, hosted, "host")


def _mark(plan: SProgram, name: str) -> Any:
    """Return the mark of a plan, with options or without."""
    return getattr(getattr(plan, "func", plan), name, None)
