"""The loss of a loop as a module that a capture runs, and batches as its inputs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from superscaler.errors import InputError, a

# From the user's module and a batch: the loss, and values to log by name.
Compute = Callable[[nn.Module, Any], tuple[Tensor, Mapping[str, Tensor]]]


class Layout(NamedTuple):
    """The form of a batch: the names of its places, also of those that have None, and their tree."""

    names: list[str]
    spec: Any


class Notes:
    """What the loss of a loop notes while a capture runs it, by name. Captures put the user's dictionaries back, but no
    object of this package.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}


class LossOfLoop(nn.Module):
    """A module whose forward is the loss that a loop computes with the user's module.

    A capture refuses changes of the `owner` of that function, as of the module.
    """

    def __init__(
        self, module: nn.Module, compute: Compute, owner: object = None, names: Any = (), spec: Any = None
    ) -> None:
        super().__init__()
        self.module, self.compute, self.trainer, self.names, self.spec = module, compute, owner, names, spec
        self.training = module.training

    def __deepcopy__(self, memo: dict[int, Any]) -> LossOfLoop:
        return LossOfLoop(copy.deepcopy(self.module, memo), self.compute, self.trainer, self.names, self.spec)

    def forward(self, **tensors: Tensor) -> dict[str, Any]:
        batch = pytree.tree_unflatten([tensors.get(name) for name in self.names], self.spec)
        loss, logged = self.compute(self.module, batch)
        return {"loss": loss, "logged": dict(logged)}


def named(batch: Any) -> tuple[dict[str, Tensor], Layout]:
    """Return the tensors of a batch by the names of their places, and the form of the batch."""
    pairs, spec = pytree.tree_flatten_with_path(dict(batch) if isinstance(batch, Mapping) else batch)
    found: dict[str, Tensor | None] = {}
    for path, value in pairs:
        name = "_".join(re.findall(r"\w+", pytree.keystr(path)))
        if not isinstance(value, Tensor | None):
            raise InputError(f"a batch has {a(type(value).__name__)} at '{name}'; a plan takes tensors only.")
        found[name if name.isidentifier() else f"input_{name}"] = value
    return {name: x for name, x in found.items() if x is not None}, Layout([*found], spec)


def shapes_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the shapes and dtypes of tensors in words."""
    return ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors.items())
