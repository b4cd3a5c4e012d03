"""Checkpoints: the state of training in the user's own tensors, saved under one plan and loaded under any other.

A folder of checkpoints has one folder per checkpoint, and a file `latest` that names the last whole one. A checkpoint
has one shard per rank, each with elements that no other shard has, and a manifest, which is written when all shards are
there.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from superscaler.comm.communicator import Communicator
from superscaler.errors import InputError
from superscaler.store.checkpoint_dir import discard, lock, new_folder, prune, reason
from superscaler.store.folder import hash_without, replacing, sync, write_file
from superscaler.store.manifest import FORMAT, VERSION
from superscaler.store.pieces import located, owners, whole
from superscaler.store.tensor_file import write_tensors
from superscaler.store.tensors import MANIFEST_FILE, POINTER_FILE

# Seconds between two looks for the shards of other ranks.
_POLL = 0.02
# Most seconds until a network disk shows on all servers a new file of one.
_SHOWN = 60.0


class TrainingStep(Protocol):
    """One rank of a plan, as far as its state is saved and restored: `superscaler.runtime.step.Step`."""

    plan: Mapping[str, Any]
    fixed: dict[str, Tensor]
    state: Any
    rank: int
    world: int
    directory: Path | None

    def rates(self) -> list[float]: ...
    def groups(self) -> dict[int, dict[str, Any]]: ...
    def set_rates(self, rates: Sequence[Any]) -> None: ...


def share(communicator: Communicator, text: str) -> str:
    """Return, on all ranks, the text of the first rank with one; '' if no rank has any."""
    ranks, device, data = tuple(range(communicator.world)), communicator.device, text.encode()
    lengths = torch.zeros(len(ranks), dtype=torch.int64, device=device)
    lengths[communicator.rank] = len(data)
    found = communicator.all_reduce(lengths, ranks, planned=False).wait().tolist()
    first = next((rank for rank, length in enumerate(found) if length), None)
    if first is None:
        return ""
    letters = torch.zeros(found[first], dtype=torch.int64, device=device)
    if first == communicator.rank:
        letters += torch.tensor(list(data), device=device)
    return bytes(communicator.all_reduce(letters, ranks, planned=False).wait().tolist()).decode()


@dataclass
class _Save:
    """A save under way. `error`: the failure of this rank; `is_given_up`: another rank has failed."""

    folder: Path
    steps: int
    head: dict[str, Any]
    entries: list[dict[str, Any]]
    tensors: dict[str, Tensor]
    error: str = ""
    is_written: threading.Event = field(default_factory=threading.Event)
    is_given_up: threading.Event = field(default_factory=threading.Event)
    # Set when a caller waits for the save.
    hurry: threading.Event = field(default_factory=threading.Event)


class Saver:
    """A writer of a rank's state into a folder of checkpoints, in the background, one save at a time.

    All ranks call each method. `keep`: how many whole checkpoints stay (default: all). `failures`: the reason of each
    failed save; `on_failure` is called with it on rank 0. `last`: the last whole checkpoint of this object.
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
        self._thread: threading.Thread | None = None
        self._lock: int | None = None
        self._is_open = False
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
        made = share(self.step.state.communicator, self._begin(steps) if self.step.rank == 0 else "")
        if made.startswith("!"):
            self._fail(steps, made[1:])
            return
        tensors, entries = snapshot(self.step, self._owners[self.step.rank], self._copies)
        self._copies = tensors
        save = _Save(self.directory / made, steps, _head(self.step, training), entries, tensors)
        self._save, self._thread = save, threading.Thread(target=self._write, args=(save,), daemon=True)
        self._thread.start()

    def _begin(self, steps: int) -> str:
        """Return the name of a new folder, or `!` and the reason why there is none."""
        try:
            return new_folder(self.directory, steps)
        except OSError as error:
            return f"!{reason(self.directory, error)}"

    def open(self) -> None:
        """Hold the folder until `close`, so that no other run saves there. Raises InputError where that cannot be."""
        if self._is_open:
            return
        for is_first in (True, False):
            is_mine = is_first == (self.step.rank == 0) and (is_first or self._owners[self.step.rank])
            if error := share(self.step.state.communicator, self._hold(is_first) if is_mine else ""):
                self.close()
                raise InputError(f"{error.rstrip('.')}.")
        self._is_open = True

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
        if self._lock is not None:
            os.close(self._lock)
        self._lock, self._is_open = None, False
        # The next save of this run checks whether another run holds the folder.
        self.step.state.communicator.barrier()

    def finish(self) -> None:
        """Wait until the save under way is whole, or has failed."""
        save, thread = self._save, self._thread
        if save is None or thread is None:
            return
        communicator = self.step.state.communicator
        save.hurry.set()
        save.is_written.wait()
        error = share(communicator, save.error)
        if error:
            save.is_given_up.set()
        thread.join()
        error = error or share(communicator, save.error)
        self._save = self._thread = None
        if error:
            if self.step.rank == 0:
                discard(save.folder)
            self._fail(save.steps, error)
        else:
            self.last = save.folder

    def _fail(self, steps: int, error: str) -> None:
        text = f"the checkpoint of step {steps} was not saved: {error}; the checkpoints before it are as they were."
        self.failures.append(text)
        if self._on_failure is not None and self.step.rank == 0:
            self._on_failure(text)

    def _write(self, save: _Save) -> None:
        """Write the shard of this rank; on rank 0 then the manifest, once all shards are there."""
        file = save.folder / shard_name(self.step.rank)
        # Any error: a failed save does not end the training.
        try:
            if save.tensors:
                _write_shard(file, save.tensors, save.entries, save.hurry)
            save.is_written.set()
            if self.step.rank == 0:
                file = save.folder
                self._commit(save)
        except Exception as error:
            save.error = reason(file, error)
            save.is_written.set()

    def _commit(self, save: _Save) -> None:
        ranks = [rank for rank, own in enumerate(self._owners) if own or (rank == 0 and self.step.fixed)]
        if _all_written(save, ranks):
            _commit(save.folder, save.head, ranks)
            # The new one is saved, even if older ones cannot be removed.
            with suppress(OSError):
                prune(self.directory, self.keep)


def snapshot(
    step: TrainingStep, owned: list[Mapping[str, Any]], older: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return copies on the CPU of the tensors that a rank saves, by key, and for each weight its piece of the user's
    tensor. Buffers of an older snapshot are reused.
    """
    tensors, entries = {}, []
    for entry in owned:
        weight, key = step.state.weights[entry["name"]], entry["name"]
        name, ranges = located(step.plan, entry)
        states = _states(step, weight)
        count = states.pop("step", None)
        for place, value in {key: weight, **{f"{key}/{state}": value for state, value in states.items()}}.items():
            tensors[place] = _copy(value, older.get(place))
        shape, dtype = step.plan["tensors"][entry["tensor"]]["shape"], step.plan["tensors"][entry["tensor"]]["dtype"]
        steps = None if count is None else float(count)
        entries.append(_entry(name, shape, dtype, key, ranges) | {"states": sorted(states), "steps": steps})
    for name, value in step.fixed.items():
        # No name of a weight on a device has a slash.
        tensors[f"fixed/{name}"] = _copy(value, older.get(f"fixed/{name}"))
        dtype = str(value.dtype).removeprefix("torch.")
        entries.append(_entry(name, list(value.shape), dtype, f"fixed/{name}", whole(value.shape)))
    return tensors, entries


def _entry(name: str, shape: list[int], dtype: str, key: str, ranges: Any) -> dict[str, Any]:
    return {
        **{"name": name, "shape": shape, "dtype": dtype, "key": key, "ranges": ranges},
        **{"states": [], "steps": None},
    }


def _states(step: TrainingStep, weight: Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a weight: tensors of its shape, and `step`."""
    found = step.state.optimizer.state.get(weight, {}) if step.state.optimizer else {}
    return {name: value for name, value in found.items() if value is not None}


def _copy(x: Tensor, older: Tensor | None = None) -> Tensor:
    if older is not None and older.shape == x.shape and older.dtype == x.dtype:
        return older.copy_(x.detach())
    return x.detach().to("cpu", copy=True).contiguous()


def _head(step: TrainingStep, training: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entries of a manifest beside its tensors."""
    state, name = step.state, step.plan["optimizer"]["name"]
    return {
        "format": FORMAT,
        "version": VERSION,
        "plan": hash_without(step.plan, "manifest"),
        "world": step.world,
        "step": state.steps,
        "seed": state.seed,
        # Inference has none.
        "optimizer": {"name": name, "lr": step.rates()} if name else None,
        "scaler": state.scaler.state_dict() if state.scaler else None,
        "aliases": step.plan["aliases"],
        "training": None if training is None else dict(training),
    }


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write_shard(file: Path, tensors: dict[str, Tensor], entries: list[dict[str, Any]], hurry: threading.Event) -> None:
    """Write a shard, then its table of contents and its checksum, each aside and then moved."""
    with replacing(file) as aside:
        written = {"sha256": write_tensors(aside, tensors, hurry), "bytes": aside.stat().st_size}
    write_file(file.with_suffix(".json"), json.dumps({**written, "entries": entries}))


def _all_written(save: _Save, ranks: list[int]) -> bool:
    """Wait until the shards of all ranks are there; return False if one will not come."""
    left = [(save.folder / shard_name(rank)).with_suffix(".json") for rank in ranks]
    while left := [file for file in left if not file.is_file()]:
        if save.is_given_up.is_set():
            return False
        time.sleep(_POLL)
    return True


def _commit(folder: Path, head: dict[str, Any], ranks: list[int]) -> None:
    """Write the manifest of a checkpoint with all its shards, then let `latest` name it."""
    files = {shard_name(rank): (folder / shard_name(rank)).with_suffix(".json") for rank in ranks}
    write_manifest(folder, head, {shard: json.loads(file.read_text()) for shard, file in files.items()})
    for file in files.values():
        file.unlink()
    write_file(folder.parent / POINTER_FILE, f"{folder.name}\n")


def write_manifest(folder: Path, head: dict[str, Any], parts: Mapping[str, dict[str, Any]]) -> None:
    """Write the manifest of shards, each with `bytes`, `sha256` and `entries`."""
    tensors: dict[str, Any] = {}
    for shard, part in parts.items():
        for entry in part["entries"]:
            kept = {key: entry[key] for key in ("shape", "dtype", "states", "steps")}
            pieces = tensors.setdefault(entry["name"], {**kept, "pieces": []})["pieces"]
            pieces.append({"shard": shard, "key": entry["key"], "ranges": entry["ranges"]})
    shards = {shard: {key: part[key] for key in ("bytes", "sha256")} for shard, part in parts.items()}
    made = {**head, "shards": shards, "tensors": tensors}
    first = json.dumps({**head, "shards": shards, "sha256": hash_without(made, "sha256")}, indent=1).removesuffix("\n}")
    # One line per tensor.
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(tensor)}" for name, tensor in tensors.items())
    write_file(folder / MANIFEST_FILE, f'{first},\n "tensors": {{\n{lines}\n }}\n}}\n')
    sync(folder.parent)


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


def publish(
    directory: Path, tensors: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]] | None = None
) -> str:
    """Write tensors trained elsewhere, with an optimizer's states, as a checkpoint of no step into an empty folder;
    return its name.
    """
    folder, stored, entries = directory / new_folder(directory, 0), {}, []
    for name, tensor in tensors.items():
        kinds = dict((states or {}).get(name, {}))
        count = kinds.pop("step", None)
        stored[name] = _copy(tensor)
        stored.update({f"{name}/{kind}": _copy(value) for kind, value in kinds.items()})
        entry = _entry(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), name, whole(tensor.shape))
        entries.append(entry | {"states": sorted(kinds), "steps": None if count is None else float(count)})
    hurry = threading.Event()
    hurry.set()
    _write_shard(folder / shard_name(0), stored, entries, hurry)
    nothing = dict.fromkeys(("plan", "world", "seed", "optimizer", "scaler", "training"))
    _commit(folder, {"format": FORMAT, "version": VERSION, "step": 0, **nothing, "aliases": {}}, [0])
    return folder.name
