"""The clock against hand-made formulas: overlap, waits for others, shared links, copies, slower work, launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import superscaler as ss
from superscaler.cluster import links
from superscaler.errors import ScheduleError
from superscaler.ir.cohorts import Cohort
from superscaler.ir.loops import Loop, Rolled
from superscaler.ir.program import Backward, Collective, Forward, Instruction, Load, Recv, Send, Wait
from superscaler.measure.fit import Sample, slowdown
from superscaler.plans import resolve
from superscaler.simulate.clock import Behavior, clock
from superscaler.simulate.timetable import COMPUTE, Link
from tests.helpers.small_plans import exact
from tests.helpers.sweeps import slow
from tests.simulate.by_hand import (
    END,
    UPDATE,
    UPDATES,
    chain,
    check_sums,
    cluster,
    copied,
    made_of,
    received,
    reduced,
    run,
    sent,
    timed,
    wait,
    work,
)  # fmt: skip

TWO = cluster(1, 2)


@pytest.mark.parametrize("beside", [0.0, 3.0, 20.0])
def test_data_parallel_with_and_without_overlap(beside: float) -> None:
    moved = TWO.seconds("all_reduce", [[0, 1]], 8)
    assert moved == 8
    code = [run(5.0), reduced("g", [0, 1], 8), run(beside), wait("g"), UPDATES, END]
    found = timed(TWO, code, code)
    assert found.seconds == 5 + max(beside, moved) + UPDATE
    assert found.compute.tolist() == [5 + beside] * 2
    assert found.optimizer.tolist() == [UPDATE] * 2
    assert found.exposed.tolist() == [max(moved - beside, 0)] * 2
    assert found.bytes == {"server": 16, "network": 0}


def test_a_device_that_comes_early_waits_for_the_others_and_then_for_the_bytes() -> None:
    codes = ([run(seconds), reduced("g", [0, 1], 8), wait("g")] for seconds in (1.0, 5.0))
    found = timed(TWO, *codes)
    assert found.bubble.tolist() == [4, 0]
    assert found.exposed.tolist() == [8, 8]
    assert found.path == (Link(1, 0, 5.0, False), Link(found.path[1].device, 1, 8.0, True))


def test_collectives_of_a_group_go_one_after_the_other_and_those_of_two_groups_side_by_side() -> None:
    link = cluster(3, 1, alpha=1.0, bandwidth=1e12)
    assert link.seconds("all_reduce", [[0, 1]], 0) == 2
    one = [reduced("a", [0, 1], 0), reduced("b", [0, 1], 0), wait("b")]
    assert timed(link, one, one, [END]).seconds == 4
    codes = (
        [reduced("a", [0, 1], 0), reduced("b", [0, 2], 0), wait("b"), wait("a")],
        [reduced("a", [0, 1], 0), wait("a")],
        [reduced("b", [0, 2], 0), wait("b")],
    )
    assert timed(link, *codes).seconds == 2


@pytest.mark.parametrize("late", [0.0, 3.0, 5.0, 20.0])
def test_two_groups_that_share_a_nic_have_half_of_it_each(late: float) -> None:
    """Groups (0, 2) and (1, 3) of two servers with one NIC each: the second starts so much later."""
    servers, groups = cluster(2, 2), [[0, 2], [1, 3]]
    alone, both = servers.seconds("all_reduce", groups[:1], 8), servers.seconds("all_reduce", groups, 8)
    assert (alone, both) == (8, 16)
    first, second = ([run(s), reduced("g", g, 8), wait("g")] for s, g in zip((0.0, late), groups, strict=True))
    found = timed(servers, first, second, first, second)
    shared = max(alone - late, 0)
    assert found.seconds == late + alone + shared
    assert found.exposed[:2].tolist() == [alone + shared] * 2
    assert found.seconds - found.bubble[0] == alone + shared
    assert found.bytes["network"] == 2 * 16


@pytest.mark.parametrize(("first", "last"), [(10.0, 14.0), (1.0, 9.0)])
def test_a_host_that_is_ahead_hides_the_starts_of_short_work(first: float, last: float) -> None:
    """Work of 4 seconds whose last kernel is started after 5 of the 6 seconds of its host, behind work of other 3."""
    code = [run(first), run(4.0)]
    starts = {0: (first, 3.0), 1: (6.0, 6.0)}
    found = timed(TWO, code, code, starts=lambda cohort, at: starts[at])
    # The host starts the second work at 3, whatever the device does.
    assert found.seconds == last == max(first + 4, 3 + 6)
    assert found.host.tolist() == [last - first - 4] * 2


def test_communication_starts_after_what_the_host_started_before() -> None:
    code = [run(1.0), reduced("g", [0, 1], 8), wait("g"), run(1.0)]
    starts = {0: (1.0, 5.0), 3: (1.5, 2.0)}
    found = timed(TWO, code, code, launch=2.0, starts=lambda cohort, at: starts.get(at, (0.0, 0.0)))
    # 4 seconds of waits for the host; it is at 7 when the last work is started, long before the bytes are there.
    assert found.seconds == 5 + 2 + 8 + 1
    assert found.host.tolist() == [4, 4]
    assert found.launch.tolist() == [6, 6]


def test_a_host_goes_on_after_it_started_communication() -> None:
    code = [run(10.0), reduced("g", [0, 1], 8), run(1.0), wait("g")]
    starts = {0: (10.0, 1.0), 2: (6.0, 6.0)}
    found = timed(TWO, code, code, launch=2.0, starts=lambda cohort, at: starts.get(at, (0.0, 0.0)))
    # It is at 3 when the device is at 12, so that the work after it is not late.
    assert found.host.tolist() == [0, 0]
    assert found.seconds == 10 + 2 + 8


def test_a_message_beside_a_large_collective_takes_twice_its_time() -> None:
    servers = cluster(2, 2)
    large = [reduced("g", [0, 2], 100), wait("g")]
    found = timed(servers, large, [run(10.0), sent(3, 0, 4)], large, [received("m", 1, 0, 4), wait("m")])
    assert found.exposed.tolist() == [104, 8, 104, 8]
    assert found.bubble[3] == 10 + found.seconds - 18
    assert found.seconds == 104


def test_devices_that_share_a_core_work_as_fast_as_those_that_wait_let_them() -> None:
    """Works of 2 and 6 seconds on one core: both have half of it until 4. Then the second has it alone."""
    found = timed(TWO, [run(2.0)], [run(6.0)], cores=1)
    assert found.seconds == 8
    assert found.compute.tolist() == [4, 8]
    assert found.bubble.tolist() == [4, 0]


def test_three_devices_share_two_cores_from_when_their_message_is_there() -> None:
    """One works for 8 seconds while two communicate; from then on each has two thirds of a core."""
    one = cluster(1, 3)
    both = [reduced("g", [0, 1], 8), wait("g"), run(6.0)]
    found = timed(one, both, both, [run(12.0)], cores=2)
    # The last one has 4 seconds left at 8, which take 6 seconds; then the first two have a core each for 2 more.
    assert found.compute.tolist() == [8, 8, 14]
    assert found.seconds == 16


@pytest.mark.parametrize("count", [1, 2])
def test_a_pipeline_of_one_microbatch_needs_one_core(count: int) -> None:
    """Its devices never work at a time."""
    first = [run(5.0), sent(1, 0, 4), received("g", 1, 1, 4), wait("g"), run(3.0)]
    second = [received("m", 0, 0, 4), wait("m"), run(7.0), sent(0, 1, 4)]
    assert timed(TWO, first, second, cores=count).seconds == timed(TWO, first, second).seconds


def test_communication_beside_work_takes_the_core_that_devices_share() -> None:
    code = [run(5.0), reduced("g", [0, 1], 8), run(10.0), wait("g")]
    alone, shared = (timed(TWO, code, code, slowdown=2.0, cores=count) for count in (0, 1))
    # 4 of the 8 seconds of communication are work of each device.
    assert alone.seconds == 5 + 10 + 4
    assert shared.seconds == 2 * (5 + 10 + 4)


def fluid(jobs: list[tuple[int, int]]) -> list[float]:
    """Return the ends of jobs (start, seconds alone) that have equal shares of one link, step by step."""
    now, left, ends = 0.0, dict[int, float](), dict[int, float]()
    while len(ends) < len(jobs):
        left |= {n: seconds for n, (start, seconds) in enumerate(jobs) if start == now}
        starts = [float(start) for start, _ in jobs if start > now]
        least = min(left, key=left.__getitem__, default=-1)
        then = min([*starts, *([now + left[least] * len(left)] if left else [])])
        left = {n: seconds - (then - now) / len(left) for n, seconds in left.items()}
        ends |= {n: then for n, seconds in left.items() if seconds < 1e-9}
        left = {n: seconds for n, seconds in left.items() if n not in ends}
        now = then
    return [ends[n] for n in range(len(jobs))]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 2, 4, 9])), min_size=1, max_size=6))
@example([(0, 1), (0, 4), (4, 1)])
@example([(0, 2), (1, 9), (6, 4)])
def test_messages_on_one_nic_have_equal_shares(jobs: list[tuple[int, int]]) -> None:
    """Each device of a server sends to one of another server, so many bytes at some time."""
    k = len(jobs)
    codes = [[run(float(start)), sent(k + n, 0, size)] for n, (start, size) in enumerate(jobs)]
    codes += [[received("m", n, 0, size), wait("m")] for n, (_, size) in enumerate(jobs)]
    found = timed(cluster(2, k), *codes)
    ends = {d: lane.end[-1, row] for lane in found.lanes for row, d in enumerate(lane.devices.tolist())}
    assert [ends[k + n] for n in range(k)] == pytest.approx(fluid(jobs))


def test_a_message_comes_when_both_ends_are_there_and_its_sender_goes_on() -> None:
    found = timed(TWO, [run(2.0), sent(1, 0, 3), run(1.0)], [run(4.0), received("m", 0, 0, 3), wait("m")])
    assert found.seconds == 4 + 3
    assert found.compute.tolist() == [3, 4]
    # The step of a device ends when its streams do.
    assert (found.bubble.tolist(), found.exposed.tolist()) == ([1, 0], [3, 3])
    found = timed(TWO, [run(6.0), sent(1, 0, 3), UPDATES], [received("m", 0, 0, 3), run(4.0), wait("m")])
    assert found.bubble.tolist() == [0, 2 + UPDATE]
    # An update waits for sends.
    assert found.exposed.tolist() == [3, 3]


@pytest.mark.parametrize("growth", [0, 1])
def test_a_loop_takes_the_time_of_its_repetitions(growth: int) -> None:
    """Messages have a number each; the bytes of the collectives may grow from one repetition to the next."""

    def repetitions(at: int) -> tuple[tuple[Instruction, ...], ...]:
        both = reduced("g", [0, 1], 8 + growth * at)
        return (run(2.0), sent(1, at, 3), both, wait("g")), (received("m", 0, at, 3), both, wait("g"), wait("m"))

    loops = [Rolled((Loop(*pair, count=4), (run(1.0),))) for pair in zip(repetitions(0), repetitions(1), strict=True)]
    found = timed(TWO, *loops)
    written = timed(TWO, *map(tuple, loops))
    assert found.seconds == written.seconds == 4 * (2 + 8 + 3) + growth * 6 + 1
    assert found.bytes == written.bytes
    for lane, other in zip(found.lanes, written.lanes, strict=True):
        assert np.array_equal(lane.end, other.end)
        assert np.array_equal(lane.instruction, other.instruction)


def test_directions_and_peers_have_a_stream_each() -> None:
    link = cluster(3, 1, alpha=1.0, bandwidth=1e12)
    middle = [
        received("a", 0, 0, 1),
        received("b", 2, 0, 1),
        run(4.0),
        sent(0, 0, 1),
        sent(2, 0, 1),
        wait("a"),
        wait("b"),
    ]
    first, last = ([run(s), sent(1, 0, 1), received("m", 1, 0, 1), wait("m")] for s in (1.0, 9.0))
    found = timed(link, first, middle, last)
    assert found.seconds == pytest.approx(10)
    # The message to device 0 passes the one that device 2 sends late.
    assert (found.bubble[0], found.exposed[0]) == pytest.approx((4 - 1 + 10 - 5, 1))
    # On one stream both start together, and what is behind them waits for both.
    assert timed(link, first, middle, last, one_stream=True).seconds == pytest.approx(11)


def test_messages_that_start_together_meet_in_any_order() -> None:
    """On one stream: each device sends to the next one, and receives from the one before, in one batch."""
    ring = cluster(3, 1)
    codes = [[sent((d + 1) % 3, 0, 5, 0), received("m", (d - 1) % 3, 0, 5, 0), wait("m")] for d in range(3)]
    for one in (False, True):
        assert timed(ring, *codes, one_stream=one).exposed.tolist() == [5] * 3
    apart = [[sent((d + 1) % 3, 0, 5, 0), run(0.0), received("m", (d - 1) % 3, 0, 5, 1), wait("m")] for d in range(3)]
    assert timed(ring, *apart).exposed.tolist() == [5] * 3
    with pytest.raises(ScheduleError, match=r"device 0, instruction 3: Wait of m never ends"):
        timed(ring, *apart, one_stream=True)


def test_copies_have_a_stream_for_each_direction() -> None:
    one = cluster(1, 1)
    found = timed(one, [copied("a", 6), copied("b", 6), copied("c", 4, to_host=False), run(5.0), wait("c"), wait("b")])
    assert found.seconds == 12
    assert found.copies.tolist() == [7]
    assert found.lanes[0].streams == ("compute", "to_host", "to_device")
    assert timed(one, [copied("a", 6), run(1.0), UPDATES]).copies.tolist() == [5]


@pytest.mark.parametrize(
    ("seconds", "moved", "wanted"),
    [(10.0, 4, 10 + 4 * 0.2), (10.0, 40, 12.5), (10.0, 0, 10.0)],
)  # fmt: skip
def test_work_is_slower_only_while_bytes_of_its_device_move(seconds: float, moved: int, wanted: float) -> None:
    code = [reduced("g", [0, 1], moved), run(seconds), wait("g")]
    found = timed(TWO, code, code, slowdown=1.25)
    assert found.compute.tolist() == pytest.approx([wanted] * 2)
    assert found.seconds == pytest.approx(max(wanted, moved))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_work_beside_communication_loses_the_measured_share_of_its_seconds(share: float) -> None:
    moved = TWO.seconds("all_reduce", [[0, 1]], 8)
    factor = slowdown([Sample("all_reduce", (0, 1), 8, moved, beside=share * moved)])
    code = [reduced("g", [0, 1], 8), run(50.0), wait("g")]
    assert timed(TWO, code, code, slowdown=factor).compute[0] == pytest.approx(50 + share * moved, rel=1e-3)


def test_work_slows_for_what_begins_later_and_no_more_for_two_transfers_than_for_one() -> None:
    link = cluster(1, 4)
    code = [reduced("a", [0, 1], 4), reduced("b", [0, 1, 2, 3], 0), run(20.0), wait("a")]
    # Device 1 starts 6 seconds later: the bytes move from 6 to 10.
    late = [run(6.0), *code]
    found = timed(link, code, late, [reduced("b", [0, 1, 2, 3], 0)], [reduced("b", [0, 1, 2, 3], 0)], slowdown=2.0)
    assert found.compute[0] == 20 + 4 / 2
    two = [sent(1, 0, 4), received("m", 1, 0, 4), run(20.0), wait("m")]
    other = [sent(0, 0, 4), received("m", 0, 0, 4), run(20.0), wait("m")]
    assert timed(TWO, two, other, slowdown=2.0).compute.tolist() == [22, 22]
    queue = [reduced("a", [0, 1], 4), reduced("b", [0, 1], 4), run(20.0), wait("a"), wait("b")]
    assert timed(TWO, queue, queue, slowdown=2.0).compute.tolist() == [24, 24]
    # Copies take no part of the device that computes.
    assert timed(TWO, [copied("c", 5), run(10.0)], [END], slowdown=2.0).compute[0] == 10


def test_each_communication_takes_a_launch() -> None:
    code = [reduced("g", [0, 1], 8), copied("c", 1), run(3.0), wait("g"), wait("c")]
    found = timed(TWO, code, code, launch=0.5)
    assert found.launch.tolist() == [1.0] * 2
    assert found.seconds == 0.5 + 8
    # A measured start takes its own seconds.
    measured = replace(TWO, links=replace(TWO.links, starts={"all_reduce": links.Link(1.0, 8.0)}))
    found = timed(measured, code, code, launch=0.5)
    assert found.launch.tolist() == [3.0] * 2
    assert found.seconds == 2.5 + 8


def test_devices_that_wait_for_ever_are_named() -> None:
    with pytest.raises(ScheduleError, match=r"device 0, instruction 1: Wait of g never ends[.]"):
        timed(TWO, [reduced("g", [0, 1], 8), wait("g")], [END])


def test_devices_of_a_cohort_have_times_of_their_own() -> None:
    """Two pairs run one program; one pair is on one server, the other one on two."""
    where = ss.Cluster.of("made", "a100", 2, 3, cluster(1, 1).links)
    assert where.seconds("send", [(0, 1)], 8) == where.seconds("send", [(2, 3)], 8)
    pairs = [(0, 1), (2, 3)]
    codes: list[Sequence[Instruction]] = [[END]] * 6
    for a, b in pairs:
        codes[a] = [run(1.0), sent(b, 0, 8)]
        codes[b] = [received("m", a, 0, 8), wait("m"), run(1.0)]

    def uneven(cohort: Cohort, at: int) -> Any:
        return work(cohort, at) * np.where(cohort.devices == 2, 3, 1) if isinstance(cohort.code[at], Load) else 0.0

    found = clock(made_of(*codes), where, uneven)
    check_sums(found)
    assert found.seconds == 3 + 8 + 1
    assert found.bubble[1] == 1 + 2
    assert found.bubble[3] == 3
    lane = next(lane for lane in found.lanes if lane.devices.tolist() == [1, 3])
    assert lane.end[-1].tolist() == [10, 12]


def test_groups_of_one_program_start_when_their_own_last_device_comes() -> None:
    codes = [[run(1.0), reduced("g", group, 8), wait("g")] for group in ([0, 1], [0, 1], [2, 3], [2, 3])]

    def uneven(cohort: Cohort, at: int) -> Any:
        return work(cohort, at) * (1.0 + cohort.devices)

    found = clock(made_of(*codes), cluster(1, 4), uneven)
    check_sums(found)
    assert len(found.lanes) == 1
    assert found.lanes[0].end[-1].tolist() == [2 + 8, 2 + 8, 4 + 8, 4 + 8]
    assert found.bubble.tolist() == [1 + 2, 0 + 2, 1, 0]
    assert [link.device for link in found.path] == [3, found.path[1].device]


@pytest.mark.parametrize("name", ["", *slow("pipeline", "hybrid", "experts", "folded", "broadcasts", "exchanges")])
def test_compiled_programs_spend_all_time_on_something(name: str) -> None:
    plan = resolve("zb_h1:2,microbatches=4 x data_parallel:2")
    program = (exact(name) if name else ss.compile(chain(2, 8), plan, ss.Cluster.local(4)).compiled).program
    where = ss.Cluster.preset("v100", 2, program.world // 2)

    def seconds(cohort: Cohort, at: int) -> float:
        return 1e-4 if isinstance(cohort.code[at], Forward | Backward) else 0.0

    for options in ({}, {"launch": 1e-6}, {"slowdown": 1.3}, {"one_stream": True, "slowdown": 1.1, "launch": 1e-6}):
        found = clock(program, where, seconds, Behavior(**options))
        check_sums(found)
        codes = [device.instructions for device in program.devices]
        runs = [sum(isinstance(i, Forward | Backward) for i in code) for code in codes]
        least = np.array(runs) * 1e-4
        if "slowdown" in options:
            assert (found.compute >= least - 1e-12).all()
        else:
            assert found.compute.tolist() == pytest.approx(least.tolist())
        for lane in found.lanes:
            kinds = [type(lane.code[at]) for at in lane.instruction[lane.stream == COMPUTE].tolist()]
            assert kinds.count(Forward) + kinds.count(Backward) == runs[lane.devices[0]]
            moves = [type(lane.code[at]) for at in lane.instruction[lane.stream != COMPUTE].tolist()]
            messages = sum(isinstance(i, Send | Recv) for i in lane.code)
            assert moves.count(Send) + moves.count(Recv) == messages or options.get("one_stream")
            assert moves.count(Collective) == sum(isinstance(i, Collective) for i in lane.code)
            segments = lane.segment[lane.stream == COMPUTE].tolist()
            assert [s >= 0 for s in segments] == [kind in (Forward, Backward) for kind in kinds]
            waited = [lane.code[at] for at in lane.waited[(lane.waited >= 0) & (lane.stream == COMPUTE)].tolist()]
            assert all(not isinstance(i, Wait) for i in waited)


# Random programs: in one order for all devices, work, collectives and messages start, and some are waited for.


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, list[Any]]:
    world = draw(st.integers(2, 4))
    device = st.integers(0, world - 1)
    group = st.lists(device, min_size=2, max_size=world, unique=True)
    size = st.integers(1, 9)
    step = st.one_of(
        st.tuples(st.just("work"), device, size),
        st.tuples(st.just("all_reduce"), group, size, st.lists(st.integers(0, 5), min_size=world, max_size=world)),
        st.tuples(st.just("send"), st.permutations(range(world)).map(lambda d: d[:2]), size, st.integers(0, 5)),
    )
    return world, draw(st.lists(step, max_size=12))


def codes_of(world: int, steps: list[Any]) -> list[list[Instruction]]:
    """Return the codes: each wait comes so many instructions after its start, or at the end."""
    codes: list[list[Instruction]] = [[] for _ in range(world)]
    left: list[list[list[Any]]] = [[] for _ in range(world)]

    def add(device: int, i: Instruction) -> None:
        codes[device].append(i)
        for entry in list(left[device]):
            entry[0] -= 1
            if entry[0] < 0:
                codes[device].append(wait(entry[1]))
                left[device].remove(entry)

    for n, (kind, who, size, *more) in enumerate(steps):
        if kind == "work":
            add(who, run(float(size)))
        elif kind == "all_reduce":
            for device in who:
                add(device, reduced(f"g{n}", who, size))
                left[device].append([more[0][device], f"g{n}"])
        else:
            add(who[0], sent(who[1], n, size))
            add(who[1], received(f"m{n}", who[0], n, size))
            left[who[1]].append([more[0], f"m{n}"])
    for device in range(world):
        codes[device] += [wait(name) for _, name in left[device]]
    return codes


def alone(where: ss.Cluster, codes: list[list[Instruction]], steps: list[Any]) -> float:
    """Return the end of the step where no two transfers share a link: the longest path, in the order of the steps."""
    at, clocks, ends = [0] * len(codes), [0.0] * len(codes), dict[tuple[int, str], float]()
    streams: dict[Any, float] = {}

    def until(device: int, stop: type) -> None:
        """Go on to the next start of a transfer."""
        while at[device] < len(codes[device]):
            i = codes[device][at[device]]
            if isinstance(i, Collective | Send | Recv) and stop is not Wait:
                return
            at[device] += 1
            if isinstance(i, Load):
                clocks[device] += float(i.tensor)
            elif isinstance(i, Wait):
                clocks[device] = max(clocks[device], ends[device, i.work.name])

    for n, (kind, who, size, *_) in enumerate(steps):
        if kind == "work":
            continue
        for device in who:
            until(device, Collective)
            at[device] += 1
        keys = [(d, frozenset(who)) if kind == "all_reduce" else (d, tuple(who)) for d in who]
        start = max([clocks[d] for d in who] + [streams.get(key, 0.0) for key in keys])
        end = start + where.seconds(kind, [who], size)
        streams |= dict.fromkeys(keys, end)
        ends |= {(d, f"{'g' if kind == 'all_reduce' else 'm'}{n}"): end for d in who}
    for device in range(len(codes)):
        until(device, Wait)
    return max([*clocks, *streams.values()])


@settings(max_examples=60)
@given(orders())
def test_random_programs(order: tuple[int, list[Any]]) -> None:
    world, steps = order
    codes = codes_of(world, steps)
    if not any(codes):
        return
    # Where only latency counts, nothing is shared, and the end is that of the longest path.
    latency = cluster(1, world, alpha=1.0, bandwidth=1e30)
    found = timed(latency, *codes)
    assert found.seconds == pytest.approx(alone(latency, codes, steps))
    # Links that are shared make nothing faster.
    shared = cluster(world, 1, alpha=0.5)
    found = timed(shared, *codes)
    assert found.seconds >= alone(shared, codes, steps) - 1e-9
    assert found.seconds >= found.compute.max()
    # With more work nothing is faster, where links are not shared; nor with slower work.
    more = [(kind, who, size + (kind == "work"), *rest) for kind, who, size, *rest in steps]
    assert timed(latency, *codes_of(world, more)).seconds >= timed(latency, *codes).seconds
    assert timed(latency, *codes, slowdown=1.5).seconds >= timed(latency, *codes).seconds - 1e-9
