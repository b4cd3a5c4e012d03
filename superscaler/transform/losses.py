"""Losses in steps that can be cut on the classes: devices exchange numbers of each row, never its scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from superscaler.errors import TransformError
from superscaler.ir.model import CAST, Model, Op, Operand
from superscaler.specs.options import HALVES
from superscaler.transform.decompose import Steps, in_place


@dataclass(frozen=True, slots=True)
class Decompose:
    """Replace losses over classes by steps that can be cut on the classes.

    y = cross_entropy(x, c)  ->  m = max(x); t, p = sum(exp(x - m)), x[c]; y = sum(log(t) + m - p) / count y =
    log_softmax(x)       ->  m = max(x); t = sum(exp(x - m)); y = x - m - log(t) y = nll_loss(x, c)       ->  p = x[c];
    y = sum(-p) / count

    Parts of the classes make parts of m (its value is their largest), and of the sums t and p: three numbers a row.
    """

    @staticmethod
    def has_steps(op: Op, factor: str) -> bool:
        """Return whether an op is a loss over the classes of a factor, which can be decomposed."""
        slots = set(op.inputs[0].slots).difference(*(o.slots for o in op.inputs[1:])) if op.inputs else set()
        return op.target in _MAKE and any(i is not None and op.indices[i].factor == factor for i in slots)

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model:
        return in_place(model, [_Loss(model, op) for op in ops])


class _Loss(Steps):
    """The steps of one op, on its rows and classes."""

    def __init__(self, model: Model, op: Op) -> None:
        super().__init__(model, op)
        make = _MAKE.get(op.target)
        if make is None or len(model.tensors[op.inputs[0].tensor].shape) < 2:
            raise TransformError(
                f"Decompose of {op.name} ({op.target}): there are steps for log_softmax and for the mean cross entropy "
                "of labels that are numbers, without smoothing and without weights of classes; leave this op out."
            )
        self.scores, self.wide = model.tensors[op.inputs[0].tensor], model.tensors[op.outputs[0].tensor].wide_dtype
        self.dim = int(op.args[1]) % len(self.scores.shape) if "softmax" in op.target else 1
        self.rows = self.dims(op.inputs[0])
        classes = {slot.number for slot in self.rows.pop(self.dim)}
        self.frozen = [i for i, index in enumerate(op.indices) if index.mark == "frozen" and i not in classes]
        make(self)

    def row(self, word: str, largest: bool = False) -> Operand:
        """Add a tensor with a number for each row."""
        return self.tensor(word, self.rows, self.wide, self.op.has_mirror and not largest, largest)

    def step(self, target: str, inputs: Sequence[Operand], outputs: Sequence[Operand], **options: Any) -> None:
        self.add(target, inputs, outputs, self.op.has_mirror and target != "ss.largest", self.frozen, **options)

    def largest(self, scores: Operand) -> Operand:
        found = self.row("largest", largest=True)
        self.step("ss.largest", [scores], [found], dim=self.dim)
        return found

    def loss(self, *rows: Operand) -> None:
        _, labels, count = self.op.inputs
        self.step("ss.row_losses", [labels, count, *rows], self.op.outputs, ignore_index=self.op.args[3])


def _cross_entropy(steps: _Loss) -> None:
    scores, labels, _ = steps.op.inputs
    largest, total, picked = steps.largest(scores), steps.row("total"), steps.row("picked")
    steps.step("ss.class_sums", [scores, labels, largest], [total, picked])
    steps.loss(picked, largest, total)


def _nll_loss(steps: _Loss) -> None:
    scores, labels, _ = steps.op.inputs
    picked = steps.row("picked")
    steps.step("ss.picked", [scores, labels], [picked])
    steps.loss(picked)


def _log_softmax(steps: _Loss) -> None:
    """Widen halves first: their gradient is a difference of two numbers, which must not be rounded before."""
    scores, made = steps.op.inputs[0], steps.op.outputs[0]
    if steps.scores.dtype in HALVES.values():
        wide = replace(steps.scores, name=f"{steps.op.name}.wide", dtype=steps.wide, kind="activation", origin="")
        steps.tensors.append(wide)
        narrow, scores = scores, replace(scores, tensor=wide.name)
        steps.step(CAST, [narrow], [scores], dtype=f"torch.{steps.wide}")
    largest, total = steps.largest(scores), steps.row("total")
    steps.step("ss.exp_sum", [scores, largest], [total], dim=steps.dim)
    steps.step("ss.normalized", [scores, largest, total], [made], dim=steps.dim)


_MAKE: Mapping[str, Callable[[_Loss], None]] = {
    "ss.cross_entropy": _cross_entropy,
    "ss.nll_loss": _nll_loss,
    **dict.fromkeys(("aten.log_softmax.int", "aten._log_softmax.default"), _log_softmax),
}
