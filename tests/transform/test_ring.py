"""Attention in blocks: what they read, what they may be cut into, and what is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import ScheduleError, TransformError
from superscaler.ir.grid import Axis
from superscaler.ir.text.model import parse_model, print_model
from superscaler.plans import SProgram
from superscaler.verbs import AttentionBlocks, Op, Split, op_assign, op_trans
from tests.helpers.graphs import assert_equal, step_of


class Attention(nn.Module):
    def __init__(self, bias: bool = False, dropout: float = 0.0, keys: int = 12) -> None:
        super().__init__()
        self.keys = keys
        self.qkv = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(12, 12)) if bias else None
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
        k, v = (x[..., : self.keys, :] for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, self.bias, self.dropout, self.bias is None).square().mean()


def captured(module: nn.Module) -> tuple[ss.Graph, Op]:
    graph = step_of(module, torch.randn(2, 12, 8))
    return graph, next(op for op in graph.forward_ops if "attention" in op.target)


def test_each_step_reads_keys_of_one_chunk_earlier() -> None:
    graph, op = captured(Attention())
    made = [parts.op for parts in op_trans(graph, op, AttentionBlocks(3))]
    made, gradients = [o for o in made if not o.origin], [o for o in made if o.origin]
    blocks = [o for o in made if o.target == "ss.attention_block"]
    assert [(o.origin, o.inputs[:3], o.has_mirror) for o in gradients] == [(o.name, o.inputs, True) for o in blocks]
    assert made.pop().target == "aten.detach.default"
    assert [o.target.split("_")[-1] for o in made if not o.is_copy] == ["block", "block", "merge", "block", "merge"]
    assert [o.inputs[0].tensor for o in made if o.is_copy][2:] == [o.outputs[0].tensor for o in made if o.is_copy][:-2]
    assert made[-1].outputs[0].tensor == op.outputs[0].tensor
    for step, block in enumerate(blocks):
        follower = next(n for n, i in enumerate(block.indices) if i.follows)
        first = block.find(block.indices[follower].factor)
        assert block.indices[follower].follows == (first, step, 3)
        whole = graph.rows(block)
        assert (whole.lo[0][follower], whole.hi[0][follower]) == (0, 12)
        op_trans(graph, block, Split(block.indices[follower].factor, 3))
        rows = graph.rows(block)
        assert [(lo // 4, hi - lo) for lo, hi in zip(rows.lo[:, follower], rows.hi[:, follower], strict=True)] == [
            ((at - step) % 3, 4) for at in range(3)
        ]
    assert parse_model(print_model(graph.model)) == graph.model


class Interleaved(nn.Module):
    """Attention whose queries, keys and values lie between each other: none has a last dim of stride 1."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 4, 3)).transpose(1, 2).unbind(-1)
        return F.scaled_dot_product_attention(q, k, v).square().mean()


@pytest.mark.parametrize("parts", [1, 3])
def test_kernels_read_operands_of_any_strides(parts: int) -> None:
    def blocks(graph: ss.Graph, cluster: ss.Cluster) -> None:
        op_trans(graph, next(op for op in graph.forward_ops if "attention" in op.target), AttentionBlocks(parts))
        op_assign(graph, graph.forward_ops, cluster.devices[0])

    assert_equal(captured(Interleaved())[0], blocks, 1)


def test_the_dim_of_the_values_is_not_cut() -> None:
    """The log-sum-exp of a block lacks it: each part would give it whole, and these would be added."""

    def blocks(graph: ss.Graph, cluster: ss.Cluster) -> None:
        op = next(op for op in graph.forward_ops if "attention" in op.target)
        value = op.indices[op.outputs[0].slots[-1]].factor
        op_trans(graph, op, AttentionBlocks(3))
        op_trans(graph, [o for o in graph.forward_ops if o.target.startswith("ss.attention")], Split(value, 2))
        op_assign(graph, graph.forward_ops, cluster.mesh(x=2))

    assert_equal(captured(Attention())[0], blocks)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("reads", ["all values", "a result that is recomputed twice", "a copy", "a copy of the result"])
def test_blocks_are_in_regions_of_layers(again: bool, reads: str) -> None:
    """What a gradient reads may be recomputed in a region around its own, in one more inside, or be a copy."""

    def layers(graph: ss.Graph, cluster: ss.Cluster) -> None:
        attention = next(op for op in graph.forward_ops if "attention" in op.target)
        made = [parts.op for parts in op_trans(graph, attention, AttentionBlocks(3, again))]
        whole = next(op for op in made if op.name.endswith(".whole"))
        inner = [op for op in (*made, graph.forward_ops[-2]) if not op.origin and op != whole]
        op_assign(graph, graph.forward_ops, cluster.devices[0])
        if "copy" in reads:
            readers = [whole] if "result" in reads else [op for op in made if op.target == "ss.attention_gradient"]
            op_assign(graph, op_trans(graph, readers, ss.Insert()), "host")
        op_trans(graph, graph.forward_ops, ss.Recompute())
        if "twice" in reads:
            op_trans(graph, inner, ss.Recompute())

    assert_equal(captured(Attention())[0], layers, 1)


@dataclass(frozen=True)
class Mine:
    index: int

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        return Axis(self.index, (4, 4, 4))


@pytest.mark.parametrize(("sizes", "part"), [((6, 6), "0:6"), ((8, 4), "0:8"), ((2, 4, 6), "0:2")])
def test_blocks_are_cut_into_chunks(sizes: tuple[int, ...], part: str) -> None:
    graph, op = captured(Attention())
    block = op_trans(graph, op, AttentionBlocks(3))[2].op
    factor = next(i.factor for i in block.indices if i.follows)
    op_trans(graph, block, Split(factor, sizes=sizes))
    with pytest.raises(TransformError, match=rf"is cut to {part} of x.1, but it computes chunks of 4; cut it into 3 "):
        graph.rows(block)
    follower = next(n for n, i in enumerate(block.indices) if i.follows)
    with pytest.raises(TransformError, match=r"cuts index \d \(x.1\), which follows index \d; cut that one"):
        op_trans(graph, block, Mine(follower))


def cut(*sizes: int) -> SProgram:
    """Cut the queries into these parts, and the blocks of attention into three."""

    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        made = op_trans(graph, next(op for op in graph.forward_ops if "attention" in op.target), AttentionBlocks(3))
        factor = next(i.factor for i in made[2].op.indices if i.follows)
        for op in graph.forward_ops:
            op_assign(graph, op_trans(graph, op, Split(factor, sizes=sizes)), range(len(sizes)))

    return plan


@pytest.mark.parametrize("sizes", [(12,)])
def test_a_part_has_one_chunk_or_all(sizes: tuple[int, ...]) -> None:
    assert_equal(captured(Attention())[0], cut(*sizes), len(sizes))


def test_what_follows_elsewhere_is_refused() -> None:
    """A part that says it reads other keys than those of its queries does not get past the certificate."""
    program = ss.compile(captured(Attention())[0], cut(4, 4, 4), "local:3").compiled.program
    check_program(program)
    ops = program.model.ops
    moved = [
        replace(op, indices=tuple(replace(i, follows=(i.follows[0], 0, 3)) if i.follows else i for i in op.indices))
        for op in ops
    ]
    of = dict(zip(ops, moved, strict=True))
    functions = tuple(replace(f, ops=tuple(of[op] for op in f.ops)) for f in program.functions)
    wrong = replace(program, model=replace(program.model, ops=tuple(moved)), functions=functions)
    with pytest.raises(ScheduleError, match=r"runs scaled_dot_product_attention\.1 on 8:12 of x\.1, not on 0:4"):
        check_program(wrong)


@pytest.mark.parametrize("read", ["the result of a block", "the scores of a block"])
def test_a_gradient_needs_the_attention_to_all_keys(read: str) -> None:
    """A gradient of a block that reads that of a block, or its log-sum-exp, does not get past the certificate."""
    program = ss.compile(captured(Attention())[0], cut(12), "local:1").compiled.program
    ops = {op.name: op for op in program.model.ops}
    gradient = next(op for op in ops.values() if op.target == "ss.attention_gradient")
    made, number = ops[gradient.origin].outputs, read == "the scores of a block"
    at = len(gradient.inputs) - 2 + number
    inputs = tuple(made[number] if n == at else o for n, o in enumerate(gradient.inputs))
    ops[gradient.name] = replace(gradient, inputs=inputs)
    with pytest.raises(ScheduleError, match=rf"{gradient.name} does not recompute {gradient.origin}, or another op"):
        check_program(replace(program, model=replace(program.model, ops=tuple(ops.values()))))


@pytest.mark.parametrize(
    ("module", "parts", "message"),
    [
        (Attention(), 5, "AttentionBlocks(5) of scaled_dot_product_attention () does not divide factor x.1 of 12; "),
        (Attention(dropout=0.1), 2, "has dropout on its probabilities; leave it out"),
        (
            Attention(keys=6),
            2,
            " () needs as many queries as keys, because it is causal, but there are 12 and 6; ",
        ),
        (Attention(bias=True), 2, "its mask bias has a gradient, but a block makes only some of its elements"),
    ],
)
def test_what_cannot_be_is_refused(module: nn.Module, parts: int, message: str) -> None:
    graph, op = captured(module)
    with pytest.raises(TransformError, match=re.escape(message)):
        op_trans(graph, op, AttentionBlocks(parts))
    with pytest.raises(TransformError, match=r"but linear.* is aten\.linear\.default; leave it out"):
        op_trans(graph, next(op for op in graph.forward_ops if "linear" in op.target), AttentionBlocks(2))
