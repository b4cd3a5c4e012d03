"""The kinds of device: memory, peaks, and speeds of kernels.

Speeds of the presets are those that published measurements give for large kernels, not the peaks of data sheets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from superscaler.cluster.links import Link

# What the slow and the fast devices of a kind reach, or a measurement under load and one alone.
Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention, in operations per second by channels of a head: 4 or 10 operations per score and channel.

    ramp     the number of keys of a query that gives half of that speed
    causal   the factor if later keys are masked; `tile`: the keys that a query computes together, masked or not
    """

    rates: Mapping[int, Pair]
    ramp: int = 0
    causal: float = 1.0
    tile: int = 1


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of kernels on a device, in operations, bytes and seconds.

    units      multiprocessors that share the tiles of a product; 0: a core, which reads and then computes
    products   operations per second of large matrix products, by dtype
    attention  `forward` and `backward`, also of a dtype (`forward float32`)
    memory     bytes per second of large kernels that read and write; of others by `operators`: an operator with its
               dtype (`gelu bfloat16`), an operator, or a class of these (`product` for the reads of a core)
    floor      the seconds of the shortest kernel
    issue      the seconds of the host to start a kernel, while the device runs others; 0: the host is the device
    fresh      bytes per second at which the system gives memory for a large tensor; 0: there is a pool
    slowdown   the factor of a kernel's time while communication runs beside it
    """

    units: int
    products: Mapping[str, Pair]
    memory: Pair
    attention: Mapping[str, Attention] = field(default_factory=dict)
    operators: Mapping[str, Link] = field(default_factory=dict)
    floor: float = 2e-6
    issue: float = 0.0
    fresh: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A model of device. `memory` in bytes; `flops` per second at the dense peak, by dtype of the matrix products;
    `speeds` of its kernels, if they are known.
    """

    name: str
    memory: int
    flops: Mapping[str, float] = field(hash=False)
    speeds: Speeds | None = field(default=None, hash=False)


GB = 10**9


def classes(memory: Pair, measured: Mapping[str, float]) -> dict[str, Link]:
    """Return the classes below the bandwidth of memory. Shares that are not `measured` are estimates, as is the sorting
    of the numbers of rows before gradients are added to these.
    """
    shares: dict[str, float] = {
        "reduction": 0.8,
        "planes": 0.8,
        "columns": 0.6,
        "softmax": 0.8,
        "norm": 0.85,
        "norm backward": 0.6,
        "copy": 0.75,
    } | dict(measured)
    middle = sum(memory) / 2
    sorting = {"gather": Link(0.0, 0.7 * middle), "scatter": Link(20e-6, 0.3 * middle)}
    return {name: Link(0.0, share * middle) for name, share in shares.items()} | sorting


def _half(large: Pair, plain: Pair) -> dict[str, Pair]:
    return {"bfloat16": large, "float16": large, "float32": plain}


# The seconds in which eager torch starts a kernel: 5 to 10 us with autograd on a server CPU (an estimate; the null
# kernel alone takes 2 to 3 us on the host and as much on the device: NVIDIA's developer blog on CUDA graphs, 2019).
_ISSUE, _FLOOR = 7e-6, 2.0e-6
# Kernels beside those of NCCL take 18.9 % longer on average, 40 % at most, on A100, H100 and others (Lee et al. 2025,
# Characterizing Compute-Communication Overlap, arXiv 2507.03114).
_BESIDE = 1.19


def _gpu(
    units: int,
    products: Mapping[str, Pair],
    memory: Pair,
    attention: Mapping[str, Attention],
    shares: Mapping[str, float] | None = None,
) -> Speeds:
    return Speeds(units, products, memory, attention, classes(memory, shares or {}), _FLOOR, _ISSUE, slowdown=_BESIDE)


# FlashAttention-3 (Shah et al. 2024), figures 5 and 6, H100 SXM, 16,384 keys: FlashAttention-2 and cuDNN. Torch takes
# cuDNN from 9.15.1 on (sdp_utils.cpp, check_prefer_cudnn_attention), FlashAttention-2 before. The ramps and the causal
# factor are read off the same figures from 512 keys on.
_HOPPER_ATTENTION = {
    "forward": Attention({64: (324e12, 413e12), 128: (370e12, 595e12)}, ramp=100, causal=0.9, tile=128),
    "backward": Attention({64: (291e12, 433e12), 128: (322e12, 516e12)}, ramp=256, causal=0.9, tile=128),
}
# MAMF: "maximum achievable matmul FLOPS" of stas00/ml-engineering, the best shape found; sustained: after the clock has
# settled at the power limit. H100: 792 at best, large products at the power limit 600 to 650; H200: 755 sustained and
# 652 on average over shapes (hpc-ai.com, B200 and H200). Equal GPUs differ by 9 to 14 % (PRISM). CUDA cores: 90 % of
# the data sheet (an estimate). Memory: a copy of H100 reaches 3,090 GB/s of 3,350, one of H200 4,300 of 4,800.
_H100 = _gpu(132, _half((600e12, 750e12), (55e12, 62e12)), (2800e9, 3090e9), _HOPPER_ATTENTION)
SPEEDS: Mapping[str, Speeds] = {
    # cuBLAS reaches 101 of the 112 Tflop/s of a V100 PCIe at 8192 (forums.developer.nvidia.com 79781): 90 %, which are
    # 112 of 125 on SXM2, less at the power limit. Memory: 750 of 900 GB/s (Jia et al. 2018, Dissecting Volta), 830 at
    # most. Torch has no flash attention for it; its memory-efficient kernels are an estimate.
    "v100": _gpu(
        units=80,
        products=_half((95e12, 110e12), (14e12, 15e12)) | {"bfloat16": (12e12, 14e12)},
        memory=(750e9, 830e9),
        attention={
            "forward": Attention({64: (35e12, 50e12), 128: (40e12, 60e12)}, ramp=100, causal=0.9, tile=64),
            "backward": Attention({64: (25e12, 40e12), 128: (30e12, 45e12)}, ramp=256, causal=0.9, tile=64),
        },
    ),
    # MAMF 268; 250 at the power limit (an estimate). Memory: 85 to 90 % (an estimate). FlashAttention-2 (Dao 2023): up
    # to 73 % of the peak forward, 63 % backward; the rates of 64 channels are an estimate.
    "a100": _gpu(
        units=108,
        products=_half((250e12, 275e12), (17.5e12, 19e12)),
        memory=(1730e9, 1840e9),
        attention={
            "forward": Attention({64: (175e12, 195e12), 128: (210e12, 230e12)}, ramp=100, causal=0.9, tile=128),
            "backward": Attention({64: (155e12, 172e12), 128: (178e12, 196e12)}, ramp=256, causal=0.9, tile=128),
        },
    ),
    "h100": _H100,
    # Products of cold cards reach 770 to 820. Its kernels are bound by more than its memory: shares of 4,150 GB/s in a
    # step of GPT-3 1.3B. Attention with 64 channels is torch 2.11's cuDNN at 2,048 to 32,768 keys, with 128 an estimate
    # (benchmarks/results/gpu_operators.txt).
    "h200": _gpu(
        units=132,
        products=_half((650e12, 800e12), (55e12, 62e12)),
        memory=(4000e9, 4300e9),
        attention={
            "forward": Attention({64: (475e12, 550e12), 128: (570e12, 660e12)}, ramp=277, causal=0.9, tile=128),
            "backward": Attention({64: (420e12, 488e12), 128: (490e12, 560e12)}, ramp=371, causal=0.9, tile=128),
        },
        shares={
            "elementwise": 0.87,
            "_to_copy": 0.66,
            "copy": 0.95,
            "norm": 0.65,
            "norm backward": 0.41,
            "columns": 0.5,
            "_log_softmax": 0.47,
            "softmax": 0.65,
        },
    ),
    # MAMF 1,745; sustained 1,429, 1,420 on average over shapes (hpc-ai.com). 148 multiprocessors and 7,672 GB/s by the
    # driver (pytorch/ao 4002); copies reach 6,000 (newmind.ai) and more. Attention: cuDNN as FlashAttention-4 compares
    # itself with; backward and 64 channels are an estimate.
    "b200": _gpu(
        units=148,
        products=_half((1420e12, 1700e12), (65e12, 72e12)),
        memory=(6000e9, 7000e9),
        attention={
            "forward": Attention({64: (650e12, 850e12), 128: (1000e12, 1300e12)}, ramp=150, causal=0.9, tile=128),
            "backward": Attention({64: (500e12, 700e12), 128: (750e12, 1000e12)}, ramp=350, causal=0.9, tile=128),
        },
    ),
}

# Memory is the decimal size on the data sheet, which is a little less than what the driver reports. Peaks are dense,
# without sparsity; float32 is the plain unit, not TF32.
PRESETS: Mapping[str, DeviceKind] = {
    # NVIDIA V100 Tensor Core GPU data sheet, SXM2, 32 GB. It has no bfloat16 unit.
    "v100": DeviceKind("v100", 32 * GB, {"float16": 125e12, "float32": 15.7e12}, SPEEDS["v100"]),
    # NVIDIA A100 Tensor Core GPU data sheet, SXM, 80 GB.
    "a100": DeviceKind("a100", 80 * GB, {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}, SPEEDS["a100"]),
    # NVIDIA H100 Tensor Core GPU data sheet, SXM, 80 GB; it prints the peak with sparsity, which is twice this.
    "h100": DeviceKind("h100", 80 * GB, {"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 67e12}, SPEEDS["h100"]),
    # NVIDIA H200 Tensor Core GPU data sheet, SXM, 141 GB; same chip as the H100.
    "h200": DeviceKind("h200", 141 * GB, {"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 67e12}, SPEEDS["h200"]),
    # NVIDIA HGX B200 data sheet, a GPU of 8: 4.5 PFLOPS of bfloat16 with sparsity, which is twice this.
    "b200": DeviceKind("b200", 180 * GB, {"bfloat16": 2250e12, "float16": 2250e12, "float32": 75e12}, SPEEDS["b200"]),
}
