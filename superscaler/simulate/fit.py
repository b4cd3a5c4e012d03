"""From measured seconds of kernels to the speeds of a core that explain them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from superscaler.cluster.devices import Attention, DeviceKind, Pair, Speeds
from superscaler.cluster.fit import line, nearest, rounded
from superscaler.cluster.links import Link
from superscaler.simulate import rates
from superscaler.simulate.profile import Sample
from superscaler.simulate.works import Kernel

# Keys that attention of torch computes at once on a CPU, masked or not (FlashAttentionKernel.cpp, kv_split_size).
_TILE = 512
# The channels for which rates are written down.
_CHANNELS = (64, 128)
K = TypeVar("K", bound=Hashable)


def speeds(samples: Iterable[Sample], floor: float, fresh: float) -> Speeds:
    """Return the speeds of a core for which the seconds of the samples are nearest to the measured ones."""
    products, attention, others = list[Sample](), list[Sample](), list[Sample]()
    for sample in samples:
        is_product = bool([*rates.products_of(sample.kernel)])
        kind = products if is_product else attention if rates.is_attention(sample.kernel) else others
        if rates.class_of(sample.kernel) != "free":
            kind.append(sample)
    fitted = {dtype: _product(found) for dtype, found in _by(products, rates.dtype_of).items()}
    operators = {key: _line(found) for key, found in _by(others, rates.key_of).items()}
    memory = _line([s for s in others if rates.class_of(s.kernel) == "elementwise"])
    return Speeds(
        units=0,
        products={dtype: (speed, speed) for dtype, (speed, _) in fitted.items()},
        memory=(memory.bandwidth, memory.bandwidth),
        attention={key: _attention(found) for key, found in _by(attention, _direction).items()},
        operators=operators | {f"product {dtype}": link for dtype, (_, link) in fitted.items()},
        floor=rounded(floor),
        fresh=rounded(fresh),
    )


def errors(samples: Iterable[Sample], kind: DeviceKind) -> float:
    """Return the sum of the errors of all samples beside that of their seconds."""
    pairs = [(rates.seconds(s.kernel, kind), s.seconds) for s in samples if rates.class_of(s.kernel) != "free"]
    return sum(abs(fitted - seconds) for fitted, seconds in pairs) / sum(seconds for _, seconds in pairs)


def widened(speeds: Speeds, error: float) -> Speeds:
    """Return speeds that are an error lower and higher than the fitted ones."""

    def wide(pair: Pair) -> Pair:
        return rounded(pair[0] * (1 - error)), rounded(pair[1] * (1 + error))

    attention = {
        key: replace(table, rates={c: wide(pair) for c, pair in table.rates.items()})
        for key, table in speeds.attention.items()
    }
    products = {dtype: wide(pair) for dtype, pair in speeds.products.items()}
    return replace(speeds, products=products, memory=wide(speeds.memory), attention=attention)


def _by(samples: Iterable[Sample], key: Callable[[Kernel], K]) -> dict[K, list[Sample]]:
    found: dict[K, list[Sample]] = {}
    for sample in samples:
        found.setdefault(key(sample.kernel), []).append(sample)
    return found


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
    link = Link(rounded(alpha), rounded(1 / per_byte) if per_byte else 1e15)
    return rounded(1 / per_operation), link


def _direction(kernel: Kernel) -> str:
    return f"{'backward' if 'backward' in kernel.name else 'forward'} {rates.dtype_of(kernel)}"


def _attention(samples: Sequence[Sample]) -> Attention:
    """Return the rates of attention: its seconds are those of the operations and those of each score."""
    found = [rates.scores_of(s.kernel, _TILE) for s in samples]
    operations = rates.operations_of(samples[0].kernel)
    scores = np.array([rows * keys for rows, keys, _ in found])
    channels = np.array([c for *_, c in found])
    seconds = _seconds(samples)
    columns = [np.ones(len(found)), scores, scores * channels * operations]
    _, score, operation = nearest(columns, seconds, np.sqrt(seconds))

    def rate(c: int) -> Pair:
        speed = rounded(operations * c / (score + operations * c * operation))
        return speed, speed

    return Attention({c: rate(c) for c in _CHANNELS}, tile=_TILE)


def _seconds(samples: Sequence[Sample]) -> Any:
    return np.array([s.seconds for s in samples])
