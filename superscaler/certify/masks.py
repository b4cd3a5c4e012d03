"""The effect of instructions on masks: the elements of a tensor in each value, and their addends.

The effect of a segment follows from the indices of its operators, never from the joins of the scheduler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superscaler.certify.collectives import Collectives
from superscaler.certify.content import (
    Content,
    Memory,
    Sums,
    box_of,
    check_bytes,
    check_largest,
    check_shape,
    check_view,
    cut_of,
    kind_of,
    must_equal,
    require_same_kind,
    rows_of,
    text_of,
)
from superscaler.certify.coverage import Kinds
from superscaler.certify.hosts import Memories
from superscaler.certify.interpret import Refusal
from superscaler.certify.passes import Passes
from superscaler.ir.cohorts import Cohort
from superscaler.ir.grid import Ints
from superscaler.ir.loops import kinds_of
from superscaler.ir.mask import Mask
from superscaler.ir.model import PTensor
from superscaler.ir.names import first
from superscaler.ir.program import (
    Accumulate,
    Backward,
    Collective,
    Combine,
    Copy,
    Fetch,
    Forward,
    Give,
    Instruction,
    Load,
    Loss,
    Offload,
    Program,
    Recv,
    Role,
    Send,
    Slice,
    Update,
    Value,
    Wait,
    names,
)  # fmt: skip
from superscaler.remembered import remembered


class Masks:
    """A domain of `interpret`. `updated`, `losses`: the weights updated and the parts of the loss given, by cohort."""

    def __init__(self, program: Program) -> None:
        self.program, self.model = program, program.model
        self.kinds = Kinds(program.model)
        self.sums = Sums(self.kinds)
        self.collectives = Collectives(self.sums)
        self.passes = Passes(program, self.sums)
        updates = [op for op in program.model.ops if not op.is_forward]
        self.homes = {op.inputs[0].tensor: op for op in updates if not op.is_output}
        self.outputs = {op.inputs[0].tensor: op.inputs[1].tensor for op in updates if op.is_output}
        self.given: dict[str, list[Ints]] = {}
        self.memories = Memories(program)
        self.nexts = program.model.nexts
        self.updated: dict[int, set[tuple[Value, str]]] = {}
        self.losses: dict[int, list[tuple[Content, NDArray[Any]]]] = {}
        self.cohorts: dict[int, Cohort] = {}
        # By cohort, the addends of each sum since a round began; nothing before the first.
        self.added: dict[int, dict[Value, list[Content]]] = {}

    # Methods that `interpret` calls.

    def run(self, cohort: Cohort, at: int, read: Sequence[Content | None]) -> Sequence[Content]:
        self.cohorts[cohort.number] = cohort
        i = cohort.code[at]
        held = len(read) - len(names(i, Role.SUM))
        self.memories.hold(i, () if isinstance(i, Accumulate) else read[:held])
        found: Sequence[Content] = getattr(self, f"_{type(i).__name__.lower()}")(cohort, at, i, read)
        if self.memories.has_hosts and self.memories.locate(i, read[:held]):
            for memory in (memory for content in found for memory in content.memory):
                memory.is_on_host = True
        return found

    def start(self, cohort: Cohort, at: int, read: Sequence[Content | None]) -> Sequence[Content | None]:
        i = cohort.code[at]
        self.memories.hold(i, read)
        if isinstance(i, Send | Copy):
            (source,) = read
            assert source is not None
            check_bytes(i.bytes, [prod(source.lengths)], source.dtype)
        elif isinstance(i, Collective):
            self.collectives.check(cohort, at, i, read)
        self.memories.start(cohort.number, i, read)
        # The sources stay readable until the communication ends; an update checks that.
        return read

    def take(self, value: Content, rows: Ints) -> Content:
        return rows_of(value, rows)

    def arrive(self, cohort: Cohort, at: int, recv: Instruction, value: Content) -> Content:
        if isinstance(recv, Recv):
            check_shape(self.model, value, recv.shape)
            if recv.dtype != value.dtype:
                raise Refusal(f"receives {recv.dtype}, but {value.dtype} is sent.")
        wait = cohort.code[at]
        assert isinstance(wait, Wait)
        check_shape(self.model, value, wait.shape)
        return replace(value, memory=self.memories.arrive(cohort.number, wait.work))

    # Local instructions.

    def _load(self, cohort: Cohort, at: int, i: Load, read: Sequence[Content]) -> Sequence[Content]:
        tensor = self._tensor(i.tensor)
        box = _boxes(cohort.data(at, "box"), len(cohort))
        if tensor.kind != "input":
            weight, held = cohort.at_rest.get(i.out, (None, box))
            if weight is None or weight.tensor != i.tensor:
                raise Refusal(f"loads {i.tensor}, but no such weight is at rest there on this device.")
            if (i.out, i.tensor) in self.updated.get(cohort.number, ()):
                raise Refusal(f"loads {i.tensor} after its update.")
            must_equal(held, box, f"{i.tensor} is at rest as")
        self._check_inside(tensor, box)
        memory = Memory(held=i, is_on_host=i.out in cohort.at_rest and cohort.at_rest[i.out][0].host)
        memory = self.memories.loaded.setdefault((cohort.number, i.out), memory)
        return [Content(i.tensor, False, box, None, tensor.dtype, (memory,))]

    def _slice(self, cohort: Cohort, at: int, i: Slice, read: Sequence[Content]) -> Sequence[Content]:
        (source,) = read
        check_view(source, i.view)
        ranges = _boxes(cohort.data(at, "ranges"), len(cohort))
        size = source.lengths
        if ranges.shape[1] != len(size):
            raise Refusal(f"cuts {ranges.shape[1]} slots of {len(size)}.")
        outside = (ranges[..., 0] < 0) | (ranges[..., 1] > size) | (ranges[..., 0] >= ranges[..., 1])
        if outside.any():
            row = int(np.argmax(outside.any(axis=1)))
            raise Refusal(f"cuts {text_of(ranges[row])} of a value of {list(size)}.", row)
        found = cut_of(source, source.box[..., :1] + ranges)
        check_shape(self.model, found, i.shape)
        return [found]

    def _combine(self, cohort: Cohort, at: int, i: Combine, read: Sequence[Content]) -> Sequence[Content]:
        n, slots = len(cohort), len(i.view)
        whole = np.zeros((n, slots, 2), dtype=np.int64)
        whole[..., 1] = i.view
        if i.largest and not read:
            raise Refusal("takes the largest of no pieces.")
        if not read:
            return [Content("", False, whole, {}, i.dtype, shape=i.shape)]
        boxes = cohort.data(at, "boxes").reshape(n, len(read), slots, 2)
        first = read[0]
        if first.box.shape[1] != slots or len(i.boxes) != len(i.pieces):
            raise Refusal(
                f"places {len(i.pieces)} pieces of {first.box.shape[1]} slots at {len(i.boxes)} boxes of {slots}."
            )
        origin = first.box[..., 0] - boxes[:, 0, :, 0]
        whole += origin[..., None]
        for k, piece in enumerate(read):
            require_same_kind(first, piece)
            must_equal(boxes[:, k] + origin[..., None], piece.box, f"piece {k} is put at")
        self._check_inside(self._tensor(first.tensor), whole)
        if (boxes[..., 0] < 0).any() or (boxes[..., 1] > np.array(i.view, dtype=np.int64)).any():
            raise Refusal(f"puts a piece outside of a value of {list(i.view)}.")
        check_largest(self.model, first, i.largest)
        found = self.sums.sum(first, whole, read)
        check_shape(self.model, found, i.shape)
        if i.dtype != first.dtype:
            raise Refusal(f"is {i.dtype}, but its pieces are {first.dtype}.")
        # The sum of one piece is that piece itself, in the same memory.
        return [replace(found, memory=first.memory) if len(read) == 1 else found]

    def _accumulate(self, cohort: Cohort, at: int, i: Accumulate, read: Sequence[Content]) -> Sequence[Content]:
        into, value = read
        if i.in_place != (i.out == i.into):
            raise Refusal(f"adds to {i.into} in place but makes {i.out}." if i.in_place else f"makes {i.out} anew.")
        if i.in_place:
            self._check_free(i.into, into)
        self.memories.hold(i, read)
        found = self._added(into, value, i.value, i.largest)
        if i.in_place:
            self._note(cohort, i.into, value)
            self.memories.change(i, into)
        return [found]

    def _check_free(self, name: Value, into: Content) -> None:
        if into.held is not None:
            raise Refusal(f"changes {name} in place, which {self.program.describe(into.held)} holds.")

    def _note(self, cohort: Cohort, name: Value, value: Content) -> None:
        if cohort.number in self.added:
            self.added[cohort.number].setdefault(name, []).append(value)

    def begin_sums(self, cohort: int) -> Mapping[Value, Sequence[Content]]:
        """Begin to record the addends of the sums of a cohort; return those since the last time."""
        found, self.added[cohort] = self.added.get(cohort, {}), {}
        return found

    def _added(self, into: Content, value: Content, name: object, largest: bool = False) -> Content:
        require_same_kind(into, value)
        check_largest(self.model, into, largest)
        must_equal(value.box, into.box, f"{name} is")
        return self.sums.sum(into, into.box, (into, value))

    def _forward(self, cohort: Cohort, at: int, i: Forward, read: Sequence[Content]) -> Sequence[Content]:
        return self.passes.forward(cohort, at, i, read)

    def _backward(self, cohort: Cohort, at: int, i: Backward, read: Sequence[Content | None]) -> Sequence[Content]:
        sums = names(i, Role.SUM)
        made = list(self.passes.backward(cohort, at, i, read[: len(read) - len(sums)]))
        first = len(made) - len(sums)
        for n, (name, into) in enumerate(zip(sums, read[len(read) - len(sums) :], strict=True), first):
            if into is not None:
                self._check_free(name, into)
                self.memories.hold(i, (into,))
                self._note(cohort, name, made[n])
                made[n] = self._added(into, made[n], f"its addend of {name}")
                self.memories.change(i, into)
        return made

    def _offload(self, cohort: Cohort, at: int, i: Offload | Fetch, read: Sequence[Content]) -> Sequence[Content]:
        self.passes.move(cohort, i)
        return ()

    _fetch = _offload

    # Communication.

    def join(
        self, how: Collective, part: int, members: Sequence[tuple[Content, Ints]], position: Ints, group: Ints
    ) -> Content:
        return self.collectives.join(how, part, members, position, group)

    # The end of a step.

    def _update(self, cohort: Cohort, at: int, i: Update, read: Sequence[Content]) -> Sequence[Content]:
        is_last = Update not in islice(kinds_of(cohort.code), at + 1, None)
        if i.is_early == is_last:
            raise Refusal("is the last of its device." if is_last else "is not the last of its device.")
        done, made = self.updated.setdefault(cohort.number, set()), dict[Value, Content]()
        count, ends = len(i.weights), len(i.weights) * 2 + len(i.buffers)
        pairs = [*zip(i.weights, read[:count], read[count : 2 * count], strict=True)]
        pairs += zip(i.buffers, read[2 * count : ends], read[ends:], strict=True)
        for name, weight, value in pairs:
            home, (held, box) = self.homes.get(weight.tensor), cohort.at_rest.get(name, (None, weight.box))
            if home is None or home.is_rest or held is None or held.tensor != first(weight.tensor):
                raise Refusal(f"changes {name}, which no op updates.")
            must_equal(weight.box, box, f"changes {name} as")
            if self.memories.loaded.get((cohort.number, name)) not in weight.memory:
                raise Refusal(f"changes {name}, which is a copy of the weight at rest.")
            if (name, weight.tensor) in done:
                raise Refusal(f"changes {name} twice.")
            if value.changed is not None:
                raise Refusal(f"sets {name} to {kind_of(value)}, {self.memories.overwritten(value)}.")
            done.add((name, weight.tensor))
            wanted = (home.inputs[1].tensor, False) if home.is_write else (weight.tensor, True)
            if (value.tensor, value.is_gradient) != wanted or home.is_write != (name in i.buffers):
                raise Refusal(f"changes {name} ({weight.tensor}) by {kind_of(value)}.")
            if home.is_write and value.dtype != weight.dtype:
                raise Refusal(f"sets {name} ({weight.dtype}) to {value.dtype}.")
            must_equal(value.box, weight.box, f"{weight.tensor} is changed by")
            value = self.sums.simplified(value, deep=True)
            if value.addends is not None:
                raise Refusal(f"changes {name}, but {self.sums.fault(value)}", self.sums.faulty(value))
            self.memories.change(i, weight, cohort.number)
            if home.outputs[0].tensor in self.nexts:
                memory = Memory(held=i, is_on_host=weight.is_on_host)
                self.memories.loaded[cohort.number, name] = memory
                made[name] = replace(weight, tensor=home.outputs[0].tensor, memory=(memory,))
        if list(made) != list(i.goes_on):
            raise Refusal(f"goes on with {', '.join(map(str, i.goes_on))} instead of {', '.join(map(str, made))}.")
        return list(made.values())

    def _give(self, cohort: Cohort, at: int, i: Give, read: Sequence[Content]) -> Sequence[Content]:
        (value,) = read
        if i.tensor not in self.outputs or (value.tensor, value.is_gradient) != (self.outputs[i.tensor], False):
            raise Refusal(f"gives {kind_of(value)} as the output {i.tensor}.")
        if value.dtype != self._tensor(i.tensor).dtype:
            raise Refusal(f"gives {value.dtype} as the output {i.tensor}.")
        if any(other.tensor == i.tensor for other, _ in self.memories.gives.get(cohort.number, ())):
            raise Refusal(f"gives the output {i.tensor} twice.")
        box = _boxes(cohort.data(at, "box"), len(cohort))
        must_equal(value.box, box, f"the output {i.tensor} is given as")
        check_shape(self.model, replace(value, tensor=i.tensor), i.shape)
        value = self.sums.simplified(value, deep=True)
        if value.addends is not None:
            raise Refusal(f"gives {i.tensor}, but {self.sums.fault(value)}", self.sums.faulty(value))
        self.given.setdefault(i.tensor, []).append(box)
        self.memories.gives.setdefault(cohort.number, []).append((i, value))
        return []

    def _loss(self, cohort: Cohort, at: int, i: Loss, read: Sequence[Content]) -> Sequence[Content]:
        if cohort.number in self.losses:
            raise Refusal("gives the loss a second time.")
        if at < len(cohort.code) - 1:
            raise Refusal("ends the step before its last instruction.")
        if len(i.counted) != len(i.parts):
            raise Refusal(f"counts {len(i.counted)} of {len(i.parts)} parts.")
        self.memories.check_given(cohort.number)
        counted = cohort.data(at, "counted").reshape(len(cohort), len(read))
        for content, turn in zip(read, i.of or (0,) * len(read), strict=True):
            if (content.tensor, content.is_gradient) != (self.model.losses[turn], False):
                raise Refusal(f"gives {kind_of(content)} as the loss.")
        self.losses[cohort.number] = [(content, counted[:, n]) for n, content in enumerate(read)]
        return []

    # Checks.

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


@remembered
def _boxes(data: NDArray[Any], count: int) -> Ints:
    found: Ints = data.reshape(count, -1, 2).astype(np.int64)
    return found
