"""What a plan of a loop is captured from: the user's module, optimizer and loss, as they are when rank 0 captures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from superscaler.errors import InputError, PlanError
from superscaler.integrations import gradients
from superscaler.integrations.alike import check_alike
from superscaler.integrations.loss import Compute, Layout, LossOfLoop
from superscaler.integrations.reads import reads, settings
from superscaler.plan import Plan, capture, compile
from superscaler.planner.auto import plan_of
from superscaler.simulate.system import System


class UndividedError(InputError):
    """A plan does not divide what was captured."""


class Form(NamedTuple):
    """The facts that a capture reads and a loop may change: the modes of modules, the parameter group of each
    parameter, -1 if it is not trained, and the numbers, flags and texts that captures read from objects of the user.
    """

    modes: tuple[bool, ...]
    groups: tuple[int, ...]
    values: tuple[Any, ...]


class Source:
    """The user's module, optimizer and loss, and what captures on rank 0 have read of their objects.

    The arguments are those of `Planned`.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, compute: Compute, plan: str | Callable[..., Any],
        cluster: str | None, autocast: str | None, notes: dict[str, Any], owner: object, system: System,
    ) -> None:  # fmt: skip
        self._module, self._optimizer, self._compute, self._owner = module, optimizer, compute, owner
        self._plan, self._cluster, self._autocast, self._notes = plan, cluster, autocast, notes
        # Of a search for the plan.
        self._system = system
        # The objects of the user by path, and the attributes of them that captures read: path and name.
        self._objects: dict[str | None, object] = {None: owner or module, **dict(module.named_modules())}
        self._objects |= settings(self._objects)
        self._read: list[tuple[str | None, str]] = []
        # The FLOPs of ops by which plans are balanced: those of the first batch.
        self._costs: dict[str, int] | None = None

    def facts(self, shapes: str, form: Form) -> dict[str, str]:
        """Return the facts that a plan is compiled for, in words, each by its name for the user."""
        facts = {"the batch": shapes}
        for (path, name), value in zip(self._read, form.values, strict=True):
            facts[f"{path or type(self._objects[path]).__name__}.{name}"] = repr(value)
        for (path, module), mode in zip(self._module.named_modules(), form.modes, strict=True):
            facts[f"{path or type(module).__name__}.training"] = str(mode)
        for (name, _), group in zip(self._module.named_parameters(), form.groups, strict=True):
            facts[f"the parameter group of {name}"] = "none, not trained," if group < 0 else str(group)
        return facts

    def form(self) -> Form:
        groups = {id(p): n for n, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        trained = (groups.get(id(p), -1) if p.requires_grad else -1 for p in self._module.parameters())
        values = (vars(self._objects[path]).get(name) for path, name in self._read)
        modes = (module.training for module in self._module.modules())
        return Form(tuple(modes), tuple(trained), tuple(values))

    def on_first(self, save: Callable[[], Any]) -> Any:
        """Return the result of a function of rank 0, which captures, on all ranks; they then know what it reads."""
        found: list[Any] = [None, self._notes, self._read, None]
        if dist.get_rank() == 0:
            try:
                with reads(self._objects) as read:
                    found[3] = save()
                found[2] = [*self._read, *(read - {*self._read})]
            except PlanError as error:
                found[0] = str(error), isinstance(error, UndividedError)
        dist.broadcast_object_list(found)
        why, notes, self._read, result = found
        if why is not None:
            raise (UndividedError if why[1] else InputError)(why[0])
        check_alike(self.facts("", self.form()))
        self._notes.update(notes)
        return result

    def plan_of(self, tensors: Mapping[str, Tensor], layout: Layout, world: int) -> Plan:
        """Return the plan for the shapes of a batch. It leaves the loop's random numbers unchanged."""
        states, self._optimizer.state = self._optimizer.state, defaultdict(dict)
        try:
            with torch.random.fork_rng(), gradients.unfollowed(self._optimizer):
                around = LossOfLoop(self._module, self._compute, self._owner, *layout)
                graph = capture(
                    around, kwargs=dict(tensors), optimizer=self._optimizer, autocast=self._autocast, outputs=True
                )
                if self._costs is None:
                    self._costs = {op.name: op.flops for op in graph.model.ops}
                graph.costs = self._costs
                try:
                    self._plan = plan_of(self._plan, system=self._system) if isinstance(self._plan, str) else self._plan
                    return compile(graph, self._plan, self._cluster or f"local:{world}")
                except PlanError as error:
                    raise UndividedError(str(error)) from error
        finally:
            self._optimizer.state = states
