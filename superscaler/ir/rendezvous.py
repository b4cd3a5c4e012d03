"""Deadlock freedom, proved on the communication of all devices alone, with sends that block until they are received."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from superscaler.errors import ScheduleError, some
from superscaler.ir.codes import Rolled
from superscaler.ir.fold import Folded
from superscaler.ir.program import Collective, Device, Free, Program, Recv, Send, Slice, Value

Meeting = tuple[object, ...]
Communication = Collective | Send | Recv


def batches(code: Sequence[object]) -> dict[int, int]:
    """Return the ranges of messages that start together: several of one point, with at most slices between them."""
    found: dict[int, int] = {}
    first, point = -1, -1
    for at, i in enumerate(code):
        if isinstance(i, Send | Recv) and i.point == point:
            found[first] = at
        elif isinstance(i, Send | Recv):
            first, point = at, i.point
        elif not isinstance(i, Slice | Free):
            point = -1
    return found


def meetings(devices: Iterable[Device]) -> list[list[tuple[Meeting, frozenset[int], Communication]]]:
    """Return the communication of each device in order: (meeting, the devices that must be there, instruction)."""
    found = []
    for device in devices:
        mine: list[tuple[Meeting, frozenset[int], Communication]] = []
        count: dict[tuple[int, ...], int] = defaultdict(int)
        numbers = set[tuple[int, int]]()
        code = device.instructions
        if isinstance(code, Rolled):
            code = code.changed(lambda i: i if isinstance(i, Communication) else None)
        for i in code:
            if isinstance(i, Collective):
                meeting = (i.kind, i.group, count[i.group], i.dtype, i.bytes)
                mine.append((meeting, frozenset(i.group), i))
                count[i.group] += 1
            elif isinstance(i, Send):
                pair = device.rank, i.peer
                if (i.peer, i.message) in numbers:
                    raise ScheduleError(
                        f"device {device.rank} sends {i.source} to device {i.peer} as message {i.message}, the number "
                        "of another one to that device."
                    )
                numbers.add((i.peer, i.message))
                mine.append((("message", *pair, i.message), frozenset(pair), i))
            elif isinstance(i, Recv):
                pair = i.peer, device.rank
                mine.append((("message", *pair, i.message), frozenset(pair), i))
        found.append(mine)
    return found


def _described(i: Communication) -> str:
    if isinstance(i, Collective):
        return f"{i.kind} of {_shown(i.works if any(i.works) else i.sources)} over devices {i.group}"
    if isinstance(i, Send):
        return f"send of {i.source} to device {i.peer}"
    return f"recv of {_shown([i.work])} from device {i.peer}"


def _shown(works: Sequence[Value | None]) -> str:
    return some([str(work._replace(is_handle=False, number=1)) for work in works if work is not None], 4)


def _check_members(left: Sequence[Sequence[tuple[Meeting, frozenset[int], Communication]]], world: int) -> None:
    """Raise ScheduleError for communication with a device that the program lacks."""
    for device, meets in enumerate(left):
        for step, (_, members, i) in enumerate(meets):
            if min(members) < 0 or max(members) >= world:
                raise ScheduleError(
                    f"device {device}, step {step}: {_described(i)}, but the program has devices 0 to {world - 1}."
                )


def check_rendezvous(program: Program) -> None:
    """Raise ScheduleError, showing the position of each device, if the communication cannot finish.

    In a folded program one device of each base is checked: the devices that it stands for run in step with it.
    """
    devices = program.devices
    left = meetings(device for device, _ in program.distinct)
    _check_members(left, len(devices))
    if isinstance(devices, Folded):
        groups = {group for meets in left for _, group, _ in meets}
        bases = {group: frozenset(map(devices.fold.base, group)) for group in groups}
        left = [[(meeting, bases[group], i) for meeting, group, i in meets] for meets in left]
    at = [0] * len(left)
    ready = list(range(len(left)))
    while ready:
        device = ready.pop()
        while at[device] < len(left[device]):
            meeting, members, _ = left[device][at[device]]
            if not all(at[m] < len(left[m]) and left[m][at[m]][0] == meeting for m in members):
                break
            for member in members:
                at[member] += 1
            ready += [m for m in members if m != device]
    stuck = [d for d in range(len(left)) if at[d] < len(left[d])]
    if stuck:
        lines = [f"  device {d}, step {at[d]}: waits in {_described(left[d][at[d]][2])}" for d in stuck[:8]]
        raise ScheduleError("the communication of this plan deadlocks:\n" + "\n".join(lines))
