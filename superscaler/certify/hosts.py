"""The memory of values: shared with views, overwritten in place, on the device or (by copies) on its host."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from superscaler.certify.content import Content, Memory, kind_of
from superscaler.certify.interpret import Refusal
from superscaler.certify.meanings import MEANINGS
from superscaler.ir.loops import kinds_of
from superscaler.ir.program import (
    Accumulate,
    Collective,
    Combine,
    Copy,
    Forward,
    Give,
    Instruction,
    Program,
    Slice,
    Update,
    Value,
    writes,
)  # fmt: skip


@dataclass(eq=False)
class Flight:
    """A started communication: its instruction, the memory that it reads, and whether a Wait has completed it."""

    how: Instruction
    memory: frozenset[Memory]
    is_awaited: bool = False


class Memories:
    """The reads and changes of memory while a program runs on masks.

    `gives`: the outputs of each cohort. `loaded`: the memory of weights and inputs, by cohort and value. `has_hosts`:
    whether anything is in the memory of a host.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        every = [device for device, _ in program.distinct]
        self.has_hosts = any(w.host for d in every for w in d.weights) or any(
            Copy in kinds_of(d.instructions) for d in every
        )
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

    def locate(self, i: Instruction, read: Sequence[Content | None]) -> bool:
        """Return whether the results of an instruction are in the memory of the host. Raises Refusal for one that reads
        a value from the wrong memory.
        """
        there = [content.is_on_host for content in read if content is not None]
        is_there = True in there
        match i:
            case Update():
                ends = accumulate(map(len, (i.weights, i.gradients, i.buffers)), initial=0)
                weights, gradients, buffers, values = (there[a:b] for a, b in pairwise((*ends, len(there))))
                # Each weight stays where it is.
                is_wrong, is_there = weights + buffers != gradients + values, False
            case Copy():
                is_wrong, is_there = is_there == i.to_host, i.to_host
            case Slice() | Combine() | Accumulate():
                is_wrong = len({*there}) > 1
            case _:
                is_wrong = is_there and not (self._is_copy(i) and all(there))
        if is_wrong:
            raise Refusal("reads a value from the wrong memory, that of the host or of the device.")
        return is_there

    def _is_copy(self, i: Instruction) -> bool:
        return isinstance(i, Forward) and all(op.is_copy for op in self.program.functions[i.function].ops)

    def overwritten(self, content: Content) -> str:
        assert content.changed is not None
        return f"whose memory {self.program.describe(content.changed)} has changed"

    def start(self, cohort: int, i: Instruction, read: Sequence[Content | None]) -> None:
        """Record the memory of the results of a communication.

        A collective over one device returns its source itself, and so does a broadcast on its source device.
        """
        flight = Flight(i, frozenset(memory for content in read if content for memory in content.memory))
        is_there = self.has_hosts and self.locate(i, read)
        for name in writes(i):
            self.works[cohort, name] = flight, (Memory(is_on_host=is_there),)
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
