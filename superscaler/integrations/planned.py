"""A plan as the forward, the backward and the update of another library's loop.

The loop keeps its own module and optimizer. A step reads the options of the optimizer's parameter groups, the learning
rates among them; the module and the optimizer get the trained weights and states before they are saved or evaluated, so
that checkpoints are the loop's own.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from superscaler.comm.alike import ranks
from superscaler.comm.distributed import connect
from superscaler.errors import InputError, PlanError
from superscaler.integrations import gradients, state
from superscaler.integrations.alike import check_alike, check_done, check_equal
from superscaler.integrations.loss import Compute, Layout, LossOfLoop, named, shapes_of
from superscaler.integrations.reads import reads, settings
from superscaler.plan import capture, compile, load
from superscaler.runtime.step import Step

_LOG = logging.getLogger(__name__)


class _UndividedError(InputError):
    """A plan does not divide what was captured."""


class Form(NamedTuple):
    """The facts that a capture reads and a loop may change: the modes of modules, the parameter group of each
    parameter, -1 if it is not trained, and the numbers, flags and texts that captures read from objects of the user.
    """

    modes: tuple[bool, ...]
    groups: tuple[int, ...]
    values: tuple[Any, ...]


class Planned:
    """The steps of a loop under a plan, which rank 0 compiles for the shapes of the first batch, and again for others,
    and when other weights are trained.

    All ranks pass equal global batches, and change what a plan is compiled for before the same step; InputError names
    what one rank changed alone. `cluster`: default, the processes of this machine. `directory`: of the plan,
    read by all ranks. `steps`: the earlier steps of the module and the optimizer. `notes`: what `compute` notes during
    the capture on rank 0; all ranks get it. `torch_compile` and `cuda_graph`: as of `ss.load`. `owner`: the
    object whose method `compute` calls; default: the module. Numbers, flags and texts that it reads from both may
    change between steps.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, compute: Compute, plan: str | Callable[..., Any],
        cluster: str | None, directory: Path, autocast: str | None = None, seed: int = 0, steps: int = 0,
        notes: dict[str, Any] | None = None, torch_compile: bool = False, owner: object = None,
        cuda_graph: bool = False,
    ) -> None:  # fmt: skip
        self._module, self._optimizer, self._compute = module, optimizer, compute
        self._plan, self._cluster, self._directory = plan, cluster, directory
        self._autocast, self._seed, self._steps = autocast, seed, steps
        self._torch_compile, self._cuda_graph = torch_compile, cuda_graph
        self._is_stale, self._saved, self._owner = False, 0, owner
        # The objects of the user by path, and the attributes of them that captures read: path and name.
        self._objects: dict[str | None, object] = {None: owner or module, **dict(module.named_modules())}
        self._objects |= settings(self._objects)
        self._read: list[tuple[str | None, str]] = []
        # By what each was compiled for; of several, one has the present state.
        self._made: dict[tuple[str, Form], Step] = {}
        self._undivided: set[tuple[str, Form]] = set()
        # The shapes of batches, unfilled, that all ranks were given.
        self._given: set[str] = set()
        # What the plan of `step` is compiled for, in words.
        self._before: dict[str, str] = {}
        self.step: Step | None = None
        # Whether the last step left its update to the loop's optimizer.
        self.is_open = False
        # What the last loss logs, by name; None for the loss itself.
        self.logged: Mapping[str, Tensor | None] = {}
        self.notes = {} if notes is None else notes

    def __call__(self, batch: Any, clip: float | None = None) -> Tensor:
        """Train on a global batch and return its loss. A batch of other shapes is padded, or gets its own plan."""
        was_open, self.is_open = self.is_open, False
        step, tensors = self._begin(batch)
        if step is None:
            return self._trained_whole(batch, clip)
        if was_open:
            # Hooks may have changed weights after the update.
            state.take(step, self._around, self._optimizer)
        loss: Tensor = step(tensors, clip=clip)
        self._steps, self._is_stale, self.logged = step.state.steps, True, step.outputs["logged"]
        return loss

    def differentiate(self, batch: Any) -> Tensor:
        """Return the loss of a global batch. Its backward gives whole gradients to the module on each rank.

        The update is left to `update`. Before and after both the module and the optimizer have the present weights and
        states, and what the loop changes in them is trained on.
        """
        if self._cuda_graph:
            raise InputError(
                "cuda_graph replays whole steps, and hooks around backward and update need their parts; leave "
                "cuda_graph or the hooks out."
            )
        self.put()
        if self.step is not None:
            self._agree("computes a loss")
        step, tensors = self._begin(batch)
        if step is None:
            return self._of_module(batch)
        if self._is_stale:
            self.put()
        else:
            state.take(step, self._around, self._optimizer)
        loss, found, written = gradients.differentiate(step, tensors)
        self._steps, self.is_open, self.logged = step.state.steps, True, step.outputs["logged"]
        state.put(step, self._around, self._optimizer, lambda entry: entry["name"] in written)
        weights = state.by_name(self._around)
        return gradients.with_gradients(loss, gradients.gathered(step, found, weights), weights)

    def update(self) -> list[tuple[Tensor, Tensor | None]]:
        """Update the plan's weights by the gradients that the module has after hooks; all ranks call this.

        Returns these weights of the module with their gradients, which are removed. Others, which the plan's batch does
        not reach, are left to the loop's optimizer.
        """
        assert self.step is not None
        self._agree("updates the weights")
        self.step.groups.set(self._optimizer.param_groups)
        weights = state.by_name(self._around)
        state.take(self.step, self._around, self._optimizer)
        gradients.update(self.step, weights)
        state.put(self.step, self._around, self._optimizer, lambda entry: bool(entry["trained"]))
        return gradients.taken(self.step, weights)

    def _of_module(self, batch: Any) -> Tensor:
        """Return the loss of the whole module on each rank, with the present weights."""
        assert self.step is not None
        kind = self.step.state.device.type
        with torch.random.fork_rng(), torch.autocast(kind, torch.bfloat16, enabled=self._autocast is not None):
            torch.manual_seed(self._seed + self._steps)
            loss, logged = self._compute(self._module, batch)
        self.logged = {name: None if value is loss else value for name, value in logged.items()}
        self._steps += 1
        self.step.state.steps, self.is_open = self._steps, True
        return loss

    def _trained_whole(self, batch: Any, clip: float | None) -> Tensor:
        """Train on a batch in the whole module, and give the plan the gradients."""
        assert self.step is not None
        loss = self._of_module(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            self.step.state.updates.last_norm = float(nn.utils.clip_grad_norm_(self._module.parameters(), clip))
        self.update()
        self.is_open = False
        self._optimizer.step()
        self._module.zero_grad()
        return loss.detach()

    def _agree(self, what: str) -> None:
        """Raise InputError on all ranks if hooks made one do something else, or gave it other weights or gradients."""
        weights = dict(self._module.named_parameters())
        found: dict[str, Tensor | None] = {**weights}
        found |= {f"the gradient of {name}": weight.grad for name, weight in weights.items()}
        sums = dict(zip(found, gradients.checksums([*found.values()]), strict=True))
        check_done(f"after step {self._steps}", what, sums)

    def _begin(self, batch: Any) -> tuple[Step | None, dict[str, Tensor]]:
        """Return the step for a global batch, None if the plan does not divide it, and the tensors that it reads."""
        tensors, layout = named(batch)
        given = shapes_of(tensors)
        if self.step is not None:
            tensors = self.step.padding.filled(tensors, self.step.inputs)
        step = self._for(tensors, layout, given)
        self.step = step or self.step
        assert self.step is not None
        if self.step.watch is not None:
            self.step.watch.begun += 1
        if step is None:
            return None, {}
        step.groups.set(self._optimizer.param_groups)
        return step, {name: tensors[name] for name in step.inputs}

    def put(self) -> None:
        """Set the trained weights and states in the module and the optimizer of each rank; all ranks call this."""
        if self.step is not None and self._is_stale:
            state.put(self.step, self._around, self._optimizer, lambda _: True)
        self._is_stale = False

    def put_if(self, is_read: bool) -> None:
        """Put the weights if they are read on any rank; all ranks call this."""
        if self.step is not None and self._is_stale:
            reads = [False] * dist.get_world_size()
            dist.all_gather_object(reads, is_read)
            if any(reads):
                self.put()

    @property
    def _around(self) -> nn.Module:
        return LossOfLoop(self._module, self._compute)

    def _for(self, tensors: Mapping[str, Tensor], layout: Layout, given: str) -> Step | None:
        """Return the step for the shapes of a batch and the form of the module, with the present state; None if the
        plan does not divide a batch of these shapes. `given`: the shapes before the batch was filled.
        """
        key = shapes_of(tensors), self._form()
        known = self._made.get(key)
        if known is not None and known is self.step and given in self._given:
            return known
        if self.step is not None:
            self._meet(self._facts(given, key[1]))
        self._given.add(given)
        if known is not None and known is self.step:
            return known
        self.put()
        if key in self._undivided:
            return None
        if self._made and known is None:
            is_batch = all(form == key[1] for _, form in self._made)
            others = "other weights or modules are trained, or the model reads other values"
            what = "a batch has other shapes or dtypes" if is_batch else others
            _LOG.warning("%s: a plan is compiled for %s, with weights of its own in memory.", what, key[0])
        try:
            step = known or self._compiled(tensors, layout)
        except _UndividedError as error:
            # The weights must be those of the present plan.
            if self.step is None or key[1] not in (form for (_, form), made in self._made.items() if made is self.step):
                raise
            self._undivided.add(key)
            _LOG.warning(
                "%s: the plan does not divide this batch, so each rank computes it in the whole module. %s",
                key[0],
                error,
            )
            return None
        form = self._form()
        # Values seldom come back, so plans of earlier ones would only fill the memory.
        kept = {key: old for key, old in self._made.items() if key[1].values == form.values}
        for old in (old for key, old in self._made.items() if key not in kept):
            if old.watch is not None:
                old.watch.close()
        self._made = {**kept, (key[0], form): step}
        self._before = self._facts(key[0], form)
        state.take(step, self._around, self._optimizer, has_weights=known is None)
        # The weights of a new plan are those of rank 0.
        self._is_stale = known is None
        step.state.steps = self._steps
        return step

    def _meet(self, now: Mapping[str, str]) -> None:
        """Wait for all ranks. Raise InputError if others begin the step without, or come with other facts."""
        assert self.step is not None
        if self.step.watch is not None and (others := self.step.watch.meet()):
            name = next(name for name in now if now[name] != self._before.get(name))
            raise InputError(
                f"{name} was {self._before.get(name)} and is {now[name]} now on rank {dist.get_rank()}, but "
                f"{ranks(others)} began step {self._steps + 1} without that change, with the plan of before; "
                "make it on all ranks before the same step."
            )
        check_alike(now)

    def _facts(self, shapes: str, form: Form) -> dict[str, str]:
        """Return the facts that a plan is compiled for, in words, each by its name for the user."""
        facts = {"the batch": shapes}
        for (path, name), value in zip(self._read, form.values, strict=True):
            facts[f"{path or type(self._objects[path]).__name__}.{name}"] = repr(value)
        for (path, module), mode in zip(self._module.named_modules(), form.modes, strict=True):
            facts[f"{path or type(module).__name__}.training"] = str(mode)
        for (name, _), group in zip(self._module.named_parameters(), form.groups, strict=True):
            facts[f"the parameter group of {name}"] = "none, not trained," if group < 0 else str(group)
        return facts

    def _form(self) -> Form:
        groups = {id(p): n for n, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        trained = (groups.get(id(p), -1) if p.requires_grad else -1 for p in self._module.parameters())
        values = (vars(self._objects[path]).get(name) for path, name in self._read)
        modes = (module.training for module in self._module.modules())
        return Form(tuple(modes), tuple(trained), tuple(values))

    def _compiled(self, tensors: Mapping[str, Tensor], layout: Layout) -> Step:
        """Return the step of a new plan, with the weights of rank 0."""
        communicator = connect()
        check_equal(tensors)
        folder = self._directory / str(self._saved)
        found: list[Any] = [None, self.notes, self._read]
        if communicator.rank == 0:
            try:
                with reads(self._objects) as read:
                    self._save(folder, tensors, layout, communicator.world)
                found[2] = [*self._read, *(read - {*self._read})]
            except PlanError as error:
                found[0] = str(error), isinstance(error, _UndividedError)
        dist.broadcast_object_list(found)
        why, notes, self._read = found
        if why is not None:
            raise (_UndividedError if why[1] else InputError)(why[0])
        check_alike(self._facts("", self._form()))
        self.notes.update(notes)
        self._saved += 1
        return load(folder, torch_compile=self._torch_compile, cuda_graph=self._cuda_graph)

    def _save(self, folder: Path, tensors: Mapping[str, Tensor], layout: Layout, world: int) -> None:
        """Write the plan. It leaves the loop's random numbers unchanged."""
        states, self._optimizer.state = self._optimizer.state, defaultdict(dict)
        try:
            with torch.random.fork_rng(), gradients.unfollowed(self._optimizer):
                around = LossOfLoop(self._module, self._compute, self._owner, *layout)
                graph = capture(
                    around, kwargs=dict(tensors), optimizer=self._optimizer, autocast=self._autocast, outputs=True
                )
                try:
                    plan = compile(graph, self._plan, self._cluster or f"local:{world}")
                except PlanError as error:
                    raise _UndividedError(str(error)) from error
                plan.save(folder, self._seed, evaluation=False)
        finally:
            self._optimizer.state = states


def put(planned: Planned | None, is_last: bool = False) -> None:
    """Set the trained weights and states as `Planned.put` does, if a step was made. `is_last`: no update follows."""
    if planned is not None:
        planned.put()
        planned.is_open = planned.is_open and not is_last


def follow(optimizer: torch.optim.Optimizer, owner: object) -> None:
    """Let the steps of a loop's optimizer be updates of the plan in the attribute `_planned` of an owner."""
    # A cycle would keep the processes' groups up to the end of Python.
    own = ref(owner)
    gradients.follow(optimizer, lambda: getattr(own(), "_planned", None))
