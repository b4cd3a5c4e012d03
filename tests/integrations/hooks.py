"""Small trainings of Lightning and the Trainer, each with a hook around backward and update, under a plan or without.

Run as `hooks.py LIBRARY PLAN FOLDER CASE,CASE`, it writes per case what was logged and the weights, or the error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from superscaler.errors import InputError

Log = list[Any]


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(row)
        return {name: torch.randn(size, generator=draw).double() for name, size in (("x", 6), ("labels", 3))}


def body() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


# Methods of a LightningModule.


def clipped(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


def doubled(self: Any, loss: Tensor) -> None:
    (loss * 2).backward()


def signed(self: Any) -> None:
    for p in self.parameters():
        p.grad.copy_(p.grad.sign() * 0.01)


def skipped(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]) -> None:
    if batch_idx % 2:
        optimizer_closure()
    else:
        optimizer.step(closure=optimizer_closure)


def sharpened(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]) -> None:
    """SAM: the gradients of weights moved along the gradients; weights are limited after the update."""
    optimizer_closure()
    moved = [(p, 0.1 * p.grad) for p in self.parameters()]
    for p, step in moved:
        p.data.add_(step)
    optimizer_closure()
    for p, step in moved:
        p.data.sub_(step)
    optimizer.optimizer.step()
    for p in self.parameters():
        p.data.clamp_(-0.35, 0.35)


def kept(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    """Zero the gradients of every second batch only."""
    if batch_idx % 2:
        optimizer.zero_grad()


def logged(self: Any, optimizer: Any) -> None:
    from lightning.pytorch.utilities import grad_norm

    self.log_dict(grad_norm(self, norm_type=2))
    for p in self.parameters():
        if p.grad is not None:
            p.grad *= 0.1


def counted(self: Any, batch: Any, batch_idx: int) -> Tensor | None:
    return None if batch_idx == 1 else self.loss(batch)


def absent(self: Any, batch: Any) -> None:
    return None


def summed(self: Any, batch: Any) -> Tensor:
    self.log("tokens", (batch["labels"] > 0).sum())
    return self.loss(batch)  # type: ignore[no-any-return]


def between(self: Any, optimizer: Any) -> None:
    """Change weights after the loss and before its backward."""
    for p in self.parameters():
        p.data.mul_(0.9)


METHODS: dict[str, dict[str, Any]] = {
    "clip": {"configure_gradient_clipping": clipped},
    "backward": {"backward": doubled},
    "after_backward": {"on_after_backward": signed},
    "skip": {"optimizer_step": skipped},
    "sam": {"optimizer_step": sharpened},
    "zero_grad": {"optimizer_zero_grad": kept},
    "norms": {"on_before_optimizer_step": logged},
    "between": {"on_before_zero_grad": between},
    "batch_idx": {"training_step": counted},
    "none": {"training_step": absent},
    "tokens": {"training_step": summed},
}


def lightning(case: str, plan: str, folder: Path) -> Log:
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = body()

        def loss(self, batch: Any) -> Tensor:
            return nn.functional.mse_loss(self.body(batch["x"]), batch["labels"])

        def training_step(self, batch: Any) -> Tensor:
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            # Adam would not see gradients that are doubled.
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Noise(pl.Callback):
        """Changes gradients before the update, and weights after it."""

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            for p in module.parameters():
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            for p in module.parameters():
                p.data.clamp_(-0.35, 0.35)

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            loss = float(outputs["loss"]) if outputs else 0.0
            log.append([loss, {name: float(x) for name, x in trainer.callback_metrics.items()}])

    log: Log = []
    pl.seed_everything(0, verbose=False)
    options: dict[str, Any] = {"devices": 1}
    more: list[Any] = [Noise()] if case == "callback" else []
    if case == "accumulate":
        more = [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]
    if case == "value":
        options |= {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    if case == "precision":
        options["plugins"] = [type("Own", (pl.plugins.Precision,), {})()]
    if plan != "none":
        from superscaler.integrations.lightning import PlanStrategy

        methods = {"training_step": lambda self, *_: torch.ones(())} if case == "strategy" else {}
        strategy = type("Own", (PlanStrategy,), methods)
        more_options = {"ddp_comm_hook": print} if case == "comm_hook" else {}
        options |= {"strategy": strategy(plan, **more_options), "devices": int(os.environ["WORLD_SIZE"])}
    trainer = pl.Trainer(
        **options, accelerator="cpu", max_epochs=2, logger=False, callbacks=[*more, Keep()], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    net = type("Net", (Net,), METHODS.get(case, {}))()
    trainer.fit(net, DataLoader(Rows(21 if case == "tokens" else 22), batch_size=4))
    return [*log, [x.tolist() for x in net.state_dict().values()]]


def huggingface(case: str, plan: str, folder: Path) -> Log:
    import transformers as hf

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.mse_loss(self.body(x), labels)}

    base: Any = hf.Trainer
    more: dict[str, Any] = {}
    if plan != "none":
        from superscaler.integrations import huggingface as planned

        base, more = planned.Trainer, {"plan": plan}

    class Own(base):
        """Computes the loss without `super().training_step`."""

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()  # type: ignore[no-any-return]

    class Twice(base):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            return sum(super(Twice, self).training_step(model, inputs, num_items_in_batch) for _ in range(2))  # type: ignore[return-value]

    class ByValue(base):
        def _clip_grad_norm(self, model: Any) -> Any:
            norm = super()._clip_grad_norm(model)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            return norm

    class Halved(base):
        def compute_loss_context_manager(self) -> Any:
            return torch.autocast("cpu", torch.bfloat16)

    class Scaled(hf.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            for p in (p for p in model.parameters() if p.grad is not None):
                p.grad *= 0.1

        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            for p in model.parameters():
                p.data.clamp_(-0.35, 0.35)

    kinds = {"own": Own, "twice": Twice, "by_value": ByValue, "context": Halved}
    hf.set_seed(0)
    args = hf.TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=0.1, optim="sgd", seed=3,
        average_tokens_across_devices=False,
        max_grad_norm=0.0 if case == "callback" else 0.05, logging_nan_inf_filter=False,
    )  # fmt: skip
    net = Net().float() if case == "context" else Net()
    rows: Any = [{k: v.float() if case == "context" else v for k, v in Rows(22)[n].items()} for n in range(22)]
    callbacks = [Scaled()] if case == "callback" else []
    trainer = kinds.get(case, base)(net, args, train_dataset=rows, callbacks=callbacks, **more)
    trainer.train()
    log = [[e["loss"], float(e["grad_norm"])] for e in trainer.state.log_history if "loss" in e]
    return [*log, [x.tolist() for x in net.state_dict().values()]]


if __name__ == "__main__":
    library, plan, where, cases = sys.argv[1:5]
    made: dict[str, Any] = {}
    for case in cases.split(","):
        try:
            made[case] = {"lightning": lightning, "huggingface": huggingface}[library](case, plan, Path(where) / case)
        except InputError as error:
            made[case] = str(error)
    if os.environ.get("RANK", "0") == "0":
        Path(where, f"{plan}.json").write_text(json.dumps(made))
