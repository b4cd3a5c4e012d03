"""The memory of values: shared with views, overwritten in place, on the device or (by copies) on its host."""

from collections.abc import Sequence
from dataclasses import dataclass

from superscaler.certify.content import Content, Memory, kind_of
from superscaler.certify.interpret import Refusal
from superscaler.certify.meanings import MEANINGS
from superscaler.errors import ScheduleError
from superscaler.ir.loops import kinds_of
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

# These instructions work in either memory, and so do forwards of copies.
_ANYWHERE = frozenset({"Slice", "Combine", "Accumulate", "Wait", "Copy"})


def on_host(program: Program, device: Device) -> set[Value]:
    """Return the values of a device in its host's memory. Raises ScheduleError for an instruction that reads a value
    from the wrong memory.
    """
    found, hosted = set[Value](), {weight.name for weight in device.weights if weight.host}
    if not hosted and Copy not in kinds_of(device.instructions):
        return found
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
            why = "reads a value from the wrong memory, that of the host or of the device."
            raise ScheduleError(f"device {device.rank}, instruction {at}: {program.describe(i)} {why}")
        if isinstance(i, Load | Copy):
            is_there = i.out in hosted if isinstance(i, Load) else i.to_host
        # An update of several weights leaves each where it is.
        found.update(writes(i) if is_there and not isinstance(i, Update) else ())
    return found


@dataclass(eq=False)
class Flight:
    """A started communication: its instruction, the memory that it reads, and whether a Wait has completed it."""

    how: Instruction
    memory: frozenset[Memory]
    is_awaited: bool = False


class Memories:
    """The reads and changes of memory while a program runs on masks.

    `gives`: the outputs of each cohort. `loaded`: the memory of weights and inputs, by cohort and value.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.gives: dict[int, list[tuple[Give, Content]]] = {}
        self.loaded: dict[tuple[int, Value], Memory] = {}
        # Collectives with a result, by cohort; and each communication with the memory of its result.
        self._flights: dict[int, list[Flight]] = {}
        self.works: dict[tuple[int, Value], tuple[Flight, tuple[Memory, ...]]] = {}

    def hold(self, i: Instruction, read: Sequence[Content | None]) -> None:
        """Raise Refusal for an instruction that reads an overwritten value."""
        for content in read:
            if content is None:
                continue
            if content.changed is not None:
                raise Refusal(f"reads {kind_of(content)}, {self.overwritten(content)}.")
            for memory in content.memory:
                memory.held = memory.held or i

    def overwritten(self, content: Content) -> str:
        assert content.changed is not None
        return f"whose memory {self.program.describe(content.changed)} has changed"

    def start(self, cohort: int, i: Instruction, read: Sequence[Content | None]) -> None:
        """Record the memory of the results of a communication.

        A collective over one device returns its source itself, and so does a broadcast on its source device.
        """
        flight = Flight(i, frozenset(memory for content in read if content for memory in content.memory))
        for name in writes(i):
            self.works[cohort, name] = flight, (Memory(),)
        if isinstance(i, Collective):
            is_from_one = MEANINGS[i.kind].from_one
            if any(i.works) and not is_from_one:
                self._flights.setdefault(cohort, []).append(flight)
            for work, content in zip(i.works, read, strict=True):
                if work and content and (is_from_one or len(i.group) == 1):
                    self.works[cohort, work] = flight, content.memory

    def arrive(self, cohort: int, work: Value) -> tuple[Memory, ...]:
        """Return the memory of the result of a Wait."""
        flight, memory = self.works.pop((cohort, work))
        flight.is_awaited = True
        return memory

    def change(self, i: Instruction, content: Content, cohort: int | None = None) -> None:
        """Mark the memory of a value as overwritten. Raises Refusal if an unfinished collective of the cohort may still
        read it.
        """
        if cohort is not None:
            self._flights[cohort] = [flight for flight in self._flights.get(cohort, ()) if not flight.is_awaited]
        for flight in () if cohort is None else self._flights[cohort]:
            if not flight.memory.isdisjoint(content.memory):
                started = self.program.describe(flight.how)
                raise Refusal(f"changes memory that {started} may still read; the wait for it must come first.")
        for memory in content.memory:
            memory.changed = i

    def check_given(self, cohort: int) -> None:
        """Raise Refusal for an output that was overwritten after it was given."""
        for give, value in self.gives.get(cohort, ()):
            if value.changed is not None:
                raise Refusal(f"ends the step that gave the output {give.tensor}, {self.overwritten(value)} since.")
