"""The steps of code: its instructions in order, those of a loop once for all of its repetitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from superscaler.ir.instructions.fields import Move, mover
from superscaler.ir.loops import Loop, runs_of
from superscaler.ir.program import Instruction, Meets, Value
from superscaler.ir.running.turns import is_alike


@dataclass(eq=False, slots=True)
class Step:
    """An instruction in all repetitions of a loop, `first` and `second` in the first two of them, or one that runs
    once. `place`: its number in the code, in the first repetition; `moves`: functions from the repetition to its
    handles, and `others` to its fields.
    """

    place: int
    first: Instruction
    second: Instruction
    moves: tuple[Move | None, ...] = ()
    handles: tuple[Value | None, ...] = field(init=False)
    others: dict[str, Move | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.handles = self.first.handles

    def handles_at(self, turn: int) -> tuple[Value | None, ...]:
        """Return the handles that it starts or ends in a repetition."""
        if not turn:
            return self.handles
        return tuple([h if m is None else m(turn) for h, m in zip(self.handles, self.moves, strict=True)])

    def moved(self, field: str, turn: int) -> Any:
        """Return a field in a repetition."""
        first = getattr(self.first, field)
        if not turn:
            return first
        if field not in self.others:
            self.others[field] = mover([first, getattr(self.second, field)])
        move = self.others[field]
        return first if move is None else move(turn)


def steps(code: Sequence[Instruction]) -> Iterator[tuple[Step, int, int]]:
    """Yield the steps of code in order, each with the number of the instruction and of the repetition."""
    start = 0
    for run in runs_of(code):
        if isinstance(run, Loop) and all(map(_is_known, run.first, run.second)):
            body = _body(run, start)
            for turn in range(run.count):
                offset = turn * len(run.first)
                for step in body:
                    yield step, step.place + offset, turn
        else:
            for at, i in enumerate(run, start):
                if not i.frees:
                    yield Step(at, i, i), at, 0
        start += len(run)


def _body(loop: Loop, start: int) -> list[Step]:
    found = list[Step]()
    for at, (one, two) in enumerate(zip(loop.first, loop.second, strict=True), start):
        if not one.frees:
            moves = map(mover, zip(one.handles, two.handles, strict=True))
            found.append(Step(at, one, two, tuple(moves)))
    return found


def _is_known(one: Instruction, two: Instruction) -> bool:
    """Return whether the ends and bytes of an instruction's communication are equal in two turns."""
    is_transfer = one.task is None and one.meets not in (Meets.NOBODY, Meets.ALL)
    return not is_transfer or is_alike(one, two)
