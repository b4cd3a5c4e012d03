"""What every plan must keep, checked on the program that will run, of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from superscaler.compiler import Compiled
from superscaler.verify.certificate import check_program
from superscaler.verify.rendezvous import check_rendezvous


def conservation(compiled: Compiled) -> None:
    """Raise ScheduleError unless every read of every device finds each element with its whole value, once."""
    check_program(compiled.program)


def deadlock_free(compiled: Compiled) -> None:
    """Raise ScheduleError unless the communication of all devices finishes where every send waits for its receiver."""
    check_rendezvous(compiled.program)


CHECKS: Mapping[str, Callable[[Compiled], None]] = {"conservation": conservation, "deadlock_free": deadlock_free}
