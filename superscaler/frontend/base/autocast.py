"""Autocast as casts in the graph: the casts of torch's own kernels, in the same number as under eager autocast."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from superscaler.errors import InputError, unknown
from superscaler.specs.options import HALVES

# Arguments of torch.autocast: device type and dtype.
Autocast = tuple[str, torch.dtype]
_REGION = torch.ops.higher_order.wrap_with_autocast
_CAST = torch.ops.aten._to_copy.default


def read_autocast(name: str | None, kind: str) -> Autocast | None:
    """Return the autocast with this name, else the `torch.autocast` region around this call, if any."""
    if name is not None:
        if str(name) not in HALVES:
            raise InputError(unknown("autocast", name, HALVES))
        return kind, getattr(torch, HALVES[name])
    return (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def cast_product(equation: Any, *operands: Any) -> tuple[Any, ...]:
    """Return the arguments of an einsum, cast as autocast would cast its product; decomposition keeps an einsum whole.

    An einsum of other than two operands, or with more than a product, is left unchanged.
    """
    flat = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    kind = flat[0].device.type if isinstance(flat[0], Tensor) else "meta"
    if not isinstance(equation, str) or len(flat) != 2 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return (equation, *operands)
    left, _, result = equation.replace(" ", "").partition("->")
    first, second = (set(side) for side in left.split(","))
    gone = (first | second) - set(result) if "->" in equation else first & second
    if not gone or not gone <= first & second:
        return (equation, *operands)
    dtype = torch.get_autocast_dtype(kind)
    return (equation, *(x.to(dtype) if x.is_floating_point() else x for x in flat))


def has_regions(exported: ExportedProgram) -> bool:
    return bool(exported.graph.find_nodes(op="call_function", target=_REGION))


@contextmanager
def stand_ins(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments, and set the module's weights, as CPU tensors without data: autocast ignores meta tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Tensor] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        if id(value) not in made:
            with mode:
                tensor = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            made[id(value)] = nn.Parameter(tensor, value.requires_grad) if isinstance(value, nn.Parameter) else tensor
        return made[id(value)]

    tables: list[dict[str, Any]] = [table for m in module.modules() for table in (m._parameters, m._buffers)]
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: fake(value) for name, value in table.items()})
        yield pytree.tree_map(fake, (args, dict(kwargs)))
    finally:
        for table, values in zip(tables, before, strict=True):
            table.update(values)


def forget_stand_ins(exported: ExportedProgram) -> None:
    """Replace the stand-ins of a program by tensors of the meta device."""
    for table in (exported.state_dict, exported.constants):
        for name, value in table.items():
            if isinstance(value, FakeTensor):
                table[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")


def open_regions(exported: ExportedProgram) -> None:
    """Put the ops of autocast regions between enter and exit: they are cast one by one, and keep module and line."""
    _open(exported.graph_module, "")
    exported.graph_module.recompile()


def _open(module: GraphModule, outermost: str) -> None:
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is _REGION:
            _inline(module, node, outermost or node.name)
        elif outermost and node.op == "call_function" and not str(node.target).startswith("aten.to."):
            node.meta["custom"] = {**node.meta.get("custom", {}), "autocast": outermost}


def _inline(module: GraphModule, node: Node, outermost: str) -> None:
    arguments: tuple[Any, ...] = node.args
    *mode, holder = arguments[:5]
    region: Any = module.get_submodule(holder.target)
    graph = module.graph
    _open(region, outermost)
    inner = dict(zip(region.graph.find_nodes(op="placeholder"), arguments[5:], strict=True))
    with graph.inserting_before(node):
        entered = graph.call_function(_enter_autocast, tuple(mode))
        results: Any = graph.graph_copy(region.graph, inner)
        graph.call_function(_exit_autocast, (entered,))
    for user in list(node.users):
        result, name = results[user.args[1]], user.name
        user.replace_all_uses_with(result)
        graph.erase_node(user)
        result._rename(name)
    graph.erase_node(node)
    graph.erase_node(holder)


def share_casts(exported: ExportedProgram) -> None:
    """Merge equal casts of a weight (or an input) in one region, as the cache of eager autocast does."""
    first: dict[Any, Node] = {}
    graph = exported.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_CAST):
        region = node.meta.get("custom", {}).get("autocast")
        source: Any = node.args[0]
        if not region or source.op != "placeholder":
            continue
        kept = first.setdefault((region, source, node.kwargs["dtype"]), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    exported.graph_module.recompile()
