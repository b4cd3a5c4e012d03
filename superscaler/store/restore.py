"""Restoring: a checkpoint of any plan, or weights of another program, loaded into the step of a rank, only the slices
it needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superscaler.errors import InputError
from superscaler.store.pieces import located, whole
from superscaler.store.save import TrainingStep, share
from superscaler.store.tensors import TensorReader, missing, newest, open_checkpoint, open_stored, read_named


def restore(step: TrainingStep, path: str | Path) -> Mapping[str, Any]:
    """Continue from a checkpoint of any plan of the same model, on any number of devices. Returns its manifest.

    `path`: a checkpoint, or a folder of them (the last whole one). Nothing is changed on any rank before all ranks have
    read and checked all they need; a failure then raises InputError on all ranks.
    """
    stored: list[TensorReader] = []

    def read() -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        stored.append(open_checkpoint(path))
        _check_plan(step, stored[0])
        weights = _read(step, stored[0])
        _check_states(step, stored[0])
        states = _read_states(step, stored[0])
        if step.rank == 0:
            _check_names(step, stored[0])
        return weights, states

    weights, states = _agreed(step, read)
    manifest = stored[0].head
    _set_weights(step, weights)
    _set_states(step, states)
    if step.state.scaler and manifest["scaler"]:
        step.state.scaler.load_state_dict(manifest["scaler"])
    if manifest["optimizer"]:
        step.set_rates(manifest["optimizer"]["lr"])
    step.state.steps = manifest["step"]
    step.state.seed = step.state.seed if manifest["seed"] is None else manifest["seed"]
    return manifest


def load_weights(step: TrainingStep, path: str | Path) -> list[str]:
    """Set parameters and buffers from a checkpoint, or from safetensors files of another program (one file, or a folder
    with `model.safetensors` or its index); the optimizer starts anew. Returns the names that were not read.
    """
    stored: list[TensorReader] = []

    def read() -> dict[str, Tensor]:
        stored.append(open_stored(path))
        return _read(step, stored[0])

    _set_weights(step, _agreed(step, read))
    # Rank 0 knows all names.
    unread = json.dumps(sorted(stored[0].names - set(_names(step)))) if step.rank == 0 else ""
    return list(json.loads(share(step.state.communicator, unread)))


def _agreed(step: TrainingStep, read: Callable[[], Any]) -> Any:
    """Return the result of `read` if it succeeds on all ranks; else raise, on all ranks, the error of the first that
    failed.
    """
    error = ""
    found = None
    try:
        found = read()
    except InputError as caught:
        error = str(caught)
    first = share(step.state.communicator, error)
    if first:
        raise InputError(first)
    return found


def _check_plan(step: TrainingStep, stored: TensorReader) -> None:
    """Raise InputError for a checkpoint of another optimizer."""
    kept = stored.head["optimizer"]
    ours = step.plan["optimizer"]
    if kept is not None and (kept["name"], len(kept["lr"])) != (ours["name"], len(ours["groups"])):
        raise InputError(
            f"{stored.directory} was trained by {kept['name']} with {len(kept['lr'])} parameter groups, but this plan "
            f"has {ours['name']} with {len(ours['groups'])}; take the same optimizer, or load the weights only."
        )


def _check_states(step: TrainingStep, stored: TensorReader) -> None:
    """Raise InputError for trained weights without the optimizer's state."""
    made = {number: _state_names(step, group) for number, group in step.groups().items()}
    for entry in step.state.tables["weights"]:
        for name in _called(step, located(step.plan, entry)[0]) if entry["trained"] else []:
            kept, wanted = stored.tensors.get(name), made[entry["group"]] if entry["trained"] else set()
            found = {*kept.states, *(() if kept.steps is None else ("step",))} if kept is not None else set()
            # Is None before the first step that was not skipped.
            if found not in (set(), wanted):
                raise InputError(
                    f"{stored.directory} has {', '.join(sorted(found))} of {name}, but the optimizer "
                    f"{step.plan['optimizer']['name']} goes on from {', '.join(sorted(wanted)) or 'nothing'}; "
                    "load the weights only."
                )


def _state_names(step: TrainingStep, group: Mapping[str, Any]) -> set[str]:
    """Return the names of the optimizer's state of a weight after a step."""
    weight = torch.nn.Parameter(torch.zeros(1, device=step.state.device))
    weight.grad = torch.ones_like(weight)
    optimizer = getattr(torch.optim, step.plan["optimizer"]["name"])([{**group, "params": [weight]}])
    optimizer.step()
    return {name for name, value in optimizer.state[weight].items() if value is not None}


def _check_names(step: TrainingStep, stored: TensorReader) -> None:
    """Raise InputError for a checkpoint with tensors that the model lacks."""
    more = sorted(stored.names - set(_names(step)))
    if more:
        raise InputError(
            f"{stored.directory} has {len(more)} tensors that this model has not, {more[0]} first; "
            "it is of a model of other options. Load the weights only, or compile that model."
        )


def _names(step: TrainingStep) -> Iterator[str]:
    """Yield all names of the model's tensors that this rank knows."""
    yield from (tensor["name"] for tensor in step.plan["tensors"].values())
    yield from step.plan["aliases"]
    yield from step.fixed


def _read(step: TrainingStep, stored: TensorReader) -> dict[str, Tensor]:
    """Return the weights of a rank by local name, and on rank 0 the tensors on no device; checked, not yet set."""
    found = {}
    is_whole = stored.head.get("optimizer") is not None
    for entry in step.state.tables["weights"]:
        tensor = step.plan["tensors"].get(entry["tensor"])
        if tensor is None:
            continue
        local, (name, ranges) = step.state.weights[entry["name"]], located(step.plan, entry)
        # A checkpoint without this older version has the newest one, to which the older ones were equal.
        name = name if name in stored.tensors else newest(name)
        value = read_named(stored, _called(step, name), tuple(tensor["shape"]), local.dtype, ranges)
        if value is not None:
            found[entry["name"]] = value.reshape(local.shape)
        elif is_whole or tensor["kind"] == "parameter":
            raise missing(stored, name)
    return found | _read_fixed(step, stored)


def _called(step: TrainingStep, name: str) -> list[str]:
    """Return all names of a tied parameter, the kept one first."""
    return [name, *(alias for alias, kept in step.plan["aliases"].items() if kept == name)]


def _read_fixed(step: TrainingStep, stored: TensorReader) -> dict[str, Tensor]:
    found = {}
    for name, value in step.fixed.items():
        read = read_named(stored, _called(step, name), tuple(value.shape), value.dtype, whole(value.shape))
        if read is None:
            continue
        if name not in step.plan["tensors"] and not torch.equal(read, value):
            raise InputError(
                f"{stored.directory} has other values of {name} than the module had at capture, and the plan is made "
                "with these; set the module's weights with ss.load_weights before ss.capture, and compile it again."
            )
        found[f"fixed/{name}"] = read
    return found


def _read_states(step: TrainingStep, stored: TensorReader) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state of the trained weights of a rank by local name."""
    found: dict[str, dict[str, Any]] = {}
    for entry in step.state.tables["weights"]:
        if entry["trained"]:
            name, ranges = located(step.plan, entry)
            key = next(n for n in _called(step, name) if n in stored.tensors)
            kept, shape = stored.tensors[key], step.state.weights[entry["name"]].shape
            states = {s: stored.read(key, ranges, s).reshape(shape) for s in kept.states}
            counted = {} if kept.steps is None else {"step": torch.tensor(kept.steps, dtype=torch.float32)}
            found[entry["name"]] = {**counted, **states}
    return found


def _set_weights(step: TrainingStep, weights: Mapping[str, Tensor]) -> None:
    for name, value in weights.items():
        target = step.fixed[name[len("fixed/") :]] if name.startswith("fixed/") else step.state.weights[name].detach()
        target.copy_(value)


def _set_states(step: TrainingStep, states: Mapping[str, dict[str, Any]]) -> None:
    """Set the optimizer's states, through its own `load_state_dict`."""
    optimizer = step.state.optimizer
    if optimizer is None:
        return
    names = {id(weight): name for name, weight in step.state.weights.items()}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    kept = {number: states[names[id(p)]] for number, p in enumerate(ordered) if states[names[id(p)]]}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": kept})
