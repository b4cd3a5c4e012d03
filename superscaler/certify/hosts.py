"""In which memory values lie: what else lies there, and whether it is that of the host, which only copies reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superscaler.certify.content import Content, Memory, kind_of
from superscaler.errors import ScheduleError
from superscaler.ir.interpret import Refusal, describe
from superscaler.ir.program import (
    ONE,
    Collective,
    Copy,
    Device,
    Forward,
    Give,
    Instruction,
    Load,
    Program,
    Update,
    Value,
    reads,
    writes,
)  # fmt: skip

# These work in either memory, as the forwards of copies do.
_ANYWHERE = frozenset({"Slice", "Combine", "Accumulate", "Wait", "Copy"})


def on_host(program: Program, device: Device) -> set[Value]:
    """Return the values on the host of a device. Raises ScheduleError at the first instruction that reads a value of
    the other side.
    """
    found, hosted = set[Value](), {weight.name for weight in device.weights if weight.host}
    for at, i in enumerate(device.instructions):
        places = {value in found for value in reads(i) if value != ONE}
        is_there = True in places
        is_free = type(i).__name__ in _ANYWHERE or (
            isinstance(i, Forward) and all(op.is_copy for op in program.functions[i.function].ops)
        )
        if isinstance(i, Update):
            pairs = zip((*i.weights, *i.buffers), (*i.gradients, *i.values), strict=True)
            is_wrong = any((weight in found) != (value in found) for weight, value in pairs)
        else:
            is_wrong = len(places) > 1 or (is_there and not is_free) or (isinstance(i, Copy) and i.to_host == is_there)
        if is_wrong:
            why = "reads what is in the other memory, of the host or of the device, than it works in."
            raise ScheduleError(f"device {device.rank}, instruction {at}: {describe(program, i)} {why}")
        if isinstance(i, Load | Copy):
            is_there = i.out in hosted if isinstance(i, Load) else i.to_host
        found.update(writes(i) if is_there else ())
    return found


@dataclass(eq=False)
class _Flight:
    """A started communication, with the memory that it reads, and whether something has waited for it."""

    how: Instruction
    memory: frozenset[Memory]
    is_awaited: bool = False


class Memories:
    """What holds and changes the memory of values while a program runs on masks. By cohort, `gives` has the outputs;
    by cohort and name, `loaded` where weights and inputs lie.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.gives: dict[int, list[tuple[Give, Content]]] = {}
        self.loaded: dict[tuple[int, Value], Memory] = {}
        # Collectives that bring something, and where what communication brings will lie.
        self._flights: dict[int, list[_Flight]] = {}
        self._works: dict[tuple[int, Value], tuple[_Flight, tuple[Memory, ...]]] = {}

    def hold(self, i: Instruction, read: Sequence[Content | None]) -> None:
        """Raise Refusal where an instruction reads what was changed since it was made."""
        for content in read:
            if content is None:
                continue
            if content.changed is not None:
                raise Refusal(f"reads {kind_of(content)}, {self.told(content)}.")
            for memory in content.memory:
                memory.held = memory.held or i

    def told(self, content: Content) -> str:
        assert content.changed is not None
        return f"whose memory {describe(self.program, content.changed)} has changed"

    def start(self, cohort: int, i: Instruction, read: Sequence[Content | None]) -> None:
        """Keep where the results of a communication will lie: of one over one device, and at the source of a broadcast,
        where the source does.
        """
        flight = _Flight(i, frozenset(memory for content in read if content for memory in content.memory))
        for name in writes(i):
            self._works[cohort, name] = flight, (Memory(),)
        if isinstance(i, Collective):
            if any(i.works) and i.kind != "broadcast":
                self._flights.setdefault(cohort, []).append(flight)
            for work, content in zip(i.works, read, strict=True):
                if work and content and (i.kind == "broadcast" or len(i.group) == 1):
                    self._works[cohort, work] = flight, content.memory

    def arrive(self, cohort: int, work: Value) -> tuple[Memory, ...]:
        """Return where what a Wait makes lies."""
        flight, memory = self._works[cohort, work]
        flight.is_awaited = True
        return memory

    def change(self, i: Instruction, content: Content, cohort: int | None = None) -> None:
        """Let what lies in the memory of a value be stale. Raises Refusal where a collective of the cohort that nothing
        has waited for may still read it.
        """
        if cohort is not None:
            self._flights[cohort] = [flight for flight in self._flights.get(cohort, ()) if not flight.is_awaited]
        for flight in () if cohort is None else self._flights[cohort]:
            if not flight.memory.isdisjoint(content.memory):
                raise Refusal(f"comes while {describe(self.program, flight.how)} may still read what it changes.")
        for memory in content.memory:
            memory.changed = i

    def check_given(self, cohort: int) -> None:
        """Raise Refusal where an output was changed after it was given."""
        for give, value in self.gives.get(cohort, ()):
            if value.changed is not None:
                raise Refusal(f"ends the step that gave the output {give.tensor}, {self.told(value)} since.")
