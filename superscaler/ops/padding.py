"""Batches with fewer rows than a plan has: added rows with ignored labels, which do not change the training."""

from collections.abc import Collection, Container

from superscaler.ir.model import Model, Op
from superscaler.ops.row import aten

# Sums and means of the losses of rows, and counts, that leave ignored labels out.
_LOSSES = aten(True, "ss.cross_entropy ss.nll_loss ss.count_labels ss.row_losses cross_entropy_loss nll_loss_nd")


def pads_rows(model: Model, labels: Collection[str], moves: Container[str]) -> bool:
    """Return whether rows with ignored `labels` (inputs) change neither the loss nor a gradient nor a buffer.

    Every op must keep the rows separate, except losses whose labels come from these inputs by `moves`.
    """
    inputs = [model.tensors[name] for name in model.inputs if model.tensors[name].shape]
    rows = {tensor.slots[0] for tensor in inputs}
    if not labels or len(rows) != 1 or len(next(iter(rows))) != 1:
        return False
    ((factor,),) = rows
    moved = set(labels)
    for op in (op for op in model.ops if op.is_forward):
        if op.target in moves and moved.issuperset(operand.tensor for operand in op.inputs):
            moved.update(operand.tensor for operand in op.outputs)
        if not _keeps_apart(model, op, factor) and not (op.target in _LOSSES and _reads(op, moved)):
            return False
    return True


def _reads(op: Op, tensors: Container[str]) -> bool:
    return any(operand.tensor in tensors for operand in op.inputs)


def _keeps_apart(model: Model, op: Op, factor: str) -> bool:
    """Return whether each row of an op's results depends on the same row of its operands only."""
    own = {number for number, index in enumerate(op.indices) if index.factor == factor}
    if len(own) > 1 or any(op.indices[n].mark != "spatial" or op.indices[n].follows for n in own):
        return False
    pairs = (
        (slot, found)
        for operand in (*op.inputs, *op.outputs)
        for slot, found in zip(operand.slots, model.tensors[operand.tensor].factors, strict=True)
    )
    return all(slot in own for slot, found in pairs if found == factor)
