"""The program beside which code runs: its next instruction, and the value of each of its names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from superscaler.ir import program as p
from superscaler.ir.program import ONE, Device, Instruction, Program, Role, Value
from superscaler.translation.data import EntryCheck, Spot, code_of
from superscaler.translation.values import Differs, Held, Total, stays

I = TypeVar("I")  # noqa: E741
# The package, whose frames are none of emitted code.
_PACKAGE = __name__.rpartition(".")[0]


class Beside:
    """A walk through the instructions of a device, and the values of its names."""

    def __init__(self, program: Program, device: Device) -> None:
        self.program, self.model = program, program.model
        self._code = code_of(device)
        # The next instruction; and the next one with a call in the code, once it is looked for.
        self._next: tuple[Instruction, Spot] | None = next(self._code, None)
        self._head: tuple[Instruction, Spot] | None = None
        self.one = Held(self, names=1)
        self._weights = {str(w.name): Held(self, names=1) for w in device.weights}
        self._rest = {*self._weights.values()}
        self._at_rest = {w.name: w for w in device.weights}
        self._tensors = [(w.tensor, str(w.name)) for w in device.weights]
        self._env: dict[Value, Held] = {ONE: self.one}
        # By identity, what the program has freed, and the code still holds.
        self.late: dict[int, Value] = {}
        # The rest of the last instruction: waits by their handles, the pieces of a sum, buffers to write.
        self._waits: dict[int, p.Wait] = {}
        self._total: tuple[Total, p.Combine] | None = None
        self._write: p.Update | None = None
        # The point of the last message, if only slices ran since; whether messages start together, and any has.
        self._point, self._inside, self._joined = -1, False, False
        self._result: object = None
        # What the code needs of tables, by run, place and table.
        self.asked: dict[tuple[int, int, str], EntryCheck] = {}

    def take(self, kind: type[I], call: str) -> tuple[I, Spot]:
        """Return the next instruction, which is to be of a kind. `call`: what the code does."""
        i, spot = self._peek(call)
        if type(i) is not kind:
            raise Differs(f"{call} runs where the program has: {self.program.describe(i)}")
        if kind not in (p.Send, p.Recv, p.Slice):
            self._point = -1
            if self._inside:
                raise Differs(f"{call} is among messages that start together")
        self._head = None
        return i, spot

    def _peek(self, call: str) -> tuple[Instruction, Spot]:
        """Return the next instruction that the code has a call for; do what those before it say."""
        if self._waits or self._total is not None or self._write is not None:
            raise Differs(f"{call} runs before the last instruction is done")
        while self._head is None:
            if self._next is None:
                raise Differs(f"{call} comes after the end of the program")
            i, spot = self._next
            self._next = next(self._code, None)
            if isinstance(i, p.Free):
                self._end(i.names)
            elif self._is_silent(i):
                self._point = -1
            else:
                self._head = i, spot
        if self.late and not isinstance(self._head[0], p.Loss) and stays(lambda: self.late):
            raise Differs(f"{next(iter(self.late.values()), 'a value')} is held, which the program has freed")
        return self._head

    def _is_silent(self, i: Instruction) -> bool:
        """Return whether an instruction has no call in the code; bind what it makes."""
        if isinstance(i, p.Load) and self.model.tensors[i.tensor].kind != "input":
            weight = self._at_rest.get(i.out)
            if weight is None or (weight.tensor, weight.box) != (i.tensor, i.box):
                raise Differs(f"{i.out} is loaded, which is no weight at rest")
            self._bind(i.out, self._weights[str(i.out)])
            return True
        if isinstance(i, p.Combine) and len(i.pieces) == 1 and is_whole(i):
            self._bind(i.out, self._env[i.pieces[0]])
            return True
        return isinstance(i, p.Update) and i.is_early and not (i.weights or i.buffers)

    def _bind(self, name: Value, held: Held | None = None) -> Held:
        """Give a value a name of the program."""
        held = Held(self) if held is None else held
        held.names += 1
        if name in self._env:
            self._end([name])
        self._env[name] = held
        return held

    def _end(self, names: Sequence[Value]) -> None:
        for name in names:
            held = self._env.pop(name)
            held.names -= 1
            if not held.names:
                held.freed = name
                self.late[id(held)] = name
            # Python then frees what the code does not hold.
            del held

    def _same(self, what: str, found: object, wanted: object) -> None:
        if found != wanted or type(found) is not type(wanted):
            raise Differs(f"{what} is {found}, and the program has {wanted}")

    def _reads(self, what: str, found: object, names: Sequence[Value | None]) -> None:
        """Compare values given to a call with those of the program."""
        given = found if isinstance(found, list | tuple) else [found]
        if len(given) != len(names):
            raise Differs(f"{what} has {len(given)} values, and the program has {len(names)}")
        env = self._env
        for one, name in zip(given, names, strict=True):
            if one is not (None if name is None else env.get(name)):
                shown = (
                    "nothing" if one is None else next((str(v) for v, x in env.items() if x is one), "another value")
                )
                raise Differs(f"{what} has {shown} in the place of {name or 'nothing'}")

    def _entry(
        self, spot: Spot, table: str, number: object, role: Role, get: Callable[[Any], Any],
        then: Callable[[Any], Any] = lambda x: x,
    ) -> None:  # fmt: skip
        """Note that an instruction needs an entry of a table: `then` of what `get` takes from it."""
        if type(number) is not int:
            raise Differs(f"the number of an entry in {table} is {number}")
        run, place, turn = spot
        asked = self.asked.get((run, place, table))
        if asked is None:
            asked = self.asked[run, place, table] = EntryCheck(table, role, get, then, _line())
        asked.turns.append(turn)
        asked.numbers.append(number)

    def end(self, result: object) -> None:
        """Check that the program has ended, with a result of the code."""
        if self._head is not None or self._next is not None:
            i, _ = self._head or self._next  # type: ignore[misc]
            raise Differs(f"the code ends where the program has: {self.program.describe(i)}")
        if result is not self._result:
            raise Differs("the code does not return what rt.loss gives")
        self._env.clear()


def _line() -> int:
    """Return the line of the emitted code that calls."""
    frame = sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_lineno


def is_whole(i: p.Combine) -> bool:
    """Return whether each piece of a sum has the size of the sum."""
    return bool(i.pieces) and all(box == tuple((0, size) for size in i.view) for box in i.boxes)
