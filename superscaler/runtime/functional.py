"""Functions of emitted code that torch lacks, and random numbers that are equal under all plans."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from superscaler.runtime.functions import attention_kernels, grouped
from superscaler.runtime.functions.attention_blocks import attention_block as attention_block
from superscaler.runtime.functions.attention_blocks import attention_gradient as attention_gradient
from superscaler.runtime.functions.attention_blocks import seen_by as seen_by
from superscaler.runtime.functions.attention_kernels import Box, Pair, Sizes, expand_heads
from superscaler.runtime.functions.attention_kernels import attention_merge as attention_merge
from superscaler.runtime.functions.document_attention import attention_documents as attention_documents
from superscaler.runtime.functions.documents import documents as documents
from superscaler.runtime.functions.documents import numbers_of
from superscaler.runtime.functions.draws import BLOCK as BLOCK
from superscaler.runtime.functions.draws import Draws as Draws
from superscaler.runtime.functions.draws import draw as draw
from superscaler.runtime.functions.draws import linear_index
from superscaler.runtime.functions.losses import count_labels as count_labels
from superscaler.runtime.functions.losses import cross_entropy as cross_entropy
from superscaler.runtime.functions.losses import exp_sum
from superscaler.runtime.functions.losses import largest as largest
from superscaler.runtime.functions.losses import nll_loss as nll_loss
from superscaler.runtime.functions.losses import normalized as normalized
from superscaler.runtime.functions.losses import row_losses as row_losses
from superscaler.runtime.functions.tracing import balance, is_static, is_traced

_ATEN = torch.ops.aten
# Kernels whose backward needs at most their inputs. Others run: copies, which a product may save, among them.
_PRODUCTS = frozenset({_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm})
_POINTWISE = frozenset({_ATEN.add, _ATEN.sub, _ATEN.mul, _ATEN.div, _ATEN.neg})

T = TypeVar("T")


def segment(
    constant: Sequence[str | range] = (),
    wide: Sequence[str | range] = (),
    again: Sequence[str | range] = (),
    saved: Sequence[int] | None = None,
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Mark a segment with the gradients that it needs.

    `constant`: inputs without a gradient, by name or number. `wide`: inputs with a float32 gradient. `again`: inputs
    that the tape does not keep; the backward gets them. `saved`: the numbers of the results whose gradients the
    backward gets (default: all).
    """

    def marked(function: Callable[..., T]) -> Callable[..., T]:
        names = function.__code__.co_varnames

        def numbers(some: Sequence[str | range]) -> list[int]:
            return [n for x in some for n in ([names.index(x)] if isinstance(x, str) else x)]

        flags = {"constant": set(numbers(constant)), "wide": set(numbers(wide)), "again": sorted(numbers(again))}
        function.__dict__.update(flags, saved=saved)
        return function

    return marked


def for_backward() -> AbstractContextManager[Any]:
    """Return a context for results without readers. If a backward is recorded, products and sums give zeros there,
    without memory. Otherwise it changes nothing.
    """
    return _Unread() if torch.is_grad_enabled() else nullcontext()


class _Unread(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode below autograd, which records each operator as usual."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kind, tensors = func.overloadpacket, [x for x in args if isinstance(x, Tensor)]
        if kind in _PRODUCTS:
            *_, a, b = tensors
            return _zeros(a, (*a.shape[:-1], b.shape[-1]), a.dtype)
        if kind in _POINTWISE:
            shape = torch.broadcast_shapes(*(x.shape for x in tensors))
            dtype = torch.result_type(*args[:2]) if len(args) > 1 else args[0].dtype
            return _zeros(tensors[0], shape, dtype)
        return func(*args, **(kwargs or {}))


def _zeros(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return like.new_zeros((), dtype=dtype).expand(shape)


def picked(scores: Tensor, labels: Tensor, box: Box = (), extents: Sizes = ()) -> Tensor:
    """Return the score in (N, classes, ...) of each label, zero outside of the classes `box` of `extents`."""
    classes = scores.shape[1]
    places, is_elsewhere = _find(labels, box or [(0, classes)], extents or [classes])
    return scores.gather(1, places.unsqueeze(1)).squeeze(1).masked_fill(is_elsewhere, 0.0)


def class_sums(scores: Tensor, labels: Tensor, largest: Tensor, box: Box = (), extents: Sizes = ()) -> Pair:
    """Return `exp_sum` and `picked` of (N, classes, ...) scores; gradients are added, then narrowed."""
    wide = scores.to(largest.dtype)
    return exp_sum(wide, largest, 1), picked(wide, labels, box, extents)


def uniform(random: Tensor, dtype: torch.dtype) -> Tensor:
    """Return random numbers in [0, 1) in the given dtype."""
    return random.to(dtype)


def normal(random: Tensor, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers from as many numbers in [0, 1), by the inverse of the distribution."""
    # Halfway between the multiples of 2**-24 that `draw` returns, so that neither 0 nor 1 occurs.
    return torch.special.ndtri(random.double() + 2.0**-25).to(dtype)


def embedding_part(ids: Tensor, weight: Tensor, box: Box, extents: Sizes, padding_idx: int | None = None) -> Tensor:
    """Return the rows of `ids` (any shape) in `weight`, zeros for other ids: a part of the value of F.embedding.

    `weight` has the rows `box` of a table of `extents` rows. Row `padding_idx` gets no gradient.
    """
    places, is_elsewhere = _find(ids, box, extents)
    found = F.embedding(places, weight)
    if padding_idx is not None:
        found = torch.where((ids == padding_idx).unsqueeze(-1), found.detach(), found)
    return found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)


def of_first(x: Tensor, box: Box) -> Tensor:
    """Return x on the first part of a dim, zeros on all others, so that a sum of parts adds x once."""
    return x if all(low == 0 for low, _ in box) else torch.zeros_like(x)


def piece(x: Tensor, dim: int, box: Box, extents: Sizes) -> Tensor:
    """Return the range `box` of each slot of a dim whose slots have the sizes `extents`."""
    found = x.unflatten(dim, tuple(extents))
    for k, (low, high) in enumerate(box, start=dim):
        found = found.narrow(k, low, high - low)
    return found.flatten(dim, dim + len(box) - 1)


def causal_mask(box: Box, extents: Sizes, keys: int, like: Tensor) -> Tensor:
    """Return the keys that the queries `box` of `extents` may see, bool (queries, keys)."""
    queries = linear_index(box, extents, like.device).reshape(-1, 1)
    return torch.arange(keys, device=like.device) <= queries


def dropout(x: Tensor, p: float, random: Tensor) -> Tensor:
    """Return x with the elements whose random number is below p zeroed and the others divided by 1 - p. `random` may be
    overwritten.
    """
    if p >= 1.0:
        return x * 0.0
    # On the CPU: other devices take it as a number.
    scale, random = torch.ones((), dtype=x.dtype).div_(1.0 - p), random.reshape(x.shape)
    return x * (random.ge_(p).mul_(scale) if random.dtype == x.dtype else (random >= p) * scale)


def attention_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, is_causal: bool, scale: float | None, random: Tensor
) -> Tensor:
    """Return scaled dot product attention with dropout on the probabilities.

    q (..., heads, L, E), k and v (..., heads or a divisor of it, S, E); `mask` bool (True takes part) or added;
    `random` has the elements of (..., heads, L, S). A query without any visible key gives zeros.
    """
    k, v = expand_heads(k, q), expand_heads(v, q)
    scores = attention_kernels.scores(q, k, mask, scale, is_causal)
    if mask is not None:
        # A softmax over nothing is 0/0, and its gradient is nan even if the result is replaced afterwards.
        is_empty = (scores == -math.inf).all(-1, keepdim=True)
        probabilities = scores.masked_fill(is_empty, 0.0).softmax(-1).masked_fill(is_empty, 0.0)
    else:
        probabilities = scores.softmax(-1)
    return dropout(probabilities, p, random) @ v


def histc(x: Tensor, bins: int, low: float, high: float) -> Tensor:
    """Return the number of elements in each of `bins` equal intervals from low to high, in the dtype of x (any)."""
    # On CPUs, torch counts floating-point numbers only.
    counted = x if x.is_floating_point() or x.device.type != "cpu" else x.float()
    return torch.histc(counted, bins, low, high).to(x.dtype)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    box: Box = (),
    extents: Sizes = (),
) -> Tensor:
    """Return, for each token, the sum over its local experts of weight * down @ (activation(gate @ x) * (up @ x)).

    x (tokens, hidden), ids and weights (tokens, chosen), gate_up (local experts, 2 width, hidden), down (local experts,
    outputs, width); the result is (tokens, outputs), in the dtype of x. The local experts are those in `box` of
    `extents`, by default all. In traced code each choice has a row, one of another device one of zeros: how many tokens
    chose an expert is not known there.
    """
    count = len(gate_up)
    if is_traced():
        places, is_elsewhere = _find(ids, box or [(0, count)], extents or [count])
        places, every = places.masked_fill(is_elsewhere, count), math.prod(extents or [count])
        return grouped.experts(x, places, weights, gate_up, down, activation, every)
    numbers = numbers_of(box or [(0, count)], extents or [count])
    # Where there are no data to look at, each expert has the same number of tokens; on the busiest of several devices
    # more.
    every = math.prod(extents or [count])
    even = max(1, round(ids.numel() * (balance() if len(numbers) < every else 1.0)) // every)
    total = torch.zeros(x.shape[0], down.shape[1], dtype=torch.promote_types(x.dtype, weights.dtype), device=x.device)
    for number, up_weight, down_weight in zip(numbers, gate_up, down, strict=True):
        token, place = _nonzero(ids == number, even)
        gate, up = F.linear(x[token], up_weight).chunk(2, -1)
        each = F.linear(getattr(F, activation)(gate) * up, down_weight) * weights[token, place, None]
        total = total.index_add(0, token, each.to(total.dtype))
    return total.to(x.dtype)


def dispatch(x: Tensor, ids: Tensor, experts: int, groups: int, capacity: int) -> Pair:
    """Return the rows of each expert (experts, groups, capacity, hidden), and the number of tokens that chose it.

    x (tokens, hidden), ids (tokens, chosen), counts (experts, groups); the tokens come group by group. The rows of an
    expert are the first tokens of a group that chose it, in order, then zeros.
    """
    place, counts = _rows(ids, experts, groups, capacity)
    written = x.unflatten(0, (groups, -1)).repeat_interleave(ids.shape[1], 1)
    rows = x.new_zeros(groups, experts * capacity + 1, x.shape[1])
    rows = rows.scatter(1, place.unsqueeze(-1).expand_as(written), written)[:, :-1]
    return rows.unflatten(1, (experts, capacity)).transpose(0, 1).contiguous(), counts.t().contiguous()


def expert_rows(rows: Tensor, wanted: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Return down @ (activation(gate @ row) * (up @ row)) of the rows of each expert in use, zeros for the others.

    rows (experts, groups, capacity, hidden), the first `wanted` (experts, groups) in use; gate_up (experts, 2 width,
    hidden), down (experts, outputs, width). Traced and recorded code computes all rows: it does not know how many are
    in use.
    """
    made = []
    for own, count, up_weight, down_weight in zip(rows, wanted, gate_up, down, strict=True):
        if is_static():
            gate, up = F.linear(own, up_weight).chunk(2, -1)
            is_used = torch.arange(own.shape[1], device=own.device) < count.unsqueeze(-1)
            each = F.linear(getattr(F, activation)(gate) * up, down_weight)
            made.append(each.masked_fill(~is_used.unsqueeze(-1), 0.0))
            continue
        used = _nonzero(torch.arange(own.shape[1], device=own.device) < count.unsqueeze(-1), own[..., 0].numel())
        gate, up = F.linear(own[used], up_weight).chunk(2, -1)
        each = F.linear(getattr(F, activation)(gate) * up, down_weight)
        made.append(each.new_zeros(*own.shape[:2], down.shape[1]).index_put(used, each))
    return torch.stack(made)


def collect(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return, for each token, the sum over its experts of weight * result, zero for a dropped choice.

    rows (experts, groups, capacity, outputs); ids and weights (tokens, chosen), as given to `dispatch`.
    """
    experts, groups, capacity, outputs = rows.shape
    place, _ = _rows(ids, experts, groups, capacity)
    own = rows.transpose(0, 1).flatten(1, 2)
    found = own.gather(1, place.clamp(max=own.shape[1] - 1).unsqueeze(-1).expand(-1, -1, outputs))
    found = found.masked_fill((place == own.shape[1]).unsqueeze(-1), 0.0)
    return (found.reshape(*ids.shape, outputs) * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def _rows(ids: Tensor, experts: int, groups: int, capacity: int) -> Pair:
    """Return the row of each choice (groups, choices) among the rows of all experts, the number of rows for a dropped
    choice; and the count of choices of each expert (groups, experts).
    """
    chosen = ids.reshape(groups, -1)
    # F.one_hot reads the numbers on a CPU.
    order = (chosen.unsqueeze(-1) == torch.arange(experts, device=ids.device)).cumsum(1)
    at = order.gather(2, chosen.unsqueeze(-1)).squeeze(-1) - 1
    return torch.where(at < capacity, chosen * capacity + at, experts * capacity), order[:, -1]


def _find(ids: Tensor, box: Box, extents: Sizes) -> Pair:
    """Return the position of each id in the box of a dim, and whether the id is outside (then at any)."""
    here = linear_index(box, extents, ids.device).reshape(-1)
    places = torch.searchsorted(here, ids).clamp_(max=len(here) - 1)
    return places, here[places] != ids


def _nonzero(mask: Tensor, expected: int) -> tuple[Tensor, ...]:
    """Return the places of true elements of a mask. A fake mask has no data: it is true at `expected` places."""
    if type(mask) is not Tensor:
        return tuple(mask.new_empty(expected, dtype=torch.int64) for _ in mask.shape)
    return mask.nonzero(as_tuple=True)
