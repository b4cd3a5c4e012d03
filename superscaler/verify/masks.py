"""The meaning of instructions on masks: of which elements of which tensor a value holds which addends.

What a segment does follows from the indices of its operators, never from what the scheduler joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superscaler.ir.cohorts import Cohort
from superscaler.ir.graph import Op, Operand, PTensor, width
from superscaler.ir.interpret import Refusal
from superscaler.ir.mask import Mask
from superscaler.ir.parts import Ints
from superscaler.ir.program import (
    ONE,
    Accumulate,
    Backward,
    Collective,
    Combine,
    Forward,
    Function,
    Instruction,
    Load,
    Loss,
    Program,
    Recv,
    Send,
    Slice,
    Task,
    Update,
    Value,
    Way,
)  # fmt: skip
from superscaler.verify.coverage import SEED, Addends, Chain, Kinds, clipped, first_fault, is_tiled, merged


@dataclass(eq=False)
class Content:
    """What a name holds on each device of a cohort: `box` [devices, slots, 2] of a tensor or of its gradient, and the
    addends in it; None: all of each, once. Zeros that stand anywhere have no tensor.

    `is_shared`: something else holds it too; `is_stale`: a weight that was updated since.
    """

    tensor: str
    is_gradient: bool
    box: Ints
    addends: Addends | None
    dtype: str
    is_shared: bool = False
    is_stale: bool = False

    @property
    def lengths(self) -> Ints:
        found: Ints = self.box[0, :, 1] - self.box[0, :, 0]
        return found


Passed = Mapping[int, Mapping[int, Content]]
# One of the addends of an operand: (group, input, chain) or (output, chain), and its boxes.
Link = tuple[Chain, Ints]


@dataclass(eq=False)
class _Tape:
    """A forward that ran: what its backward needs. `passed` has per op of which parts have only some addends of inputs
    these, by the group of inputs in which the op is linear.
    """

    function: _Segment
    at: Ints
    inputs: Sequence[Content]
    run: Forward
    passed: Mapping[str, Passed]


class Masks:
    """A domain of `interpret`. After the run, `finish` looks at what all devices did together."""

    def __init__(self, program: Program) -> None:
        self.model = program.model
        self.kinds = Kinds(program.model)
        self.segments = [_Segment(f, self.kinds) for f in program.functions]
        self.tapes: dict[tuple[int, Task], _Tape] = {}
        self.ran: set[tuple[int, Task]] = set()
        self.homes = {op.inputs[0].tensor: op for op in program.model.ops if not op.is_forward}
        self.updated: dict[int, set[Value]] = {}
        self.losses: dict[int, list[tuple[Content, NDArray[Any]]]] = {}
        self.cohorts: dict[int, Cohort] = {}

    # What `interpret` asks.

    def run(self, cohort: Cohort, at: int, read: Sequence[Content | None]) -> Sequence[Content]:
        self.cohorts[cohort.number] = cohort
        i, given = cohort.code[at], [c for c in read if c is not None]
        if any(c.is_stale for c in given):
            raise Refusal("reads a weight that is updated already.")
        if not isinstance(i, Accumulate):
            for content in given:
                content.is_shared = True
        found: Sequence[Content] = getattr(self, f"_{type(i).__name__.lower()}")(cohort, at, i, read)
        return found

    def start(self, cohort: Cohort, at: int, read: Sequence[Content | None]) -> None:
        i = cohort.code[at]
        if any(c is not None and c.is_stale for c in read):
            raise Refusal("reads a weight that is updated already.")
        for content in read:
            if content is not None:
                content.is_shared = True
        if isinstance(i, Send):
            (source,) = read
            assert source is not None
            self._check_bytes(i.bytes, [prod(source.lengths.tolist())], source.dtype)
        elif isinstance(i, Collective):
            self._check_collective(cohort, at, i, read)

    def take(self, value: Content, rows: Ints) -> Content:
        return _rows(value, rows)

    def arrive(self, cohort: Cohort, at: int, recv: Instruction, value: Content) -> Content:
        if isinstance(recv, Recv):
            self._check_shape(value, recv.shape)
            if recv.dtype != value.dtype:
                raise Refusal(f"receives {recv.dtype}, but {value.dtype} is sent.")
        return replace(value, is_shared=False)

    # Local instructions.

    def _load(self, cohort: Cohort, at: int, i: Load, read: Sequence[Content]) -> Sequence[Content]:
        tensor = self._tensor(i.tensor)
        box = _boxes(cohort.data(at, "box"), len(cohort))
        if tensor.kind != "input":
            number = next((n for n, w in enumerate(cohort.weights) if w.name == i.out), -1)
            if number < 0 or cohort.weights[number].tensor != i.tensor:
                raise Refusal(f"is no weight at rest of {i.tensor} on this device.")
            held = _boxes(cohort.of_weights("box")[number], len(cohort))
            self._must_equal(held, box, f"{i.tensor} is at rest as")
        self._check_inside(tensor, box)
        return [Content(i.tensor, False, box, None, tensor.dtype, is_shared=True)]

    def _slice(self, cohort: Cohort, at: int, i: Slice, read: Sequence[Content]) -> Sequence[Content]:
        (source,) = read
        self._check_view(source, i.view)
        ranges = _boxes(cohort.data(at, "ranges"), len(cohort))
        size = source.lengths
        if ranges.shape[1] != len(size):
            raise Refusal(f"cuts {ranges.shape[1]} slots of {len(size)}.")
        outside = (ranges[..., 0] < 0) | (ranges[..., 1] > size) | (ranges[..., 0] >= ranges[..., 1])
        if outside.any():
            row = int(np.argmax(outside.any(axis=1)))
            raise Refusal(f"cuts {_text(ranges[row])} of a value of {size.tolist()}.", row)
        found = _cut(source, source.box[..., :1] + ranges)
        self._check_shape(found, i.shape)
        return [replace(found, is_shared=True)]

    def _combine(self, cohort: Cohort, at: int, i: Combine, read: Sequence[Content]) -> Sequence[Content]:
        n, slots = len(cohort), len(i.view)
        whole = np.zeros((n, slots, 2), dtype=np.int64)
        whole[..., 1] = i.view
        if not read:
            return [Content("", False, whole, {}, i.dtype)]
        boxes = cohort.data(at, "boxes").reshape(n, len(read), slots, 2)
        first = read[0]
        if first.box.shape[1] != slots or len(i.boxes) != len(i.pieces):
            raise Refusal(
                f"places {len(i.pieces)} pieces of {first.box.shape[1]} slots at {len(i.boxes)} boxes of {slots}."
            )
        origin = first.box[..., 0] - boxes[:, 0, :, 0]
        whole += origin[..., None]
        for k, piece in enumerate(read):
            self._must_be_alike(first, piece)
            self._must_equal(boxes[:, k] + origin[..., None], piece.box, f"piece {k} is put at")
        self._check_inside(self._tensor(first.tensor), whole)
        for k in range(len(read)):
            if (
                clipped(boxes[:, k : k + 1] + origin[:, None, :, None], whole)
                != boxes[:, k : k + 1] + origin[:, None, :, None]
            ).any():
                raise Refusal(f"puts piece {k} outside of a value of {list(i.view)}.")
        found = self._sum(first, whole, read)
        self._check_shape(found, i.shape)
        if i.dtype != first.dtype:
            raise Refusal(f"is {i.dtype}, but its pieces are {first.dtype}.")
        # The sum of one piece that is all of it is that piece.
        return [replace(found, is_shared=len(read) == 1)]

    def _accumulate(self, cohort: Cohort, at: int, i: Accumulate, read: Sequence[Content]) -> Sequence[Content]:
        into, value = read
        if i.in_place != (i.out == i.into):
            raise Refusal(f"adds to {i.into} in place but makes {i.out}." if i.in_place else f"makes {i.out} anew.")
        if i.in_place and into.is_shared:
            raise Refusal(f"changes {i.into} in place, which something else holds.")
        self._must_be_alike(into, value)
        self._must_equal(value.box, into.box, f"{i.value} is")
        value.is_shared = True
        into.is_shared |= not i.in_place
        return [self._sum(into, into.box, read)]

    # Segments.

    def _forward(self, cohort: Cohort, at: int, i: Forward, read: Sequence[Content]) -> Sequence[Content]:
        key = cohort.number, i.task
        if key in self.ran:
            raise Refusal("runs twice; every part runs once in a step.")
        self.ran.add(key)
        if not 0 <= i.function < len(self.segments):
            raise Refusal(f"runs function {i.function} of {len(self.segments)}.")
        segment = self.segments[i.function]
        starts = _padded(cohort.data(at, "at").reshape(len(cohort), -1))
        segment.check(i, starts)
        passed: dict[str, Passed] = {}
        inputs = [self._given(segment, n, content, starts) for n, content in enumerate(read)]
        if segment.is_plain and all(c.addends is None for c in inputs):
            made = [self._output(segment, tensor, starts) for tensor in segment.function.outputs]
        else:
            made = self._op_by_op(segment, inputs, starts, passed)
        if any(i.grads):
            self.tapes[key] = _Tape(segment, starts, inputs, i, passed)
        return made

    def _given(self, segment: _Segment, n: int, content: Content, starts: Ints) -> Content:
        """Return input `n` as what it is read as: all that the part needs, or some of its addends."""
        tensor, box = segment.function.inputs[n], segment.face(n, starts)
        if content.tensor == "" and not content.is_gradient:
            if content.lengths.tolist() != (box[0, :, 1] - box[0, :, 0]).tolist():
                raise Refusal(f"reads zeros of {content.lengths.tolist()} as {Mask(tensor, _box(box[0]))}.")
            return Content(tensor, False, box, {}, content.dtype)
        if (content.tensor, content.is_gradient) != (tensor, False):
            raise Refusal(f"reads {_kind(content)} as {tensor}.")
        self._must_equal(content.box, box, f"{tensor} is read as", swap=True)
        return self.settled(content, deep=True)

    def _output(self, segment: _Segment, tensor: str, starts: Ints) -> Content:
        op, box, columns = segment.made(tensor, starts)
        dtype = self.model.tensors[tensor].dtype
        if columns is None:
            return Content(tensor, False, box, None, dtype, is_shared=True)
        addends = {("made", op, ()): np.concatenate([box, columns], axis=1)[:, None]}
        return Content(tensor, False, box, addends, dtype, is_shared=True)

    def _op_by_op(
        self, segment: _Segment, inputs: Sequence[Content], starts: Ints,
        passed: dict[str, Passed],
    ) -> list[Content]:  # fmt: skip
        made: dict[str, Content] = {}
        for n, op in enumerate(segment.function.ops):
            given = []
            for k, operand in enumerate(op.inputs):
                number = segment.function.input_of.get((op.name, k))
                content = made[operand.tensor] if number is None else inputs[number]
                self._must_equal(content.box, segment.operand(n, operand, starts), f"{op.name} reads", swap=True)
                given.append(self.settled(content, deep=True))
            partial = {k: c for k, c in enumerate(given) if c.addends is not None}
            if partial:
                passed[op.name] = self._groups(op, given, partial)
            for output in op.outputs:
                content = self._output(segment, output.tensor, starts)
                if partial:
                    content = replace(content, addends=self._passed(segment, n, output, passed[op.name], starts))
                made[output.tensor] = self.settled(content)
        return [made[tensor] for tensor in segment.function.outputs]

    def _groups(self, op: Op, given: Sequence[Content], partial: Mapping[int, Content]) -> Passed:
        """Return what is given to the groups of inputs, in each of which the op is linear, that have partial ones."""
        groups = [g for g, group in enumerate(op.linear) if set(partial) <= set(group)][:1]
        groups = groups or [g for g, group in enumerate(op.linear) if set(partial) & set(group)]
        for k, content in partial.items():
            if sum(k in op.linear[g] for g in groups) != 1:
                raise Refusal(f"({op.name}) needs the whole value: {self.fault(content)}", self.faulty(content))
        return {g: {k: given[k] for k in op.linear[g]} for g in groups}

    def _links(self, passed: Passed, without: int = -1) -> list[tuple[Link, ...]]:
        """Return all products of addends of the groups, but for those that have input `without`."""
        ways = [
            [
                ((group, k, chain), boxes)
                for k, content in given.items()
                for chain, boxes in self._addends(content).items()
            ]
            for group, given in passed.items()
            if without not in given
        ]
        return list(product(*ways))

    def _passed(self, segment: _Segment, n: int, output: Operand, passed: Passed, starts: Ints) -> Addends:
        op = segment.function.ops[n]
        found: dict[Chain, Ints] = {}
        for links in self._links(passed):
            key = ("made", op.name, tuple(link for link, _ in links))
            inner = [("i", k, chain, boxes) for (_, k, chain), boxes in links]
            found[key] = segment.carried(n, key, output, inner, starts)
        return found

    @staticmethod
    def _addends(content: Content) -> Addends:
        """Return the addends of a value, a whole one as a chain of its own."""
        return {(): content.box[:, None]} if content.addends is None else content.addends

    def _backward(self, cohort: Cohort, at: int, i: Backward, read: Sequence[Content | None]) -> Sequence[Content]:
        tape = self.tapes.pop((cohort.number, i.task), None)
        if tape is None:
            raise Refusal("has no forward that ran before it and kept what it needs.")
        if any(c.is_stale for c in tape.inputs):
            raise Refusal("needs a weight that is updated already.")
        segment, run = tape.function, tape.run
        if len(i.gradients) != len(run.saved):
            raise Refusal(f"is given {len(i.gradients)} gradients for {len(run.saved)} outputs.")
        given: dict[str, Content] = {}
        for number, name, content in zip(run.saved, i.gradients, read, strict=True):
            tensor = segment.function.outputs[number]
            if name == ONE:
                content = self._seed(tensor, segment.made(tensor, tape.at)[1])
            if content is not None:
                if (content.tensor, content.is_gradient) != (tensor, True):
                    raise Refusal(f"reads {_kind(content)} as the gradient of {tensor}.")
                self._must_equal(
                    content.box, segment.made(tensor, tape.at)[1], f"the gradient of {tensor} is read as", swap=True
                )
                given[tensor] = self.settled(content)
        addends = self._plain_gradients(tape, given)
        if addends is None:
            addends = self._gradients(tape, given)
        wanted = [n for n, wants in enumerate(run.grads) if wants]
        if len(i.outputs) != len(wanted) or len(i.wide) not in (0, len(wanted)):
            raise Refusal(f"makes {len(i.outputs)} gradients of {len(wanted)} aliases.")
        found = []
        for k, (n, out) in enumerate(zip(wanted, i.outputs, strict=True)):
            spec = self.model.tensors[segment.function.inputs[n]]
            if out is not None:
                dtype = spec.wide_dtype if i.wide and i.wide[k] else spec.dtype
                content = Content(spec.name, True, tape.inputs[n].box, addends.get(n, {}), dtype, is_shared=True)
                found.append(self.settled(content))
        return found

    def _seed(self, tensor: str, box: Ints) -> Content:
        if tensor != self.model.loss:
            raise Refusal(f"starts the gradient of {tensor} from one, which is not the loss.")
        heads = self.kinds.heads(tensor, True)
        addends = None if heads == (SEED,) else {SEED: box[:, None]}
        return Content(tensor, True, box, addends, self.model.tensors[tensor].dtype)

    def _plain_gradients(self, tape: _Tape, given: Mapping[str, Content]) -> Mapping[int, Addends] | None:
        """Return the addends by input where all gradients are whole, as they are almost always; else None."""
        segment = tape.function
        if not segment.is_plain_backward or tape.passed:
            return None
        for tensor, heads in segment.outer_heads.items():
            content = given.get(tensor)
            if not heads and content is None:
                continue
            if content is None or not self._has(content, heads):
                return None
        return segment.gradients(tape.at)

    def _has(self, content: Content, heads: Sequence[Chain]) -> bool:
        """Tell whether a gradient has all addends of some uses, each once, and nothing else."""
        if content.addends is None:
            return set(heads) == set(self.kinds.heads(content.tensor, True))
        if set(content.addends) != set(heads):
            return False
        return all(bool(self._is_tiled(content, chain, boxes).all()) for chain, boxes in content.addends.items())

    def _gradients(self, tape: _Tape, given: Mapping[str, Content]) -> dict[int, Addends]:
        """Return the addends by input, op by op in reverse order."""
        segment, function = tape.function, tape.function.function
        inner: dict[str, list[Addends]] = {}
        found: dict[int, dict[Chain, list[Ints]]] = {}
        for n in reversed(range(len(function.ops))):
            op = function.ops[n]
            if not op.has_mirror:
                continue
            mirrors = self._output_gradients(segment, n, given, inner, tape.at)
            for k, operand in enumerate(op.inputs):
                if not self.model.tensors[operand.tensor].requires_grad:
                    continue
                links = self._links(tape.passed.get(op.name, {}), without=k)
                addends = self._of_use(segment, n, k, mirrors, links, tape.at)
                number = function.input_of.get((op.name, k))
                if number is None:
                    inner.setdefault(operand.tensor, []).append(addends)
                else:
                    for chain, boxes in addends.items():
                        found.setdefault(number, {}).setdefault(chain, []).append(boxes)
        return {n: {c: merged(np.concatenate(b, axis=1)) for c, b in some.items()} for n, some in found.items()}

    def _output_gradients(
        self, segment: _Segment, n: int, given: Mapping[str, Content], inner: Mapping[str, list[Addends]], at: Ints
    ) -> list[Link]:
        """Return the addends of the gradients of an op's outputs; an empty link where all of these are whole."""
        mirrors: list[Link] = []
        is_whole = True
        for j, output in enumerate(segment.function.ops[n].outputs):
            box = segment.operand(n, output, at)
            parts = list(inner.get(output.tensor, ()))
            content = given.get(output.tensor)
            if content is not None:
                parts.append(self._told(content))
            total = self.settled(Content(output.tensor, True, box, self._total(parts), ""), deep=True)
            is_whole &= total.addends is None
            if total.addends is not None or self.kinds.heads(output.tensor, True):
                mirrors += [((j, chain), boxes) for chain, boxes in self._addends(total).items()]
        return [((), at)] if is_whole else mirrors

    def _of_use(
        self, segment: _Segment, n: int, k: int, mirrors: Sequence[Link], sides: Sequence[tuple[Link, ...]], at: Ints
    ) -> Addends:  # fmt: skip
        op = segment.function.ops[n]
        found: dict[Chain, list[Ints]] = {}
        for mirror, boxes in mirrors:
            for links in sides:
                inner = [("o", *mirror, boxes)] if mirror else []
                inner += [("i", j, chain, some) for (_, j, chain), some in links]
                key: Chain = ("use", op.name, k, mirror, tuple(link for link, _ in links))
                found.setdefault(key, []).append(segment.carried(n, key, op.inputs[k], inner, at))
        return {chain: merged(np.concatenate(some, axis=1)) for chain, some in found.items()}

    # Sums.

    def _told(self, content: Content) -> Addends:
        """Return the addends of a value, a whole one by the chains of its tensor."""
        if content.addends is not None:
            return content.addends
        found = {}
        for chain in self.kinds.heads(content.tensor, content.is_gradient):
            found[chain] = self._region(content.box, chain, content.tensor)[:, None]
        return found

    def _region(self, box: Ints, chain: Chain, tensor: str) -> Ints:
        sizes = list(self.kinds.columns(chain, tensor).values())
        rest = np.zeros((len(box), len(sizes), 2), dtype=np.int64)
        rest[..., 1] = sizes
        return np.concatenate([box, rest], axis=1)

    def _total(self, parts: Sequence[Addends]) -> Addends:
        found: dict[Chain, list[Ints]] = {}
        for part in parts:
            for chain, boxes in part.items():
                found.setdefault(chain, []).append(boxes)
        return {
            chain: boxes[0] if len(boxes) == 1 else merged(np.concatenate(boxes, axis=1))
            for chain, boxes in found.items()
        }

    def _sum(self, like: Content, box: Ints, parts: Sequence[Content]) -> Content:
        if len(parts) == 1 and parts[0].addends is None and np.array_equal(box, parts[0].box):
            return replace(parts[0])
        total = self._total([self._told(part) for part in parts])
        return self.settled(Content(like.tensor, like.is_gradient, box, total, like.dtype))

    def _is_tiled(self, content: Content, chain: Chain, boxes: Ints) -> NDArray[np.bool_]:
        return np.asarray(is_tiled(boxes, self._region(content.box, chain, content.tensor)))

    def settled(self, content: Content, deep: bool = False) -> Content:
        """Return the same value; without its addends, where they are the whole value. Unless `deep`, only where they
        are one box each: that is cheap, and almost always so.
        """
        if content.addends is None or not (self._is_one_box_each(content) or (deep and self._missing(content) is None)):
            return content
        return replace(content, addends=None)

    def _is_one_box_each(self, content: Content) -> bool:
        heads, addends = self.kinds.heads(content.tensor, content.is_gradient), content.addends
        return (
            addends is not None
            and len(heads) == len(addends)
            and all(
                chain in addends
                and addends[chain].shape[1] == 1
                and np.array_equal(addends[chain][:, 0], self._region(content.box, chain, content.tensor))
                for chain in heads
            )
        )

    def _missing(self, content: Content) -> tuple[Chain, Ints | None] | None:
        """Return the first chain of which a value lacks or repeats addends, with the boxes it has; None if none."""
        assert content.addends is not None
        goals = self.kinds.complete(content.tensor, content.is_gradient, tuple(content.addends))
        covered: set[Chain] = set()
        for goal in goals:
            found = []
            for chain, boxes in content.addends.items():
                spread = self.kinds.spread(content.tensor, chain, boxes, goal)
                if spread is not None:
                    found.append(spread)
                    covered.add(chain)
            if not found or not self._is_tiled(content, goal, np.concatenate(found, axis=1)).all():
                return goal, np.concatenate(found, axis=1) if found else None
        extra = next((chain for chain in content.addends if chain not in covered), None)
        return None if extra is None else (extra, content.addends[extra])

    def faulty(self, content: Content) -> int:
        """Return the first device, by its row, on which a value is not whole."""
        goal, boxes = self._missing(content) or ((), None)
        if boxes is None:
            return 0
        return int(np.argmin(self._is_tiled(content, goal, boxes)))

    def fault(self, content: Content) -> str:
        """Return in words what is missing of a value, or is in it more than once."""
        goal, boxes = self._missing(content) or ((), None)
        row = self.faulty(content)
        slots = content.box.shape[1]
        region = self._region(content.box, goal, content.tensor)[row]
        cell, count = (region, 0) if boxes is None else first_fault(boxes[row], region)
        names = self.kinds.columns(goal, content.tensor)
        pairs = zip(names.items(), cell[slots:].tolist(), strict=True)
        rest = [f"{self._column(column)} {lo}:{hi} of {size}" for (column, size), (lo, hi) in pairs]
        what = f"{Mask(content.tensor, _box(cell[:slots]))}"
        why = f"the addends of {self._chain(goal, content.is_gradient)}" + (f" at {', '.join(rest)}" if rest else "")
        times = "lacks" if count == 0 else f"has {count} times"
        return f"{'the gradient of ' if content.is_gradient else ''}{what} {times} {why}."

    def _column(self, column: Any) -> str:
        op = self.kinds.op[column[0]]
        return op.indices[column[1]].factor if isinstance(column[1], int) else "slot"

    def _chain(self, chain: Chain, is_gradient: bool) -> str:
        if chain == SEED:
            return "the loss itself"
        if chain[0] == "rest":
            return "it"
        return f"its use in {chain[1]}" if is_gradient else chain[1]

    # Communication.

    def _check_collective(self, cohort: Cohort, at: int, i: Collective, read: Sequence[Content | None]) -> None:
        if not len(i.works) == len(i.sources) == len(i.ways):
            raise Refusal(f"starts {len(i.works)} collectives of {len(i.sources)} sources in {len(i.ways)} ways.")
        sizes = []
        for content, way in zip(read, i.ways, strict=True):
            sizes.append(prod(way.view))
            if content is None:
                continue
            if i.kind == "broadcast" and cohort.devices[0] != cohort.data(at, "group")[0, 0]:
                raise Refusal("is given a value by a device that only receives.")
            self._check_view(content, way.view)
            self._check_shape(content, way.local)
            if content.dtype != i.dtype:
                raise Refusal(f"moves {content.dtype} as {i.dtype}.")
        self._check_bytes(i.bytes, sizes, i.dtype)

    def join(
        self, how: Collective, part: int, members: Sequence[tuple[Content, Ints]], position: Ints, group: Ints
    ) -> Content:
        way, given = how.ways[part], [_rows(content, rows) for content, rows in _together(members)]
        first = given[0]
        for content in given[1:]:
            self._must_be_alike(first, content)
        joined: Content
        match how.kind:
            case "broadcast":
                return self._arrived(_rows(first, group), way)
            case "all_reduce" | "reduce_scatter":
                for k, content in enumerate(given[1:], 1):
                    self._must_equal(content.box, first.box, f"its {k + 1}th device gives")
                joined = _rows(self._sum(first, first.box, given), group)
                if how.kind == "reduce_scatter":
                    joined = _chunk(joined, way.give, len(given), position)
                return self._arrived(joined, way)
            case "all_gather":
                return self._arrived(_rows(self._gathered(given, way), group), way)
            case "all_to_all":
                chunks = [_chunk(_rows(content, group), way.give, len(given), position) for content in given]
                return self._arrived(self._gathered(chunks, way), way)
        raise Refusal(f"is a {how.kind}, which is no collective.")

    def _gathered(self, given: Sequence[Content], way: Way) -> Content:
        """Return what follows each other along a slot as one."""
        if not 0 <= way.take < given[0].box.shape[1]:
            raise Refusal(f"gathers slot {way.take} of {given[0].box.shape[1]}.")
        box = given[0].box.copy()
        for k, content in enumerate(given[1:], 1):
            expected = given[0].box.copy()
            size = expected[:, way.take, 1] - expected[:, way.take, 0]
            expected[:, way.take, 0] = box[:, way.take, 1]
            expected[:, way.take, 1] = box[:, way.take, 1] + size
            self._must_equal(content.box, expected, f"its {k + 1}th device gives")
            box[:, way.take, 1] = expected[:, way.take, 1]
        return self._sum(given[0], box, given)

    def _arrived(self, content: Content, way: Way) -> Content:
        self._check_shape(content, way.shape)
        return content

    # The end of a step.

    def _update(self, cohort: Cohort, at: int, i: Update, read: Sequence[Content]) -> Sequence[Content]:
        if cohort.number in self.updated:
            raise Refusal("is the second update of this device.")
        done = self.updated.setdefault(cohort.number, set())
        weights = {w.name: w for w in cohort.weights}
        count, ends = len(i.weights), len(i.weights) * 2 + len(i.buffers)
        pairs = [*zip(i.weights, read[:count], read[count : 2 * count], strict=True)]
        pairs += zip(i.buffers, read[2 * count : ends], read[ends:], strict=True)
        for name, weight, value in pairs:
            home, held = self.homes.get(weight.tensor), weights.get(name)
            if home is None or held is None or held.tensor != weight.tensor:
                raise Refusal(f"changes {name}, which no op updates.")
            if name in done:
                raise Refusal(f"changes {name} twice.")
            done.add(name)
            wanted = (home.inputs[1].tensor, False) if home.is_write else (weight.tensor, True)
            if (value.tensor, value.is_gradient) != wanted or home.is_write != (name in i.buffers):
                raise Refusal(f"changes {name} ({weight.tensor}) by {_kind(value)}.")
            self._must_equal(
                value.box,
                weight.box,
                f"{weight.tensor} is changed by",
            )
            value = self.settled(value, deep=True)
            if value.addends is not None:
                raise Refusal(f"changes {name}, but {self.fault(value)}", self.faulty(value))
            weight.is_stale = True
        return []

    def _loss(self, cohort: Cohort, at: int, i: Loss, read: Sequence[Content]) -> Sequence[Content]:
        if cohort.number in self.losses:
            raise Refusal("gives the loss a second time.")
        if len(i.counted) != len(i.parts):
            raise Refusal(f"counts {len(i.counted)} of {len(i.parts)} parts.")
        counted = cohort.data(at, "counted").reshape(len(cohort), len(read))
        for content in read:
            if (content.tensor, content.is_gradient) != (self.model.loss, False):
                raise Refusal(f"gives {_kind(content)} as the loss.")
        self.losses[cohort.number] = [(content, counted[:, n]) for n, content in enumerate(read)]
        return []

    # What must hold.

    def _tensor(self, name: str) -> PTensor:
        if name not in self.model.tensors:
            raise Refusal(f"names {name}, which is no tensor of the model.")
        return self.model.tensors[name]

    def _check_inside(self, tensor: PTensor, box: Ints) -> None:
        sizes = np.array(tensor.extents, dtype=np.int64)
        if box.shape[1] != len(sizes):
            raise Refusal(f"has {box.shape[1]} slots of {tensor.name}, which has {len(sizes)}.")
        outside = ((box[..., 0] < 0) | (box[..., 1] > sizes) | (box[..., 0] >= box[..., 1])).any(axis=1)
        if outside.any():
            row = int(np.argmax(outside))
            raise Refusal(f"has {Mask(tensor.name, _box(box[row]))} of {list(tensor.extents)} elements.", row)

    def _check_view(self, content: Content, view: Sequence[int]) -> None:
        if content.lengths.tolist() != list(view):
            raise Refusal(f"views {_kind(content)} of {content.lengths.tolist()} as {list(view)}.")

    def _check_shape(self, content: Content, shape: Sequence[int]) -> None:
        expected = self.model.tensors[content.tensor].local_shape(tuple(content.lengths.tolist()))
        if tuple(shape) != expected:
            raise Refusal(f"gives {_kind(content)} the shape {tuple(shape)}, but it has {expected}.")

    def _check_bytes(self, count: int, sizes: Sequence[int], dtype: str) -> None:
        if count != sum(sizes) * width(dtype):
            raise Refusal(f"is said to weigh {count} bytes, but has {sum(sizes) * width(dtype)}.")

    def _must_be_alike(self, a: Content, b: Content) -> None:
        if (a.tensor, a.is_gradient, a.dtype) != (b.tensor, b.is_gradient, b.dtype):
            raise Refusal(f"adds {_kind(b)} ({b.dtype}) to {_kind(a)} ({a.dtype}).")

    def _must_equal(self, found: Ints, wanted: Ints, what: str, swap: bool = False) -> None:
        if found.shape == wanted.shape and np.array_equal(found, wanted):
            return
        row = 0 if found.shape != wanted.shape else int(np.argmax((found != wanted).any(axis=(1, 2))))
        a, b = (wanted, found) if swap else (found, wanted)
        raise Refusal(f"{what} [{_text(a[row])}], but it has [{_text(b[row])}].", row)


class _Segment:
    """A function with what follows from its indices alone: which columns of `at` make which boxes."""

    def __init__(self, function: Function, kinds: Kinds) -> None:
        self.function, self.kinds, self.model = function, kinds, kinds.model
        self.number = {op.name: n for n, op in enumerate(function.ops)}
        self.columns = [np.array(where, dtype=np.int64) for where in function.coordinates]
        self.sizes = [np.array([hi - lo for lo, hi in box], dtype=np.int64) for box in function.boxes]
        self.maker = {o.tensor: (n, o) for n, op in enumerate(function.ops) for o in op.outputs}

    # Checks.

    @cached_property
    def _limits(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return per index of all ops its column, size and whole size, and where it must start (-1: anywhere)."""
        rows = []
        for op, where, box in zip(self.function.ops, self.function.coordinates, self.function.boxes, strict=True):
            placed = self.model.placed(op)
            for k, (index, column, (lo, hi)) in enumerate(zip(op.indices, where, box, strict=True)):
                if hi - lo < 1:
                    raise Refusal(f"runs {op.name} on {lo}:{hi} of {index.factor}.")
                if index.mark == "frozen" and hi - lo != index.size:
                    raise Refusal(f"cuts {index.factor} of {op.name}, which cannot be cut.")
                rows.append((column, hi - lo, index.size, lo if k in placed else -1))
        found = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return found[0], found[1], found[2], found[3]

    def check(self, run: Forward, starts: Ints) -> None:
        """Raise Refusal unless the parts that start there are parts of the function's ops."""
        column, size, whole, placed = self._limits
        if column.size and column.max() >= starts.shape[1] - 1:
            raise Refusal(f"has {starts.shape[1] - 1} starts for {int(column.max()) + 1} coordinates.")
        at = starts[:, column]
        outside = (at < 0) | (at + size > whole) | ((placed >= 0) & (at != placed))
        if outside.any():
            row, k = np.argwhere(outside)[0].tolist()
            raise Refusal(f"runs a part that starts at {at[row, k]} of {whole[k]}, with a size of {size[k]}.", row)
        if len(run.inputs) != len(self.function.inputs) or len(run.grads) != len(run.inputs):
            raise Refusal(f"is given {len(run.inputs)} inputs of {len(self.function.inputs)}.")
        if len(run.outputs) != len(self.function.outputs):
            raise Refusal(f"makes {len(run.outputs)} outputs of {len(self.function.outputs)}.")
        if any(not 0 <= k < len(run.outputs) for k in run.saved) or len(set(run.saved)) < len(run.saved):
            raise Refusal(f"saves outputs {run.saved} of {len(run.outputs)}.")
        for n, wants in enumerate(run.grads):
            tensor = self.function.inputs[n]
            has = self.model.tensors[tensor].requires_grad and any(op.has_mirror for op, _ in self.uses_of[n])
            if wants != has:
                raise Refusal(f"{'wants' if wants else 'does not want'} a gradient of {tensor}.")

    @cached_property
    def uses_of(self) -> list[list[tuple[Op, int]]]:
        found: list[list[tuple[Op, int]]] = [[] for _ in self.function.inputs]
        for (name, k), n in self.function.input_of.items():
            found[n].append((self.function.ops[self.number[name]], k))
        return found

    # Boxes.

    def _slots(self, n: int, operand: Operand) -> tuple[Ints, Ints]:
        """Return per slot of an operand the column of its start, the last one where it is whole, and its size."""
        extents = self.model.tensors[operand.tensor].extents
        columns = [-1 if i is None else int(self.columns[n][i]) for i in operand.slots]
        sizes = [e if i is None else int(self.sizes[n][i]) for i, e in zip(operand.slots, extents, strict=True)]
        return np.array(columns, dtype=np.int64), np.array(sizes, dtype=np.int64)

    @cached_property
    def _cache(self) -> dict[Any, Any]:
        return {}

    def _spot(self, key: Any, make: Any) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def operand(self, n: int, operand: Operand, starts: Ints) -> Ints:
        """Return which box parts of op `n` touch of an operand."""
        columns, sizes = self._spot((n, operand), lambda: self._slots(n, operand))
        return _spans(starts, columns, sizes)

    def face(self, n: int, starts: Ints) -> Ints:
        """Return which box parts read of input `n`."""
        if not self.uses_of[n]:
            raise Refusal(f"is given {self.function.inputs[n]}, which no op of it reads.")
        op, k = self.uses_of[n][0]
        return self.operand(self.number[op.name], op.inputs[k], starts)

    def made(self, tensor: str, starts: Ints) -> tuple[str, Ints, Ints | None]:
        """Return which op makes a tensor, the box, and the columns of its addends; None where it makes all."""
        n, output = self.maker[tensor]
        op = self.function.ops[n]

        def rest() -> tuple[Ints, Ints] | None:
            summed = [i for i in range(len(op.indices)) if i not in output.slots]
            if all(self.sizes[n][i] == op.indices[i].size for i in summed):
                return None
            return self.columns[n][summed], self.sizes[n][summed]

        found = self._spot(("made", tensor), rest)
        return op.name, self.operand(n, output, starts), None if found is None else _spans(starts, *found)

    def carried(
        self, n: int, chain: Chain, own: Operand, inner: Sequence[tuple[str, int, Chain, Ints]], starts: Ints
    ) -> Ints:
        """Return the boxes of the addends that an op's parts make of those of its operands: `inner` has per operand the
        side, its number, and boxes; those of several operands in all combinations.
        """
        op, count = self.function.ops[n], len(starts)
        box = _spans(starts, self.columns[n], self.sizes[n])
        combined = box[:, None]
        rest: dict[Any, Ints] = {}
        for side, number, sub, boxes in inner:
            operand = (op.outputs if side == "o" else op.inputs)[number]
            before, more = combined.shape[1], boxes.shape[1]
            combined = np.repeat(combined, more, axis=1)
            rest = {column: np.repeat(found, more, axis=1) for column, found in rest.items()}
            tiled = np.tile(boxes, (1, before, 1, 1))
            for slot, index in enumerate(operand.slots):
                if index is None:
                    rest[op.name, side, number, slot] = tiled[:, :, slot]
                else:
                    both = np.stack([combined[:, :, index], tiled[:, :, slot]])
                    combined[:, :, index, 0] = both[..., 0].max(axis=0)
                    combined[:, :, index, 1] = np.maximum(both[..., 1].min(axis=0), combined[:, :, index, 0])
            names = self.kinds.columns(sub, operand.tensor) if sub else ()
            for k, column in enumerate(names, len(operand.slots)):
                rest[op.name, side, number, *column] = tiled[:, :, k]
        extents = self.model.tensors[own.tensor].extents
        columns = [
            combined[:, :, i] if i is not None else np.broadcast_to(np.array([0, e]), (count, combined.shape[1], 2))
            for i, e in zip(own.slots, extents, strict=True)
        ]
        for column in self.kinds.columns(chain, own.tensor):
            columns.append(rest[column] if column in rest else combined[:, :, column[1]])
        return np.stack(columns, axis=2) if columns else np.zeros((count, combined.shape[1], 0, 2), dtype=np.int64)

    # What is plain: all values inside are whole, and made on the boxes that they are read on.

    @cached_property
    def is_plain(self) -> bool:
        for op in self.function.ops:
            for k, operand in enumerate(op.inputs):
                n = self.number[op.name]
                number = self.function.input_of.get((op.name, k))
                if number is not None:
                    first, at = self.uses_of[number][0]
                    same = self._slots(self.number[first.name], first.inputs[at])
                else:
                    m, output = self.maker[operand.tensor]
                    summed = [i for i in range(len(self.function.ops[m].indices)) if i not in output.slots]
                    if any(self.sizes[m][i] != self.function.ops[m].indices[i].size for i in summed):
                        return False
                    same = self._slots(m, output)
                if not all(np.array_equal(a, b) for a, b in zip(same, self._slots(n, operand), strict=True)):
                    return False
        return True

    @cached_property
    def outer_heads(self) -> Mapping[str, tuple[Chain, ...]]:
        """Return for each tensor made here the uses of its gradient that are not here."""
        here = {("use", op.name, k, (), ()) for op in self.function.ops for k in range(len(op.inputs))}
        made = {o.tensor for op in self.function.ops if op.has_mirror for o in op.outputs}
        return {t: tuple(c for c in self.kinds.heads(t, True) if c not in here) for t in made}

    @cached_property
    def is_plain_backward(self) -> bool:
        """Tell whether the addends of the uses here of what is made here are all that these uses give."""
        if not self.is_plain:
            return False
        for op in self.function.ops:
            n = self.number[op.name]
            for k, operand in enumerate(op.inputs):
                if (op.name, k) in self.function.input_of or not op.has_mirror:
                    continue
                if not self.model.tensors[operand.tensor].requires_grad:
                    continue
                summed = [i for i in range(len(op.indices)) if i not in operand.slots]
                if any(self.sizes[n][i] != op.indices[i].size for i in summed):
                    return False
        return True

    def gradients(self, starts: Ints) -> Mapping[int, Addends]:
        """Return the addends of the gradient of each input where the gradients of all outputs are whole."""
        found: dict[int, dict[Chain, Ints]] = {}
        for number, uses in enumerate(self.uses_of):
            for op, k in uses:
                operand = op.inputs[k]
                if not op.has_mirror or not self.model.tensors[operand.tensor].requires_grad:
                    continue
                n = self.number[op.name]

                def spot(n: int = n, op: Op = op, operand: Operand = operand) -> tuple[Ints, Ints]:
                    columns, sizes = self._slots(n, operand)
                    summed = [i for i in range(len(op.indices)) if i not in operand.slots]
                    return (
                        np.concatenate([columns, self.columns[n][summed]]),
                        np.concatenate([sizes, self.sizes[n][summed]]),
                    )

                columns, sizes = self._spot(("use", op.name, k), spot)
                found.setdefault(number, {})["use", op.name, k, (), ()] = _spans(starts, columns, sizes)[:, None]
        return found


# Arrays.


def _padded(starts: Ints) -> Ints:
    """Return starts with a column of zeros behind, for what is whole."""
    return np.concatenate([starts.astype(np.int64), np.zeros((len(starts), 1), dtype=np.int64)], axis=1)


def _spans(starts: Ints, columns: Ints, sizes: Ints) -> Ints:
    lo = starts[:, columns]
    return np.stack([lo, lo + sizes], axis=-1)


def _boxes(data: NDArray[Any], count: int) -> Ints:
    return data.reshape(count, -1, 2).astype(np.int64)


def _rows(content: Content, rows: Ints) -> Content:
    addends = content.addends
    if addends is not None:
        addends = {chain: boxes[rows] for chain, boxes in addends.items()}
    return replace(content, box=content.box[rows], addends=addends)


def _cut(content: Content, box: Ints) -> Content:
    """Return what a value has of a box inside its own."""
    addends = content.addends
    if addends is not None:
        cut = {}
        for chain, boxes in addends.items():
            region = boxes[:, 0].copy() if boxes.shape[1] else np.zeros((len(box), boxes.shape[2], 2), dtype=np.int64)
            region[..., 0], region[..., 1] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
            region[:, : box.shape[1]] = box
            cut[chain] = clipped(boxes, region)
        addends = cut
    return replace(content, box=box, addends=addends)


def _chunk(content: Content, slot: int, count: int, position: Ints) -> Content:
    """Return the chunk of each device of a value that is cut along a slot."""
    if not 0 <= slot < content.box.shape[1]:
        raise Refusal(f"scatters slot {slot} of {content.box.shape[1]}.")
    size = int(content.lengths[slot])
    if size % count:
        raise Refusal(f"scatters {size} elements over {count} devices.")
    box = content.box.copy()
    box[:, slot, 0] += position * (size // count)
    box[:, slot, 1] = box[:, slot, 0] + size // count
    return _cut(content, box)


def _together(members: Sequence[tuple[Content, Ints]]) -> list[tuple[Content, Ints]]:
    return list(members)


def _box(box: Ints) -> tuple[tuple[int, int], ...]:
    return tuple((int(lo), int(hi)) for lo, hi in box.tolist())


def _text(box: Ints) -> str:
    return ", ".join(f"{lo}:{hi}" for lo, hi in box.tolist())


def _kind(content: Content) -> str:
    return f"the gradient of {content.tensor}" if content.is_gradient else content.tensor or "zeros"
