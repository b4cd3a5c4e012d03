"""Evaluation: the forward of a module in eval mode, on the weights of a training step in memory.

The forward has a plan of its own. Both plans share the tensor of a weight that rests on a device in the same piece
under both. Other pieces are filled before each evaluation by the ranks that have their elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from superscaler.errors import InputError
from superscaler.losses import find_loss
from superscaler.runtime.executor import Rank
from superscaler.runtime.shapes.choice import Choice
from superscaler.store.pieces import Ranges, index_of, located, overlap, owners, part_of, resident, sizes

Metric = Callable[[Any, Mapping[str, Tensor]], Any]


class Stepped(Protocol):
    """A step of a plan on this rank."""

    plan: Mapping[str, Any]
    rank: int
    world: int
    state: Rank
    choice: Choice

    def __call__(self, batch: Mapping[str, Tensor]) -> Any: ...


def shared(plan: Mapping[str, Any], step: Stepped) -> dict[str, Tensor]:
    """Return the weights on this rank that the plan of evaluation and the training plan keep in the same piece."""
    here = {_place(step.plan, entry): entry["name"] for entry in resident(step.plan, step.rank)}
    pairs = ((entry, here.get(_place(plan, entry))) for entry in resident(plan, step.rank) if not entry.get("host"))
    return {e["name"]: w.detach() for e, n in pairs if n and (w := step.state.weights[n]).device == step.state.device}


def check_models(plan: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """Raise InputError unless the plan of evaluation is of the trained model, and its devices."""
    theirs = {t["name"]: t["shape"] for t in trained["tensors"].values()}
    ours = {t["name"]: t["shape"] for t in plan["tensors"].values()}
    odd = [name for name, shape in ours.items() if theirs.get(name, shape) != shape]
    if odd or plan["world"] != trained["world"] or plan["loss_dtype"] or not ours.keys() & theirs.keys():
        what = f"has {odd[0]} of another shape" if odd else "is of other devices, or trains"
        raise InputError(f"the plan of evaluation {what}; compile both of one module, for one cluster.")


S = TypeVar("S", bound=Stepped)


class Filler(Generic[S]):
    """Copies of weights that evaluation keeps in other pieces than training: `fill` sets their present values."""

    def __init__(self, evaluation: S, step: S) -> None:
        self.evaluation, self._step = evaluation, step
        lacking = [_lacking(evaluation.plan, step.plan, rank) for rank in range(step.world)]
        needed = {located(evaluation.plan, entry)[0] for entries in lacking for entry in entries}
        self._own = lacking[step.rank]
        owned = ((rank, entry, box) for rank, found in enumerate(owners(step.plan)) for entry, box in found)
        every = ((*piece, *located(step.plan, {**piece[1], "box": piece[2]})) for piece in owned)
        # In one order on all ranks: the owner of a piece, its weight there, its box of it, its tensor and ranges.
        self._pieces = [piece for piece in every if piece[3] in needed]

    def fill(self) -> None:
        """Send each piece to all ranks; all of them call this."""
        state, plan = self._step.state, self._step.plan
        for source, entry, box, name, ranges in self._pieces:
            shape, dtype = sizes(ranges), getattr(torch, plan["tensors"][entry["tensor"]]["dtype"])
            sent = None
            if source == self._step.rank:
                sent = part_of(plan, entry, box, state.weights[entry["name"]]).to(state.device).reshape(shape)
            piece = state.communicator.broadcast(sent, source, tuple(range(self._step.world)), shape, dtype).wait()
            self._put(name, ranges, piece)

    def _put(self, name: str, ranges: Ranges, piece: Tensor) -> None:
        """Copy the elements of a piece into the weights of this rank that contain them."""
        for entry in self._own:
            theirs, wanted = located(self.evaluation.plan, entry)
            common = overlap(wanted, ranges) if theirs == name else None
            if common is not None:
                weight = self.evaluation.state.weights[entry["name"]]
                here, there = (index_of(pair[k] for pair in common) for k in (0, 1))
                weight.view(sizes(wanted))[here] = piece[there].to(weight)


def _place(plan: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[str, str]:
    name, ranges = located(plan, entry)
    return name, str([[tuple(run) for run in dim] for dim in ranges])


def _lacking(plan: Mapping[str, Any], trained: Mapping[str, Any], rank: int) -> list[Mapping[str, Any]]:
    """Return the weights of a plan of evaluation on a rank that do not rest there in the same piece."""
    there = {_place(trained, entry) for entry in resident(trained, rank) if not entry.get("host")}
    return [e for e in resident(plan, rank) if e.get("host") or _place(plan, e) not in there]


@contextmanager
def uncounted(step: Stepped) -> Iterator[None]:
    """Leave the bytes that the block sends out of the communicator's count, which is of the training plan."""
    communicator = step.state.communicator
    moved = communicator.moved
    try:
        yield
    finally:
        communicator.moved = moved


def mean(
    step: Stepped, batches: Iterable[Mapping[str, Tensor]], metrics: Mapping[str, Metric] | None
) -> dict[str, float]:
    """Return the mean over batches of each metric of the outputs and the batch."""
    found: dict[str, float] = {}
    count = 0
    for batch in batches:
        # Filled rows and elements change outputs, but not the loss.
        outputs = step(batch if metrics else step.choice.filled(batch))
        for name, metric in (metrics or {"loss": _loss}).items():
            found[name] = found.get(name, 0.0) + float(metric(outputs, batch))
        count += 1
    if not count:
        raise InputError("evaluate was given no batch; give at least one.")
    return {name: total / count for name, total in found.items()}


def _loss(outputs: Any, batch: Mapping[str, Tensor]) -> Any:
    loss = find_loss(outputs)
    if not isinstance(loss, Tensor) or loss.dim():
        raise InputError(
            "the module in eval mode returns no scalar loss; give metrics: functions of its outputs and the batch."
        )
    return loss
