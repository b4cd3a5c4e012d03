"""Which index each dim of each operator is: one line of notation per operator (see notation.py), or its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from superscaler.ops import recipes as r
from superscaler.ops.recipes import Recipe

T = TypeVar("T")


def aten(value: T, names: str) -> dict[str, T]:
    """Return a table that has this value for these operators; one without an overload means `.default`."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": value for name in names.split()}


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
