"""Plans that read weights one step stale (PipeDream-2BW): the recurrence on one device, told as what it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import superscaler as ss
from superscaler.artifact import initial_values
from superscaler.cli.main import main
from superscaler.errors import TransformError
from superscaler.plan import Plan
from superscaler.plans import resolve
from superscaler.report.account import summary
from superscaler.runtime.step import Step
from superscaler.verify.locate import on_threads
from tests.graphs import graph_of

SProgram = Callable[[ss.Graph, ss.Cluster], Any]


def stale(plan: str, again: bool = False) -> SProgram:
    def sprogram(graph: ss.Graph, cluster: ss.Cluster) -> None:
        ss.op_trans(graph, graph.forward_ops, ss.Stale())
        for block in graph.blocks if again else ():
            ss.op_trans(graph, block.ops, ss.Recompute())
        resolve(plan)(graph, cluster)

    return sprogram


PLANS = ["single", "data_parallel", "tensor_parallel", "pipeline_1f1b:microbatches=2", "hybrid:dp=2,tp=2,pp=2"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("again", [False, True])
def test_stale_plans_equal_the_recurrence_on_one_device(plan: str, again: bool) -> None:
    world = {"single": 1, PLANS[-1]: 8}.get(plan, 2)
    compiled = ss.compile(graph_of("gpt2:size=tiny", "SGD", 0.5), stale(plan, again), f"local:{world}")
    found = compiled.verify()
    assert found["equal"], found["first_difference"]
    assert found["stale"] == 1
    assert "28 weights are read one step stale" in summary(compiled.compiled)


def trained(plan: Plan) -> list[float]:
    captured = plan.compiled.graph.captured
    values = initial_values(plan.compiled.graph.model, captured.values)

    def train(step: Step) -> list[float]:
        return [float(step(captured.batch)) for _ in range(4)]

    found: list[float] = on_threads(plan.compiled, values, train, 60.0)[0]
    return found


def test_the_second_step_reads_the_weights_of_the_first() -> None:
    graph = graph_of("mlp", "SGD", 0.5)
    weights = {t.name: graph.captured.values[t.name] for t in graph.model.parameters()}
    newest: dict[str, Tensor] = {name: w.clone() for name, w in weights.items()}
    older, losses = weights, list[float]()
    module = graph.captured.call.module
    for _ in range(4):
        leaves = {name: w.clone().requires_grad_() for name, w in older.items()}
        loss = torch.func.functional_call(module, leaves, tuple(graph.captured.batch.values()))
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        losses.append(float(loss.detach()))
        older = newest
        newest = {name: w - 0.5 * g for (name, w), g in zip(newest.items(), gradients, strict=True)}
    found = trained(ss.compile(graph, stale("single"), "local:1"))
    assert found == pytest.approx(losses, rel=1e-6)
    assert found[0] == found[1] != found[2]


def test_a_stale_plan_resumes_from_and_leaves_checkpoints_of_others(tmp_path: Path) -> None:
    graph = graph_of("mlp", "SGD", 0.5)
    batch = graph.captured.batch
    plain = ss.compile(graph, "single", "local:1")
    older = ss.compile(graph, stale("single"), "local:1")
    for name, plan in (("plain", plain), ("stale", older)):
        plan.save(tmp_path / name)
    first, second = (ss.load(tmp_path / name) for name in ("plain", "stale"))
    first(batch)
    first.save(tmp_path / "a")
    second.restore(tmp_path / "a")
    assert float(second(batch)) == float(first(batch))
    second.save(tmp_path / "b")
    first.restore(tmp_path / "b")
    module = graph.captured.call.module
    assert ss.load_weights(module, tmp_path / "b") == []
    assert all(torch.equal(w, first.state.weights[name.replace(".", "_")]) for name, w in module.named_parameters())


def test_the_command_says_stale_and_never_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.py"
    plan.write_text(
        "import superscaler as ss\n\n\n@ss.sprogram\ndef older(graph, cluster):\n"
        "    ss.op_trans(graph, graph.forward_ops, ss.Stale())\n    ss.op_assign(graph, graph.ops, 0)\n"
    )
    with pytest.raises(SystemExit, match="0"):
        main(["verify", "mlp", "--plan", f"{plan}:older", "--cluster", "local:1"])
    told = capsys.readouterr().out
    assert told.startswith("stale by 1")
    assert "equal" not in told.splitlines()[0]


def test_ops_without_trained_weights_are_refused() -> None:
    graph = graph_of("mlp", "SGD", 0.5)
    weights = {t.name for t in graph.model.parameters()}
    without = [op for op in graph.forward_ops if weights.isdisjoint(o.tensor for o in op.inputs)]
    with pytest.raises(TransformError, match=r"test_stale.py:\d+: Stale needs ops that read"):
        ss.op_trans(graph, without, ss.Stale())
