"""Lightning under a plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import proxy

import numpy as np
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from superscaler.errors import InputError, a
from superscaler.integrations.hooks import Changing, Unread, tell_of_gradients, users, warn_of_stale
from superscaler.integrations.loss import Notes
from superscaler.integrations.planned import Planned, follow, put

# In the folder of the run.
_FOLDER = "plan"
# Hooks between steps, where the module has older weights, and those around an epoch's end.
_STEPS = ("on_train_batch_start", "on_train_batch_end")
_EPOCHS = ("on_train_epoch_end", "on_train_epoch_start")
# Hooks around backward and update, which get whole gradients: of callbacks and the module; the module's and a
# strategy's own parts of a step.
_AROUND = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
)  # fmt: skip
_OF_MODULE = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients",
)  # fmt: skip
_OF_STRATEGY = ("backward", "pre_backward", "post_backward", "optimizer_step")
# Options of a DDPStrategy that change gradients or average weights.
_OF_DDP = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
# Of the trainer: what changes from step to step.
_CHANGING = (
    "global_step", "current_epoch", "is_last_batch", "callback_metrics", "logged_metrics", "progress_bar_metrics",
)  # fmt: skip
# Where a user can add to a batch.
_HOOK = "on_before_batch_transfer"
# Lightning's callbacks that read or change weights between steps.
_REFUSED = ("WeightAveraging", "StochasticWeightAveraging", "ModelPruning")
_AUTOCAST = {"32-true": None, "bf16-mixed": "bf16"}


class PlanStrategy(DDPStrategy):
    """A Lightning strategy whose training steps run under a plan: `Trainer(strategy=PlanStrategy("zero:stage=3"))`.

    `plan` and `cluster`: as of `ss.compile`; default cluster: the processes of this machine. `torch_compile` and
    `cuda_graph`: as of `ss.load`. `training_step` of the module is captured, with the tensors that it logs, and may not
    read the number of the batch. The batches of the module's loader are the global ones. Callbacks, loggers, schedules
    and checkpoints are Lightning's own. Validation runs in the whole module on each rank. Callbacks find the trained
    weights in the module at a validation, a checkpoint and the end of an epoch or of the training; in other hooks after
    `put_weights`. With hooks around backward and update each rank has whole gradients and weights in every step. Raises
    InputError for loops that no plan can run: see `_check`.
    """

    def __init__(
        self, plan: str | Callable[..., Any], cluster: str | None = None, torch_compile: bool = False,
        cuda_graph: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self._plan, self._cluster, self._torch_compile, self._cuda_graph = plan, cluster, torch_compile, cuda_graph
        self._planned: Planned | None = None
        for name in _OF_DDP:
            if options.get(name) is not None:
                raise InputError(f"{name} changes what the ranks of DDP send, which a plan does not run: leave it out.")

    def setup_environment(self) -> None:
        """Connect the ranks, and go on with the random numbers of before, as on one device."""
        states = _random()
        super().setup_environment()
        _set_random(states)

    def setup(self, trainer: Any) -> None:
        """Set up optimizers and loaders as on one device, with equal random numbers on all ranks."""
        self._trainer, self._planned = trainer, None
        trainer._accelerator_connector.use_distributed_sampler = False
        _set_random(self.broadcast(_random()))
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._check()
        for optimizer in self.optimizers:
            follow(optimizer, self)
        if not any(isinstance(one, _First) for one in trainer.callbacks):
            trainer.callbacks.insert(0, _First(self))

    def put_weights(self) -> None:
        """Set the trained weights and states in the module and the optimizer of each rank; all ranks call this."""
        put(self._planned)

    def configure_ddp(self) -> None:
        """Leave the module as it is: nothing sums its gradients."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the whole step, and log what the module logs. Its optimizer then finds no gradients.

        With hooks around backward and update it is the forward, and its backward gives the gradients.
        """
        batch, *rest = (*args, *kwargs.values())
        # A callback may have changed the trainer.
        self._check()
        if self._planned is None:
            self._planned = self._new(rest)
        if self.hooked():
            loss = self._planned.differentiate(batch)
        else:
            loss = self._planned(batch, self._trainer.gradient_clip_val or None)
        assert self.lightning_module is not None
        logged = self._planned.logged
        for name, options in self._planned.notes.items():
            self.lightning_module.log(name, loss.detach() if (value := logged[name]) is None else value, **options)
        return loss

    def hooked(self) -> list[str]:
        """Return the user's hooks around backward and update, and clipping that needs whole gradients."""
        trainer, module = self._trainer, self.lightning_module
        found = users((*trainer.callbacks, module), _AROUND, "lightning")
        found += [*users((module,), _OF_MODULE, "lightning"), *users((self,), _OF_STRATEGY, "lightning")]
        is_by_value = trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value"
        return [*found, *(["gradient_clip_algorithm='value'"] if is_by_value else [])]

    def _new(self, rest: list[Any]) -> Planned:
        rest = [Unread("batch_idx", _HOOK) if isinstance(x, int) else x for x in rest]
        notes = Notes()

        def compute(module: Any, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
            logged: dict[str, Tensor] = {}

            def log(name: str, value: Any, **options: Any) -> None:
                if not isinstance(value, Tensor):
                    raise InputError(
                        f"training_step logs {name}, {a(type(value).__name__)}, which would be the same in all steps "
                        "of a plan; log a tensor, or log it in a callback."
                    )
                logged[name], notes.by_name[name] = value, options

            def log_dict(values: Mapping[str, Any], **options: Any) -> None:
                for name, value in values.items():
                    log(name, value, **options)

            shown = Changing(trainer, "self.trainer", _CHANGING, _HOOK)
            with (
                patch.object(module, "log", log),
                patch.object(module, "log_dict", log_dict),
                patch.object(module, "_trainer", shown),
            ):
                found: Any = module.training_step(batch, *rest)
            loss = found.get("loss") if isinstance(found, Mapping) else found
            if not isinstance(loss, Tensor):
                raise InputError(
                    f"training_step returns {a(type(found).__name__)} without a loss; a plan trains on the loss of "
                    "each batch: leave batches to skip out of the loader."
                )
            # The loss itself is no other output: one that reads the loss would wait for all microbatches.
            return loss, {name: value if value is loss else value.detach() for name, value in logged.items()}

        trainer, (optimizer,) = self._trainer, self.optimizers
        folder, autocast = Path(trainer.default_root_dir) / _FOLDER, _AUTOCAST[trainer.precision]
        return Planned(
            self.lightning_module, optimizer, compute, self._plan, self._cluster, folder, autocast,
            steps=trainer.global_step, notes=notes, torch_compile=self._torch_compile, cuda_graph=self._cuda_graph,
        )  # fmt: skip

    def _check(self) -> None:
        """Raise InputError for a loop that is not one forward, backward and update of one optimizer."""
        trainer, module = self._trainer, self.lightning_module
        for is_wrong, what in (
            (not module.automatic_optimization, "manual optimization; return the loss from training_step"),
            (len(self.optimizers) != 1, f"{len(self.optimizers)} optimizers; give one, with parameter groups"),
            (
                trainer.accumulate_grad_batches != 1,
                "accumulate_grad_batches; give larger batches, and the plan gradient_accumulation",
            ),
            (
                any(isinstance(one, callbacks.GradientAccumulationScheduler) for one in trainer.callbacks),
                "GradientAccumulationScheduler; give larger batches, and the plan gradient_accumulation",
            ),
            (
                not type(self.precision_plugin).__module__.startswith("lightning."),
                f"{type(self.precision_plugin).__name__}, a precision plugin of your own; take precision='bf16-mixed', "
                "or hooks of the module",
            ),
            (
                bool(users((self,), ("training_step",), "lightning")),
                f"{type(self).__name__}.training_step; override that of the module",
            ),
            *(
                (
                    isinstance(one, getattr(callbacks, name, ())),
                    f"{type(one).__name__}, which reads or changes weights "
                    "between steps; leave it out, or write the loop yourself",
                )
                for one in trainer.callbacks
                for name in _REFUSED
            ),
            (trainer.precision not in _AUTOCAST, f"precision {trainer.precision}; take one of {', '.join(_AUTOCAST)}"),
        ):
            if is_wrong:
                raise InputError(f"a plan does not run {what}.")

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Give the gradients to the module if hooks read them; otherwise the step had its backward."""
        assert self._planned is not None
        return super().backward(closure_loss, *args, **kwargs) if self._planned.is_open else closure_loss

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, with the trained weights; the state of the optimizer is set, too."""
        put(self._planned)
        return super().lightning_module_state_dict()


def _random() -> Any:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_random(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


class _First(callbacks.Callback):
    """The callback before all others, which gives the module the trained weights. The hooks of a strategy run last."""

    def __init__(self, strategy: PlanStrategy) -> None:
        # A cycle would keep the processes' groups up to the end of Python.
        self._strategy = proxy(strategy)

    def _users(self, events: Sequence[str]) -> list[str]:
        return users((*self._strategy._trainer.callbacks, self._strategy.lightning_module), events, "lightning")

    def on_train_start(self, *_: Any) -> None:
        """Say which hooks get whole gradients, or older weights."""
        found = self._strategy.hooked()
        tell_of_gradients(found)
        warn_of_stale([] if found else self._users(_STEPS), "trainer.strategy.put_weights()")

    def on_train_epoch_end(self, *_: Any) -> None:
        """Give the module the trained weights if a hook may read them."""
        if self._strategy._planned is not None:
            self._strategy._planned.put_if(bool(self._users(_EPOCHS)))

    def on_validation_start(self, *_: Any) -> None:
        """Give the module the trained weights."""
        self._strategy.put_weights()

    def on_train_end(self, *_: Any) -> None:
        """Give the module the trained weights."""
        put(self._strategy._planned, is_last=True)
