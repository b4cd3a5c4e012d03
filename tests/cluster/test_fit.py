"""Links from measured times: those that made the times come back, and no number comes out that cannot be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from superscaler.cluster import LINKS, Cluster, Link
from superscaler.cluster.fit import Sample, error, fit, predict
from superscaler.cluster.seconds import COLLECTIVES

SIZES = [2**k for k in range(10, 26, 3)]
CASES = [*((kind, (0, 1, 2, 3)) for kind in COLLECTIVES), ("send", (0, 1)), ("send", (2, 2))]


def times(links: object, noise: float = 0.0) -> list[Sample]:
    draw = random.Random(0)
    wanted = [Sample(kind, group, size, 0.0) for kind, group in CASES for size in SIZES]
    return [replace(s, seconds=predict(links, s) * (1 + draw.uniform(-noise, noise))) for s in wanted]


@pytest.mark.parametrize("name", LINKS)
def test_links_come_back_from_the_times_that_they_give(name: str) -> None:
    links = replace(LINKS[name], pair=Link(7e-6, 5e9))
    known = replace(LINKS["local"], network=links.network, nics=links.nics)
    found = fit(times(links), known)
    for link in ("device", "pair", "intra", "network"):
        expected, got = getattr(links, link), getattr(found, link)
        # Numbers are kept with four digits.
        assert (got.alpha, got.bandwidth) == pytest.approx((expected.alpha, expected.bandwidth), rel=1e-3)
    assert max(error(found, s) for s in times(links)) < 2e-3


def test_noise_is_averaged() -> None:
    found = fit(times(LINKS["local"], noise=0.2), LINKS["local"])
    expected = LINKS["local"].intra
    assert (found.intra.alpha, found.intra.bandwidth) == pytest.approx((expected.alpha, expected.bandwidth), rel=0.1)


@pytest.mark.parametrize("seconds", [[1e-3, 1e-3, 1e-3], [3e-3, 2e-3, 1e-3], [1e-9, 1e-5, 1e-2]])
def test_times_of_no_line_still_make_a_cluster(seconds: list[float]) -> None:
    """Times that fall with the size, and such that a line through them starts below zero."""
    samples = [Sample("all_reduce", (0, 1), 10 ** (3 * i), t) for i, t in enumerate(seconds)]
    cluster = Cluster.of("measured", "local", 1, 2, fit(samples, LINKS["local"]))
    assert cluster.links.intra.alpha >= 0
    assert cluster.links.intra.bandwidth > 0
    assert Cluster.parse(str(cluster)) == cluster
