"""Tables of pipeline schedules, per device the work of its stages in order: filled by rank, timed, checked."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from superscaler.groups import collect
from superscaler.verbs import Action, InputError, Row, timetable

Table = list[list[Action]]
Rank = Callable[[Action], tuple[object, ...]]
SECONDS: Mapping[str, float] = {"F": 1.0, "R": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
# How many activations a work adds to what its device keeps.
KEEPS: Mapping[str, int] = {"F": 1, "B": -1, "W": -1}


def fill(works: Iterable[Action], place: Callable[[Action], int], rank: Rank, most: int) -> Table:
    """Return the table in which each device always takes its ready action of the lowest `rank`.

    A device keeps the activations of at most `most` forwards; a backward takes two units of time, all else one.
    """
    numbers = {work: n for n, work in enumerate(sorted(works, key=rank))}
    needs, devices = _needs(numbers), {work: place(work) for work in numbers}
    readers = collect((need, work) for work in numbers for need in needs[work])
    trained = {work.stage for work in needs if work.kind != "F"}
    keeps = {work: KEEPS.get(work.kind, 0) * (work.stage in trained) for work in needs}
    # The works whose needs all have an end, by rank, and the last of these ends.
    ready: dict[int, list[Action]] = {device: [] for device in devices.values()}
    missing, begins = {work: len(needs[work]) for work in numbers}, dict.fromkeys(numbers, 0.0)
    for work in (work for work in numbers if not needs[work]):
        ready[devices[work]].append(work)
    table: Table = [[] for _ in range(max(ready) + 1)]
    free, kept, now = [0.0] * len(table), [0] * len(table), 0.0
    while any(ready.values()):
        for device, own in ready.items():
            rooms = (work for work in own if keeps[work] <= 0 or kept[device] < most)
            first = next((work for work in rooms if begins[work] <= now), None) if free[device] <= now else None
            if first is None:
                continue
            end = free[device] = now + SECONDS[first.kind]
            own.remove(first)
            table[device].append(first)
            kept[device] += keeps[first]
            for work in readers.get(first, ()):
                missing[work], begins[work] = missing[work] - 1, max(begins[work], end)
                if not missing[work]:
                    insort(ready[devices[work]], work, key=numbers.__getitem__)
        now = min(end for end in free if end > now)
    return table


def computed_again(table: Table) -> Table:
    """Return the table with a recomputation before each backward, as soon as its device is free."""
    return [
        [some for work in row for some in ((replace(work, kind="R"), work) if work.kind in "BI" else (work,))]
        for row in table
    ]


def finish(table: Table, seconds: Mapping[str, float] = SECONDS) -> dict[Action, float]:
    """Return when each work ends, from the seconds of its kind; messages take none. Stuck works are missing."""
    rows = devices_of(table)
    needs = _needs(rows)
    ends: dict[Action, float] = {}
    at, free = [0] * len(table), [0.0] * len(table)

    def is_next(work: Action) -> bool:
        return all(table[d][at[d]] == work for d in rows[work] if at[d] < len(table[d]))

    is_moving = True
    while is_moving:
        is_moving = False
        for device, row in enumerate(table):
            while at[device] < len(row) and is_next(row[at[device]]) and needs[row[at[device]]] <= ends.keys():
                work = row[at[device]]
                start = max(*(free[d] for d in rows[work]), *(ends[need] for need in needs[work]), 0.0)
                ends[work] = start + seconds[work.kind]
                for d in rows[work]:
                    at[d] += 1
                    free[d] = ends[work]
                is_moving = True
    return ends


def _needs(works: Collection[Action]) -> dict[Action, set[Action]]:
    """Return the actions that each action waits for: the stage before (in its direction), and its own forward."""
    last = max(work.stage for work in works)
    back = {(w.stage, w.microbatch): w.kind for w in works if w.kind in "BI"}
    needs: dict[Action, set[Action]] = {}
    for work in works:
        stage, k = work.stage, work.microbatch
        if work.kind == "F":
            needs[work] = {Action(stage - 1, "F", k)} if stage else set()
        elif work.kind in "RW":
            needs[work] = {Action(stage, "F" if work.kind == "R" else "I", k)}
        else:
            behind = {Action(stage + 1, back.get((stage + 1, k), "B"), k)} if stage < last else set()
            needs[work] = {again if (again := Action(stage, "R", k)) in works else Action(stage, "F", k), *behind}
    return needs


def check(table: Table, trained: Collection[int] = ()) -> None:
    """Raise InputError, with the grid and the step, for a table that misses work, repeats it, or cannot run.

    Every stage needs the forward of each microbatch and its backward (B, or I and W) on the same device, or on the same
    devices together. Neighbours must take microbatches in the same order, so that no messages cross. The first stages
    may have forwards only, but for those that are `trained`.
    """
    if not any(table):
        raise InputError("a schedule without work; write a row for each device, as 0F0 0B0.")
    place = {work: (d, at) for d, row in enumerate(table) for at, work in enumerate(row)}
    for faults in (_repeated, _incomplete, _crossing, _stuck):
        for (device, at), why in faults(table, place, trained):
            rows = [Row(d, dict(enumerate(map(str, row))), "") for d, row in enumerate(table)]
            done = {k: work for k, work in rows[device].done.items() if k <= at}
            rows[device] = Row(device, done, f"<-- {why}")
            lines = "\n".join(timetable(rows))
            raise InputError(f"the schedule cannot run: {why}.\n{lines}\nMend step {at} of device {device}.")


Step = tuple[int, int]
Faults = Iterator[tuple[Step, str]]


def _repeated(table: Table, place: Mapping[Action, Step], trained: Collection[int]) -> Faults:
    for d, row in enumerate(table):
        first: dict[Action, int] = {}
        for at, work in enumerate(row):
            if first.setdefault(work, at) != at:
                yield (d, at), f"{work} is there already, at step {first[work]}"


def _incomplete(table: Table, place: Mapping[Action, Step], trained: Collection[int]) -> Faults:
    stages, numbers = (1 + max(getattr(work, name) for work in place) for name in ("stage", "microbatch"))
    last = min((work.stage for work in place if work.kind != "F"), default=stages)
    where = devices_of(table)
    for stage, k in itertools.product(range(stages), range(numbers)):
        complete = ("FB", "FIW") if stage >= last or stage in trained else ("F",)
        own = {kind: place[work] for kind in "FRBIW" if (work := Action(stage, kind, k)) in place}
        first, kinds = next(iter(own.values()), (0, len(table[0]) - 1)), "".join(own).replace("R", "")
        homes = {kind: where[Action(stage, kind, k)] for kind in own}
        if len(set(homes.values())) > 1:
            shown = " and ".join(f"{kind} on {', '.join(map(str, devices))}" for kind, devices in homes.items())
            yield first, f"microbatch {k} of stage {stage} has its {shown}"
        if kinds not in complete:
            yield first, f"microbatch {k} of stage {stage} has {kinds or 'nothing'}, not {' or '.join(complete)}"


def _crossing(table: Table, place: Mapping[Action, Step], trained: Collection[int]) -> Faults:
    """Messages from one device to another arrive in the order in which they leave."""
    sent: dict[tuple[int, int, int, bool], list[Action]] = {}
    needs, where = _needs(place), devices_of(table)
    readers = {need: work for work, found in needs.items() for need in found if need.stage != work.stage}
    for d, row in enumerate(table):
        for work in row:
            reader = readers.get(work)
            if reader and {len(where[work]), len(where[reader])} == {1} and place[reader][0] != d:
                sent.setdefault((d, place[reader][0], work.stage, work.kind == "F"), []).append(reader)
    for (device, *_), works in sent.items():
        for first, second in itertools.pairwise(works):
            if place[second] < place[first]:
                yield place[second], f"{second} is before {first}, but device {device} sends to {first} before"


def _stuck(table: Table, place: Mapping[Action, Step], trained: Collection[int]) -> Faults:
    """Return the stuck actions; those that wait for an action behind them in their own row come first."""
    ends, needs = finish(table), _needs(place)
    firsts = [next((work for work in row if work not in ends), None) for row in table]
    waits = [(work, need) for work in firsts if work for need in needs[work] if need not in ends]
    for work, need in sorted(waits, key=lambda pair: place[pair[0]][0] != place[pair[1]][0]):
        d, at = place[need]
        yield place[work], f"{work} waits for {need}, at step {at} of device {d}, for ever"
    for device, work in ((d, work) for d, work in enumerate(firsts) if work and not waits):
        d = next(d for d in devices_of(table)[work] if work != firsts[d])
        yield (device, table[device].index(work)), f"{work} waits for device {d}, which shares it and is at {firsts[d]}"


def devices_of(table: Table) -> dict[Action, tuple[int, ...]]:
    """Return the devices of each work: one, or several that do it together."""
    found: dict[Action, tuple[int, ...]] = {}
    for device, row in enumerate(table):
        for work in row:
            found[work] = (*found.get(work, ()), device)
    return found
