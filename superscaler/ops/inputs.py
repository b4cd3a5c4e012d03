"""Facts about the inputs of a model: bounds of values, labels that losses ignore, fillings of a smaller batch."""

from collections.abc import Container, Iterator, Mapping

from superscaler.ir.model import Model, Op
from superscaler.ops.row import aten
from superscaler.ops.table import ROWS

# Ops that select by an integer input (their second operand) -> the dim of the first operand that they select along.
_SELECTING = {n: dim for n, row in ROWS.items() for _, dim, role in row.roles if role in ("vocabulary", "classes")}
_ROWS = {n: dim for n, dim in _SELECTING.items() if "embedding" in n}
# Losses and counts that ignore a label -> position of the argument that names it.
_IGNORED = {"ss.count_labels": 1, **aten(4, "cross_entropy_loss nll_loss_nd")}
# Ops that keep the values of their operand; padding may add values that no label counts.
_MOVES = {n for n, row in ROWS.items() if row.is_view} | aten(True, "clone _to_copy constant_pad_nd pad").keys()
# Sums and means of the losses of rows, and counts, that leave ignored labels out.
_LOSSES = aten(True, "ss.cross_entropy ss.nll_loss ss.count_labels ss.row_losses cross_entropy_loss nll_loss_nd")


def limits(model: Model) -> dict[str, tuple[int, int]]:
    """Return the values [least, bound) that an input may have if its own values select rows or classes, by input."""
    classes, rows = bounds(model, moves=_MOVES), bounds(model, _ROWS, _MOVES)
    return {name: (0 if name in rows else -(2**63), bound) for name, bound in classes.items()}


def bounds(
    model: Model, selecting: Mapping[str, int] = _SELECTING, moves: Container[str] | None = None
) -> dict[str, int]:
    """Return an exclusive upper bound for each integer input: the number of rows or classes that its values select.
    Other ops may have changed the values before (with `moves`, only ops that move them).
    """
    found: dict[str, int] = {}
    for op in (op for op in model.ops if op.target in selecting):
        bound = model.tensors[op.inputs[0].tensor].shape[selecting[op.target]]
        for name in _sources(model, op.inputs[1].tensor, moves):
            found[name] = min(bound, found.get(name, bound))
    return found


def ignored(model: Model) -> dict[str, int]:
    """Return the label value that all losses of an input ignore, by input of labels."""
    found: dict[str, set[int]] = {}
    for op in (op for op in model.ops if op.target in _IGNORED):
        at = _IGNORED[op.target]
        value = int(op.args[at]) if at < len(op.args) else dict(op.kwargs).get("ignore_index", -100)
        for name in _sources(model, op.inputs[at != 1].tensor, _MOVES):
            found.setdefault(name, set()).add(value)
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def fillings(model: Model) -> dict[str, int | None]:
    """Return the value that fills a sequence of each input: the label to ignore, 0 for a mask, None for any value."""
    labels = ignored(model)
    return {name: labels.get(name, 0 if "mask" in name else None) for name in model.inputs}


def _sources(model: Model, name: str, moves: Container[str] | None) -> Iterator[str]:
    """Yield the inputs from which a tensor's values are computed; with `moves`, only along ops that move values."""
    producers, left = model.producers, [name]
    while left:
        name = left.pop()
        made = producers[name][0] if name in producers else None
        if name in model.inputs:
            yield name
        elif made is not None and made.from_data and (moves is None or made.target in moves):
            left += [o.tensor for o in made.inputs]


def pads_rows(model: Model) -> bool:
    """Return whether rows with ignored labels change neither the loss nor a gradient nor a buffer.

    Every op must keep the rows separate, except losses whose labels come from inputs by ops that move values. What the
    ops do not show, as a number of rows that is a constant, the check of the capture has found.
    """
    labels = {} if model.is_whole else ignored(model)
    inputs = [model.tensors[name] for name in model.inputs if model.tensors[name].shape]
    rows = {tensor.slots[0] for tensor in inputs}
    if not labels or len(rows) != 1 or len(next(iter(rows))) != 1:
        return False
    ((factor,),) = rows
    moved = set(labels)
    for op in (op for op in model.ops if op.is_forward):
        if op.target in _MOVES and moved.issuperset(operand.tensor for operand in op.inputs):
            moved.update(operand.tensor for operand in op.outputs)
        is_loss = op.target in _LOSSES and any(operand.tensor in moved for operand in op.inputs)
        if not is_loss and not _keeps_apart(model, op, factor):
            return False
    return True


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
