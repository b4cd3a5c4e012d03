"""The choice of the program for a batch: the smallest shape that holds it, on all ranks the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from superscaler.comm.alike import ranks
from superscaler.comm.communicator import Communicator
from superscaler.errors import InputError
from superscaler.runtime.batch import Batch, Padding, check_batch, check_batches, check_dtypes, flat
from superscaler.runtime.executor import Rank
from superscaler.runtime.replay.replays import Recorder
from superscaler.runtime.shapes.forms import Form, Saved, elements, other, sizes_of, words

# On a GPU, which is waited for, the first choices of a process are compared over the ranks, and each EVERY-th later.
FIRST, EVERY = 8, 50


class Choice:
    """The programs of a step: that of the capture, `base`, and those of other shapes, which are read when a batch needs
    them.

    `saved`: returns the plans of the other shapes.
    """

    def __init__(self, base: Form, rank: Rank) -> None:
        self.base, self._rank = base, rank
        # Records steps, and replays them.
        self._recorder: Recorder | None = None
        self.saved: Callable[[], Sequence[Saved]] = tuple
        self._listed: list[_Listed] = []
        self._calls = 0

    def replay(self, recorder: Recorder) -> None:
        """Let steps be replayed from now on. Raises InputError for a plan whose steps cannot be."""
        self._recorder = recorder
        self.base.replay(self._rank, recorder)

    @property
    def listed(self) -> list[_Listed]:
        """Return all shapes, the smallest first."""
        if not self._listed:
            found = [_Listed(self.base.plan, self.base), *(_Listed(saved.plan, saved) for saved in self.saved())]
            self._listed = sorted(found, key=lambda one: elements(one.sizes))
        return self._listed

    def of(self, given: Any, fills: bool = True) -> tuple[Form, Batch]:
        """Return the program for a batch, and the batch as it reads it; all ranks call this.

        `fills`: the batch may be filled. Raises InputError for a batch that no shape holds, and where ranks were given
        batches of other shapes.
        """
        if self.base.plan.get("iterations", 1) > 1:
            return self.base, dict(check_batches(given, self.base.plan))
        number, batch = self._fitting(given, fills)
        if len(self.listed) > 1 and self._rank.communicator.world > 1:
            self._compare(number)
        one = self.listed[number]
        if not isinstance(one.program, Form):
            one.program = other(one.program, self.base, self._rank)
            if self._recorder is not None:
                one.program.replay(self._rank, self._recorder)
        return one.program, batch

    def filled(self, given: Any) -> Batch:
        """Return a batch of the smallest shape that holds a batch."""
        return self._fitting(given, True)[1]

    def fit(self, given: Batch, fills: bool = True) -> Batch | None:
        """Return a batch of the smallest shape that holds it, None if there is none. Without `fills` it has that shape
        already.
        """
        return next((batch for batch in self.fillings(given) if fills or _shapes(batch) == _shapes(given)), None)

    @property
    def inputs(self) -> list[Mapping[str, Any]]:
        """Return the inputs of all programs, those of the smallest batch first."""
        return [one.plan["inputs"] for one in self.listed]

    def fillings(self, given: Batch) -> Iterator[Batch]:
        """Yield a batch, which may have further inputs, filled up to each shape that holds it, the smallest first."""
        for one in self.listed:
            batch = one.padding.filled(given, one.plan["inputs"])
            if one.sizes.items() <= _shapes(batch).items():
                yield batch

    def refresh(self) -> Saved | None:
        """Take the plans of shapes that were saved since; return the last one."""
        listed = self.listed
        known = {one.program.directory for one in listed}
        new = [saved for saved in self.saved() if saved.directory not in known]
        self._listed = sorted((*listed, *(_Listed(one.plan, one) for one in new)), key=lambda one: elements(one.sizes))
        return new[-1] if new else None

    def _fitting(self, given: Any, fills: bool) -> tuple[int, Batch]:
        """Return the number of the smallest shape that holds a batch, and the batch of that shape."""
        given = flat(given, self.base.plan["inputs"])
        if isinstance(given, Mapping) and all(isinstance(x, Tensor) for x in given.values()):
            exact = [number for number, one in enumerate(self.listed) if one.sizes == _shapes(given)]
            for number in exact or (range(len(self.listed)) if fills else ()):
                one = self.listed[number]
                batch = dict(given) if exact else one.padding.filled(dict(given), one.plan["inputs"])
                if _shapes(batch) == one.sizes:
                    check_batch(batch, one.plan)
                    return number, batch
        raise self._refused(given)

    def _refused(self, given: Any) -> InputError:
        """Return the error of a batch that no shape holds. Raises InputError if something else is wrong with it."""
        check_dtypes(given, self.base.plan)
        if len(self.listed) == 1:
            check_batch(given, self.base.plan)
        shapes = "; ".join(words(one.sizes) for one in self.listed)
        return InputError(
            f"a batch has {words(_shapes(given))}, but this plan has programs for {shapes}, and none is filled from "
            "it; list its shape, too: ss.compile(..., shapes=[...])."
        )

    def _compare(self, number: int) -> None:
        """Raise InputError on all ranks if one has chosen another program."""
        self._calls += 1
        communicator = self._rank.communicator
        if communicator.device.type == "cuda" and self._calls > FIRST and self._calls % EVERY:
            return
        found = _of_all(communicator, number)
        if others := [rank for rank, one in enumerate(found) if one != found[0]]:
            theirs = words(self.listed[found[others[0]]].sizes)
            raise InputError(
                f"step {self._rank.steps + 1} was given a batch for {words(self.listed[found[0]].sizes)} on rank 0 and "
                f"for {theirs} on {ranks(others)}; a plan takes the same global batch on all ranks: seed them alike, "
                "and do not share samples out."
            )


class _Listed:
    """A shape of the plan, and its program or what reads that."""

    def __init__(self, plan: Any, program: Form | Saved) -> None:
        self.plan, self.program = plan, program
        self.sizes, self.padding = sizes_of(plan), Padding.of(plan)


def _of_all(communicator: Communicator, number: int) -> list[int]:
    """Return the numbers of all ranks."""
    own = torch.zeros(communicator.world, dtype=torch.int64, device=communicator.device)
    own[communicator.rank] = number
    found: list[int] = communicator.sum_of_all(own).tolist()
    return found


def _shapes(batch: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in batch.items()}
