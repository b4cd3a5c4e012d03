"""Segments as Inductor compiles them: operators between products and attention are fused into few kernels.

The graphs are those that are trained (`runtime/compiled/joint.py`). Their kernels are estimated, as Inductor would make
them. An operator is in one kernel with those that read it, but for sums of whole columns, and for readers that wait for
a product meanwhile. A fused kernel reads and writes memory once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx

from superscaler.groups import group_by
from superscaler.runtime.compiled.inductor import Call
from superscaler.runtime.compiled.segments import Called, CompiledSegments
from superscaler.runtime.compiled.tape import Compiled
from superscaler.simulate.rates import class_of, is_attention, name_of, products_of
from superscaler.simulate.recording import KINDS, Recorder
from superscaler.simulate.repeats.made import metas_of, tensors_of
from superscaler.simulate.works import Kernel, Meta

_VIEWS = (operator.getitem, torch.ops.aten._unsafe_view.default)
_CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
# Operators with a kernel of their own: these classes, and these names.
_APART, _NAMES = ("gather", "scatter"), ("sort", "topk", "argsort")
_EVERYWHERE = -1
# Of the loss: one constant a row, which is written where the others are.
_CONSTANT = torch.ops.aten.scatter.value


class RecordedSegments(CompiledSegments):
    """Segments as they are compiled to be trained, whose graphs run so that a recorder sees fused kernels."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def compiled(self, call: Called) -> Compiled | None:
        with self.recorder.without(*KINDS):
            try:
                made = call.traced(self.fused)
            except Exception:
                # It runs uncompiled, as it does when it is trained.
                return None
            made.compile(call.given)
        return made

    def fused(self, name: str, graph: fx.GraphModule, *_: object) -> Call:
        return partial(_Fused.boxed_run, _Fused(graph, self.recorder))


class _Fused(fx.Interpreter):
    """An interpreter of a graph, under which a recorder sees fused kernels, and no memory inside of them."""

    def __init__(self, graph: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(graph)
        self.recorder = recorder
        self.group = groups(graph.graph)
        members = group_by(self.group, self.group.__getitem__)
        members.pop(_EVERYWHERE, None)
        self.kernels = {nodes[-1]: _kernel(nodes, self.group) for nodes in members.values()}
        self.inside = {n for n in self.group if not _is_made(n, self.group)}

    def boxed_run(self, args_list: list[Any]) -> Any:
        made = super().boxed_run(args_list)
        # It would keep the results.
        self.env = {}
        return made

    def run_node(self, n: fx.Node) -> Any:
        base = base_of(n)
        if base not in self.group:
            return super().run_node(n)
        with self.recorder.without(*(KINDS if base in self.inside else ("kernels",))):
            made = super().run_node(n)
        if n in self.kernels and "kernels" in self.recorder.kinds:
            self.recorder.kernels.append(self.kernels[n])
        return made


def groups(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the number of the fused kernel of each operator that is in one, or EVERYWHERE: each reader of what is
    computed of places and scalars only, as the words of random numbers, computes it itself.

    The level of an operator counts the kernels apart before it, or before its first reader: what waits for one of these
    is in another kernel.
    """
    own = [n for n in graph.nodes if n.op == "call_function" and base_of(n) is n]
    apart, level = set(filter(_is_apart, own)), dict[fx.Node, int]()
    for n in own:
        before = (level[x] + (x in apart) for x in map(base_of, n.all_input_nodes) if x in level)
        level[n] = max(before, default=0)
    for n in reversed(own):
        if n not in apart:
            level[n] = min((level[x] for x in _readers(n) if x in level), default=level[n])
    joined = {n: n for n in own}

    def root(n: fx.Node) -> fx.Node:
        while joined[n] is not n:
            n = joined[n]
        return n

    everywhere = set[fx.Node]()
    for n in own:
        read = [x for x in n.all_input_nodes if base_of(x) not in everywhere]
        if n not in apart and not any(map(_dims, read)) and (_dims(n) or not read):
            everywhere.add(n)
    single = apart.union(everywhere, filter(_is_of_columns, own))
    for n in own:
        for x in map(base_of, n.all_input_nodes):
            if x in joined and level[x] == level[n] and single.isdisjoint((n, x)):
                joined[root(x)] = root(n)
    number = {n: k for k, n in enumerate(own)}
    return {n: _EVERYWHERE if n in everywhere else number[root(n)] for n in own if n not in apart}


def base_of(n: fx.Node) -> fx.Node:
    """Return the node whose memory a view, or an item of a tuple, has; other nodes are their own."""
    while n.op == "call_function" and (getattr(n.target, "is_view", False) or n.target in _VIEWS):
        n = n.all_input_nodes[0]
    return n


def _source_of(n: fx.Node, group: Mapping[fx.Node, int]) -> fx.Node:
    """Return the node that a fused kernel reads for a tensor: it casts it itself."""
    base = base_of(n)
    while base in group and base.target in _CASTS and not _is_made(base, group):
        base = base_of(base.all_input_nodes[0])
    return base


def _is_made(n: fx.Node, group: Mapping[fx.Node, int]) -> bool:
    """Return whether an operator of a fused kernel has a result in memory: something else reads it, or a view of it."""
    if group[n] == _EVERYWHERE:
        return False
    others = (x for x in _readers(n) if group.get(x) != group[n])
    return any(x not in group or n.target not in _CASTS for x in others)


def _readers(n: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a tensor or its views, the output included."""
    for user in n.users:
        if base_of(user) is user:
            yield user
        else:
            yield from _readers(user)


def _kernel(nodes: Sequence[fx.Node], group: Mapping[fx.Node, int]) -> Kernel:
    """Return the kernel of fused operators: it reads each tensor from outside once."""
    read = dict[fx.Node, Meta]()
    for x in (x for n in nodes for x in n.all_input_nodes):
        base = _source_of(x, group)
        if group.get(base) not in (group[nodes[0]], _EVERYWHERE):
            # Of a part of a tensor the part, of an expanded one its memory.
            part, whole = _metas(x)[0], _metas(base)[0]
            is_part = prod(part[0]) < prod(whole[0])
            read[x if is_part else base] = (part[0] if is_part else whole[0]), whole[1]
    made = [meta for n in nodes if _is_made(n, group) for meta in _metas(n)]
    return Kernel("fused", tuple(read.values()), tuple(made))


def _dims(n: fx.Node) -> int:
    """Return the number of dims of a tensor."""
    return len(_metas(n)[0][0])


def _metas(n: fx.Node) -> tuple[Meta, ...]:
    return metas_of(tensors_of(n.meta.get("val"))) or (((), "float32"),)


def _own(n: fx.Node) -> Kernel:
    return Kernel(n.target.name().partition("::")[2], tuple(m for x in n.all_input_nodes for m in _metas(x)), _metas(n))  # type: ignore[union-attr]


def _is_apart(n: fx.Node) -> bool:
    """Return whether an operator has a kernel of its own."""
    if not isinstance(n.target, torch._ops.OpOverload) or n.target.namespace not in ("aten", "prims"):
        return True
    own = _own(n)
    if n.target is _CONSTANT:
        return False
    return is_attention(own) or class_of(own) in _APART or name_of(own) in _NAMES or any(True for _ in products_of(own))


def _is_of_columns(n: fx.Node) -> bool:
    """Return whether an operator sums whole columns, or planes: it is a kernel with nothing else."""
    return name_of(_own(n)).endswith((" columns", " planes"))
