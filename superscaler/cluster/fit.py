"""From measured times of collectives to the links that explain them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from superscaler.cluster.cluster import Cluster
from superscaler.cluster.links import LOCAL, Link, Links

_FREE = Link(0.0, math.inf)


@dataclass(frozen=True, slots=True)
class Sample:
    """The measured seconds of a collective in one group of devices of one server, from `size` bytes a device."""

    kind: str
    group: tuple[int, ...]
    size: int
    seconds: float

    @property
    def link(self) -> str:
        """The class of link that was measured. A send to oneself is a copy inside the device."""
        if self.kind != "send":
            return "intra"
        return "pair" if len(set(self.group)) > 1 else "device"


def fit(samples: Iterable[Sample], known: Links) -> Links:
    """Return the links with those measured in place of `known`: least squares of the relative error, per class."""
    by_link: dict[str, list[Sample]] = {}
    for sample in samples:
        by_link.setdefault(sample.link, []).append(sample)
    changes: dict[str, Any] = {name: _fit(name, found) for name, found in by_link.items()}
    return replace(known, **changes)


def _fit(name: str, samples: Sequence[Sample]) -> Link:
    # Seconds are steps * alpha + bytes / bandwidth; the cluster's own formulas give steps and bytes.
    ends = Link(1.0, math.inf), Link(0.0, 1.0)
    steps, moved = (np.array([_predict(name, link, s) for s in samples]) for link in ends)
    seconds = np.array([s.seconds for s in samples])
    rows = np.stack([steps / seconds, moved / seconds], axis=1)
    alpha, per_byte = np.linalg.lstsq(rows, np.ones(len(samples)), rcond=None)[0].tolist()
    if alpha < 0:
        alpha, per_byte = 0.0, _alone(rows[:, 1])
    elif per_byte <= 0:
        # These sizes cost nothing beside the latency: the bandwidth is at least the fastest measured one.
        alpha, per_byte = _alone(rows[:, 0]), float(np.min(seconds / moved))
    return Link(_rounded(alpha), _rounded(1 / per_byte))


def _alone(column: Any) -> float:
    return float(column.sum() / (column @ column))


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


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
