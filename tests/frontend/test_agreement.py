"""Two steps of the module against what was captured: frozen Python state is an error, rounding is none."""

from __future__ import annotations

import contextvars
import itertools
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
from superscaler.frontend import agreement
from superscaler.frontend import capture as capturing
from superscaler.frontend.agreement import _NOISE, _difference, _graph_step, _seeded
from tests.frontend.examples import gpt2, llama, tokens

CONTEXT = contextvars.ContextVar("calls", default=0)
NUMBERS = random.Random(0)


class Net(nn.Module):
    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(8, 8), nn.Linear(8, 1), nn.BatchNorm1d(8)
        self.between = between
        self.counter = itertools.count(1)
        self.late = itertools.chain([1, 1], itertools.repeat(2))
        self.register_buffer("mean", torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x))).pow(2).mean()


def captured(between: Callable[[Any, Tensor], Tensor] | nn.Module, **options: Any) -> str:
    torch.manual_seed(0)
    module = between if isinstance(between, nn.Module) else Net(between)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return ss.capture(module, (torch.randn(6, 8),), optimizer=optimizer, **options).captured.checked


def default(m: Any, h: Tensor, calls: list[int] = [0]) -> Tensor:  # noqa: B006
    calls[0] += 1
    return h * calls[0]


def closure() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def between(m: Any, h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return h * calls

    return between


def context(m: Any, h: Tensor) -> Tensor:
    CONTEXT.set(CONTEXT.get() + 1)
    return h * CONTEXT.get()


def foreach(m: Any, h: Tensor) -> Tensor:
    """Changes a buffer where neither torch.export nor capture sees that there are no gradients."""
    with torch.no_grad():
        torch._foreach_add_([m.mean], [m.first.weight])
    return h @ m.mean


FROZEN: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "iterator": (lambda m, h: h * next(m.counter), "in step 1 .* the loss is"),
    "second step": (lambda m, h: h * next(m.late), "in step 2 .* the loss is"),
    "default": (default, "in step 1 .* the loss is"),
    "closure": (closure(), "in step 1 .* the loss is"),
    "context": (context, "in step 1 .* the loss is"),
    "time": (lambda m, h: h * (time.perf_counter() % 1), "in step 1 .* the loss is"),
    "random": (lambda m, h: h * NUMBERS.random(), "in step 1 .* the loss is"),
    "gradient": (foreach, r"in step 1 .* the gradient first\.weight\[\d, \d\] is"),
    "buffer": (lambda m, h: h + 0 * m.mean.add_(next(m.counter)).sum(), r"in step 1 .* the buffer mean\[\d, \d\] is"),
}


@pytest.mark.parametrize(("between", "message"), FROZEN.values(), ids=FROZEN)
def test_what_capture_freezes_is_an_error(between: Callable[[Any, Tensor], Tensor], message: str) -> None:
    numbers = r" -?[\d.e+-]+ in the module and -?[\d.e+-]+ in the captured graph\. Likely .*changes between its calls"
    with pytest.raises(
        CaptureError, match=rf"test_agreement\.py:\d+ \(Net\.forward\) does {message}{numbers}"
    ) as raised:
        captured(between)
    assert "\n" not in str(raised.value)
    assert captured(between, check=False) == ""


EQUAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "batch norm": lambda m, h: m.norm(h),
    "dropout": lambda m, h: F.dropout2d(F.dropout(h, 0.5)[..., None], 0.3)[..., 0] * torch.rand_like(h),
    "no gradient": lambda m, h: m.norm(h.detach()),
}


@pytest.mark.parametrize("between", EQUAL.values(), ids=EQUAL)
def test_what_is_equal_leaves_everything_as_it_was(between: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
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


def mixtral() -> nn.Module:
    from superscaler.models import build

    return build("mixtral:size=tiny,layers=1,seq=16,vocab=64").module


@pytest.mark.parametrize(
    ("build", "dtype", "autocast"),
    [(gpt2, "float32", "bf16"), (llama, "bfloat16", None), (mixtral, "bfloat16", None)],
    ids=["gpt2", "llama", "mixtral"],
)
def test_rounding_is_no_difference(build: Callable[[], nn.Module], dtype: str, autocast: str | None) -> None:
    torch.manual_seed(0)
    module = build().to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    # A region around it keeps what it casts: in the second step, weights of the first.
    with torch.autocast("cpu", enabled=False):
        graph = ss.capture(module, (), tokens(), optimizer=optimizer, autocast=autocast)
    assert graph.captured.checked.startswith("2 steps are those of the module")


def test_a_difference_of_a_few_roundings_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is above the first bound counts against the noise of the graph: its own, and not ten times as much."""
    torch.manual_seed(0)
    module, x = Net(lambda m, h: m.norm(h).softmax(-1)), torch.randn(6, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    known = ss.capture(module, (x,), optimizer=optimizer).captured
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


def generator() -> nn.Module:
    module = Net(lambda m, h: h * next(m.numbers))
    module.numbers = (x for x in (1.0, 2.0, 3.0))
    return module


def itself() -> nn.Module:
    module = Net(lambda m, h: module.norm(module.first(h)))
    return module


def random_order(m: Any, h: Tensor) -> Tensor:
    torch.rand(3)
    return h * torch.rand_like(h)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net(lambda m, h: h)


SKIPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "generator": (generator, r"it cannot be copied \(TypeError: cannot pickle 'generator' object\)"),
    "itself": (itself, "its copy reads the parameters of the module itself, which a function in it holds"),
    "order": (lambda: Net(random_order), "its random numbers do not come in the order of the captured ones"),
    "meta": (on_meta, r"it has no data \(it was built on the meta device\)"),
    "large": (lambda: Net(lambda m, h: h), r"its [\d,]+ elements and \S+ FLOPs are too many \(above [\d,]+ or 10\)"),
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


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the checks that are done."""
    done: list[str] = []
    original = capturing.agree
    monkeypatch.setattr(capturing, "agree", lambda *given: done.append(original(*given)) or done[-1])
    return done


def plain(m: Any, h: Tensor) -> Tensor:
    return h


def test_what_was_compared_once_is_kept_with_the_capture(times: list[str]) -> None:
    """A capture that nobody compared is compared when it is asked for, and then no more."""
    assert captured(plain, cache="agreement", check=False) == ""
    assert not times
    found = [captured(plain, cache="agreement") for _ in range(2)]
    assert found == [times[0], times[0]]
    assert len(times) == 1


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
    module = Labelled()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match=rf"^\S*test_agreement\.py:\d+ does not run .*{message}[^\n]*$"):
        ss.capture(module, (torch.tensor(ids), torch.tensor(labels)), optimizer=optimizer)
