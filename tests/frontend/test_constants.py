"""Constants are computed once, however many layers and rows of a batch read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import superscaler as ss
from superscaler.frontend.base.oracle import reference_step
from superscaler.frontend.capture import capture
from superscaler.frontend.rewrites import constants
from superscaler.frontend.rewrites.simplify import kind_of_mask
from superscaler.ir.loops import Rolled
from superscaler.models import build
from tests.frontend.examples import Function, gpt2, tokens
from tests.frontend.test_cuts import check_cuts
from tests.helpers.graphs import step_of
from tests.helpers.ran import Around
from tests.helpers.sweeps import slow


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every constant that is computed from now on."""
    found: list[Tensor] = []
    evaluate = constants._evaluate

    def record(*args: object) -> list[Tensor]:
        results = evaluate(*args)
        found.extend(results)
        return results

    monkeypatch.setattr(constants, "_evaluate", record)
    return found


def test_layers_share_their_masks_and_rows_of_the_batch_too(evaluated: list[Tensor]) -> None:
    counts = []
    for layers in (1, 2):
        evaluated.clear()
        capture(gpt2(layers), (), tokens(batch=8, sequence=16))
        counts.append(len(evaluated))
    assert counts[0] == counts[1] > 10
    assert any(x.shape == (8, 1, 16, 16) for x in evaluated)
    assert max(x.untyped_storage().size() // x.element_size() for x in evaluated) == 16 * 16


def test_a_constant_of_one_element_may_have_any_stride(tmp_path: Path) -> None:
    """Labels of one class for the whole batch, and a buffer, both of stride 0."""

    def forward(m: Around, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(m.inner(x) * m.scale, torch.zeros(1, dtype=torch.long).expand(8))

    scale = nn.Buffer(torch.tensor(2.0).expand(1))
    graph = step_of(Around(forward, inner=nn.Linear(6, 5), scale=scale), torch.randn(8, 6))
    ss.compile(graph, "data_parallel", "local:2").save(tmp_path, evaluation=False)


def test_calls_on_equal_buffers_are_computed_once(evaluated: list[Tensor]) -> None:
    """Layers have buffers of their own, such as the indices of relative positions, with the same numbers."""

    class Layer(nn.Module):
        def __init__(self, first: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("at", torch.tensor([first, 1.0, 2.0, 3.0]))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.at.sin()

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    # Zeros of both signs have the same value, and other bits.
    module = nn.Sequential(Layer(0.0), Layer(0.0), Layer(-0.0), Mean())
    graph = capture(module, (torch.randn(2, 4),))
    assert len([x for x in evaluated if x.shape == (4,)]) == 2
    assert len(graph.values) == 3 + 2


class _Made(TorchDispatchMode):
    """The most elements of a tensor that an operator makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves(made) if isinstance(x, Tensor))
        self.most = max(self.most, *(x.untyped_storage().nbytes() // x.element_size() for x in tensors), 0)
        return made


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
def test_a_mask_of_a_model_without_data_is_one_row_for_the_whole_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, made = constants._evaluate, _Made()

    def evaluated(*args: Any) -> list[Tensor]:
        with made:
            return evaluate(*args)

    monkeypatch.setattr(constants, "_evaluate", evaluated)
    model = build("gpt3:size=tiny,seq=16,batch=64,attention=eager,device=meta")
    values = capture(model.module.to(dtype), model.args, model.kwargs, check=False).values
    assert any(x.shape == (1, 1, 16, 16) for x in values.values())
    assert not any(x.shape[:1] == (64,) for x in values.values())
    # Nor is more made on the way.
    assert made.most == 16 * 16


ATEN, ROW, COLUMN = torch.ops.aten, torch.randn(5), torch.arange(6).reshape(6, 1)


@pytest.mark.parametrize(
    ("function", "args", "most"),
    [
        (ATEN.cumsum.default, (ROW.expand(6, 5), 1), 5),
        (ATEN.cumsum.default, (ROW.expand(6, 5), -2), 30),
        (ATEN.cumsum.default, (torch.tensor(1.0).expand(6, 5), 0), 6),
        (ATEN.diff.default, (ROW.expand(6, 5), 1, -1, torch.ones(()).expand(6, 1)), 5),
        (ATEN.diff.default, (ROW.expand(6, 5), 1, -1, torch.randn(6, 1)), 30),
        (ATEN.index.Tensor, (ROW.expand(6, 5), [COLUMN, torch.tensor([[1, 4, 0, 0]])]), 4),
        (ATEN.index.Tensor, (torch.randn(6, 1).expand(6, 5), [COLUMN[:3], torch.tensor([[1, 4, 0, 0]])]), 3),
        (ATEN.index.Tensor, (ROW.expand(2, 6, 5), [None, COLUMN[:, 0], torch.tensor(3)]), 1),
        (ATEN.index.Tensor, (ROW.expand(6, 5), [torch.eye(6, 5).bool()]), 5),
        (ATEN.add.Tensor, (ROW.expand(6, 5), torch.ones(()).expand(6, 1)), 5),
    ],
)
def test_elements_that_repeat_are_computed_once(function: Any, args: Any, most: int) -> None:
    whole = function(*args)
    (found, kwargs) = constants._once(function, args, {})
    once = function(*found, **kwargs)
    assert once.numel() == most
    assert torch.equal(once.expand(whole.shape), whole)


class Rows(nn.Linear):
    """Equal rows that nothing else has: one of them is not enough."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight + torch.arange(3.0, device=x.device).expand(4, 3)).sum() * x.mean()


def test_rows_that_no_reader_broadcasts_stay() -> None:
    model = Rows(3, 1, bias=False)
    found = capture(model, (torch.ones(4, 3),), optimizer=torch.optim.SGD(model.parameters())).model
    assert found.tensors["expand"].shape == (4, 3)


class Placed(nn.Embedding):
    """Looks up the place of each token, in every row of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape)
        return (super().forward(places) * x[..., None]).square().mean()


def test_places_of_tokens_are_one_row_so_that_microbatches_repeat() -> None:
    """Whole, the constant would have another slice in each microbatch, and all of them would be compiled."""
    captured = ss.capture(model := Placed(6, 4), (torch.randn(32, 6),), optimizer=torch.optim.SGD(model.parameters()))
    constants = [t for t in captured.model.tensors.values() if t.kind == "constant"]
    assert [t.shape for t in constants] == [(1, 6)]
    plan = ss.compile(captured, "gradient_accumulation:1,microbatches=16", "local:1")
    assert all(isinstance(device.instructions, Rolled) for device in plan.compiled.program.devices)
    assert plan.verify()["equal"]


@pytest.mark.parametrize("name", ["llama", *slow("bert", "swin", "mbart")])
def test_a_model_without_data_has_the_operators_of_the_one_that_trains(name: str) -> None:
    found = []
    for device in ("cpu", "meta"):
        model = build(f"{name}:size=tiny,device={device}")
        ops = capture(model.module, model.args, model.kwargs, check=False).model.ops
        found.append([(op.target, [operand.tensor for operand in op.inputs], op.args, op.kwargs) for op in ops])
    assert found[0] == found[1]


class Masked(nn.Linear):
    """Two layers that each make the same masks: one hides nothing, one everything, one the future."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            y = super().forward(x)
            shape = (x.shape[0], 6, 6)
            nothing = torch.zeros(shape) + torch.zeros(6, 6)
            scores = torch.where(nothing == 0, y[:, :, None] * y[:, None], float("-inf")) + nothing
            scores = torch.where(nothing > 0, scores * 3, scores)
            future = torch.arange(6)[:, None] < torch.arange(6)
            x = torch.where(future.expand(shape), -1e9, scores).softmax(-1).sum(1)
        return x.square().mean()


def test_choices_that_constants_make_are_no_operators(evaluated: list[Tensor]) -> None:
    captured = capture(Masked(6, 6), (torch.randn(4, 6),))
    choices = [op for op in captured.model.ops if "where" in op.target]
    # The future is hidden once a layer; by the other two nothing is chosen.
    assert len(choices) == 2
    assert len({op.inputs[0].tensor for op in choices}) == 1
    assert max(x.untyped_storage().size() // x.element_size() for x in evaluated) <= 36
    assert check_cuts(captured) > 20
    assert all(x.is_contiguous() for x in captured.values.values())


def test_constants_are_split_by_operators_of_several_results() -> None:
    def function(h: Tensor) -> Tensor:
        table = torch.arange(24.0).view(4, 6).sin()
        first, second = table.chunk(2)
        return (
            (h + first[0] + second.unbind()[1] + torch.cat(table.split([1, 3])) + table.max(0).values).square().mean()
        )

    module, x = Function(function, 6), torch.randn(4, 6)
    captured = capture(module, (x,))
    assert reference_step(captured, captured.batch, captured.values).loss == module(x)


def interleaved(h: Tensor) -> Tensor:
    """Adds a table whose numbers repeat in pairs, and in every row: a view of it joins dims that repeat."""
    table = torch.arange(3.0).add(1).reciprocal()[None, :, None].expand(4, 3, 2)
    return (h + (table * 1.0).flatten(1) + (table + 0.0).view(4, 6)).square().mean()


def windowed(h: Tensor) -> Tensor:
    """Adds marks of windows of a square, as shifted windows of attention do."""
    marks = torch.arange(4.0)[None, None, :, None].expand(1, 4, 4, 1) * 1.0
    windows = marks.reshape(1, 2, 2, 2, 2, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4)
    return (h + windows).square().sum()


@pytest.mark.parametrize(("function", "shape"), [(interleaved, (4, 6)), (windowed, (2, 4, 4))])
def test_a_constant_that_repeats_is_viewed_over_dims_that_do_and_do_not(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    captured = capture(Function(function, shape[-1]), (torch.randn(shape),))
    assert check_cuts(captured) > 4
    found = reference_step(captured, captured.batch, captured.values)
    torch.testing.assert_close(found.loss, captured.call.module(*captured.batch.values()))
    assert "_unsafe_view" not in {op.target for op in captured.model.ops}


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (torch.ones(3, 1, 5, 5, dtype=torch.bool).tril(), "causal"),
        (torch.ones(5, 5, dtype=torch.bool).tril().expand(3, 1, 5, 5), "causal"),
        (torch.ones(4, 7, dtype=torch.bool).tril(), "causal"),
        (torch.ones(5, 5, dtype=torch.bool).tril(1), ""),
        (torch.ones(1, 1, dtype=torch.bool).expand(2, 5, 5), "open"),
        (torch.zeros(1).expand(2, 5, 5), "open"),
        (torch.full((5, 5), float("-inf")).triu(1), "causal"),
        (torch.full((5, 5), 0.5), ""),
        (torch.zeros(1, dtype=torch.bool).expand(5, 5), ""),
        (torch.ones(5, dtype=torch.bool), ""),
    ],
)
def test_kinds_of_masks(mask: Tensor, kind: str) -> None:
    assert kind_of_mask(mask) == kind


def _attended(x: Tensor, later: int) -> Tensor:
    at = torch.arange(len(x))
    x = x[None, None]
    return (
        nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=at[None] <= at[:, None] + later).square().mean()
    )


@pytest.mark.parametrize(
    ("function", "is_causal"),
    [
        (lambda x: _attended(x, 0), True),
        (lambda x: _attended(x, 1), False),
        (lambda x: (x * ~(torch.arange(6)[None] <= torch.arange(6)[:, None])).square().mean(), False),
    ],
)
def test_a_large_causal_mask_is_recognized_or_stays_computed(
    function: Callable[[Tensor], Tensor], is_causal: bool, evaluated: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "_LARGE", 1)
    captured = capture(Function(function, 6), (torch.randn(6, 6),))
    found = reference_step(captured, captured.batch, captured.values)
    torch.testing.assert_close(found.loss, captured.call.module(*captured.batch.values()))
    attentions = [op for op in captured.model.ops if "attention" in op.target]
    assert all((True in (*op.args, *dict(op.kwargs).values())) == is_causal for op in attentions)
    if is_causal or not attentions:
        assert all(x.shape != (6, 6) for x in evaluated)
