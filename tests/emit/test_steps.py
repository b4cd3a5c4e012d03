"""What is written for a small model, word for word. After a wanted change: pytest tests/emit --update-golden."""

from __future__ import annotations

from pathlib import Path

import pytest

from superscaler.plan import Plan, compile
from tests.graphs import graph_of

HERE = Path(__file__).parent


def plan_of(spec: str, cluster: str) -> Plan:
    return compile(graph_of("mlp", "SGD"), spec, cluster)


@pytest.mark.parametrize(
    ("name", "spec", "cluster"),
    [
        ("tensor_parallel", "tensor_parallel", "local:2"),
        ("pipeline", "pipeline_1f1b:stages=2,microbatches=2", "local:2"),
    ],
)
def test_emitted_code(name: str, spec: str, cluster: str, request: pytest.FixtureRequest) -> None:
    plan = plan_of(spec, cluster)
    texts = {**plan.compiled.emitted.files, "summary.txt": plan.summary() + "\n"}
    for file, text in texts.items():
        path = HERE / name / f"{file}.golden"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.read_text() == text, path
