"""What every plan must keep, checked on its schedule and its program, of any size.

Of a plan that folds, the parts and devices at the compiled places are looked at, each with what it stands for; small
plans are looked at as a whole besides, part by part and device by device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from superscaler.compiler import Compiled
from superscaler.ir.spmd import Folded
from superscaler.verify.conservation import check_conservation
from superscaler.verify.program import check_program
from superscaler.verify.rendezvous import check_rendezvous

# Up to how many parts a plan that folds is looked at as a whole.
MOST_PARTS = 100_000


def conservation(compiled: Compiled) -> None:
    """Raise ScheduleError unless every part is there once and reads each element with exactly its whole value."""
    if _is_whole(compiled):
        check_conservation(compiled.whole_schedule, compiled.graph)
    if compiled.fold is not None:
        check_conservation(compiled.schedule, compiled.graph, compiled.fold)


def complete(compiled: Compiled) -> None:
    """Raise ScheduleError unless every part runs once, on values that exist, and every weight is updated once."""
    program, devices = compiled.program, compiled.program.devices
    if _is_whole(compiled):
        check_program(compiled.whole_schedule, program)
    if isinstance(devices, Folded):
        check_program(compiled.schedule, replace(program, devices=tuple(devices.compiled.values())))


def deadlock_free(compiled: Compiled) -> None:
    """Raise ScheduleError unless the communication of all devices finishes where every send waits for its receiver."""
    program, devices = compiled.program, compiled.program.devices
    if _is_whole(compiled):
        check_rendezvous(program)
    if isinstance(devices, Folded):
        bases = tuple(device for device, _ in devices.distinct())
        check_rendezvous(replace(program, devices=bases), devices.fold)


CHECKS: Mapping[str, Callable[[Compiled], None]] = {
    "conservation": conservation,
    "complete": complete,
    "deadlock_free": deadlock_free,
}


def _is_whole(compiled: Compiled) -> bool:
    return compiled.fold is None or compiled.counts["parts"] <= MOST_PARTS
