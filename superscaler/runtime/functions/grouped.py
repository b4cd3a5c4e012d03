"""Products of groups of rows, each group with a matrix of its own, as operators: how many rows a group has is data.

Compiled code calls them as they are. Its own tensors have shapes that are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str, every: int
) -> Tensor:
    """Return the result of `functional.experts`, made with a row for each choice: those of an expert lie together.

    `ids` are the numbers of the experts here; choices of others have the number behind the last, and rows of zeros.
    `every`: the number of all experts, as many as there are counts.
    """
    chosen = ids.reshape(-1)
    order, counts = chosen.argsort(stable=True), F.one_hot(chosen, every + 1).sum(0)[:every]
    gate, up = grouped_linear(x[order // ids.shape[1]], gate_up, counts).chunk(2, -1)
    each = grouped_linear(getattr(F, activation)(gate) * up, down, counts) * weights.reshape(-1)[order, None]
    kind = torch.promote_types(x.dtype, weights.dtype)
    return each[order.argsort()].unflatten(0, ids.shape).to(kind).sum(1).to(x.dtype)


@torch.library.custom_op("superscaler::grouped_linear", mutates_args=())
def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of each group times the transpose of its weight; zeros for rows behind the last group.

    rows (R, inputs), group after group, `counts` of each, those of groups elsewhere last; weights (groups, outputs,
    inputs); (R, outputs).
    """
    made = rows.new_zeros(len(rows), weights.shape[1])
    for own, weight in zip(_ranges(counts), weights, strict=False):
        torch.mm(rows[own], weight.t(), out=made[own])
    return made


@grouped_linear.register_fake
def _(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(len(rows), weights.shape[1])


@torch.library.custom_op("superscaler::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, counts: Tensor, groups: int) -> Tensor:
    """Return the transpose of the left rows of each group times its right ones: (R, m), (R, n) -> (groups, m, n)."""
    made = left.new_empty(groups, left.shape[1], right.shape[1])
    for own, out in zip(_ranges(counts), made, strict=False):
        torch.mm(left[own].t(), right[own], out=out)
    return made


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, counts: Tensor, groups: int) -> Tensor:
    return left.new_empty(groups, left.shape[1], right.shape[1])


def _ranges(counts: Tensor) -> Iterator[slice]:
    """Yield the rows of each group."""
    end = 0
    for count in counts.tolist():
        yield slice(end, end + count)
        end += count


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, counts = ctx.saved_tensors
    of_rows, of_weights, _ = ctx.needs_input_grad
    return (
        grouped_linear(gradient, weights.transpose(1, 2), counts) if of_rows else None,
        grouped_outer(gradient, rows, counts, len(weights)) if of_weights else None,
        None,
    )


grouped_linear.register_autograd(_backward, setup_context=_keep)
