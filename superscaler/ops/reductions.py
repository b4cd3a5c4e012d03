"""Reductions, softmax and losses."""

from typing import Any

from superscaler.ops.call import Local, Site
from superscaler.ops.row import Recipe, call, elementwise, first, marked, on, row


def _reduction(position: int | None, mark: str = "^", default: Any = None) -> Recipe:
    """Return the recipe of reductions: over all dims, or those of an argument. Kept dims have size 1."""

    def recipe(site: Site) -> str | None:
        dims = set(range(len(site.ins[0])) if position is None else site.dims(position, "dim", default))
        names = site.letters
        if len(set(site.ins)) > 1:
            return None
        keeps = len(site.outs[0]) == len(names)
        rest = " ".join(("1" if d in dims else name) for d, name in enumerate(names) if keeps or d not in dims)
        return site.alike(marked(names, dims, mark), rest)

    return recipe


def _mean(x: Local) -> str:
    dims, keepdim, dtype = x.argument(1, "dim"), bool(x.argument(2, "keepdim", False)), x.argument(9, "dtype")
    where = (f", {list(dims)}, {keepdim}" if dims else "") + (f", dtype={dtype}" if dtype else "")
    if not x.is_summed_in_parts:
        return f"torch.mean({x.names[0]}{where})"
    if half := x.half:
        return f"(torch.sum({x.names[0]}{where}, dtype=torch.float32) / {x.full_size(dims)}).to({half})"
    return f"torch.sum({x.names[0]}{where}) / {x.full_size(dims)}"


def _softmax(site: Site) -> str:
    return f"{marked(site.letters, site.dims(1, 'dim'), '^')} -> {' '.join(site.letters)}"


def _loss(site: Site) -> str | None:
    """Return the notation of a loss of elements: not reduced, summed, or averaged (the mean squared error only)."""
    if site.outs[0]:
        return elementwise(site)
    return site.alike("d..+", "") if len(set(site.ins)) == 1 else None


def _mse_loss(x: Local) -> str:
    reduction, (a, b) = ("none", "mean", "sum")[x.argument(2, "reduction", 1)], x.names
    if not x.is_summed_in_parts or reduction != "mean":
        return f'F.mse_loss({a}, {b}, reduction="{reduction}")'
    if half := x.half:
        return f'(F.mse_loss({a}.float(), {b}.float(), reduction="sum") / {x.full_size()}).to({half})'
    return f'F.mse_loss({a}, {b}, reduction="sum") / {x.full_size()}'


def _cross_entropy(site: Site) -> str | None:
    """Return the notation for labels that are classes or their probabilities. A mean has none: its denominator depends
    on all labels.
    """
    if site.argument(3, "reduction", 1) == 1 or len(site.ins[0]) < 2:
        return None
    labels = "b c^ r.." if site.ins[0] == site.ins[1] else "b r.."
    return f"b c^ r.., {labels}, _ -> b r.." if site.outs[0] else f"b+ c^ r..+, {labels}, _ -> "


def _of_rows(site: Site) -> str | None:
    """Return the notation of a loss of each row of scores, whose labels are a class or several."""
    labels = "b c^" if len(site.ins[1]) > 1 else "b"
    return f"b c^, {labels}, _ -> b" if site.outs[0] else None


def _count(x: Local) -> str:
    labels, ignored, _, *weight = map(x.literal, x.op.args)
    return f"functional.count_labels({', '.join([labels, ignored, x.dtype, *weight])})"


def _ctc_losses(x: Local) -> str:
    *given, blank, zero_infinity = map(x.literal, x.op.args)
    return f'F.ctc_loss({", ".join(given)}, {blank}, "none", {zero_infinity})'


def _picking(x: Local) -> str:
    """Return the source of an op that picks a class of each row from the classes of a part."""
    part = x.part(*_OF_SCORES)
    return f"functional.{x.op.target.removeprefix('ss.')}({x.arguments}{part and ', '}{part})"


_OF_SCORES = (0, 1)
_CLASSES = ((*_OF_SCORES, "classes"),)
_OVER_CLASSES = "b+ c^ r..+, b r.., -> "

ROWS = {
    **row("sum", _reduction(None, "+"), linear=first),
    **row("sum.dim_IntList", _reduction(1, "+"), linear=first),
    **row("mean", _reduction(None, "+"), text=_mean, linear=first),
    **row("mean.dim", _reduction(1, "+"), text=_mean, linear=first),
    **row("count_nonzero", _reduction(None, "+")),
    **row("count_nonzero.dim_IntList", _reduction(1, "+")),
    **row("max min any all prod var std norm.Scalar", _reduction(None)),
    **row("amax amin max.dim min.dim any.dim all.dim prod.dim_int var.correction var.dim std.dim", _reduction(1)),
    **row("std.correction argmax argmin logsumexp any.dims all.dims var_mean.dim", _reduction(1)),
    **row("var_mean.correction std_mean.dim std_mean.correction median.dim", _reduction(1)),
    **row("linalg_vector_norm norm.ScalarOpt_dim", _reduction(2)),
    **row("cosine_similarity", _reduction(2, default=1)),
    **row("softmax.int _softmax", _softmax, roles=((0, -3, "heads"),)),
    **row("log_softmax.int _log_softmax", _softmax),
    **row("mse_loss", _loss, text=_mse_loss),
    **row("l1_loss smooth_l1_loss huber_loss soft_margin_loss", _loss),
    **row("binary_cross_entropy binary_cross_entropy_with_logits", _loss),
    **row("cross_entropy_loss nll_loss_nd", _cross_entropy, roles=_CLASSES),
    **row("ss.cross_entropy", _OVER_CLASSES, text=call("functional.cross_entropy"), roles=_CLASSES),
    **row("ss.nll_loss", _OVER_CLASSES, text=call("functional.nll_loss")),
    **row("ss.largest ss.normalized",
          text=lambda x: f"functional.{x.op.target.removeprefix('ss.')}({x.arguments}, dtype={x.dtype})"),
    **row("ss.class_sums ss.picked", text=_picking, placed=on(*_OF_SCORES), roles=_CLASSES),
    **row("ss.exp_sum", text=call("functional.exp_sum")),
    **row("ss.row_losses", text=call("functional.row_losses")),
    **row("multi_margin_loss multilabel_margin_loss", _of_rows),
    **row("ss.ctc_losses", "t^ b c^, b s^, b, b -> b", text=_ctc_losses),
    **row("ss.count_labels", "b..+, _ -> ", stops=True, text=_count),
}  # fmt: skip
