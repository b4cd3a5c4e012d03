"""Gradients in pieces, and the order in which links carry them, one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from superscaler.verbs import Graph, Group, Op


class Piece(NamedTuple):
    """A sum of gradients: the share of the backward before it, its urgency (0: most urgent), its bytes."""

    made: float
    urgency: int
    bytes: float
    group: Group


def pieces_of(graph: Graph, updates: Sequence[Op], urgency: int, size: int, made: Mapping[str, float]) -> list[Piece]:
    """Cut the gradients of updates, whose ops have one backward, into pieces of at most `size` bytes."""
    found: list[tuple[int, list[Op]]] = []
    weights = ((graph.model.tensors[op.inputs[0].tensor].nbytes, op) for op in updates)
    for weight, op in sorted(weights, key=lambda own: own[0]):
        if not found or found[-1][0] + weight > size:
            found.append((0, []))
        found[-1] = found[-1][0] + weight, [*found[-1][1], op]
    there, pieces = max(made[op.inputs[0].tensor] for op in updates), list[Piece]()
    for total, ops in found:
        count = -(-total // size)
        if count > 1:
            graph.send_in_pieces(ops[0], count)
        groups = (graph.select(ops=ops, microbatch=k, kind="C") for k in (range(count) if count > 1 else (None,)))
        pieces += (Piece(there, urgency, total / count, group) for group in groups)
    return pieces


def made(graph: Graph) -> dict[str, float]:
    """Return, for each tensor, when its gradient is complete: the share of FLOPs of the first iteration's backward."""
    found, run = dict[str, int](), 0
    for op in graph.forward_ops:
        if not op.iteration and (op.has_mirror or op.name in graph.twins):
            for operand in op.inputs:
                found.setdefault(operand.tensor, run)
            run += op.flops
    return {tensor: 1 - at / (run or 1) for tensor, at in found.items()}


def sent(pieces: Sequence[Piece], ahead: float) -> Iterator[Piece]:
    """Yield pieces in the order of the links, which carry a share `ahead` of all during the backward and the rest after
    it. A free link takes the most urgent piece that exists.

    >>> late, early = (Piece(made, urgency, 1.0, Group("C", ())) for made, urgency in ((0.1, 1), (0.5, 0)))
    >>> [[piece.urgency for piece in sent([late, late, early], ahead)] for ahead in (0.0, 0.5, 1.0)]
    [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    """
    left, ready = deque(sorted(pieces, key=lambda piece: piece.made)), list[tuple[int, int, Piece]]()
    during, now = sum(piece.bytes for piece in pieces) * ahead, float(not ahead)
    while left or ready:
        now = now if ready else max(now, left[0].made)
        while left and left[0].made <= now:
            heappush(ready, (left[0].urgency, -len(left), left.popleft()))
        *_, piece = heappop(ready)
        now += piece.bytes / during if during else 0
        yield piece
