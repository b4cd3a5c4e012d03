"""Links fitted to measured times of collectives."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from superscaler.cluster.cluster import Cluster
from superscaler.cluster.links import LOCAL, Link, Links
from superscaler.groups import group_by

_FREE = Link(0.0, math.inf)
# What takes less is lost in the noise of the work beside it.
_LONG = 1e-3
# The largest share of communication that is added to work: beside it work would stand still.
_MOST = 0.95


@dataclass(frozen=True, slots=True)
class Sample:
    """The measured seconds of a collective in one group of devices of one server, from `size` bytes a device.

    `seconds` follow those of its `start`, in which the device computes nothing; `beside`: the seconds that it adds to
    simultaneous work.
    """

    kind: str
    group: tuple[int, ...]
    size: int
    seconds: float
    beside: float = 0.0
    start: float = 0.0

    @property
    def link(self) -> str:
        """The measured class of link. A send to oneself is a copy inside the device."""
        if self.kind != "send":
            return "intra"
        return "pair" if len(set(self.group)) > 1 else "device"


def fit(samples: Iterable[Sample], known: Links) -> Links:
    """Return the links with the measured ones in place of `known`: least squares of the relative error, per class.
    Curves have the rest at the measured sizes, starts are lines of the size.
    """
    samples = list(samples)
    by_link = group_by(samples, lambda sample: sample.link)
    changes: dict[str, Any] = {name: _fit(name, found) for name, found in by_link.items()}
    links = replace(known, **changes)
    curves: dict[str, dict[int, float]] = {}
    for sample in samples:
        if sample.link != "device":
            curves.setdefault(sample.kind, {})[sample.size] = rounded(sample.seconds / predict(links, sample))
    by_kind = {kind: [s for s in samples if s.kind == kind and s.start] for kind in curves}
    return replace(links, curves=curves, starts={kind: _start(found) for kind, found in by_kind.items() if found})


def _start(samples: Sequence[Sample]) -> Link:
    sizes, starts = (np.array([getattr(s, name) for s in samples], dtype=float) for name in ("size", "start"))
    return line(np.ones(len(samples)), sizes, starts)


def slowdown(samples: Iterable[Sample]) -> float:
    """Return the factor of work's time beside communication: the median of the samples.

    Communication of t seconds adds a share of them to work beside it, which does t * (1 - share) of work meanwhile.
    """
    shares = [s.beside / s.seconds for s in samples if s.link != "device" and s.seconds > _LONG]
    return rounded(1 / (1 - min(max(float(np.median(shares)), 0.0), _MOST))) if shares else 1.0


def _fit(name: str, samples: Sequence[Sample]) -> Link:
    # Seconds are steps * alpha + bytes / bandwidth; the cluster's own formulas give steps and bytes.
    ends = Link(1.0, math.inf), Link(0.0, 1.0)
    steps, moved = (np.array([_predict(name, link, s) for s in samples]) for link in ends)
    return line(steps, moved, np.array([s.seconds for s in samples]))


def line(steps: Any, moved: Any, seconds: Any, weights: Any = 1.0) -> Link:
    """Return the alpha and the bandwidth that bring steps * alpha + moved / bandwidth nearest to the seconds."""
    alpha, per_byte = nearest([steps, moved], seconds, weights)
    # Without a slope these sizes cost nothing beside the latency: the bandwidth is at least the fastest measured one.
    return Link(rounded(alpha), rounded(1 / (per_byte or float(np.min(seconds / moved)))))


def nearest(columns: Sequence[Any], seconds: Any, weights: Any = 1.0) -> list[float]:
    """Return the non-negative factors that give the sum of the columns the least squares of relative errors."""
    wanted = np.ones(len(seconds)) * weights
    rows, used = np.stack(columns, axis=1) * (wanted / seconds)[:, None], list(range(len(columns)))
    while used:
        factors = np.linalg.lstsq(rows[:, used], wanted, rcond=None)[0].tolist()
        if min(factors) >= 0:
            return [dict(zip(used, factors, strict=True)).get(n, 0.0) for n in range(len(columns))]
        used.pop(factors.index(min(factors)))
    return [0.0] * len(columns)


def _predict(name: str, link: Link, sample: Sample) -> float:
    others: dict[str, Any] = {name: link}
    return predict(replace(Links(_FREE, _FREE, _FREE, _FREE, None), **others), sample)


def predict(links: Links, sample: Sample) -> float:
    """Return the seconds that the links give a sample."""
    cluster = Cluster.of(LOCAL, LOCAL, 1, max(sample.group) + 1, links)
    return cluster.seconds(sample.kind, [sample.group], sample.size)


def error(links: Links, sample: Sample) -> float:
    """Return the relative error of the links' prediction for a sample."""
    return abs(predict(links, sample) / sample.seconds - 1)


def rounded(value: float) -> float:
    return float(f"{value:.4g}")
