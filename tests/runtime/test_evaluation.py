"""Evaluation on the weights of training in memory: what the module in eval mode gives after the same steps."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.errors import InputError
from superscaler.runtime.load import modules
from superscaler.runtime.step import Step
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
    trained = ss.capture(module.train(), (), batch, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    frozen = ss.capture(module.eval(), (), batch, optimizer=None)
    expected: Any = None
    for name in plans:
        other = ss.compile(frozen, name, "local:2").compiled
        values = initial_values(other.graph.model, other.graph.captured.values)
        saved = json.loads(json.dumps(describe(other))), modules(other.emitted.files)

        def work(step: Step) -> Any:
            with pytest.raises(InputError, match="saved without one of evaluation"):
                step.evaluate(batches())
            step.evaluation = lambda: (*saved, {n: v.clone() for n, v in values.items()})  # noqa: B023
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
