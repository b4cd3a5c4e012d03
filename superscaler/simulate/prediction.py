"""`Prediction`: seconds and bytes of a plan on a cluster, and their text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from superscaler.specs.sizes import duration, number, size

# Parts of a step below this share are not said.
_SMALL = 0.005
# Where devices wait for the host for this share of their work, in a step of so many times its bound, the host is the
# cause.
_LAUNCH_BOUND, _FAR = 0.3, 10


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Devices that run one program. Times are seconds of a step, in the mean over them.

    compute        segments, copies and sums; `host`: waits in these and in updates for the host to start kernels
    optimizer      updates of weights
    launch         starts of communication
    communication  waits for data under way
    copies         waits for copies to and from the host
    bubble         waits for work of other devices
    peak_bytes     the largest use of memory; `memory`: its parts at that moment; `peak_at`: its place;
                   `largest`: the live tensors then, the largest first; `kept`: activations of each block
    excess         the first tensor beyond the memory of the device
    """

    devices: tuple[int, ...]
    compute: float
    host: float
    optimizer: float
    launch: float
    communication: float
    copies: float
    bubble: float
    peak_bytes: int
    memory: Mapping[str, int]
    peak_at: str
    largest: Sequence[tuple[str, int]]
    kept: Mapping[str, int]
    excess: str


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of each device, by rank: the scores that it computes forward, without hidden ones, and its seconds
    in both directions.
    """

    scores: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """Return the scores of the device with the most, beside the mean."""
        return max(self.scores) * len(self.scores) / max(sum(self.scores), 1)

    def __str__(self) -> str:
        most, mean = max(self.scores), sum(self.seconds) / len(self.seconds)
        return (
            f"attention inside documents: {number(most)} scores on the device with the most, {self.imbalance:.2f} of "
            f"the mean; {duration(max(self.seconds))} at most, {duration(mean)} in the mean"
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one step of a plan.

    low, high       seconds of the step on fast devices and on slow ones of the kind
    samples         of the global batch; `tokens` of all samples, 0 for inputs that are no tokens
    model_flops     of the model itself, without recomputation
    peak_flops      per second, of a device for the dtype of most products; `bound`: seconds of the model's own
                    operations, without masked scores of attention, on all devices at the rate of large products
    devices         a row for each distinct program
    capacity        bytes of a device, None if unknown; `reserved`: bytes of it for the driver and libraries
    links           bytes of a step by class of link
    assumed         what is assumed of kernels, in words
    attention       of each device, if the documents of rows are given
    """

    cluster: str
    precision: str
    step_seconds: float
    low: float
    high: float
    samples: int
    tokens: int
    model_flops: float
    peak_flops: float
    bound: float
    devices: tuple[DeviceTimes, ...]
    capacity: int | None
    reserved: int
    links: Mapping[str, float]
    assumed: str = ""
    attention: Attention | None = None

    @property
    def world(self) -> int:
        return sum(len(d.devices) for d in self.devices)

    @property
    def fullest(self) -> DeviceTimes:
        """Return the devices with the most memory in use."""
        return max(self.devices, key=lambda d: d.peak_bytes)

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.fullest.peak_bytes <= self.capacity

    @property
    def tflops(self) -> float:
        """Return 10**12 operations per second and device, of the model itself."""
        return self.model_flops / self.step_seconds / self.world / 1e12

    @property
    def mfu(self) -> float | None:
        """Return the share of the peak that the model's own operations use; None if no peak is known."""
        return self.tflops * 1e12 / self.peak_flops if self.peak_flops else None

    @property
    def speed(self) -> str:
        """Return the tokens, or samples, of a second in words."""
        amount, what = (self.tokens, "tokens") if self.tokens else (self.samples, "samples")
        return f"{number(amount / self.step_seconds)} {what}/s"

    def mean(self, part: str) -> float:
        """Return the mean over all devices of one of their times."""
        total: float = sum(getattr(d, part) * len(d.devices) for d in self.devices)
        return total / self.world

    def as_json(self) -> dict[str, Any]:
        """Return all numbers: seconds, bytes, operations."""
        whole = {"fits": self.fits, "tflops": self.tflops, "mfu": self.mfu, "peak_bytes": self.fullest.peak_bytes}
        return {**asdict(self), **whole}


def fit_line(peak: int, where: str, capacity: int | None, reserved: int) -> str:
    """Return whether devices have the memory that they need, in one line. `where`: these devices."""
    if capacity is None:
        return f"memory: {size(peak)} at most, on {where}"
    verdict = "fits" if peak <= capacity else "does not fit"
    part = f" ({size(reserved)} of it for CUDA and NCCL)" if reserved else ""
    return f"{verdict}: {size(peak)} on {where}, of {size(capacity)}{part}"


def words(p: Prediction) -> str:
    """Return a prediction in lines of text."""
    where = devices_text(p.fullest.devices, p.world)
    first = fit_line(p.fullest.peak_bytes, where, p.capacity, p.reserved)
    return "\n".join([first, *(f"  {line}" for line in _lines(p))])


def _lines(p: Prediction) -> Iterator[str]:
    full = p.fullest
    yield f"precision: {p.precision}"
    yield "  ".join(f"{name} {size(count)}" for name, count in full.memory.items() if count)
    largest = "; ".join(f"{size(count)} {name}" for name, count in full.largest)
    yield f"the peak is in {full.peak_at}" + (f": {largest}" if largest else "")
    if blocks := [name for name in full.kept if name]:
        kept = sum(full.kept[name] for name in blocks)
        where = f"blocks, {blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else f"block, {blocks[0]}"
        yield f"{size(kept)} of the activations are kept for {len(blocks)} {where}"
    if full.excess:
        yield f"the first tensor too many is {full.excess}"
    peak = f", {share}" if (share := peak_share(p)) else ""
    low, high = duration(p.low), duration(p.high)
    spread = f" ({low} on fast devices of this kind, {high} on slow ones)" if low != high else ""
    condition = "" if p.fits else ", if it did fit"
    yield f"step {duration(p.step_seconds)}{spread}{peak}, {p.speed}{condition}"
    host, work = p.mean("host"), p.mean("compute") + p.mean("optimizer")
    if host > _LAUNCH_BOUND * work and p.step_seconds > _FAR * p.bound:
        yield f"launch-bound: for {min(host / work, 1):.0%} of their work devices wait for the host to start kernels"
    elif p.bound:
        yield f"the model's own products take {duration(p.bound)} of it at full speed; the rest{_said(_losses(p))}"
    if p.links:
        yield "bytes of a step: " + ", ".join(f"{name} {size(count)}" for name, count in p.links.items() if count)
    if p.attention:
        yield str(p.attention)
    if p.assumed:
        yield f"assumed: {p.assumed}"


def peak_share(p: Prediction) -> str:
    """Return the share of the peak in words, nothing where no peak is known. Less than 1% has no further number."""
    if p.mfu is None:
        return ""
    return f"{p.mfu:.0%} of peak FLOPs ({p.tflops:.1f} TFLOPS a device)" if p.mfu >= 0.01 else "under 1% of peak FLOPs"


def _losses(p: Prediction) -> list[tuple[float, str]]:
    """Return the step's seconds beyond its bound, by cause, the largest first; small parts of the step are left out."""
    parts = {
        "slower and other kernels": p.mean("compute") - p.bound,
        "waits for communication": p.mean("communication"),
        "bubble": p.mean("bubble"),
        "optimizer": p.mean("optimizer"),
        "waits for copies": p.mean("copies"),
        "starts of communication": p.mean("launch"),
    }
    found = ((seconds, name) for name, seconds in parts.items() if seconds > _SMALL * p.step_seconds)
    return sorted(found, reverse=True)


def _said(losses: Sequence[tuple[float, str]]) -> str:
    return " is " + ", ".join(f"{duration(seconds)} {name}" for seconds, name in losses) if losses else " is small"


# The columns of devices after their names: the parts of their time, and their peak.
COLUMNS: Mapping[str, Callable[[DeviceTimes], str]] = {
    "compute": lambda d: duration(d.compute),
    "communication": lambda d: duration(d.communication),
    "bubble": lambda d: duration(d.bubble),
    "optimizer": lambda d: duration(d.optimizer),
    "other": lambda d: duration(d.launch + d.copies),
    "peak": lambda d: size(d.peak_bytes),
}
# The columns of plans after their names.
PLANS: Mapping[str, Callable[[Prediction], str]] = {
    "peak": lambda p: size(p.fullest.peak_bytes),
    "fits": lambda p: "yes" if p.fits else "no",
    "step": lambda p: duration(p.step_seconds),
    "beside products": lambda p: ", ".join(f"{duration(s)} {name}" for s, name in _losses(p)[:2]),
}


def device_rows(p: Prediction) -> Iterator[tuple[str, ...]]:
    """Yield a row of text for each kind of equal devices: these, and `COLUMNS`."""
    equal: dict[tuple[str, ...], list[int]] = {}
    for d in p.devices:
        equal.setdefault(tuple(text(d) for text in COLUMNS.values()), []).extend(d.devices)
    yield from ((devices_text(sorted(devices), p.world), *row) for row, devices in equal.items())


def plan_row(spec: str, p: Prediction) -> tuple[str, ...]:
    """Return a row of text for a plan among others: its name, and `PLANS`."""
    return (spec, *(text(p) for text in PLANS.values()))


def devices_text(devices: Sequence[int], world: int) -> str:
    """Return devices in words."""
    if len(devices) == world:
        return "every device" if world > 1 else "the device"
    if len(devices) == 1:
        return f"device {devices[0]}"
    ends = devices[0], devices[-1]
    is_row = list(devices) == list(range(ends[0], ends[1] + 1))
    return f"devices {ends[0]} to {ends[1]}" if is_row else f"{len(devices)} devices ({ends[0]} to {ends[1]})"
