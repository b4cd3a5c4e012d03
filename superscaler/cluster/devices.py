"""The kinds of device: memory, peaks, and speeds of kernels.

Speeds are those that measurements give for large kernels, not the peaks of data sheets. Numbers of known devices are
in `presets`, a file each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from superscaler.cluster.links import Link, Links

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
    boost      that of their tiles before the power limit slows the clock, by dtype; left out: that of `products`
    unaligned  the share of it that products reach with a size that is no multiple of 16 bytes, by dtype; left out: 0.4
    attention  `forward` and `backward`, also of a dtype (`forward float32`)
    attentions `attention` by the name of other kernels than torch's, as flash1
    memory     bytes per second of large kernels that read and write; of others by `operators`: an operator with its
               dtype (`gelu bfloat16`), an operator, or a class of these (`product` for the reads of a core)
    floor      the seconds of the shortest kernel
    issue      the seconds of the host to start a kernel, while the device runs others; 0: the host is the device
    fresh      bytes per second at which the system gives memory for a large tensor; 0: there is a pool
    slowdown   the factor of a kernel's time while communication runs beside it
    cores      of a server, which its devices share if they are more; 0: each device has its own
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
    boost: Mapping[str, float] = field(default_factory=dict)
    unaligned: Mapping[str, float] = field(default_factory=dict)
    attentions: Mapping[str, Mapping[str, Attention]] = field(default_factory=dict)
    cores: int = 0


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A model of device. `memory` in bytes; `flops` per second at the dense peak, by dtype of the matrix products;
    `speeds` of its kernels, if they are known.
    """

    name: str
    memory: int
    flops: Mapping[str, float] = field(hash=False)
    speeds: Speeds | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class Preset:
    """What is known of a kind of device before it is measured. `device`: None if only its links are."""

    links: Links
    device: DeviceKind | None


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
