"""Checkpoints: the state of training in the user's own tensors, saved under one plan and loaded under any other.

A folder of checkpoints has one folder per checkpoint, and a file `latest` that names the last whole one. A checkpoint
has one shard per rank, each with elements that no other shard has, and a manifest, which is written after all shards.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from superscaler.errors import InputError
from superscaler.ir.mask import Box
from superscaler.specs.options import CHOSEN, kind_of
from superscaler.store import checkpoint
from superscaler.store.checkpoint import CheckpointHead, commit, discard, lock, new_folder, prune, reason, write_shard
from superscaler.store.folder import Draft, hash_without
from superscaler.store.pieces import Ranges, located, owners, part_of, whole

# Seconds between two looks for the shards of other ranks.
_POLL = 0.02
# Most seconds until a network disk shows on all servers a new file of one.
_SHOWN = 60.0


class OptimizerGroups(Protocol):
    """The options of the optimizer's parameter groups. `here`: those with a weight on this rank, by number."""

    def here(self) -> dict[int, dict[str, Any]]: ...
    def options(self) -> list[dict[str, Any]]: ...
    def rates(self) -> list[float]: ...
    def set(self, groups: Iterable[Mapping[str, Any]]) -> None: ...


class TrainingStep(Protocol):
    """The part of `superscaler.runtime.step.Step` that checkpoints read and set: the state of one rank of a plan."""

    plan: Mapping[str, Any]
    fixed: dict[str, Tensor]
    state: Any
    rank: int
    world: int

    @property
    def directory(self) -> Path | None: ...

    @property
    def groups(self) -> OptimizerGroups: ...


@dataclass
class _Save:
    """A save under way. `error`: the failure of this rank; `is_given_up`: another rank has failed."""

    draft: Draft
    steps: int
    head: dict[str, Any]
    entries: dict[str, Any]
    tensors: dict[str, Tensor]
    error: str = ""
    is_written: threading.Event = field(default_factory=threading.Event)
    is_given_up: threading.Event = field(default_factory=threading.Event)
    # Set when a caller waits for the save.
    hurry: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(init=False)


class Saver:
    """A writer of a rank's state into a folder of checkpoints, in the background, one save at a time.

    All ranks call each method. `keep`: the number of whole checkpoints to keep (default: all). `failures`: the reason
    of each failed save; `on_failure` gets it on rank 0. `last`: the last whole checkpoint of this object.
    """

    def __init__(
        self,
        step: TrainingStep,
        directory: str | Path,
        keep: int | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        if not str(directory):
            raise InputError("checkpoints need the name of a folder, not an empty one; '.' is the current one.")
        if keep is not None and keep < 1:
            raise InputError(f"{keep} checkpoints cannot be kept; keep 1 or more.")
        self.step = step
        self.directory = Path(directory)
        self.keep = keep
        self.failures: list[str] = []
        self.last: Path | None = None
        self._on_failure = on_failure
        self._owners = owners(step.plan)
        self._save: _Save | None = None
        # The locked file while the folder is held; -1 on a rank that saves nothing.
        self._lock: int | None = None
        # The copies of the last save: the next one copies into their memory.
        self._copies: dict[str, Tensor] = {}

    @property
    def has_failed(self) -> bool:
        """Return whether this rank's part of the save under way has failed."""
        return self._save is not None and bool(self._save.error)

    def save(self, training: Mapping[str, Any] | None = None) -> None:
        """Copy the state and start to write it, after an earlier save has ended. `training` goes into the manifest."""
        self.finish()
        self.open()
        steps = self.step.state.steps
        made = self.step.state.communicator.first_text(self._begin(steps) if self.step.rank == 0 else "")
        if made.startswith("!"):
            self._fail(steps, made[1:])
            return
        tensors, entries = snapshot(self.step, self._owners[self.step.rank], self._copies)
        self._copies = tensors
        draft = Draft(self.directory / made, CheckpointHead)
        self._save = save = _Save(draft, steps, _head(self.step, training), entries, tensors)
        save.thread = threading.Thread(target=self._write, args=(save,), daemon=True)
        save.thread.start()

    def _begin(self, steps: int) -> str:
        """Return the name of a new folder, or `!` and the reason why there is none."""
        try:
            return new_folder(self.directory, steps)
        except OSError as error:
            return f"!{reason(self.directory, error)}"

    def open(self) -> None:
        """Hold the folder until `close`, so that no other run saves there. Raises InputError if it cannot be held."""
        if self._lock is not None:
            return
        for is_first in (True, False):
            is_mine = is_first == (self.step.rank == 0) and (is_first or self._owners[self.step.rank])
            if error := self.step.state.communicator.first_text(self._hold(is_first) if is_mine else ""):
                self.close()
                raise InputError(f"{error.rstrip('.')}.")
        self._lock = -1 if self._lock is None else self._lock

    def _hold(self, is_first: bool) -> str:
        """Lock the folder; return the error in words, empty if none."""
        deadline = time.monotonic() + (0.0 if is_first else _SHOWN)
        while True:
            try:
                self._lock = lock(self.directory, is_first)
                return ""
            except InputError as error:
                return str(error)
            except OSError as error:
                if not isinstance(error, FileNotFoundError) or time.monotonic() > deadline:
                    return reason(self.directory, error)
            time.sleep(_POLL)

    def close(self) -> None:
        """Let other runs save into the folder."""
        if self._lock not in (None, -1):
            os.close(self._lock)
        self._lock = None
        # The next save of this run checks whether another run holds the folder.
        self.step.state.communicator.barrier()

    def finish(self) -> None:
        """Wait until the save under way is whole, or has failed."""
        save, communicator = self._save, self.step.state.communicator
        if save is None:
            return
        save.hurry.set()
        save.is_written.wait()
        error = communicator.first_text(save.error)
        if error:
            save.is_given_up.set()
        save.thread.join()
        error = error or communicator.first_text(save.error)
        self._save = None
        if error:
            if self.step.rank == 0:
                discard(save.draft.path)
            self._fail(save.steps, error)
        else:
            self.last = save.draft.path

    def _fail(self, steps: int, error: str) -> None:
        text = f"the checkpoint of step {steps} was not saved: {error}; the checkpoints before it are as they were."
        self.failures.append(text)
        if self._on_failure is not None and self.step.rank == 0:
            self._on_failure(text)

    def _write(self, save: _Save) -> None:
        """Write the shard of this rank; on rank 0 then the manifest, once all shards are there."""
        file = save.draft.path / checkpoint.shard_name(self.step.rank)
        # Any error: a failed save does not end the training.
        try:
            if save.tensors:
                write_shard(save.draft, self.step.rank, save.tensors, save.entries, save.hurry)
            save.is_written.set()
            if self.step.rank == 0:
                file = save.draft.path
                self._commit(save)
        except Exception as error:
            save.error = reason(file, error)
            save.is_written.set()

    def _commit(self, save: _Save) -> None:
        """Wait until the shards of all ranks are there, unless one will not come, and write the manifest."""
        ranks = [rank for rank, own in enumerate(self._owners) if own or (rank == 0 and self.step.fixed)]
        while not all(checkpoint.table_of(save.draft, rank).is_file() for rank in ranks):
            if save.is_given_up.wait(_POLL):
                return
            # Someone has moved or removed it.
            save.draft.path.stat()
        commit(save.draft, save.head, ranks)
        # The new one is saved, even if older ones cannot be removed.
        with suppress(OSError):
            prune(self.directory, self.keep)


def snapshot(
    step: TrainingStep, owned: Sequence[tuple[Mapping[str, Any], Box]], older: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return copies on the CPU of a rank's saved tensors, by key, and the entries of the user's tensors that hold them.
    Buffers of an older snapshot are reused.
    """
    tensors: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    for resident, box in owned:
        kept, (name, ranges) = step.plan["tensors"][resident["tensor"]], located(step.plan, {**resident, "box": box})
        weight = step.state.weights[resident["name"]]
        states = step.state.updates.optimizer.state.get(weight, {}) if step.state.updates.optimizer else {}
        piece, key = part_of(step.plan, resident, box, weight), resident["name"]
        # No name of a weight on a device has a slash.
        key = key if key not in tensors else f"{key}/{len(tensors)}"
        tensors |= add_entry(entries, name, kept["shape"], kept["dtype"], key, ranges, piece, states)
    for name, value in step.fixed.items():
        tensors |= add_entry(entries, name, value.shape, value.dtype, f"fixed/{name}", whole(value.shape), value)
    return {key: _copy(value, older.get(key)) for key, value in tensors.items()}, entries


def add_entry(
    entries: dict[str, Any],
    name: str,
    shape: Sequence[int],
    dtype: object,
    key: str,
    ranges: Ranges,
    piece: Tensor,
    given: Mapping[str, Tensor | None] = {},
) -> dict[str, Tensor]:
    """Add a piece of a tensor, and the tensor with its first piece, to the entries of a shard. Return the piece and its
    states by their keys there. `given`: the states of the optimizer; those of another shape are numbers of the tensor.
    """
    states = {kind: x for kind, x in given.items() if x is not None and x.shape == piece.shape and kind != "step"}
    numbers = {kind: float(x) for kind, x in given.items() if x is not None and kind not in states}
    kind = str(dtype).removeprefix("torch.")
    entry: dict[str, Any] = {"shape": list(shape), "dtype": kind, "states": sorted(states)}
    entry |= {"steps": numbers.pop("step", None), "pieces": [], **({"numbers": numbers} if numbers else {})}
    entries.setdefault(name, entry)["pieces"].append({"key": key, "ranges": ranges})
    return {key: piece, **{f"{key}/{state}": value for state, value in states.items()}}


def _copy(x: Tensor, older: Tensor | None = None) -> Tensor:
    if older is not None and older.shape == x.shape and older.dtype == x.dtype:
        return older.copy_(x.detach())
    return x.detach().to("cpu", copy=True).contiguous()


def _head(step: TrainingStep, training: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entries of a manifest beside its tensors."""
    state, chosen, now = step.state, step.plan["optimizer"], step.groups.options()
    more = {"precision": chosen["precision"]} if chosen.get("precision") else {}
    # As in torch, training goes on with them under a plan of others.
    kept = [{key: x for key, x in group.items() if key not in ("lr", *CHOSEN)} for group in now]
    more |= {"options": kept} if any(kept) else {}
    more |= _members(step.plan) if chosen["name"] else {}
    return {
        "plan": hash_without(step.plan, "manifest"),
        "world": step.world,
        "step": state.steps,
        "seed": state.seed,
        # Inference has none.
        "optimizer": {"name": chosen["name"], "lr": [group["lr"] for group in now], **more} if chosen["name"] else None,
        "scaler": state.updates.scaler.state_dict() if state.updates.scaler else None,
        "aliases": step.plan["aliases"],
        "training": None if training is None else dict(training),
    }


def _members(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class and the trained weights of each parameter group, and the parameters that no device has."""
    optimizer, tensors = plan["optimizer"], plan["tensors"]
    entries = [entry for device in plan["devices"] for entry in device["weights"] if entry["tensor"] in tensors]
    group_of = {tensors[entry["tensor"]]["name"]: entry["group"] for entry in entries if entry["trained"]}
    here = {tensors[entry["tensor"]]["name"] for entry in entries}
    names = {tensor["name"] for tensor in tensors.values() if tensor["kind"] == "parameter"}
    groups: list[dict[str, Any]] = [
        {"kind": kind_of(group, optimizer["name"])[0], "weights": []} for group in optimizer["groups"]
    ]
    for name in sorted(group_of):
        groups[group_of[name]]["weights"].append(name)
    return {"groups": groups, "unused": sorted(names - here)}


def save(step: TrainingStep, directory: str | Path, keep: int | None = None) -> Path:
    """Save a step's state and wait until it is whole. Returns the checkpoint. Raises InputError if it cannot be
    saved.
    """
    saver = Saver(step, directory, keep)
    saver.save()
    saver.finish()
    saver.close()
    if saver.last is None:
        raise InputError(saver.failures[0])
    return saver.last
