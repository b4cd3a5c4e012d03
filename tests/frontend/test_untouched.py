"""What capture leaves of its runs: nothing. A module has the same attributes, tensors and losses as before."""

from __future__ import annotations

import functools
import hashlib
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.frontend.effects.untouched import untouched
from superscaler.models import build, names
from tests.frontend.examples import Net, longrope
from tests.helpers.graphs import assert_equal, step_of
from tests.helpers.sweeps import few

TABLES: dict[int, Tensor] = {}
FILLED = None


def picture(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Return plain data that is equal for equal objects: their classes, identities, contents, and bytes of tensors."""
    seen = {} if seen is None else seen
    if isinstance(value, bool | int | float | str | bytes | type(None)):
        return value
    if id(value) in seen:
        return f"object {[*seen].index(id(value))}"
    seen[id(value)] = value
    if isinstance(value, Tensor):
        digest = hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
        return type(value).__name__, id(value), value.dtype, value.shape, value.requires_grad, digest
    if isinstance(value, np.ndarray):
        return "array", id(value), value.tobytes()
    if isinstance(value, dict):
        return type(value).__name__, id(value), [(picture(k, seen), picture(v, seen)) for k, v in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, id(value), [picture(x, seen) for x in value]
    if isinstance(value, set):
        return "set", id(value), sorted(map(repr, value))
    fields = getattr(value, "__dict__", None)
    return type(value).__name__, id(value), picture(fields, seen) if isinstance(fields, dict) else None


def draws() -> bytes:
    return pickle.dumps((torch.get_rng_state().numpy(), random.getstate(), np.random.get_state()))


@pytest.mark.parametrize("name", few(names(), names().index("llama"), names().index("vit")))
def test_a_captured_model_of_each_family_is_as_it_was(name: str) -> None:
    model = build(name if name == "mlp" else f"{name}:size=tiny")
    before, numbers = picture(model.module), draws()
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    ss.capture(model.module, model.args, model.kwargs, optimizer=optimizer)
    assert picture(model.module) == before
    assert draws() == numbers


class Shape:
    __slots__ = ("kept",)


@functools.lru_cache
def ramp(size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, size)


def attribute(m: Any, h: Tensor) -> Tensor:
    if getattr(m, "late", None) is None:
        m.late = torch.linspace(0.5, 1.5, 8)
    return h * m.late


def submodule(m: Any, h: Tensor) -> Tensor:
    return attribute(m.first, h)


def in_dict(m: Any, h: Tensor) -> Tensor:
    if 8 not in m.held:
        m.held[8] = torch.linspace(0.5, 1.5, 8)
    return h * m.held[8]


def in_list(m: Any, h: Tensor) -> Tensor:
    if not m.row:
        m.row.append(torch.linspace(0.5, 1.5, 8))
    return h * m.row[0]


def in_object(m: Any, h: Tensor) -> Tensor:
    if getattr(m.own, "late", None) is None:
        m.own.late = torch.linspace(0.5, 1.5, 8)
    return h * m.own.late


def in_slot(m: Any, h: Tensor) -> Tensor:
    if getattr(m.shape, "kept", None) is None:
        m.shape.kept = torch.linspace(0.5, 1.5, 8)
    return h * m.shape.kept


def in_class(m: Any, h: Tensor) -> Tensor:
    if getattr(Shape, "late", None) is None:
        Shape.late = torch.linspace(0.5, 1.5, 8)  # type: ignore[attr-defined]
    return h * Shape.late  # type: ignore[attr-defined]


def in_global(m: Any, h: Tensor) -> Tensor:
    global FILLED
    if FILLED is None:
        FILLED = torch.linspace(0.5, 1.5, 8)
    return h * FILLED


def in_global_dict(m: Any, h: Tensor) -> Tensor:
    if 8 not in TABLES:
        TABLES[8] = torch.linspace(0.5, 1.5, 8)
    return h * TABLES[8]


def in_default(m: Any, h: Tensor, kept: list[Tensor] = []) -> Tensor:  # noqa: B006
    if not kept:
        kept.append(torch.linspace(0.5, 1.5, 8))
    return h * kept[0]


def in_closure() -> Callable[[Any, Tensor], Tensor]:
    late = None

    def between(m: Any, h: Tensor) -> Tensor:
        nonlocal late
        if late is None:
            late = torch.linspace(0.5, 1.5, 8)
        return h * late

    return between


def in_cache(m: Any, h: Tensor) -> Tensor:
    return h * ramp(8)


def new_buffer(m: Any, h: Tensor) -> Tensor:
    if "late" not in m._buffers:
        m.register_buffer("late", torch.linspace(0.5, 1.5, 8), persistent=False)
    return h * m.late


def empty_buffer(m: Any, h: Tensor) -> Tensor:
    if m.nothing is None:
        m.nothing = torch.linspace(0.5, 1.5, 8)
    return h * m.nothing


def mode(m: Any, h: Tensor) -> Tensor:
    m.norm.eval()
    return m.norm(h)


# What keeps a tensor in the first call, and the hidden layer that its module goes on with.
ONCE: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    **{
        one.__name__: (one, lambda m, h: h * torch.linspace(0.5, 1.5, 8))
        for one in (
            attribute, submodule, in_dict, in_list, in_object, in_slot, in_class, in_global, in_global_dict,
            in_default, in_cache, new_buffer, empty_buffer,
        )
    },
    "in_closure": (in_closure(), lambda m, h: h * torch.linspace(0.5, 1.5, 8)),
    "mode": (mode, lambda m, h: F.batch_norm(h, m.norm.running_mean, m.norm.running_var, m.norm.weight, m.norm.bias)),
}  # fmt: skip


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    yield
    globals()["FILLED"] = None
    for clear in (ramp.cache_clear, TABLES.clear, in_default.__defaults__[0].clear):  # type: ignore[index]
        clear()
    if "late" in vars(Shape):
        del Shape.late  # type: ignore[attr-defined]


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize(("between", "after"), ONCE.values(), ids=ONCE)
def test_what_a_forward_makes_once_and_keeps_is_made_again_by_the_module(
    between: Callable[[Any, Tensor], Tensor], after: Callable[[Any, Tensor], Tensor]
) -> None:
    """A tensor without data, or one of another dtype, would be read by the module's own next call."""
    module = Net(between, held={}, row=[], own=SimpleNamespace(), shape=Shape())
    module.register_buffer("nothing", None)
    before, x = picture(module), torch.randn(4, 8)
    graph = step_of(module, x)
    assert graph.captured.checked.startswith("2 steps are those of the module")
    assert_equal(graph, "single", 1)
    assert picture(module) == before
    with torch.no_grad():
        assert torch.equal(module(x), module.last(after(module, module.first(x))).pow(2).mean())


def test_a_hook_that_a_forward_sets_is_taken_back() -> None:
    module = Net(lambda m, h: h if m.last._forward_hooks else [h, m.last.register_forward_hook(lambda *_: None)][0])
    before = picture(module)
    step_of(module, torch.randn(4, 8))
    assert picture(module) == before


def test_the_loss_of_a_longrope_model_is_that_of_before() -> None:
    module, ids = longrope(), torch.randint(1, 64, (4, 48), generator=torch.Generator().manual_seed(0))
    want = float(longrope()(ids, labels=ids).loss.detach())
    graph = step_of(module, kwargs={"input_ids": ids, "labels": ids})
    assert graph.captured.checked.startswith("2 steps are those of the module")
    assert float(module(ids, labels=ids).loss.detach()) == want
    # Its rotary embedding has two lengths, so no shorter row is filled.
    assert not graph.model.shorter
    assert_equal(graph, "single", 1)


def test_everything_that_is_reached_is_put_back() -> None:
    """Containers, arrays, flags, gradients, and memory that is another."""
    module = Net(
        lambda m, h: h, held=OrderedDict(a=1), row=deque([1]), some={1}, array=np.zeros(3), plain=torch.zeros(2)
    )
    module.numbers = torch.Generator().manual_seed(1)
    before, state = picture(module), module.numbers.get_state()
    address = module.plain.data_ptr()
    with untouched(module):
        module.held["b"] = module.held.pop("a")
        module.row.append(2)
        module.some.add(2)
        module.array[1] = 1
        module.plain.add_(1)
        module.plain.data = torch.ones(2, 2)
        module.seen[0] = torch.nan
        module.norm.num_batches_tracked.add_(1)
        module.first.weight.requires_grad_(False)
        module.last.weight.grad = torch.ones_like(module.last.weight)
        module.last = nn.Linear(8, 1)
        del module.book
        torch.rand(3, generator=module.numbers)
        torch.rand(1)
    assert picture(module) == before
    assert module.plain.data_ptr() == address
    assert module.last.weight.grad is None
    assert torch.equal(module.numbers.get_state(), state)
