"""Batches of a user's data: a data set of samples, shuffled by the seed, or batches in the order in which they come."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from superscaler.errors import InputError, a, named, some
from superscaler.replaced import own_numbers
from superscaler.runtime.batch import Batch, in_dtype, rows_read
from superscaler.runtime.shapes.choice import Choice
from superscaler.runtime.shapes.forms import words
from superscaler.specs.arguments import fits
from superscaler.specs.user_file import from_file

if TYPE_CHECKING:
    from superscaler.runtime.step import Step


def feed(step: Step, data: Path | Any, seed: int, say: Callable[[str], None] = print) -> Callable[[int], Batch]:
    """Return a function from step number to batch. `data`: `FILE.py:function`, or the function's result; see `batches`.

    Step numbers must rise. `say` gets a line for each sort of batch that is left out. The function of the file may draw
    numbers: all ranks, and the ranks that resume, draw the same ones.
    """
    make = from_file(str(data), "data", may_yield=True, is_new=False) if isinstance(data, Path) else lambda: data
    if isinstance(data, Path):
        for set_seed, largest in ((random.seed, 2**64), (np.random.seed, 2**32), (torch.manual_seed, 2**64)):
            set_seed(seed % largest)
    made = make()
    if _is_samples(made, step):
        return Samples(step, made, seed).at
    return Stream(step, made, make, seed, say).at


def batches(step: Step, data: Any, seed: int = 0) -> Iterator[Batch]:
    """Yield the batches of a step from its next one on, without end; after `step.restore`, from the first unseen one.

    `data`: a data set (samples by number, each a dict by the names of the inputs), or any iterable of batches, as a
    DataLoader. Each rank reads the rows of a data set that its plan reads, in an order by epoch and seed.
    """
    if not hasattr(step, "plan"):
        raise InputError(f"batches needs the step that ss.load returns, not {named(step)}.")
    if not fits(seed, int):
        raise InputError(f"batches: seed is {named(seed)}; give a whole number.")
    return _batches(step, feed(step, data, seed))


def _batches(step: Step, at: Callable[[int], Batch]) -> Iterator[Batch]:
    number = step.state.steps
    while True:
        yield at(number)
        number += 1


class Samples:
    """A data set with a length and samples by number. The last batch of an epoch is filled, or else left out. What a
    sample draws depends on the seed, the epoch and its number only: not on the rows that a rank reads, nor on a resume.
    Of a plan with several shapes a rank reads all rows, and fills them up to the smallest shape that holds them.

    `read`: how many samples this rank has read.
    """

    def __init__(self, step: Step, data: Any, seed: int) -> None:
        self._inputs, self._data, self._seed, self.read = step.inputs, data, seed, 0
        self._padding = step.padding
        counts = {shape[0] if shape else 0 for shape, _ in step.inputs.values()}
        if len(counts) != 1 or 0 in counts:
            raise InputError(
                "samples are the rows of all inputs, but those of this plan have different numbers of rows; give an "
                "iterable of batches."
            )
        (self._count,) = counts
        if len(data) < self._count:
            raise InputError(f"the data has {len(data)} samples, but one batch of this plan has {self._count}.")
        self._choice = step.choice if len(step.choice.listed) > 1 else None
        self._rows = rows_read(step.plan, step.rank)
        if step.alike is not None and self._choice is None:
            step.alike.has_own_rows = True
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    def at(self, number: int) -> Batch:
        """Return the batch of a step; rows that this rank does not read are zeros."""
        size = len(self._data)
        epoch, place = divmod(number, -(-size // self._count) if self._padding.rows else size // self._count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(size)
        if self._choice is not None:
            return self._whole(self._choice, epoch, place * self._count)
        batch = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in self._inputs.items()}
        with own_numbers():
            for row in sorted(set[int]().union(*self._rows.values())):
                position = place * self._count + row
                sample = self._sample(epoch, position)
                read = [name for name, rows in self._rows.items() if row in rows]
                own = {name: in_dtype(name, sample[name], self._inputs[name][1])[None] for name in read}
                for name, value in self._padding.lengthened(own, self._inputs).items():
                    _put(batch[name], row, name, value[0])
                    if position >= size and name in self._padding.rows:
                        batch[name][row] = self._padding.rows[name]
        return batch

    def _whole(self, choice: Choice, epoch: int, start: int) -> Batch:
        """Return a batch of the rows from a position on, of the smallest shape that holds each of them."""
        with own_numbers():
            rows = [self._sample(epoch, start + row) for row in range(min(self._count, len(self._data) - start))]
        found = [{n: in_dtype(n, row[n], dtype)[None] for n, (_, dtype) in self._inputs.items()} for row in rows]
        for inputs in choice.inputs:
            filled = [self._padding.lengthened(row, inputs) for row in found]
            if all(tuple(x.shape[1:]) == tuple(inputs[n][0][1:]) for row in filled for n, x in row.items()):
                batch = {name: torch.cat([row[name] for row in filled]) for name in self._inputs}
                if (whole := choice.fit(batch)) is not None:
                    return whole
        shapes = "; ".join(words({n: shape for n, (shape, _) in inputs.items()}) for inputs in choice.inputs)
        raise InputError(
            f"samples {start} to {start + len(rows) - 1} of epoch {epoch} fit none of the shapes of this plan, "
            f"{shapes}; pad or cut them, or list a shape for them."
        )

    def _sample(self, epoch: int, position: int) -> Any:
        """Read a sample, with random numbers of its own."""
        number = int(np.random.SeedSequence([self._seed, epoch, position]).generate_state(1)[0])
        # Not torch.manual_seed, which sets those of GPUs too.
        for set_seed in (random.seed, np.random.seed, torch.default_generator.manual_seed):
            set_seed(number)
        sample = self._data[int(self._order[min(position, len(self._data) - 1)])]
        self.read += 1
        check_names(sample, self._inputs, "a sample")
        return sample


class Stream:
    """Batches in their own order, again and again; an iterator that can be read once is made anew."""

    def __init__(self, step: Step, made: Any, make: Callable[[], Any], seed: int, say: Callable[[str], None]) -> None:
        if not isinstance(made, Iterable):
            raise InputError(
                f"data is {a(type(made).__name__)}; give a data set of samples, or an iterable of batches."
            )
        self._made, self._make, self._seed = made, make, seed
        self._choice = step.choice
        self._inputs = step.inputs
        self._say = say if step.rank == 0 else (lambda _: None)
        self._number, self._epoch = 0, 0
        self._batches = self._start()

    def at(self, number: int) -> Batch:
        """Return the batch of a step; earlier batches are read, too."""
        while True:
            batch = self._next()
            self._number += 1
            if self._number > number:
                return batch

    def _start(self) -> Iterator[Batch]:
        # All ranks shuffle alike.
        torch.manual_seed((self._seed + self._epoch) % 2**64)
        return fitting(self._made, self._choice, self._say)

    def _next(self) -> Batch:
        batch = next(self._batches, None)
        if batch is None:
            self._epoch, self._say = self._epoch + 1, lambda _: None
            self._made = self._make() if iter(self._made) is self._made else self._made
            self._batches = self._start()
            batch = next(self._batches, None)
        if batch is None:
            wanted = "; ".join(f"{name} {tuple(shape)}" for name, (shape, _) in self._inputs.items())
            raise InputError(f"the data has no batch of the shapes of this plan, {wanted}.")
        return batch


def fitting(given: Iterable[Any], choice: Choice, say: Callable[[str], None], fills: bool = True) -> Iterator[Batch]:
    """Yield the inputs of each batch, in the dtypes of the plan (see `in_dtype`). A batch of none of its shapes is
    filled up to the smallest that holds it (with `fills`); if that cannot be, it is left out, and `say` gets a line.
    """
    left_out: dict[str, int] = {}
    inputs = choice.base.inputs
    count = 0
    for batch in given:
        count += 1
        check_names(batch, inputs, "a batch")
        found = {name: in_dtype(name, batch[name], dtype) for name, (_, dtype) in inputs.items()}
        if (whole := choice.fit(found, fills)) is None:
            odd = _odd(found, inputs)
            left_out[odd] = left_out.get(odd, 0) + 1
        else:
            yield whole
    for odd, number in left_out.items():
        say(
            f"note: {number} of {count} batches are left out, with {odd}; pad them to use all, list their shape, or "
            "take another batch size (a plan has the shapes of its capture, and those listed beside it)"
        )


def _odd(batch: Batch, inputs: Mapping[str, Any]) -> str:
    """Return the input of a batch whose shape differs from the plan's, if any."""
    pairs = ((name, tuple(batch[name].shape), tuple(shape)) for name, (shape, _) in inputs.items())
    return next((f"{name} of shape {found}, not {wanted}" for name, found, wanted in pairs if found != wanted), "")


def _is_samples(made: Any, step: Step) -> bool:
    """Return whether data is samples by number: its first item has none of the shapes of a batch."""
    if isinstance(made, DataLoader | IterableDataset | Mapping) or not hasattr(made, "__getitem__"):
        return False
    if not hasattr(made, "__len__") or not len(made):
        return False
    first = made[0]
    check_names(first, step.inputs, "the first item of the data")
    return all(np.ndim(first[name]) != len(shape) for name, (shape, _) in step.inputs.items())


def check_names(item: Any, inputs: Mapping[str, Any], what: str) -> None:
    if not isinstance(item, Mapping):
        raise InputError(f"{what} is {a(type(item).__name__)}; give a dict with {', '.join(inputs)}.")
    if lacking := [name for name in inputs if name not in item]:
        names = some([str(name) for name in item])
        raise InputError(f"{what} has no '{lacking[0]}', but {names or 'nothing'}; this plan reads {some([*inputs])}.")


def _put(batch: Tensor, row: int, name: str, given: Tensor) -> None:
    if given.shape != batch.shape[1:]:
        raise InputError(
            f"a sample has '{name}' of shape {tuple(given.shape)}, but this plan was compiled for "
            f"{tuple(batch.shape[1:])}; pad or cut it, or compile for that shape."
        )
    batch[row] = given
