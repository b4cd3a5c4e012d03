"""Metrics of a step: seconds, rates and memory, beside a clock and formulas that the step does not know."""

from __future__ import annotations

import pydoc
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import InputError
from superscaler.train.log import Reporter


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).square().mean()


def test_a_step_tells_its_seconds_rates_and_memory(tmp_path: Path) -> None:
    module = Slow()
    graph = ss.capture(module, (torch.randn(16, 32),), optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    plan = ss.compile(graph, "single", "a100:1x1")
    plan.save(tmp_path, evaluation=False)
    step = ss.load(tmp_path)
    with pytest.raises(InputError, match="this step has not run yet"):
        step.metrics()
    whole = step.form.function
    step.form.function = lambda rank: (time.sleep(0.2), whole(rank))[1]
    step({"x": torch.randn(16, 32)}, clip=1e-3)
    begun = time.perf_counter()
    step({"x": torch.randn(16, 32)}, clip=1e-3)
    took = time.perf_counter() - begun
    found = step.metrics()
    assert 0.2 <= found["seconds"] <= took
    assert found["samples"] == 16
    assert found["samples_per_second"] == pytest.approx(16 / found["seconds"])
    # A product of (16, k) and (k, n) is 2 * 16 * k * n operations, and its backward two of the size.
    assert found["tflops"] == pytest.approx(3 * 2 * 16 * (32 * 64 + 64 * 4) / found["seconds"] / 1e12)
    assert found["mfu"] == pytest.approx(found["tflops"] / 19.5)
    assert found["predicted_memory_bytes"] == plan.peak_bytes > 0
    assert 1e7 < found["memory_bytes"] <= found["peak_memory_bytes"]
    assert found["gradient_norm"] == step.last_norm > 1e-3


def test_a_step_of_an_unknown_cluster_has_no_share_of_a_peak(tmp_path: Path) -> None:
    module = Slow()
    graph = ss.capture(module, (torch.randn(16, 32),), optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    ss.compile(graph, "single", "local:1").save(tmp_path, evaluation=False)
    step = ss.load(tmp_path)
    step({"x": torch.randn(16, 32)})
    found = step.metrics()
    assert (found["mfu"], found["gradient_norm"]) == (None, None)
    assert found["tflops"] > 0
    text = pydoc.plain(pydoc.render_doc(step))
    assert "`clip`: the largest global norm of the" in text


@pytest.mark.parametrize(("tflops", "is_shown"), [(8.7e-5, False), (41.0, True)])
def test_operations_that_say_nothing_are_not_printed(
    tflops: float, is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"seconds": 0.1, "tokens": 8, "tokens_per_second": 80.0, "peak_memory_bytes": 1e9, "gradient_norm": None}
    Reporter(1).add(0, 2.0, {**found, "tflops": tflops, "mfu": None}, 0.1)
    err = capsys.readouterr().err
    assert "80 tokens/s" in err
    assert ("TFLOPS" in err) == is_shown
