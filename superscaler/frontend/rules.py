"""Which index each dim of each operator is: one line of notation per operator (see notation.py), or its recipe."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from superscaler.errors import CaptureError
from superscaler.frontend import recipes as r
from superscaler.frontend.notation import Signature, frozen, misfit, resolve
from superscaler.frontend.recipes import Recipe, Site
from superscaler.frontend.trace import aten
from superscaler.specs.registered import REGISTERED, Registered


def signature(site: Site) -> tuple[Signature, bool]:
    """Return the indices of a call, and whether its operator has a rule.

    Raises CaptureError where the notation that a user registered does not fit the call.
    """
    if site.target in REGISTERED:
        return _registered(site, REGISTERED[site.target]), True
    rule = RULES.get(site.target, r.elementwise if torch.Tag.pointwise in site.operator.tags else None)
    written = rule(site) if callable(rule) else rule
    notation, sizes = (written, {}) if isinstance(written, str) or written is None else written
    found = resolve(notation, site.ins, site.outs, sizes) if notation is not None else None
    return found or frozen(site.ins, site.outs), rule is not None


def _registered(site: Site, rule: Registered) -> Signature:
    given = _given(site)
    found = resolve(rule.notation, site.ins, site.outs, rule.sizes, broadcasts=False, given=given)
    if found is None:
        left, right = rule.notation.split("->")
        kept = ",".join(text for k, text in enumerate(left.split(",")) if k in given)
        raise CaptureError(
            f"{site.node.meta['source'] or rule.place} calls {site.target}, whose notation is '{rule.notation}' "
            f"({rule.place}), and it does not fit: {misfit(f'{kept}->{right}', site.ins, site.outs)}. "
            "Mend the notation or the call; a dim that broadcasts is expanded before the call."
        )
    return found


def _given(site: Site) -> list[int]:
    """Return which of an operator's tensor operands a call has: optional ones may be None."""
    found: list[int] = []
    number = 0
    for position, parameter in enumerate(site.operator._schema.arguments):
        if "Tensor" in str(parameter.type):
            count = sum(isinstance(x, Node) for x in tree_leaves(site.argument(position, parameter.name)))
            found += range(number, number + count)
            number += max(count, 1)
    return found


# Beside what torch tags as pointwise.
_ELEMENTWISE = """_prelu_kernel hardswish log_sigmoid detach _to_copy fill.Scalar fill.Tensor rsub.Tensor rsub.Scalar
__and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar isclose relu6 expand
floor_divide floor_divide.Scalar where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Tensor"""
_LOSSES = """mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
binary_cross_entropy_with_logits"""
_POOLS = """max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d"""
_RESIZES = """upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d.vec
upsample_bilinear2d.vec upsample_bicubic2d.vec upsample_trilinear3d.vec"""

RULES: Mapping[str, str | Recipe] = {
    **aten(r.elementwise, _ELEMENTWISE),
    "ss.dropout": r.elementwise,
    **dict.fromkeys(("ss.uniform", "ss.normal"), " -> d.."),
    **aten("d.., n^ -> d..", "bucketize.Tensor"),
    **aten(r.gated, "glu"),
    **aten("b.. k+, n k -> b.. n", "linear"),
    **aten("m k+, k n -> m n", "mm"),
    **aten("b m k+, b k n -> b m n", "bmm"),
    **aten("m k+, k -> m", "mv"),
    **aten("k+, k -> ", "dot vdot"),
    **aten("m, n -> m n", "outer"),
    **aten(r.matmul, "matmul"),
    **aten(r.einsum, "einsum"),
    **aten("b.. i^, b.. j^, o i j, o -> b.. o", "bilinear"),
    **aten("b.. m k^, b.. n k -> b.. m n", "cdist"),
    **aten(r.embedding, "embedding"),
    **aten(r.layer_norm, "layer_norm rms_norm"),
    **aten("b c^ r..^, c, c -> b c r..", "group_norm"),
    **aten("b c r..^, c, c, c, c -> b c r..", "instance_norm"),
    **aten(r.batch_norm, "batch_norm"),
    **aten(r.softmax, "softmax.int _softmax log_softmax.int _log_softmax"),
    **aten(r.attention, "scaled_dot_product_attention"),
    "ss.attention_dropout": r.attention,
    "ss.count_labels": "b..+ -> ",
    "ss.cross_entropy": "b+ c^ r..+, b r.., -> ",
    "ss.experts": r.experts,
    "ss.histc": r.histogram,
    "ss.nll_loss": "b+ c^ r..+, b r.., -> ",
    **aten(r.cross_entropy, "cross_entropy_loss nll_loss_nd"),
    **aten(r.reduced_loss, _LOSSES),
    **aten(r.view, "view _unsafe_view unsqueeze"),
    **aten(r.permute, "permute"),
    **aten(r.transpose, "transpose.int"),
    **aten(r.reverse, "t"),
    **aten(r.repeat, "repeat"),
    **aten(r.split, "split.Tensor split_with_sizes"),
    **aten(r.along(1, default=0), "slice.Tensor"),
    **aten(r.along(1), "cumsum cumprod cummax cummin logcumsumexp"),
    **aten(r.along(2, "dims"), "roll"),
    **aten(r.along(1, "dims"), "flip"),
    **aten(r.along(2, default=-1), "diff topk linalg_cross"),
    **aten(r.along(2), "cross"),
    **aten(r.along(1, default=-1), "sort argsort"),
    **aten(r.along(9, default=-1), "sort.stable"),
    **aten(r.along(2, default=0), "slice_scatter"),
    **aten(r.along(1), "scatter.src scatter.value scatter_add scatter_reduce.two"),
    **aten(r.select, "select.int unbind.int"),
    **aten(r.select_scatter, "select_scatter"),
    **aten(r.diagonal, "diagonal"),
    **aten(r.unfold, "unfold"),
    **aten(r.pad, "pad constant_pad_nd"),
    **aten(r.along(1, default=0), "cat"),
    **aten(r.stack, "stack"),
    **aten("b.. _ _ -> b.. _ _", "tril triu"),
    **aten("i.. -> i.. _", "one_hot"),
    **aten(r.index, "index.Tensor"),
    **aten(r.index_put, "index_put"),
    **aten(r.index_select, "index_select"),
    **aten(r.index_write, "index_add index_copy index_fill.int_Scalar index_fill.int_Tensor"),
    **aten(r.gather, "gather"),
    **aten(r.reduction(None, "+"), "sum mean count_nonzero"),
    **aten(r.reduction(1, "+"), "sum.dim_IntList mean.dim count_nonzero.dim_IntList"),
    **aten(r.reduction(None), "max min any all prod var std norm.Scalar"),
    **aten(r.reduction(1), "amax amin max.dim min.dim any.dim all.dim prod.dim_int var.correction var.dim std.dim"),
    **aten(r.reduction(1), "std.correction argmax argmin logsumexp any.dims all.dims var_mean.dim"),
    **aten(r.reduction(1), "var_mean.correction std_mean.dim std_mean.correction median.dim"),
    **aten(r.reduction(2), "linalg_vector_norm norm.ScalarOpt_dim"),
    **aten(r.reduction(2, default=1), "cosine_similarity"),
    **aten(r.convolution, "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding convolution"),
    **aten(r.convolution, "conv_transpose1d conv_transpose2d.input conv_transpose3d.input"),
    **aten(r.pool, f"{_POOLS} {_RESIZES}"),
    **aten(r.windows, "im2col col2im"),
    **aten(r.pixel_shuffle, "pixel_shuffle pixel_unshuffle"),
    **aten("b c _ _, b p q _ -> b c p q", "grid_sampler"),
}
