"""Seconds of collectives: textbook formulas, lower bounds, shared NICs, what is refused; links from measured times."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from superscaler.cluster import LOCAL, PRESETS, Cluster, Link, Links
from superscaler.cluster.seconds import COLLECTIVES, COPIES, LOCAL_KINDS, MESSAGES
from superscaler.errors import InputError
from superscaler.ir.communication import links
from superscaler.measure.fit import Sample, error, fit, predict, slowdown

KINDS = [*COLLECTIVES, *MESSAGES]
# No two numbers are alike, so that a formula cannot take one for another.
LAB = Links(
    device=Link(3e-6, 500e9), pair=Link(2e-6, 40e9), intra=Link(1e-6, 150e9), network=Link(5e-6, 12.5e9), nics=1
)
S = 64e6


def lab(servers: int, per_server: int, **changes: object) -> Cluster:
    return Cluster.of("lab", "v100", servers, per_server, replace(LAB, **changes))


def textbook(kind: str, n: int, alpha: float, bandwidth: float, size: float) -> float:
    return {
        "all_reduce": 2 * (n - 1) * (alpha + size / n / bandwidth),
        "all_gather": (n - 1) * (alpha + size / bandwidth),
        "reduce_scatter": (n - 1) * (alpha + size / n / bandwidth),
        "all_to_all": (n - 1) * (alpha + size / n / bandwidth),
        "broadcast": (n - 1) * alpha + size / bandwidth,
        "reduce": (n - 1) * alpha + size / bandwidth,
    }[kind]


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_inside_a_server_it_is_a_ring(kind: str, n: int) -> None:
    expected = textbook(kind, n, LAB.intra.alpha, LAB.intra.bandwidth, S)
    assert lab(1, 8).seconds(kind, [range(n)], S) == pytest.approx(expected, rel=1e-12)
    assert lab(1, 8).bound(kind, [range(n)], S) == pytest.approx(textbook(kind, n, 0, 150e9, S), rel=1e-12)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_between_single_devices_of_servers_it_is_a_ring_over_the_network(kind: str) -> None:
    expected = textbook(kind, 4, LAB.network.alpha, LAB.network.bandwidth, S)
    assert lab(4, 8).seconds(kind, [[0, 8, 16, 24]], S) == pytest.approx(expected, rel=1e-12)
    # Nothing moves inside the servers.
    assert lab(4, 8, intra=Link(1.0, 1e3)).seconds(kind, [[0, 8, 16, 24]], S) == pytest.approx(expected, rel=1e-12)


def test_over_servers_with_one_nic_all_reduce_is_hierarchical() -> None:
    inside = 2 * 7 * LAB.intra.alpha + 2 * 7 / 8 * S / LAB.intra.bandwidth
    between = 2 * 3 * LAB.network.alpha + 2 * 3 / 4 * S / LAB.network.bandwidth
    assert lab(4, 8).seconds("all_reduce", [range(32)], S) == pytest.approx(inside + between, rel=1e-12)
    assert lab(4, 8).bound("all_reduce", [range(32)], S) == pytest.approx(2 * 3 / 4 * S / 12.5e9)


def test_local_devices_know_rings_only() -> None:
    rings, nccl = (Cluster.of("lab", kind, 4, 8, LAB) for kind in (LOCAL, "v100"))
    ring = 2 * (28 * LAB.intra.alpha + 3 * LAB.network.alpha) + 2 * 31 / 32 * S / LAB.network.bandwidth
    assert rings.seconds("all_reduce", [range(32)], S) == pytest.approx(ring, rel=1e-12)
    assert nccl.seconds("all_reduce", [range(32)], S) < ring


@pytest.mark.parametrize(
    ("kind", "inside", "between"),
    [
        ("all_gather", (3 - 1) * 2 * S, 3 * (2 - 1) * S),
        ("reduce_scatter", (3 - 1) / 3 * S, (2 - 1) / 2 * S),
        ("all_to_all", (3 - 1) / 3 * S, 3 * (2 - 1) / 2 * S),
        ("broadcast", S, S),
        ("reduce", S, S),
    ],
)
def test_hierarchies_of_the_other_kinds(kind: str, inside: float, between: float) -> None:
    # Latencies so large that the ring with its more steps loses.
    slow = lab(2, 3, intra=Link(1.0, 150e9), network=Link(10.0, 12.5e9))
    expected = 2 * 1.0 + 1 * 10.0 + inside / 150e9 + between / 12.5e9
    assert slow.seconds(kind, [range(6)], S) == pytest.approx(expected, rel=1e-12)


def test_over_servers_with_a_nic_per_device_a_long_message_takes_one_ring() -> None:
    cluster = Cluster.preset("h100", 4, 8)
    ring = 2 * 31 / 32 * 1e9 / PRESETS["h100"].links.intra.bandwidth
    latency = 2 * (28 * PRESETS["h100"].links.intra.alpha + 3 * PRESETS["h100"].links.network.alpha)
    assert cluster.seconds("all_reduce", [range(32)], 1e9) == pytest.approx(ring + latency, rel=1e-12)
    # A short one has fewer steps in a hierarchy.
    latency = 2 * (7 * PRESETS["h100"].links.intra.alpha + 3 * PRESETS["h100"].links.network.alpha)
    assert cluster.seconds("all_reduce", [range(32)], 0) == pytest.approx(latency, rel=1e-12)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_groups_that_cross_at_once_share_the_nic(kind: str) -> None:
    groups = [[d, d + 8] for d in range(8)]
    one = lab(2, 8, network=Link(0, 12.5e9)).seconds(kind, groups[:1], S)
    assert lab(2, 8, network=Link(0, 12.5e9)).seconds(kind, groups, S) == pytest.approx(8 * one)
    # Four NICs are shared by two groups each; eight are not shared.
    assert lab(2, 8, network=Link(0, 12.5e9), nics=4).seconds(kind, groups, S) == pytest.approx(2 * one)
    assert lab(2, 8, network=Link(0, 12.5e9), nics=None).seconds(kind, groups, S) == pytest.approx(one)
    assert lab(2, 8, network=Link(0, 12.5e9), nics=16).seconds(kind, groups, S) == pytest.approx(one / 2)


def test_broadcasts_in_both_directions_use_a_nic_both_ways() -> None:
    cluster = lab(3, 8)
    one = cluster.seconds("broadcast", [[0, 8, 16]], S)
    assert cluster.seconds("broadcast", [[0, 8, 16], [17, 9, 1]], S) == pytest.approx(5e-6 * 2 + 2 * S / 12.5e9)
    assert cluster.seconds("broadcast", [[0, 8], [17, 1]], S) == pytest.approx(one - 5e-6)


def test_a_reduce_is_a_broadcast_backwards() -> None:
    cluster = lab(3, 8)
    assert cluster.seconds("reduce", [[16, 8, 0]], S) == cluster.seconds("broadcast", [[0, 8, 16]], S)
    # Two share the NICs of their servers.
    assert cluster.seconds("reduce", [[16, 8, 0], [17, 9, 1]], S) == pytest.approx(5e-6 * 2 + 2 * S / 12.5e9)
    assert cluster.bound("reduce", [[0, 8, 9]], S) == cluster.bound("broadcast", [[9, 8, 0]], S)
    assert cluster.bound("reduce", [[0, 8, 9]], S) == pytest.approx(S / 12.5e9)


def test_messages_take_the_link_between_their_ends() -> None:
    cluster = lab(2, 8)
    assert cluster.seconds("send", [(3, 3)], S) == 3e-6 + S / 500e9
    assert cluster.seconds("send", [(0, 1), (2, 3)], S) == 2e-6 + S / 40e9
    assert cluster.seconds("send", [(0, 8)], S) == pytest.approx(5e-6 + S / 12.5e9)
    # The NIC is shared out and in, and both ways at once.
    assert cluster.seconds("send", [(0, 8), (1, 9)], S) == pytest.approx(5e-6 + 2 * S / 12.5e9)
    assert cluster.seconds("send", [(0, 8), (9, 1)], S) == pytest.approx(5e-6 + S / 12.5e9)
    # One device posts one after the other; its four links carry what a pair's one cannot.
    assert cluster.seconds("send", [(0, d) for d in range(1, 8)], S) == pytest.approx(7 * 2e-6 + 7 * S / 150e9)


def test_one_to_many_and_back() -> None:
    cluster = lab(2, 8)
    assert cluster.seconds("rd_scatter", [[0, 8, 9, 10, 11]], S) == pytest.approx(4 * 5e-6 + S / 12.5e9)
    assert cluster.seconds("rd_gather", [[8, 9, 10, 11, 0]], S) == pytest.approx(4 * 5e-6 + 4 * S / 12.5e9)
    for kind in MESSAGES:
        assert cluster.seconds(kind, [(0, 8)], S) == cluster.seconds("send", [(0, 8)], S)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cluster, str, list[list[int]]]:
    servers, per_server = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    kind = draw(st.sampled_from(KINDS))
    if draw(st.booleans()):
        cluster = Cluster.of("x", draw(st.sampled_from([*PRESETS])), servers, per_server)
    else:
        alpha, bandwidth = st.floats(0, 1e-3), st.floats(1e8, 1e12)
        links = [Link(draw(alpha), draw(bandwidth)) for _ in range(4)]
        nics = draw(st.sampled_from([1, None, per_server, 2 * per_server]))
        cluster = Cluster.of("x", LOCAL, servers, per_server, Links(*links, nics=nics))
    devices = draw(st.permutations(range(servers * per_server)))
    size = 2 if kind in ("send", "permute", "move", "messages", *COPIES) else draw(st.integers(1, 8))
    return cluster, kind, [g for i in range(0, len(devices), size) if len(g := devices[i : i + size]) > 1]


@given(case=cases(), size=st.floats(0, 1e10), more=st.floats(0, 1e10))
def test_time_grows_with_size_and_with_groups_and_is_above_the_bound(
    case: tuple[Cluster, str, list[list[int]]], size: float, more: float
) -> None:
    cluster, kind, groups = case
    seconds = cluster.seconds(kind, groups, size)
    assert cluster.bound(kind, groups, size) <= seconds * (1 + 1e-12)
    assert seconds <= cluster.seconds(kind, groups, size + more)
    assert cluster.seconds(kind, groups[1:], size) <= seconds * (1 + 1e-12)
    assert all(cluster.bound(kind, [g], size) <= cluster.bound(kind, groups, size) * (1 + 1e-12) for g in groups)


# Both leave server 1.
@example(case=(Cluster.of("local", "local", 3, 8), "reduce", [[6, 8, 7], [15, 16, 17]]), size=1.0)
@given(case=cases(), size=st.floats(0, 1e10))
def test_no_port_of_a_way_is_busy_for_longer_than_the_groups_that_use_it(
    case: tuple[Cluster, str, list[list[int]]], size: float
) -> None:
    cluster, kind, groups = case
    if not groups:
        return
    # Alpha and bandwidth alone, as `seconds` has them.
    way = replace(cluster, links=replace(cluster.links, steps={})).way(kind, groups, size)
    slowest, seconds = max(latency + slope * size for latency, slope in way.lines), cluster.seconds(kind, groups, size)
    # Messages are priced by the longest latency and the busiest link of all.
    servers = max(len({cluster.devices[d].server for d in group}) for group in groups)
    if kind in MESSAGES:
        assert slowest <= seconds
    elif cluster.kind == LOCAL or servers == 1 or (kind, servers) == ("all_reduce", 2):
        assert slowest == pytest.approx(seconds)
    else:
        assert slowest >= seconds * (1 - 1e-12)
    assert set(way.loads) == {port for ports in way.ports for port in ports}
    for (_, slope), ports in zip(way.lines, way.ports, strict=True):
        assert ports
        assert max(way.loads[port] for port in ports) <= slope * (1 + 1e-12)


def test_nccl_sends_less_than_a_ring_in_an_all_reduce_over_two_servers_alone() -> None:
    def slope(kind: str, servers: int) -> float:
        return max(s for _, s in Cluster.preset("v100", servers, 8).way(kind, [range(8 * servers)], S).lines)

    assert slope("all_gather", 2) == pytest.approx(15 / 12e9)
    assert slope("all_reduce", 4) == pytest.approx(2 * 31 / 32 / 12e9)
    assert slope("all_reduce", 2) == pytest.approx(1 / 12e9 + 2 * 7 / 8 / 120e9)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_bytes_of_a_way_by_class_of_link(kind: str) -> None:
    """Inside a server those of a ring, or of an exchange; over two, those that leave a server are on the network."""
    n = 4
    assert lab(1, n).way(kind, [range(n)], S).bytes == pytest.approx({"server": links(kind, n), "network": 0})
    assert lab(n, 1).way(kind, [range(n)], S).bytes == pytest.approx({"server": 0, "network": links(kind, n)})
    both = Cluster.of("gloo", LOCAL, 2, 2, LAB).way(kind, [range(n)], S).bytes
    assert sum(both.values()) == pytest.approx(links(kind, n))
    assert both["network"] == pytest.approx(2 if kind == "all_to_all" else links(kind, n) / 2)


@pytest.mark.parametrize("kind", LOCAL_KINDS)
def test_local_kinds_and_single_devices_take_no_time(kind: str) -> None:
    assert Cluster.local(4).seconds(kind, [range(4)], 1e9) == 0
    assert Cluster.local(4).seconds("all_reduce", [[0], [1]], 1e9) == 0
    assert Cluster.local(4).bound("all_gather", [], 1e9) == Cluster.local(4).bound(kind, [range(4)], 1e9) == 0


@pytest.mark.parametrize(
    ("kind", "groups", "message"),
    [
        ("all_reduc", [[0, 1]], "unknown collective 'all_reduc'; did you mean 'all_reduce'?"),
        ("all_reduce", [[0, 4]], "all_reduce: there is no device 4 among the 4 of the cluster."),
        ("send", [[0, 1, 2]], "send: (0, 1, 2) has 3 devices; write pairs (sender, receiver)."),
    ],
)
def test_what_is_refused(kind: str, groups: list[list[int]], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Cluster.local(4).seconds(kind, groups, 1.0)


def test_copies_between_devices_and_hosts_take_a_link_of_their_own() -> None:
    cluster = lab(2, 4, host=Link(1e-5, 2e10))
    for kind in COPIES:
        assert cluster.seconds(kind, [(d, d) for d in range(8)], S) == pytest.approx(1e-5 + S / 2e10)
        assert cluster.bound(kind, [(3, 3)], S) == pytest.approx(S / 2e10)
    assert "host: {alpha: 1.0e-05, bandwidth: 20000000000.0}" in str(cluster)
    assert Cluster.parse(str(cluster)) == cluster
    assert [(d.id, d.server, d.is_host) for d in cluster.hosts[3:5]] == [(3, 0, True), (4, 1, True)]


# Links from measured times: those that made the times come back, and no number comes out that cannot be.

SIZES = [2**k for k in range(10, 26, 3)]
MEASURED = [*((kind, (0, 1, 2, 3)) for kind in COLLECTIVES), ("send", (0, 1)), ("send", (2, 2))]


def times(links: object, noise: float = 0.0) -> list[Sample]:
    draw = random.Random(0)
    wanted = [Sample(kind, group, size, 0.0) for kind, group in MEASURED for size in SIZES]
    return [replace(s, seconds=predict(links, s) * (1 + draw.uniform(-noise, noise))) for s in wanted]


@pytest.mark.parametrize("name", PRESETS)
def test_links_come_back_from_the_times_that_they_give(name: str) -> None:
    links = replace(PRESETS[name].links, pair=Link(7e-6, 5e9))
    known = replace(PRESETS["local"].links, network=links.network, nics=links.nics)
    found = fit(times(links), known)
    for link in ("device", "pair", "intra", "network"):
        expected, got = getattr(links, link), getattr(found, link)
        # Numbers are kept with four digits.
        assert (got.alpha, got.bandwidth) == pytest.approx((expected.alpha, expected.bandwidth), rel=1e-3)
    assert max(error(found, s) for s in times(links)) < 2e-3


def test_noise_is_averaged() -> None:
    found = fit(times(PRESETS["local"].links, noise=0.2), PRESETS["local"].links)
    expected = PRESETS["local"].links.intra
    assert (found.intra.alpha, found.intra.bandwidth) == pytest.approx((expected.alpha, expected.bandwidth), rel=0.1)


@pytest.mark.parametrize("seconds", [[1e-3, 1e-3, 1e-3], [3e-3, 2e-3, 1e-3], [1e-9, 1e-5, 1e-2]])
def test_times_of_no_line_still_make_a_cluster(seconds: list[float]) -> None:
    """Times that fall with the size, and such that a line through them starts below zero."""
    samples = [Sample("all_reduce", (0, 1), 10 ** (3 * i), t, start=1e-4 * (1 + i)) for i, t in enumerate(seconds)]
    cluster = Cluster.of("measured", "local", 1, 2, fit(samples, PRESETS["local"].links))
    assert cluster.links.intra.alpha >= 0
    assert cluster.links.intra.bandwidth > 0
    assert Cluster.parse(str(cluster)) == cluster
    # The curve of a collective has what the line leaves: simulated transfers take as long as measured ones.
    for sample in samples:
        ((latency, slope),) = cluster.way("all_reduce", [(0, 1)], sample.size).lines
        assert latency + slope * sample.size == pytest.approx(sample.seconds, rel=2e-3)
        assert 1e-4 < cluster.links.start("all_reduce", sample.size) < 4e-4
    assert cluster.links.start("send", 1) == 0


# Tables of nccl-tests (benchmarks/simulate_collectives.py): MiB of an all_reduce, microseconds.
@pytest.mark.parametrize(
    ("cluster", "mebibytes", "published"),
    [("a100:4x8", 8, 320), ("a100:4x8", 64, 1079), ("a100:4x8", 1024, 11643), ("a100:1x8", 32, 374),
     ("a100:1x8", 64, 584), ("h100:1x4", 8, 65)],
)  # fmt: skip
def test_a_collective_in_short_steps_takes_as_long_as_published(cluster: str, mebibytes: int, published: int) -> None:
    found, size = Cluster.parse(cluster), mebibytes << 20
    ((latency, slope),) = found.way("all_reduce", [range(len(found.devices))], size).lines
    assert latency + slope * size == pytest.approx(published * 1e-6, rel=0.1)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_steps_change_the_seconds_of_a_byte_alone(kind: str) -> None:
    """A step of 4 devices sends what the textbook's does: the source of a gather, a quarter of it in the others."""
    sent = int(S) if kind == "all_gather" else int(S) // 4
    plain, slow = (lab(1, 4, steps=steps).way(kind, [range(4)], S) for steps in ({}, {sent: 3.0, 2 * sent: 1.0}))
    ((latency, slope),) = plain.lines
    assert slow.lines == ((latency, pytest.approx(3 * slope)),)
    assert slow.loads == {port: pytest.approx(3 * load) for port, load in plain.loads.items()}
    # Messages have no steps.
    assert lab(1, 4, steps={1: 3.0}).way("send", [[0, 1]], S) == lab(1, 4).way("send", [[0, 1]], S)


def test_a_curve_is_a_line_of_the_logarithm_between_sizes() -> None:
    links = replace(PRESETS["local"].links, curves={"send": {100: 1.0, 10000: 3.0}})
    found = [links.curve("send", size) for size in (1, 100, 1000, 10000, 10**6)]
    assert found == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])
    assert links.curve("all_reduce", 1000) == 1.0
    short = [Sample("send", (0, 1), 4, 1e-4, beside=1e-3)]
    long = [Sample("send", (0, 1), 4, 2e-3, beside=share * 2e-3) for share in (0.2, 0.4, 3)]
    assert slowdown([*short, *long]) == 1.667
    assert slowdown(short) == 1.0
