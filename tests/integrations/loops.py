"""One rank of a loop: own.py-like steps, Hugging Face's Trainer or Lightning, under a plan or (plan "none") without."""

from __future__ import annotations

import copy
import json
import os
import sys
import weakref
from argparse import Namespace
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset, IterableDataset

from superscaler.errors import InputError

STEPS = 8
Log = list[dict[str, float]]


def drawn(row: int, *shape: int, high: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(row)
    return torch.randint(high, shape, generator=draw) if high else torch.randn(shape, generator=draw)


class Images(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 14

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return drawn(row, 3, 8, 8), row % 4


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, has_classes: bool) -> None:
        self.has_classes = has_classes

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = drawn(row, 16, high=64)
        return {"input_ids": ids, "labels": ids.sum() % 2 if self.has_classes else ids}


class Varying(Tokens):
    """Rows of several lengths, one after another."""

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if row >= len(self):
            raise IndexError(row)
        ids = drawn(row, (7, 12, 9, 16)[row % 4], high=64)
        return {"input_ids": ids, "labels": ids.sum() % 2 if self.has_classes else ids}


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch as long as its longest row. There is no mask: a model that looks both ways reads what fills it."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = [row["labels"] for row in rows]
    is_one = labels[0].dim() == 0
    filled = torch.stack(labels) if is_one else nn.utils.rnn.pad_sequence(labels, True, -100)
    return {"input_ids": ids, "labels": filled}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The rows of a data set again and again, without a length."""

    def __init__(self, rows: Tokens) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.rows[number % len(self.rows)] for number in count())


def size_of(module: nn.Module) -> float:
    return sum(float(p.detach().norm()) for name, p in module.named_parameters() if name != "0.bias")


def own(plans: list[str], folder: Path) -> list[float]:
    """Return the largest differences of losses, weights and states from a plain loop, with a last batch of two rows, a
    step without the last layer's weights, and options and a number of the module that change.
    """
    from superscaler.integrations.loss import Notes
    from superscaler.integrations.planned import Planned

    notes = Notes()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    layers.config = Namespace(scale=1.0)  # type: ignore[assignment]
    plain = copy.deepcopy(layers)

    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        flat, other = ([p for p in module.parameters() if (p.dim() < 2) == is_flat] for is_flat in (True, False))
        return torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": other}], lr=0.01)

    def compute(module: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        notes.by_name["rank"] = os.environ["RANK"]
        return module.factor * module.config.scale * nn.functional.cross_entropy(module(batch[0]), batch[1]), {}

    ours, theirs = optimizer_of(layers), optimizer_of(plain)
    batches = [(drawn(n, rows, 6), drawn(n, rows, high=4)) for n, rows in enumerate((4, 4, 2, 4))]
    found = [0.0]
    for number, plan in enumerate(plans):
        steps = number * len(batches)
        planned = Planned(layers, ours, compute, plan, None, folder / f"plan{number}", steps=steps, notes=notes)
        for turn, batch in enumerate(batches):
            for module, optimizer in ((layers, ours), (plain, theirs)):
                module[3].requires_grad_(turn != 1)
                module.factor = 1.0 + turn // 3  # type: ignore[assignment]
                module.config.scale = 1.0 + turn // 2  # type: ignore[assignment, union-attr]
                optimizer.param_groups[0]["lr"] *= 0.9
                optimizer.param_groups[1] |= {"betas": (0.9 - 0.1 * turn, 0.99), "weight_decay": 0.1 * turn}
            theirs.zero_grad()
            loss, _ = compute(plain, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            theirs.step()
            before = weakref.ref(planned.step.state) if planned.step else None
            notes.by_name.clear()
            found.append(float((planned(batch, 1.0) - loss).abs()))
            # Rank 0 captures, and all have what it noted.
            assert turn or notes.by_name == {"rank": "0"}
            # A plan for another value of `factor` is not used again, so it may not fill the memory.
            assert turn != 3 or (before is not None and before() is None)
            if turn == 2:
                planned.put_if(os.environ["RANK"] == "1")
                found.append(abs(size_of(layers) - size_of(plain)))
        planned.put()
    pairs = zip(layers.state_dict().values(), plain.state_dict().values(), strict=True)
    # Adam makes noise of the bias before the norm, whose gradient is zero, but for this.
    kept = [p for name, p in layers.named_parameters() if name != "0.bias"]
    others = [p for name, p in plain.named_parameters() if name != "0.bias"]
    pairs = [(a.detach(), b.detach()) for a, b in zip(kept, others, strict=True)]
    for a, b in zip(kept, others, strict=True):
        pairs += [(ours.state[a][key], theirs.state[b][key]) for key in ("step", "exp_avg", "exp_avg_sq")]
    with pytest.raises(InputError, match="rank 1 was given another batch than rank 0"):
        Planned(layers, ours, compute, plans[0], None, folder)((torch.full((4, 6), float(os.environ["RANK"])),))
    layers.factor = 1.0 + int(os.environ["RANK"])  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"Sequential.factor is 1.0 on rank 0 and 2.0 on rank 1"):
        Planned(layers, ours, compute, plans[0], None, folder)(batches[0])
    return found + [float((a - b).abs().max()) for a, b in pairs]


class Pooled(nn.Module):
    """A mean over positions, which no filling leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(9, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.norm(self.table(ids).mean(1))), labels)


def varied(plan: str, folder: Path) -> list[float]:
    """Return the largest differences of losses, norms, weights and states from a plain loop over batches of several
    shapes, in float64. One step has all programs, and one copy of the weights.
    """
    from superscaler.integrations.planned import Planned

    torch.manual_seed(0)
    module = Pooled().double()
    plain = copy.deepcopy(module)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (module, plain))
    planned = Planned(module, ours, lambda m, batch: (m(**batch), {}), plan, None, folder)
    found, steps = [], set[int]()
    for turn, (rows, length) in enumerate([(4, 6), (4, 8), (4, 3), (2, 6), (4, 8), (4, 6)]):
        batch = {"ids": drawn(turn, rows, length, high=9), "labels": drawn(turn, rows, high=4)}
        loss = plain(**batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        theirs.step()
        theirs.zero_grad()
        found.append(float((planned(batch, 0.3) - loss).detach().abs()))
        assert planned.step is not None
        found.append(abs(float(norm) - float(planned.step.last_norm or 0.0)))
        steps.add(id(planned.step))
    planned.put()
    assert len(steps) == 1
    pairs = [*zip(module.state_dict().values(), plain.state_dict().values(), strict=True)]
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        pairs += [(ours.state[a][key], theirs.state[b][key]) for key in ("step", "exp_avg", "exp_avg_sq")]
    return found + [float((a - b).abs().max()) for a, b in pairs]


class Sighted(nn.Module):
    """A module that takes images or none, whose rows its norm mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.norm = nn.Linear(6, 8), nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 4)

    def forward(self, text: Tensor, labels: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.text(text) if image is None else self.text(text) + self.image(image)
        return nn.functional.cross_entropy(self.out(self.norm(x).tanh()), labels)


def hooked(plans: list[str], folder: Path) -> list[float]:
    """Return the largest differences from a plain loop that works on gradients and weights between backward and update.

    The second batch lacks an input, the sixth has None there, and the third, of three rows, cannot be divided.
    """
    from superscaler.integrations.gradients import follow
    from superscaler.integrations.planned import Planned

    torch.manual_seed(0)
    module = Sighted().double()
    plain = copy.deepcopy(module)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (module, plain))

    def batch_of(turn: int) -> dict[str, Any]:
        rows = 3 if turn % 4 == 2 else 4
        batch = {"text": drawn(turn, rows, 6).double(), "labels": drawn(turn, rows, high=4)}
        return batch if turn == 1 else {**batch, "image": None if turn == 5 else drawn(turn, rows, 5).double()}

    def around(module: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, turn: int) -> float:
        """Do what hooks do, and return the norm that one would log."""
        (loss * 2 if turn == 1 else loss).backward()
        weights = [*module.parameters()]
        norm = float(sum(p.grad.norm() for p in weights if p.grad is not None))
        nn.utils.clip_grad_value_(weights, 0.05)
        if turn == 3:
            weights[0].grad = None
            weights[2].grad.zero_()  # type: ignore[union-attr]
        draw = torch.Generator().manual_seed(turn)
        for p in weights:
            p.grad = None if p.grad is None else p.grad + 0.01 * torch.randn(p.shape, generator=draw)
        optimizer.param_groups[0]["lr"] *= 0.9
        # A skipped update whose gradients stay for the next step.
        if turn != 5:
            optimizer.step()
            module.text.weight.data.clamp_(-0.4, 0.4)  # type: ignore[union-attr, operator]
            norm += float(sum(p.grad.norm() for p in weights if p.grad is not None))
            optimizer.zero_grad()
        return norm

    found = []
    for number, plan in enumerate(plans):
        compute = lambda module, batch: (module(**batch), {})  # noqa: E731
        planned = Planned(module, ours, compute, plan, None, folder / f"hooked{number}", steps=number * 8)
        follow(ours, lambda planned=planned: planned)  # type: ignore[misc]
        for turn in range(8):
            losses = planned.differentiate(batch_of(turn)), plain(**batch_of(turn))
            found.append(float((losses[0] - losses[1]).detach().abs()))
            norms = around(module, ours, losses[0], turn), around(plain, theirs, losses[1], turn)
            found.append(abs(norms[0] - norms[1]))
            pairs = [*zip(module.state_dict().values(), plain.state_dict().values(), strict=True)]
            found += [float((a - b).abs().max()) for a, b in pairs]
        # One that needs no gradients, which the plan clips, and the whole module where it does not divide the batch.
        for turn in (8, 10):
            expected = plain(**batch_of(turn))
            expected.backward()
            norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
            theirs.step()
            theirs.zero_grad()
            found.append(float((planned(batch_of(turn), 0.1) - expected).detach().abs()))
            assert planned.step is not None
            found.append(abs(norm - float(planned.step.last_norm or 0.0)))
        planned.put()
        pairs = [*zip(module.state_dict().values(), plain.state_dict().values(), strict=True)]
        found += [float((a - b).abs().max()) for a, b in pairs]
    # What one rank does alone.
    other = os.environ["RANK"] == "1"
    planned.differentiate(batch_of(0)).backward()
    module.out.bias.grad *= 1.0 + other  # type: ignore[operator]
    with pytest.raises(InputError, match=r"the gradient of out\.bias is not equal on ranks 0 and 1 after step"):
        ours.step()
    with pytest.raises(InputError, match="rank 0 updates the weights, and rank 1 computes a loss: hooks must skip the"):
        planned.differentiate(batch_of(0)) if other else ours.step()
    return found


@record
def alone(kind: str, plan: str, folder: Path) -> list[float]:
    """Train with a number of the module, or a batch, that is another on rank 1 alone from the second step on."""
    from superscaler.integrations.planned import Planned

    def compute(module: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return module.factor * module(batch[0]).square().mean(), {}

    torch.manual_seed(0)
    layer: Any = nn.Linear(6, 4)
    layer.factor = 1.0
    planned = Planned(layer, torch.optim.SGD(layer.parameters(), lr=0.1), compute, plan, None, folder / "plan")
    losses = [float(planned((drawn(0, 4, 6),)))]
    other = os.environ["RANK"] == "1"
    layer.factor += other and kind == "number"
    rows = 2 if other and kind == "batch" else 4
    return [*losses, float(planned((drawn(0, rows, 6),)))]


def huggingface(kind: str, plan: str, folder: Path, stop: int) -> Log:
    """Train until `stop`, from the last checkpoint in the folder on. The last batch of an evaluation has four rows."""
    import transformers as hf

    def in_float32(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"] @ torch.ones(2, 2).triu(), labels)

    class ByStep(hf.Trainer):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            return super().compute_loss(*args, **options) * (1 + self.state.global_step)

    hf.set_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64}
    if kind in ("gpt2", "gpt2_grouped", "lora"):
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model: Any = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **off, n_positions=16, n_embd=32, n_layer=2, n_head=4))
    elif kind == "t5":
        sizes |= {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))
    else:
        off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        model = hf.BertForSequenceClassification(hf.BertConfig(**sizes, **off))
    base = copy.deepcopy(model)
    if kind == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"]))
    generation = {"predict_with_generate": True, "generation_max_length": 6} if kind == "t5" else {}
    args = (hf.Seq2SeqTrainingArguments if kind == "t5" else hf.TrainingArguments)(
        str(folder), per_device_train_batch_size=4, max_steps=STEPS, logging_steps=1, save_steps=4, eval_steps=4,
        eval_strategy="steps", learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, seed=3, per_device_eval_batch_size=5, average_tokens_across_devices=False,
        include_num_input_tokens_seen="all", max_grad_norm=1.0 if "gpt2" in kind else 0.0, bf16=kind == "bert_bf16",
        train_sampling_strategy="group_by_length" if "grouped" in kind else "random", **generation,
    )  # fmt: skip

    class Stop(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == stop

        def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            state.log_history.append({"weights": size_of(given["model"])})

    def summed(given: Any) -> dict[str, float]:
        return {"sum": float(given.predictions.sum())}

    rows = (Varying if "grouped" in kind else Tokens)(kind.startswith("bert"))
    kept: dict[str, Any] = {"train_dataset": rows if kind != "gpt2" else Stream(rows), "eval_dataset": rows}
    if "grouped" in kind:
        kept["data_collator"] = collated
        model.double()
    kept |= {"compute_loss_func": in_float32} if kind == "bert_bf16" else {}
    kept |= {"compute_metrics": summed} if kind == "t5" else {}
    if plan == "none":
        trainer = (hf.Seq2SeqTrainer if kind == "t5" else hf.Trainer)(model, args, callbacks=[Stop()], **kept)
    else:
        from superscaler.integrations.huggingface import Seq2SeqTrainer, Trainer

        kinds = (ByStep, Trainer) if kind == "bert_step" else (Seq2SeqTrainer if kind == "t5" else Trainer,)
        trainer = type("Own", kinds, {})(model, args, callbacks=[Stop()], **kept, plan=plan)
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    if kind == "lora" and os.environ.get("RANK", "0") == "0":
        # Adapters alone have changed, and PEFT reads them from what rank 0 wrote.
        saved = peft.PeftModel.from_pretrained(base, str(folder / f"checkpoint-{stop}")).state_dict()
        assert all(torch.equal(saved[name], x) for name, x in model.state_dict().items())
    counts = ("num_input_tokens_seen", "total_flos")
    names = ("loss", "eval_loss", "eval_sum", "grad_norm", "learning_rate", "weights", *counts)
    return [{key: entry[key] for key in names if key in entry} for entry in trainer.state.log_history]


def lightning(kind: str, plan: str, folder: Path, stop: int) -> Log:
    """Train until `stop`, from the last checkpoint in the folder on; there the last batch has two rows."""
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            cnn = (nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
            body = (*cnn, nn.Linear(32, 4)) if kind == "cnn" else (nn.Flatten(), nn.Linear(192, 16), nn.Linear(16, 4))
            self.body = nn.Sequential(*body)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            scores = self.body(x)
            loss = nn.functional.cross_entropy(scores, y)
            self.log("loss", loss, prog_bar=True)
            self.log_dict({"right": (scores.argmax(1) == y).float().mean()})
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("eval_loss", nn.functional.cross_entropy(self.body(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    log: Log = []

    class Keep(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            log.append({"drawn": float(torch.rand(()))})

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            log.append({name: float(trainer.callback_metrics[name]) for name in ("loss", "right")})
            log[-1]["lr"] = trainer.optimizers[0].param_groups[0]["lr"]

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            log.append({"weights": size_of(module)})

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            log.append({"eval_loss": float(trainer.callback_metrics["eval_loss"])})

    pl.seed_everything(0)
    net, loader = Net(), DataLoader(Images(), batch_size=4, shuffle=False)
    options: dict[str, Any] = {"devices": 1}
    if plan != "none":
        from superscaler.integrations.lightning import PlanStrategy

        options = {"strategy": PlanStrategy(plan), "devices": int(os.environ["WORLD_SIZE"])}
    saves = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    trainer = pl.Trainer(
        **options, accelerator="cpu", max_steps=stop, logger=False, callbacks=[saves, Keep()], gradient_clip_val=0.5,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=0,
    )  # fmt: skip
    last = folder / "last.ckpt"
    trainer.fit(net, loader, loader, ckpt_path=last if last.exists() else None)
    return log


if __name__ == "__main__":
    library, kind, plan, where, stop = sys.argv[1:6]
    made: Any
    if library in ("own", "hooked"):
        made = {"own": own, "hooked": hooked}[library](plan.split("+"), Path(where))
    elif library == "varied":
        made = varied(plan, Path(where) / "plan")
    elif library == "alone":
        made = alone(kind, plan, Path(where))
    else:
        try:
            made = {"huggingface": huggingface, "lightning": lightning}[library](kind, plan, Path(where), int(stop))
        except InputError as error:
            made = str(error)
    if os.environ.get("RANK", "0") == "0":
        Path(where, f"log_{stop}.json").write_text(json.dumps(made))
