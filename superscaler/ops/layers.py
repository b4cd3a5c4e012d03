"""Normalizations, and operators of space: convolutions, pools, grids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from superscaler.ir.graph import Op
from superscaler.ops.call import Local, Site
from superscaler.ops.notation import Shape
from superscaler.ops.row import Sized, plain, row, whole


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
    """By given statistics; those of the batch are decomposed."""
    return f"b c r..{', c' * (len(site.ins) - 1)} -> b c r.."


def _is_transposed(call: Site | Op) -> bool:
    return "transpose" in call.target or (_is_general(call) and bool(call.args[6]))


def _is_general(call: Site | Op) -> bool:
    return "convolution" in call.target


def _convolution(site: Site) -> Sized | None:
    """Batch, groups, output channels; input channels are contracted where nothing is added; space is whole."""
    groups = site.argument(8 if _is_general(site) else 6, "groups", 1)
    if len(site.ins[0]) != len(site.ins[1]):
        return None
    space = " ".join("_" for _ in site.ins[0][2:])
    c = "c^" if len(site.ins) > 2 else "c+"
    weight = f"(g {c}) o" if _is_transposed(site) else f"(g o) {c}"
    sizes = {"g": groups, "c": site.ins[0][1] // groups, "o": site.outs[0][1] // groups}
    return f"b (g {c}) {space}, {weight} {space}, (g o) -> b (g o) {space}", sizes


def _convolution_text(x: Local) -> str:
    """Groups are counted again: the channels of a part over those of one group."""
    channels = (x.results if _is_transposed(x.op) else x.shapes)[0][1]
    return plain(x.given(8 if _is_general(x.op) else 6, "groups", channels // x.shapes[1][1]))


def _convolution_flops(op: Op, ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    """A product of the weight for each place, of the result or (transposed) of the input."""
    places = (ins if _is_transposed(op) else outs)[0]
    return 2 * prod(ins[1]) * prod(places[2 - len(ins[1]) :]) * (places[0] if len(places) == len(ins[1]) else 1)


def _pool(site: Site) -> str:
    """All but the space, whose number of dims is in the operator's name."""
    rank, space = len(site.ins[0]), int("".join(re.findall(r"\dd", site.target))[0])
    return site.alike(whole(site.letters, range(rank - space, rank)))


def _windows(site: Site) -> Sized:
    """im2col and col2im: channels and the places of a kernel are one dim."""
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
    **row("group_norm", "b c^ r..^, c, c -> b c r.."),
    **row("instance_norm", "b c r..^, c, c, c, c -> b c r.."),
    **row("batch_norm", _batch_norm),
    **row(_CONVOLUTIONS, _convolution, text=_convolution_text, flops=_convolution_flops),
    **row(f"{_POOLS} {_RESIZES}", _pool),
    **row("im2col col2im", _windows),
    **row("grid_sampler", "b c _ _, b p q _ -> b c p q"),
}
