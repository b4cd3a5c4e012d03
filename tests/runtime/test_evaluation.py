"""Evaluation on the weights of training in memory: what the module in eval mode gives after the same steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.errors import InputError
from superscaler.runtime.load import _read_evaluation, load, modules
from superscaler.runtime.step import Evaluation, Step
from superscaler.store.plan_head import EVALUATION, PLAN_FILE, WEIGHTS_FILE
from tests.helpers.ran import on_ranks
from tests.helpers.sweeps import slow


class Normed(nn.Module):
    """Batch norm and dropout, which differ between the modes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = self.last(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.1, self.training))
        return {"loss": nn.functional.cross_entropy(scores, y), "scores": scores}


FOUR = ["data_parallel", "zero:stage=3", "tensor_parallel", "pipeline_1f1b:microbatches=1"]
# The first has whole weights on each rank.
OTHERS = ["data_parallel", "zero:stage=1", "zero:stage=2", "fsdp", "hybrid:dp=2,tp=1", "gpipe:microbatches=1"]


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    pairs = [(torch.randn(8, 8, generator=draw), torch.randint(4, (8,), generator=draw)) for _ in range(2)]
    return [{"x": x, "y": y} for x, y in pairs]


def right(outputs: Any, batch: Any) -> Tensor:
    return (outputs["scores"].argmax(1) == batch["y"]).float().mean()


@pytest.mark.parametrize("plans", [FOUR, *slow((OTHERS,))])
def test_every_plan_evaluates_what_it_has_trained(plans: list[str]) -> None:
    """Plans draw the same numbers, so that all train the same weights; those of the first are put into a module."""
    torch.manual_seed(0)
    module, batch = Normed(), batches()[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trained = ss.capture(module.train(), (), batch, optimizer=optimizer, check=False)
    frozen = ss.capture(module.eval(), (), batch, optimizer=None, check=False)
    expected: Any = None
    for name in plans:
        other = ss.compile(frozen, name, "local:2").compiled
        values = initial_values(other.graph.model, other.graph.captured.values)
        saved = json.loads(json.dumps(describe(other))), modules(other.emitted.files)

        def work(step: Step) -> Any:
            with pytest.raises(InputError, match="saved without one of evaluation"):
                step.evaluate(batches())
            step.evaluation = lambda: Evaluation(*saved, {n: v.clone() for n, v in values.items()})  # noqa: B023
            before = step.evaluate(batches())
            for _ in range(2):
                step(batch)
            moved = step.bytes_moved
            found = step.evaluate(batches()), step.evaluate(batches(), {"right": right}), step.infer(batches()[1])
            assert step.bytes_moved == moved
            state = {w["tensor"]: step.state.weights[w["name"]].detach().clone() for w in step.state.tables["weights"]}
            return before, *found, state

        results = on_ranks(ss.compile(trained, name, "local:2"), work)
        if expected is None:
            reference = Normed().eval().requires_grad_(False)
            reference.load_state_dict(results[0][-1])
            outputs = [reference(**one) for one in batches()]
            expected = (
                {"loss": sum(float(o["loss"]) for o in outputs) / 2},
                {"right": sum(float(right(o, b)) for o, b in zip(outputs, batches(), strict=True)) / 2},
                outputs[1]["scores"],
            )
        for before, mean, metric, made, _ in results:
            assert before["loss"] != pytest.approx(mean["loss"], rel=1e-3)
            assert (mean, metric) == (pytest.approx(expected[0], rel=1e-5), pytest.approx(expected[1]))
            torch.testing.assert_close(made["scores"], expected[2])


@pytest.mark.parametrize("plan", ["data_parallel", "recompute:2,what=full", "pipeline_1f1b:microbatches=2"])
def test_a_saved_plan_evaluates_the_module_in_eval_mode(plan: str, tmp_path: Path) -> None:
    """One call writes both plans; the weights lie on the disk once."""
    torch.manual_seed(0)
    module, batch = Small(), batches()[0]
    graph = ss.capture(module, (), batch, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), check=False)
    assert ss.compile(graph, plan, "local:2").save(tmp_path)
    assert all(part.training for part in module.modules())
    assert not ss.compile(graph, plan, "local:2").save(tmp_path)
    own = tmp_path / EVALUATION
    assert (own / WEIGHTS_FILE).samefile(tmp_path / WEIGHTS_FILE)

    def work(step: Step) -> Any:
        step.evaluation = lambda: _read_evaluation(own, step.rank, manifest=True)
        step(batch)
        step(batch)
        state = {w["tensor"]: step.state.weights[w["name"]].detach().clone() for w in step.state.tables["weights"]}
        return step.evaluate(batches())["loss"], step.infer(batches()[1])["scores"], state

    results = on_ranks(ss.compile(graph, plan, "local:2"), work)
    reference = Small().eval().requires_grad_(False)
    reference.load_state_dict({name: x for _, _, state in results for name, x in state.items()})
    outputs = [reference(**one) for one in batches()]
    for loss, scores, _ in results:
        assert loss == pytest.approx(sum(float(o["loss"]) for o in outputs) / 2, rel=1e-6)
        torch.testing.assert_close(scores, outputs[1]["scores"])


class Small(nn.Module):
    """Dropout of half of the channels, which eval mode leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = self.last(nn.functional.dropout(self.first(x).relu(), 0.5, self.training))
        return {"loss": nn.functional.cross_entropy(scores, y), "scores": scores}


class Trained(Small):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if not self.training:
            raise NotImplementedError("beam search is not written yet")
        return super().forward(x, y)


def test_a_module_that_eval_mode_refuses_trains_and_says_why_it_is_not_evaluated(tmp_path: Path) -> None:
    module, batch = Trained(), batches()[0]
    graph = ss.capture(module, (), batch, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), check=False)
    plan = ss.compile(graph, "single", "local:1")
    assert plan.save(tmp_path)
    step = load(tmp_path)
    assert float(step(batch)) > 0
    with pytest.raises(InputError, match=r"no plan of evaluation: .*beam search is not written yet"):
        step.evaluate(batches())
    plan.save(tmp_path, evaluation=False)
    assert not (tmp_path / EVALUATION).exists()
    with pytest.raises(InputError, match="saved without one of evaluation"):
        load(tmp_path).evaluate(batches())
    plan.save(tmp_path, evaluation=ss.compile(ss.capture(Small().eval(), (), batch, None), "single", "local:1"))
    assert (tmp_path / EVALUATION / PLAN_FILE).is_file()
    assert load(tmp_path).evaluate(batches())["loss"] > 0
