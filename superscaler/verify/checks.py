"""What every plan must keep, checked on the program that will run, of any size. Each raises ScheduleError."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from superscaler.ir.program import Program
from superscaler.ir.rendezvous import check_rendezvous
from superscaler.verify.certificate import check_program

CHECKS: Mapping[str, Callable[[Program], None]] = {"conservation": check_program, "deadlock_free": check_rendezvous}
