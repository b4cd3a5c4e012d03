"""Plans that read weights of updates ago (PipeDream): the recurrence on one device, told as what it is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import superscaler as ss
from superscaler.cli.main import main
from superscaler.errors import TransformError
from superscaler.report.block_summary import summary
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal, trained
from tests.helpers.rewrites import stale
from tests.helpers.sweeps import few

PLANS = ["single", "data_parallel", "tensor_parallel", "pipeline_1f1b:microbatches=2", "hybrid:dp=2,tp=2,pp=2"]


ROWS = [*product(PLANS, [False]), ("single", True), (PLANS[-1], True)]


@pytest.mark.parametrize(("plan", "again"), few(ROWS, 0, 5))
def test_stale_plans_equal_the_recurrence_on_one_device(plan: str, again: bool) -> None:
    world = {"single": 1, PLANS[-1]: 8}.get(plan, 2)
    ran = equal(graph_of("gpt2:size=tiny", "SGD"), stale(plan, again), world)
    assert ran.found["stale"] == [1]
    assert "28 weights are stale by 1" in summary(ran.compiled)


def recurrence(graph: ss.Graph, ages: Mapping[str, int], steps: int) -> list[float]:
    """Return the losses of steps of SGD whose gradients are at weights that are each some updates old."""
    module, batch = graph.captured.call.module, tuple(graph.captured.batch.values())
    history: list[dict[str, Tensor]] = [{t.name: graph.captured.values[t.name] for t in graph.model.parameters()}]
    losses: list[float] = []
    for step in range(steps):
        leaves = {n: history[max(step - age, 0)][n].clone().requires_grad_() for n, age in ages.items()}
        loss = torch.func.functional_call(module, leaves, batch)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        losses.append(float(loss.detach()))
        history.append({n: history[-1][n] - 0.5 * g for n, g in zip(leaves, gradients, strict=True)})
    return losses


def test_the_second_step_reads_the_weights_of_the_first() -> None:
    graph = graph_of("mlp", "SGD", 0.5)
    losses = recurrence(graph, {t.name: 1 for t in graph.model.parameters()}, 4)
    ((found, _),) = trained(ss.compile(graph, stale("single"), "local:1"), 4)
    assert found == pytest.approx(losses, rel=1e-6)
    assert found[0] == found[1] != found[2]


def test_each_version_of_a_weight_may_be_copied_on_one_device() -> None:
    def copied(graph: ss.Graph, cluster: ss.Cluster) -> None:
        ss.op_trans(graph, graph.forward_ops, ss.Stale(2))
        ss.op_trans(graph, [op for op in graph.ops if not op.is_forward], ss.Replicate(2))
        ss.op_assign(graph, graph.ops, 0)

    graph = graph_of("mlp", "SGD", 0.5)
    plan = equal(graph, copied, 1).compiled
    losses = recurrence(graph, {t.name: 2 for t in graph.model.parameters()}, 5)
    assert trained(plan, 5)[0][0] == pytest.approx(losses, rel=1e-6)


def test_stages_read_weights_of_as_many_updates_ago_as_there_are_stages_behind_them() -> None:
    graph = graph_of("mlp:layers=3,batch=4", "SGD", 0.5)
    plan = equal(graph, "pipedream:microbatches=2", 3)
    ages = plan.graph.model.ages
    assert sorted(set(ages.values())) == plan.found["stale"] == [0, 1, 2]
    assert trained(plan.compiled, 6)[0][0] == pytest.approx(recurrence(graph, ages, 6), rel=1e-6)


def test_a_weight_of_several_stages_is_as_old_as_the_first_of_them_reads_it() -> None:
    ages = equal(graph_of("gpt2:size=tiny", "SGD"), "pipedream:microbatches=4").graph.model.ages
    assert (ages["transformer.wte.weight"], ages["transformer.ln_f.weight"]) == (1, 0)


def test_a_resumed_plan_goes_on_with_all_its_versions(tmp_path: Path) -> None:
    graph = graph_of("mlp", "SGD", 0.5)
    batch = graph.captured.batch

    def third(graph: ss.Graph, cluster: ss.Cluster) -> None:
        ss.op_trans(graph, graph.forward_ops, ss.Stale(3))
        ss.op_assign(graph, graph.ops, 0)

    ss.compile(graph, third, "local:1").save(tmp_path / "plan", evaluation=False)
    first, second = (ss.load(tmp_path / "plan") for _ in range(2))
    for _ in range(4):
        first(batch)
    first.save(tmp_path / "saved")
    second.restore(tmp_path / "saved")
    losses, again = ([float(step(batch)) for _ in range(5)] for step in (first, second))
    assert losses == again
    assert len(set(losses)) == 5


@pytest.mark.parametrize("updates", [0, -1, 10**7])
def test_no_number_of_updates_is_refused(updates: Any) -> None:
    graph = graph_of("mlp", "SGD", 0.5)
    with pytest.raises(
        TransformError,
        match=rf"test_stale.py:\d+: Stale\({updates}\) (is no number of updates; give 1|keeps .* at most 1024)",
    ):
        ss.op_trans(graph, graph.forward_ops, ss.Stale(updates))


def test_a_stale_plan_resumes_from_and_leaves_checkpoints_of_others(tmp_path: Path) -> None:
    graph = graph_of("mlp", "SGD", 0.5)
    batch = graph.captured.batch
    plain = ss.compile(graph, "single", "local:1")
    older = ss.compile(graph, stale("single"), "local:1")
    for name, plan in (("plain", plain), ("stale", older)):
        plan.save(tmp_path / name, evaluation=False)
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
    with pytest.raises(TransformError, match=r"test_stale.py:\d+: Stale\(1\): none of 4 ops \(.*\) reads the newest"):
        ss.op_trans(graph, without, ss.Stale())
