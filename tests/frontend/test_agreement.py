"""Two steps of the module against what was captured: frozen Python state is an error, rounding is none."""

from __future__ import annotations

import io
import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import CaptureError
from superscaler.frontend import capture as capturing
from superscaler.frontend.checks import agreement
from superscaler.frontend.checks.agreement import _NOISE, _difference, _graph_step, _seeded
from superscaler.models import build
from tests.frontend.examples import Net, gpt2, tokens
from tests.helpers.graphs import step_of
from tests.helpers.sweeps import slow


def captured(between: Callable[[Any, Tensor], Tensor] | nn.Module, **options: Any) -> str:
    torch.manual_seed(0)
    module = between if isinstance(between, nn.Module) else Net(between)
    return step_of(module, torch.randn(6, 8), lr=1e-2, **options).captured.checked


def foreach(m: Any, h: Tensor) -> Tensor:
    """Changes a buffer where neither torch.export nor capture sees that there are no gradients."""
    with torch.no_grad():
        torch._foreach_add_([m.mean], [m.first.weight])
    return h @ m.mean


def reading(between: Callable[[Any, Tensor], Tensor], *first: int) -> nn.Module:
    """Return a module with a file of numbers: nothing shows how far it was read."""
    numbers = (*first, *range(2, 20))
    return Net(between, lines=io.StringIO("".join(f"{number}\n" for number in numbers)))


# State that a copy of the module has, that it shares, that only a later step changes, and that is none of Python's.
FROZEN: dict[str, tuple[Callable[[Any, Tensor], Tensor] | nn.Module, str]] = {
    "iterator": (reading(lambda m, h: h * float(next(m.lines))), "in step 1 .* the loss is"),
    "second step": (reading(lambda m, h: h * float(next(m.lines)), 2), "in step 2 .* the loss is"),
    "time": (lambda m, h: h * (time.perf_counter() % 1), "in step 1 .* the loss is"),
    "gradient": (foreach, r"in step 1 .* the gradient first\.weight\[\d, \d\] is"),
    "buffer": (
        reading(lambda m, h: h + 0 * m.mean.add_(float(next(m.lines))).sum()),
        r"in step 1 .* the buffer mean\[\d, \d\] is",
    ),
}


@pytest.mark.parametrize(("between", "message"), FROZEN.values(), ids=FROZEN)
def test_what_capture_freezes_is_an_error(between: Any, message: str) -> None:
    numbers = r" -?[\d.e+-]+ in the module and -?[\d.e+-]+ in the captured graph\. Likely .*changes between its calls"
    with pytest.raises(CaptureError, match=rf"examples\.py:\d+ \(Net\.forward\) does {message}{numbers}") as raised:
        captured(between)
    assert "\n" not in str(raised.value)


EQUAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "batch norm": lambda m, h: m.norm(h),
    "dropout": lambda m, h: F.dropout2d(F.dropout(h, 0.5)[..., None], 0.3)[..., 0] * torch.rand_like(h),
    "no gradient": lambda m, h: m.norm(h.detach()),
}


@pytest.mark.parametrize("between", EQUAL.values(), ids=EQUAL)
def test_what_is_equal_leaves_everything_as_it_was(between: Callable[[Any, Tensor], Tensor]) -> None:
    module, x = Net(between), torch.randn(6, 8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    draws = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    checked = ss.capture(module, (x,), optimizer=optimizer).captured.checked
    assert checked.startswith("2 steps are those of the module; the largest difference is ")
    assert float(checked.split()[-1]) < 1e-6
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert (random.getstate(), str(np.random.get_state())) == draws[1:]


@pytest.mark.parametrize(("is_routed", "autocast"), [*slow((False, "bf16")), (True, None)], ids=["autocast", "halves"])
def test_rounding_is_no_difference(is_routed: bool, autocast: str | None) -> None:
    module = build("mixtral:size=tiny,layers=1,seq=16,vocab=64").module.bfloat16() if is_routed else gpt2()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    # A region around it keeps what it casts: in the second step, weights of the first.
    with torch.autocast("cpu", enabled=False):
        graph = ss.capture(module, (), tokens(), optimizer=optimizer, autocast=autocast)
    assert graph.captured.checked.startswith("2 steps are those of the module")


def test_a_difference_of_a_few_roundings_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is above the first bound counts against the noise of the graph: its own, and not ten times as much."""
    known = step_of(Net(lambda m, h: m.norm(h).softmax(-1)), torch.randn(6, 8)).captured
    monkeypatch.setitem(agreement._CLOSE, torch.float32, 0.0)
    values = {name: value.clone() for name, value in known.values.items()}
    graph = _seeded(1, lambda: _graph_step(known, values))
    noise = agreement._noise(known, graph, values, 1)
    key = "gradient", "first.weight"
    for times, is_far in ((_NOISE / 2, False), (_NOISE * 2, True)):
        other = graph._replace(tensors={**graph.tensors, key: graph.tensors[key] + times * noise[key]})
        if is_far:
            with pytest.raises(CaptureError, match="the gradient first"):
                _difference(known, graph, other, values, 1)
        else:
            assert _difference(known, graph, other, values, 1) > 0


def plain(m: Any, h: Tensor) -> Tensor:
    return h


def itself() -> nn.Module:
    module = Net(lambda m, h: module.norm(module.first(h)))
    return module


def random_order(m: Any, h: Tensor) -> Tensor:
    torch.rand(3)
    return h * torch.rand_like(h)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net(plain)


SKIPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "generator": (
        lambda: Net(plain, numbers=(x for x in (1.0, 2.0, 3.0))),
        r"it cannot be copied \(TypeError: cannot pickle 'generator' object\)",
    ),
    "itself": (itself, "its copy reads the parameters of the module itself, which a function in it holds"),
    "order": (lambda: Net(random_order), "its random numbers do not come in the order of the captured ones"),
    "meta": (on_meta, r"it has no data \(it was built on the meta device\)"),
    "large": (lambda: Net(plain), r"its [\d,]+ elements and \S+ FLOPs are too many \(above [\d,]+ or 10\)"),
}


@pytest.mark.parametrize(("build", "why"), SKIPPED.values(), ids=SKIPPED)
def test_why_a_module_is_not_compared_is_said(
    build: Callable[[], nn.Module], why: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "large" in request.node.name:
        monkeypatch.setattr(agreement, "MOST_FLOPS", 10)
    module = build()
    before = {name: b.clone() for name, b in module.named_buffers()}
    assert re.match(f"not compared with the module: {why}", captured(module))
    assert all(b.is_meta or torch.equal(b, before[name]) for name, b in module.named_buffers())


def test_what_was_compared_once_is_kept_with_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that nobody compared is compared when it is asked for, and then no more."""
    done: list[str] = []
    monkeypatch.setattr(capturing, "agree", lambda *given: done.append(agreement.agree(*given)) or done[-1])

    def checked(check: bool) -> str:
        torch.manual_seed(0)
        module = Net(plain)
        return capturing.capture(module, (torch.randn(6, 8),), name="agreement", check=check).checked

    assert checked(False) == ""
    assert not done
    assert [checked(True) for _ in range(2)] == [done[0], done[0]]
    assert len(done) == 1


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.rows(ids)), labels)


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        ([0, 1, 2], [0, 1, 99], r"Target 99 is out of bounds \(input labels has 0 to 99\)"),
        ([0, 77, 2], [0, 1, 2], r"index out of range in self \(input ids has 0 to 77\)"),
    ],
)
def test_an_index_out_of_range_in_the_example_is_one_line(ids: list[int], labels: list[int], message: str) -> None:
    with pytest.raises(CaptureError, match=rf"^\S*test_agreement\.py:\d+ does not run .*{message}[^\n]*$"):
        step_of(Labelled(), torch.tensor(ids), torch.tensor(labels))


class Scored(Labelled):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy(self.last(self.rows(ids)), F.one_hot(labels, 4).float())


def test_values_that_an_operator_refuses_are_one_line() -> None:
    """Without data, torch.export sees no probabilities below 0."""
    message = "all elements of input should be between 0 and 1; capture with a batch on which the module runs"
    with pytest.raises(
        CaptureError, match=rf"^\S*test_agreement\.py:\d+ does not run on the example batch: {message}\.$"
    ):
        step_of(Scored(), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]))
