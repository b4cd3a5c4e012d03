"""Hugging Face's Trainer under a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import proxy

import torch
import transformers
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn

from superscaler.errors import InputError
from superscaler.integrations.hooks import Changing, tell_of_gradients, users, warn_of_stale
from superscaler.integrations.planned import Planned, follow, put

# In the folder of the run.
_FOLDER = "plan"
# The input of a plan that is the Trainer's count of labels.
_COUNT = "num_items_in_batch"
# Events of callbacks between steps, where the model has older weights, and those around an epoch's end.
_STEPS = ("on_step_begin", "on_substep_end", "on_step_end", "on_log")
_EPOCHS = ("on_epoch_end", "on_epoch_begin")
# Events around the update, and methods around backward and update, which get whole gradients.
_AROUND = ("on_pre_optimizer_step", "on_optimizer_step")
_METHODS = ("training_step", "_clip_grad_norm", "_get_grad_norm")
# Of the state: what changes from step to step.
_CHANGING = (
    "global_step", "epoch", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip


class Trainer(transformers.Trainer):
    """A `transformers.Trainer` whose training steps run under a plan, in each process that torchrun has started.

    `plan` and `cluster`: as of `ss.compile`; default cluster: the processes of this machine. `cuda_graph`: as of
    `ss.load`. The loss is that of `compute_loss`, also of a subclass. `per_device_train_batch_size` is the global
    batch; the plan divides it. Arguments, callbacks, logs and checkpoints are the Trainer's own. An evaluation runs in
    the whole module on each rank, on all batches. Callbacks find the trained weights in the model at an evaluation, a
    checkpoint and the end of an epoch or of the training; at other events after `put_weights`. With callbacks or
    methods of a subclass around backward and update each rank has whole gradients and weights in every step. Raises
    InputError for gradient accumulation, fp16, FSDP, DeepSpeed and a `parallelism_config`.
    """

    current_flos: float
    # Whether the plan has computed a loss since the last step's end.
    has_run_plan: bool

    def __init__(
        self, *args: Any, plan: str | Callable[..., Any], cluster: str | None = None, cuda_graph: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **options)
        self._plan, self._cluster, self._cuda_graph = plan, cluster, cuda_graph
        self._planned: Planned | None = None
        self.has_run_plan = False
        self.callback_handler.callbacks.insert(0, _First(self))
        # All ranks have the same batches, so that no count, loss or prediction of another rank is missing.
        self.args.average_tokens_across_devices = False
        self.accelerator.gather = lambda tensors: tensors
        if self.args.gradient_accumulation_steps != 1:
            raise InputError(
                "gradient_accumulation_steps must be 1 under a plan: give a larger batch, and the plan "
                "gradient_accumulation."
            )
        if self.args.fp16:
            raise InputError("fp16 scales losses, which is not done in this loop; take bf16.")
        for name, is_on in (
            ("fsdp", self.args.fsdp or self.is_fsdp_enabled),
            ("deepspeed", self.args.deepspeed or self.is_deepspeed_enabled),
            ("parallelism_config", self.args.parallelism_config is not None),
        ):
            if is_on:
                raise InputError(
                    f"{name} divides the training among the processes, which the plan does: leave it out. The plan "
                    "zero:stage=3 shards weights and states as FSDP does; tensor_parallel splits layers."
                )

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run the whole step. The optimizer of the Trainer then finds no gradients, and changes nothing.

        With hooks around backward and update it is the forward and the backward, and the update waits.
        """
        model.train()
        if self._planned is None:
            self._planned = self._new()
        batch = dict(self._prepare_inputs(dict(inputs)))
        if num_items_in_batch is not None:
            batch[_COUNT] = torch.as_tensor(num_items_in_batch)
        self.has_run_plan = True
        if self.hooked():
            loss = self._planned.differentiate(batch)
            self.accelerator.backward(loss)
            return loss.detach()
        # The log has the norm of the gradients also where they are not clipped.
        return self._planned(batch, self.args.max_grad_norm if self.args.max_grad_norm > 0 else math.inf)

    def hooked(self) -> list[str]:
        """Return the user's functions around backward and update."""
        return [
            *users(self.callback_handler.callbacks, _AROUND, "transformers"),
            *users((self,), _METHODS, "transformers"),
        ]

    def _new(self) -> Planned:
        def compute(module: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
            inputs = dict(batch)
            shown = Changing(self.state, "self.state", _CHANGING, "training_step")
            with patch.object(self, "state", shown), self.compute_loss_context_manager():
                return self.compute_loss(module, inputs, num_items_in_batch=inputs.pop(_COUNT, None)), {}

        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        follow(optimizer, self)
        return Planned(
            self.model, optimizer, compute, self._plan, self._cluster,
            Path(self.args.output_dir) / _FOLDER, seed=self.args.seed, steps=self.state.global_step,
            torch_compile=self.args.torch_compile, owner=self, cuda_graph=self._cuda_graph,
        )  # fmt: skip

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Return the rows of a batch, which is the same on all ranks."""
        return self._train_batch_size * args.gradient_accumulation_steps

    def store_flos(self) -> None:
        """Count the operations of this rank, which sees all rows."""
        self.state.total_flos += self.current_flos
        self.current_flos = 0

    def _get_dataloader(self, *args: Any, **options: Any) -> Any:
        """Return a loader that gives each rank the same batches."""
        with patch.object(self.accelerator, "prepare_data_loader", self._whole):
            return super()._get_dataloader(*args, **options)

    def _whole(self, loader: Any, **_: Any) -> Any:
        accelerator = self.accelerator
        return prepare_data_loader(
            loader, accelerator.device, 1, 0, put_on_device=accelerator.device_placement,
            rng_types=accelerator.rng_types.copy(), use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed, dispatch_batches=False,
        )  # fmt: skip

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        """Prepare a new plan, and autocast in the model's forward, but no DistributedDataParallel."""
        self._planned = None
        prepare = partial(self.accelerator.prepare_model, evaluation_mode=True)
        with patch.object(self.accelerator, "prepare_model", lambda model, **_: prepare(model)):
            return super()._prepare_for_training(*args, **options)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return super()._clip_grad_norm(model) if self._is_open else self._last_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, grad_norm) if self._is_open else self._last_norm

    @property
    def _is_open(self) -> bool:
        return self._planned is not None and self._planned.is_open

    @property
    def _last_norm(self) -> float | None:
        return None if self._planned is None or self._planned.step is None else self._planned.step.last_norm

    def put_weights(self) -> None:
        """Set the trained weights and states in the model and the optimizer of each rank; all ranks call this."""
        put(self._planned)

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the model with the trained weights."""
        put(self._planned)
        super().save_model(*args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        put(self._planned)
        super()._save_checkpoint(*args, **options)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate the module with the trained weights."""
        put(self._planned)
        return super().evaluation_loop(*args, **options)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        put(self._planned, is_last=True)
        return super()._finalize_training(*args, **options)


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """A `transformers.Seq2SeqTrainer` whose training steps run under a plan, as those of `Trainer`.

    `predict_with_generate` generates with the trained weights, in the whole module on each rank.
    """


class _First(transformers.TrainerCallback):
    """The callback before all others, which gives the model of a Trainer the trained weights."""

    def __init__(self, trainer: Trainer) -> None:
        # A cycle would keep the processes' groups up to the end of Python.
        self._trainer: Any = proxy(trainer)

    def _users(self, events: Sequence[str]) -> list[str]:
        return users(self._trainer.callback_handler.callbacks, events, "transformers")

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Say which callbacks get whole gradients, or older weights."""
        found = self._trainer.hooked()
        tell_of_gradients(found)
        warn_of_stale([] if found else self._users(_STEPS), "trainer.put_weights()")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Forget the step before."""
        self._trainer.has_run_plan = False

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Refuse an update without the plan."""
        if not self._trainer.has_run_plan:
            # The type of a proxy is its own.
            kind = self._trainer.__class__.__name__
            raise InputError(
                f"{kind}.training_step computes a loss without the plan, so that each rank would train the whole "
                "model: call super().training_step(model, inputs, num_items_in_batch) in it, or write the loss as "
                f"{kind}.compute_loss."
            )

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Give the model the trained weights if a callback may read them."""
        if self._trainer._planned is not None:
            self._trainer._planned.put_if(bool(self._users(_EPOCHS)))
