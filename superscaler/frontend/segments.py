"""Packed projections of unequal parts: a dim that is only ever read in segments becomes one tensor per segment.

The slices of a projection's result move up to its weight (`x W` sliced is `x` times a slice of W), so that each segment
has indices of its own and can be cut apart. The weight becomes one parameter per segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod

from superscaler.frontend.constants import rename
from superscaler.frontend.trace import Call, Spec, Trace

# Where a tensor is cut: the dim, and where its segments end, from 0 on.
Cut = tuple[int, tuple[int, ...]]
# piece -> (the parameter that it is a piece of, dim, start, end)
Segments = dict[str, tuple[str, int, int, int]]

_ELEMENTWISE = ("aten.add.Tensor", "aten.mul.Tensor", "aten._to_copy.default")


def cut_segments(trace: Trace) -> Segments:
    """Cut every packed weight into its segments, in place. Returns the pieces."""
    pieces: Segments = {}
    while chains := _find(trace):
        _cut(trace, chains, pieces)
    return pieces


def _find(trace: Trace) -> dict[str, Cut]:
    """Return the tensors that are only read in segments, from packed weights down to what slices read."""
    readers: dict[str, list[Call]] = {}
    for call in trace.calls:
        for name in dict.fromkeys(call.reads()):
            readers.setdefault(name, []).append(call)
    producers = {name: call for call in trace.calls for name in call.outputs}
    found: dict[str, Cut] = {}
    for call in trace.calls:
        name = call.args[0].name if call.target in _SLICES else ""
        if name in producers and name not in found and name not in trace.results:
            cut = _segments(trace, readers[name])
            found.update((cut and _chain(trace, producers, readers, name, cut)) or {})
    return found


_TRANSPOSES = ("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.numpy_T.default")
_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_SLICES = ("aten.slice.Tensor", "aten.split_with_sizes.default", "aten.split.Tensor")


def _segments(trace: Trace, calls: list[Call]) -> Cut | None:
    """Return how these calls together cut a tensor, if each reads segments of one dim, and all of it is read."""
    ranges: dict[tuple[int, int], None] = {}
    dims = set()
    for call in calls:
        if call.target not in _SLICES or len(call.args) > 4:
            return None
        dim, found = _ranges(trace, call)
        dims.add(dim)
        ranges.update(dict.fromkeys(found))
    ordered = sorted(ranges)
    ends = (0, *(end for _, end in ordered))
    tiled = all(start == end for (start, _), end in zip(ordered, ends, strict=False))
    whole = ends[-1] == trace.specs[calls[0].args[0].name].shape[min(dims)]
    # Equal segments of one split are a product, which needs no cutting.
    equal = len({end - start for start, end in ordered}) == 1 and len(calls) == 1
    return (dims.pop(), ends) if len(dims) == 1 and len(ends) > 2 and tiled and whole and not equal else None


def _ranges(trace: Trace, call: Call) -> tuple[int, list[tuple[int, int]]]:
    """Return the dim that a slice or split cuts, and the range of each of its results."""
    shape = trace.specs[call.args[0].name].shape
    is_slice = call.target == "aten.slice.Tensor"
    dim = call.argument(1 if is_slice else 2, "dim", 0) % len(shape)
    sizes = [trace.specs[name].shape[dim] for name in call.outputs]
    if not is_slice:
        ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
        return dim, list(pairwise(ends))
    start = min(max(s + shape[dim] if (s := call.argument(2, "start") or 0) < 0 else s, 0), shape[dim])
    return dim, [(start, start + sizes[0])]


def _chain(
    trace: Trace, producers: Mapping[str, Call], readers: Mapping[str, list[Call]], name: str, cut: Cut
) -> dict[str, Cut] | None:
    """Return where each tensor from a packed weight to `name` is cut; None where one is not made of segments."""
    if trace.kinds.get(name) == "parameter":
        return {name: cut} if len(readers[name]) == 1 else None
    call = producers.get(name)
    if call is None:
        return None
    found = {name: cut}
    for operand, above in _above(trace, call, cut).items():
        chain = _chain(trace, producers, readers, operand, above) if len(readers[operand]) == 1 else None
        if chain is None:
            return None
        found.update(chain)
    return found if len(found) > 1 else None


def _above(trace: Trace, call: Call, cut: Cut) -> dict[str, Cut]:
    """Return how the operands of a call are cut when its result is; nothing where the call does not let a cut pass."""
    dim, ends = cut
    shapes = {name: trace.specs[name].shape for name in call.reads()}
    rank = len(trace.specs[call.outputs[0]].shape)
    if call.target == "aten.linear.default" and dim == rank - 1:
        return {call.args[1].name: (0, ends)}
    if call.target == "aten.mm.default" and dim == 1:
        return {call.args[1].name: (1, ends)}
    if call.target == "aten.matmul.default" and dim == rank - 1 and len(shapes[call.args[1].name]) == 2:
        return {call.args[1].name: (1, ends)}
    if call.target in _TRANSPOSES and rank == 2 and shapes[call.args[0].name] != trace.specs[call.outputs[0]].shape:
        return {call.args[0].name: (1 - dim, ends)}
    if call.target in _ELEMENTWISE and not {"alpha"} & set(call.kwargs):
        own = {name: dim - rank + len(shape) for name, shape in shapes.items()}
        return {name: (d, ends) for name, d in own.items() if d >= 0 and shapes[name][d] == ends[-1]}
    if call.target in _VIEWS:
        before, after = shapes[call.args[0].name], trace.specs[call.outputs[0]].shape
        inner, rest = prod(after[dim + 1 :]), 1
        for d in range(len(before) - 1, -1, -1):
            # The dim of the operand that `dim` and some dims behind it are made of, `dim` being the outermost.
            width = inner // rest
            if inner % rest == 0 and before[d] == ends[-1] * width and prod(before[:d]) == prod(after[:dim]):
                return {call.args[0].name: (d, tuple(end * width for end in ends))}
            rest *= before[d]
    return {}


def _cut(trace: Trace, chains: Mapping[str, Cut], pieces: Segments) -> None:
    """Replace these tensors by their segments, and what slices of them make by a segment."""
    names = {
        name: [_segment(trace, name, cut, k, pieces) for k in range(len(cut[1]) - 1)] for name, cut in chains.items()
    }
    for name in names:
        trace.kinds.pop(name, None)
        trace.values.pop(name, None)
    same: dict[str, str] = {}
    calls: list[Call] = []
    for call in trace.calls:
        packed = call.args[0].name if call.target in _SLICES else ""
        if packed in names:
            for out, (start, _) in zip(call.outputs, _ranges(trace, call)[1], strict=True):
                same[out] = names[packed][chains[packed][1].index(start)]
            continue
        for k, out in enumerate(names.get(call.outputs[0], ())):
            part = rename(call, {name: own[k] for name, own in names.items()})
            args = (part.args[0], trace.specs[out].shape) if call.target in _VIEWS else part.args
            calls.append(replace(part, name=out, args=args, outputs=(out,)))
        if call.outputs[0] not in names:
            calls.append(rename(call, same))
    trace.calls = calls
    trace.rename_results(same)


def _segment(trace: Trace, name: str, cut: Cut, k: int, pieces: Segments) -> str:
    """Add segment `k` of a tensor to the trace, and return its name."""
    (dim, ends), spec = cut, trace.specs[name]
    start, end = ends[k], ends[k + 1]
    is_weight = trace.kinds.get(name) == "parameter"
    own = trace.fresh(f"{name}.{k}") if is_weight else trace.derive(name, f"segment{k}")
    trace.specs[own] = Spec((*spec.shape[:dim], end - start, *spec.shape[dim + 1 :]), spec.dtype)
    if is_weight:
        trace.kinds[own] = "parameter"
        pieces[own] = (name, dim, start, end)
        if name in trace.values:
            trace.values[own] = trace.values[name].narrow(dim, start, end - start)
    return own
