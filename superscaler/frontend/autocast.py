"""Autocast as casts in the graph: what torch's own kernels cast, as often as eager autocast does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from superscaler.errors import InputError, unknown

# The arguments of torch.autocast: device type and dtype.
Autocast = tuple[str, torch.dtype]
DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_REGION = torch.ops.higher_order.wrap_with_autocast
_CAST = torch.ops.aten._to_copy.default


def read_autocast(name: str | None, kind: str) -> Autocast | None:
    """Return what `torch.autocast` is asked for by name, else by the region around this call, if any."""
    if name is not None:
        if name not in DTYPES:
            raise InputError(unknown("autocast", name, DTYPES))
        return kind, DTYPES[name]
    return (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def open_regions(exported: ExportedProgram) -> None:
    """Put the ops of autocast regions between an enter and an exit, so that decomposition casts them one by one.

    As the call of a submodule, which torch.export makes of a region, they would lose their module and their line.
    """
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
    """Make equal casts of a weight (or an input) in one region one op, as the cache of eager autocast does."""
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
