"""The other shapes of a plan: what the user lists, and the captures of the same step for them.

A length is the size of the dim that all sequences among the inputs share; other shapes are listed by input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superscaler.artifact import describe
from superscaler.compiler import Compiled, SProgram, compile_graph
from superscaler.errors import InputError, PlanError, named, some, unknown
from superscaler.frontend.base.captured import Captured
from superscaler.frontend.checks.shorter import sequences
from superscaler.ir.graph import Graph
from superscaler.ir.model import Model
from superscaler.runtime.batch import flat
from superscaler.runtime.shapes.forms import Sizes, paired, words

Shape = int | tuple[int, int] | Mapping[str, Any]
_FORMS = "a length (512), rows and a length ((8, 512)), or a shape or an example by input ({'input_ids': (8, 512)})"


class Listed(NamedTuple):
    """The sizes of all inputs at a listed shape, and the examples that the user gave."""

    sizes: Sizes
    given: Mapping[str, Tensor]


def listed(captured: Captured, shapes: Iterable[Shape]) -> list[Listed]:
    """Return the listed shapes without repetitions, and without that of the capture. Raises InputError for one that the
    inputs of the capture cannot have.
    """
    if isinstance(shapes, Mapping | str) or not isinstance(shapes, Iterable):
        raise InputError(f"shapes is a list, not {named(shapes)}; each of it is {_FORMS}.")
    found: list[Listed] = []
    for one in (_listed(captured.model, shape) for shape in shapes):
        if one.sizes not in (sizes_of(captured.model), *(other.sizes for other in found)):
            found.append(one)
    return found


def sizes_of(model: Model) -> Sizes:
    """Return the shapes of the inputs of a model."""
    return {name: tuple(model.tensors[name].shape) for name in model.inputs}


def _listed(model: Model, shape: Any) -> Listed:
    own = sizes_of(model)
    if isinstance(shape, Mapping):
        return _by_input(own, shape)
    numbers = [shape] if isinstance(shape, int) else shape
    if not isinstance(numbers, Sequence) or len(numbers) not in (1, 2) or not all(map(_is_size, numbers)):
        raise InputError(f"a shape in shapes is {named(shape)}; give {_FORMS}.")
    sizes = sizes_at(model, numbers[-1])
    return Listed(_of_rows(sizes, numbers[0]) if len(numbers) == 2 else sizes, {})


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def sizes_at(model: Model, length: int) -> Sizes:
    """Return the shapes of the inputs of a model with sequences of a length. Raises InputError where it is of no one
    dim.
    """
    own = sizes_of(model)
    dims = sequences(model)
    if len({own[name][dim] for name, dim in dims.items()}) != 1:
        raise InputError(
            f"the length {length} in shapes is of no one dim of the inputs, {words(own)}: give the shape of each input "
            f"that changes, as {{'{next(iter(own), 'input_ids')}': (8, {length})}}."
        )
    return {name: _with(shape, dims.get(name), length) for name, shape in own.items()}


def _of_rows(own: Sizes, rows: int) -> Sizes:
    if len({shape[0] for shape in own.values() if shape}) != 1:
        raise InputError(
            f"{rows} rows in shapes are of no one dim of the inputs, {words(own)}; give the shape of each input that "
            "changes, by its name."
        )
    return {name: _with(shape, 0 if shape else None, rows) for name, shape in own.items()}


def _with(shape: tuple[int, ...], dim: int | None, size: int) -> tuple[int, ...]:
    return tuple(size if d == dim else n for d, n in enumerate(shape))


def _by_input(own: Sizes, shape: Mapping[str, Any]) -> Listed:
    sizes, given = dict(own), dict[str, Tensor]()
    for name, value in flat(shape, own).items():
        if name not in own:
            raise InputError(f"a shape in shapes has an {unknown('input', name, own)}")
        if isinstance(value, Tensor):
            given[name] = value
        found = tuple(value.shape if isinstance(value, Tensor) else value if isinstance(value, Sequence) else ())
        if len(found) != len(own[name]) or not all(map(_is_size, found)):
            raise InputError(
                f"a shape in shapes has '{name}' as {named(value)}, but the capture has it with the shape {own[name]}; "
                f"give {len(own[name])} sizes above 0, or an example."
            )
        sizes[name] = found
    return Listed(sizes, given)


def captured_at(captured: Captured, one: Listed) -> Captured:
    """Return the capture of the same step at a listed shape. Inputs without an example repeat that of the capture.

    Raises InputError, which names the shape, where the module does not run so.
    """
    assert captured.again is not None
    batch = {name: one.given.get(name, resized(x, one.sizes[name])) for name, x in captured.batch.items()}
    try:
        return captured.again(*captured.call.arguments(batch))
    except PlanError as error:
        raise type(error)(f"at the shape {words(one.sizes)}: {error}") from error


def resized(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of another shape, which repeats the elements of this one along each dim.

    >>> resized(torch.tensor([[1, 2, 3]]), (2, 4)).tolist()
    [[1, 2, 3, 1], [1, 2, 3, 1]]
    """
    for dim, size in enumerate(shape):
        if size != x.shape[dim]:
            x = x.index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])
    return x


def compiled_at(compiled: Compiled, shapes: Sequence[Listed], sprogram: SProgram) -> Iterator[Compiled]:
    """Yield the programs of a plan at listed shapes. Raises InputError where one cannot be compiled, or would keep
    weights elsewhere than the plan.
    """
    for one in shapes:
        graph = graph_at(compiled.graph.captured, one)
        try:
            made = compile_graph(graph, sprogram, compiled.cluster)
        except PlanError as error:
            raise type(error)(f"at the shape {words(one.sizes)}: {error}") from error
        check_rests(describe(compiled), describe(made), one.sizes)
        yield made


def graph_at(captured: Captured, one: Listed) -> Graph:
    """Return the graph of the same step at a listed shape, which plans balance as that of the capture."""
    found = captured_at(captured, one)
    graph = Graph(found.model, found)
    graph.costs = {op.name: op.flops for op in captured.model.ops}
    return graph


def check_rests(plan: Mapping[str, Any], other: Mapping[str, Any], sizes: Sizes) -> None:
    """Raise InputError unless each device keeps the weights, and what trains them, in the same pieces under both
    plans.
    """
    for rank in range(plan["world"]):
        if odd := paired(plan, other, rank).odd:
            raise InputError(
                f"at the shape {words(sizes)} device {rank} keeps {some(sorted(odd), 3)} in another piece than at the "
                "shape of the capture, so both cannot train one copy; let the plan cut and place weights alike at all "
                "shapes, or compile a plan for each."
            )


def of_others(model: Model, shapes: Iterable[Listed]) -> list[Listed]:
    """Return listed shapes for a capture that may have less inputs, without repetitions."""
    own, found = sizes_of(model), list[Listed]()
    for one in shapes:
        sizes = {name: one.sizes[name] for name in own}
        if sizes not in (own, *(other.sizes for other in found)):
            found.append(Listed(sizes, {name: x for name, x in one.given.items() if name in own}))
    return found
