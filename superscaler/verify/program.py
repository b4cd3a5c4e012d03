"""Completeness of a program: every part runs once, on values that exist, and every weight is updated once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from superscaler.errors import ScheduleError
from superscaler.ir.graph import RANDOM
from superscaler.ir.mask import Box, Mask, extents
from superscaler.ir.program import Backward, Device, Forward, Free, Loss, Program, Update
from superscaler.materialize.names import reads, tag, unique_identifiers, writes
from superscaler.schedule.nodes import Schedule
from superscaler.schedule.segments import Segment
from superscaler.schedule.transfers import BACKWARD, UPDATE
from superscaler.verify.sizes import check_sizes


def check_program(schedule: Schedule, program: Program) -> None:
    """Raise ScheduleError at the first part that does not run once, name that is not there, or weight left as it is.

    Only the parts on the devices of the program are looked at.
    """
    _check_ops(schedule)
    parts: dict[int, list[tuple[Segment, int]]] = {device.rank: [] for device in program.devices}
    for segment in schedule.segments:
        for at, key in enumerate(segment.keys):
            if key[0] in parts:
                parts[key[0]].append((segment, at))
    for device in program.devices:
        if sum(isinstance(i, Loss) for i in device.instructions) != 1:
            raise ScheduleError(f"device {device.rank} does not give the loss {program.model.loss} once, at its end.")
        _check_names(device)
        _check_parts(schedule, program, device, parts[device.rank])
    _check_updates(schedule, program)
    check_sizes(schedule, program, parts)


def _check_ops(schedule: Schedule) -> None:
    """Every op of the graph is in one segment."""
    runs = Counter(op.name for segment in schedule.segments for op in segment.ops)
    for op in schedule.edges.graph.forward_ops:
        if runs[op.name] != 1:
            raise ScheduleError(f"{op.name} ({op.module or op.target}) is in {runs[op.name]} segments instead of 1.")


def _check_names(device: Device) -> None:
    """Every name is made before it is read, and not freed."""
    state = {"one": "made"}
    for number, i in enumerate(device.instructions):
        missing = next((n for n in reads(i) if state.get(n) != "made"), None)
        if missing is not None:
            why = state.get(missing, "which is made later" if _is_made(device, missing) else "which nothing makes")
            what = getattr(i, "tag", "") or ", ".join(writes(i)[:3])
            raise ScheduleError(
                f"device {device.rank}, instruction {number}: {type(i).__name__} {what} reads {missing}, {why}."
            )
        state.update(
            dict.fromkeys(i.names, "which is freed") if isinstance(i, Free) else dict.fromkeys(writes(i), "made")
        )


def _is_made(device: Device, name: str) -> bool:
    return any(name in writes(i) for i in device.instructions)


def _check_parts(schedule: Schedule, program: Program, device: Device, parts: Sequence[tuple[Segment, int]]) -> None:
    runs = Counter((type(i), i.tag) for i in device.instructions if isinstance(i, Forward | Backward))
    begins = {(type(i), i.tag): n for n, i in enumerate(device.instructions) if isinstance(i, Forward | Backward)}
    for segment, at in parts:
        name = tag(segment.number, segment.keys[at])
        where = f"{_shown(segment, name)} on device {device.rank}"
        for kind in (Forward, Backward) if segment.has_mirror else (Forward,):
            found = runs.pop((kind, name), 0)
            if found != 1:
                raise ScheduleError(
                    f"the {kind.__name__.lower()} of {where} runs {found} times; every part runs once in a step."
                )
        if segment.has_mirror and begins[Backward, name] < begins[Forward, name]:
            raise ScheduleError(f"the backward of {where} runs before its forward.")
        forward = device.instructions[begins[Forward, name]]
        assert isinstance(forward, Forward)
        _check_function(schedule, program, segment, at, forward)
    if runs:
        kind, name = next(iter(runs))
        raise ScheduleError(
            f"{kind.__name__} {name} runs on device {device.rank}, where the schedule has no such part."
        )


def _shown(segment: Segment, name: str) -> str:
    ends = dict.fromkeys((segment.ops[0].name, segment.ops[-1].name))
    return f"{'..'.join(ends)} ({segment.module or 'no module'}, {name})"


def _check_function(schedule: Schedule, program: Program, segment: Segment, at: int, forward: Forward) -> None:
    """A part runs the ops of its segment, each on a box of its size, and at its place where that matters."""
    function, rank = program.functions[forward.function], segment.keys[at][0]
    boxes = {op.name: box for op, box in zip(function.ops, function.boxes, strict=True)}
    drawn = dict(zip((op.name for op in function.ops if op.target in RANDOM), forward.draws, strict=True))
    for op in segment.ops:
        rows, row = schedule.edges.rows[op.name], segment.row_of[op.name][at]
        box = tuple(zip(rows.lo[row].tolist(), rows.hi[row].tolist(), strict=True))
        if op.name not in boxes:
            raise ScheduleError(f"{op.name} ({op.module or op.target}) is missing from {forward.tag} on device {rank}.")
        own, placed = boxes.pop(op.name), schedule.edges.model.placed(op)
        if extents(own) != extents(box) or any(own[i] != box[i] for i in placed) or drawn.get(op.name, box) != box:
            raise ScheduleError(f"{forward.tag} on device {rank} does not run {Mask(op.name, box)}, which is its part.")
    if boxes or len(function.ops) != len(segment.ops):
        extra = next(iter(boxes), function.ops[0].name)
        raise ScheduleError(f"{forward.tag} on device {rank} runs {extra} too often or where it does not belong.")


def _check_updates(schedule: Schedule, program: Program) -> None:
    """Every weight at rest whose gradient is made is updated once, in its own parameter group."""
    wanted = dict(_gradients(schedule))
    for device in program.devices:
        pairs = [pair for i in device.instructions if isinstance(i, Update) for pair in i.pairs]
        given = Counter(name for name, _ in pairs)
        for weight in device.weights:
            op = schedule.edges.homes.get(weight.tensor)
            if op is None or op.is_write:
                continue
            shown = f"{Mask(weight.tensor, weight.box)} on device {device.rank}"
            if not weight.trained:
                raise ScheduleError(f"{shown} is at rest as if it were frozen, but {op.name} trains it.")
            expected = (device.rank, weight.name) in wanted
            if given[weight.name] != expected:
                raise ScheduleError(
                    f"{shown} is given {given[weight.name]} gradients in a step instead of {int(expected)}."
                )
            if weight.group != op.group:
                raise ScheduleError(f"{shown} is in parameter group {weight.group}, but {op.name} is in {op.group}.")
            if expected and wanted[device.rank, weight.name] != weight.box:
                box = Mask(weight.tensor, wanted[device.rank, weight.name])
                raise ScheduleError(f"{shown} is held where {box} is updated.")


def _gradients(schedule: Schedule) -> Iterator[tuple[tuple[int, str], Box]]:
    """Return for each weight at rest that a gradient reaches its device, its name there, and its box."""
    names = unique_identifiers(schedule.edges.model.tensors)
    for transfer in schedule.transfers:
        if transfer.kind == BACKWARD:
            for r in {r for _, r in transfer.links}:
                reader = transfer.readers[r]
                for place in reader.places:
                    if place.kind == UPDATE:
                        part = f"_p{place.key[2]}" if place.key[2] else ""
                        yield (reader.device, names[transfer.tensor] + part), reader.box
