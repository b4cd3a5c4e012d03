"""Measured seconds of the kernels of small models on this machine, in ranks that train beside others, and the speeds of
a core that explain them.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from superscaler.cluster.devices import Attention, DeviceKind, Pair, Speeds
from superscaler.cluster.links import Link
from superscaler.groups import group_by
from superscaler.measure.fit import line, nearest, rounded
from superscaler.measure.links import connected
from superscaler.simulate import rates
from superscaler.simulate.repeats.made import kernel_of
from superscaler.simulate.works import Kernel

# (batch, sequence, hidden, heads, vocabulary): from kernels that take the shortest time to some of 100 ms; heads of 16
# to 128 channels. No result is so large that its memory comes from the system.
SIZES = (
    (1, 16, 32, 2, 64),
    (2, 64, 128, 4, 512),
    (2, 128, 256, 8, 1024),
    (4, 256, 384, 4, 2048),
    (4, 256, 512, 8, 4096),
    (2, 512, 768, 6, 6144),
)
DTYPES = ("float32", "bfloat16")
# The first run makes buffers.
_WARM, _REPEATS = 1, 3
# A kernel that waits for more pages of memory than this was the first to use it.
_PAGES = 8
# 64 MiB, which malloc does not keep.
_LARGE = 1 << 24
# Keys that attention of torch computes at once on a CPU, masked or not (FlashAttentionKernel.cpp, kv_split_size).
_TILE = 512
# The channels for which rates are written down.
_CHANNELS = (64, 128)


@dataclass(frozen=True, slots=True)
class Sample:
    """The measured seconds of a kernel."""

    kernel: Kernel
    seconds: float

    @classmethod
    def read(cls, tree: dict[str, Any]) -> Sample:
        """Return the sample in JSON data."""
        kernel = tree["kernel"]
        read, made = (tuple((tuple(shape), dtype) for shape, dtype in kernel[k]) for k in ("inputs", "outputs"))
        return cls(Kernel(kernel["name"], read, made, kernel["causal"]), tree["seconds"])


class Timer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorder of the seconds of each kernel that waits for few new pages of memory from the system.

    Seconds of the thread do not count time that other processes take.
    """

    def __init__(self, pages: int = 1 << 62) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.pages = list[Sample](), pages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        faults, start = _faults(), time.thread_time()
        made = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - start
        kernel = kernel_of(func, args, kwargs, made)
        if kernel.outputs and not func.is_view and func.namespace != "prim" and _faults() - faults < self.pages:
            self.found.append(Sample(kernel, seconds))
        return made


def measure(count: str = str(len(SIZES))) -> dict[str, Any]:
    """Return `samples` of kernels on a CPU, in models of the first sizes; the `floor`, seconds of a kernel with its
    call from Python; `fresh`, the bytes per second of memory from the system. All ranks run the same kernels together.
    """
    communicator = connected()
    floor, extra = overhead(models(*SIZES[0], "float32"))
    by_kernel = dict[Kernel, list[float]]()
    for dtype in DTYPES:
        for size in SIZES[: int(count)]:
            run = models(*size, dtype)
            communicator.barrier()
            for sample in _timed(run):
                by_kernel.setdefault(sample.kernel, []).append(sample.seconds - extra)
    fresh = _fresh()
    communicator.close()
    samples = [Sample(kernel, max(statistics.median(found), floor / 4)) for kernel, found in by_kernel.items()]
    return {"samples": [asdict(s) for s in samples], "floor": floor, "fresh": fresh}


def _timed(run: Callable[[], None]) -> list[Sample]:
    for _ in range(_WARM):
        run()
    with Timer(_PAGES) as timer:
        for _ in range(_REPEATS):
            run()
    return list(timer.found)


def overhead(
    run: Callable[[], None], clock: Callable[[], float] = time.thread_time, repeats: int = 20
) -> tuple[float, float]:
    """Return the seconds of a kernel without work, with Python and autograd around it, and the timer's own seconds."""
    run()
    times = []
    for _ in range(repeats):
        start = clock()
        run()
        times.append(clock() - start)
    noted = _timed(run)
    floor = statistics.median(times) / len(noted) * _REPEATS
    return floor, statistics.median(s.seconds for s in noted) - floor


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _fresh() -> float:
    """Return the bytes per second at which the system gives new memory, without the time to write to it."""

    def fill(make: Callable[[], Tensor]) -> float:
        start = time.thread_time()
        make().fill_(1.0)
        return time.thread_time() - start

    kept = torch.ones(_LARGE)
    times = [fill(lambda: torch.empty(_LARGE)) - fill(lambda: kept) for _ in range(5)]
    return kept.nbytes / max(statistics.median(times), 1e-9)


def models(
    batch: int, keys: int, hidden: int, heads: int, words: int, dtype: str, device: str | torch.device = "cpu"
) -> Callable[[], None]:
    """Return a training step of a model with blocks as GPT-2 and llama have them."""
    draw = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        # A vector is the factor or the sum of a norm or of a product.
        x = torch.randn(shape, generator=draw).mul_(0.02) if len(shape) > 1 else torch.ones(shape)
        return x.to(device).requires_grad_()

    wide, half = 4 * hidden, hidden // 2
    gpt = [(hidden,), (hidden,), (3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    gpt += [(hidden,), (hidden,), (wide, hidden), (wide,), (hidden, wide), (hidden,)]
    llama = [(hidden,), (hidden, hidden), (half, hidden), (half, hidden), (hidden, hidden)]
    llama += [(hidden,), (wide, hidden), (wide, hidden), (hidden, wide)]
    table, places, head = weight(words, hidden), weight(keys, hidden), weight(words, hidden)
    shapes = {_gpt: gpt, _gpt_tanh: gpt, _llama: llama, _others: []}
    blocks = [(block, [weight(*s) for s in own]) for block, own in shapes.items()]
    weights = [table, places, head, *(w for _, own in blocks for w in own)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    ids = torch.randint(words, (batch, keys + 1), generator=draw).to(device)
    turns = torch.randn(1, 1, keys, hidden // heads, generator=draw).to(device)

    def run() -> None:
        with torch.autocast(ids.device.type, getattr(torch, dtype), enabled=dtype != "float32"):
            x = F.embedding(ids[:, :-1].contiguous(), table) + places
            for block, own in blocks:
                x = block(x, own, heads, turns)
            logits = F.linear(x, head).float()
            loss = F.cross_entropy(logits.view(-1, words), ids[:, 1:].reshape(-1))
        gradients = torch.autograd.grad(loss, weights)
        sums = [g.clone() for g in gradients]
        # One after the other, so that they are in no cache.
        for change in (Tensor.add_, Tensor.copy_):
            for w, x, g in zip(weights, sums, gradients, strict=True):
                w.grad = change(x, g)
        optimizer.step()

    return run


def _gpt(
    x: Tensor, w: Sequence[Tensor], heads: int, turns: Tensor, gelu: Callable[[Tensor], Tensor] = F.gelu
) -> Tensor:
    joined = F.linear(F.layer_norm(x, x.shape[-1:], w[0], w[1]), w[2], w[3])
    q, k, v = (_split(z, heads) for z in joined.chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(y.transpose(1, 2).reshape(x.shape), w[4], w[5])
    up = F.linear(F.layer_norm(x, x.shape[-1:], w[6], w[7]), w[8], w[9])
    return x + F.linear(gelu(up), w[10], w[11])


def _gpt_tanh(x: Tensor, w: Sequence[Tensor], heads: int, turns: Tensor) -> Tensor:
    return _gpt(x, w, heads, turns, lambda u: F.gelu(u, approximate="tanh"))


def _llama(x: Tensor, w: Sequence[Tensor], heads: int, turns: Tensor) -> Tensor:
    y = _root_norm(x, w[0])
    q, k = (_turned(_split(F.linear(y, w[n]), heads // n), turns) for n in (1, 2))
    k, v = (
        z[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for z in (k, _split(F.linear(y, w[3]), heads // 2))
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(y.transpose(1, 2).reshape(x.shape), w[4])
    y = _root_norm(x, w[5])
    return x + F.linear(F.silu(F.linear(y, w[6])) * F.linear(y, w[7]), w[8])


def _others(x: Tensor, w: Sequence[Tensor], heads: int, turns: Tensor) -> Tensor:
    """Return a sequence of operators of other models, with attention that is not fused."""
    q = _split(x, heads)
    x = x + torch.matmul(torch.matmul(q, q.transpose(2, 3)).softmax(-1), q).transpose(1, 2).reshape(x.shape)
    x = x + torch.exp(-torch.relu(x)) + torch.sigmoid(x) + torch.tanh(x)
    return torch.where(x > 0, x, x.masked_fill(x < -1, 0.0)).abs().add(1.0).sqrt() + torch.cos(x) * torch.sin(x)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return x * turns + torch.cat((-two, one), -1) * turns


def _root_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def speeds(samples: Iterable[Sample], floor: float, fresh: float) -> Speeds:
    """Return the speeds of a core that fit the measured seconds of the samples best."""
    products, attention, others = list[Sample](), list[Sample](), list[Sample]()
    for sample in samples:
        is_product = bool([*rates.products_of(sample.kernel)])
        kind = products if is_product else attention if rates.is_attention(sample.kernel) else others
        if rates.class_of(sample.kernel) != "free":
            kind.append(sample)
    fitted = {dtype: _product(found) for dtype, found in group_by(products, lambda s: rates.dtype_of(s.kernel)).items()}
    operators = {key: _line(found) for key, found in group_by(others, lambda s: rates.key_of(s.kernel)).items()}
    memory = _line([s for s in others if rates.class_of(s.kernel) == "elementwise"])
    return Speeds(
        units=0,
        products={dtype: (speed, speed) for dtype, (speed, _) in fitted.items()},
        memory=(memory.bandwidth, memory.bandwidth),
        attention={
            key: _attention(found) for key, found in group_by(attention, lambda s: _direction(s.kernel)).items()
        },
        operators=operators | {f"product {dtype}": link for dtype, (_, link) in fitted.items()},
        floor=rounded(floor),
        fresh=rounded(fresh),
    )


def errors(samples: Iterable[Sample], kind: DeviceKind) -> float:
    """Return the sum of the errors of all samples, divided by the sum of their seconds."""
    pairs = [(rates.seconds(s.kernel, kind), s.seconds) for s in samples if rates.class_of(s.kernel) != "free"]
    return sum(abs(fitted - seconds) for fitted, seconds in pairs) / sum(seconds for _, seconds in pairs)


def widened(speeds: Speeds, error: float) -> Speeds:
    """Return the fitted speeds, made lower and higher by an error."""

    def wide(pair: Pair) -> Pair:
        return rounded(pair[0] * (1 - error)), rounded(pair[1] * (1 + error))

    attention = {
        key: replace(table, rates={c: wide(pair) for c, pair in table.rates.items()})
        for key, table in speeds.attention.items()
    }
    products = {dtype: wide(pair) for dtype, pair in speeds.products.items()}
    return replace(speeds, products=products, memory=wide(speeds.memory), attention=attention)


def _line(samples: Sequence[Sample]) -> Link:
    moved = np.array([rates.bytes_of(s.kernel) for s in samples], dtype=float)
    seconds = _seconds(samples)
    # Small tensors are in a cache, large ones weigh more in a step.
    return line(np.ones(len(samples)), np.maximum(moved, 1.0), seconds, np.sqrt(seconds))


def _product(samples: Sequence[Sample]) -> tuple[float, Link]:
    sizes = [next(rates.products_of(s.kernel)) for s in samples]
    moved = [rates.bytes_of(s.kernel) for s in samples]
    columns = [np.ones(len(samples)), np.array(moved), np.array([2 * b * m * n * k for b, m, n, k in sizes])]
    alpha, per_byte, per_operation = nearest(columns, _seconds(samples))
    return _speed(1, per_operation), Link(rounded(alpha), _speed(1, per_byte))


def _speed(amount: int, seconds: float) -> float:
    """Return an amount a second; 1e18 where kernels are so small that their seconds do not depend on it."""
    return rounded(amount / seconds) if seconds else 1e18


def _direction(kernel: Kernel) -> str:
    return f"{'backward' if 'backward' in kernel.name else 'forward'} {rates.dtype_of(kernel)}"


def _attention(samples: Sequence[Sample]) -> Attention:
    """Return the rates of attention: seconds of its operations plus seconds of its scores."""
    found = [rates.scores_of(s.kernel, _TILE) for s in samples]
    operations = rates.operations_of(samples[0].kernel)
    scores = np.array([rows * keys for rows, keys, _ in found])
    channels = np.array([c for *_, c in found])
    seconds = _seconds(samples)
    columns = [np.ones(len(found)), scores, scores * channels * operations]
    _, score, operation = nearest(columns, seconds, np.sqrt(seconds))

    def rate(c: int) -> Pair:
        speed = _speed(operations * c, score + operations * c * operation)
        return speed, speed

    return Attention({c: rate(c) for c in _CHANNELS}, tile=_TILE)


def _seconds(samples: Sequence[Sample]) -> Any:
    return np.array([s.seconds for s in samples])
