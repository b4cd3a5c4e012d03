"""Results of a module as data: the places of its tensors, and the form that a step returns."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from superscaler.errors import CaptureError
from superscaler.losses import find_loss

# The first word in the names of a step's results: no attribute of a module has this name.
RESULT = "return"
_PLAIN = (bool, int, float, str, type(None))


class NoLossError(CaptureError):
    """A module returns no loss to train by."""


def loss_of(output: Any, name: str, keys: Sequence[Any] = ()) -> Tensor:
    """Return the scalar loss in the output of `name`, or the sum of those at some keys. Raises CaptureError if there is
    none.
    """
    if keys:
        return reduce(torch.add, [_loss_at(output, name, key) for key in keys])
    loss = find_loss(output)
    if not isinstance(loss, Tensor):
        raise NoLossError(
            f"{name} returns {type(output).__name__} without a loss; it must return a scalar loss, a tuple with one "
            "scalar, or an object or dict with .loss (a Hugging Face model returns one when it is given labels); "
            "or capture it with optimizer=None, for inference."
        )
    if loss.dim() or not loss.dtype.is_floating_point:
        raise NoLossError(
            f"{name} returns a loss of shape {tuple(loss.shape)} and dtype {str(loss.dtype).removeprefix('torch.')}; "
            "it must be a floating-point scalar of shape (): reduce it, for example with .mean()."
        )
    return loss


def _loss_at(output: Any, name: str, key: Any) -> Tensor:
    """Return the scalar loss at a key, an attribute or a place in an output."""
    has = dict(enumerate(output)) if isinstance(output, tuple | list) else getattr(output, "__dict__", {})
    has = output if isinstance(output, Mapping) else has
    if not isinstance(has.get(key), Tensor):
        found = ", ".join(repr(k) for k, value in has.items() if isinstance(value, Tensor)) or "no tensor"
        raise NoLossError(f"{name} returns no loss {key!r} for the optimizer of that name; its output has {found}.")
    return loss_of(has[key], f"{name}, in {key!r},")


def returned(
    output: Any, name: str, is_trained: bool, is_kept: bool, keys: Sequence[Any] = ()
) -> tuple[tuple[Tensor, ...], str]:
    """Return the tensors of a step, the trained loss last, and the form of the others in JSON, if they are kept. The
    sum of several losses, at `keys`, is trained, and each is among the others.
    """
    loss = loss_of(output, name, keys) if is_trained else None
    form, tensors = form_and_tensors(output, name, loss) if is_kept else (None, {})
    if loss is None and not tensors:
        raise CaptureError(
            f"{name} returns no tensor, so a step of it computes nothing; return a scalar loss from forward."
        )
    last = () if loss is None else (loss,)
    return (*tensors.values(), *last), json.dumps(form) if is_kept else ""


def names_of(form: str) -> list[str]:
    """Return the names of the tensors in a form of JSON, in order."""
    found: list[str] = []

    def read(pairs: list[tuple[str, Any]]) -> None:
        found.extend(value for key, value in pairs if key == "tensor" and isinstance(value, str))

    json.loads(form or "null", object_pairs_hook=read)
    return found


def form_and_tensors(output: Any, name: str, loss: Tensor | None) -> tuple[Any, dict[str, Tensor]]:
    """Return the form of a result and its tensors, without the loss. Raises CaptureError for other objects."""
    tensors: dict[str, Tensor] = {}

    def form(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            if value is loss:
                return {"value": None}
            if path in tensors:
                raise CaptureError(
                    f"{name} returns two results at {path.removeprefix(RESULT).removeprefix('.')}; give them keys that "
                    "differ as text, and no dots in keys."
                )
            tensors[path] = value
            return {"tensor": path}
        if is_dataclass(value) and not isinstance(value, Mapping | type):
            value = {f.name: getattr(value, f.name) for f in fields(value)}
        if isinstance(value, Mapping):
            return {"dict": {str(k): form(v, f"{path}.{k}") for k, v in value.items()}}
        if isinstance(value, list | tuple):
            kind = "list" if type(value) is list else "tuple"
            return {kind: [form(v, f"{path}.{number}") for number, v in enumerate(value)]}
        if isinstance(value, _PLAIN):
            return {"value": value}
        raise CaptureError(
            f"{name} returns {path.removeprefix(RESULT).removeprefix('.') or 'an object'} of class "
            f"{type(value).__name__}, which is neither a tensor nor a container of tensors; return its tensors "
            "(a Hugging Face model returns no cache with use_cache=False)."
        )

    return form(output, RESULT), tensors
