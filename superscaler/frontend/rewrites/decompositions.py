"""Decompositions of operators into others with rules, as plain torch functions: a coupling becomes a sum, which is
exact for any cut.

As in the tables of `ExportedProgram.run_decompositions`, a function takes the arguments of a call, and returns
NotImplemented if the call stays. Of several results it returns the first ones, None for those without readers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from superscaler.frontend.rewrites import custom_ops as ours
from superscaler.ops.row import aten

_ATEN = torch.ops.aten
_NONE, _MEAN, _SUM = range(3)
Function = Callable[..., Any]
TABLE: dict[str, Function] = {}


def decomposes(names: str) -> Callable[[Function], Function]:
    """Register the decomposition of these operators."""

    def register(function: Function) -> Function:
        TABLE.update(aten(function, names))
        return function

    return register


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else _ATEN._to_copy(x, dtype=dtype)


def expanded(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x if x.shape == torch.Size(shape) else x.expand(shape)


def _wide(x: Tensor) -> torch.dtype:
    """Return a dtype that can count: half precision cannot count beyond 256 (bfloat16) or 2048 (float16)."""
    return torch.promote_types(x.dtype, torch.float32)


@decomposes("alias clone lift_fresh_copy lift_fresh")
def alias(x: Tensor, **_: Any) -> Tensor:
    return x


@decomposes("copy")
def copy(old: Tensor, new: Tensor, non_blocking: bool = False) -> Tensor:
    return expanded(_cast(new, old.dtype), old.shape)


@decomposes("squeeze squeeze.dim squeeze.dims")
def squeeze(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Squeeze by an explicit shape: a dim of size 1 may be larger elsewhere."""
    dims = range(x.dim()) if dim is None else [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]
    return x.view([size for d, size in enumerate(x.shape) if size > 1 or d not in dims])


@decomposes("cat")
def cat(operands: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Leave out operands without elements, such as the rest of a rotary embedding over all of a head."""
    full = [x for x in operands if x.numel()]
    if len(full) == 1 and all(x.dtype == full[0].dtype for x in operands):
        return full[0]
    return _ATEN.cat(full, dim) if 0 < len(full) < len(operands) else NotImplemented


@decomposes("slice.Tensor")
def strided(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """x[k::n] -> x viewed as (..., n), then k of that dim: the dim before it can be cut."""
    dim %= x.dim()
    before, count, after = x.shape[:dim], x.shape[dim] // step, x.shape[dim + 1 :]
    picked = range(x.shape[dim])[start:end:step]
    if step == 1 or x.shape[dim] % step or len(picked) != count:
        return NotImplemented
    viewed = x.view(*before, count, step, *after)
    return _ATEN.slice(viewed, dim + 1, picked[0], picked[0] + 1).view(*before, count, *after)


@decomposes("index_put")
def masked_put(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Tensor:
    """x[mask] = value, if the value does not depend on the position in the mask -> where(mask, value, x)."""
    mask = indices[0]
    ones = x.dim() - mask.dim() if isinstance(mask, Tensor) else 0
    if len(indices) != 1 or mask.dtype != torch.bool or accumulate or values.dim() > ones:
        return NotImplemented
    return torch.where(mask.view(*mask.shape, *[1] * ones) if ones else mask, values, x)


@decomposes("rrelu")
def rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, _: Any = None) -> Tensor:
    """Draw no slopes outside of training: torch takes their mean."""
    return NotImplemented if training else _ATEN.leaky_relu(x, (lower + upper) / 2)


@decomposes("rrelu_with_noise_functional")
def rrelu_in_place(x: Tensor, noise: Tensor, *slopes: Any, **more: Any) -> Any:
    made = rrelu(x, *slopes, **more)
    return made if made is NotImplemented else (made, None)


@decomposes("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add a bias once, however the product is cut."""
    return NotImplemented if bias is None else _ATEN.linear(x, weight) + bias


def _added(product: Function, bias: Tensor, x: Tensor, y: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    result = product(x, y) if alpha == 1 else product(x, y) * alpha
    return result + (bias if beta == 1 else bias * beta)


_PRODUCTS: dict[str, Function] = {"addmm": torch.mm, "baddbmm": torch.bmm, "addmv": torch.mv, "addr": torch.outer}
for _sum, _product in _PRODUCTS.items():
    decomposes(_sum)(partial(_added, _product))


def _draw(function: Function, like: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Draw uniform numbers; `like` is a tensor or a shape."""
    shape, usual = (like.shape, like.dtype) if isinstance(like, Tensor) else (like, torch.get_default_dtype())
    return function(shape, dtype or usual)


decomposes("rand rand_like")(partial(_draw, ours.uniform))
decomposes("randn randn_like")(partial(_draw, ours.normal))


@decomposes("uniform")
def uniform(x: Tensor, *given: float, to: float = 1.0, **named: Any) -> Tensor:
    """Draw between `from`, a word of Python, and `to`."""
    low = given[0] if given else named.get("from", 0.0)
    high = given[1] if len(given) > 1 else to
    return ours.uniform(x.shape, x.dtype) * (high - low) + low


@decomposes("normal_functional")
def normal(x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return ours.normal(x.shape, x.dtype) * std + mean


@decomposes("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor")
def normal_around(mean: Tensor | float, std: Tensor | float = 1.0, **_: Any) -> Tensor:
    """Draw around means that have no gradient."""
    centre, width = (x.detach() if isinstance(x, Tensor) else x for x in (mean, std))
    like: Any = centre + width
    return ours.normal(like.shape, like.dtype) * width + centre


@decomposes("exponential")
def exponential(x: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    """Draw by the inverse of the distribution, halfway between the numbers that are drawn: neither 0 nor infinity."""
    return _cast((ours.uniform(x.shape, torch.float64) + 2.0**-25).log() / -lambd, x.dtype)


@decomposes("randint randint.low randint_like randint_like.low_dtype")
def randint(*given: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Draw integers in [low, high); `low` defaults to 0. At most 2**24 numbers, as many as are drawn."""
    low, high = [0, *(x for x in given if isinstance(x, int))][-2:]
    (like,) = (x for x in given if not isinstance(x, int))
    shape, usual = (like.shape, like.dtype) if isinstance(like, Tensor) else (like, torch.int64)
    if high - low > 2**24:
        return NotImplemented
    return _cast((ours.uniform(shape, torch.float64) * (high - low)).floor() + low, dtype or usual)


@decomposes("bernoulli bernoulli.p")
def bernoulli(x: Tensor, p: float | None = None, **_: Any) -> Tensor:
    return _cast(ours.uniform(x.shape, torch.float32) < (x if p is None else p), x.dtype)


@decomposes("dropout native_dropout")
def dropout(x: Tensor, p: float, train: bool | None = True) -> Tensor:
    return x if not p or train is False else ours.dropout(x, p)


@decomposes("scaled_dot_product_attention")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    given = query, key, value, attn_mask, dropout_p, is_causal, scale
    return ours.attention_dropout(*given) if dropout_p else NotImplemented


def _mean_over_labels(
    loss: Function,
    total: Function,
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    smoothing: float = 0.0,
) -> Tensor:
    """Replace a mean over the counted labels by the sum over their count, or over the sum of the weights of their
    classes: exact however the labels are cut.
    """
    if reduction != _MEAN or logits.dim() < 2:
        return NotImplemented
    if labels.is_floating_point():
        return loss(logits, labels, weight, _NONE, label_smoothing=smoothing).mean()
    wide = _wide(logits)
    count = ours.count_labels(labels, ignore_index, wide, weight)
    if weight is None and not smoothing:
        found = total(logits, labels, count, ignore_index)
    else:
        given = _cast(logits, wide), labels, None if weight is None else _cast(weight, wide)
        found = loss(*given, _SUM, ignore_index, *[smoothing] * bool(smoothing)) / count
    return _cast(found, logits.dtype)


decomposes("cross_entropy_loss")(partial(_mean_over_labels, _ATEN.cross_entropy_loss, ours.cross_entropy))
decomposes("nll_loss_nd")(partial(_mean_over_labels, _ATEN.nll_loss_nd, ours.nll_loss))


def _reduced(loss: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Replace a mean loss without a rule of its own by the losses of the elements or rows, and their mean; and a sum
    over operands of several shapes.
    """
    given = dict(zip((a.name for a in loss._schema.arguments), args, strict=False)) | kwargs
    how = given.get("reduction", _MEAN)
    shapes = {x.shape for x in given.values() if isinstance(x, Tensor)}
    if how == _NONE or (how == _SUM and len(shapes) == 1):
        return NotImplemented
    losses: Tensor = loss(**given | {"reduction": _NONE})
    return losses.mean() if how == _MEAN else losses.sum()


_LOSSES = """l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits
multi_margin_loss"""
for _loss in _LOSSES.split():
    decomposes(_loss)(partial(_reduced, getattr(_ATEN, _loss).default))


@decomposes("hinge_embedding_loss")
def hinge_embedding_loss(x: Tensor, target: Tensor, margin: float = 1.0, reduction: int = _MEAN) -> Tensor:
    """Keep the margin a number: torch's own decomposition rounds it to the dtype of x."""
    losses = torch.where(target != 1, (margin - x).clamp_min(0), 0.0) + torch.where(target != -1, x, 0.0)
    return losses.mean() if reduction == _MEAN else losses.sum() if reduction == _SUM else losses


@decomposes("multilabel_margin_loss")
def multilabel_margin_loss(x: Tensor, labels: Tensor, reduction: int = _MEAN) -> Tensor:
    return _reduced(_ATEN.multilabel_margin_loss.default, x, labels, reduction) if x.dim() > 1 else NotImplemented


@decomposes("ctc_loss.Tensor")
def ctc_loss(
    scores: Tensor,
    labels: Tensor,
    lengths: Tensor,
    label_lengths: Tensor,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """Replace a mean by the losses of the sequences, each over the number of its labels, and their mean."""
    if scores.dim() < 3 or labels.dim() < 2:
        return NotImplemented
    losses = ours.ctc_losses(scores, labels, lengths, label_lengths, blank, zero_infinity)
    if reduction == _MEAN:
        return (losses / _cast(label_lengths.clamp_min(1), losses.dtype)).mean()
    return losses.sum() if reduction == _SUM else losses


@decomposes("batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit.no_stats")
def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any) -> tuple[Tensor | None, ...]:
    """Normalize by the statistics of the whole batch; update the running ones as torch does.

    (x, weight, bias, mean, variance, training, momentum, eps) -> result, _, _, new mean, new variance
    """
    *running, training, momentum, eps = args[:5]
    if not training:
        return NotImplemented
    result, *new = _normalized(x, weight, bias, eps)
    channels = x.shape[1]
    count = x.numel() / channels
    fresh = []
    for old, now, unbiased in zip(running, new, (1.0, count / max(count - 1, 1)), strict=False):
        if old is not None:
            part = now.view(channels) * (momentum * unbiased)
            fresh.append(old * (1.0 - momentum) + part)
    return result, None, None, *fresh


@decomposes("_native_batch_norm_legit_no_training")
def batch_norm_given(x: Tensor, *args: Any) -> Tensor:
    """Normalize by given statistics, without the empty further results."""
    return _ATEN.batch_norm(x, *args[:4], False, *args[4:], False)


def _normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    """Return a batch of mean 0 and variance 1 per channel, scaled and moved; and its mean and variance before."""
    others = [d for d in range(x.dim()) if d != 1]
    shape = (x.shape[1], *[1] * (x.dim() - 2))
    wide = _cast(x, _wide(x))
    mean = wide.mean(others, True)
    centered = wide - mean
    variance = (centered * centered).mean(others, True)
    result = centered * (variance + eps).rsqrt()
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return _cast(result, x.dtype), mean, variance


# Not every device implements it for every dtype: the runtime has its own.
@decomposes("histc")
def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    return ours.histc(x, bins, min, max)
