"""What a capture gives: the model of a step, its values, and the call and optimizers that it is of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from superscaler.frontend.base.autocast import Autocast
from superscaler.ir.model import Model


class Inputs(NamedTuple):
    """The keyword arguments in the order of export, and the exported names of the leaves of all arguments."""

    keywords: list[str]
    names: list[str]


@dataclass(frozen=True, slots=True)
class Given:
    """An optimizer as the user made it: its class and arguments, and the options and names of each parameter group.

    It is no part of the model, so that `verify` does not depend on what capture reads of an optimizer.
    """

    kind: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]]

    def over(self, slices: Mapping[str, Sequence[Tensor]]) -> torch.optim.Optimizer | None:
        """Return a new optimizer of the class over slices of its parameters, by name; None if there are none."""
        groups = [
            {**options, "params": params}
            for options, names in self.groups
            if (params := [piece for name in names for piece in slices.get(name, ())])
        ]
        return self.kind(groups, **self.arguments) if groups else None  # type: ignore[call-arg, arg-type]


@dataclass(frozen=True)
class Call:
    """The captured call of a module, its autocast, the modes of its submodules, and the optimizers as the user made
    them. For several losses, also their keys, and for each parameter the output that is its loss.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Inputs
    training: tuple[bool, ...]
    autocast: Autocast | None = None
    optimizers: tuple[Given, ...] = ()
    losses: tuple[Any, ...] = ()
    loss_of: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def updated(self) -> frozenset[str]:
        """Return the names of the parameters that the optimizers have."""
        return frozenset(name for one in self.optimizers for _, names in one.groups for name in names)

    def batch(self) -> dict[str, Tensor]:
        """Return the example inputs by their exported names, in export's order."""
        pairs = zip(self.inputs.names, self._flat()[0], strict=True)
        return {name: value for name, value in pairs if isinstance(value, Tensor)}

    def arguments(self, batch: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call with a batch in the place of the example."""
        flat, spec = self._flat()
        pairs = zip(self.inputs.names, flat, strict=True)
        args, kwargs = pytree.tree_unflatten([batch.get(name, value) for name, value in pairs], spec)
        return args, kwargs

    def _flat(self) -> tuple[list[Any], pytree.TreeSpec]:
        return pytree.tree_flatten((self.args, {name: self.kwargs[name] for name in self.inputs.keywords}))


@dataclass(frozen=True)
class Captured:
    """A captured step: the model; its initial values and example batch by pTensor name; the captured call and exported
    program.

    `values` lacks tensors on the meta device. `fixed` has the buffers of the module's state that became constants, or
    that nothing reads: with the model's own tensors they are that state, whole. `seconds`: of `export` (torch),
    `capture` (the rest), `check` and `smaller` (batches). `checked`: one line about the check of the module. `again`:
    the capture of the same step for other arguments.
    """

    model: Model
    values: dict[str, Tensor]
    call: Call
    program: Callable[[], ExportedProgram]
    seconds: dict[str, float]
    batch: dict[str, Tensor]
    fixed: dict[str, Tensor] = field(default_factory=dict)
    checked: str = ""
    again: Callable[[tuple[Any, ...], Mapping[str, Any]], "Captured"] | None = None

    @cached_property
    def exported(self) -> ExportedProgram:
        return self.program()
