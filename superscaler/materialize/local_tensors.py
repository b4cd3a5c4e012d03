"""The tensors of each device while its code is written: names, cuts, sums, and the weights at rest there."""

import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from superscaler.ir.grid import HOSTS
from superscaler.ir.mask import Box, extents, inside
from superscaler.ir.model import PTensor
from superscaler.ir.names import RESERVED, unlike_gradient
from superscaler.ir.program import Accumulate, Combine, Instruction, Load, Slice, Task, Value, Wait, Weight
from superscaler.schedule.dataflow import Dataflow, Key
from superscaler.schedule.transfers import UPDATE, Place

# Suffixes of the names of values.
_DERIVED = re.compile(r"_m\d*$|_[ps]\d+$|_work$|__\d+$")


def identifier(tensor: str) -> str:
    """Return a Python identifier for a pTensor.

    >>> identifier("transformer.h.0.ln_1.weight"), identifier("d_model"), identifier("d")
    ('transformer_h_0_ln_1_weight', '_d_model', '_d')
    """
    name = re.sub(r"\W", "_", tensor)
    return f"_{name}" if name[:1].isdigit() or keyword.iskeyword(name) else unlike_gradient(name)


def unique_identifiers(tensors: Iterable[str]) -> dict[str, str]:
    """Return a name for each pTensor. A name gets one more letter if it is taken, looks like a part's name, or is used
    by emitted code itself.

    >>> unique_identifiers(["a.b", "a_b", "x_m0", "one"])
    {'a.b': 'a_b', 'a_b': 'a_b_', 'x_m0': 'x_m0_', 'one': 'one_'}
    """
    found: dict[str, str] = {}
    taken = set(RESERVED)
    for tensor in tensors:
        name = identifier(tensor)
        while name in taken or _DERIVED.search(name):
            name += "_"
        taken.add(name)
        found[tensor] = name
    return found


def task(segment: int, key: Key) -> Task:
    return Task(segment, *key[1:])


class Names:
    """A counter of values of one device that share tensor, microbatch, part and role."""

    def __init__(self) -> None:
        self._count: dict[tuple[object, ...], int] = {}

    def fresh(self, like: Value) -> Value:
        """Return the next name of this pattern."""
        kind = like[:-1]
        number = self._count[kind] = self._count.get(kind, 0) + 1
        return Value(*kind, number)


class Code:
    """Instructions of each device so far. Each method appends the instruction that makes a value, and returns its name.

    `inner`: slices per microbatch where values are named by microbatches, else 0.
    """

    def __init__(self, tensors: Mapping[str, PTensor], world: int, inner: int = 0) -> None:
        self.tensors, self.inner = tensors, inner
        names = unique_identifiers(tensors)
        self._names_of = names
        self._largest = {names[t] for t, tensor in tensors.items() if tensor.largest}
        self.of: list[list[Instruction]] = [[] for _ in range(world)]
        self._names = [Names() for _ in range(world)]
        self._sums: set[tuple[int, Value]] = set()
        # Slices by the process that makes them and the value, then by box.
        self._cuts: dict[tuple[int, Value], dict[Box, Value]] = {}

    def write(self, rank: int, instruction: Instruction) -> None:
        """Append an instruction to the code of a device. A host's instructions go to its device, whose process works
        for it.
        """
        self.of[rank % HOSTS].append(instruction)

    def like(self, tensor: str, is_gradient: bool = False, microbatch: int = -1, part: int = 0) -> Value:
        """Return the pattern of the names of a tensor's values."""
        return Value(self._names_of[tensor], is_gradient, microbatch, part)

    def common(self, microbatches: Iterable[int]) -> int:
        """Return the last of several slices, for a value made of them, or -1 if they are of several microbatches."""
        found = set(microbatches)
        return max(found) if len({at // self.inner for at in found}) == 1 else -1

    def fresh(self, rank: int, like: Value) -> Value:
        return self._names[rank % HOSTS].fresh(like)

    def cut(self, rank: int, name: Value, tensor: str, have: Box, want: Box) -> Value:
        if have == want:
            return name
        cuts = self._cuts.setdefault((rank % HOSTS, name), {})
        if want not in cuts:
            out = cuts[want] = self.fresh(rank, name)
            shape = self.tensors[tensor].local_shape(extents(want))
            self.write(rank, Slice(out, name, extents(have), inside(want, have), shape))
        return cuts[want]

    def changed(self, rank: int, names: Iterable[Value]) -> None:
        """Forget the slices of weights that an update has changed: readers of the next iteration take slices anew."""
        for name in names:
            self._cuts.pop((rank % HOSTS, name), None)

    def wait(self, rank: int, work: Value, tensor: str, box: Box) -> Value:
        out = self.fresh(rank, work._replace(is_handle=False))
        self.write(rank, Wait(out, work, self.tensors[tensor].local_shape(extents(box))))
        return out

    def join(
        self, rank: int, like: Value, tensor: str, parts: Sequence[tuple[Value, Box]], box: Box, dtype: str
    ) -> Value:
        """Return the sum, or the largest, of parts of a box. One part that is the whole box is returned as it is."""
        if len(parts) == 1 and parts[0][1] == box:
            return parts[0][0]
        out, view = self.fresh(rank, like), extents(box)
        names, boxes = tuple(name for name, _ in parts), tuple(inside(some, box) for _, some in parts)
        shape = self.tensors[tensor].local_shape(view)
        self.write(rank, Combine(out, names, boxes, view, shape, dtype, like.name in self._largest))
        return out

    def add(self, rank: int, so_far: Value, value: Value) -> Value:
        """Return the sum, or the larger, of two values; in place if the first is a sum with no other holder."""
        # A sum over several microbatches has no microbatch.
        is_one = not self.inner or so_far.microbatch == -1 or self.common((so_far.microbatch, value.microbatch)) >= 0
        in_place = (rank, so_far) in self._sums and is_one
        out = so_far if in_place else self.fresh(rank, so_far if is_one else so_far._replace(microbatch=-1))
        self.write(rank, Accumulate(out, so_far, value, in_place, so_far.name in self._largest))
        self._sums.add((rank, out))
        return out


class Residents:
    """Weights of each device by name. `of`: the weights at rest, by the place of their update's read."""

    def __init__(self, flow: Dataflow, code: Code) -> None:
        self.code, self.flow = code, flow
        self.weights: list[dict[Value, Weight]] = [{} for _ in code.of]
        self.of: dict[Place, Weight] = {}
        # By place, the outputs of the step, which rest on no device.
        self.given: dict[Place, tuple[str, Box]] = {}
        self._slices: dict[tuple[int, str, Box], Value] = {}
        self._count: Counter[tuple[int, str, int]] = Counter()

    def load_weights(self) -> Iterator[tuple[Place, Value]]:
        """Load all weights at rest; yield the place of each and its name."""
        nexts = self.flow.model.nexts
        for tensor, op in self.flow.homes.items():
            rows, produced = self.flow.rows[op.name], self.flow.produced(op, 0)
            counted = set(produced.whole) if op.is_update else set()
            for row, key in enumerate(rows.keys):
                rank, box = key[0], produced.box(row)
                place = Place(UPDATE, self.flow.home_number[tensor], key, 0)
                if op.is_output:
                    self.given[place] = tensor, box
                    continue
                if tensor in nexts:
                    self.of[place] = self.of[place._replace(segment=self.flow.home_number[nexts[tensor]])]
                    yield place, self.of[place].name
                    continue
                name = self.code.fresh(rank, self.code.like(tensor, part=key[2]))
                weight = Weight(name, tensor, box, op.is_update, row in counted, op.group, rank >= HOSTS)
                self.weights[rank % HOSTS][name] = self.of[place] = weight
                self.code.write(rank, Load(name, tensor, box))
                yield place, name

    def slice(self, rank: int, tensor: str, box: Box, microbatch: int = -1) -> Value:
        """Return the name of a slice of an input, a constant or a frozen weight. Any device can load any of them."""
        key = (rank, tensor, box)
        if key not in self._slices:
            # A constant is at rest in all microbatches.
            microbatch = microbatch if self.code.tensors[tensor].kind == "input" else -1
            like = self.code.like(tensor)._replace(microbatch=microbatch, slice=self._count[rank, tensor, microbatch])
            self._count[rank, tensor, microbatch] += 1
            name = self._slices[key] = self.code.fresh(rank, like)
            if self.code.tensors[tensor].kind != "input":
                self.weights[rank][name] = Weight(name, tensor, box, False, False)
            self.code.write(rank, Load(name, tensor, box))
        return self._slices[key]
