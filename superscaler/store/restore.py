"""Restoring: a rank loads its slices from a checkpoint of any plan, or from weights of another program."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from superscaler.errors import InputError
from superscaler.specs.options import CHOSEN, SCHEDULED
from superscaler.store.checkpoint import AVERAGE
from superscaler.store.pieces import located, whole
from superscaler.store.save import TrainingStep
from superscaler.store.tensors import (
    Target,
    TensorReader,
    newest,
    numbers_of,
    open_checkpoint,
    open_stored,
    read_targets,
    set_targets,
)

T = TypeVar("T")
Values = list[tuple[Target, Tensor]]


def restore(step: TrainingStep, path: str | Path) -> Mapping[str, Any]:
    """Continue from a checkpoint of any plan of the same model, on any number of devices. Returns its manifest.

    `path`: a checkpoint, or a folder of them (the last whole one). Nothing is changed on any rank before all ranks have
    read and checked their tensors; a failure then raises InputError on all ranks.
    """

    def read() -> tuple[Mapping[str, Any], Values, dict[str, dict[str, Any]]]:
        stored = open_checkpoint(path)
        _check_plan(step, stored)
        weights, states = _read(step, stored), _read_states(step, stored)
        if step.rank == 0:
            _check_names(step, stored)
        return stored.head, weights, states

    head, weights, states = _agreed(step, read)
    set_targets(weights)
    set_states(step, states)
    if step.state.updates.scaler and head["scaler"]:
        step.state.updates.scaler.load_state_dict(head["scaler"])
    if head["optimizer"]:
        step.groups.set(_options(step, head["optimizer"]))
    step.state.steps = head["step"]
    step.state.seed = step.state.seed if head["seed"] is None else head["seed"]
    return head


def load_weights(step: TrainingStep, path: str | Path) -> list[str]:
    """Set parameters and buffers from a checkpoint, or from safetensors files of another program (one file, or a folder
    with `model.safetensors` or its index); the optimizer starts anew. Returns the names that were not read.
    """

    def read() -> tuple[set[str], Values]:
        stored = open_stored(path)
        return stored.names, _read(step, stored)

    names, weights = _agreed(step, read)
    set_targets(weights)
    # New ones are made of the new weights.
    for states in step.state.updates.optimizer.state.values() if step.state.updates.optimizer else ():
        states.pop("copy", None)
        states.pop(AVERAGE, None)
    # Rank 0 knows all names.
    unread = json.dumps(sorted(names.difference(_names(step)))) if step.rank == 0 else ""
    return list(json.loads(step.state.communicator.first_text(unread)))


def _agreed(step: TrainingStep, read: Callable[[], T]) -> T:
    """Return the result of `read`. If it fails on any rank, raise the error of the first one on all ranks."""
    found: list[T] = []
    error = ""
    try:
        found = [read()]
    except InputError as caught:
        error = str(caught)
    if first := step.state.communicator.first_text(error):
        raise InputError(first)
    return found[0]


def _check_plan(step: TrainingStep, stored: TensorReader) -> None:
    """Raise InputError for a checkpoint of another optimizer."""
    kept = stored.head["optimizer"]
    ours = step.plan["optimizer"]
    theirs, here = (x.get("precision") or "none" for x in (kept or ours, ours))
    if theirs != here:
        raise InputError(
            f"{stored.directory} was trained with precision {theirs}, but this plan has precision {here}; "
            "take the same precision, or load the weights only."
        )
    if kept is not None and (kept["name"], len(kept["lr"])) != (ours["name"], len(ours["groups"])):
        raise InputError(
            f"{stored.directory} was trained by {kept['name']} with {len(kept['lr'])} parameter groups, but this plan "
            f"has {ours['name']} with {len(ours['groups'])}; take the same optimizer, or load the weights only."
        )


def _options(step: TrainingStep, kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each parameter group: as in torch, those of the checkpoint, where it has them."""
    planned = step.plan["optimizer"]["groups"]
    rows = zip(planned, kept.get("options") or [{}] * len(planned), kept["lr"], strict=True)
    return [
        {**group, **{key: x for key, x in more.items() if key in (*group, *SCHEDULED)}, "lr": rate}
        for group, more, rate in rows
    ]


def _state_names(
    step: TrainingStep, group: Mapping[str, Any], options: Mapping[str, Any], dtype: torch.dtype
) -> set[str]:
    """Return the names of the optimizer's state of a weight after a step with these options of its group."""
    # Some take matrices only.
    weight = torch.nn.Parameter(torch.zeros(1, 1, device=step.state.device, dtype=dtype))
    # Several that step together, or the only one.
    members = getattr(step.state.updates.optimizer, "members", [step.state.updates.optimizer])
    (kind,) = (type(one) for one in members if any(group is own for own in one.param_groups))
    changed = {key: x for key, x in options.items() if key not in CHOSEN}
    optimizer = kind([{**group, **changed, "params": [weight]}])
    weight.grad = torch.ones(1, 1, device=step.state.device, dtype=weight.grad_dtype)
    optimizer.step()
    return {name for name, value in optimizer.state[weight].items() if value is not None}


def _check_names(step: TrainingStep, stored: TensorReader) -> None:
    """Raise InputError for a checkpoint with tensors that the model lacks."""
    more = sorted(stored.names - set(_names(step)))
    if more:
        raise InputError(
            f"{stored.directory} has {len(more)} tensors that this model lacks, {more[0]} first; "
            "it is of a model of other options. Load the weights only, or compile that model."
        )


def _names(step: TrainingStep) -> Iterator[str]:
    """Yield all names of the model's tensors on this rank."""
    yield from (tensor["name"] for tensor in step.plan["tensors"].values())
    yield from step.plan["aliases"]
    yield from step.fixed


def _called(step: TrainingStep, name: str) -> list[str]:
    """Return all names of a tied parameter, the kept one first."""
    return [name, *(alias for alias, kept in step.plan["aliases"].items() if kept == name)]


def _targets(step: TrainingStep, stored: TensorReader) -> Iterator[Target]:
    """Yield the resident weights of a rank, and on rank 0 the tensors on no device."""
    is_whole = stored.head.get("optimizer") is not None
    for entry in step.state.tables["weights"]:
        if tensor := step.plan["tensors"].get(entry["tensor"]):
            name, ranges = located(step.plan, entry)
            # A checkpoint without this older version has the newest one, to which the older ones were equal.
            names = _called(step, name if name in stored.tensors else newest(name))
            is_needed = is_whole or tensor["kind"] == "parameter"
            yield Target(step.state.weights[entry["name"]], names, tuple(tensor["shape"]), ranges, is_needed)
    for name, value in step.fixed.items():
        yield Target(value, _called(step, name), tuple(value.shape), whole(value.shape), is_needed=False)


def _read(step: TrainingStep, stored: TensorReader) -> Values:
    """Return the tensors of a rank with their values: checked, not yet set."""
    found = read_targets(stored, _targets(step, stored))
    constants = {id(value): name for name, value in step.fixed.items() if name not in step.plan["tensors"]}
    for target, value in found:
        if id(target.tensor) in constants and not torch.equal(value, target.tensor):
            raise InputError(
                f"{stored.directory} has other values of {target.names[0]} than the module had at capture, and the "
                "plan is made with these; set the module's weights with ss.load_weights before ss.capture, and compile "
                "it again."
            )
    return found


def _read_states(step: TrainingStep, stored: TensorReader) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state of the trained weights of a rank by local name; none before the first step that was
    not skipped. Raises InputError for a state of another optimizer.
    """
    found: dict[str, dict[str, Any]] = {}
    made, groups, head = dict[tuple[int, torch.dtype], set[str]](), step.groups.here(), stored.head["optimizer"]
    for entry in (entry for entry in step.state.tables["weights"] if entry["trained"]):
        name, ranges = located(step.plan, entry)
        name = next(n for n in _called(step, name) if n in stored.tensors)
        weight, number = step.state.weights[entry["name"]], entry["group"]
        key = number, weight.dtype
        if key not in made:
            made[key] = _state_names(step, groups[number], _options(step, head)[number] if head else {}, weight.dtype)
        kept, wanted = stored.tensors[name], made[key]
        counted = {key: torch.tensor(x, dtype=torch.float32) for key, x in numbers_of(kept).items()}
        if {*kept.states, *counted} - {AVERAGE} not in (set(), wanted):
            raise InputError(
                f"{stored.directory} has {', '.join(sorted([*kept.states, *counted]))} of {name}, but the optimizer "
                f"{step.plan['optimizer']['name']} goes on from {', '.join(sorted(wanted)) or 'nothing'}; "
                "load the weights only."
            )
        states = {state: stored.read(name, ranges, state).reshape(weight.shape) for state in kept.states}
        found[entry["name"]] = {**counted, **states}
    return found


def set_states(step: TrainingStep, states: Mapping[str, dict[str, Any]]) -> None:
    """Set the optimizer's states, through its own `load_state_dict`."""
    optimizer = step.state.updates.optimizer
    if optimizer is None:
        return
    names = {id(weight): name for name, weight in step.state.weights.items()}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    kept = {number: states[names[id(p)]] for number, p in enumerate(ordered) if states[names[id(p)]]}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": kept})
