"""Segments run as torch.compile compiles them: losses and weights are those of plans without it, but for rounding."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import InputError, RuntimeFailure
from superscaler.runtime.load import CompiledSegments, modules
from superscaler.runtime.step import Step
from tests.commands import run
from tests.graphs import graph_of, step_of
from tests.ran import as_in, exact, on_ranks

# Plans of GPT-2 and their devices: the ways in which a tape is kept, dropped, moved, or read in parts.
PLANS = {
    "single": 1, "recompute": 1, "co_shard:parts=2": 1, "tensor_parallel": 2, "zero:stage=3,keep=4": 2,
    "pipeline_1f1b:2,microbatches=4 x recompute": 2, "pipeline_1f1b:microbatches=8,offload=2": 4,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.tanh(self.up(x)))).square().sum()


class Counted:
    """A backend of torch.compile that runs graphs as torch traced them, and counts them."""

    graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        return lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Counted:
    torch._dynamo.reset()
    counted = Counted()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    return counted


def trained(graph: ss.Graph, plan: str, devices: int, is_compiled: bool) -> list[Any]:
    """Return the losses and the weights of each rank after three steps in float64."""
    compiled = exact(graph, plan, devices)
    batch = as_in(compiled, graph.captured.batch)

    def work(step: Step) -> Any:
        step.state.compiled = CompiledSegments() if is_compiled else None
        losses = [step(batch).detach() for _ in range(3)]
        return losses, {n: w.detach().clone() for n, w in step.state.weights.items()}

    return on_ranks(compiled, work)


def test_segments_are_compiled_once_and_train_as_before(backend: Counted) -> None:
    graph = step_of(Net(), torch.rand(6, 4))
    expected = trained(graph, "single", 1, is_compiled=False)
    assert backend.graphs == 0
    found = trained(graph, "single", 1, is_compiled=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # Before and behind the random numbers: later steps compile no more.
    assert backend.graphs == 2


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_gpt2_trains_as_before(plan: str, backend: Counted) -> None:
    graph = graph_of("gpt2:size=tiny,layers=4,batch=16,dropout=0.1")
    expected = trained(graph, plan, PLANS[plan], is_compiled=False)
    torch.testing.assert_close(trained(graph, plan, PLANS[plan], is_compiled=True), expected, rtol=1e-9, atol=1e-12)
    assert backend.graphs


def test_the_origin_of_a_loss_that_is_not_finite_is_named(backend: Counted) -> None:
    def work(step: Step) -> None:
        step.state.compiled = CompiledSegments()
        with pytest.raises(RuntimeFailure, match=r"comes from input x on rank 0, which has 1 of 24 elements"):
            step({"x": torch.rand(6, 4).put(torch.tensor(5), torch.tensor(torch.nan))}, check_finite=True)
        assert step.state.compiled is not None

    on_ranks(ss.compile(step_of(Net(), torch.rand(6, 4)), "single", "local:1"), work)
    assert backend.graphs


def test_split_backwards_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superscaler.comm.distributed.world_size", lambda: 2)
    graph = step_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Net()), torch.rand(4, 4))
    ss.compile(graph, "zb_h1:2,microbatches=2", "local:2").save(tmp_path / "plan")
    with pytest.raises(InputError, match=r"runs backwards in two halves, which torch\.compile makes one; leave"):
        ss.load(tmp_path / "plan", torch_compile=True)


@pytest.mark.dist
def test_the_option_of_training_reaches_the_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    given = "mlp:layers=1,hidden=4", "--plan", "zb_h1:2,microbatches=2", "--cluster", "local:2", "--steps", "1"
    assert run("train", *given, "--torch-compile") == 2
    assert "runs backwards in two halves, which torch.compile makes one" in capfd.readouterr().err


def test_what_torch_cannot_compile_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        raise OSError("no compiler\nis there")

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fail))
    with pytest.raises(
        RuntimeFailure, match=r"torch.compile fails on segment_1 of segments.py \(OSError: no compiler\); leave"
    ) as caught:
        trained(step_of(Net(), torch.rand(6, 4)), "single", 1, is_compiled=True)
    assert "\n" not in str(caught.value)


def test_code_has_its_source_where_its_folder_is_gone(tmp_path: Path) -> None:
    """Without it torch 2.11 takes all segments for one function, and stops to compile after eight."""
    text = "def first(x):\n    return (x,)\n"
    made = modules({"segments.py": text}, f"{tmp_path}/gone/")["segments"]
    assert inspect.getsource(made.first) == text
