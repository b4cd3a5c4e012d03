"""Runs that go on on other devices: the model and optimizer of a checkpoint, and whether a plan resumes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superscaler.artifact import owned
from superscaler.errors import InputError, some
from superscaler.ir.graph import Graph
from superscaler.planner.space import Choice
from superscaler.specs.options import FULL, OPTIMIZERS

if TYPE_CHECKING:
    from superscaler.store.tensors import TensorReader


@dataclass(frozen=True)
class Run:
    """A run, by its last checkpoint: its `path` as the user gave it, and the text of its model."""

    path: Path
    model: str
    stored: TensorReader

    @classmethod
    def read(cls, path: Path, model: str) -> Run:
        """Read the last checkpoint in a folder. `model`: the user's, "" for the recorded one. Raises InputError for a
        folder without one, and for a model that is not recorded or a user's file.
        """
        from superscaler.store.tensors import open_checkpoint

        stored = open_checkpoint(path)
        known, is_named = stored.model
        if not model and not is_named:
            which = f"{known}, a file of yours, which is run only where you name it" if known else "not recorded"
            raise InputError(f"--like {path}: its model is {which}; give MODEL, too.")
        return cls(path, model or known, stored)

    def options(self, optimizer: str | None, precision: str | None) -> dict[str, Any]:
        """Return the model, optimizer and precision to capture; those that the user gave, if any.

        Raises InputError for another precision, and for an optimizer that must be given.
        """
        trained = self.stored.head["optimizer"]
        if trained is None:
            raise InputError(f"--like {self.path} has weights only, no run that can go on; leave --like out.")
        own = trained.get("precision") or FULL
        if precision is not None and precision != own:
            raise InputError(f"--precision {precision}: {self.path} was trained in {own}; leave --precision out.")
        names = {name: key for key, name in OPTIMIZERS.items()}
        if optimizer is None and trained["name"] not in names:
            raise InputError(f"--like {self.path} was trained by {trained['name']}; give --optimizer, too.")
        return {"model": self.model, "optimizer": optimizer or names[trained["name"]], "precision": own}

    def check(self, graph: Graph) -> None:
        """Raise InputError unless a plan of a captured model resumes the checkpoint."""
        model, kept, stored = graph.model, self.stored.head["optimizer"], self.stored
        theirs, ours = (kept["name"], len(kept["lr"])), (model.optimizer.name, len(model.optimizer.groups))
        if theirs != ours:
            theirs_text, ours_text = (f"{name} with {count} parameter groups" for name, count in (theirs, ours))
            raise InputError(f"{stored.directory} was trained by {theirs_text}, but this model by {ours_text}.")
        here = {found["name"]: found for found in (owned(model, p.name) for p in model.parameters())}
        missing = sorted(name for name in here if name not in stored.tensors)
        more = sorted(stored.names - here.keys() - model.aliases.keys() - graph.captured.values.keys())
        if missing or more:
            which = f"lacks {some(missing, 3)}" if missing else f"has {some(more, 3)}, which this model lacks"
            raise InputError(f"{stored.directory} {which}; it is of another model than {self.model}.")
        for name, tensor in here.items():
            if (shape := list(stored.tensors[name].shape)) != tensor["shape"]:
                raise InputError(
                    f"{name} has shape {shape} in {stored.directory}, but {tensor['shape']} in {self.model}; give the "
                    "model that was trained."
                )

    def goes_on(self, choice: Choice, cluster: str, is_local: bool, optimizer: str, precision: str) -> str:
        """Return the changes under a plan, and the command to go on with it: a cluster has a precision of its own."""
        head = self.stored.head
        split = f"{choice.microbatches} microbatches of {choice.rows} rows on each of {choice.dp} groups"
        trained = f"--optimizer {optimizer} --precision {precision}"
        model = f"{self.model} --plan '{choice.spec}' --cluster {cluster} {trained}"
        command = (
            f"superscaler train {model} --resume {self.path} --steps N"
            if is_local
            else f"superscaler compile {model} --out plan, and its run.py --resume {self.path} --steps N"
        )
        return (
            f"{self.stored.directory} (step {head['step']}, saved by {head['world']} devices) resumes under it: the "
            f"batch is {choice.batch}, {split}\n  {command}"
        )
