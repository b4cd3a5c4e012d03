"""Losses of emitted code: parts of a mean over labels, and the steps of a loss whose classes are cut."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from superscaler.runtime.functions.tracing import is_traced

_ATEN = torch.ops.aten
# Of the reductions of aten's losses.
_SUM = 2
# A loss is computed in so many parts of its rows, but on no fewer bytes at a time.
_PARTS, _BYTES = 16, 1 << 20


def cross_entropy(logits: Tensor, labels: Tensor, count: Tensor, ignore_index: int) -> Tensor:
    """Return the summed cross entropy of (N, C, ...) logits and (N, ...) labels over `count`: a scalar, a part of the
    mean.

    Halves are widened to the dtype of `count`, because the sum over many labels may exceed their range. Traced code has
    the plain loss, which a compiler fuses.
    """
    dtype = torch.promote_types(logits.dtype, count.dtype)
    if logits.ndim != 2 or is_traced():
        return F.cross_entropy(logits.to(dtype), labels, reduction="sum", ignore_index=ignore_index) / count
    total: Tensor = _SummedLoss.apply(logits, labels, dtype, ignore_index)
    return total / count


class _SummedLoss(torch.autograd.Function):
    """The summed cross entropy in a dtype, with the numbers of torch's own. It widens a few rows at a time, and its
    backward writes the gradient over the log probabilities: torch makes two or three more tensors of their size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, dtype: torch.dtype, ignore_index: int) -> Tensor:
        scores = torch.empty_like(logits, dtype=dtype, memory_format=torch.contiguous_format)
        for some, own in zip(_parts(logits, scores), _parts(scores, scores), strict=True):
            _ATEN._log_softmax(some.to(dtype), 1, False, out=own)
        loss, counted = _ATEN.nll_loss_forward(scores, labels, None, _SUM, ignore_index)
        ctx.save_for_backward(scores, labels, counted)
        ctx.dtype, ctx.ignore_index = logits.dtype, ignore_index
        return loss  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scores, labels, counted = ctx.saved_tensors
        for some, own in zip(_parts(scores, scores), _parts(labels, scores), strict=True):
            given = _ATEN.nll_loss_backward(gradient, some, own, None, _SUM, ctx.ignore_index, counted)
            _ATEN._log_softmax_backward_data(given, some, 1, some.dtype, out=some)
            del given
        return scores.to(ctx.dtype), None, None, None


def _parts(x: Tensor, scores: Tensor) -> Sequence[Tensor]:
    """Return the rows of x in parts, those in which the loss of these scores is computed."""
    rows = max(-(-len(scores) // _PARTS), _BYTES // (scores.shape[1] * scores.element_size()), 1)
    return x.split(rows)


def nll_loss(scores: Tensor, labels: Tensor, count: Tensor, ignore_index: int) -> Tensor:
    """Return the summed loss of (N, C, ...) log probabilities and (N, ...) labels over `count`, as cross_entropy."""
    return F.nll_loss(scores, labels, reduction="sum", ignore_index=ignore_index) / count


def count_labels(labels: Tensor, ignore_index: int, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    """Return the number of labels that are not ignored, or the sum of the weights of their classes, as a scalar."""
    counted = labels != ignore_index
    if weight is None:
        return counted.sum().to(dtype)
    return weight.to(dtype).take(labels.where(counted, 0).long()).where(counted, 0.0).sum()


def largest(scores: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the largest score along `dim`, without a gradient: it cancels in every result."""
    return scores.detach().amax(dim).to(dtype)


def exp_sum(scores: Tensor, largest: Tensor, dim: int) -> Tensor:
    """Return the sum of exp(score - largest) along `dim`."""
    return (scores.to(largest.dtype) - largest.unsqueeze(dim)).exp().sum(dim)


def normalized(scores: Tensor, largest: Tensor, total: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return log_softmax along `dim`, given the largest score and the `exp_sum` of all."""
    return (scores.to(total.dtype) - (largest + total.log()).unsqueeze(dim)).to(dtype)


def row_losses(
    labels: Tensor,
    count: Tensor,
    picked: Tensor,
    largest: Tensor | None = None,
    total: Tensor | None = None,
    *,
    ignore_index: int,
) -> Tensor:
    """Return the sum of -log probability over the labels that are not ignored, over `count`: a scalar, a part of the
    mean.

    `picked` has the log probabilities of the labels; with `largest` and `total` (see `exp_sum`) their scores.
    """
    losses = -picked if largest is None or total is None else total.log() + largest - picked
    return losses.masked_fill(labels == ignore_index, 0.0).sum() / count
