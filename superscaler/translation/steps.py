"""The step of emitted code on symbols: a stand-in for `rt` that knows each value by its identity.

The code runs beside the instructions of its program. Each call must do what the next instruction says: on the values
that the instruction reads, with its numbers and devices. A value that the program has freed must be gone at the next
call. Loops, lists and names are those of Python: nothing here looks at them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from superscaler.emit.segments import draws_of
from superscaler.ir import program as p
from superscaler.ir.mask import Box
from superscaler.ir.model import Model
from superscaler.ir.program import ONE, CollectiveArg, Device, Function, Instruction, Program, Role, Shape, Value
from superscaler.ops.table import PLACED, RANDOM, parts_of
from superscaler.translation.data import Asked, Data, Spot, code_of

I = TypeVar("I")  # noqa: E741


class Differs(Exception):
    """Emitted code does something else than its program."""


class Held:
    """A tensor, a sum, or the handle of something started. It tells its step when Python frees it."""

    __slots__ = ("freed", "names", "step")

    def __init__(self, step: Step, names: int = 0) -> None:
        # `names`: how many names of the program it has. `freed`: the last of them, once the program has freed it.
        self.step, self.names = step, names
        self.freed: Value | None = None

    def __del__(self) -> None:
        if self.freed is not None:
            self.step.late.pop(id(self), None)

    def reshape(self, shape: Sequence[int]) -> View:
        return View(self, shape)

    def wait(self) -> Arriving:
        return Arriving(self)

    def maximum(self, other: object) -> object:
        return self.step.add([self, other], largest=True)

    def __add__(self, other: object) -> object:
        return self.step.add([self, other], largest=False)

    def __iadd__(self, other: object) -> object:
        return self.step.add_in_place(self, other)


class View:
    """A tensor in another shape, as a collective reads it."""

    __slots__ = ("of", "shape")

    def __init__(self, of: Held, shape: Sequence[int]) -> None:
        self.of, self.shape = of, shape


class Arriving:
    """The result of something started, before it has its shape."""

    __slots__ = ("work",)

    def __init__(self, work: Held) -> None:
        self.work = work

    def reshape(self, shape: Sequence[int]) -> Held:
        return self.work.step.arrive(self.work, shape)


class Total:
    """A sum, or the largest, of the first of several pieces."""

    __slots__ = ("largest", "pieces", "step")

    def __init__(self, step: Step, pieces: list[object], largest: bool) -> None:
        self.step, self.pieces, self.largest = step, pieces, largest

    def maximum(self, other: object) -> object:
        return self.step.add([*self.pieces, other], largest=True, before=self)

    def __add__(self, other: object) -> object:
        return self.step.add([*self.pieces, other], largest=False, before=self)


class Step:
    """The stand-in for `rt` while code runs, beside the instructions of the devices that run it.

    `data`: of each device whose data are compared. `check_function`: raises Differs unless a segment of a name does
    what a function does.
    """

    def __init__(
        self, program: Program, device: Device, data: Sequence[Data], check_function: Callable[[int, str], None]
    ) -> None:
        self.program, self.model, self.data, self._check_function = program, program.model, data, check_function
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
        # The numbers of the gradients of a first half, until the second one runs.
        self._first: dict[str, tuple[int, ...]] = {}
        # The point of the last message, if only slices ran since; whether messages start together, and any has.
        self._point, self._inside, self._joined = -1, False, False
        # By function: whether it draws random numbers, and whether it gets the ranges of its part.
        self._facts_of: dict[int, tuple[bool, bool]] = {}
        self._result: object = None
        # What the code needs of tables, by run, place and table.
        self.asked: dict[tuple[int, int, str], Asked] = {}

    # The program.

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
        if self.late and not isinstance(self._head[0], p.Loss):
            raise Differs(f"{next(iter(self.late.values()))} is held, which the program has freed")
        return self._head

    def _is_silent(self, i: Instruction) -> bool:
        """Return whether an instruction has no call in the code; bind what it makes."""
        if isinstance(i, p.Load) and self.model.tensors[i.tensor].kind != "input":
            weight = self._at_rest.get(i.out)
            if weight is None or (weight.tensor, weight.box) != (i.tensor, i.box):
                raise Differs(f"{i.out} is loaded, which is no weight at rest")
            self._bind(i.out, self._weights[str(i.out)])
            return True
        if isinstance(i, p.Combine) and len(i.pieces) == 1 and _is_whole(i):
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
            asked = self.asked[run, place, table] = Asked(table, role, get, then, _line())
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

    # Weights and inputs.

    def weight(self, name: str) -> Held:
        return self._weights[name]

    def weights_of(self, *paths: str) -> list[Held]:
        return [self._weights[n] for path in paths for t, n in self._tensors if t == path or t.startswith(f"{path}.")]

    def weights_at(self, number: int) -> list[Held]:
        names, *others = [data.tables["updates"][number] for data in self.data]
        for other in others:
            self._same("what is updated", other, names)
        return [self._weights[name] for name in names]

    def input(self, number: int) -> Held:
        i, spot = self.take(p.Load, "rt.input")
        self._entry(spot, "inputs", number, Role.EVEN, lambda j: (j.tensor, j.box))
        return self._bind(i.out)

    def sums(self, count: int) -> list[Held | None]:
        return [None] * count

    # Segments.

    def forward(
        self,
        tag: str,
        function: str,
        inputs: Sequence[object],
        tape: bool = True,
        draws: int | None = None,
        parts: int | None = None,
    ) -> tuple[Held, ...]:
        i, spot = self.take(p.Forward, "rt.forward")
        made = self.program.functions[i.function]
        self._same("the task", tag, str(i.task))
        self._check_function(i.function, function)
        self._reads("rt.forward", inputs, i.inputs)
        self._same("the tape", tape, bool(made.grads))
        if i.function not in self._facts_of:
            boxes = made.boxes_at(i.at, PLACED)
            self._facts_of[i.function] = any(op.target in RANDOM for op in made.ops), bool(self._parts(made, boxes))
        has_draws, has_parts = self._facts_of[i.function]
        self._same("the number of draws", draws is not None, has_draws)
        self._same("the number of parts", parts is not None, has_parts)
        if has_draws:
            get = partial(_boxes, made, RANDOM)
            self._entry(spot, "draws", draws, Role.EVEN, get, lambda boxes: drawn(self.model, made, boxes))
        if has_parts:
            get = partial(_boxes, made, PLACED)
            self._entry(spot, "parts", parts, Role.EVEN, get, partial(self._parts, made))
        return tuple([self._bind(name) for name in i.outputs])

    def _parts(self, made: Function, boxes: Sequence[Box]) -> tuple[Box, ...]:
        """Return the ranges of a part that its segment gets as data."""
        pairs = zip((op for op in made.ops if op.target in PLACED), boxes, strict=True)
        return tuple(part for op, box in pairs for part in parts_of(op, box, self.model.tensors).values())

    def backward(
        self, tag: str, gradients: Sequence[object], again: Sequence[object] = (), into: Mapping[int, Any] | None = None
    ) -> tuple[Held | None, ...]:
        i = self._backward("", tag, gradients)
        self._reads("again", again, i.again)
        return self._made(i, range(len(i.outputs)), into)

    def backward_input(self, tag: str, gradients: Sequence[object], first: Sequence[int]) -> tuple[Held | None, ...]:
        i = self._backward("input", tag, gradients)
        self._first[tag] = tuple(first)
        return self._made(i, self._first[tag], None)

    def backward_weight(self, tag: str, into: Mapping[int, Any] | None = None) -> tuple[Held | None, ...]:
        i = self._backward("weight", tag, None)
        first = self._first.pop(tag)
        return self._made(i, [n for n in range(len(i.outputs)) if n not in first], into)

    def _backward(self, half: str, tag: str, gradients: Sequence[object] | None) -> p.Backward:
        i, _ = self.take(p.Backward, "rt.backward")
        self._same("the task", tag, str(i.task))
        self._same("the half of a backward", half, i.half)
        if gradients is not None:
            self._reads("rt.backward", gradients, i.gradients)
        return i

    def _made(self, i: p.Backward, numbers: Sequence[int], into: Mapping[int, Any] | None) -> tuple[Held | None, ...]:
        """Return the gradients with these numbers, but for those that are added to sums."""
        sums = i.sums or (None,) * len(i.outputs)
        left = [n for n in range(len(sums)) if n not in numbers and (i.outputs[n] or sums[n])]
        if left:
            raise Differs(f"{i.task} does not give {i.outputs[left[0]] or sums[left[0]]}")
        taken = set[int]()
        for first, given in (into or {}).items():
            own, start, stop = given if isinstance(given, tuple) else (given, 0, len(given))
            for k, place in enumerate(range(start, stop)):
                n = numbers[first + k]
                taken.add(n)
                self._add_to(own, place, sums[n])
        if missing := [str(sums[n]) for n in numbers if sums[n] and n not in taken]:
            raise Differs(f"{i.task} does not add to {missing[0]}")
        return tuple([(name and self._bind(name)) for n in numbers if n not in taken for name in [i.outputs[n]]])

    def _add_to(self, own: list[Held | None], place: int, total: Value | None) -> None:
        """Add a gradient to a place of a list, which has its sum or nothing yet."""
        if total is None:
            raise Differs("a gradient is added to a sum that it does not have")
        known = self._env.get(total)
        if own[place] is not known:
            raise Differs(f"the place of {total} has another sum")
        own[place] = self._bind(total) if known is None else known

    def offload(self, tag: str, alive: Sequence[object] = ()) -> None:
        i, _ = self.take(p.Offload, "rt.offload")
        self._same("the task", tag, str(i.task))
        self._reads("rt.offload", alive, i.alive)

    def fetch(self, tag: str) -> None:
        i, _ = self.take(p.Fetch, "rt.fetch")
        self._same("the task", tag, str(i.task))

    # Local tensors.

    def slice(self, x: object, view: Sequence[int], box: int, shape: Sequence[int]) -> Held:
        i, spot = self.take(p.Slice, "rt.slice")
        self._reads("rt.slice", x, (i.source,))
        self._same("the shapes of rt.slice", (view, shape), (i.view, i.shape))
        self._entry(spot, "boxes", box, Role.EVEN, lambda j: j.ranges)
        return self._bind(i.out)

    def combine(
        self, pieces: Sequence[object], boxes: int, view: Sequence[int], shape: Sequence[int], dtype: str,
        largest: bool = False,
    ) -> Held:  # fmt: skip
        i, spot = self.take(p.Combine, "rt.combine")
        self._reads("rt.combine", pieces, i.pieces)
        facts = view, shape, dtype, largest
        self._same("rt.combine", facts, (i.view, i.shape, i.dtype, i.largest))
        self._entry(spot, "boxes", boxes, Role.EVEN, lambda j: j.boxes)
        return self._bind(i.out)

    def zeros(self, shape: Sequence[int], dtype: str) -> Held:
        i, _ = self.take(p.Combine, "rt.zeros")
        self._same("rt.zeros", (shape, dtype, False), (i.shape, i.dtype, bool(i.pieces or i.largest)))
        return self._bind(i.out)

    def add(self, pieces: list[object], largest: bool, before: Total | None = None) -> object:
        """Return the sum, or the largest, of pieces: the result of an instruction, or a part of it."""
        call = "a maximum" if largest else "a sum"
        if before is None and type(self._peek(call)[0]) is p.Accumulate:
            one, _ = self.take(p.Accumulate, call)
            self._same("what is made", (largest, False), (one.largest, one.in_place))
            self._reads(call, pieces, (one.into, one.value))
            return self._bind(one.out)
        if before is None:
            i, _ = self.take(p.Combine, call)
        elif self._total is None or self._total[0] is not before:
            raise Differs(f"{call} is of pieces that the program does not add")
        else:
            i, self._total = self._total[1], None
        if not _is_whole(i) or len(pieces) > len(i.pieces):
            self._refuse(call, self.program.describe(i))
        self._same("what is made", largest, i.largest)
        self._reads(call, pieces, i.pieces[: len(pieces)])
        if len(pieces) == len(i.pieces):
            return self._bind(i.out)
        self._total = Total(self, pieces, largest), i
        return self._total[0]

    def add_in_place(self, into: Held, value: object) -> Held:
        i, _ = self.take(p.Accumulate, "+=")
        self._same("what is made", (False, True), (i.largest, i.in_place))
        self._reads("+=", [into, value], (i.into, i.value))
        return into if i.out == i.into else self._bind(i.out, into)

    # Communication.

    def __getattr__(self, name: str) -> Any:
        kind = name.removesuffix("_bucket")
        if kind in _GIVEN:
            return partial(self._collective, kind, kind != name)
        raise Differs(f"rt.{name} is no call of emitted code")

    def _collective(self, kind: str, is_bucket: bool, given: Any, group: int, *more: Any, **options: Any) -> Any:
        i, spot = self.take(p.Collective, f"rt.{kind}")
        self._same("the collective", (kind, is_bucket), (i.kind, len(i.works) > 1 or bool(i.wide)))
        self._entry(spot, "groups", group, Role.GROUP, lambda j: j.group)
        self._given(i, given if is_bucket else [given])
        if is_bucket and i.kind not in ("all_reduce", "reduce"):
            self._entry(spot, "ways", options.pop("ways", None), Role.NOTE, _ways)
        wanted = _bucket(i) if is_bucket else _GIVEN[kind](i, i.ways[0])
        self._same(f"the arguments of rt.{kind}", (more, options), wanted)
        made = [None if name is None else self._bind(name) for name in i.works]
        return made if is_bucket else made[0]

    def _given(self, i: p.Collective, given: Any) -> None:
        """Compare the sources of a collective; alone, those that are cut are in slots."""
        is_alone = len(i.works) == 1 and not i.wide
        plain = [x.of if isinstance(x, View) else x for x in given]
        self._reads(f"rt.{i.kind}", plain, i.sources)
        for x, way in zip(given, i.ways, strict=True):
            is_cut = is_alone and x is not None and way.view != way.local and i.kind not in _FLAT
            self._same("the shape of a source", x.shape if isinstance(x, View) else None, way.view if is_cut else None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the messages inside start together."""
        if self._inside:
            raise Differs("messages that start together are inside of others")
        self._inside = True
        yield
        self._inside = self._joined = False

    def _message(self, i: p.Send | p.Recv, spot: Spot, number: int) -> None:
        """Compare a message. It starts with the one before if both have one point."""
        if self._joined if i.point != self._point else not (self._inside and self._joined):
            raise Differs(f"the message of {(p.writes(i) or p.reads(i))[0]} starts with others than in the program")
        self._point, self._joined = i.point, self._inside
        self._entry(spot, "messages", number, Role.PEER, lambda j: (j.peer, j.message))

    def send(self, x: object, message: int) -> None:
        i, spot = self.take(p.Send, "rt.send")
        self._reads("rt.send", x, (i.source,))
        self._message(i, spot, message)

    def recv(self, message: int, shape: Sequence[int], dtype: str) -> Held:
        i, spot = self.take(p.Recv, "rt.recv")
        self._same("rt.recv", (shape, dtype), (i.shape, i.dtype))
        self._message(i, spot, message)
        return self._bind(i.work)

    def to_host(self, x: object) -> Held:
        return self._copy(x, is_to_host=True)

    def to_device(self, x: object) -> Held:
        return self._copy(x, is_to_host=False)

    def _copy(self, x: object, is_to_host: bool) -> Held:
        i, _ = self.take(p.Copy, "a copy")
        self._reads("a copy", x, (i.source,))
        self._same("whether it goes to the host", is_to_host, i.to_host)
        return self._bind(i.work)

    def arrive(self, work: Held, shape: Sequence[int]) -> Held:
        """Wait for something started. Waits with nothing between them are in any order."""
        if not self._waits:
            i, _ = self.take(p.Wait, "wait")
            self._waits[id(self._env[i.work])] = i
            while self._next is not None and self._is_among_waits(self._next[0]):
                self._next = next(self._code, None)
        if id(work) not in self._waits:
            raise Differs("what is waited for is not what the program waits for")
        i = self._waits.pop(id(work))
        self._same(f"the shape of {i.out}", shape, i.shape)
        self._end([i.work])
        return self._bind(i.out)

    def _is_among_waits(self, i: Instruction) -> bool:
        """Return whether an instruction is one more wait, which is noted, or one of weights at rest, which is done."""
        if isinstance(i, p.Wait):
            self._waits[id(self._env[i.work])] = i
        elif isinstance(i, p.Free) and all(self._env.get(name) in self._rest for name in i.names):
            self._end(i.names)
        else:
            return isinstance(i, p.Load) and self._is_silent(i)
        return True

    def wait_all(self, works: Sequence[Held], shapes: int) -> list[Held]:
        found = [data.tables["shapes"][shapes] for data in self.data]
        for other in found:
            self._same("the shapes of what is waited for", other, found[0])
        return [self.arrive(work, tuple(shape)) for work, shape in zip(works, found[0], strict=True)]

    # Ends.

    def update(self, weights: Any = (), gradients: Sequence[object] = (), early: bool = False) -> None:
        i, _ = self.take(p.Update, "rt.update")
        self._same("an early update", early, i.is_early)
        # In any order: each weight has a gradient of its own.
        wanted = {id(self._env[w]): g for w, g in zip(i.weights, i.gradients, strict=True)}
        self._same("the number of updated weights", len(weights), len(wanted))
        for weight, gradient in zip(weights, gradients, strict=True):
            if id(weight) not in wanted:
                raise Differs("rt.update has a weight that the program does not update there")
            self._reads("rt.update", gradient, (wanted.pop(id(weight)),))
        self._write = i if i.buffers else None

    def write(self, buffers: Sequence[object], values: Sequence[object]) -> None:
        if self._write is None:
            i, _ = self.take(p.Update, "rt.write")
            self._same("an update of weights", bool(i.weights or not i.is_early), False)
        else:
            i, self._write = self._write, None
        self._reads("rt.write", [*buffers, *values], [*i.buffers, *i.values])

    def give(self, name: str, value: object, shape: Sequence[int]) -> None:
        i, _ = self.take(p.Give, "rt.give")
        self._same("what is given", (name, shape), (i.tensor, i.shape))
        self._reads("rt.give", value, (i.value,))

    def loss(self, parts: Sequence[object], counted: int, of: Sequence[int] = ()) -> object:
        i, spot = self.take(p.Loss, "rt.loss")
        self._reads("rt.loss", parts, i.parts)
        self._entry(spot, "counted", counted, Role.EVEN, lambda j: j.counted)
        self._same("the iterations of losses", of, i.of if self.model.iterations > 1 else ())
        self._same("the loss of a model without one", bool(self.model.loss), True)
        self._result = object()
        return self._result

    def finish(self) -> object:
        self.take(p.Loss, "rt.finish")
        self._same("the end of a step that trains", bool(self.model.loss), False)
        self._result = object()
        return self._result


def _line() -> int:
    """Return the line of the emitted code that calls."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame.f_lineno


def _boxes(made: Function, targets: Container[str], i: p.Forward) -> tuple[Box, ...]:
    return tuple(made.boxes_at(i.at, targets))


def drawn(model: Model, made: Function, boxes: Sequence[Box]) -> list[dict[str, Any]]:
    """Return the random tensors of a segment on boxes of its random ops, as tables have them."""
    rows = (asdict(draw) for draw in draws_of(model, made, boxes))
    return [{name: value for name, value in row.items() if value or name != "ahead"} for row in rows]


def _is_whole(i: p.Combine) -> bool:
    """Return whether each piece of a sum has the size of the sum."""
    return bool(i.pieces) and all(box == tuple((0, size) for size in i.view) for box in i.boxes)


def _ways(i: p.Collective) -> tuple[tuple[Shape, int, Shape], ...]:
    """Return, for each tensor of a bucket: its shape in slots, the gathered or scattered slot, the sizes of chunks."""
    return tuple((way.view, way.take if way.take >= 0 else way.give, way.sizes) for way in i.ways)


# What a collective of one tensor is given after its group: by position, and by name.
Given = tuple[tuple[Any, ...], dict[str, Any]]
_FLAT = ("all_reduce", "broadcast", "reduce")
_GIVEN: dict[str, Callable[[p.Collective, CollectiveArg], Given]] = {
    "all_reduce": lambda i, way: ((), {"largest": True} if i.largest else {}),
    "reduce": lambda i, way: ((i.root,), {}),
    "rd_gather": lambda i, way: ((i.root, way.take), {}),
    "all_gather": lambda i, way: ((way.take, *_sizes(way)), {"rounded": i.dtype} if i.given else {}),
    "reduce_scatter": lambda i, way: ((way.give, *_sizes(way)), {}),
    "all_to_all": lambda i, way: ((way.give, way.take), {}),
    "broadcast": lambda i, way: ((way.shape, i.dtype), {}),
}


def _sizes(way: CollectiveArg) -> tuple[Shape, ...]:
    return (way.sizes,) if way.sizes else ()


def _bucket(i: p.Collective) -> Given:
    """Return what a collective of several tensors is given after its group, but for its ways."""
    flags = {"largest": i.largest, "wire": i.dtype if i.wide else "", "rounded": i.dtype if i.given else ""}
    return (i.root,) * (i.root >= 0), {name: value for name, value in flags.items() if value}
