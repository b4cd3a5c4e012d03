"""Composite operators and changes in place that are replaced one by one give the program of torch's second trace."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from superscaler.errors import CaptureError
from superscaler.frontend import composites, export
from superscaler.frontend.capture import capture
from superscaler.models import build
from tests.frontend.examples import Net
from tests.helpers.graphs import step_of
from tests.helpers.sweeps import slow


class Shaped(nn.Module):
    """Composite operators that return a view, a copy, or their input; several results; a number that nobody reads; the
    name of a Python builtin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 6))
        self.offsets = torch.arange(4.0)

    def forward(self, input: Tensor) -> Tensor:
        torch.rand(3)
        left, right = input.to(input.dtype).chunk(2, dim=1)
        h = (left.t().reshape(-1) + right.t().contiguous().flatten()).unflatten(0, (6, -1))
        h = h.contiguous() @ self.weight.movedim(0, 1).float()
        return (h.to(torch.float64).float() * self.offsets.expand_as(h).sum()).pow(2).mean()


def views(m: Any, h: Tensor) -> Tensor:
    """Views that are made before a change and read after it, or changed themselves."""
    y, base = h * 1, h.sum(0, keepdim=True) * 1
    rows, column, flat, same, wide = y[1:3], y.t()[2], y.reshape(-1), y.to(y.dtype), base.expand(4, 8)
    y.mul_(2)
    base.add_(1)
    rows[:, :2].add_(column.sum())
    column.zero_()
    y[:, 0] = h[:, 1]
    wide[0].sub_(h[0])
    same.contiguous().relu_()
    return y * rows.sum() + flat.view(4, 8) + wide


def masks(m: Any, h: Tensor) -> Tensor:
    """Tensors that are filled in parts, twice, or by numbers of another dtype, and a result of several."""
    y, n, is_kept = h.new_zeros(4, 8), torch.arange(8), h > -1
    y[1:] = h[:-1].clone()
    y[:, 0] = h.sum()
    y.masked_fill_(h > 0.5, 0.25).add_(n)
    n.add_(2)
    is_kept &= h < 1
    top, _ = h.topk(2)
    top.div_(2)
    torch.mul(h.detach(), 2, out=(doubled := torch.empty(4, 8)))
    return y * n.add_(n) + top.sum() * is_kept + doubled.neg_()


def shapes(m: Any, h: Tensor) -> Tensor:
    """Changes of shapes in place, and a new shape of the result of another kernel than without gradients."""
    y, mask = h * 1, (h @ m.first.weight)[:, :4].view(1, 1, 4, 4) * 1
    y.unsqueeze_(0).transpose_(1, 2).mul_(2)
    mask.add_(1)
    heads = h.view(1, 4, 2, 4).transpose(1, 2)
    seen = F.scaled_dot_product_attention(heads, heads, heads, mask)
    return y.squeeze_(0).t() + seen.transpose(1, 2).reshape(4, 8)


def draws(m: Any, h: Tensor) -> Tensor:
    return h * torch.empty_like(h).bernoulli_(0.5) + torch.zeros_like(h).copy_(F.dropout(h, inplace=True))


def buffers(m: Any, h: Tensor) -> Tensor:
    """Buffers that move, in parts or whole, and statistics of which no schema says so."""
    before = m.mean[2:4]
    m.mean.view(-1)[3:9].mul_(0.5).add_(h.detach().sum())
    m.mean.t()[1] = m.seen
    m.seen.copy_(h.detach().sum(0))
    return m.norm(h @ m.mean) + before.sum()


def regions(m: Any, h: Tensor) -> Tensor:
    """Autocast of a part of a model, with a part of it that is not cast, and changes in place."""
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(h, m.mean) * 1
        y[:, :2].add_(h[:, :2] @ m.mean[:2, :2])
        with torch.autocast("cpu", enabled=False):
            exact = y.reshape(-1).view(4, 8).float() @ m.mean
        mixed = torch.einsum("ij,jk->ik", y, m.mean.t()) * 1
        mixed.mul_(2)
        seen = m.norm(F.layer_norm(mixed.softmax(-1), (8,)))
    return exact + mixed + F.linear(seen.float(), m.mean)


def replaced_by_torch(m: Any, h: Tensor) -> Tensor:
    """Buffers whose new value has another shape or dtype in torch's second trace."""
    m.mean.copy_(h.detach().sum(0))
    m.seen.copy_(h.detach().double().sum(0))
    return h @ m.mean + m.seen


@torch.library.custom_op("composites::bump", mutates_args={"x"})
def bump(x: Tensor) -> None:
    x.add_(1)


def unknown(m: Any, h: Tensor) -> Tensor:
    """A change by an operator that is the user's own, in a region of autocast, which is left."""
    with torch.autocast("cpu", torch.bfloat16):
        bump(h.detach() * 1)
    return h @ m.mean


def weight(m: Any, h: Tensor) -> Tensor:
    m.first.weight.detach().mul_(2)
    return h


def turned(m: Any, h: Tensor) -> Tensor:
    m.mean.t_()
    return h @ m.mean


def shared(m: Any, h: Tensor) -> Tensor:
    """A change of buffers that have two names, which the second trace refuses."""
    return m.one(m.two(h))


def overlapping(m: Any, h: Tensor) -> Tensor:
    y = h * 1
    y.unfold(1, 3, 2).mul_(2)
    return y


def nodes(exported: ExportedProgram) -> list[tuple[Any, ...]]:
    """Return all that a trace reads, without assertions, which it drops."""
    read = ("val", "stack_trace", "nn_module_stack", "custom")
    return [
        (
            node.name,
            node.op,
            str(node.target),
            str((node.args, node.kwargs)),
            *(str(node.meta.get(key)) for key in read),
        )
        for node in exported.graph.nodes
        if "_assert" not in str(node.target)
    ]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare each export with that of a second trace. Its numbers: how often torch traced a second time."""
    second: list[int] = []
    traced = ExportedProgram.run_decompositions

    def counted(exported: ExportedProgram, table: Any = None) -> ExportedProgram:
        second.append(len(exported.graph.nodes))
        return traced(exported, table)

    def both(exported: ExportedProgram, table: Mapping[Any, Any]) -> ExportedProgram:
        try:
            expected = traced(exported, dict(table))
        except Exception:
            # What a second trace refuses is traced again, and refused.
            return composites.decomposed(exported, table)
        found = composites.decomposed(exported, table)
        assert nodes(found) == nodes(expected)
        assert str(found.graph_signature) == str(expected.graph_signature)
        return found

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    monkeypatch.setattr(export, "decomposed", both)
    return second


def test_composite_operators_need_no_second_trace(traces: list[int]) -> None:
    assert step_of(Shaped(), torch.rand(6, 12))
    assert not traces


@pytest.mark.parametrize(
    "between", [views, masks, shapes, draws, buffers, regions], ids=lambda between: between.__name__
)
def test_changes_in_place_and_autocast_need_no_second_trace(between: Callable[..., Tensor], traces: list[int]) -> None:
    """Capture compares two steps with those of the module, too."""
    checked = step_of(Net(between), torch.randn(4, 8)).captured.checked
    assert checked.startswith("2 steps are those of the module")
    assert not traces


def test_a_buffer_keeps_its_shape_and_dtype() -> None:
    checked = step_of(Net(replaced_by_torch), torch.randn(4, 8)).captured.checked
    assert checked.startswith("2 steps are those of the module")


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (unknown, ""),
        (weight, r"changes 1 parameters or inputs in place: first\.weight"),
        (shared, "AssertionError"),
        (turned, "AssertionError"),
        (overlapping, "has internal overlap"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_other_changes_are_traced_again(between: Callable[..., Tensor], message: str, traces: list[int]) -> None:
    norm = nn.BatchNorm1d(8)
    with pytest.raises(CaptureError, match=message) if message else nullcontext():
        step_of(Net(between, one=norm, two=norm), torch.randn(4, 8))
    assert len(traces) == 1


@pytest.mark.parametrize(
    "spec",
    [
        "gpt2:size=tiny",
        *slow(
            *(
                f"{name}:size=tiny"
                for name in ("alphafold2", "bert", "gpt3", "llama", "mbart", "mixtral", "swin", "t5", "vit")
            )
        ),
    ],
)
def test_models_are_those_of_a_second_trace(spec: str, traces: list[int]) -> None:
    built = build(spec)
    assert capture(built.module, built.args, built.kwargs, check=False)
