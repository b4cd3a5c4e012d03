"""Batches smaller than those of a plan, filled so that the training is the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Padding:
    """The filling of a batch. `rows`: the label to ignore of each input of labels, if rows may be missing. `sequences`:
    for each input with a sequence that may be shorter, its dim, and the value that fills it (None: its last).
    """

    rows: Mapping[str, int] = field(default_factory=dict)
    sequences: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)

    @staticmethod
    def of(plan: Mapping[str, Any]) -> "Padding":
        """Return the padding of a plan."""
        return Padding(plan["ignored"] if plan.get("pads") else {}, plan.get("shorter", {}))

    def filled(self, batch: Batch, inputs: Mapping[str, Any]) -> Batch:
        """Return a batch of the shapes of a plan, if this one can be filled; itself, otherwise."""
        longer = self.lengthened(batch, inputs)
        counts = {(len(longer[name]), shape[0]) for name, (shape, _) in inputs.items() if shape and longer[name].dim()}
        if not self.rows or len(counts) != 1 or not 0 < (count := min(counts)[0]) < (rows := min(counts)[1]):
            return longer
        more = {name: _end(x, 0, self.rows.get(name), rows - count) for name, x in longer.items() if x.dim()}
        return {name: torch.cat([x, more[name]]) if name in more else x for name, x in longer.items()}

    def lengthened(self, batch: Batch, inputs: Mapping[str, Any]) -> Batch:
        """Return a batch with sequences of the plan's length, if all its sequences are shorter by as much."""
        own = {name: pair for name, pair in self.sequences.items() if name in batch}
        if any(batch[name].dim() != len(inputs[name][0]) for name in own):
            return batch
        sizes = {(batch[name].shape[dim], inputs[name][0][dim]) for name, (dim, _) in own.items()}
        if len(sizes) != 1 or not 0 < (size := min(sizes)[0]) < (long := min(sizes)[1]):
            return batch
        ends = {name: _end(batch[name], dim, value, long - size) for name, (dim, value) in own.items()}
        return {name: torch.cat([x, ends[name]], own[name][0]) if name in ends else x for name, x in batch.items()}


def _end(x: Tensor, dim: int, value: int | None, count: int) -> Tensor:
    """Return so many slices of a dim, filled with a value, or copies of the last slice."""
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    last = last if value is None else torch.full_like(last, value)
    return last.expand(*(count if d == dim else size for d, size in enumerate(x.shape)))
