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
        """Return a batch with sequences of the plan's lengths, if all of a length are shorter by as much.

        >>> padding = Padding(sequences={"ids": (1, None), "mask": (1, 0), "labels": (1, -100)})
        >>> short = {"ids": torch.tensor([[5, 6]]), "mask": torch.tensor([[1, 1]]), "labels": torch.tensor([[7]])}
        >>> whole = {"ids": ((1, 4), "int64"), "mask": ((1, 4), "int64"), "labels": ((1, 3), "int64")}
        >>> [x.tolist() for x in padding.lengthened(short, whole).values()]
        [[[5, 6, 6, 6]], [[1, 1, 0, 0]], [[7, -100, -100]]]
        >>> padding.lengthened({**short, "mask": torch.tensor([[1]])}, whole)["ids"].tolist()
        [[5, 6]]
        """
        own = {name: pair for name, pair in self.sequences.items() if name in batch}
        if any(batch[name].dim() != len(inputs[name][0]) for name in own):
            return batch
        sizes = {(inputs[name][0][dim], batch[name].shape[dim]) for name, (dim, _) in own.items()}
        if len(sizes) > len(dict(sizes)) or any(not 0 < size <= long for long, size in sizes):
            return batch
        longer = dict(batch)
        for name, (dim, value) in own.items():
            if missing := inputs[name][0][dim] - batch[name].shape[dim]:
                longer[name] = torch.cat([batch[name], _end(batch[name], dim, value, missing)], dim)
        return longer


def _end(x: Tensor, dim: int, value: int | None, count: int) -> Tensor:
    """Return so many slices of a dim, filled with a value, or copies of the last slice."""
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    last = last if value is None else torch.full_like(last, value)
    return last.expand(*(count if d == dim else size for d, size in enumerate(x.shape)))
