"""Losses in steps that can be cut on the classes: devices exchange numbers of each row, never its scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from superscaler.errors import TransformError
from superscaler.ir.graph import Mark, Model, Op, Operand, PTensor, Ref

_HALVES = ("float16", "bfloat16")
# What the steps have of their op.
_TOLD = ("module", "source", "from_data", "from_weights", "checkpoint")


@dataclass(frozen=True, slots=True)
class Decompose:
    """Put in the place of losses over classes what computes them in steps, each of which can be cut on the classes.

    y = cross_entropy(x, c)  ->  m = max(x); t, p = sum(exp(x - m)), x[c]; y = sum(log(t) + m - p) / count
    y = log_softmax(x)       ->  m = max(x); t = sum(exp(x - m)); y = x - m - log(t)
    y = nll_loss(x, c)       ->  p = x[c]; y = sum(-p) / count

    Parts of the classes make parts of m, whose largest is the value, and of the sums t and p: three numbers a row.
    """

    @staticmethod
    def has_steps(op: Op, factor: str) -> bool:
        """Tell whether an op is a loss over the classes that a factor is, and so can be decomposed."""
        slots = set(op.inputs[0].slots).difference(*(o.slots for o in op.inputs[1:])) if op.inputs else set()
        return op.target in _MAKE and any(i is not None and op.indices[i].factor == factor for i in slots)

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model:
        steps = {op.name: _Steps(model, op) for op in ops}
        tensors = {t.name: t for some in steps.values() for t in some.tensors}
        changed = (new for op in model.ops for new in (steps[op.name].ops if op.name in steps else [op]))
        return replace(model, ops=tuple(changed), tensors={**model.tensors, **tensors})


class _Steps:
    """The steps of one op, and the tensors that they make: on the op's own indices, rows and classes."""

    def __init__(self, model: Model, op: Op) -> None:
        self.op, self.ops, self.tensors = op, list[Op](), list[PTensor]()
        make = _MAKE.get(op.target)
        if make is None or len(model.tensors[op.inputs[0].tensor].shape) < 2:
            raise TransformError(
                f"Decompose of {op.name} ({op.target}): there are steps for log_softmax and for the mean cross entropy "
                "of labels that are numbers, without smoothing and without weights of classes; leave this op out."
            )
        self.scores, self.wide = model.tensors[op.inputs[0].tensor], model.tensors[op.outputs[0].tensor].wide_dtype
        self.dim = int(op.args[1]) % len(self.scores.shape) if "softmax" in op.target else 1
        slots = iter(zip(op.inputs[0].slots, self.scores.extents, strict=True))
        self.slots = [[next(slots) for _ in own] for own in self.scores.slots]
        self.classes = {i for i, _ in self.slots[self.dim]}
        make(self)

    def row(self, word: str, largest: bool = False) -> Operand:
        """Add a tensor of a number for each row."""
        kept = [d for d in range(len(self.slots)) if d != self.dim]
        indices, extents = zip(*(pair for d in kept for pair in self.slots[d]), strict=True)
        shape, slots = tuple(self.scores.shape[d] for d in kept), tuple(self.scores.slots[d] for d in kept)
        wants, name = self.op.has_mirror and not largest, f"{self.op.name}.{word}"
        made = PTensor(name, shape, self.wide, "activation", slots, extents, wants, largest=largest)
        self.tensors.append(made)
        return Operand(made.name, indices)

    def add(self, target: str, inputs: Sequence[Operand], outputs: Sequence[Operand], **options: Any) -> None:
        """Add a step; those of its indices that are not in its results are summed."""
        number: dict[int, int] = {}

        def own(operand: Operand) -> Operand:
            slots = (None if i is None else number.setdefault(i, len(number)) for i in operand.slots)
            return replace(operand, slots=tuple(slots))

        made = tuple(map(own, outputs))
        spatial = set(number)
        sides = tuple(map(own, inputs)), made

        def mark(i: int) -> Mark:
            is_frozen = self.op.indices[i].mark == "frozen" and i not in self.classes
            return "frozen" if is_frozen else "spatial" if i in spatial else "summed"

        indices = tuple(replace(self.op.indices[i], mark=mark(i)) for i in number)
        mirrored = self.op.has_mirror and target != "ss.largest"
        args, told = tuple(map(Ref, range(len(inputs)))), {name: getattr(self.op, name) for name in _TOLD}
        name = f"{self.op.name}.{target.partition('.')[2]}"
        self.ops.append(Op(name, target, args, tuple(options.items()), *sides, indices, has_mirror=mirrored, **told))

    def largest(self, scores: Operand) -> Operand:
        found = self.row("largest", largest=True)
        self.add("ss.largest", [scores], [found], dim=self.dim)
        return found

    def loss(self, *rows: Operand) -> None:
        _, labels, count = self.op.inputs
        self.add("ss.row_losses", [labels, count, *rows], self.op.outputs, ignore_index=self.op.args[3])


def _cross_entropy(steps: _Steps) -> None:
    scores, labels, _ = steps.op.inputs
    largest, total, picked = steps.largest(scores), steps.row("total"), steps.row("picked")
    steps.add("ss.class_sums", [scores, labels, largest], [total, picked])
    steps.loss(picked, largest, total)


def _nll_loss(steps: _Steps) -> None:
    scores, labels, _ = steps.op.inputs
    picked = steps.row("picked")
    steps.add("ss.picked", [scores, labels], [picked])
    steps.loss(picked)


def _log_softmax(steps: _Steps) -> None:
    """Halves are widened first: their gradient is the difference of two, which must not be rounded before."""
    scores, made = steps.op.inputs[0], steps.op.outputs[0]
    if steps.scores.dtype in _HALVES:
        wide = replace(steps.scores, name=f"{steps.op.name}.wide", dtype=steps.wide, kind="activation", origin="")
        steps.tensors.append(wide)
        narrow, scores = scores, replace(scores, tensor=wide.name)
        steps.add("aten._to_copy.default", [narrow], [scores], dtype=f"torch.{steps.wide}")
    largest, total = steps.largest(scores), steps.row("total")
    steps.add("ss.exp_sum", [scores, largest], [total], dim=steps.dim)
    steps.add("ss.normalized", [scores, largest, total], [made], dim=steps.dim)


_MAKE: Mapping[str, Callable[[_Steps], None]] = {
    "ss.cross_entropy": _cross_entropy,
    "ss.nll_loss": _nll_loss,
    **dict.fromkeys(("aten.log_softmax.int", "aten._log_softmax.default"), _log_softmax),
}
