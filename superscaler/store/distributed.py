"""Folders of torch.distributed.checkpoint: what torch's `get_state_dict` names, written and read."""

import inspect
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from superscaler.errors import InputError, some
from superscaler.groups import collect, group_by
from superscaler.replaced import replaced
from superscaler.specs.file_errors import reading
from superscaler.specs.options import SCHEDULED, WHOLE
from superscaler.store.checkpoint import ANOTHER
from superscaler.store.pieces import whole
from superscaler.store.tensors import TensorReader, numbers_of

# The last words of the root of a model in a saved state.
_MODELS = ("model", "module", "state_dict")
_GROUPS = "param_groups."
# An option of a group, and the state of a parameter in a key that is not nested: what is before it, the name, the kind.
_GROUP = re.compile(r"(.*?\.)??param_groups\.(.+)\.[^.]+")
_FLAT = re.compile(r"(.*?\.)??state\.(.+)\.([^.]+)")
_ALONE = (
    'save one model alone, as dcp.save({"model": model_state, "optimizer": optimizer_state}), both of get_state_dict'
)


def saved_state(stored: TensorReader) -> dict[str, Any]:
    """Return a checkpoint as torch's `get_state_dict` names it: `model`, and `optimizer` with `state` and
    `param_groups`.

    A parameter without a state has the first one. Averages are the states `ema`. An imported checkpoint, whose
    parameter groups are not known, has no `param_groups`.
    """
    model = {name: stored.read(name, whole(stored.tensors[name].shape)) for name in sorted(stored.names)}
    states = {name: _states(stored, name) for name, entry in stored.tensors.items() if entry.states or entry.steps}
    kept = stored.head["optimizer"] or {}
    groups = [_group(*row) for row in zip(kept.get("groups", ()), kept.get("lr", ()), _options(kept), strict=False)]
    for kind, options, names in groups:
        for name in (name for name in (*names, *kept["unused"]) if name in model):
            states[name] = {**_first_states(kind, options, model[name]), **states.get(name, {})}
    model |= {alias: model[name] for alias, name in stored.head["aliases"].items() if name in model}
    optimizer: dict[str, Any] = {"state": states}
    if groups:
        optimizer["param_groups"] = [{**options, "params": names} for _, options, names in groups]
    return {"model": model} | ({"optimizer": optimizer} if states or groups else {})


def _states(stored: TensorReader, name: str) -> dict[str, Tensor]:
    entry = stored.tensors[name]
    states = {state: stored.read(name, whole(entry.shape), state) for state in entry.states}
    return {**{key: torch.tensor(x, dtype=torch.float32) for key, x in numbers_of(entry).items()}, **states}


def _options(kept: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return kept.get("options") or [{}] * len(kept.get("lr", ()))


class _Group(NamedTuple):
    kind: str
    options: dict[str, Any]
    names: list[str]


def _group(kept: Mapping[str, Any], rate: float, options: Mapping[str, Any]) -> _Group:
    """Return a parameter group with all options that torch's optimizer has there."""
    made = getattr(torch.optim, kept["kind"])([nn.Parameter(torch.zeros(1, 1))]).param_groups[0]
    given = {key: x for key, x in options.items() if key in (*made, *SCHEDULED)}
    found = {**{key: x for key, x in made.items() if key != "params"}, **given, "lr": rate}
    # JSON has no tuples.
    found = {key: tuple(x) if isinstance(x, list) else x for key, x in found.items()}
    return _Group(kept["kind"], found, list(kept["weights"]))


def _first_states(kind: str, options: Mapping[str, Any], weight: Tensor) -> dict[str, Tensor]:
    """Return the states from which torch's optimizer takes its first step; none if it takes no such weight."""
    if not weight.is_floating_point() or (kind in WHOLE and weight.dim() != 2):
        return {}
    parameter = nn.Parameter(weight.clone())
    parameter.grad = torch.zeros_like(parameter)
    optimizer = getattr(torch.optim, kind)([{"params": [parameter], **options}])
    home = sys.modules[inspect.unwrap(optimizer.step).__globals__["__name__"]]  # type: ignore[attr-defined]
    # Torch makes states in the first step, just before it calls the function that updates.
    with replaced((home, home.__name__.rpartition(".")[2].lstrip("_"), lambda *_, **__: None)):
        optimizer.step()
    # The first momentum is None, and no tensor.
    made = {name: torch.zeros_like(weight) if x is None else x for name, x in optimizer.state[parameter].items()}
    return {
        name: torch.as_tensor(x, dtype=None if isinstance(x, Tensor) else torch.float32) for name, x in made.items()
    }


@dataclass(frozen=True)
class Imported:
    """The tensors of a model, and the optimizer's states of them, by name. `left_out`: the keys that are neither."""

    tensors: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    left_out: Sequence[str] = ()


class _Key(NamedTuple):
    """A key of a folder: the `root` of a model or of an optimizer, the name of a tensor there, and the state of it."""

    key: str
    root: str
    name: str
    state: str = ""


def read_distributed(source: Path) -> Imported:
    """Return the model in a folder of torch.distributed.checkpoint, and its optimizer's states.

    The names are those that the saved state had, whatever was around it. Raises InputError for a folder in which the
    model is not clear, and for states that are not of its tensors.
    """
    with _opened(source) as reader:
        metadata = reader.read_metadata()
        planned = metadata.planner_data or {}
        paths = {key: tuple(map(str, planned.get(key, (key,)))) for key in metadata.state_dict_metadata}
        kept = {key: t for key, t in metadata.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}
    states = list(_state_keys(paths))
    others = {key: path for key, path in _others(paths, states) if key in kept}
    model = _model_keys(source, [_Key(key, ".".join(path[:-1]), path[-1]) for key, path in others.items()], states)
    with _opened(source) as reader:
        empty = {key: torch.empty(t.size, dtype=t.properties.dtype) for key, t in kept.items()}
        read: dict[str, Any] = {one.key: empty.get(one.key) for one in (*model, *states)}
        load(read, storage_reader=reader, no_dist=True)
    tensors = {one.name: read[one.key] for one in model}
    found: dict[str, dict[str, Tensor]] = {}
    for one in (one for one in states if read[one.key] is not None):
        found.setdefault(one.name, {})[one.state] = _state_of(source, one, read[one.key], tensors[one.name])
    return Imported(tensors, found, [key for key in others if key not in read])


@contextmanager
def _opened(source: Path) -> Iterator[FileSystemReader]:
    """Yield a reader of a folder. Its metadata is a pickle, which can fail in any way."""
    kind = "folder of torch.distributed.checkpoint"
    with (
        reading(source, ANOTHER, (Exception, CheckpointException), kind),
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        yield FileSystemReader(source)


def _state_keys(paths: Mapping[str, Sequence[str]]) -> Iterator[_Key]:
    """Yield the keys of optimizer states: those under `state`, beside which are parameter groups.

    A nested path has the name of the parameter as a word of its own. Else all is one text, with groups by parameter.
    """
    matches = filter(None, map(_GROUP.fullmatch, paths))
    groups = collect((match[1] or "", match[2]) for match in matches)
    nested = {key: _nested(key, path) for key, path in paths.items() if "state" in path[:-2]}
    roots = {one.root for one in nested.values()}
    for key in paths:
        match = _FLAT.fullmatch(key)
        one = nested.get(key) or (_Key(key, *match.groups(default="")) if match else None)
        if one is None or _GROUPS in one.root:
            continue
        is_tensor = key not in nested and (one.root in roots or one.name not in groups.get(one.root, [one.name]))
        # A state of which the groups were left out.
        if not is_tensor and (one.root in groups or "optim" in one.root):
            yield one


def _nested(key: str, path: Sequence[str]) -> _Key:
    at = path.index("state")
    return _Key(key, "".join(f"{word}." for word in path[:at]), path[at + 1], ".".join(path[at + 2 :]))


def _others(paths: Mapping[str, Sequence[str]], states: Collection[_Key]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the keys that are no part of an optimizer."""
    known, roots = {one.key for one in states}, {one.root for one in states}
    for key, path in paths.items():
        if key not in known and not any(key.startswith(f"{root}{_GROUPS}") for root in roots):
            yield key, path


def _model_keys(source: Path, keys: Sequence[_Key], states: Sequence[_Key]) -> list[_Key]:
    """Return the keys of the model: the only ones, those that have the optimizer's states, or those under `model`."""
    names = {one.name for one in states}
    _check_named(source, states)
    roots = {root: _without_prefix(some, names) for root, some in group_by(keys, lambda one: one.root).items()}
    whole = {root: some for root, some in roots.items() if names <= {one.name for one in some}}
    if names and not whole:
        missing = min(names.difference(*({one.name for one in some} for some in roots.values())), default=min(names))
        raise InputError(
            f"{source} has the optimizer's state of {missing}, but no tensor of that name beside those of its other "
            f"states; {_ALONE}."
        )
    of_models = {root: some for root, some in whole.items() if root.rpartition(".")[2] in _MODELS}
    found = whole if len(whole) == 1 else of_models
    if whole and len(found) != 1:
        under = " and ".join(f"{root or 'no word'} ({some[0].name}, ...)" for root, some in sorted(whole.items())[:3])
        raise InputError(f"{source} has tensors under {under}, and which are the model's is not clear; {_ALONE}.")
    return next(iter(found.values()), [])


def _check_named(source: Path, states: Sequence[_Key]) -> None:
    """Raise InputError for states by number, and for those of several optimizers of one parameter."""
    for one in (one for one in states if one.name.isdigit()):
        raise InputError(
            f"{source} has the state of the optimizer by the numbers of parameters ({one.key}), as "
            "optimizer.state_dict() returns it, and no names; save that of "
            "torch.distributed.checkpoint.state_dict.get_state_dict."
        )
    if len({(one.name, one.state) for one in states}) < len(states):
        roots = sorted({one.root.rstrip(".") for one in states})
        raise InputError(f"{source} has several optimizers of one parameter, under {some(roots, 3)}; {_ALONE}.")


def _without_prefix(keys: Sequence[_Key], names: Set[str]) -> list[_Key]:
    """Return keys by the names that the optimizer has of them, where all have these words before them."""
    own = {one.name for one in keys}
    if not names or names <= own:
        return list(keys)
    first = min(names)
    for prefix in (name.removesuffix(first) for name in own if name.endswith(f".{first}")):
        if all(f"{prefix}{name}" in own for name in names):
            kept = [one for one in keys if one.name.startswith(prefix)]
            return [one._replace(name=one.name.removeprefix(prefix)) for one in kept]
    return list(keys)


def _state_of(source: Path, one: _Key, value: Any, tensor: Tensor) -> Tensor:
    """Return a state of a tensor: of its shape, or a number."""
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    if not isinstance(value, Tensor) or (value.shape != tensor.shape and value.numel() != 1):
        kind = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise InputError(
            f"{source} has {one.state} of {one.name} {kind}, but a state of the optimizer has the shape of its tensor, "
            f"{tuple(tensor.shape)}, or is a number."
        )
    return value
