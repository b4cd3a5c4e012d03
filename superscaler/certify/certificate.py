"""The certificate of a program: it runs on masks, and its messages on rendezvous. Each check raises ScheduleError."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from superscaler.certify.boxes import Boxes, is_tiled
from superscaler.certify.content import Content
from superscaler.certify.masks import Masks
from superscaler.certify.rounds import Rounds
from superscaler.errors import ScheduleError
from superscaler.ir.communication import check_rendezvous
from superscaler.ir.grid import Ints
from superscaler.ir.mask import Mask
from superscaler.ir.model import Model, Op, Operand, PTensor
from superscaler.ir.names import later
from superscaler.ir.program import Program
from superscaler.remembered import forget
from superscaler.timing import timed, without_garbage_collection


def check_program(program: Program) -> None:
    """Raise ScheduleError at the first instruction that differs from the model, naming the device, the tensor, and the
    missing or repeated elements or addends.

    All devices are checked, each with its own data; devices that run one program are checked together.
    """
    _check_twins(program.model)
    masks = Masks(program)
    Rounds(program, masks).run()
    _check_weights(program, masks)
    _check_outputs(program, masks)
    if program.model.loss:
        for loss in program.model.losses:
            _check_loss(program, masks, loss)


def _check_twins(model: Model) -> None:
    """Check that each recomputed op equals its original and that each op has at most one mirror."""
    ops, seen, makers, versions = {op.name: op for op in model.ops}, set[str](), model.producers, model.versions

    def plain(side: Sequence[Operand]) -> tuple[Operand, ...]:
        return tuple(o if o.tensor in versions else replace(o, tensor=model.origin(o.tensor)) for o in side)

    for tensor in (t for t in model.tensors.values() if t.origin):
        original, maker = model.tensors.get(tensor.origin), makers.get(tensor.name, (None, 0))[0]
        kind = "parameter" if tensor.kind == "buffer" else tensor.kind
        # A copy of a weight is an activation.
        own = original.kind if original and maker and maker.is_copy else kind
        if changed := _changed(replace(tensor, name=tensor.origin, origin="", kind=own), original):
            raise ScheduleError(f"{tensor.name} {changed}.")
        copied = [(model.origin(o.tensor), o.slots) for o in maker.inputs] if maker and maker.is_copy else []
        is_recomputed = maker is not None and (maker.origin or copied == [(tensor.origin, maker.outputs[0].slots)])
        if not (is_recomputed or tensor.name in versions):
            raise ScheduleError(f"{tensor.name} has the original {tensor.origin}, but no op recomputes or copies that.")
    for op in (op for op in model.ops if op.origin):
        found = replace(op, inputs=plain(op.inputs), outputs=plain(op.outputs)).asking(region="")
        found = replace(found, name=op.origin, origin="", has_mirror=False)
        first = ops.get(op.origin)
        if first and op.target == "ss.attention_gradient" and _is_gradient(model, op):
            kept = len(first.inputs), len(first.args)
            found = replace(found, target=first.target, args=found.args[: kept[1]], inputs=found.inputs[: kept[0]])
            found = replace(found, outputs=plain(first.outputs))
        plainly = first and replace(first, inputs=plain(first.inputs), outputs=plain(first.outputs)).asking(region="")
        if found != plainly or (op.has_mirror and op.origin in seen):
            raise ScheduleError(
                f"{op.name} does not recompute {op.origin}, or another op that recomputes it has a backward too."
            )
        seen |= {op.origin} if op.has_mirror else set()


def _changed(tensor: PTensor, original: PTensor | None) -> str:
    """Return the first field in which a tensor differs from its original, in words; '' for equal ones."""
    if tensor == original:
        return ""
    if original is None:
        return f"has the original {tensor.name}, which the model lacks"
    pairs = ((f.name, getattr(tensor, f.name), getattr(original, f.name)) for f in fields(tensor))
    name, own, theirs = next(pair for pair in pairs if pair[1] != pair[2])
    return f"has {name} {own!r}, but its original {tensor.name} has {theirs!r}"


def _is_gradient(model: Model, op: Op) -> bool:
    """Return whether the gradient of a block of attention reads the attention to all keys, and its log-sum-exp, and has
    its place.
    """
    (out,), (whole, total) = op.outputs, op.inputs[-2:]
    # Each of the two may be recomputed, or a copy.
    first, summed = model.origin(whole.tensor), model.origin(total.tensor)
    (detached, _), (last, _) = model.producers[first], model.producers[summed]
    is_same = whole.slots == out.slots and total.slots == out.slots[: len(total.slots)]
    own = [o.tensor for o in last.outputs]
    is_whole = [model.origin(detached.inputs[0].tensor), summed] == own and detached.target == "aten.detach.default"
    return is_same and is_whole and model.origin(out.tensor) == model.origin(own[0])


def _check_weights(program: Program, masks: Masks) -> None:
    """Check that every weight is at rest somewhere, each element counted once, and updated at all of its places."""
    model = program.model
    counted: dict[str, list[np.ndarray]] = {tensor: [] for tensor in masks.homes}
    held: dict[str, list[np.ndarray]] = {tensor: [] for tensor in masks.homes}
    for number, cohort in masks.cohorts.items():
        boxes, flags = cohort.of_weights("box"), cohort.of_weights("counted")
        if number not in masks.updated or number not in masks.losses:
            raise ScheduleError(f"device {cohort.devices[0]} does not update its weights and give the loss at its end.")
        if len(cohort.at_rest) < len(cohort.weights):
            name = Counter(w.name for w in cohort.weights).most_common(1)[0][0]
            raise ScheduleError(f"device {cohort.devices[0]} has two weights at rest of one name, {name}.")
        for weight, box, counts in zip(cohort.weights, boxes, flags, strict=True):
            op = masks.homes.get(weight.tensor)
            where = f"{Mask(weight.tensor, weight.box)} on device {cohort.devices[0]}"
            if op is None:
                if weight.trained or counts.any():
                    raise ScheduleError(f"{where} is trained, but no op updates it.")
                continue
            box = box.reshape(len(cohort), -1, 2)
            held[weight.tensor].append(box)
            counted[weight.tensor].append(box[counts])
            if not op.is_update and (weight.trained or counts.any()):
                what = "holds it as a frozen weight" if op.is_rest else "writes it as a buffer"
                raise ScheduleError(f"{where} is a trained weight, but op {op.name} of the model {what}.")
            if op.is_update and (not weight.trained or weight.group != op.group):
                what = f"in parameter group {weight.group}" if weight.trained else "at rest as if it were frozen"
                raise ScheduleError(f"{where} is {what}, but {op.name} trains it in group {op.group}.")
            turns = [] if op.is_rest else [later(weight.tensor, k) for k in range(model.iterations)]
            expected = sum(op.is_write or bool(masks.kinds.heads(tensor, True)) for tensor in turns)
            given = sum((weight.name, tensor) in masks.updated[number] for tensor in turns)
            if given != expected:
                raise ScheduleError(f"{where} is given {given} gradients in a step instead of {expected}.")
    for tensor, op in masks.homes.items():
        if tensor in masks.nexts:
            continue
        whole = np.array([(0, e) for e in model.tensors[tensor].extents], dtype=np.int64).reshape(1, -1, 2)
        if not held[tensor]:
            raise ScheduleError(f"{tensor} is at rest on no device.")
        if op.is_update and not _tile(np.concatenate(counted[tensor]), whole):
            raise ScheduleError(f"the elements of {tensor} are not counted once each by the devices that hold them.")
        parts = np.unique(np.concatenate(held[tensor]), axis=0)
        # Devices may hold parts of different sizes.
        if not op.is_update and not (_tile(parts, whole) or _cover(parts, whole)):
            raise ScheduleError(f"the parts of {tensor} at rest are not the whole tensor.")


def _check_outputs(program: Program, masks: Masks) -> None:
    """Check that all elements of every output are returned, on any devices."""
    for tensor in masks.outputs:
        whole = np.array([(0, e) for e in program.model.tensors[tensor].extents], dtype=np.int64).reshape(1, -1, 2)
        given = masks.given.get(tensor)
        if given is None or not _cover(np.unique(np.concatenate(given), axis=0), whole):
            raise ScheduleError(f"the step does not give all elements of its output {tensor}.")


def _tile(boxes: Ints, whole: Ints) -> bool:
    return bool(is_tiled(Boxes.of(boxes[None]), whole).all())


def _cover(boxes: Ints, whole: Ints) -> bool:
    """Return whether boxes [boxes, slots, 2], which may overlap, cover every element of the whole [1, slots, 2]."""
    bounds = [np.unique(ends) for ends in np.concatenate([boxes, whole]).swapaxes(0, 1)]
    found = np.zeros([len(own) - 1 for own in bounds], dtype=bool)
    for box in boxes:
        found[tuple(slice(*np.searchsorted(own, ends)) for own, ends in zip(bounds, box, strict=True))] = True
    return bool(found.all())


def _check_loss(program: Program, masks: Masks, loss: str) -> None:
    """Check that the counted parts of the loss add up to its value, each once."""
    found: dict[object, list[np.ndarray]] = {}
    for parts in masks.losses.values():
        for content, counts in (part for part in parts if part[0].tensor == loss):
            for chain, boxes in masks.sums.addends_of(content).items():
                kept = boxes.rows(counts).whole
                found.setdefault(chain, []).append(kept.reshape(kept.shape[0] * kept.shape[1], *kept.shape[2:]))
    addends = {chain: Boxes.of(np.concatenate(boxes)[None]) for chain, boxes in found.items()}
    box = np.array([(0, e) for e in program.model.tensors[loss].extents], dtype=np.int64).reshape(1, -1, 2)
    total = Content(loss, False, box, addends, "")  # type: ignore[arg-type]
    if masks.sums.simplified(total, deep=True).addends is not None:
        raise ScheduleError(f"the loss of the step: {masks.sums.fault(total)}")


CHECKS: Mapping[str, Callable[[Program], None]] = {"conservation": check_program, "deadlock_free": check_rendezvous}


def certify(program: Program) -> dict[str, float]:
    """Run all checks of a program; return the seconds of each."""
    seconds = dict.fromkeys(CHECKS, 0.0)
    try:
        for name, check in CHECKS.items():
            with timed(seconds, name), without_garbage_collection():
                check(program)
    finally:
        forget()
    return seconds
