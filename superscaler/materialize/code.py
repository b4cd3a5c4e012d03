"""The instructions of all devices while they are written: names for values, cuts, sums, waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from superscaler.ir.graph import PTensor
from superscaler.ir.mask import Box, extents, inside
from superscaler.ir.parts import HOSTS
from superscaler.ir.program import Accumulate, Combine, Instruction, Slice, Value, Wait
from superscaler.materialize.names import Names, unique_identifiers


class Code:
    """Per device its instructions so far. Methods append to a device's what makes a value, and return its name.

    Where values are named by microbatches, `inner` of these are in one that is cut further; else it is 0.
    """

    def __init__(self, tensors: Mapping[str, PTensor], world: int, inner: int = 0) -> None:
        self.tensors, self.inner = tensors, inner
        names = unique_identifiers(tensors)
        self._like = {
            (t, is_gradient): Value(name, is_gradient) for t, name in names.items() for is_gradient in (False, True)
        }
        self._largest = {names[t] for t, tensor in tensors.items() if tensor.largest}
        self.of: list[list[Instruction]] = [[] for _ in range(world)]
        self._names = [Names() for _ in range(world)]
        self._sums: set[tuple[int, Value]] = set()
        self._cuts: dict[tuple[int, Value, Box], Value] = {}

    def write(self, rank: int, instruction: Instruction) -> None:
        """Append to the code of a device what it does, or its host, for which its own process works."""
        self.of[rank % HOSTS].append(instruction)

    def like(self, tensor: str, is_gradient: bool = False) -> Value:
        """Return what the names of a tensor's values are like."""
        return self._like[tensor, is_gradient]

    def common(self, microbatches: Iterable[int]) -> int:
        """Return the microbatch of what is made of some: the last, where they are in one; else -1."""
        found = set(microbatches)
        return max(found) if len({at // self.inner for at in found}) == 1 else -1

    def fresh(self, rank: int, like: Value) -> Value:
        return self._names[rank % HOSTS].fresh(like)

    def cut(self, rank: int, name: Value, tensor: str, have: Box, want: Box) -> Value:
        if have == want:
            return name
        if (rank, name, want) not in self._cuts:
            out = self._cuts[rank, name, want] = self.fresh(rank, name)
            shape = self.tensors[tensor].local_shape(extents(want))
            self.write(rank, Slice(out, name, extents(have), inside(want, have), shape))
        return self._cuts[rank, name, want]

    def wait(self, rank: int, work: Value, tensor: str, box: Box) -> Value:
        out = self.fresh(rank, work._replace(is_handle=False))
        self.write(rank, Wait(out, work, self.tensors[tensor].local_shape(extents(box))))
        return out

    def join(
        self, rank: int, like: Value, tensor: str, parts: Sequence[tuple[Value, Box]], box: Box, dtype: str
    ) -> Value:
        """The sum, or the largest, of parts of a box: nothing to do where one part is all of it."""
        if len(parts) == 1 and parts[0][1] == box:
            return parts[0][0]
        out, view = self.fresh(rank, like), extents(box)
        names, boxes = tuple(name for name, _ in parts), tuple(inside(some, box) for _, some in parts)
        shape = self.tensors[tensor].local_shape(view)
        self.write(rank, Combine(out, names, boxes, view, shape, dtype, like.name in self._largest))
        return out

    def add(self, rank: int, so_far: Value, value: Value) -> Value:
        """The sum, or the larger, of two values; in place where the first is a sum that nobody else holds."""
        # Of several microbatches is what is of none.
        is_one = not self.inner or so_far.microbatch == -1 or self.common((so_far.microbatch, value.microbatch)) >= 0
        in_place = (rank, so_far) in self._sums and is_one
        out = so_far if in_place else self.fresh(rank, so_far if is_one else so_far._replace(microbatch=-1))
        self.write(rank, Accumulate(out, so_far, value, in_place, so_far.name in self._largest))
        self._sums.add((rank, out))
        return out
