"""Packed projections of unequal parts: a dim that is only ever read in segments becomes one tensor per segment.

Slices of a projection's result move up to its weight (`x W` sliced is `x` times a slice of W), so that each segment has
indices of its own and can be cut separately. The weight becomes one parameter per segment.
"""

from collections.abc import Container, Mapping
from itertools import pairwise
from math import prod

from torch.fx import Node

from superscaler.frontend.base.trace import Trace, argument, outputs, reads, shape_of, target_of
from superscaler.ir.model import CAST
from superscaler.ir.names import unique

# The cut of a tensor: its dim, and the bounds of its segments, from 0 on.
Cut = tuple[int, tuple[int, ...]]
# piece -> (parameter, dim, start, end)
Segments = dict[str, tuple[str, int, int, int]]

# Products with a weight -> the dim of the weight that becomes the last one of the result.
_PRODUCTS = {"aten.linear.default": 0, "aten.mm.default": 1, "aten.matmul.default": 1}
_ELEMENTWISE = ("aten.add.Tensor", "aten.mul.Tensor", CAST)


def cut_segments(trace: Trace, kept: Container[str]) -> Segments:
    """Cut every packed weight, but for those that are `kept`, into its segments, in place. Returns the pieces."""
    pieces: Segments = {}
    while chains := _find(trace, kept):
        _cut(trace, chains, pieces)
    return pieces


def _find(trace: Trace, kept: Container[str]) -> dict[Node, Cut]:
    """Return the tensors that are only read in segments, from packed weights down to the operands of slices."""
    found: dict[Node, Cut] = {}
    for node in trace.calls():
        packed = reads(node)[0] if target_of(node) in _SLICES else node
        if packed is not node and "kind" not in packed.meta and packed not in found:
            cut = _segments(packed)
            chain = (cut and _chain(packed, cut)) or {}
            found.update({} if any(x.name in kept for x in chain) else chain)
    return found


_TRANSPOSES = ("aten.t.default", "aten.transpose.int", "aten.permute.default")
_VIEWS = ("aten.view.default", "aten._unsafe_view.default")
_SLICES = ("aten.slice.Tensor", "aten.split_with_sizes.default", "aten.split.Tensor")


def _segments(packed: Node) -> Cut | None:
    """Return the cut that all readers of a tensor make together, if they read segments of one dim and all of it."""
    ranges: dict[tuple[int, int], None] = {}
    dims = set()
    for node in packed.users:
        if node.op == "output" or target_of(node) not in _SLICES or len(node.args) > 4:
            return None
        dim, found = _ranges(node)
        dims.add(dim)
        ranges.update(dict.fromkeys(found))
    ordered = sorted(ranges)
    ends = (0, *(end for _, end in ordered))
    tiled = all(start == end for (start, _), end in zip(ordered, ends, strict=False))
    whole = ends[-1] == shape_of(packed)[min(dims)]
    # Equal segments of one split are a product of indices, which needs no cut.
    equal = len({end - start for start, end in ordered}) == 1 and len(packed.users) == 1
    return (dims.pop(), ends) if len(dims) == 1 and len(ends) > 2 and tiled and whole and not equal else None


def _ranges(node: Node) -> tuple[int, list[tuple[int, int]]]:
    """Return the dim that a slice or split cuts, and the range of each of its results."""
    shape = shape_of(reads(node)[0])
    is_slice = target_of(node) == "aten.slice.Tensor"
    dim = argument(node, 1 if is_slice else 2, "dim", 0) % len(shape)
    sizes = [shape_of(x)[dim] for x in outputs(node)]
    if not is_slice:
        ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
        return dim, list(pairwise(ends))
    start = min(max(s + shape[dim] if (s := argument(node, 2, "start") or 0) < 0 else s, 0), shape[dim])
    return dim, [(start, start + sizes[0])]


def _chain(node: Node, cut: Cut) -> dict[Node, Cut] | None:
    """Return the cut of each tensor from a packed weight to this one; None if one has no segments."""
    if "kind" in node.meta:
        return {node: cut} if node.meta["kind"] == "parameter" else None
    found = {node: cut}
    for operand, above in _above(node, cut).items():
        chain = _chain(operand, above) if len(operand.users) == 1 else None
        if chain is None:
            return None
        found.update(chain)
    return found if len(found) > 1 else None


def _above(node: Node, cut: Cut) -> dict[Node, Cut]:
    """Return the cuts of a call's operands when its result is cut; nothing if no cut can pass the call."""
    (dim, ends), name, operands = cut, target_of(node), reads(node)
    after = shape_of(node)
    rank = len(after)
    if name in _PRODUCTS and dim == rank - 1 and len(shape_of(operands[1])) == 2:
        return {operands[1]: (_PRODUCTS[name], ends)}
    if name in _TRANSPOSES and rank == 2 and shape_of(operands[0]) != after:
        return {operands[0]: (1 - dim, ends)}
    if name in _ELEMENTWISE and "alpha" not in node.kwargs:
        own = {x: dim - rank + len(shape_of(x)) for x in operands}
        return {x: (d, ends) for x, d in own.items() if d >= 0 and shape_of(x)[d] == ends[-1]}
    if name in _VIEWS:
        before = shape_of(operands[0])
        inner, rest = prod(after[dim + 1 :]), 1
        for d in range(len(before) - 1, -1, -1):
            # `dim` and some dims behind it come from one dim of the operand, with `dim` as the outermost.
            width = inner // rest
            if inner % rest == 0 and before[d] == ends[-1] * width and prod(before[:d]) == prod(after[:dim]):
                return {operands[0]: (d, tuple(end * width for end in ends))}
            rest *= before[d]
    return {}


def _cut(trace: Trace, chains: Mapping[Node, Cut], pieces: Segments) -> None:
    """Replace these tensors by their segments, and the results of slices by a segment."""
    segments: dict[Node, list[Node]] = {}
    for node in [n for n in (*trace.leaves("parameter"), *trace.calls()) if n in chains]:
        count = len(chains[node][1]) - 1
        segments[node] = [_segment(trace, node, chains[node], k, segments, pieces) for k in range(count)]
    for packed, (_, ends) in chains.items():
        for node in list(packed.users):
            if node not in chains:
                trace.replace(node, *(segments[packed][ends.index(start)] for start, _ in _ranges(node)[1]))
    for node in reversed(segments):
        trace.graph.erase_node(node)


def _segment(trace: Trace, node: Node, cut: Cut, k: int, segments: Mapping[Node, list[Node]], pieces: Segments) -> Node:
    """Return segment `k` of a tensor: a parameter of its own, or the call that makes it."""
    dim, ends = cut
    start, size = ends[k], ends[k + 1] - ends[k]
    value = node.meta["val"].narrow(dim, start, size)
    if node.op == "placeholder":
        known = node.meta.get("value")
        known = known if known is None else known.narrow(dim, start, size)
        own = trace.leaf(unique(f"{node.name}.{k}", trace.taken), "parameter", value, known)
        pieces[own.name] = (node.name, dim, start, start + size)
        return own
    with trace.graph.inserting_before(node):
        own = trace.graph.node_copy(node, lambda x: segments[x][k] if x in segments else x)
    own.name, own.meta["val"] = trace.derive(node.name, f"segment{k}"), value
    own.meta.pop("op", None)
    if target_of(node) in _VIEWS:
        own.args = (own.args[0], tuple(value.shape))
    return own
