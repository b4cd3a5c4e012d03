"""The `step` of one rank, from an emitted plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from superscaler.comm.alike import Alike
from superscaler.comm.communicator import Communicator
from superscaler.errors import InputError
from superscaler.runtime import evaluation
from superscaler.runtime.batch import Padding, put_together
from superscaler.runtime.compiled.segments import CompiledSegments
from superscaler.runtime.executor import Rank, take
from superscaler.runtime.metrics import Known, Meter, metrics
from superscaler.runtime.nonfinite import watched
from superscaler.runtime.optimizer import COMPILED_ROUNDING, ROUNDING, averaged
from superscaler.runtime.parameter_groups import ParameterGroups
from superscaler.runtime.replay.replays import Recorder, Replays
from superscaler.runtime.replayable.refusals import check_scaler
from superscaler.runtime.scaling import Scaler
from superscaler.runtime.shapes.choice import Choice
from superscaler.runtime.shapes.forms import Form, Saved, tables_of
from superscaler.store.rank_state import set_state, state_of
from superscaler.store.restore import load_weights, restore
from superscaler.store.save import save

if TYPE_CHECKING:
    from superscaler.launch.watch import Watch


class Evaluation(NamedTuple):
    """A plan of evaluation, its code and its weights on a rank, and its plans of other shapes."""

    plan: Mapping[str, Any]
    programs: Mapping[str, ModuleType]
    weights: Mapping[str, Tensor]
    shapes: Callable[[], Sequence[Saved]] = tuple


class Step:
    """One rank of a plan. `step(batch)` runs one iteration on the global batch and returns the loss; in an inference
    plan, the module's outputs.

    `batch`: a tensor per input, of the shapes in `inputs`, integers below those in `bounds`. The loss is a scalar,
    equal on all ranks. A plan with several `iterations` a step (`graph.unroll`) takes a list of as many batches, and
    returns a tensor of their losses. With `clip`, the gradients are scaled so that their global norm is at most `clip`,
    and `last_norm` is the norm before. With `check_finite`, a loss or a gradient that is not finite raises
    RuntimeFailure, with the name of the operator, on all ranks and with nothing changed.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        programs: Mapping[str, ModuleType],
        rank: Rank,
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.plan = plan
        # Tensors of the module that no device holds: unread parameters, and buffers that are constants in the plan.
        self.fixed = dict(fixed or {})
        self.state = rank
        self.rank, self.world = rank.communicator.rank, rank.communicator.world
        # What the last step ran: the program of the capture, or that of another shape.
        self.form = Form(plan, programs, rank, rank.weights)
        self.choice = Choice(self.form, rank)
        self.inputs, self.bounds = self.form.inputs, dict[str, int](plan["bounds"])
        self.padding = Padding.of(plan)
        self.watch: Watch | None = None
        # The plan of evaluation, and what fills its step, once one was evaluated.
        self.evaluation: Callable[[], Evaluation] | None = None
        self._filler: evaluation.Filler[Step] | None = None
        self.trains = bool(plan["loss_dtype"])
        self.iterations: int = plan.get("iterations", 1)
        # What is known of a step of a program before it runs, and the seconds of the last one.
        self.known: Callable[[Form], Known] = lambda _: Known()
        self._meter = Meter(rank.device)
        self.groups = ParameterGroups(plan["optimizer"], rank)

    def __call__(
        self,
        batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        clip: float | None = None,
        check_finite: bool = False,
    ) -> Any:
        """Run one iteration on the global batch and return the loss, a scalar that is equal on all ranks; all ranks
        call this. A plan that trains nothing returns the module's outputs.

        `batch`: a tensor per input of the capture, of its shape (`inputs`). `clip`: the largest global norm of the
        gradients; `last_norm` is the norm before. `check_finite`: raise RuntimeFailure, which names the operator, where
        a loss or a gradient is not finite, with nothing changed. Raises InputError for a batch of another form.
        """
        if self.watch is not None:
            self.watch.calls += 1
        form, batch = self.choice.of(batch, fills=self.trains)
        if self.iterations > 1 and (clip is not None or check_finite):
            raise InputError(
                f"this plan runs {self.iterations} iterations at once, whose updates do not wait for all gradients, "
                f"which {'clip' if clip is not None else 'check_finite'} looks at; leave it out, or take another plan."
            )
        if not self.trains:
            return self._infer(form, batch, clip is not None or check_finite)
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            raise InputError("step() trains: call it outside of torch.no_grad() and torch.inference_mode().")
        if check_finite and form.replays is not None:
            raise InputError(
                "check_finite reads the loss and the gradients of each step, and a replay reads nothing: leave it or "
                "cuda_graph out."
            )
        if clip is not None and not (isinstance(clip, Real) and not isinstance(clip, bool) and clip > 0):
            raise InputError(f"clip cannot be {clip!r}; it is the largest norm of the gradients, a number above 0.")
        self.groups.follow()
        self.form, self.state.batch, self.state.updates.clip = form, batch, clip
        self.state.beside = form.alike.numbers(batch) if form.alike else None
        with self._meter, form.running(self.state):
            loss: Tensor = watched.run(self, form.function) if check_finite else form.run(self.state)
        if form.alike is not None and self.state.beside is not None:
            form.alike.check(self.state.beside, batch, self.state.steps)
        return loss

    def _infer(self, form: Form, batch: Mapping[str, Tensor], is_asked: bool) -> Any:
        if is_asked:
            raise InputError("this plan trains nothing, so there is no gradient to clip or to check; call step(batch).")
        self.form, self.state.batch = form, batch
        with self._meter, form.running(self.state), torch.no_grad():
            form.function(self.state)
        if form.alike is not None:
            form.alike.meet(batch, self.state.steps)
        return self.outputs

    def infer(self, batch: Mapping[str, Tensor]) -> Any:
        """Return the module's result for a batch in eval mode, with the present weights; all ranks call this.

        It runs the plan of evaluation that `plan.save` has written. Raises InputError, with the reason, without one.
        """
        with evaluation.uncounted(self):
            return self._filled()(batch)

    def evaluate(
        self, batches: Iterable[Mapping[str, Tensor]], metrics: Mapping[str, evaluation.Metric] | None = None
    ) -> dict[str, float]:
        """Return the mean over batches of metrics of the module in eval mode; all ranks call this with equal batches.

        `metrics`: by name, functions of the module's outputs and the batch; default: its loss. No gradient is computed,
        nothing is changed, nothing is written. Raises InputError as `infer`.
        """
        with evaluation.uncounted(self):
            return evaluation.mean(self._filled(), batches, metrics)

    @property
    def evaluating(self) -> Step:
        """Return the step of evaluation with the weights of the last evaluation, or this step if it trains nothing."""
        return self._filled_by().evaluation if self.trains else self

    def _filled(self) -> Step:
        """Return the step of evaluation with the present weights."""
        if self.trains:
            self._filled_by().fill()
        return self.evaluating

    def _filled_by(self) -> evaluation.Filler[Step]:
        if self.evaluation is None:
            raise InputError(
                "this plan was saved without one of evaluation: plan.save(directory), or superscaler compile "
                "--evaluation, writes that of the captured module, plan.save(directory, evaluation=that) another one."
            )
        # Not a cached property: its lock is that of all ranks in a process, which build their steps together.
        if self._filler is None:
            own = self.evaluation()
            evaluation.check_models(own.plan, self.plan)
            shared = evaluation.shared(own.plan, self)
            built = build_step(own.plan, own.programs, own.weights, self.state.communicator, shared=shared)
            built.choice.saved = own.shapes
            self._filler = evaluation.Filler(built, self)
        return self._filler

    @property
    def directory(self) -> Path | None:
        return self.form.directory

    @property
    def alike(self) -> Alike | None:
        return self.form.alike

    @alike.setter
    def alike(self, value: Alike | None) -> None:
        self.form.alike = value

    @property
    def replays(self) -> Replays | None:
        return self.form.replays

    @property
    def outputs(self) -> Any:
        """Return the module's outputs of the last step, in its form, without the trained loss; None if the plan keeps
        none.

        Every rank has all elements, unless the plan places an output itself: then the rank has the placed parts, None
        if there are none.
        """
        return put_together(self.form.result, self.state.outputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of training on this rank: slices of `weights`, `optimizer`, `lr` and other `options` of all
        parameter groups, `steps`, and `scaler` (in the form of `torch.amp.GradScaler.state_dict`; None without one).
        """
        return state_of(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same rank of the same plan. Raises InputError for another."""
        set_state(self, saved)

    def save(self, directory: str | Path, keep: int | None = None) -> Path:
        """Save a checkpoint into a folder of checkpoints, and wait until it is whole; all ranks call this.

        Returns the checkpoint. `keep`: the number of whole ones to keep; the oldest are removed (default: all stay).
        Raises InputError if it cannot be saved; earlier ones are unchanged.
        """
        return save(self, directory, keep)

    def restore(self, path: str | Path) -> int:
        """Continue from a checkpoint, saved under any plan of the same model; all ranks call this.

        `path`: a checkpoint, or a folder of them (the last whole one). Returns the number of its steps. Under the same
        plan training continues bit for bit. Raises InputError, on all ranks and with nothing changed on any, for a
        damaged checkpoint or one of another model or optimizer.
        """
        return int(restore(self, path)["step"])

    def load_weights(self, path: str | Path) -> list[str]:
        """Set the weights from a checkpoint, a safetensors file, or a folder with `model.safetensors` or its index; all
        ranks call this. Returns the names there that the model lacks. Raises InputError as `restore`.
        """
        return load_weights(self, path)

    @property
    def ema(self) -> float | None:
        """The decay of averages of the weights over steps, a number from 0 to 1; None (the default): no averages.

        They are saved in checkpoints beside the weights, and restored with them. A step without a decay drops them.
        """
        return self.state.updates.ema

    @ema.setter
    def ema(self, decay: float | None) -> None:
        if decay is not None and not (isinstance(decay, Real) and 0 <= decay < 1):
            raise InputError(f"step.ema cannot be {decay!r}; a decay is a number from 0 to below 1, as 0.999.")
        self.state.updates.ema = decay

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the weights have the values of their averages: `with step.averaged():
        step.evaluate(batches)`.
        """
        return averaged(self.state.updates.optimizer)

    @property
    def last_norm(self) -> float | None:
        found = self.state.updates.last_norm
        return None if found is None else float(found)

    def metrics(self) -> dict[str, Any]:
        """Return numbers of the last step on this rank, to print or to log; other ranks need not call this.

        `seconds` (of an iteration), `tokens` or `samples` of a batch and the same `_per_second`; `tflops` of the model
        itself on this device, and `mfu`, their share of its peak; `memory_bytes` now, `peak_memory_bytes` and
        `predicted_memory_bytes`; `gradient_norm` of a step with `clip`. None stands for what is unknown. The prediction
        is made at the first call, which takes seconds. Raises InputError before the first step.
        """
        if not self._meter.is_known:
            raise InputError("metrics are of the last step, but this step has not run yet; call step(batch) first.")
        self.form.known = self.form.known or self.known(self.form)
        return metrics(self._meter.seconds / self.iterations, self.form.inputs, self.last_norm, self.form.known)

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of the plan that this rank put on links since the start (`plan.counts`: all in a step)."""
        return self.state.communicator.moved

    @property
    def lr(self) -> float | tuple[float, ...]:
        """The learning rate; if the parameter groups differ, one for each group of the user's optimizer.

        Assign a number if all groups have one rate, else one for each group: `step.lr = [r * 0.5 for r in step.lr]`.
        Raises InputError for a number that would make different rates equal, and for another number of rates.
        """
        return self.groups.lr

    @lr.setter
    def lr(self, value: float | Sequence[float]) -> None:
        self.groups.lr = value

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer for schedules of `torch.optim.lr_scheduler`, whose parameter groups have the options that
        steps take: `schedule = CosineAnnealingLR(step.optimizer, 100)`.
        """
        return self.groups.scheduled

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.state.communicator.close()


def build_step(
    plan: Mapping[str, Any],
    programs: Mapping[str, ModuleType],
    weights: Mapping[str, Tensor],
    communicator: Communicator,
    fixed: Mapping[str, Tensor] | None = None,
    shared: Mapping[str, Tensor] | None = None,
    torch_compile: bool = False,
    recorder: Recorder | None = None,
) -> Step:
    """Return the step of a rank. `weights`: whole tensors by pTensor name; each rank keeps its own slices. `fixed`: on
    rank 0, the module's tensors that no device holds. `shared`: existing slices by local name. `torch_compile`: its
    segments are compiled. `recorder`: steps are recorded by it, and replayed; raises InputError if they cannot be.
    """
    tables = tables_of(plan, communicator.rank)
    local = dict(shared or {})
    for entry in (entry for entry in tables["weights"] if entry["name"] not in local):
        piece = take(weights[entry["tensor"]], plan["slots"][entry["tensor"]], entry["box"])
        kept = piece.to("cpu" if entry.get("host") else communicator.device, copy=True)
        kept = kept.pin_memory() if communicator.device.type == "cuda" and not kept.is_cuda else kept
        local[entry["name"]] = kept.requires_grad_(entry["trained"])
    chosen, scaling = plan["optimizer"], plan["optimizer"]["scaler"]
    is_recorded = recorder is not None
    rounding = COMPILED_ROUNDING if torch_compile or is_recorded else ROUNDING
    optimizer = chosen["name"], chosen["groups"], bool(chosen.get("precision")), rounding, is_recorded
    dtype = getattr(torch, plan["loss_dtype"] or "float32")
    groups = {tuple(g) for d in plan["devices"] for g in d["groups"]} | {tuple(range(communicator.world))}
    communicator.prepare(sorted(groups))
    rank = Rank(communicator, tables, local, optimizer, dtype, plan["seed"])
    rank.updates.scaler = Scaler(scaling, communicator.device) if scaling else None
    rank.iterations = plan.get("iterations", 1)
    rank.compiled = CompiledSegments() if torch_compile else None
    step = Step(plan, programs, rank, fixed)
    if recorder is not None:
        if rank.updates.scaler is not None:
            check_scaler(rank.updates.optimizer)
        step.choice.replay(recorder)
    return step
