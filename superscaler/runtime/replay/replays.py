"""A step that is recorded once, and then replayed: the host starts all of its kernels and messages at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Protocol, TypeVar

from torch import Tensor

from superscaler.runtime.executor import Rank
from superscaler.runtime.replay.static import Static
from superscaler.runtime.replayable.reads import Reads
from superscaler.specs.options import SCHEDULED

T = TypeVar("T")
# Steps that run as they are before one is recorded: they connect the ranks, compile segments, and make the states of
# the optimizer.
WARM = 2


class Recorder(Protocol):
    """Records what runs on a device."""

    def warm(self, run: Callable[[], T]) -> T:
        """Run it where it will be recorded."""

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record it without running it. Return its results, whose tensors get values by the second result."""


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A recorded step: what it depends on, its tensors of state, its results, and what it adds to counts of a rank."""

    key: Hashable
    state: Sequence[Tensor]
    loss: Tensor
    beside: Tensor | None
    norm: Tensor | float | None
    outputs: dict[str, Tensor]
    counts: Sequence[int]
    replay: Callable[[], None]


class Replays:
    """Runs the steps of a rank: a few as they are, then one that is recorded, and replays of this.

    A step is recorded anew where tensors of the optimizer's state were replaced, as by a checkpoint, and where a number
    changes that a recorded step cannot read: `clip`, `ema`, and options of parameter groups but the learning rate.
    """

    def __init__(self, rank: Rank, recorder: Recorder) -> None:
        self.rank, self._recorder = rank, recorder
        self._static = Static(rank)
        self._recorded: _Recorded | None = None
        # The steps that ran since the last change, and whether the last one has replaced no state.
        self._ran, self._is_settled = 0, False
        self._key: Hashable = None
        self._has_run = False

    @property
    def is_recorded(self) -> bool:
        """Return whether the next step is a replay, if nothing changes."""
        return self._recorded is not None

    def __call__(self, function: Callable[[Rank], Tensor]) -> Tensor:
        """Run a step of the rank, whose batch is set, and return its loss."""
        self._static.fill()
        key, state = self._present_key(), self._state()
        if key != self._key or (self._recorded is not None and not _same(self._recorded.state, state)):
            self._recorded, self._key, self._ran = None, key, 0
        if self._recorded is None and (self._ran < WARM or not self._is_settled):
            return self._warm(function, state)
        if self._recorded is None:
            self._recorded = self._record(function, key, state)
        return self._replay(self._recorded)

    def _warm(self, function: Callable[[Rank], Tensor], state: Sequence[Tensor]) -> Tensor:
        def run() -> Tensor:
            # The first step is looked at, before it changes anything.
            with nullcontext() if self._has_run else Reads(refuses=True):
                return function(self.rank)

        with self._static.read():
            loss = self._recorder.warm(run)
        self._ran, self._has_run = self._ran + 1, True
        self._is_settled = not self.rank.updates.has_skipped and _same(state, self._state())
        return loss.clone()

    def _record(self, function: Callable[[Rank], Tensor], key: Hashable, state: Sequence[Tensor]) -> _Recorded:
        rank, updates = self.rank, self.rank.updates

        def run() -> Tensor:
            loss = function(rank)
            # What was started in a recording ends in it.
            rank.communicator.flush()
            return loss

        rank.communicator.flush()
        before = self._counts()
        updates.is_recorded = True
        try:
            with self._static.read():
                loss, replay = self._recorder.record(run)
        finally:
            updates.is_recorded = False
        counts = [after - count for after, count in zip(self._counts(), before, strict=True)]
        self._count([-count for count in counts])
        assert _same(state, self._state()), "a recorded step has replaced states of the optimizer"
        return _Recorded(key, state, loss, rank.beside, updates.last_norm, dict(rank.outputs), counts, replay)

    def _replay(self, made: _Recorded) -> Tensor:
        made.replay()
        self._count(made.counts)
        self.rank.beside, self.rank.updates.last_norm = made.beside, made.norm
        # A step that is not replayed may have other outputs.
        self.rank.outputs = {name: x.clone() for name, x in made.outputs.items()}
        return made.loss.clone()

    def _counts(self) -> tuple[int, ...]:
        rank, communicator = self.rank, self.rank.communicator
        return rank.steps, rank.works, communicator.moved, communicator.bytes_outside_plan

    def _count(self, more: Sequence[int]) -> None:
        rank, communicator = self.rank, self.rank.communicator
        steps, works, moved, outside = more
        rank.steps, rank.works = rank.steps + steps, rank.works + works
        communicator.moved += moved
        communicator.bytes_outside_plan += outside

    def _present_key(self) -> Hashable:
        updates = self.rank.updates
        groups = [] if updates.optimizer is None else updates.optimizer.param_groups
        changed = ("params", "lr", *SCHEDULED)
        options = [(k, repr(x)) for group in groups for k, x in group.items() if k not in changed]
        return updates.clip, updates.ema, updates.keep_gradients, tuple(options)

    def _state(self) -> list[Tensor]:
        """Return the tensors that last over steps."""
        updates = self.rank.updates
        states = [] if updates.optimizer is None else updates.optimizer.state.values()
        found = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        return [*self.rank.weights.values(), *found, *(updates.scaler.tensors if updates.scaler else ())]


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
