"""Parts of equal sizes share a function where what they compute does not depend on where they are."""

from __future__ import annotations

import pytest

import superscaler as ss
from superscaler.emit.segments import _Writer
from superscaler.ir.program import Function
from superscaler.materialize.functions import Functions
from tests.graphs import graph_of


@ss.sprogram
def rows(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Cut the sequence unevenly where an op has it, else the vocabulary, else the batch."""
    for op in graph.ops:
        factor = next((f for f in ("sequence", "vocabulary", "batch") if op.find(f) is not None), "batch")
        size = graph.factors[factor].size
        algorithm = ss.Split(factor, sizes=(size // 4, size // 2, size - size // 4 - size // 2))
        for part, device in zip(ss.op_trans(graph, op, algorithm), cluster.devices, strict=True):
            ss.op_assign(graph, part, device)


@pytest.mark.parametrize(
    ("spec", "plan", "devices"),
    [
        ("gpt2:size=tiny,dropout=0.1", "data_parallel", 4),
        ("gpt2:size=tiny", rows, 3),
        ("gpt2:size=tiny,dropout=0.1", rows, 3),
        ("mixtral:size=tiny", "tensor_parallel", 4),
        ("swin:size=tiny", "data_parallel", 2),
        ("llama:size=tiny", "pipeline_1f1b:stages=2,microbatches=4", 2),
    ],
)
def test_parts_that_share_a_function_are_written_alike(spec: str, plan: object, devices: int) -> None:
    compiled = ss.compile(graph_of(spec, "SGD"), plan, ss.Cluster.local(devices)).compiled  # type: ignore[arg-type]
    program, schedule = compiled.program, compiled.schedule
    functions = Functions(schedule.edges)
    texts: dict[tuple[int, bytes], set[str]] = {}
    parts = 0
    for segment in schedule.segments:
        forms = functions.forms(segment)
        for at in range(len(segment.keys)):
            shared = functions.made[functions.number(segment, at)]
            boxes = []
            for op in segment.ops:
                held, row = schedule.edges.rows[op.name], segment.row_of[op.name][at]
                boxes.append(tuple(zip(held.lo[row].tolist(), held.hi[row].tolist(), strict=True)))
            own = Function(shared.ops, tuple(boxes), shared.inputs, shared.input_of, shared.outputs, shared.module)
            texts.setdefault((segment.number, forms[at].tobytes()), set()).add(_Writer(program, own).write())
            parts += 1
    assert {len(found) for found in texts.values()} == {1}
    assert len(texts) < parts
