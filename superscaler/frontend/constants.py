"""Evaluate what depends on no input and no parameter, and simplify what its values allow (causal masks)."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from superscaler.frontend.trace import Call, Spec, Trace, Var, aten, substitute, variables

# These read only the shape of their operand.
_SHAPE_ONLY = aten(True, "new_ones new_zeros new_full new_empty zeros_like ones_like full_like empty_like")
# These hold one number, the last of their arguments where it is None here; it is never laid out in memory.
_FILLS: dict[str, int | None] = {
    **aten(1, "ones new_ones ones_like"),
    **aten(0, "zeros new_zeros zeros_like"),
    **aten(None, "full new_full full_like"),
}


def fold(trace: Trace, device: torch.device) -> None:
    """Replace every call on constants by its value, computed on `device`; buffers without data stay in the graph."""
    constants = {
        n: v for n, v in trace.values.items() if trace.kinds[n] in ("buffer", "constant") and n not in trace.writes
    }
    _merge(trace, set(constants))
    last = {name: k for k, call in enumerate(trace.calls) for name in call.reads()}
    kept: list[Call] = []
    needed = trace.results
    for k, call in enumerate(trace.calls):
        if _is_constant(call, constants):
            results = _evaluate(trace, call, constants, device)
            constants.update(zip(call.outputs, results, strict=True))
        else:
            kept.append(call)
            needed.update(call.reads())
        for name in call.reads():
            if last[name] == k and name not in needed and name not in trace.kinds:
                constants.pop(name, None)
    trace.calls = kept
    _store(trace, {n: v for n, v in constants.items() if n in needed and n not in trace.kinds})


def _merge(trace: Trace, constants: set[str]) -> None:
    """Drop calls on constants that equal an earlier one: layers compute the same masks again."""
    first: dict[str, tuple[str, ...]] = {}
    same: dict[str, str] = {}
    kept = []
    for call in (rename(c, same) for c in trace.calls):
        if _is_constant(call, constants):
            constants.update(call.outputs)
            earlier = first.setdefault(repr((call.target, call.args, call.kwargs)), call.outputs)
            same.update(zip(call.outputs, earlier, strict=True))
            if earlier is not call.outputs:
                continue
        kept.append(call)
    trace.calls = kept
    trace.rename_results(same)


def _is_constant(call: Call, constants: Container[str]) -> bool:
    if torch.Tag.nondeterministic_seeded in call.function.tags:
        return False
    return call.target in _SHAPE_ONLY or all(name in constants for name in call.reads())


def _evaluate(trace: Trace, call: Call, constants: dict[str, Tensor], device: torch.device) -> list[Tensor]:
    if call.target in _FILLS:
        number, spec = _FILLS[call.target], trace.specs[call.outputs[0]]
        fill = call.args[-1] if number is None else number
        return [torch.full((), fill, dtype=spec.dtype, device=device).expand(spec.shape)]
    # Elements that repeat are computed once. torch does not tag the operators that are named after Python's.
    is_pointwise = torch.Tag.pointwise in call.function.tags or call.target.startswith("aten.__")

    def value(variable: Var) -> Tensor:
        found = constants.get(variable.name)
        if found is not None:
            return compact(found) if is_pointwise else found
        spec = trace.specs[variable.name]
        return torch.zeros((), dtype=spec.dtype, device=device).expand(spec.shape)

    kwargs = {k: device if isinstance(v, torch.device) else v for k, v in substitute(call.kwargs, value).items()}
    with torch.no_grad(), device:
        result = call.function(*substitute(call.args, value), **kwargs)
    results = [result] if isinstance(result, Tensor) else result
    return [_repeated(t).expand(trace.specs[n].shape) for t, n in zip(results, call.outputs, strict=True)]


def _repeated(x: Tensor) -> Tensor:
    """Return the tensor with stride 0 in the dims along which it repeats: a mask of a whole batch is one row of it."""
    kept = compact(x)
    for d, size in enumerate(kept.shape):
        row, last = (kept.narrow(d, k, min(size, 1)) for k in (0, max(size - 1, 0)))
        # The last row tells most that differ without a look at the rest.
        if size > 1 and torch.equal(row, last) and bool((kept == row).all()):
            kept = row
    return kept.clone().expand(x.shape) if kept.shape != x.shape else x


def compact(x: Tensor) -> Tensor:
    """Return the first element of each dim that repeats, the dims kept."""
    return x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]


def _store(trace: Trace, constants: dict[str, Tensor]) -> None:
    """Keep the constants that calls read, equal ones once. Of one number everywhere, readers expand a scalar."""
    masks = {name for call in trace.calls if "attention" in call.target for name in call.reads()}
    shapes = {name: tuple(v.shape) for name, v in constants.items() if _is_filled(v) and name not in masks}
    constants = {name: v.reshape(-1)[0] if name in shapes else v for name, v in constants.items()}
    first: dict[Any, str] = {}
    same: dict[str, str] = {}
    for name, value in constants.items():
        small = compact(value).cpu().clone(memory_format=torch.contiguous_format)
        key = (value.dtype, tuple(value.shape), tuple(small.shape), small.flatten().view(torch.uint8).numpy().tobytes())
        same[name] = first.setdefault(key, name)
        if same[name] == name:
            trace.kinds[name] = "constant"
            trace.specs[name] = Spec(tuple(value.shape), value.dtype)
            trace.values[name] = value
    trace.calls = [new for call in trace.calls for new in _expanded(trace, call, same, shapes)]
    trace.rename_results(same)


def _is_filled(value: Tensor) -> bool:
    return value.numel() > 1 and value.dtype.is_floating_point and not any(value.stride())


def _expanded(trace: Trace, call: Call, same: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> list[Call]:
    """Return the call that reads the constants that are kept, after the calls that expand its scalars again."""
    calls: list[Call] = []
    names = {name: same[name] for name in call.reads() if name in same}
    for name in [n for n in names if n in shapes]:
        scalar, names[name] = Var(names[name]), trace.derive(name, "whole")
        trace.specs[names[name]] = Spec(shapes[name], trace.specs[scalar.name].dtype)
        expand = call.becomes("aten.expand.default", scalar, shapes[name])
        calls.append(replace(expand, name=names[name], outputs=(names[name],)))
    return [*calls, rename(call, names)]


def rename(call: Call, names: dict[str, str]) -> Call:
    """Return the call with the tensors that it reads renamed."""
    if not any(v.name in names for v in variables((call.args, call.kwargs))):
        return call

    def swap(variable: Var) -> Var:
        return Var(names.get(variable.name, variable.name))

    return replace(call, args=substitute(call.args, swap), kwargs=substitute(call.kwargs, swap))


def kind_of_mask(mask: Tensor) -> str:
    """Return "open" for a mask [..., queries, keys] that hides nothing, "causal" for one that hides the future, or "".

    A causal mask lets each query see the keys up to its own number, and no other.
    """
    seen = _seen(compact(mask))
    if seen is None:
        return ""
    if bool(seen.all()):
        return "open"
    past = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return "causal" if bool((seen == past).all()) else ""


def _seen(mask: Tensor) -> Tensor | None:
    """Return which keys a query sees; None for a mask that is added and holds more than 0 and "minus infinity"."""
    if mask.dim() < 2:
        return None
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return ~hidden if bool((hidden | (mask == 0)).all()) else None
