"""A check of the rows of a schedule: a work that is missing would run at any place that is left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod

from superscaler.errors import InputError
from superscaler.groups import group_by
from superscaler.ir.graph import Graph
from superscaler.ir.model import Op
from superscaler.ir.orders import Action


def check_rows(graph: Graph, rows: Sequence[Sequence[Action]], stages: Sequence[Sequence[Op]], where: str) -> None:
    """Raise InputError if a trained stage lacks a forward or a backward of a microbatch.

    Rows of forwards alone, or of backwards alone, order these; rows of some stages need not have all microbatches.
    """
    works = list(chain.from_iterable(rows))
    if not {"F"} < {"F" if work.kind == "F" else "B" for work in works if work.kind != "R"}:
        return
    found = group_by(works, lambda work: work.stage)
    for stage, own in found.items():
        trained = [op for op in (stages[stage] if stage < len(stages) else ()) if op.has_mirror]
        count = max((_microbatches(graph, op) for op in trained), default=0)
        has = {(work.kind, work.microbatch) for work in own}
        every = range(count) if len(found) == len(stages) else sorted({k for _, k in has if k < count})
        for k in every:
            if missing := _missing(stage, k, {kind for kind, number in has if number == k}):
                number, row = _nearest(rows, stage, k)
                raise InputError(
                    f"order at {where}: row {number} ({' '.join(map(str, row))}) has works of stage {stage}, but no "
                    f"row has {missing}, which would run at any place that is left; add it, or say so by whole=False."
                )


def _missing(stage: int, k: int, kinds: set[str]) -> str:
    if "F" not in kinds:
        return f"{stage}F{k}"
    if "I" in kinds or "W" in kinds:
        return next((f"{stage}{kind}{k}" for kind in "IW" if kind not in kinds), "")
    return "" if "B" in kinds else f"{stage}B{k} (or {stage}I{k} and {stage}W{k})"


def _nearest(rows: Sequence[Sequence[Action]], stage: int, k: int) -> tuple[int, Sequence[Action]]:
    """Return the row of a stage, that with the microbatch if there is one, and its number."""
    numbered = [(n, row) for n, row in enumerate(rows) if any(work.stage == stage for work in row)]
    with_k = [(n, row) for n, row in numbered if any((w.stage, w.microbatch) == (stage, k) for w in row)]
    return (with_k or numbered)[0]


def _microbatches(graph: Graph, op: Op) -> int:
    return prod(len(axis.sizes) for axis in graph.grids[op.name].axes if axis.is_microbatch)
