"""Calls of operators that were seen before."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from superscaler.simulate.recording import Recorder
from superscaler.simulate.repeats import made
from superscaler.simulate.works import Call


def run(x: torch.Tensor, weight: torch.Tensor, parts: object = ()) -> tuple[torch.Tensor, ...]:
    """A function with products, views, a result in a tensor that exists, and several results."""
    y = torch.nn.functional.layer_norm(x @ weight, [weight.shape[1]])
    a, b = y.chunk(2, dim=-1)
    return (a.mul(2.0).add_(b), y.transpose(0, 1).contiguous().softmax(-1))


run.__dict__.update(draws=[], weights=[1], text=None)


def test_equal_calls_are_computed_once_and_make_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, memory and gradients of a segment are those of the first time; other shapes are computed anew."""
    monkeypatch.setattr(made, "_KNOWN", {})
    count, plain = [0], FakeTensorMode.dispatch

    def counted(*args: object, **kwargs: object) -> object:
        count[0] += 1
        return plain(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    call, found, counts = Call(True, (True, True), (), (), (), (), ()), [], []
    for rows in (8, 8, 16):
        count[0] = 0
        found.append(Recorder(True).segment(run, [((rows, 8), "float32"), ((8, 8), "float32")], call))
        counts.append(count[0])
    assert found[0] == found[1] != found[2]
    assert found[0].forward.kernels
    assert counts[1] < 0.7 * counts[0]
    assert counts[2] > counts[1]
