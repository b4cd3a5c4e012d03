"""The meaning of instructions on masks: of which elements of which tensor a value holds which addends.

What a segment does follows from the indices of its operators, never from what the scheduler joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    Wait,
    Way,
)  # fmt: skip
from superscaler.verify.content import Content, Sums, box_of, chunk_of, cut_of, kind_of, rows_of, text_of
from superscaler.verify.coverage import SEED, Addends, Boxes, Chain, Kinds, joined
from superscaler.verify.segment import Segment, padded

Passed = Mapping[int, Mapping[int, Content]]
# One of the addends of an operand: (group, input, chain) or (output, chain), and its boxes.
Link = tuple[Chain, Boxes]


@dataclass(eq=False)
class _Tape:
    """A forward that ran: what its backward needs. `passed` has per op of which parts have only some addends of inputs
    these, by the group of inputs in which the op is linear.
    """

    function: Segment
    at: Ints
    inputs: Sequence[Content]
    run: Forward
    passed: Mapping[str, Passed]


class Masks:
    """A domain of `interpret`. `updated` and `losses` have per cohort what its devices did at the end of the step."""

    def __init__(self, program: Program) -> None:
        self.model = program.model
        self.kinds = Kinds(program.model)
        self.sums = Sums(self.kinds)
        self.functions = program.functions
        self.segments: dict[int, Segment] = {}
        self.from_weights = {o.tensor for op in program.model.ops if op.from_weights for o in op.outputs}
        self.tapes: dict[tuple[int, Task], _Tape] = {}
        self.ran: set[tuple[int, Task]] = set()
        self.homes = {op.inputs[0].tensor: op for op in program.model.ops if not op.is_forward}
        self.updated: dict[int, set[Value]] = {}
        self.losses: dict[int, list[tuple[Content, NDArray[Any]]]] = {}
        self.cohorts: dict[int, Cohort] = {}

    # What `interpret` asks.

    def run(self, cohort: Cohort, at: int, read: Sequence[Content | None]) -> Sequence[Content]:
        self.cohorts[cohort.number] = cohort
        i = cohort.code[at]
        self._hold(() if isinstance(i, Accumulate) else read)
        found: Sequence[Content] = getattr(self, f"_{type(i).__name__.lower()}")(cohort, at, i, read)
        return found

    def start(self, cohort: Cohort, at: int, read: Sequence[Content | None]) -> Sequence[Content | None]:
        i = cohort.code[at]
        self._hold(read)
        if isinstance(i, Send):
            (source,) = read
            assert source is not None
            self._check_bytes(i.bytes, [prod(source.lengths.tolist())], source.dtype)
        elif isinstance(i, Collective):
            self._check_collective(cohort, at, i, read)
        # An update of weights waits for what is on its way.
        return [content and replace(content) for content in read]

    def _hold(self, read: Sequence[Content | None]) -> None:
        for content in read:
            if content is not None and content.is_stale:
                raise Refusal("reads a weight that is updated already.")
            if content is not None:
                content.is_shared = True

    def take(self, value: Content, rows: Ints) -> Content:
        return rows_of(value, rows)

    def arrive(self, cohort: Cohort, at: int, recv: Instruction, value: Content) -> Content:
        if isinstance(recv, Recv):
            self._check_shape(value, recv.shape)
            if recv.dtype != value.dtype:
                raise Refusal(f"receives {recv.dtype}, but {value.dtype} is sent.")
        wait = cohort.code[at]
        assert isinstance(wait, Wait)
        self._check_shape(value, wait.shape)
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
            raise Refusal(f"cuts {text_of(ranges[row])} of a value of {size.tolist()}.", row)
        found = cut_of(source, source.box[..., :1] + ranges)
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
        if (boxes[..., 0] < 0).any() or (boxes[..., 1] > np.array(i.view, dtype=np.int64)).any():
            raise Refusal(f"puts a piece outside of a value of {list(i.view)}.")
        found = self.sums.sum(first, whole, read)
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
        return [self.sums.sum(into, into.box, read)]

    # Segments.

    def _forward(self, cohort: Cohort, at: int, i: Forward, read: Sequence[Content]) -> Sequence[Content]:
        key = cohort.number, i.task
        if key in self.ran:
            raise Refusal("runs twice; every part runs once in a step.")
        self.ran.add(key)
        if not 0 <= i.function < len(self.functions):
            raise Refusal(f"runs function {i.function} of {len(self.functions)}.")
        if i.function not in self.segments:
            self.segments[i.function] = Segment(self.functions[i.function], self.kinds)
        segment = self.segments[i.function]
        starts = padded(cohort.data(at, "at").reshape(len(cohort), -1))
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

    def _given(self, segment: Segment, n: int, content: Content, starts: Ints) -> Content:
        """Return input `n` as what it is read as: all that the part needs, or some of its addends."""
        tensor, box = segment.function.inputs[n], segment.face(n, starts)
        if content.tensor == "" and not content.is_gradient:
            if content.lengths.tolist() != (box[0, :, 1] - box[0, :, 0]).tolist():
                raise Refusal(f"reads zeros of {content.lengths.tolist()} as {Mask(tensor, box_of(box[0]))}.")
            return Content(tensor, False, box, {}, content.dtype)
        if (content.tensor, content.is_gradient) != (tensor, False):
            raise Refusal(f"reads {kind_of(content)} as {tensor}.")
        self._must_equal(content.box, box, f"{tensor} is read as", swap=True)
        return self.sums.settled(content, deep=True)

    def _output(self, segment: Segment, tensor: str, starts: Ints) -> Content:
        op, box, columns = segment.made(tensor, starts)
        dtype = self.model.tensors[tensor].dtype
        if columns is None:
            return Content(tensor, False, box, None, dtype, is_shared=True)
        addends = {("made", op, ()): Boxes.of(np.concatenate([box, columns], axis=1)[:, None])}
        return Content(tensor, False, box, addends, dtype, is_shared=True)

    def _op_by_op(
        self, segment: Segment, inputs: Sequence[Content], starts: Ints,
        passed: dict[str, Passed],
    ) -> list[Content]:  # fmt: skip
        made: dict[str, Content] = {}
        for n, op in enumerate(segment.function.ops):
            given = []
            for k, operand in enumerate(op.inputs):
                number = segment.function.input_of.get((op.name, k))
                content = made[operand.tensor] if number is None else inputs[number]
                self._must_equal(content.box, segment.operand(n, operand, starts), f"{op.name} reads", swap=True)
                given.append(self.sums.settled(content, deep=True))
            partial = {k: c for k, c in enumerate(given) if c.addends is not None}
            if partial:
                passed[op.name] = self._groups(op, given, partial)
            for output in op.outputs:
                content = self._output(segment, output.tensor, starts)
                if partial:
                    content = replace(content, addends=self._passed(segment, n, output, passed[op.name], starts))
                made[output.tensor] = self.sums.settled(content)
        return [made[tensor] for tensor in segment.function.outputs]

    def _groups(self, op: Op, given: Sequence[Content], partial: Mapping[int, Content]) -> Passed:
        """Return what is given to the groups of inputs, in each of which the op is linear, that have partial ones."""
        groups = [g for g, group in enumerate(op.linear) if set(partial) <= set(group)][:1]
        groups = groups or [g for g, group in enumerate(op.linear) if set(partial) & set(group)]
        for k, content in partial.items():
            if sum(k in op.linear[g] for g in groups) != 1:
                raise Refusal(
                    f"({op.name}) needs the whole value: {self.sums.fault(content)}", self.sums.faulty(content)
                )
        return {g: {k: given[k] for k in op.linear[g]} for g in groups}

    def _links(self, passed: Passed, without: int = -1) -> list[tuple[Link, ...]]:
        """Return all products of addends of the groups, but for those that have input `without`."""
        ways = [
            [((group, k, chain), boxes) for k, content in given.items() for chain, boxes in content.told.items()]
            for group, given in passed.items()
            if without not in given
        ]
        return list(product(*ways))

    def _passed(self, segment: Segment, n: int, output: Operand, passed: Passed, starts: Ints) -> Addends:
        op = segment.function.ops[n]
        found: dict[Chain, Boxes] = {}
        for links in self._links(passed):
            key = ("made", op.name, tuple(link for link, _ in links))
            inner = [("i", k, chain, boxes) for (_, k, chain), boxes in links]
            found[key] = segment.carried(n, key, output, inner, starts)
        return found

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
                    raise Refusal(f"reads {kind_of(content)} as the gradient of {tensor}.")
                self._must_equal(
                    content.box, segment.made(tensor, tape.at)[1], f"the gradient of {tensor} is read as", swap=True
                )
                given[tensor] = self.sums.settled(content)
        addends = self._plain_gradients(tape, given)
        if addends is None:
            addends = self._gradients(tape, given)
        wanted = [n for n, wants in enumerate(run.grads) if wants]
        if len(i.outputs) != len(wanted) or len(i.wide) not in (0, len(wanted)):
            raise Refusal(f"makes {len(i.outputs)} gradients of {len(wanted)} aliases.")
        found = []
        for k, (n, out) in enumerate(zip(wanted, i.outputs, strict=True)):
            spec = self.model.tensors[segment.function.inputs[n]]
            is_wide = spec.name in self.from_weights and spec.wide_dtype != spec.dtype
            if is_wide != bool(i.wide and i.wide[k]):
                raise Refusal(f"{'does not make' if is_wide else 'makes'} the gradient of {spec.name} float32.")
            if out is not None:
                dtype = spec.wide_dtype if is_wide else spec.dtype
                content = Content(spec.name, True, tape.inputs[n].box, addends.get(n, {}), dtype, is_shared=True)
                found.append(self.sums.settled(content))
        return found

    def _seed(self, tensor: str, box: Ints) -> Content:
        if tensor != self.model.loss:
            raise Refusal(f"starts the gradient of {tensor} from one, which is not the loss.")
        heads = self.kinds.heads(tensor, True)
        addends = None if heads == (SEED,) else {SEED: Boxes.of(box[:, None])}
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
        return all(bool(self.sums.is_tiled(content, chain, boxes).all()) for chain, boxes in content.addends.items())

    def _gradients(self, tape: _Tape, given: Mapping[str, Content]) -> dict[int, Addends]:
        """Return the addends by input, op by op in reverse order."""
        segment, function = tape.function, tape.function.function
        inner: dict[str, list[Addends]] = {}
        found: dict[int, dict[Chain, list[Boxes]]] = {}
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
        return {n: {c: joined(b) for c, b in some.items()} for n, some in found.items()}

    def _output_gradients(
        self, segment: Segment, n: int, given: Mapping[str, Content], inner: Mapping[str, list[Addends]], at: Ints
    ) -> list[tuple[Link, ...]]:
        """Return the addends of the gradients of an op's outputs, or no link where all of these are whole."""
        mirrors: list[tuple[Link, ...]] = []
        is_whole = True
        for j, output in enumerate(segment.function.ops[n].outputs):
            box = segment.operand(n, output, at)
            parts = list(inner.get(output.tensor, ()))
            content = given.get(output.tensor)
            if content is not None:
                parts.append(self.sums.told(content))
            total = self.sums.settled(Content(output.tensor, True, box, self.sums.total(parts), ""), deep=True)
            is_whole &= total.addends is None
            if total.addends is not None or self.kinds.heads(output.tensor, True):
                mirrors += [(((j, chain), boxes),) for chain, boxes in total.told.items()]
        return [()] if is_whole else mirrors

    def _of_use(
        self, segment: Segment, n: int, k: int, mirrors: Sequence[tuple[Link, ...]], sides: Sequence[tuple[Link, ...]],
        at: Ints,
    ) -> Addends:  # fmt: skip
        op = segment.function.ops[n]
        found: dict[Chain, list[Boxes]] = {}
        for mirror in mirrors:
            for links in sides:
                inner = [("o", *link, boxes) for link, boxes in mirror]
                inner += [("i", j, chain, some) for (_, j, chain), some in links]
                key: Chain = ("use", op.name, k, mirror[0][0] if mirror else (), tuple(link for link, _ in links))
                found.setdefault(key, []).append(segment.carried(n, key, op.inputs[k], inner, at))
        return {chain: joined(some) for chain, some in found.items()}

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
        way, given = how.ways[part], [rows_of(content, rows) for content, rows in members]
        first = given[0]
        for content in given[1:]:
            self._must_be_alike(first, content)
        joined: Content
        match how.kind:
            case "broadcast":
                return self._arrived(rows_of(first, group), way)
            case "all_reduce" | "reduce_scatter":
                for k, content in enumerate(given[1:], 1):
                    self._must_equal(content.box, first.box, f"{kind_of(content)} of member {k} of the group is")
                joined = rows_of(self.sums.sum(first, first.box, given), group)
                if how.kind == "reduce_scatter":
                    joined = chunk_of(joined, way.give, len(given), position)
                return self._arrived(joined, way)
            case "all_gather":
                return self._arrived(rows_of(self._gathered(given, way), group), way)
            case "all_to_all":
                chunks = [chunk_of(rows_of(content, group), way.give, len(given), position) for content in given]
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
            self._must_equal(content.box, expected, f"{kind_of(content)} of member {k} of the group is")
            box[:, way.take, 1] = expected[:, way.take, 1]
        return self.sums.sum(given[0], box, given)

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
                raise Refusal(f"changes {name} ({weight.tensor}) by {kind_of(value)}.")
            self._must_equal(
                value.box,
                weight.box,
                f"{weight.tensor} is changed by",
            )
            value = self.sums.settled(value, deep=True)
            if value.addends is not None:
                raise Refusal(f"changes {name}, but {self.sums.fault(value)}", self.sums.faulty(value))
            weight.is_stale = True
        return []

    def _loss(self, cohort: Cohort, at: int, i: Loss, read: Sequence[Content]) -> Sequence[Content]:
        if cohort.number in self.losses:
            raise Refusal("gives the loss a second time.")
        if at < len(cohort.code) - 1:
            raise Refusal("ends the step before its last instruction.")
        if len(i.counted) != len(i.parts):
            raise Refusal(f"counts {len(i.counted)} of {len(i.parts)} parts.")
        counted = cohort.data(at, "counted").reshape(len(cohort), len(read))
        for content in read:
            if (content.tensor, content.is_gradient) != (self.model.loss, False):
                raise Refusal(f"gives {kind_of(content)} as the loss.")
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
            raise Refusal(f"has {Mask(tensor.name, box_of(box[row]))} of {list(tensor.extents)} elements.", row)

    def _check_view(self, content: Content, view: Sequence[int]) -> None:
        if content.lengths.tolist() != list(view):
            raise Refusal(f"views {kind_of(content)} of {content.lengths.tolist()} as {list(view)}.")

    def _check_shape(self, content: Content, shape: Sequence[int]) -> None:
        expected = self.model.tensors[content.tensor].local_shape(tuple(content.lengths.tolist()))
        if tuple(shape) != expected:
            raise Refusal(f"gives {kind_of(content)} the shape {tuple(shape)}, but it has {expected}.")

    def _check_bytes(self, count: int, sizes: Sequence[int], dtype: str) -> None:
        if count != sum(sizes) * width(dtype):
            raise Refusal(f"is said to weigh {count} bytes, but has {sum(sizes) * width(dtype)}.")

    def _must_be_alike(self, a: Content, b: Content) -> None:
        if (a.tensor, a.is_gradient, a.dtype) != (b.tensor, b.is_gradient, b.dtype):
            raise Refusal(f"adds {kind_of(b)} ({b.dtype}) to {kind_of(a)} ({a.dtype}).")

    def _must_equal(self, found: Ints, wanted: Ints, what: str, swap: bool = False) -> None:
        if found.shape == wanted.shape and np.array_equal(found, wanted):
            return
        row = 0 if found.shape != wanted.shape else int(np.argmax((found != wanted).any(axis=(1, 2))))
        a, b = (wanted, found) if swap else (found, wanted)
        raise Refusal(f"{what} [{text_of(a[row])}], but it has [{text_of(b[row])}].", row)


def _boxes(data: NDArray[Any], count: int) -> Ints:
    return data.reshape(count, -1, 2).astype(np.int64)
