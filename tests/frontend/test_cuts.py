"""Every cut that an op's marks allow gives the whole result: each op is executed in parts, index by index."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superscaler.frontend.base.captured import Captured
from superscaler.frontend.base.oracle import reference_step
from superscaler.frontend.capture import capture
from superscaler.ir.model import Model, Op, Operand
from superscaler.ops.call import Local
from superscaler.ops.table import parts_of, row_of
from superscaler.runtime import functional
from tests.frontend.examples import Block, Contractions, Mlp, Regrouped
from tests.helpers.sweeps import slow

Box = tuple[tuple[int, int], ...]


def cut(model: Model, operand: Operand, value: Tensor, box: Box) -> Tensor:
    """Return the piece of a tensor that a part with this box reads."""
    tensor = model.tensors[operand.tensor]
    ranges = [(0, e) if i is None else box[i] for i, e in zip(operand.slots, tensor.extents, strict=True)]
    piece = value.reshape(tensor.extents)[tuple(slice(lo, hi) for lo, hi in ranges)]
    return piece.reshape(tensor.local_shape(tuple(hi - lo for lo, hi in ranges)))


def run(model: Model, op: Op, values: dict[str, Tensor], box: Box) -> list[Tensor]:
    """Execute the emitted expression of a part."""
    pieces = [cut(model, o, values[o.tensor], box) for o in op.inputs]
    names = [f"x{k}" for k in range(len(pieces))]
    results = []
    for operand in op.outputs:
        tensor = model.tensors[operand.tensor]
        sizes = (e if i is None else box[i][1] - box[i][0] for i, e in zip(operand.slots, tensor.extents, strict=True))
        results.append(tensor.local_shape(tuple(sizes)))
    parts = {key: str(part) for key, part in parts_of(op, box, model.tensors).items()}
    local = Local(op, box, names, [tuple(p.shape) for p in pieces], results, model.tensors, parts=parts)
    scope = {"torch": torch, "F": F, "functional": functional, **dict(zip(names, pieces, strict=True))}
    found = eval(row_of(op.target).text(local), scope)
    found = [found] if isinstance(found, Tensor) else list(found)
    assert [tuple(f.shape) for f in found] == results, f"{op.notation()} gives {[f.shape for f in found]}"
    return found


def check_cuts(captured: Captured) -> int:
    """Cut each op on each index that may be cut, in uneven parts; return how many cuts were made. The loss of whole ops
    is that of the reference.
    """
    model, done = captured.model, 0
    values = {n: v.double() if v.is_floating_point() else v for n, v in {**captured.values, **captured.batch}.items()}
    for op in (op for op in model.ops if op.is_forward):
        whole: Box = tuple((0, i.size) for i in op.indices)
        values.update(zip((o.tensor for o in op.outputs), run(model, op, values, whole), strict=True))
        for number, index in enumerate(op.indices):
            if index.mark == "frozen":
                continue
            at = (index.size + 1) // 2
            boxes = [(*whole[:number], r, *whole[number + 1 :]) for r in ((0, at), (at, index.size))]
            parts = [run(model, op, values, box) for box in boxes]
            for k, operand in enumerate(op.outputs):
                for box, part in zip(boxes, parts, strict=True):
                    expected = cut(model, operand, values[operand.tensor], box)
                    value = parts[0][k] + parts[1][k] if index.mark == "summed" else part[k]
                    torch.testing.assert_close(
                        value, expected, msg=lambda m, op=op, i=index: f"{op.notation()} {i}: {m}"
                    )
            done += 1
    expected, *_ = reference_step(captured, captured.batch, captured.values, torch.float64)
    torch.testing.assert_close(values[model.loss], expected)
    return done


@pytest.mark.parametrize("name", ["gpt2_captured", *slow("llama_captured")])
def test_cuts_of_hugging_face_models(name: str, request: pytest.FixtureRequest) -> None:
    assert check_cuts(request.getfixturevalue(name)) > 200


class Renamed(nn.Module):
    """Operators that are others by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        y = torch.multiply(self.linear(x).clip(-0.5, 0.5), x).type_as(like)
        z = torch.subtract(torch.divide(y, 2.0), torch.absolute(x)).type_as(x)
        z = torch.where(torch.greater(z, torch.negative(x)), z, x.clip(torch.zeros(6), None))
        z = torch.addmm(z, x, self.linear.weight, beta=0.5, alpha=2.0)
        return torch.baddbmm(x[:, None], z[:, :, None], x[:, None], alpha=0.25).sum()


class Composite(nn.Module):
    """Operators that torch writes in others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.slope = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = F.prelu(torch.tensordot(self.linear(x), self.linear.weight, ([1], [0])), self.slope)
        z = z.repeat_interleave(2, 1).tile(3)[:, 1:35:3].chunk(2, 1)[1].swapaxes(0, 1).T
        z = torch.cat(torch.broadcast_tensors(z, z[:, :1]), 1).flatten().unflatten(0, (4, -1)).reshape(4, -1, 2)
        losses = F.kl_div(z[..., 0].log_softmax(-1), y.softmax(-1)) + F.poisson_nll_loss(z[..., 1], y.exp())
        sign = torch.where(y > 0, 1.0, -1.0)
        return losses + F.hinge_embedding_loss(z[..., 0], sign) + F.margin_ranking_loss(z[..., 0], y, sign)


def small_models() -> list[tuple[nn.Module, tuple[Tensor, ...]]]:
    ids, labels = torch.randint(0, 20, (4, 6)), torch.randint(0, 6, (4, 6))
    return [
        (Mlp(), (torch.randn(6, 12), torch.randn(6, 12))),
        (Regrouped(), (torch.randn(6, 12),)),
        (Block(), (ids, labels)),
        (Contractions(), (torch.randn(6, 5, 4),)),
        (Renamed(), (torch.randn(4, 6), torch.randn(4, dtype=torch.float64))),
        (Composite(), (torch.randn(4, 6), torch.randn(4, 6))),
    ]


@pytest.mark.parametrize(("number", "cuts"), [(1, 10), (4, 20)])
def test_cuts_of_small_models(number: int, cuts: int) -> None:
    module, args = small_models()[number]
    captured = capture(module, args)
    assert not captured.model.unsupported
    assert check_cuts(captured) >= cuts
    if isinstance(module, Renamed):
        assert not captured.model.uses["like"]
