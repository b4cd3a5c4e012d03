"""The effect of forwards and backwards on addends, derived from the indices of their operators alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from superscaler.certify.boxes import Boxes, joined, lengths_of, one_each
from superscaler.certify.content import Content, Memory, Sums, box_of, kind_of, must_equal
from superscaler.certify.coverage import SEED, Addends, Chain
from superscaler.certify.interpret import Refusal
from superscaler.certify.segment import Segment, padded
from superscaler.ir.cohorts import Cohort
from superscaler.ir.grid import Ints
from superscaler.ir.mask import Mask
from superscaler.ir.model import Op, Operand
from superscaler.ir.program import ONE, Backward, Fetch, Forward, Offload, Program, Task

Passed = Mapping[int, Mapping[int, Content]]
# Addends of one operand: (group, input, chain) or (output, chain), and their boxes.
Link = tuple[Chain, Boxes]
# A gradient of more partial addends is refused.
MOST = 200


@dataclass(eq=False)
class Tape:
    """A forward that ran, with the data for its backward.

    `number`: of its function. `passed`: the partial inputs of each op, by group of inputs in which the op is linear.
    `kept`: the first half of a split backward, and its addends by input. `is_on_host`: between Offload and Fetch.
    """

    number: int
    function: Segment
    at: Ints
    inputs: Sequence[Content]
    passed: Mapping[str, Passed]
    kept: tuple[Backward, Mapping[int, Addends]] | None = None
    is_on_host: bool = False


class Passes:
    """An evaluator of forwards and backwards on contents."""

    def __init__(self, program: Program, sums: Sums) -> None:
        self.program, self.model, self.functions = program, program.model, program.functions
        self.sums, self.kinds = sums, sums.kinds
        self.segments: dict[int, Segment] = {}
        self.tapes: dict[tuple[int, Task], Tape] = {}
        self.ran: set[tuple[int, Task]] = set()

    def forward(self, cohort: Cohort, at: int, i: Forward, read: Sequence[Content]) -> Sequence[Content]:
        key = cohort.number, i.task
        if key in self.ran:
            raise Refusal("runs twice; every part runs once in a step.")
        self.ran.add(key)
        if not 0 <= i.function < len(self.functions):
            raise Refusal(f"runs function {i.function}, but the program has {len(self.functions)}, from 0 on.")
        if i.function not in self.segments:
            self.segments[i.function] = Segment(self.functions[i.function], self.kinds)
        segment = self.segments[i.function]
        starts = padded(cohort.data(at, "at"))
        segment.check(i, starts)
        passed: dict[str, Passed] = {}
        inputs = [self._given(segment, n, content, starts) for n, content in enumerate(read)]
        if segment.is_plain and all(c.addends is None for c in inputs):
            made = [self._output(segment, tensor, starts) for tensor in segment.function.outputs]
        else:
            made = self._op_by_op(segment, inputs, starts, passed)
        for tensor, content in zip(segment.function.outputs, made, strict=True):
            viewed = (memory for n in segment.views.get(tensor, ()) for memory in inputs[n].memory)
            content.memory = tuple(viewed) or (Memory(held=i),)
        if segment.function.grads:
            self.tapes[key] = Tape(i.function, segment, starts, inputs, passed)
        return made

    def _given(self, segment: Segment, n: int, content: Content, starts: Ints) -> Content:
        """Return input `n` with the box that the part reads: the whole value, or some of its addends."""
        tensor, box = segment.function.inputs[n], segment.face(n, starts)
        if content.tensor == "" and not content.is_gradient:
            lengths, spec = lengths_of(box), self.model.tensors[tensor]
            wanted = lengths, spec.local_shape(lengths), spec.dtype
            if (content.lengths, content.shape, content.dtype) != wanted:
                zeros = f"{content.dtype} zeros of shape {content.shape}"
                raise Refusal(f"reads {zeros} as {spec.dtype} {Mask(tensor, box_of(box[0]))}.")
            return Content(tensor, False, box, {}, content.dtype)
        if (content.tensor, content.is_gradient) != (tensor, False):
            raise Refusal(f"reads {kind_of(content)} as {tensor}.")
        must_equal(content.box, box, f"{tensor} is read as", swap=True)
        if content.dtype != self.model.tensors[tensor].dtype and not self._is_rounded(segment, n, content):
            raise Refusal(f"reads {content.dtype} as {self.model.tensors[tensor].dtype} {tensor}.")
        return self.sums.simplified(content, deep=True)

    def _is_rounded(self, segment: Segment, n: int, content: Content) -> bool:
        """Return whether input `n` has the dtype to which all its readers cast it, and a float32 gradient."""
        rounded, function = self.model.rounded.get(content.tensor), segment.function
        is_cast = rounded is not None and rounded.dtype == content.dtype
        return is_cast and (n in function.wide or n not in function.grads)

    def _output(self, segment: Segment, tensor: str, starts: Ints) -> Content:
        op, box, columns = segment.made(tensor, starts)
        dtype = self.model.tensors[tensor].dtype
        if columns is None:
            return Content(tensor, False, box, None, dtype)
        addends = {("made", op, ()): one_each(box, columns)}
        return Content(tensor, False, box, addends, dtype)

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
                must_equal(content.box, segment.operand(n, operand, starts), f"{op.name} reads", swap=True)
                given.append(self.sums.simplified(content, deep=True))
            partial = {k: c for k, c in enumerate(given) if c.addends is not None}
            if partial:
                passed[op.name] = self._groups(op, given, partial)
            for output in op.outputs:
                content = self._output(segment, output.tensor, starts)
                if partial:
                    content = replace(content, addends=self._passed(segment, n, output, passed[op.name], starts))
                made[output.tensor] = self.sums.simplified(content)
        return [made[tensor] for tensor in segment.function.outputs]

    def _groups(self, op: Op, given: Sequence[Content], partial: Mapping[int, Content]) -> Passed:
        """Return the contents of the inputs in each linear group with a partial input."""
        groups = [g for g, group in enumerate(op.linear) if set(partial) <= set(group)][:1]
        groups = groups or [g for g, group in enumerate(op.linear) if set(partial) & set(group)]
        for k, content in partial.items():
            if sum(k in op.linear[g] for g in groups) != 1:
                raise Refusal(
                    f"({op.name}) needs the whole value: {self.sums.fault(content)}", self.sums.faulty(content)
                )
        return {g: {k: given[k] for k in op.linear[g]} for g in groups}

    def _links(self, passed: Passed, without: int = -1) -> list[tuple[Link, ...]]:
        """Return all products of addends of the groups, without the group of input `without`."""
        ways = [
            [((group, k, chain), boxes) for k, content in given.items() for chain, boxes in content.own_addends.items()]
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

    def backward(self, cohort: Cohort, at: int, i: Backward, read: Sequence[Content | None]) -> Sequence[Content]:
        if i.half not in ("", "input", "weight") or (i.half == "weight" and i.gradients):
            raise Refusal(f"is a half '{i.half}' of {len(i.gradients)} gradients.")
        tape = self.tapes.pop((cohort.number, i.task), None)
        if tape is None or (tape.kept is None) == (i.half == "weight"):
            ran = "first half" if i.half == "weight" else "forward"
            raise Refusal(f"has no {ran} that ran before it and kept a tape.")
        if tape.is_on_host:
            raise Refusal("needs a tape that is on the host; Fetch it before.")
        count, again = len(i.gradients), tape.function.function.again
        for n, content in zip(again, read[count:], strict=True) if i.half != "weight" else ():
            assert content is not None
            self._given(tape.function, n, content, tape.at)
        for n, content in enumerate(tape.inputs):
            if content.changed is not None and n not in again:
                how = self.program.describe(content.changed)
                raise Refusal(f"needs {kind_of(content)} as its forward read it, but {how} has changed its memory.")
        first, addends = tape.kept or (i, self._addends(tape, i, read[:count]))
        if first is not i and any(a and b for a, b in zip(made_by(first), made_by(i), strict=True)):
            raise Refusal("makes a gradient that its first half has made.")
        if i.half == "input":
            self.tapes[cohort.number, i.task] = replace(tape, kept=(i, addends))
        return self._made(tape, i, addends)

    def move(self, cohort: Cohort, i: Offload | Fetch) -> None:
        """Move a tape to the host or back, which changes no value."""
        tape = self.tapes.get((cohort.number, i.task))
        if tape is None or tape.kept is not None or tape.is_on_host == i.to_host:
            where = "device" if i.to_host else "host"
            raise Refusal(f"has no tape of a forward on the {where} to copy.")
        self.tapes[cohort.number, i.task] = replace(tape, is_on_host=i.to_host)

    def _addends(self, tape: Tape, i: Backward, read: Sequence[Content | None]) -> Mapping[int, Addends]:
        """Return the addends of a backward's results, by input, from its given gradients."""
        segment, saved = tape.function, tape.function.function.saved
        if len(i.gradients) != len(saved):
            raise Refusal(f"is given {len(i.gradients)} gradients for {len(saved)} outputs.")
        given: dict[str, Content] = {}
        for number, name, content in zip(saved, i.gradients, read, strict=True):
            tensor = segment.function.outputs[number]
            if name == ONE:
                content = self._seed(tensor, segment.made(tensor, tape.at)[1])
            if content is not None:
                if (content.tensor, content.is_gradient) != (self.model.origin(tensor), True):
                    raise Refusal(f"reads {kind_of(content)} as the gradient of {tensor}.")
                must_equal(
                    content.box, segment.made(tensor, tape.at)[1], f"the gradient of {tensor} is read as", swap=True
                )
                given[tensor] = self.sums.simplified(content)
        plain = self._plain_gradients(tape, given)
        return self._gradients(tape, given) if plain is None else plain

    def _made(self, tape: Tape, i: Backward, addends: Mapping[int, Addends]) -> Sequence[Content]:
        """Return the gradients that a whole backward makes, or its half for activations or weights."""
        function = tape.function.function
        wanted = function.grads
        if {len(i.outputs), len(i.sums) or len(wanted)} != {len(wanted)}:
            raise Refusal(f"makes {len(i.outputs)} gradients of {len(wanted)} aliases.")
        names = *i.outputs, *i.sums
        if any(out and total for out, total in zip(i.outputs, i.sums, strict=False)):
            raise Refusal("gives a gradient that it adds to a sum.")
        if len(set(names) - {None}) < len(names) - names.count(None):
            raise Refusal("gives several gradients one name.")
        found = []
        for k, (n, out) in enumerate(zip((*wanted, *wanted), names, strict=False)):
            k %= len(wanted)
            spec = self.model.tensors[function.inputs[n]]
            if out is not None:
                dtype = spec.wide_dtype if n in function.wide else spec.dtype
                # A sum has memory of its own.
                memory = (Memory(held=None if out in i.sums else i),)
                content = Content(
                    self.model.origin(spec.name), True, tape.inputs[n].box, addends.get(n, {}), dtype, memory
                )
                found.append(self.sums.simplified(content))
        return found

    def _seed(self, tensor: str, box: Ints) -> Content:
        tensor = self.model.origin(tensor)
        if tensor not in self.model.losses:
            raise Refusal(f"starts the gradient of {tensor} from one, which is not the loss.")
        heads = self.kinds.heads(tensor, True)
        addends = None if heads == (SEED,) else {SEED: one_each(box)}
        return Content(tensor, True, box, addends, self.model.tensors[tensor].dtype)

    def _plain_gradients(self, tape: Tape, given: Mapping[str, Content]) -> Mapping[int, Addends] | None:
        """Return the addends by input if all gradients are whole (the common case); else None."""
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
        """Return whether a gradient has exactly the addends of these uses, each once."""
        if content.addends is None:
            return set(heads) == set(self.kinds.heads(content.tensor, True))
        if set(content.addends) != set(heads):
            return False
        return all(self.sums.is_tiled(content, chain, boxes) for chain, boxes in content.addends.items())

    def _gradients(self, tape: Tape, given: Mapping[str, Content]) -> dict[int, Addends]:
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
                if len(addends) > MOST:
                    self._refuse_uses(tape, given, operand.tensor)
                number = function.input_of.get((op.name, k))
                if number is None:
                    inner.setdefault(operand.tensor, []).append(addends)
                else:
                    for chain, boxes in addends.items():
                        found.setdefault(number, {}).setdefault(chain, []).append(boxes)
        return {n: {c: joined(b) for c, b in some.items()} for n, some in found.items()}

    def _refuse_uses(self, tape: Tape, given: Mapping[str, Content], tensor: str) -> None:
        """Raise Refusal: a gradient has more addends than are followed, each a way through the ops behind a partial
        value. Behind a fork there are twice as many.
        """
        read = [content for passed in tape.passed.values() for some in passed.values() for content in some.values()]
        content = next(content for content in (*read, *given.values()) if content.addends is not None)
        raise Refusal(
            f"makes the gradient of {tensor} of more than {MOST} partial addends, since {self.sums.fault(content)}",
            self.sums.faulty(content),
        )

    def _output_gradients(
        self, segment: Segment, n: int, given: Mapping[str, Content], inner: Mapping[str, list[Addends]], at: Ints
    ) -> list[tuple[Link, ...]]:
        """Return the addends of the gradients of an op's outputs, or no link if all of these are whole."""
        mirrors: list[tuple[Link, ...]] = []
        is_whole = True
        for j, output in enumerate(segment.function.ops[n].outputs):
            box = segment.operand(n, output, at)
            parts = list(inner.get(output.tensor, ()))
            content = given.get(output.tensor)
            if content is not None:
                parts.append(self.sums.addends_of(content))
            name = self.model.origin(output.tensor)
            total = self.sums.simplified(Content(name, True, box, self.sums.total(parts), ""), deep=True)
            is_whole &= total.addends is None
            if total.addends is not None or self.kinds.heads(output.tensor, True):
                mirrors += [(((j, chain), boxes),) for chain, boxes in total.own_addends.items()]
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


def made_by(i: Backward) -> list[bool]:
    """Return the gradients that a backward makes: its outputs, and those that it adds to sums."""
    sums = i.sums or (None,) * len(i.outputs)
    return [(out or total) is not None for out, total in zip(i.outputs, sums, strict=True)]
