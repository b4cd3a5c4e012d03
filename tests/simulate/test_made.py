"""Calls of operators that were seen before."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import superscaler as ss
from superscaler.models import build
from superscaler.simulate import segments
from superscaler.simulate.recording import Recorder
from superscaler.simulate.repeats import made
from superscaler.simulate.works import Call
from tests.helpers.graphs import graph_of


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


def test_plain_operators_make_what_a_mode_of_fake_tensors_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, strides, dtypes, places and shared storages of all operators that models run without the mode."""
    monkeypatch.setattr(made, "_KNOWN", {})
    monkeypatch.setattr(segments, "_RECORDED", {})
    seen, plain = set(), made.Made._plain

    def compared(self: made.Made, func: Any, args: Any, kwargs: Any) -> Any:
        seen.add(func)
        found = plain(self, func, args, kwargs)
        assert forms(found, args) == forms(func(*args, **kwargs), args), func
        return found

    def forms(tree: Any, args: Any) -> list[object]:
        given = [x.untyped_storage()._cdata for x in made.tensors_of(args)]
        tensors = made.tensors_of(tree)
        shared = [x.untyped_storage()._cdata in given for x in tensors]
        form = [(x.shape, x.stride(), x.dtype, x.fake_device, x.storage_offset()) for x in tensors]  # type: ignore[attr-defined]
        return [type(tree), form, shared]

    def others(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = (x[0].tanh() + torch.zeros_like(x[0]).to(x.dtype)).split([3, 5])
        return first * torch.empty_like(first), second

    others.__dict__.update(draws=[], text=None)
    monkeypatch.setattr(made.Made, "_plain", compared)
    Recorder().segment(others, [((2, 8), "float32")], Call(True, (True, True), (), (), (), (), ()))
    for model in ("gpt2:size=tiny,layers=1", "swin:size=tiny,depths=2,batch=12", "mixtral:size=tiny,layers=1,batch=2"):
        ss.compile(graph_of(model), "tensor_parallel", "a100:1x2").simulate()
    built = build("gpt2:size=tiny,layers=1")
    sgd = torch.optim.SGD(built.module.parameters(), 0.1)
    halves = ss.capture(built.module, built.args, built.kwargs, sgd, precision="bf16", check=False)
    ss.compile(halves, "single", "a100:1x1").simulate()
    assert seen == made._PLAIN
