"""Which index each dim of each operator is: one line of notation per operator (see notation.py), or its recipe."""

from __future__ import annotations

from collections.abc import Mapping

from superscaler.frontend.notation import Signature, frozen, resolve
from superscaler.frontend.recipes import (
    Recipe,
    Site,
    along,
    attention,
    convolution,
    cross_entropy,
    elementwise,
    embedding,
    expand,
    gather,
    index,
    index_select,
    layer_norm,
    matmul,
    normalized,
    pad,
    permute,
    pool,
    reduced_loss,
    reduction,
    reverse,
    select,
    select_scatter,
    split,
    stack,
    transpose,
    unbind,
    view,
)


def signature(site: Site) -> tuple[Signature, bool]:
    """Return the indices of a call, and whether its operator has a rule."""
    rule = RULES.get(site.call.target)
    written = rule(site) if callable(rule) else rule
    notation, sizes = (written, {}) if isinstance(written, str) or written is None else written
    found = resolve(notation, site.ins, site.outs, sizes) if notation is not None else None
    return found or frozen(site.ins, site.outs), rule is not None


def _aten(rule: str | Recipe, names: str) -> dict[str, str | Recipe]:
    """Return the entries of a rule for these operators; one without an overload means `.default`."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": rule for name in names.split()}


def _overloads(names: str, kinds: str) -> str:
    return " ".join(f"{name}.{kind}" for name in names.split() for kind in kinds.split())


_UNARY = """neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal tanh sigmoid sin cos tan asin acos
atan sinh cosh erf erfc gelu silu relu relu6 leaky_relu elu selu celu hardtanh hardswish hardsigmoid softplus mish
log_sigmoid softsign clamp clamp_min clamp_max floor ceil round trunc sign sgn isnan isinf isfinite logical_not
bitwise_not nan_to_num logit detach _to_copy copy threshold frac positive"""
_BINARY = "add sub mul div pow eq ne lt le gt ge floor_divide remainder fmod bitwise_and bitwise_or bitwise_xor"
_LOGIC = "logical_and logical_or logical_xor maximum minimum atan2 xlogy.Tensor addcmul addcdiv"

RULES: Mapping[str, str | Recipe] = {
    **_aten(elementwise, _UNARY),
    **_aten(elementwise, _overloads(_BINARY + " __and__ __or__ __xor__ rsub xlogy lerp", "Tensor Scalar")),
    **_aten(elementwise, "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar div.Tensor_mode div.Scalar_mode"),
    **_aten(elementwise, "bitwise_and.Tensor where.self where.ScalarOther where.ScalarSelf where.Scalar"),
    **_aten(
        elementwise,
        "masked_fill.Scalar masked_fill.Tensor clamp.Tensor round.decimals fill.Scalar fill.Tensor floor_divide",
    ),
    **_aten(elementwise, _LOGIC),
    "ss.dropout": elementwise,
    **_aten("b.. k+, n k -> b.. n", "linear"),
    **_aten("m k+, k n -> m n", "mm"),
    **_aten("b m k+, b k n -> b m n", "bmm"),
    **_aten("m k+, k -> m", "mv"),
    **_aten("k+, k -> ", "dot"),
    **_aten(matmul, "matmul"),
    **_aten(embedding, "embedding"),
    **_aten(layer_norm, "layer_norm rms_norm"),
    **_aten("b c^ r..^, c, c -> b c r..", "group_norm"),
    **_aten(normalized(1), "softmax.int _softmax log_softmax.int _log_softmax"),
    **_aten(attention, "scaled_dot_product_attention"),
    "ss.attention_dropout": attention,
    "ss.count_labels": "b..+ -> ",
    "ss.cross_entropy": "b+ c^ r..+, b r.., -> ",
    **_aten(cross_entropy, "cross_entropy_loss nll_loss_nd"),
    **_aten(reduced_loss, "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy"),
    **_aten(reduced_loss, "binary_cross_entropy_with_logits soft_margin_loss kl_div poisson_nll_loss"),
    **_aten(view, "view reshape _unsafe_view unsqueeze"),
    **_aten(permute, "permute"),
    **_aten(transpose, "transpose.int swapaxes swapdims"),
    **_aten(reverse, "t numpy_T"),
    **_aten(expand, "expand broadcast_to expand_as"),
    **_aten(split, "split.Tensor split_with_sizes chunk split.sizes"),
    **_aten(unbind, "unbind.int"),
    **_aten(along(1, default=0), "slice.Tensor"),
    **_aten(along(1, default=0), "cumsum cumprod"),
    **_aten(along(2, "dims"), "roll"),
    **_aten(along(1, "dims"), "flip"),
    **_aten(along(2, default=-1), "diff topk"),
    **_aten(along(1, default=-1), "sort argsort"),
    **_aten(along(2, default=0), "slice_scatter"),
    **_aten(select, "select.int"),
    **_aten(select_scatter, "select_scatter"),
    **_aten(pad, "pad constant_pad_nd"),
    **_aten(along(1, default=0), "cat"),
    **_aten(stack, "stack"),
    **_aten("b.. _ _ -> b.. _ _", "tril triu"),
    **_aten("i.. -> i.. _", "one_hot"),
    **_aten(index, "index.Tensor"),
    **_aten(index_select, "index_select"),
    **_aten(gather, "gather"),
    **_aten(reduction(None, "+"), "sum mean"),
    **_aten(reduction(1, "+"), "sum.dim_IntList mean.dim"),
    **_aten(reduction(None), "max min any all prod var std norm.Scalar"),
    **_aten(reduction(1), "amax amin max.dim min.dim any.dim all.dim prod.dim_int var.correction var.dim std.dim"),
    **_aten(reduction(1), "std.correction argmax argmin logsumexp any.dims all.dims"),
    **_aten(reduction(2), "linalg_vector_norm norm.ScalarOpt_dim"),
    **_aten(convolution, "conv1d conv2d conv3d convolution"),
    **_aten(pool, "adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d max_pool2d max_pool2d_with_indices"),
}
