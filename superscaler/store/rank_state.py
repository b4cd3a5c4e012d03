"""The state of training of a rank in memory, which `step.state_dict` gives and `step.load_state_dict` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from superscaler.errors import InputError
from superscaler.store.save import TrainingStep


def state_of(step: TrainingStep) -> dict[str, Any]:
    """Return the state of training on a rank."""
    state, updates = step.state, step.state.updates
    return {
        "weights": {name: weight.detach() for name, weight in state.weights.items()},
        "optimizer": updates.optimizer.state_dict() if updates.optimizer else None,
        "lr": step.groups.rates(),
        "options": step.groups.options(),
        "steps": state.steps,
        "scaler": updates.scaler.state_dict() if updates.scaler else None,
    }


def set_state(step: TrainingStep, saved: Mapping[str, Any]) -> None:
    """Set the state of training on a rank. Raises InputError for one of another rank or plan."""
    state, updates = step.state, step.state.updates
    is_whole = isinstance(saved, Mapping) and {"weights", "optimizer", "steps"} <= saved.keys()
    is_whole = is_whole and isinstance(saved["steps"], int)
    if not is_whole or (saved["optimizer"] is None) != (updates.optimizer is None):
        raise InputError("load_state_dict takes a result of state_dict on the same rank of the same plan.")
    theirs, ours = ({n: tuple(w.shape) for n, w in x.items()} for x in (saved["weights"], state.weights))
    if theirs != ours:
        name = next(n for n in (*ours, *theirs) if ours.get(n) != theirs.get(n))
        raise InputError(
            f"weight {name} has shape {theirs.get(name)} in this state and {ours.get(name)} on rank {step.rank}; "
            "load the state that the same rank of the same plan saved."
        )
    for name, weight in state.weights.items():
        weight.detach().copy_(saved["weights"][name])
    if updates.optimizer:
        updates.optimizer.load_state_dict(saved["optimizer"])
    if updates.scaler and saved.get("scaler"):
        updates.scaler.load_state_dict(saved["scaler"])
    step.groups.set(saved.get("options") or [{"lr": rate} for rate in saved.get("lr", step.groups.rates())])
    state.steps = saved["steps"]
