"""What is written for a small model, word for word, and for parts that share a function. After a wanted change:
pytest tests/emit --update-golden.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import superscaler as ss
from superscaler.emit.segments import _source, _Writer
from superscaler.ir.program import Function
from superscaler.materialize.functions import Functions
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured
from tests.helpers.sweeps import slow

HERE = Path(__file__).parent


@pytest.mark.parametrize("spec", ["tensor_parallel", "pipeline_1f1b:stages=2,microbatches=2"])
def test_emitted_code(spec: str, request: pytest.FixtureRequest) -> None:
    plan, name = ss.compile(graph_of("mlp", "SGD"), spec, "local:2"), spec.partition("_1f1b")[0]
    texts = {**plan.compiled.emitted.files, "summary.txt": plan.summary() + "\n"}
    for file, text in texts.items():
        path = HERE / name / f"{file}.golden"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.read_text() == text, path


@pytest.mark.parametrize(
    ("plan", "devices", "most"),
    [
        ("data_parallel", 2, 30),
        *slow(("tensor_parallel", 2, 80), ("zero:stage=3", 2, 65)),
        *slow(("sequence_parallel", 2, 102), ("recompute", 1, 40), ("pipeline_1f1b:microbatches=16", 2, 60)),
    ],
)
def test_a_program_is_as_long_for_more_layers(plan: str, devices: int, most: int) -> None:
    def lines(layers: int) -> list[int]:
        graph = graph_of(f"gpt2:size=tiny,layers={layers},batch=16")
        files = ss.compile(graph, plan, ss.Cluster.local(devices)).compiled.emitted.files
        assert len(files["segments.py"].splitlines()) <= 200
        return [len(text.splitlines()) for text in files.values()]

    few, many = (8, 10) if plan.startswith("pipeline") else (4, 6)
    found = lines(few)
    assert found == lines(many)
    assert sorted(found)[-2] <= most


@pytest.mark.parametrize(("plan", "devices", "few"), [("pipeline_1f1b", 2, 6), ("zb_h1", 2, 8), ("zero:stage=1", 2, 6)])
def test_a_program_is_as_long_for_more_microbatches(plan: str, devices: int, few: int) -> None:
    graph = graph_of("mlp:layers=4,hidden=8,inputs=4,classes=4,batch=192", "SGD")

    def lines(microbatches: int) -> list[int]:
        spec = f"{plan}{',' if ':' in plan else ':'}microbatches={microbatches}"
        files = ss.compile(graph, spec, ss.Cluster.local(devices)).compiled.emitted.files
        assert all("    for m in range(" in text for name, text in files.items() if name != "segments.py")
        return [len(text.splitlines()) for text in files.values()]

    assert lines(few) == lines(32)


def test_the_program_of_the_first_stage_is_as_long_for_more_stages() -> None:
    def lines(stages: int) -> int:
        graph = graph_of(f"mlp:layers={stages},hidden=8,inputs=4,classes=4,batch=64")
        files = ss.compile(graph, "pipeline_1f1b:microbatches=32", ss.Cluster.local(stages)).compiled.emitted.files
        return len(files["program_0.py"].splitlines())

    assert lines(4) == lines(8) <= 40


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
        ("gpt2:size=tiny,dropout=0.1", rows, 3),
        *slow(("mixtral:size=tiny", "tensor_parallel", 4)),
        *slow(("llama:size=tiny", "pipeline_1f1b:stages=2,microbatches=4", 2)),
    ],
)
def test_parts_that_share_a_function_are_written_alike(spec: str, plan: object, devices: int) -> None:
    """What parts of equal sizes compute does not depend on where they are."""
    compiled = ss.compile(graph_of(spec), plan, ss.Cluster.local(devices)).compiled  # type: ignore[arg-type]
    program, schedule = compiled.program, compiled.schedule
    functions = Functions(schedule.flow)
    texts: dict[tuple[int, int], set[str]] = {}
    parts = 0
    for segment in schedule.segments:
        forms = functions.of(segment).forms
        for at in range(len(segment.keys)):
            shared = functions.made[functions.number(segment, at)]
            boxes = []
            for op in segment.ops:
                held, row = schedule.flow.rows[op.name], segment.row_of[op.name][at]
                boxes.append(tuple(zip(held.lo[row].tolist(), held.hi[row].tolist(), strict=True)))
            own = Function(shared.ops, tuple(boxes), shared.inputs, shared.input_of, shared.outputs, shared.module)
            text = _source(_Writer(program, own, frozenset()).write())
            texts.setdefault((segment.number, forms[at]), set()).add(text)
            parts += 1
    assert {len(found) for found in texts.values()} == {1}
    assert len(texts) < parts


def test_only_what_is_a_bias_is_added_by_the_product() -> None:
    def make() -> tuple[nn.Module, torch.Tensor]:
        def forward(m: Around, x: torch.Tensor) -> torch.Tensor:
            # Of another dtype, of integers, and longer than the rows of the product.
            h = F.linear(x.bfloat16(), m.narrow) + m.row
            h = F.linear(h, m.own) + torch.arange(6)
            return (F.linear(h, m.own[:1]) + m.row + F.linear(h, m.own) + m.row).square().mean()

        own = {name: nn.Parameter(torch.randn(6, 6)) for name in ("narrow", "own")}
        own["narrow"].data = own["narrow"].data.bfloat16()
        return Around(forward, row=nn.Parameter(torch.randn(6)), **own), torch.randn(4, 6)

    plan = ss.compile(captured(make), "data_parallel", "local:2")
    assert plan.verify()["equal"]
    assert plan.compiled.emitted.files["segments.py"].count("F.linear(") == 4
