"""The step of emitted code on symbols: a stand-in for `rt` that knows each value by its identity.

The code runs beside the instructions of its program. Each call must do what the next instruction says: on the values
that the instruction reads, with its numbers and devices. A value that the program has freed must be gone at the next
call. Loops, lists and names are those of Python: nothing here looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from superscaler.emit.segments import draws_of
from superscaler.ir import program as p
from superscaler.ir.mask import Box
from superscaler.ir.model import Model
from superscaler.ir.program import Device, Function, Program, Role, Value
from superscaler.ops.table import PLACED, RANDOM, parts_of
from superscaler.translation.beside import is_whole
from superscaler.translation.data import Data
from superscaler.translation.transfers import Transfers
from superscaler.translation.values import Differs, Held, Total


class Step(Transfers):
    """The stand-in for `rt`. `data`: of each device whose data are compared. `check_function`: raises Differs unless a
    segment of a name does what a function does.
    """

    def __init__(
        self, program: Program, device: Device, data: Sequence[Data], check_function: Callable[[int, str], None]
    ) -> None:
        super().__init__(program, device, data)
        self._check_function = check_function
        # The numbers of the gradients of a first half, until the second one runs.
        self._first: dict[str, tuple[int, ...]] = {}
        # By function: whether it draws random numbers, and whether it gets the ranges of its part.
        self._facts: dict[int, tuple[bool, bool]] = {}

    # Weights and inputs.

    def weight(self, name: str) -> Held:
        return self._weights[name]

    def weights_of(self, *paths: str) -> list[Held]:
        return [self._weights[n] for path in paths for t, n in self._tensors if t == path or t.startswith(f"{path}.")]

    def weights_at(self, number: int) -> list[Held]:
        return [self._weights[name] for name in self._of_all("updates", number)]

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
        if i.function not in self._facts:
            boxes = made.boxes_at(i.at, PLACED)
            self._facts[i.function] = any(op.target in RANDOM for op in made.ops), bool(self._parts(made, boxes))
        has_draws, has_parts = self._facts[i.function]
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
        if not is_whole(i) or len(pieces) > len(i.pieces):
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


def _boxes(made: Function, targets: Container[str], i: p.Forward) -> tuple[Box, ...]:
    return tuple(made.boxes_at(i.at, targets))


def drawn(model: Model, made: Function, boxes: Sequence[Box]) -> list[dict[str, Any]]:
    """Return the random tensors of a segment on boxes of its random ops, as tables have them."""
    rows = (draw._asdict() for draw in draws_of(model, made, boxes))
    return [{name: value for name, value in row.items() if value or name != "ahead"} for row in rows]
