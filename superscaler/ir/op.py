"""Operators of a model: their indices and operands; and functions, the operators of a segment on a part."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from superscaler.ir.mask import Box

OpKind = Literal["forward", "backward", "optimizer"]
Mark = Literal["spatial", "summed", "frozen"]
MARKS: Mapping[Mark, str] = {"spatial": "", "summed": "+", "frozen": "^"}


@dataclass(frozen=True, slots=True)
class Index:
    """One index of one op's iteration space. Cutting a `summed` index gives value parts.

    `follows` (index, step, chunks): this index is cut together with another one. With equal chunks of both, a part with
    chunk k of the other index has chunk k - step of this one, modulo the number of chunks; a part with all chunks has
    all of it. With (index, 0, 0), this index ends in each part where the part's range of the other one ends (causal
    attention: keys up to the last query). All other indices are independent.
    """

    size: int
    factor: str
    mark: Mark
    follows: tuple[int, int, int] | None = None

    @property
    def until(self) -> int | None:
        """Return the index whose end bounds this one in each part, None if there is none."""
        return self.follows[0] if self.follows and not self.follows[2] else None


@dataclass(frozen=True, slots=True)
class Operand:
    """An op's access to a pTensor: for each (flattened) slot the op's index, or None for a whole slot."""

    tensor: str
    slots: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in `Op.args` for the op's input number `operand`."""

    operand: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for an op beside its parts; new ops in its place inherit it.

    `region`: the ops recomputed together; of nested regions, an op has the innermost, a recomputed op the one with
    which it runs. `checkpoint`: the region of the model's own `torch.utils.checkpoint`. `split`: mirrors of ops with
    the same split run in two halves, gradients of activations first, then those of weights. `regather`: ops with the
    same one keep no weights for their mirrors.
    """

    region: str = ""
    checkpoint: str = ""
    split: str = ""
    regather: str = ""

    def renamed(self, name: Callable[[str], str]) -> Asked:
        """Return it with other names of the ops that name regions; what is not asked stays so."""
        return Asked(*(own and name(own) for own in (self.region, self.checkpoint, self.split, self.regather)))


@dataclass(frozen=True, slots=True)
class Op:
    """An operator. `args` and `kwargs` are those of `target` (an ATen overload or one of ours), tensors as `Ref`.

    `flops`: of the forward. `from_data`: depends on inputs and constants only. `from_weights`: depends on weights and
    constants only; its mirror routes when it is replicated. `group`: the optimizer's parameter group. `of`: for a
    backward op, the op that it mirrors.

    `linear`: the sets of inputs that may be partial sums: all together in a sum, one at a time in a product. `passes`:
    for a factor, the set of inputs whose value is a sum over that factor; cutting an op without the factor splits that
    value.

    `origin`: for a recomputed op, the original. `iteration`: the iteration of the step (`Graph.unroll`).
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    indices: tuple[Index, ...]
    kind: OpKind = "forward"
    has_mirror: bool = False
    module: str = ""
    source: str = ""
    flops: int = 0
    from_data: bool = False
    from_weights: bool = False
    group: int = 0
    linear: tuple[tuple[int, ...], ...] = ()
    passes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    of: str = ""
    origin: str = ""
    asked: Asked = Asked()
    iteration: int = 0

    def asking(self, **changes: str) -> Op:
        """Return the op with other fields of `asked`.

        >>> op = Op("y", "aten.relu.default", (), (), (), (), ())
        >>> op.asking(split="y").asking(checkpoint="h.0").asked
        Asked(region='', checkpoint='h.0', split='y', regather='')
        """
        return replace(self, asked=replace(self.asked, **changes))

    @property
    def region(self) -> str:
        return self.asked.region

    @property
    def checkpoint(self) -> str:
        return self.asked.checkpoint

    @property
    def split(self) -> str:
        return self.asked.split

    @property
    def regather(self) -> str:
        return self.asked.regather

    @property
    def is_write(self) -> bool:
        """Return whether the op sets its first input, a buffer, to its second at the end of the step, or returns it as
        output.
        """
        return self.target == "ss.write" or self.is_output

    @property
    def is_output(self) -> bool:
        """Return whether the step returns the input of this op, on the devices of its parts."""
        return self.target == "ss.output"

    @property
    def is_rest(self) -> bool:
        """Return whether the op changes nothing: a frozen weight, its input, rests where its parts are."""
        return self.target == "ss.rest"

    @property
    def is_whole(self) -> bool:
        """Return whether the op changes a weight that cannot be cut, because the optimizer needs the whole matrix."""
        return self.kind == "optimizer" and any(index.mark == "frozen" for index in self.indices)

    @property
    def is_update(self) -> bool:
        """Return whether the op trains its first input."""
        return self.kind == "optimizer" and not (self.is_write or self.is_rest)

    @property
    def is_sum(self) -> bool:
        """Return whether the op is linear in all inputs together: its backward needs the values of none."""
        return any(len(group) == len(self.inputs) for group in self.linear)

    @property
    def is_copy(self) -> bool:
        """Return whether the op was made by `Insert`. The gradient of its input is the gradient of its copy."""
        return self.target == "ss.identity"

    @property
    def is_forward(self) -> bool:
        return self.kind == "forward"

    @property
    def is_mirror(self) -> bool:
        return self.kind == "backward"

    def find(self, factor: str) -> int | None:
        """Return the index to cut for a factor: the first one of the first output that is not frozen; None if there is
        none.

        `*` in the name stands for any text. `sequence@1` is the second of `indices` with the factor, `hidden@summed`
        the first that is summed.
        """
        name, _, which = factor.partition("@")
        own = [n for n, i in enumerate(self.indices) if is_named(i.factor, name) and not i.follows]
        own = own[int(which) : int(which) + 1] if which.isdigit() else own
        free = [
            n
            for n in own
            if self.indices[n].mark != "frozen" and (which in ("", self.indices[n].mark) or which.isdigit())
        ]
        return next((i for o in self.outputs for i in o.slots if i in free), next(iter(free), None))

    def summed(self, operand: Operand) -> list[int]:
        """Return the indices that are summed in an operand: neither its own, nor those that follow its own."""
        leading = [n if i.follows is None else i.follows[0] for n, i in enumerate(self.indices)]
        own = {i if self.indices[i].until is not None else leading[i] for i in operand.slots if i is not None}
        return [n for n, first in enumerate(leading) if own.isdisjoint((n, first))]

    def notation(self) -> str:
        """Return the op's indices in one line, as `linear: batch sequence hidden, mlp hidden -> batch sequence mlp`."""

        def side(operands: tuple[Operand, ...]) -> str:
            return ", ".join(
                " ".join("." if i is None else self.indices[i].factor + MARKS[self.indices[i].mark] for i in o.slots)
                for o in operands
            )

        return f"{self.target}: {side(self.inputs)} -> {side(self.outputs)}"


@dataclass(frozen=True, slots=True)
class Function:
    """The ops of a segment with the box of each on a part. Emit writes its source, once per distinct text.

    Parts of equal sizes share a function. In a part that starts `at` some numbers, index k of an op starts at the
    number selected by `coordinates`. `grads`: the numbers of the inputs that want a gradient. `wide`: of those whose
    gradient becomes float32. `again`: of those that are regathered for the backward. `saved`: the numbers of the
    outputs whose gradients the backward gets.
    """

    ops: tuple[Op, ...]
    boxes: tuple[Box, ...]
    inputs: tuple[str, ...]
    input_of: Mapping[tuple[str, int], int]
    outputs: tuple[str, ...]
    module: str
    coordinates: tuple[tuple[int, ...], ...] = ()
    grads: tuple[int, ...] = ()
    wide: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()

    def boxes_at(self, at: Sequence[int], targets: Container[str] | None = None) -> list[Box]:
        """Return the box of each op (with one of `targets`) in a part that starts `at` these numbers."""
        return [
            tuple((at[c], at[c] + hi - lo) for c, (lo, hi) in zip(where, box, strict=True))
            for op, box, where in zip(self.ops, self.boxes, self.coordinates, strict=True)
            if targets is None or op.target in targets
        ]


def is_named(factor: str, name: str) -> bool:
    """Return whether a factor matches a name in which `*` stands for any text.

    >>> is_named("h.3.mlp", "h.*.mlp"), is_named("h.3.mlp", "mlp")
    (True, False)
    """
    return factor == name or ("*" in name and fnmatchcase(factor, name))
