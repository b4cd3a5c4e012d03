"""The programs of one step for batches of several shapes, over the same weights, optimizer and communicator.

Each shape has a program and tables of its own. A weight rests on a rank in the same piece in all of them, so that one
tensor is the weight of all; constants, as positions, are of each shape.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superscaler.comm.alike import Alike
from superscaler.errors import InputError, some
from superscaler.runtime.batch import rows_read
from superscaler.runtime.executor import Found, Rank, take
from superscaler.runtime.metrics import Known
from superscaler.runtime.replay.replays import Recorder, Replays
from superscaler.runtime.replayable.refusals import check_plan
from superscaler.store.pieces import located, resident

Sizes = dict[str, tuple[int, ...]]


class Saved(NamedTuple):
    """The plan of a shape on disk. `read` returns its code by module and its whole constants, when a batch needs it."""

    plan: Mapping[str, Any]
    read: Callable[[], tuple[Mapping[str, ModuleType], Mapping[str, Tensor]]]
    directory: Path | None = None


class Form:
    """What a step runs for batches of some shapes: the code of a rank, its tables, and weights by its local names."""

    def __init__(
        self, plan: Mapping[str, Any], programs: Mapping[str, ModuleType], rank: Rank, weights: dict[str, Tensor]
    ) -> None:
        communicator = rank.communicator
        self.plan, self.weights = plan, weights
        self.inputs: dict[str, tuple[tuple[int, ...], str]] = {
            name: (tuple(shape), dtype) for name, (shape, dtype) in plan["inputs"].items()
        }
        self.tables: Mapping[str, Any] = tables_of(plan, communicator.rank)
        self.function: FunctionType = programs[plan["programs"][communicator.rank]].step
        # Compares the batches of several ranks.
        rows = rows_read(plan, communicator.rank)
        self.alike = Alike(communicator, rows, rank.dtype) if communicator.world > 1 and self.inputs else None
        # Records a step and replays it; None: each step runs.
        self.replays: Replays | None = None
        # The directory from which the plan was loaded.
        self.directory: Path | None = None
        self.found: Found = {}
        self.known: Known | None = None
        self.result = json.loads(plan.get("result") or "null")

    def replay(self, rank: Rank, recorder: Recorder) -> None:
        """Let steps be replayed from now on. Raises InputError for a program whose steps cannot be."""
        check_plan(self.plan, self.tables["weights"], self.function)
        with rank.under(self.tables, self.weights, self.found):
            self.replays = Replays(rank, recorder)

    @contextmanager
    def running(self, rank: Rank) -> Iterator[None]:
        """Give the rank the tables and the weights of this program in the block."""
        # The casts of autocast are in the plan.
        with (
            torch.autocast(rank.device.type, enabled=False),
            rank.under(self.tables, self.weights, self.found),
        ):
            yield

    def run(self, rank: Rank) -> Tensor:
        """Run a step of a rank, and return its loss."""
        # Updates that are held back are another step.
        if self.replays is None or rank.updates.held is not None:
            return self.function(rank if rank.shown is None else rank.shown(rank))  # type: ignore[no-any-return]
        return self.replays(self.function)


def tables_of(plan: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the tables of a rank, with the slots of the tensors in them."""
    return {**plan["devices"][rank], "slots": plan["slots"]}


def sizes_of(plan: Mapping[str, Any]) -> Sizes:
    """Return the shapes of the inputs of a plan."""
    return {name: tuple(shape) for name, (shape, _) in plan["inputs"].items()}


def elements(sizes: Sizes) -> int:
    """Return the elements of a batch."""
    return sum(map(prod, sizes.values()))


def words(sizes: Mapping[str, Any]) -> str:
    """Return the shapes of inputs in words.

    >>> words({"ids": (8, 4), "mask": (8, 4)})
    'ids (8, 4), mask (8, 4)'
    """
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in sizes.items())


def other(saved: Saved, base: Form, rank: Rank) -> Form:
    """Return the program of another shape over the weights of the first one. Raises InputError where these rest in
    other pieces.
    """
    programs, constants = saved.read()
    number = rank.communicator.rank
    found = paired(base.plan, saved.plan, number)
    if found.odd or saved.plan["world"] != base.plan["world"]:
        raise InputError(
            f"the plan for {words(sizes_of(saved.plan))} keeps {some(sorted(found.odd), 3) or 'weights'} in another "
            "piece than the plan beside it, so it is not of this plan; save both again by plan.save."
        )
    weights = {name: rank.weights[own] for name, own in found.pairs.items()}
    own: dict[str, Tensor] = {}
    for entry in (entry for entry in saved.plan["devices"][number]["weights"] if entry["name"] not in weights):
        piece = take(constants[entry["tensor"]], saved.plan["slots"][entry["tensor"]], entry["box"])
        own[entry["name"]] = piece.to(rank.device, copy=True)
    rank.hold(own)
    rank.communicator.prepare(sorted({tuple(g) for device in saved.plan["devices"] for g in device["groups"]}))
    form = Form(saved.plan, programs, rank, weights | own)
    form.directory = saved.directory
    return form


class Paired(NamedTuple):
    """The weights of a plan on a rank: `pairs`, each with its name in the first plan, and `odd`, the user's tensors
    that rest in another piece there.
    """

    pairs: dict[str, str]
    odd: set[str]


def paired(plan: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> Paired:
    """Return the weights of another plan that rest on a rank as in the first, by their names in the other."""
    here, found = defaultdict[object, list[str]](list), Paired({}, set())
    for entry in resident(plan, rank):
        here[_place(plan, entry)].append(entry["name"])
    for entry in resident(other, rank):
        if same := here[_place(other, entry)]:
            found.pairs[entry["name"]] = same.pop(0)
        else:
            found.odd.add(located(other, entry)[0])
    return found


def constants_of(plan: Mapping[str, Any], rank: int) -> set[str]:
    """Return the tensors on a rank that are no weights and no buffers of the user's module."""
    return {entry["tensor"] for entry in plan["devices"][rank]["weights"]} - plan["tensors"].keys()


def _place(plan: Mapping[str, Any], entry: Mapping[str, Any]) -> object:
    name, ranges = located(plan, entry)
    pieces = tuple(tuple((low, high) for low, high in dim) for dim in ranges)
    return name, pieces, entry["trained"], entry["group"], bool(entry.get("host"))
