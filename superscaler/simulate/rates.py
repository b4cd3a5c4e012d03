"""The seconds of kernels on a kind of device: products by their tiles, attention by its scores, the others by bytes.

`share` is between 0 (a slow device of its kind) and 1 (a fast one); see `Speeds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from math import ceil, inf, prod
from typing import NamedTuple

from superscaler.cluster.devices import Attention, DeviceKind, Pair, Speeds
from superscaler.cluster.links import Link
from superscaler.errors import InputError
from superscaler.simulate.works import Kernel, Meta

# Operators by class; those of no class read their inputs and write their outputs in order.
_CLASSES: Mapping[str, str] = {
    name: kind
    for kind, names in {
        "free": "empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh _unsafe_view "
        "promote_types",
        "fill": "full full_like zeros zeros_like ones ones_like new_zeros new_ones new_full fill zero arange "
        "scalar_tensor",
        "reduction": "sum mean amax amin max min var var_mean prod any all logsumexp argmax linalg_vector_norm cumsum",
        "softmax": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data",
        "norm": "native_layer_norm native_group_norm native_batch_norm _fused_rms_norm",
        "norm backward": "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward "
        "_fused_rms_norm_backward",
        "copy": "clone copy _foreach_copy cat stack constant_pad_nd",
        "gather": "embedding index index_select gather nll_loss_forward nll_loss2d_forward",
        "scatter": "embedding_dense_backward index_put _unsafe_index_put _unsafe_masked_index_put_accumulate index_add "
        "scatter scatter_add",
        "expanded": "nll_loss_backward nll_loss2d_backward slice_backward select_backward",
    }.items()
    for name in names.split()
}
# What the backward of an embedding is for torch.compile.
_COMPILED_ROWS = "_unsafe_masked_index_put_accumulate"
# Products: the place of the first matrix among the inputs.
_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "_addmm_activation": 1}
# Ours, of rows with a matrix for each group (`runtime/functions/grouped.py`).
GROUPED = ("grouped_linear", "grouped_outer")
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")

# Tiles that cuBLAS tries, and their speed beside the largest: they load 1/rows + 1/columns elements for each product.
# That constant makes 64 x 64 70 % as fast, as in NVIDIA's "Matrix Multiplication Background" (section 2.3, roughly).
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_LOADS = 29.0
_LARGEST = 1 / 256 + 1 / 128
# Parts of a sum that several multiprocessors share, where there are few tiles, and the terms of the shortest part. Any
# sum may be split, at the price of whole parts: so the seconds of each way grow with k, as do those of the fastest.
_SPLITS, _PART = (1, 2, 4, 8, 16), 128
# Bytes of a row that a tile reads at once; sizes that are no multiple of 16 bytes run at this share, if none is known
# of the kind: with a vocabulary of 50,304 in place of 50,257 nanoGPT trains 25 % faster (its author, 2023).
_STEP, _ALIGNED, _UNALIGNED = 64, 16, 0.4
# Seconds to fill the pipeline of a tile and to write it: two accesses to memory (some 0.5 us each, Jia et al. 2018).
_FILL = 1e-6
# Channels of attention are padded to a multiple of this; a block has so many queries (FlashAttention-2).
_CHANNELS, _QUERIES = 32, 128
# glibc takes memory for larger tensors from the system, which gives it page by page (M_MMAP_THRESHOLD, mallopt(3)).
_LARGE = 32 << 20

# A call of a segment takes the host so many times as long as the start of a kernel: 0.16 ms and 24 us on the host of an
# H200 (benchmarks/results/gpu_step_time.txt).
_CALL = 6
# Bytes a second of an optimizer on the host, for each device of a server: DeepSpeed's updates a billion weights of 28
# bytes in 0.22 s (Ren et al. 2021, ZeRO-Offload, table 4), which 8 devices share. A host of 16 cores with one H200
# reaches 20 GB/s.
HOST = 16e9

_PLAIN = "float32"
_BYTES = {"bool": 1, "int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int16": 2, "int32": 4, "float32": 4}


@lru_cache(maxsize=1 << 16)
def seconds(kernel: Kernel, kind: DeviceKind, share: float = 0.5) -> float:
    """Return the seconds of a kernel on a device. Raises InputError if the speeds of the kind are unknown."""
    speeds = _speeds(kind)
    if class_of(kernel) == "free":
        return 0.0
    if kernel.name.startswith("_host_") and speeds.units:
        return bytes_of(kernel) / HOST
    products, fresh = list(products_of(kernel)), _fresh(kernel, speeds)
    if products:
        return fresh + sum(_product(speeds, *p, dtype=dtype_of(kernel), share=share) for p in products)
    if is_attention(kernel):
        return fresh + _attend(kernel, speeds, share)
    line = line_of(kernel, speeds)
    # Bandwidths of operators are those of a device in the middle.
    scale = _at(speeds.memory, share) / _at(speeds.memory, 0.5)
    return fresh + (line.alpha or speeds.floor) + bytes_of(kernel) / (line.bandwidth * scale)


class Launched(NamedTuple):
    """The seconds of kernels in order: on the `device` alone; `late`: from the start of the host to the end on a device
    that waits for each start; of the `host`.
    """

    device: float
    late: float
    host: float


def launched(kernels: Iterable[Kernel], kind: DeviceKind, share: float = 0.5) -> Launched:
    """Return the seconds of kernels, and of their starts. The host starts one each `issue` seconds, and calls the
    segment; it does not wait for the device.
    """
    issue, device, late, host = _speeds(kind).issue, 0.0, 0.0, 0.0
    for kernel in kernels:
        if class_of(kernel) != "free":
            host += issue
            own = seconds(kernel, kind, share)
            device, late = device + own, max(host, late) + own
    return Launched(device, late, host + _CALL * issue if host else 0.0)


def name_of(kernel: Kernel) -> str:
    """Return the operator without its overload. Sums of whole columns, and of planes, are operators of their own."""
    base = kernel.name.partition(".")[0]
    if _CLASSES.get(base) != "reduction" or not kernel.inputs[0][0] or not kernel.outputs[0][0]:
        return base
    read, made = kernel.inputs[0][0], kernel.outputs[0][0]
    if made[-1] != read[-1] or made[-1] == 1:
        return base
    return f"{base} columns" if prod(made) == made[-1] else f"{base} planes"


def class_of(kernel: Kernel) -> str:
    """Return the class of an operator; `elementwise` if it has none."""
    name, _, kind = name_of(kernel).partition(" ")
    return kind or _CLASSES.get(name.rstrip("_"), "elementwise")


def line_of(kernel: Kernel, speeds: Speeds) -> Link:
    """Return alpha and bandwidth of an operator that is no product and no attention."""
    for key in (key_of(kernel), name_of(kernel), class_of(kernel)):
        if key in speeds.operators:
            return speeds.operators[key]
    plain = speeds.operators.get(f"{name_of(kernel)} {_PLAIN}")
    if plain is not None:
        # An element takes as long in another dtype.
        return Link(plain.alpha, plain.bandwidth * width_of(dtype_of(kernel)) / width_of(_PLAIN))
    return Link(speeds.floor, _at(speeds.memory, 0.5))


def key_of(kernel: Kernel) -> str:
    """Return the operator with its dtype."""
    return f"{name_of(kernel)} {dtype_of(kernel)}"


def dtype_of(kernel: Kernel) -> str:
    """Return the dtype that a kernel computes in: that of its first result."""
    return (*kernel.outputs, *kernel.inputs, ((), _PLAIN))[0][1]


def bytes_of(kernel: Kernel) -> int:
    """Return the bytes that a kernel reads and writes."""
    read, made = sum(map(size_of, kernel.inputs)), sum(map(size_of, kernel.outputs))
    numbers = sum(size_of(x) for x in kernel.inputs if x[1].startswith("int"))
    kind, first = class_of(kernel), size_of(kernel.inputs[0]) if kernel.inputs else 0
    if kind == "fill":
        return made
    if kind == "gather":
        # A row that is read and written; of a loss, a place in each row of scores.
        return 2 * made + numbers * (5 if "loss" in kernel.name else 1)
    if kernel.name == _COMPILED_ROWS:
        return made + 3 * size_of(kernel.inputs[-1]) + numbers
    if kind == "scatter" and not _is_in_place(kernel):
        return made + 3 * first + numbers
    if kind == "expanded":
        return made + numbers if "loss" in kernel.name else made + 2 * first
    return read + made


def size_of(meta: Meta) -> int:
    """Return the bytes of a tensor."""
    return prod(meta[0]) * width_of(meta[1])


def width_of(dtype: str) -> int:
    return _BYTES.get(dtype, 1 if dtype.startswith("float8") else 8)


def products_of(kernel: Kernel) -> Iterator[tuple[int, int, int, int]]:
    """Yield (batch, m, n, k) of the matrix products in a kernel: none, one, or the gradients of a convolution."""
    name, shapes = name_of(kernel), [shape for shape, _ in kernel.inputs]
    if name in _PRODUCTS:
        left, right = shapes[_PRODUCTS[name] :][:2]
        if name == "_grouped_mm":
            yield right[0], ceil(left[-2] / right[0]), right[-1], left[-1]
        else:
            yield prod(left[:-2]), left[-2], right[-1] if len(right) > 1 else 1, left[-1]
    elif name in GROUPED:
        # Each group has as many rows where nothing is known of them, those of other devices, too.
        groups, rows, columns = kernel.outputs[0][0] if name == "grouped_outer" else shapes[1]
        each = ceil(shapes[0][0] / shapes[2][0])
        yield (groups, rows, columns, each) if name == "grouped_outer" else (groups, each, rows, columns)
    elif name in ("convolution", "_convolution"):
        yield _convolution(kernel.outputs[0][0], shapes[0], shapes[1])
    elif name == "convolution_backward":
        made, read, weight = shapes[:3]
        groups, rows, columns, inner = _convolution(made, read, weight)
        for shape, _ in kernel.outputs:
            if shape == read:
                yield groups, rows, inner, columns
            elif shape == weight:
                yield groups, columns, inner, rows


def _convolution(made: tuple[int, ...], read: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, int, int, int]:
    if weight[0] != made[1]:
        # A transposed convolution: the product of the other direction.
        made, read = read, made
    groups = read[1] // weight[1]
    return groups, made[0] * prod(made[2:]), weight[0] // groups, prod(weight[1:])


def is_attention(kernel: Kernel) -> bool:
    return kernel.name.startswith(_ATTENTION)


def scores_of(kernel: Kernel, tile: int) -> tuple[int, float, int]:
    """Return (rows, keys, channels) of attention: rows of scores, the keys of each on average, in whole tiles."""
    q, k = (shape for shape, _ in kernel.inputs[1 if "backward" in kernel.name else 0 :][:2])
    keys = k[-2]
    return prod(q[:-1]), min(keys, (keys + tile) / 2) if kernel.causal else keys, q[-1]


def operations_of(kernel: Kernel) -> int:
    """Return the operations of attention per score and channel: two products forward, five backward."""
    return 10 if "backward" in kernel.name else 4


def _speeds(kind: DeviceKind) -> Speeds:
    if kind.speeds is None:
        raise InputError(
            f"nothing is known about the kernels of {kind.name} devices; measure them with superscaler doctor "
            "--measure --out cluster.yaml, and give --cluster cluster.yaml."
        )
    return kind.speeds


def _at(pair: Pair, share: float) -> float:
    return pair[0] + (pair[1] - pair[0]) * share


def _is_in_place(kernel: Kernel) -> bool:
    return name_of(kernel).endswith("_")


def rate_of(speeds: Speeds, dtype: str, share: float) -> float:
    """Return the speed of products of a dtype; an unknown dtype has the slowest speed."""
    known = speeds.products.get(dtype) or min(speeds.products.values())
    return _at(known, share)


def _fresh(kernel: Kernel, speeds: Speeds) -> float:
    if not speeds.fresh or _is_in_place(kernel):
        return 0.0
    return sum(size for size in map(size_of, kernel.outputs) if size >= _LARGE) / speeds.fresh


def _product(speeds: Speeds, batch: int, m: int, n: int, k: int, *, dtype: str, share: float) -> float:
    rate, width = rate_of(speeds, dtype, share), width_of(dtype)
    moved = batch * (m * k + k * n + m * n) * width
    if not speeds.units:
        line = speeds.operators.get(f"product {dtype}", Link(speeds.floor, inf))
        return line.alpha + moved / line.bandwidth + 2 * batch * m * n * k / rate
    boost = max(rate, speeds.boost.get(dtype, 0.0))
    if any(size * width % _ALIGNED for size in (m, n, k)):
        slow = speeds.unaligned.get(dtype, _UNALIGNED)
        rate, boost = rate * slow, boost * slow
    memory = _at(speeds.memory, share)
    fastest = min(
        tiled(speeds.units, boost, (batch, m, n, k), tile, split, width)
        + (split > 1) * (speeds.floor + 8 * split * batch * m * n / memory)
        for tile in _TILES
        for split in _SPLITS
    )
    # Short of whole waves, tiles run at the boost clock; the power limit holds for all together.
    return speeds.floor + max(fastest, 2 * batch * m * n * k / rate, moved / memory)


def tiled(
    units: int, rate: float, sizes: tuple[int, int, int, int], tile: tuple[int, int], split: int = 1, width: int = 2
) -> float:
    """Return the seconds of a product in tiles of a size: whole waves of as many tiles as there are multiprocessors."""
    batch, m, n, k = sizes
    rows, columns = tile
    waves = ceil(batch * ceil(m / rows) * ceil(n / columns) * split / units)
    inner = max(ceil(k / split * width / _STEP) * _STEP / width, _PART if split > 1 else 0)
    speed = (1 + _LOADS * _LARGEST) / (1 + _LOADS * (1 / rows + 1 / columns))
    return _FILL + waves * 2 * rows * columns * inner / (rate * speed / units)


def _attend(kernel: Kernel, speeds: Speeds, share: float) -> float:
    dtype, direction = dtype_of(kernel), "backward" if "backward" in kernel.name else "forward"
    wanted = (f"{direction} {dtype}", direction, f"{direction} {_PLAIN}")
    key = next((key for key in wanted if key in speeds.attention), None)
    if key is None:
        rows, keys, channels = scores_of(kernel, 1)
        return speeds.floor + operations_of(kernel) * rows * keys * channels / rate_of(speeds, dtype, share)
    table = speeds.attention[key]
    rows, keys, channels = scores_of(kernel, table.tile)
    found = rows * keys * _score(table, channels, bool(speeds.units), operations_of(kernel), share)
    found *= 1 + table.ramp / keys
    found /= table.causal if kernel.causal else 1.0
    if key == direction and width_of(dtype) > 2:
        # Rates are those of halves.
        found *= rate_of(speeds, "float16", share) / rate_of(speeds, dtype, share)
    found *= max(1.0, speeds.units / ceil(rows / _QUERIES))
    return speeds.floor + max(found, bytes_of(kernel) / _at(speeds.memory, share) if speeds.units else 0.0)


def _score(table: Attention, channels: int, is_padded: bool, operations: int, share: float) -> float:
    """Return the seconds of a score: interpolated between known numbers of channels, proportional above them."""
    wide = ceil(channels / _CHANNELS) * _CHANNELS if is_padded else channels
    points = sorted((n, operations * n / _at(rate, share)) for n, rate in table.rates.items())
    last, most = points[-1]
    if wide >= last or len(points) == 1:
        return most * wide / last
    (low, less), (high, more) = next(pair for pair in pairwise(points) if wide <= pair[1][0])
    return max(less + (more - less) * (wide - low) / (high - low), less * min(1.0, wide / low))


def flops_of(kernel: Kernel) -> int:
    """Return the operations of the matrix products in a kernel, all scores of attention counted."""
    if is_attention(kernel):
        q, k = (shape for shape, _ in kernel.inputs[1 if "backward" in kernel.name else 0 :][:2])
        return operations_of(kernel) * prod(q) * k[-2]
    return sum(2 * prod(sizes) for sizes in products_of(kernel))


def needed_of(kernel: Kernel) -> float:
    """Return the operations of the matrix products in a kernel, without the scores that a causal mask hides."""
    return operations_of(kernel) * prod(scores_of(kernel, 1)) if is_attention(kernel) else flops_of(kernel)
