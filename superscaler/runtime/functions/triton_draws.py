"""The numbers of `draws.mix` in one kernel of Triton, which comes with torch's builds for GPUs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The rows and columns of a tile.
_HIGH, _WIDE = 4, 256


def mix(rows: Tensor, columns: Tensor, out: Tensor) -> None:
    """Write the numbers of `draws.mix` of int64 words, (rows, 1) and (columns,), to `out`, float32."""
    if out.numel():
        tiles = triton.cdiv(len(rows), _HIGH) * triton.cdiv(len(columns), _WIDE)
        with torch.cuda.device_of(out):
            _mix[(tiles,)](rows, columns, out, len(rows), len(columns), high=_HIGH, wide=_WIDE)


@triton.jit
def _mix(rows, columns, out, height, width, high: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    tile, across = tl.program_id(0), tl.cdiv(width, wide)
    row = (tile // across).to(tl.int64) * high + tl.arange(0, high)[:, None]
    column = (tile % across).to(tl.int64) * wide + tl.arange(0, wide)[None, :]
    words = tl.load(rows + row, row < height, 0) + tl.load(columns + column, column < width, 0)
    # Shifts fill with the sign.
    words ^= (words >> 30) & 0x3FFFFFFFF
    words *= -0x40A7B892E31B1A47
    words ^= (words >> 27) & 0x1FFFFFFFFF
    words *= -0x6B2FB644ECCEEE15
    numbers = ((words >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
    tl.store(out + row * width + column, numbers, (row < height) & (column < width))
