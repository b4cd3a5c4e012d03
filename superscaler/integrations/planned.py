"""A plan as the forward, the backward and the update of another library's loop.

The loop keeps its own module and optimizer. A step reads the options of the optimizer's parameter groups, the learning
rates among them; the module and the optimizer get the trained weights and states before they are saved or evaluated, so
that checkpoints are the loop's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from superscaler.artifact import describe
from superscaler.comm.alike import ranks
from superscaler.comm.distributed import connect
from superscaler.errors import InputError
from superscaler.integrations import gradients, state
from superscaler.integrations.alike import check_alike, check_done, check_equal
from superscaler.integrations.loss import Compute, Layout, LossOfLoop, Notes, named, shapes_of
from superscaler.integrations.source import Form, Source, UndividedError
from superscaler.plan import load
from superscaler.runtime.shapes.forms import paired
from superscaler.runtime.step import Step
from superscaler.simulate.system import System

_LOG = logging.getLogger(__name__)


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
        notes: Notes | None = None, torch_compile: bool = False, owner: object = None,
        cuda_graph: bool = False,
    ) -> None:  # fmt: skip
        self._module, self._optimizer, self._compute = module, optimizer, compute
        self.notes = (notes or Notes()).by_name
        system = System(torch_compile=torch_compile, cuda_graph=cuda_graph)
        self._source = Source(module, optimizer, compute, plan, cluster, autocast, self.notes, owner, system)
        self._directory, self._autocast, self._seed, self._steps = directory, autocast, seed, steps
        self._torch_compile, self._cuda_graph = torch_compile, cuda_graph
        self._is_stale, self._saved = False, 0
        # By what each was compiled for, several shapes in one; of several, one has the present state.
        self._made: dict[tuple[str, Form], Step] = {}
        # The inputs that the program of a step reads for a batch of some shapes, of other shapes than the first.
        self._inputs: dict[tuple[int, str], list[str]] = {}
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

    def __call__(self, batch: Any, clip: float | None = None) -> Tensor:
        """Train on a global batch and return its loss. A batch of other shapes is padded, or gets its own program."""
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
        given, form = shapes_of(tensors), self._source.form()
        tensors = self._filled(tensors, form)
        step = self._for(tensors, layout, given, form)
        self.step = step or self.step
        assert self.step is not None
        if self.step.watch is not None:
            self.step.watch.begun += 1
        if step is None:
            return None, {}
        step.groups.set(self._optimizer.param_groups)
        names = self._inputs.get((id(step), shapes_of(tensors)), step.inputs)
        return step, {name: tensors[name] for name in names}

    def _filled(self, tensors: dict[str, Tensor], form: Form) -> dict[str, Tensor]:
        """Return a batch that is filled up to the smallest shape that holds it; itself if there is none."""
        found = () if self.step is None else self.step.choice.fillings(tensors)
        return next((batch for batch in found if self._made.get((shapes_of(batch), form)) is self.step), tensors)

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

    def _for(self, tensors: Mapping[str, Tensor], layout: Layout, given: str, form: Form) -> Step | None:
        """Return the step for the shapes of a batch and the form of the module, with the present state; None if the
        plan does not divide a batch of these shapes. `given`: the shapes before the batch was filled.
        """
        key = shapes_of(tensors), form
        known = self._made.get(key)
        if known is not None and known is self.step and given in self._given:
            return known
        if self.step is not None:
            self._meet(self._source.facts(given, key[1]))
        self._given.add(given)
        if known is not None and known is self.step:
            return known
        is_shape = known is None and self.step is not None and self._is_of(self.step, form)
        if key in self._undivided:
            self.put()
            return None
        try:
            if is_shape and self._added(tensors, layout, key[0]):
                return self.step
            self.put()
            if self._made and known is None:
                others = "other weights or modules are trained, or the model reads other values"
                what = "its weights rest in other pieces" if is_shape else others
                _LOG.warning("%s: a plan is compiled for %s, with weights of its own in memory.", what, key[0])
            step = known or self._compiled(tensors, layout)
        except UndividedError as error:
            # The weights must be those of the present plan.
            if self.step is None or not self._is_of(self.step, form):
                raise
            self.put()
            self._undivided.add(key)
            _LOG.warning(
                "%s: the plan does not divide this batch, so each rank computes it in the whole module. %s",
                key[0],
                error,
            )
            return None
        form = self._source.form()
        # Values seldom come back, so plans of earlier ones would only fill the memory.
        kept = {key: old for key, old in self._made.items() if key[1].values == form.values}
        for old in (old for key, old in self._made.items() if key not in kept):
            if old.watch is not None:
                old.watch.close()
        self._made = {**kept, (key[0], form): step}
        self._before = self._source.facts(key[0], form)
        state.take(step, self._around, self._optimizer, has_weights=known is None)
        # The weights of a new plan are those of rank 0.
        self._is_stale = known is None
        step.state.steps = self._steps
        return step

    def _is_of(self, step: Step, form: Form) -> bool:
        """Return whether a step is of a form of the module."""
        return any(made is step and other == form for (_, other), made in self._made.items())

    def _added(self, tensors: Mapping[str, Tensor], layout: Layout, shapes: str) -> bool:
        """Add a program for the shapes of a batch to the present step. Return False where it would keep weights in
        other pieces.
        """
        step = self.step
        assert step is not None
        _LOG.warning("a batch has other shapes or dtypes: a program is compiled for %s, over the same weights.", shapes)
        check_equal(tensors)
        folder, number = step.choice.base.directory, len(step.choice.listed) - 1
        assert folder is not None

        def save() -> bool:
            plan = self._source.plan_of(tensors, layout, step.world)
            other = describe(plan.compiled)
            rests = all(not paired(step.plan, other, rank).odd for rank in range(step.world))
            if rests:
                plan.write_shape(folder, number, self._seed)
            return rests

        if not self._source.on_first(save):
            return False
        saved = step.choice.refresh()
        assert saved is not None
        self._inputs[id(step), shapes] = list(saved.plan["inputs"])
        form = self._source.form()
        kept = {key[0] for key, made in self._made.items() if made is step}
        self._made |= {(key, form): step for key in (*kept, shapes)}
        self._before = self._source.facts(shapes, form)
        return True

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

    def _compiled(self, tensors: Mapping[str, Tensor], layout: Layout) -> Step:
        """Return the step of a new plan, with the weights of rank 0."""
        communicator = connect()
        check_equal(tensors)
        folder = self._directory / str(self._saved)

        def save() -> None:
            self._source.plan_of(tensors, layout, communicator.world).save(folder, self._seed, evaluation=False)

        self._source.on_first(save)
        self._saved += 1
        return load(folder, torch_compile=self._torch_compile, cuda_graph=self._cuda_graph)


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
