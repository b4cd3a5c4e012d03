"""What a lowering depends on beside the transfer itself."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from superscaler.ir.graph import PTensor
from superscaler.ir.spmd import Fold, Unfoldable
from superscaler.materialize.rvd.paths import Cache
from superscaler.materialize.rvd.transitions import Costs
from superscaler.schedule.loops import Steady
from superscaler.schedule.transfers import BACKWARD, Transfer


@dataclass(frozen=True)
class Context:
    """The tensors, those of them that depend on weights only, what exchanges cost, which devices are `close`, and the
    fold of which transfers show the compiled places. `overlaps`: gradients of weights go while others are computed.
    With `steady` transfers show the first microbatches, by which values and messages are named. `turns` has for
    updates, by home number and piece, in which orders of communication they are. `paths` keeps what was searched.
    """

    tensors: Mapping[str, PTensor]
    from_weights: frozenset[str]
    costs: Costs
    close: Fold | None = None
    fold: Fold | None = None
    overlaps: bool = True
    steady: Steady | None = None
    turns: Mapping[tuple[int, int], Hashable] = field(default_factory=dict)
    paths: Cache = field(default_factory=dict)

    def dtype(self, transfer: Transfer, *, trained: bool = False) -> str:
        """Return the dtype of what a transfer moves: gradients that are summed over microbatches are never halves.

        `trained`: that of the model that trains, by which is chosen how, where this is its copy in another dtype.
        """
        tensor = self.tensors[transfer.tensor]
        tensor = tensor.trained if trained else tensor
        is_summed = transfer.kind == BACKWARD and transfer.tensor in self.from_weights
        return tensor.wide_dtype if is_summed else tensor.dtype

    def turn(self, transfer: Transfer) -> Hashable:
        """Return in which orders of communication a transfer is."""
        place = transfer.readers[0].places[0]
        return self.turns.get((place.segment, place.number), ()) if transfer.is_to_updates else ()

    def is_told(self, *devices: int) -> bool:
        """Tell whether the code of devices between which something goes is written: of all of them, or of none."""
        if self.fold is None or self.fold.told.issuperset(devices):
            return True
        if not self.fold.told.isdisjoint(devices):
            raise Unfoldable(self.fold.spanned(devices)[0])
        return False
