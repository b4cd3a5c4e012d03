"""A function of a program, with facts derived from the indices of its operators alone."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from superscaler.certify.boxes import Boxes
from superscaler.certify.coverage import Addends, Chain, Kinds
from superscaler.certify.interpret import Refusal
from superscaler.ir.grid import Ints
from superscaler.ir.model import Op, Operand
from superscaler.ir.parts import following
from superscaler.ir.program import Forward, Function
from superscaler.ops.table import row_of
from superscaler.remembered import ints, remembered

T = TypeVar("T")


class Segment:
    """A function whose boxes depend on the coordinates `at` of a forward. `starts`: these coordinates, and a last
    column of zeros.
    """

    def __init__(self, function: Function, kinds: Kinds) -> None:
        self.function, self.kinds, self.model = function, kinds, kinds.model
        self.number = {op.name: n for n, op in enumerate(function.ops)}
        self.columns = [ints(*where) for where in function.coordinates]
        self.sizes = [ints(*(hi - lo for lo, hi in box)) for box in function.boxes]
        self.maker = {o.tensor: (n, o) for n, op in enumerate(function.ops) for o in op.outputs}
        made: set[str] = set()
        for op in function.ops:
            if kinds.op.get(op.name) != op:
                raise Refusal(f"runs {op.name} as something else than what the model has.")
            for k, operand in enumerate(op.inputs):
                number = function.input_of.get((op.name, k))
                if number is None and operand.tensor not in made:
                    raise Refusal(f"runs {op.name} without {operand.tensor}.")
                if number is not None and function.inputs[number] != operand.tensor:
                    raise Refusal(f"gives {op.name} {function.inputs[number]} as {operand.tensor}.")
            made |= {output.tensor for output in op.outputs}

    # Checks.

    @cached_property
    def _limits(self) -> tuple[Ints, Ints, Ints]:
        """Return, for each index of all ops, its column, size and whole size."""
        rows, first = [], dict[int, int]()
        for op, where, box in zip(self.function.ops, self.function.coordinates, self.function.boxes, strict=True):
            for index, column, (lo, hi) in zip(op.indices, where, box, strict=True):
                if not 0 <= lo < hi <= index.size:
                    raise Refusal(f"runs {op.name} on {lo}:{hi} of {index.factor}, which has {index.size}.")
                if first.setdefault(column, lo) != lo:
                    raise Refusal(f"runs {op.name} from {lo} of {index.factor}, where others start at {first[column]}.")
                if index.mark == "frozen" and not index.follows and hi - lo != index.size:
                    raise Refusal(f"cuts {index.factor} of {op.name}, which cannot be cut.")
                rows.append((column, hi - lo, index.size))
        # Emitted code takes the starts of a function's own part from its boxes.
        for n, box in enumerate(self.function.boxes):
            self._check_following(n, np.array([lo for lo, _ in box], dtype=np.int64)[None])
        return ints(*(c for c, _, _ in rows)), ints(*(size for _, size, _ in rows)), ints(*(n for *_, n in rows))

    def check(self, run: Forward, starts: Ints) -> None:
        """Raise Refusal unless parts with these starts are parts of the function's ops."""
        column, size, whole = self._limits
        if (given := starts.shape[1] - 1) != (count := int(column.max(initial=-1)) + 1):
            raise Refusal(f"has {given} starts for {count} coordinates.")
        if outside := _outside(starts, column, size, whole):
            row, k = outside
            at = starts[row, column[k]]
            raise Refusal(f"runs a part that starts at {at} of {whole[k]}, with a size of {size[k]}.", row)
        for n in self._following:
            self._check_following(n, starts[:, self.columns[n]])
        if len(run.inputs) != len(self.function.inputs):
            raise Refusal(f"is given {len(run.inputs)} inputs of {len(self.function.inputs)}.")
        if len(run.outputs) != len(self.function.outputs):
            raise Refusal(f"makes {len(run.outputs)} outputs of {len(self.function.outputs)}.")
        saved, (grads, wide) = self.function.saved, self._gradients
        if any(not 0 <= k < len(run.outputs) for k in saved) or len(set(saved)) < len(saved):
            raise Refusal(f"saves outputs {saved} of {len(run.outputs)}.")
        if self.function.grads != grads:
            raise Refusal(f"wants gradients of inputs {self.function.grads}, not of {grads}.")
        if self.function.wide != wide and self.function.wide != self._widened:
            raise Refusal(f"makes the gradients of inputs {self.function.wide} float32, not of {wide}.")

    @cached_property
    def _gradients(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of the inputs with a gradient, and of the inputs whose gradient becomes float32."""
        names, uses = self.function.inputs, self.uses_of
        reaching = (n for n, name in enumerate(names) if self.model.tensors[name].requires_grad)
        grads = tuple(n for n in reaching if any(op.has_mirror for op, _ in uses[n]))
        return grads, tuple(n for n in grads if self.model.is_widened(names[n]))

    @cached_property
    def _widened(self) -> tuple[int, ...]:
        """The inputs whose gradient becomes float32 where weights are rounded before they are gathered."""
        return tuple(n for n in self._gradients[0] if self.model.is_widened(self.function.inputs[n], rounds=True))

    @cached_property
    def _following(self) -> list[int]:
        """The ops with indices that follow others."""
        return [n for n, op in enumerate(self.function.ops) if any(i.follows is not None for i in op.indices)]

    def _check_following(self, n: int, lo: Ints) -> None:
        """Raise Refusal unless each index of op `n` that follows another one starts at the place that this requires,
        for parts that start at `lo` [parts, indices].
        """
        op, hi = self.function.ops[n], lo + self.sizes[n]
        for k, index in enumerate(op.indices):
            if index.follows is not None:
                first, last = following(op, index, lo, hi)
                wrong = (lo[:, k] != first) | (hi[:, k] != last)
                if wrong.any():
                    row = int(np.argmax(wrong))
                    here, there = f"{lo[row, k]}:{hi[row, k]}", f"{first[row]}:{last[row]}"
                    raise Refusal(f"runs {op.name} on {here} of {index.factor}, not on {there}.", row)

    @cached_property
    def views(self) -> Mapping[str, frozenset[int]]:
        """Return, for each tensor made here, the numbers of the inputs whose memory it may share."""
        found: dict[str, frozenset[int]] = {}
        for op in self.function.ops:
            if not row_of(op.target).is_view:
                continue
            number, tensor = self.function.input_of.get((op.name, 0)), op.inputs[0].tensor
            viewed = found.get(tensor, frozenset()) if number is None else frozenset({number})
            found |= {output.tensor: viewed for output in op.outputs if viewed}
        return found

    @cached_property
    def uses_of(self) -> list[list[tuple[Op, int]]]:
        found: list[list[tuple[Op, int]]] = [[] for _ in self.function.inputs]
        for (name, k), n in self.function.input_of.items():
            found[n].append((self.function.ops[self.number[name]], k))
        return found

    # Boxes.

    def _slots(self, n: int, operand: Operand) -> tuple[Ints, Ints]:
        """Return, for each slot of an operand, the column of its start (the last one if it is whole) and its size."""
        extents = self.model.tensors[operand.tensor].extents
        columns = [-1 if i is None else int(self.columns[n][i]) for i in operand.slots]
        sizes = [e if i is None else int(self.sizes[n][i]) for i, e in zip(operand.slots, extents, strict=True)]
        return ints(*columns), ints(*sizes)

    @cached_property
    def _cache(self) -> dict[Any, Any]:
        return {}

    def _spot(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._cache:
            self._cache[key] = make()
        found: T = self._cache[key]
        return found

    def operand(self, n: int, operand: Operand, starts: Ints) -> Ints:
        """Return the box of an operand that parts of op `n` touch."""
        columns, sizes = self._spot((n, operand), lambda: self._slots(n, operand))
        return spans(starts, columns, sizes)

    def face(self, n: int, starts: Ints) -> Ints:
        """Return the box of input `n` that parts read."""
        if not self.uses_of[n]:
            raise Refusal(f"is given {self.function.inputs[n]}, which no op of it reads.")
        op, k = self.uses_of[n][0]
        return self.operand(self.number[op.name], op.inputs[k], starts)

    def made(self, tensor: str, starts: Ints) -> tuple[str, Ints, Ints | None]:
        """Return the op that makes a tensor, its box, and the columns of its addends (None: all of them)."""
        n, output = self.maker[tensor]
        op = self.function.ops[n]

        def rest() -> tuple[Ints, Ints] | None:
            summed = op.summed(output)
            if all(self.sizes[n][i] == op.indices[i].size for i in summed):
                return None
            return ints(*self.columns[n][summed].tolist()), ints(*self.sizes[n][summed].tolist())

        found = self._spot(("made", tensor), rest)
        return op.name, self.operand(n, output, starts), None if found is None else spans(starts, *found)

    def carried(
        self, n: int, chain: Chain, own: Operand, inner: Sequence[tuple[str, int, Chain, Boxes]], starts: Ints
    ) -> Boxes:
        """Return the boxes of the addends that an op's parts make from those of its operands, in all combinations.

        `inner`: for each operand, the side, its number, and boxes.
        """
        op, count = self.function.ops[n], len(starts)
        box = spans(starts, self.columns[n], self.sizes[n])
        combined = box[:, None]
        rest: dict[Any, Ints] = {}
        for side, number, sub, boxes in inner:
            operand = (op.outputs if side == "o" else op.inputs)[number]
            before, more = combined.shape[1], len(boxes)
            combined = np.repeat(combined, more, axis=1)
            rest = {column: np.repeat(found, more, axis=1) for column, found in rest.items()}
            tiled = np.tile(boxes.whole, (1, before, 1, 1))
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
        if chain[0] == "use":
            combined, rest = _with_unseen(op, own, box, combined, rest)
        extents = self.model.tensors[own.tensor].extents
        columns = [
            combined[:, :, i] if i is not None else np.broadcast_to(np.array([0, e]), (count, combined.shape[1], 2))
            for i, e in zip(own.slots, extents, strict=True)
        ]
        for column in self.kinds.columns(chain, own.tensor):
            columns.append(rest[column] if column in rest else combined[:, :, column[1]])
        none = np.zeros((count, combined.shape[1], 0, 2), dtype=np.int64)
        return Boxes.of(np.stack(columns, axis=2) if columns else none)

    # Plain functions: all inner values are whole, and made on the boxes on which they are read.

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
                    summed = self.function.ops[m].summed(output)
                    if any(self.sizes[m][i] != self.function.ops[m].indices[i].size for i in summed):
                        return False
                    same = self._slots(m, output)
                if not all(np.array_equal(a, b) for a, b in zip(same, self._slots(n, operand), strict=True)):
                    return False
        return True

    @cached_property
    def outer_heads(self) -> Mapping[str, tuple[Chain, ...]]:
        """Return, for each tensor made here, the uses of its gradient outside of this segment."""
        here = {("use", op.name, k, (), ()) for op in self.function.ops for k in range(len(op.inputs))}
        made = {o.tensor for op in self.function.ops if op.has_mirror for o in op.outputs}
        return {t: tuple(c for c in self.kinds.heads(t, True) if c not in here) for t in made}

    @cached_property
    def is_plain_backward(self) -> bool:
        """Return whether the uses in this segment of its own tensors give all their addends here."""
        if not self.is_plain:
            return False
        for op in self.function.ops:
            n = self.number[op.name]
            for k, operand in enumerate(op.inputs):
                if (op.name, k) in self.function.input_of or not op.has_mirror:
                    continue
                if not self.model.tensors[operand.tensor].requires_grad:
                    continue
                summed = op.summed(operand)
                if any(self.sizes[n][i] != op.indices[i].size for i in summed):
                    return False
        return True

    def gradients(self, starts: Ints) -> Mapping[int, Addends]:
        """Return the addends of the gradient of each input, if the gradients of all outputs are whole."""
        found: dict[int, dict[Chain, Boxes]] = {}
        for number, uses in enumerate(self.uses_of):
            for op, k in uses:
                operand = op.inputs[k]
                if not op.has_mirror or not self.model.tensors[operand.tensor].requires_grad:
                    continue
                n, key = self.number[op.name], ("use", op.name, k, (), ())
                if any(op.indices[i].until is not None for i in operand.slots if i is not None):
                    found.setdefault(number, {})[key] = self.carried(n, key, operand, (), starts)
                    continue

                def spot(n: int = n, op: Op = op, operand: Operand = operand) -> tuple[Ints, Ints]:
                    columns, sizes = self._slots(n, operand)
                    summed = op.summed(operand)
                    more = self.columns[n][summed], self.sizes[n][summed]
                    return ints(*columns.tolist(), *more[0].tolist()), ints(*sizes.tolist(), *more[1].tolist())

                found.setdefault(number, {})[key] = _uses(starts, *self._spot(("use", op.name, k), spot))
        return found


def _with_unseen(
    op: Op, own: Operand, box: Ints, combined: Ints, rest: dict[Any, Ints]
) -> tuple[Ints, dict[Any, Ints]]:
    """Return boxes of the addends of an operand's gradient, with the zero addends of elements that no part sees.

    The operand is read up to the end of the part's range of an index. At earlier values of that index, its elements
    inside the range are unseen. With these zeros, all parts together have each addend once, as boxes.
    """
    key = next((i for i in own.slots if i is not None and op.indices[i].until is not None), None)
    first = None if key is None else op.indices[key].until
    if key is None or first is None or not (start := box[:, None, first, 0]).any():
        return combined, rest
    before, last = combined.copy(), combined.copy()
    before[:, :, key, 1] = np.minimum(before[:, :, key, 1], start)
    last[:, :, key, 0] = np.maximum(last[:, :, key, 0], start)
    last[:, :, first, 0] *= last[:, :, first, 0] > start
    return np.concatenate([before, last], axis=1), {c: np.concatenate([r, r], axis=1) for c, r in rest.items()}


@remembered
def padded(starts: Ints) -> Ints:
    """Return starts with a last column of zeros, for whole slots."""
    found = starts.reshape(len(starts), -1).astype(np.int64)
    return np.concatenate([found, np.zeros((len(starts), 1), dtype=np.int64)], axis=1)


@remembered
def _outside(starts: Ints, column: Ints, size: Ints, whole: Ints) -> tuple[int, int] | None:
    """Return the first row and index of a part that starts or ends outside of its op; None if there is none."""
    at = starts[:, column]
    found = np.argwhere((at < 0) | (at + size > whole))
    return (int(found[0, 0]), int(found[0, 1])) if len(found) else None


@remembered
def _uses(starts: Ints, columns: Ints, sizes: Ints) -> Boxes:
    """Return the boxes of one use in parts with these starts."""
    return Boxes(starts[:, columns], np.stack([np.zeros_like(sizes), sizes], axis=-1)[None, None])


@remembered
def spans(starts: Ints, columns: Ints, sizes: Ints) -> Ints:
    lo = starts[:, columns]
    return np.stack([lo, lo + sizes], axis=-1)
