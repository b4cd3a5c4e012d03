"""A plan as the forward, the backward and the update of another library's loop.

The loop keeps its own module and optimizer. A step reads the options of the optimizer's parameter groups, the learning
rates among them; the module and the optimizer get the trained weights and states before they are saved or evaluated, so
that checkpoints are the loop's own.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from superscaler.bits import bytes_of
from superscaler.comm.alike import ranks
from superscaler.comm.distributed import connect
from superscaler.errors import InputError, PlanError, a
from superscaler.integrations import state
from superscaler.plan import capture, compile, load
from superscaler.runtime.step import Step
from superscaler.store.folder import digest

_LOG = logging.getLogger(__name__)
# From the user's module and a batch: the loss, and values to log by name.
Compute = Callable[[nn.Module, Any], tuple[Tensor, Mapping[str, Tensor]]]


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
    the capture on rank 0; all ranks get it. `torch_compile`: as of `ss.load`. `owner`: the object whose method
    `compute` calls; default: the module. Numbers, flags and texts that it reads from both may change between steps.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, compute: Compute, plan: str | Callable[..., Any],
        cluster: str | None, directory: Path, autocast: str | None = None, seed: int = 0, steps: int = 0,
        notes: dict[str, Any] | None = None, torch_compile: bool = False, owner: object = None,
    ) -> None:  # fmt: skip
        self._module, self._optimizer, self._compute = module, optimizer, compute
        self._plan, self._cluster, self._directory = plan, cluster, directory
        self._autocast, self._seed, self._steps = autocast, seed, steps
        self._torch_compile = torch_compile
        self._is_stale, self._saved, self._owner = False, 0, owner
        # The objects of the user by path, and the attributes of them that captures read: path and name.
        self._objects: dict[str | None, object] = {None: owner or module, **dict(module.named_modules())}
        self._objects |= _settings(self._objects)
        self._read: list[tuple[str | None, str]] = []
        # By what each was compiled for; of several, one has the present state.
        self._made: dict[tuple[str, Form], Step] = {}
        # The shapes of batches, unfilled, that all ranks were given.
        self._given: set[str] = set()
        # What the plan of `step` is compiled for, in words.
        self._before: dict[str, str] = {}
        self.step: Step | None = None
        self.notes = {} if notes is None else notes

    def __call__(self, batch: Any, clip: float | None = None) -> Tensor:
        """Train on a global batch and return its loss. A batch of other shapes is padded, or gets its own plan."""
        tensors, spec = _named(batch)
        given = _shapes(tensors)
        if self.step is not None:
            tensors = self.step.padding.filled(tensors, self.step.inputs)
        self.step = step = self._for(tensors, spec, given)
        step.set_options(self._optimizer.param_groups)
        if step.watch is not None:
            step.watch.begun += 1
        loss: Tensor = step({name: tensors[name] for name in step.inputs}, clip=clip)
        self._steps, self._is_stale = step.state.steps, True
        return loss

    def put(self) -> None:
        """Set the trained weights and states in the module and the optimizer of each rank; all ranks call this."""
        if self.step is not None and self._is_stale:
            state.put(self.step, self._around, self._optimizer)
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

    def _for(self, tensors: Mapping[str, Tensor], spec: Any, given: str) -> Step:
        """Return the step for the shapes of a batch and the form of the module, with the present state. `given`: the
        shapes before the batch was filled.
        """
        key = _shapes(tensors), self._form()
        known = self._made.get(key)
        if known is not None and known is self.step and given in self._given:
            return known
        if self.step is not None:
            self._meet(self._facts(given, key[1]))
        self._given.add(given)
        if known is not None and known is self.step:
            return known
        self.put()
        if self._made and known is None:
            is_batch = all(form == key[1] for _, form in self._made)
            others = "other weights or modules are trained, or the model reads other values"
            what = "a batch has other shapes or dtypes" if is_batch else others
            _LOG.warning("%s: a plan is compiled for %s, with weights of its own in memory.", what, key[0])
        step = known or self._compiled(tensors, spec)
        form = self._form()
        # Values seldom come back, so plans of earlier ones would only fill the memory.
        kept = {key: old for key, old in self._made.items() if key[1].values == form.values}
        for old in (old for key, old in self._made.items() if key not in kept):
            if old.watch is not None:
                old.watch.close()
        self._made = {**kept, (key[0], form): step}
        self._before = self._facts(key[0], form)
        state.take(step, self._around, self._optimizer, has_weights=known is None)
        step.state.steps = self._steps
        return step

    def _meet(self, now: Mapping[str, str]) -> None:
        """Wait for all ranks. Raise InputError if others begin the step without, or come with other facts."""
        assert self.step is not None
        if self.step.watch is not None and (others := self.step.watch.meet()):
            name = next(name for name in now if now[name] != self._before.get(name))
            raise InputError(
                f"{name} was {self._before.get(name)} and is {now[name]} now on rank {dist.get_rank()}, but "
                f"{ranks(others)} began step {self._steps + 1} without that change, with the plan of before; make it "
                "on all ranks before the same step."
            )
        _check_alike(now)

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

    def _compiled(self, tensors: Mapping[str, Tensor], spec: Any) -> Step:
        """Return the step of a new plan, with the weights of rank 0."""
        communicator = connect()
        _check_equal({name: _hash(x) for name, x in tensors.items()})
        folder = self._directory / str(self._saved)
        found: list[Any] = ["", self.notes, self._read]
        if communicator.rank == 0:
            try:
                with _reads(self._objects) as read:
                    self._save(folder, tensors, spec, communicator.world)
                found[2] = [*self._read, *(read - {*self._read})]
            except PlanError as error:
                found[0] = str(error)
        dist.broadcast_object_list(found)
        why, notes, self._read = found
        if why:
            raise InputError(why)
        _check_alike(self._facts("", self._form()))
        self.notes.update(notes)
        self._saved += 1
        return load(folder, torch_compile=self._torch_compile)

    def _save(self, folder: Path, tensors: Mapping[str, Tensor], spec: Any, world: int) -> None:
        """Write the plan. It leaves the loop's random numbers unchanged."""
        states, self._optimizer.state = self._optimizer.state, defaultdict(dict)
        try:
            with torch.random.fork_rng():
                around = LossOfLoop(self._module, self._compute, self._owner, [*tensors], spec)
                graph = capture(
                    around, kwargs=dict(tensors), optimizer=self._optimizer, autocast=self._autocast, outputs=True
                )
                plan = compile(graph, self._plan, self._cluster or f"local:{world}")
                plan.save(folder, self._seed)
        finally:
            self._optimizer.state = states


def _settings(objects: Mapping[str | None, object]) -> dict[str | None, object]:
    """Return the `config` and `args` that objects have, each by its first path."""
    found = {
        id(value): (f"{path}.{name}" if path else name, value)
        for path, one in [*objects.items()][::-1]
        for name, value in vars(one).items()
        # No read of a SimpleNamespace can be seen: its class is C's.
        if name in ("config", "args")
        and hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | SimpleNamespace)
    }
    return dict(found.values())


@contextmanager
def _reads(objects: Mapping[str | None, object]) -> Iterator[set[tuple[str | None, str]]]:
    """Collect the numbers, flags and texts that are read from attributes of objects: the path and the name.

    Not what the model sets when it first runs, as `config.problem_type`: other ranks have not run it.
    """
    before = {path: dict(vars(one)) for path, one in objects.items()}
    paths, found = {id(one): path for path, one in objects.items()}, set[tuple[str | None, str]]()

    def noting(read: Callable[[object, str], Any]) -> Callable[[object, str], Any]:
        def get(one: object, name: str) -> Any:
            value = read(one, name)
            if isinstance(value, bool | int | float | str) and id(one) in paths and name in vars(one):
                found.add((paths[id(one)], name))
            return value

        return get

    classes: set[Any] = {type(one) for one in objects.values() if not isinstance(one, nn.Module)} | {
        nn.Module,
        type(objects[None]),
    }
    with ExitStack() as stack:
        for kind in classes:
            stack.enter_context(patch.object(kind, "__getattribute__", noting(kind.__getattribute__)))
        yield found
    found -= {(path, name) for path, name in found if before[path].get(name) != vars(objects[path])[name]}


class Changing:
    """An object of a loop during a capture. Raises InputError where attributes are read that change between steps.

    `path`: the object in the user's code. `hook`: a method in which the user can change a batch.
    """

    def __init__(self, whole: object, path: str, names: Sequence[str], hook: str) -> None:
        self._whole, self._path, self._names, self._hook = whole, path, names, hook

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            return getattr(self._whole, name)
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"].split(".")[0] in (
            "superscaler",
            "lightning",
            "transformers",
        ):
            frame = frame.f_back
        raise InputError(
            f"{self._path}.{name}, read at {frame.f_code.co_filename}:{frame.f_lineno}, changes from step to step, but "
            f"a plan reads it once. Add a tensor of it to the batch, in {self._hook}, and read that."
        )


def put(planned: Planned | None) -> None:
    """Set the trained weights and states as `Planned.put` does, if a step was made."""
    if planned is not None:
        planned.put()


def users(objects: Iterable[object], events: Sequence[str], library: str) -> list[str]:
    """Return the events of objects, as `Class.event`, that are no functions of the library itself."""
    found = ((one, event, getattr(one, event, None)) for one in objects for event in events)
    own = re.compile(rf"({library}|superscaler)\b")
    return [
        f"{type(one).__name__}.{event}"
        for one, event, function in found
        if function is not None and not own.match(getattr(function, "__module__", ""))
    ]


def warn_of_stale(found: Sequence[str], put: str) -> None:
    """Log once which of the user's functions get older weights, and the call that puts the present ones."""
    if found and os.environ.get("RANK", "0") == "0":
        _LOG.warning(
            "%s: the module has older weights there, since a plan trains its own, of the last evaluation, checkpoint, "
            "or end of an epoch with a callback. To read the present ones, call %s on all ranks; changes are lost.",
            ", ".join(found),
            put,
        )


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
        batch = pytree.tree_unflatten([tensors[name] for name in self.names], self.spec)
        loss, logged = self.compute(self.module, batch)
        return {"loss": loss, "logged": dict(logged)}


def _named(batch: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a batch by the names of their places, and the form of the batch."""
    pairs, spec = pytree.tree_flatten_with_path(dict(batch) if isinstance(batch, Mapping) else batch)
    found: dict[str, Tensor] = {}
    for path, value in pairs:
        name = "_".join(re.findall(r"\w+", pytree.keystr(path)))
        if not isinstance(value, Tensor):
            raise InputError(f"a batch has {a(type(value).__name__)} at '{name}'; a plan takes tensors only.")
        found[name if name.isidentifier() else f"input_{name}"] = value
    return found, spec


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors.items())


def _check_alike(facts: Mapping[str, str]) -> None:
    """Raise InputError on all ranks if one has other facts."""
    ranks = _of_all(facts)
    for rank, other in enumerate(ranks):
        for name in {**ranks[0], **other}:
            one, two = ranks[0].get(name, "missing"), other.get(name, "missing")
            if one != two:
                raise InputError(
                    f"{name} is {one} on rank 0 and {two} on rank {rank}; a plan is compiled for one of them: make it "
                    "equal on all ranks."
                )


def _check_equal(batch: Mapping[str, str]) -> None:
    """Raise InputError on all ranks if one has a batch of other hashes."""
    batches = _of_all(batch)
    if others := [rank for rank, other in enumerate(batches) if other != batches[0]]:
        raise InputError(
            f"rank {others[0]} was given another batch than rank 0; a plan takes the same global batch on all ranks: "
            "seed them alike, and do not share samples out."
        )


def _of_all(facts: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Return the facts of all ranks."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, facts)
    return ranks


def _hash(x: Tensor) -> str:
    return digest(bytes_of(x.cpu()).numpy().tobytes())
