"""Normalizations, and operators on space: convolutions, pools, grids."""

import re
from collections.abc import Sequence
from math import prod
from typing import Any

from superscaler.ir.model import Op
from superscaler.ops.call import Local, Site
from superscaler.ops.notation import Shape
from superscaler.ops.row import Sized, marked, plain, row, whole


def _layer_norm(site: Site) -> str:
    count = len(site.args[1])
    kept = site.letters[: len(site.ins[0]) - count]
    own = [f"n{k}^" for k in range(count)]
    operands = [" ".join(kept + own)] + [" ".join(own)] * (len(site.ins) - 1)
    return f"{', '.join(operands)} -> {' '.join(kept + own)}"


def _layer_norm_text(x: Local) -> str:
    given = [x.literal(a) for a in x.op.args[:5]]
    given[1] = x.literal(x.shapes[0][-len(x.op.args[1]) :])
    return f"F.layer_norm({', '.join(given)})"


def _batch_norm(site: Site) -> str:
    """Return the notation with given statistics; batch norms with statistics of the batch are decomposed."""
    return f"b c r..{', c' * (len(site.ins) - 1)} -> b c r.."


def _is_transposed(call: Site | Op) -> bool:
    return "transpose" in call.target or (_is_general(call) and bool(call.args[6]))


def _is_general(call: Site | Op) -> bool:
    return "convolution" in call.target


def _windows(large: Shape, small: Shape, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[list[str]]:
    """Return the dims of a space, of its windows, and of a window. Windows that touch and do not overlap can be cut."""
    words = []
    given = (_each(value, len(small)) for value in (kernel, stride or kernel, padding, dilation))
    for d, (n, o, k, step, added, dilated) in enumerate(zip(large, small, *given, strict=True)):
        is_disjoint = k == step and n == o * k and added in (0, "valid", "same") and 1 in (dilated, k)
        words.append((f"(y{d} k{d}^)", f"y{d}", f"k{d}^") if is_disjoint else ("_", "_", "_"))
    return list(map(list, zip(*words, strict=True)))


def _each(value: Any, count: int) -> list[Any]:
    return [*value] * (count // len(value)) if isinstance(value, list | tuple) else [value] * count


def _convolution(site: Site) -> Sized | None:
    """Cut batch, groups, output channels, disjoint windows, and input channels if no bias is added."""
    groups, (x, kernel) = site.argument(8 if _is_general(site) else 6, "groups", 1), site.ins[:2]
    if len(x) != len(kernel):
        return None
    is_transposed = _is_transposed(site)
    stride, padding = site.argument(3, "stride", 1), site.argument(4, "padding", 0)
    dilation = site.argument(7 if is_transposed and not _is_general(site) else 5, "dilation", 1)
    spaces = (site.outs[0][2:], x[2:]) if is_transposed else (x[2:], site.outs[0][2:])
    wide, narrow, window = map(" ".join, _windows(*spaces, kernel[2:], stride, padding, dilation))
    read, made = (narrow, wide) if is_transposed else (wide, narrow)
    c = "c^" if len(site.ins) > 2 else "c+"
    weight = f"(g {c}) o" if is_transposed else f"(g o) {c}"
    sizes = {"g": groups, "c": x[1] // groups, "o": site.outs[0][1] // groups}
    sizes |= {f"k{d}": k for d, k in enumerate(kernel[2:])}
    return f"b (g {c}) {read}, {weight} {window}, (g o) -> b (g o) {made}", sizes


def _convolution_text(x: Local) -> str:
    """Return the source with the part's number of groups: its channels over those of one group."""
    channels = (x.results if _is_transposed(x.op) else x.shapes)[0][1]
    return plain(x.given(8 if _is_general(x.op) else 6, "groups", channels // x.shapes[1][1]))


def _convolution_flops(op: Op, ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    """Count one product of the weight for each place of the result or, transposed, of the input."""
    places = (ins if _is_transposed(op) else outs)[0]
    return 2 * prod(ins[1]) * prod(places[2 - len(ins[1]) :]) * (places[0] if len(places) == len(ins[1]) else 1)


def _resize(site: Site) -> str:
    """Cut all dims but the space."""
    rank, space = len(site.ins[0]), _space(site)
    return site.alike(whole(site.letters, range(rank - space, rank)))


def _space(site: Site) -> int:
    """Return the number of space dims of an operator, which its name contains."""
    return int(re.findall(r"(\d)d", site.target)[0])


def _pool(site: Site) -> Sized | str:
    """Cut all dims but the space, and windows that do not overlap."""
    space = _space(site)
    (x, *_), out = site.ins, site.outs[0]
    if len(site.outs) > 1:
        # The indices of the largest elements count the whole space.
        return _resize(site)
    if "adaptive" in site.target:
        kernel: Any = [n // o for n, o in zip(x[-space:], out[-space:], strict=True)]
        given = kernel, kernel, 0, 1
    else:
        kernel = site.argument(1, "kernel_size")
        dilation = site.argument(4, "dilation", 1) if "max" in site.target else 1
        given = kernel, site.argument(2, "stride", None), site.argument(3, "padding", 0), dilation
    wide, narrow, _ = _windows(x[-space:], out[-space:], *given)
    kept = site.letters[:-space]
    sizes = {f"k{d}": k for d, k in enumerate(_each(kernel, space))}
    return f"{' '.join(kept + wide)} -> {' '.join(kept + narrow)}", sizes


def _pool_text(x: Local) -> str:
    """Return the source; an adaptive pool gets the size of the part."""
    if "adaptive" not in x.op.target:
        return plain(x)
    return plain(x.given(1, "output_size", x.results[0][-len(x.argument(1, "output_size")) :]))


def _group_norm(site: Site) -> Sized:
    groups = site.argument(1, "num_groups")
    sizes = {"g": groups, "c": site.ins[0][1] // groups}
    return f"b (g c^) r..^{', (g c)' * (len(site.ins) - 1)} -> b (g c) r..", sizes


def _group_norm_text(x: Local) -> str:
    """Return the source with the part's number of groups: its channels over those of one group."""
    channels = x.tensors[x.op.inputs[0].tensor].shape[1]
    return plain(x.given(1, "num_groups", x.shapes[0][1] * x.argument(1, "num_groups") // channels))


def _weight_norm(site: Site) -> str:
    """Cut the dim whose elements have a norm each."""
    names, (kept, *_) = site.letters, site.dims(2, "dim", 0)
    others = {d for d in range(len(names)) if d != kept}
    own = " ".join("1" if d in others else name for d, name in enumerate(names))
    return f"{marked(names, others, '^')}, {own} -> {' '.join(names)}"


def _recurrent(site: Site) -> str | None:
    """Cut the batch only: each step depends on the one before, and reads all of the state."""
    if len(site.ins[0]) < 3:
        return None
    x, states = "b _ _" if site.argument(8, "batch_first") else "_ b _", ["_ b _"] * (len(site.outs) - 1)
    weights = (" ".join("_" for _ in shape) for shape in site.ins[1 + len(states) :])
    return f"{', '.join((x, *states, *weights))} -> {', '.join((x, *states))}"


def _recurrent_flops(op: Op, ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    return 2 * prod(ins[0][:2]) * sum(prod(shape) for shape in ins if len(shape) == 2)


def _columns(site: Site) -> Sized:
    """Return the notation of im2col and col2im, in which channels and the places of a kernel are one dim."""
    is_apart = "im2col" in site.target
    places = prod(site.args[1 if is_apart else 2])
    sizes = {"k": places, "c": max(site.ins[0][1], site.outs[0][1]) // places}
    return ("b c _ _ -> b (c k^) _" if is_apart else "b (c k^) _ -> b c _ _"), sizes


_CONVOLUTIONS = """conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding convolution
conv_transpose1d conv_transpose2d.input conv_transpose3d.input"""
_POOLS = """max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d"""
_RESIZES = """upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d.vec
upsample_bilinear2d.vec upsample_bicubic2d.vec upsample_trilinear3d.vec"""

ROWS = {
    **row("layer_norm", _layer_norm, text=_layer_norm_text),
    **row("rms_norm", _layer_norm),
    **row("group_norm", _group_norm, text=_group_norm_text),
    **row("_weight_norm", _weight_norm),
    **row("instance_norm", "b c r..^, c, c, c, c -> b c r.."),
    **row("batch_norm", _batch_norm),
    **row(_CONVOLUTIONS, _convolution, text=_convolution_text, flops=_convolution_flops),
    **row(_POOLS, _pool, text=_pool_text),
    **row(_RESIZES, _resize),
    **row("lstm.input gru.input rnn_tanh.input rnn_relu.input", _recurrent, flops=_recurrent_flops),
    **row("lstm_cell", "b _, b _, b _, _ _, _ _, _, _ -> b _, b _"),
    **row("gru_cell rnn_tanh_cell rnn_relu_cell", "b _, b _, _ _, _ _, _, _ -> b _"),
    **row("im2col col2im", _columns),
    **row("grid_sampler", "b c _ _, b p q _ -> b c p q"),
}
