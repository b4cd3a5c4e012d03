"""The contents of a captured model as plain data: operators, factors, totals, and uncuttable indices with reasons."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from math import prod
from typing import Any

from superscaler.groups import group_by
from superscaler.ir.model import Model, Op, PTensor

_BLOCK = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def describe(model: Model) -> dict[str, Any]:
    """Return the facts of a captured model. Bytes and FLOPs are of the forward of one step on the example batch.

    `activation_bytes`: every activation with a mirror as its reader, once. Mirrors of ops that are linear in all inputs
    (additions, views, sums) read none; other tensors that autograd keeps (statistics, masks) are not counted.
    `checkpoints`: the number of `torch.utils.checkpoint` regions by module.
    """
    forward = [op for op in model.ops if op.is_forward]
    regions = dict.fromkeys(op.checkpoint for op in forward if op.checkpoint and op.has_mirror)
    parameters, buffers = ([t for t in model.tensors.values() if t.kind == k] for k in ("parameter", "buffer"))
    return {
        "ops": dict(Counter(op.target for op in forward).most_common()),
        "operators": _operators(model, forward),
        "factors": _factors(model, forward),
        "frozen": _frozen(model, forward),
        "checkpoints": dict(Counter(collapse(f"{name}.").rstrip(".") for name in regions)),
        "mirrors": sum(op.has_mirror for op in forward),
        "updates": sum(not (op.is_forward or op.is_output or op.is_rest) for op in model.ops),
        "trains": bool(model.loss),
        "outputs": {t.name: [list(t.shape), t.dtype] for t in model.tensors.values() if t.kind == "output"},
        "parameters": _elements(parameters),
        "parameter_bytes": _bytes(parameters),
        "trained_parameters": _elements(t for t in parameters if t.requires_grad),
        "buffers": _elements(buffers),
        "buffer_bytes": _bytes(buffers),
        "activation_bytes": _bytes(model.tensors[name] for name in _kept(model, forward)),
        "flops": sum(op.flops for op in forward),
        "unsupported": dict(model.unsupported),
    }


def span(numbers: Collection[int]) -> str:
    """Return the least and the largest number in words.

    >>> span([1, 3, 2]), span([1, 1])
    ('1 to 3', '1')
    """
    return " to ".join(map(str, dict.fromkeys((min(numbers), max(numbers)))))


def collapse(name: str) -> str:
    """Return a name without the numbers of blocks and of repeated names.

    >>> collapse("transformer.h.3.attn.c_attn"), collapse("slice_12.3")
    ('transformer.h.*.attn.c_attn', 'slice_*.3')
    """
    return re.sub(r"_\d+(?=\.|$)", "_*", _BLOCK.sub("*", name))


def frozen_indices(model: Model, op: Op) -> list[tuple[str, str]]:
    """Return (factor, reason) for each index that the op cannot be cut on, without repetitions."""
    if op.target in model.unsupported:
        read = dict.fromkeys(f for o in op.inputs for f in model.tensors[o.tensor].factors)
        return [(factor, "no rule") for factor in read]
    needed = {i for o in op.inputs for i in o.slots if i is not None}
    found = {op.indices[i].factor: "needs the whole dim" for i in needed if op.indices[i].mark == "frozen"}
    for operand in op.inputs:
        factors = model.tensors[operand.tensor].factors
        found |= {f: "reads the dim whole" for f, i in zip(factors, operand.slots, strict=True) if i is None}
    made = {i.factor: "makes the dim whole" for k, i in enumerate(op.indices) if i.mark == "frozen" and k not in needed}
    return list((found or made).items())


def _operators(model: Model, forward: list[Op]) -> list[dict[str, Any]]:
    """Return each operator with its count, the notation of its first op, and its frozen indices."""
    rows = []
    for target, ops in sorted(group_by(forward, lambda op: op.target).items(), key=lambda item: -len(item[1])):
        frozen = Counter(f for op in ops for f in dict.fromkeys(collapse(f) for f, _ in frozen_indices(model, op)))
        rows.append({"operator": target, "count": len(ops), "notation": ops[0].notation(), "frozen": dict(frozen)})
    return rows


def _factors(model: Model, forward: list[Op]) -> list[dict[str, Any]]:
    """Return each factor: its size, the numbers of ops by mark, its inputs and parameters."""
    marks: dict[str, Counter[str]] = defaultdict(Counter)
    for op in forward:
        for factor, mark in {(i.factor, i.mark) for i in op.indices}:
            marks[factor][mark] += 1
    free = Counter(f for op in forward for f in dict.fromkeys(i.factor for i in op.indices if i.mark != "frozen"))
    places: dict[str, list[str]] = defaultdict(list)
    for tensor in model.tensors.values():
        if tensor.kind in ("input", "parameter"):
            for dim, slots in enumerate(tensor.slots):
                for factor in dict.fromkeys(slots):
                    places[factor].append(f"{tensor.name}.{dim}")
    return [
        {
            **{"name": f.name, "size": f.size, "ops": free[f.name]},
            **{mark: marks[f.name][mark] for mark in ("spatial", "summed", "frozen")},
            "where": places[f.name],
        }
        for f in model.factors.values()
    ]


def _frozen(model: Model, forward: list[Op]) -> list[dict[str, Any]]:
    """Return the uncuttable indices: for each operator and reason, the number of ops and the factors."""
    found = [(op, factor, reason) for op in forward for factor, reason in frozen_indices(model, op)]
    rows = [
        {"operator": target, "reason": reason, "count": len({op.name for op, *_ in some}),
         "factors": list(dict.fromkeys(collapse(factor) for _, factor, _ in some))}
        for (target, reason), some in group_by(found, lambda row: (row[0].target, row[2])).items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row["reason"] != "no rule", -row["count"], row["operator"], row["reason"]))


def _kept(model: Model, forward: list[Op]) -> list[str]:
    """Return the activations that mirrors read: inputs of ops that are not linear in all inputs together."""
    read = (operand.tensor for op in forward if op.has_mirror and not op.is_sum for operand in op.inputs)
    return [name for name in dict.fromkeys(read) if model.tensors[name].kind == "activation"]


def _elements(tensors: Iterable[PTensor]) -> int:
    return sum(prod(t.shape) for t in tensors)


def _bytes(tensors: Iterable[PTensor]) -> int:
    return sum(t.nbytes for t in tensors)
