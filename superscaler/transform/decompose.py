"""Decomposition of an op: several ops that replace it, on its indices."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from superscaler.ir.model import Model, Op, Operand, PTensor
from superscaler.ir.op import Mark, Ref

# The fields that the steps take from their op.
_COPIED = ("module", "source", "from_data", "from_weights", "iteration")


class Slot(NamedTuple):
    """A slot of an op's tensor: the number of its index (None: it is whole), its factor and its size."""

    number: int | None
    factor: str
    size: int


Dim = Sequence[Slot]


class Steps:
    """The ops `old.word` of `ss.word` that replace an op, their tensors, and the indices of the op and of its steps."""

    def __init__(self, model: Model, op: Op) -> None:
        self.model, self.op, self.indices = model, op, list(op.indices)
        self.ops, self.tensors = list[Op](), list[PTensor]()

    def dims(self, operand: Operand) -> list[Dim]:
        """Return the slots of each dim of an operand of the op."""
        tensor = self.model.tensors[operand.tensor]
        slots = zip(operand.slots, tensor.factors, tensor.extents, strict=True)
        found = iter([Slot(*slot) for slot in slots])
        return [[next(found) for _ in dim] for dim in tensor.slots]

    def tensor(self, word: str, dims: Sequence[Dim], dtype: str, wants: bool, largest: bool = False) -> Operand:
        """Add a tensor of these dims."""
        slots, extents = tuple(tuple(s.factor for s in dim) for dim in dims), tuple(s.size for d in dims for s in d)
        name = f"{self.op.name}.{word}"
        made = PTensor(name, (), dtype, "activation", slots, extents, wants, largest=largest)
        self.tensors.append(replace(made, shape=made.local_shape(extents)))
        return Operand(name, tuple(s.number for dim in dims for s in dim))

    def add(
        self,
        target: str,
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        mirrored: bool,
        frozen: Iterable[int | None] = (),
        **options: Any,
    ) -> None:
        """Add a step. Indices that are not in its results are summed, except the `frozen` ones. What only some of the
        results have is not cut: parts of the others would be added.
        """
        number: dict[int, int] = {}

        def own(operand: Operand) -> Operand:
            slots = (None if i is None else number.setdefault(i, len(number)) for i in operand.slots)
            return replace(operand, slots=tuple(slots))

        made = tuple(map(own, outputs))
        spatial = set(number)
        whole = {*frozen, *(i for i in spatial if any(i not in operand.slots for operand in outputs))}
        given = tuple(map(own, inputs))

        def mark(i: int) -> Mark:
            return "frozen" if i in whole else "spatial" if i in spatial else "summed"

        indices = tuple(replace(self.indices[i], mark=mark(i)) for i in number)
        args, copied = tuple(map(Ref, range(len(inputs)))), {name: getattr(self.op, name) for name in _COPIED}
        asked = replace(self.op.asked, region="")
        name, kwargs = f"{self.op.name}.{target.partition('.')[2]}", tuple(options.items())
        op = Op(name, target, args, kwargs, given, made, indices, has_mirror=mirrored, asked=asked, **copied)
        self.ops.append(op)


def in_place(model: Model, steps: Iterable[Steps]) -> Model:
    """Return the model with each op replaced by its steps."""
    found = {some.op.name: some for some in steps}
    changed = (new for op in model.ops for new in (found[op.name].ops if op.name in found else [op]))
    return model.with_ops(changed, (t for some in found.values() for t in some.tensors))
