"""The shift from one round to the next: the step of each microbatch, index, slot and message, and its effect on the
state of a cohort.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from superscaler.certify.boxes import Boxes
from superscaler.certify.content import Content, Memory
from superscaler.certify.coverage import Addends, Chain, Column, Kinds
from superscaler.certify.hosts import Flight
from superscaler.certify.interpret import Post
from superscaler.certify.passes import Tape
from superscaler.ir.cohorts import Cohort
from superscaler.ir.grid import Ints
from superscaler.ir.loops import Loop, Rolled, loops_of
from superscaler.ir.program import (  # fmt: skip
    Meets,
    Program,
    Role,
    Task,
    Value,
    calls,
    loads,
    names,
)
from superscaler.ir.running.machine import Lap
from superscaler.ir.running.turns import is_alike, keys

K = TypeVar("K", bound=Hashable)
S = TypeVar("S")
Key = Value | Task


class Unsteady(Exception):
    """The repetitions of a loop differ by more than a shift, or name what the program lacks. Then all of them run."""


@dataclass(frozen=True, eq=False)
class Status:
    """The state of a name in a cohort: its value, or its handle (of part `part` of a post, whose number was `count`).

    `works`: of a handle, the started communication and the memory of its result. A task has a tape as its value.
    `past`: how a name ended, or that a task ran.
    """

    value: Content | Tape | None
    post: Post[Content] | None = None
    part: int = 0
    count: int = 0
    past: str = ""
    works: tuple[Flight, tuple[Memory, ...]] | None = None


@dataclass(frozen=True, eq=False)
class Body:
    """All names and tasks in a loop of a cohort.

    `moving`: names of microbatches, as in the first ones, with the least and the greatest number of a repetition that
    reads or makes them in repetition 0. `sums`: the other names that are only added to in place. `fixed`: all others.
    """

    moving: Mapping[Key, tuple[int, int]]
    fixed: Sequence[Key]
    sums: Sequence[Value]


class Shift:
    """The steps of a program whose loops all move alike: of each index of an op, slot of a tensor and message.

    All rules of the certificate but the limits of indices compare numbers that move together. So a rule that holds for
    these values holds for shifted ones.
    """

    def __init__(self, program: Program, kinds: Kinds, cohort_of: Ints) -> None:
        self.program, self.kinds, self.model, self.cohort_of = program, kinds, program.model, cohort_of
        self.microbatches = 0
        self.indices: dict[tuple[str, int], int] = {}
        self.slots: dict[tuple[str, int], int] = {}
        self.starts: dict[int, tuple[int, ...]] = {}
        self.messages: dict[tuple[int, int], int] = {}
        self._columns: dict[tuple[Chain, str], Ints] = {}

    # What moves in the code.

    def read(self, loop: Loop, rank: int) -> None:
        """Add the steps of a device's loop. Raises Unsteady if part of it moves by another step."""
        for a, b in zip(loop.first, loop.second, strict=True):
            if not is_alike(a, b) or getattr(a, "ranges", ()) != getattr(b, "ranges", ()):
                raise Unsteady
            for x, y in zip(keys(a), keys(b), strict=True):
                if x is not None and y is not None and x != y:
                    self._name(x, y)
            if a.meets is Meets.PEER:
                if a.peer not in range(len(self.cohort_of)):
                    raise Unsteady
                ends = int(self.cohort_of[rank]), int(self.cohort_of[a.peer])
                _set(self.messages, ends if a.is_send else ends[::-1], b.message - a.message)
        for (_, one), (_, two) in zip(calls(loop.first), calls(loop.second), strict=True):
            self._run(one.function, tuple(np.subtract(two.at, one.at).tolist()))
        for here, there in zip(loads(loop.first), loads(loop.second), strict=True):
            moved = np.subtract(there.box, here.box).reshape(-1, 2)
            for slot, (lo, hi) in enumerate(moved.tolist()):
                _set(self.slots, (here.tensor, slot), lo)
                _set(self.slots, (here.tensor, slot), hi)

    def _name(self, a: Key, b: Key) -> None:
        if a._replace(microbatch=b.microbatch) != b or a.microbatch < 0:
            raise Unsteady
        step = b.microbatch - a.microbatch
        if step <= 0 or self.microbatches not in (0, step):
            raise Unsteady
        self.microbatches = step

    def _run(self, number: int, step: tuple[int, ...]) -> None:
        """Add the steps of a function whose parts start `step` later in each round."""
        if self.starts.get(number) == step:
            return
        _set(self.starts, number, step)
        functions = self.program.functions
        if number not in range(len(functions)):
            raise Unsteady
        for op, where in zip(functions[number].ops, functions[number].coordinates, strict=True):
            if max(where, default=-1) >= len(step):
                raise Unsteady
            steps = [step[column] for column in where]
            for i, index in enumerate(op.indices):
                _set(self.indices, (op.name, i), steps[i])
                if index.follows and (steps[i] or steps[index.follows[0]]):
                    raise Unsteady
            for operand in (*op.inputs, *op.outputs):
                for slot, at in enumerate(operand.slots):
                    for tensor in (operand.tensor, self.model.origin(operand.tensor)):
                        _set(self.slots, (tensor, slot), 0 if at is None else steps[at])

    def _slots(self, tensor: str, count: int) -> Ints:
        return np.array([self.slots.get((tensor, slot), 0) for slot in range(count)], dtype=np.int64)

    def columns(self, link: Chain, tensor: str, slots: int) -> Ints:
        """Return the steps of the columns of a tensor's addends, those of its slots first."""
        if (link, tensor) not in self._columns:
            own = [self._column(column) for column in self.kinds.columns(link, tensor)]
            self._columns[link, tensor] = np.concatenate([self._slots(tensor, slots), np.array(own, dtype=np.int64)])
        return self._columns[link, tensor]

    def _column(self, column: Column) -> int:
        # The columns of an operand's own addends follow those of the operand; whole slots do not move.
        while len(column) > 4:
            column = column[3:]
        return self.indices.get((column[0], column[1]), 0) if len(column) == 2 else 0

    def key(self, key: Key, count: int) -> Key:
        """Return a name or task `count` rounds later."""
        return key._replace(microbatch=key.microbatch + count * self.microbatches)

    # What moves in the state.

    def content(self, content: Content, count: int) -> Content:
        """Return a content `count` rounds later, in the same memory."""
        box = content.box + count * self._slots(content.tensor, content.box.shape[1])[:, None]
        addends = content.addends
        if addends is not None:
            addends = self.addends(addends, content.tensor, content.box.shape[1], count)
        return replace(content, box=box, addends=addends)

    def addends(self, addends: Addends, tensor: str, slots: int, count: int) -> Addends:
        return {
            link: Boxes(boxes.at + count * self.columns(link, tensor, slots), boxes.shapes)
            for link, boxes in addends.items()
        }

    def repeated(self, content: Content, count: int) -> Content:
        """Return the addends of a sum in the next `count` rounds, all in one."""
        addends = {}
        for link, boxes in (content.addends or {}).items():
            steps = self.columns(link, content.tensor, content.box.shape[1])
            moved = np.arange(1, count + 1)[:, None] * steps
            rows, number, *rest = boxes.shapes.shape
            shapes = boxes.shapes[:, None] + moved[None, :, None, :, None]
            addends[link] = Boxes(boxes.at, shapes.reshape(rows, count * number, *rest))
        return replace(content, addends=addends)

    def moved(self, value: Content | Tape | None, count: int) -> Content | Tape | None:
        """Return a value or tape `count` rounds later, in the same memory."""
        if value is None or not count:
            return value
        if isinstance(value, Content):
            return self.content(value, count)
        inputs = [self.content(content, count) for content in value.inputs]
        passed = {
            op: {g: {k: self.content(c, count) for k, c in group.items()} for g, group in some.items()}
            for op, some in value.passed.items()
        }
        kept = value.kept and (value.kept[0], {n: self._of_input(value, n, a, count) for n, a in value.kept[1].items()})
        steps = np.array([*self.starts.get(value.number, ()), 0], dtype=np.int64)
        return replace(value, at=value.at + count * steps, inputs=inputs, passed=passed, kept=kept)

    def _of_input(self, tape: Tape, n: int, addends: Addends, count: int) -> Addends:
        tensor = self.model.origin(tape.function.function.inputs[n])
        return self.addends(addends, tensor, tape.inputs[n].box.shape[1], count)

    def message(self, post: Post[Content]) -> int:
        """Return the step of the number of a started message."""
        i, own, other = post.cohort.code[post.at], post.cohort.number, int(self.cohort_of[post.peers.flat[0]])
        if i.meets is not Meets.PEER:
            return 0
        return self.messages.get((own, other) if i.is_send else (other, own), 0)

    def post(self, post: Post[Content], count: int) -> None:
        """Turn a started communication into the one of `count` rounds later."""
        post.message = post.message + count * self.message(post)
        post.read = [None if content is None else self.content(content, count) for content in post.read]


def laps_of(cohort: Cohort, shift: Shift) -> list[Lap[Body]]:
    """Return the loops of a cohort. Raises Unsteady unless those of all its devices move alike."""
    codes = [device.instructions for device in cohort.samples]
    rolled = [code for code in codes if isinstance(code, Rolled)]
    if not rolled:
        return []
    places = [[(n, len(run.first), run.count) for n, run in loops_of(code)] for code in rolled]
    if len(rolled) < len(codes) or any(other != places[0] for other in places):
        raise Unsteady
    for device, code in zip(cohort.samples, rolled, strict=True):
        for _, loop in loops_of(code):
            shift.read(loop, device.rank)
    return [
        Lap(start, len(loop.first), loop.count, _body(loop, shift.microbatches)) for start, loop in loops_of(rolled[0])
    ]


def _body(loop: Loop, step: int) -> Body:
    """Return a loop whose names move by `step` microbatches."""
    moving, fixed, sums = dict[Key, list[int]](), dict[Key, None](), dict[Value, None]()
    for a, b in zip(loop.first, loop.second, strict=True):
        added = {*names(a, Role.SUM), a.grows}
        for x, y in zip(keys(a), keys(b), strict=True):
            if x is not None and x == y and x in added:
                assert isinstance(x, Value)
                sums[x] = None
            elif x is not None and x == y:
                fixed[x] = None
            elif x is not None:
                # Those that are added to, too: a gradient of several parts of one microbatch.
                moving.setdefault(x._replace(microbatch=x.microbatch % step), []).append(x.microbatch // step)
    # One name has one role.
    still = {x._replace(microbatch=x.microbatch % step) for x in (*fixed, *sums) if x.microbatch >= 0}
    if not fixed.keys().isdisjoint(sums) or not still.isdisjoint(moving):
        raise Unsteady
    bounds = {key: (min(found), max(found)) for key, found in moving.items()}
    return Body(bounds, [*fixed], [*sums])


def _set(table: dict[K, S], key: K, value: S) -> None:
    """Set an entry. Raises Unsteady if it has another value."""
    if table.setdefault(key, value) != value:
        raise Unsteady
