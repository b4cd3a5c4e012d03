"""What the commands share: their arguments, how results are printed, and how text becomes a model and a plan."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from superscaler.errors import InputError, unknown

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from superscaler.cluster import Cluster
    from superscaler.models import BuiltModel
    from superscaler.plan import Plan
    from superscaler.verbs import Graph

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="NAME[:key=value,...] (gpt2, swin, ...) or FILE.py:FUNCTION[:key=value,...]"),
]
PlanSpec = Annotated[
    str,
    typer.Option(
        "--plan", metavar="PLAN", help="NAME[:key=value,...] of the library, or FILE.py:FUNCTION[:key=value,...]"
    ),
]
ClusterSpec = Annotated[
    str,
    typer.Option("--cluster", metavar="CLUSTER", help="local:4, v100:4x8 (servers x devices), or a YAML file"),
]
OptimizerName = Annotated[str, typer.Option("--optimizer", help="adamw, adam or sgd")]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate of the optimizer.")]
AutocastName = Annotated[
    str | None,
    typer.Option("--autocast", metavar="NAME", help="bf16, or fp16 with loss scaling; weights keep their dtype."),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Capture anew, and keep nothing of it on disk.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of standard output.")]

# name on the command line -> class of torch.optim
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
AUTOCASTS = ("bf16", "fp16")


@contextmanager
def printing(as_json: bool) -> Iterator[Printer]:
    """Give a printer. With JSON, whatever else is printed meanwhile goes to standard error."""
    printer = Printer(as_json)
    if not as_json:
        yield printer
    else:
        with redirect_stdout(sys.stderr):
            yield printer
    printer.finish()


@dataclass
class Printer:
    """Prints for people, and keeps the one JSON object that is printed at the end."""

    as_json: bool
    result: Mapping[str, Any] | None = None

    def show(self, *things: RenderableType) -> None:
        """Print tables or plain text; markup in text is not read."""
        from rich.console import Console

        console = Console(stderr=self.as_json, markup=False, highlight=False, soft_wrap=True)
        for thing in things:
            console.print(thing)

    def finish(self) -> None:
        if self.as_json and self.result is not None:
            print(json.dumps(plain(self.result), allow_nan=False), flush=True)


def plain(value: Any) -> Any:
    """Return the value as JSON has it: numbers that are not finite become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


@dataclass(frozen=True)
class Request:
    """What to compile, as text; `read` checks what can be checked before the model is built."""

    model: str
    plan: str
    cluster: str
    optimizer: str
    lr: float
    autocast: str | None = None
    no_cache: bool = False

    def read(self) -> tuple[Callable[[Graph, Cluster], Any], Cluster]:
        """Return the sProgram and the cluster."""
        from superscaler.cluster import Cluster
        from superscaler.plans import resolve

        check_training(self.optimizer, self.lr, self.autocast)
        return resolve(self.plan), Cluster.parse(self.cluster)


def compile_plan(request: Request) -> tuple[Plan, BuiltModel]:
    """Build, capture and compile. Raises PlanError with the reason."""
    sprogram, cluster = request.read()
    from superscaler.plan import compile as compile_graph

    graph, built = capture_model(request.model, request.optimizer, request.lr, request.autocast, request.no_cache)
    return compile_graph(graph, sprogram, cluster), built


def capture_model(
    model: str, optimizer: str, lr: float, autocast: str | None = None, no_cache: bool = False
) -> tuple[Graph, BuiltModel]:
    """Build and capture a model with an optimizer over its trained parameters, and for fp16 a default GradScaler."""
    check_training(optimizer, lr, autocast)
    import torch

    from superscaler.models import build
    from superscaler.plan import capture

    built = build(model)
    scaler = torch.amp.GradScaler("cpu") if autocast == "fp16" else None
    trained = make_optimizer(built, optimizer, lr)
    return capture(
        built.module, built.args, built.kwargs, trained, autocast, scaler, None if no_cache else model
    ), built


def check_training(name: str, lr: float, autocast: str | None = None) -> None:
    """Raise InputError for an unknown optimizer or autocast, or a learning rate that is not a positive number."""
    if autocast is not None and autocast not in AUTOCASTS:
        raise InputError(unknown("autocast", autocast, AUTOCASTS))
    if name not in OPTIMIZERS:
        raise InputError(unknown("optimizer", name, OPTIMIZERS))
    if not (math.isfinite(lr) and lr > 0):
        raise InputError(f"--lr is {lr}, but a learning rate is a finite number above 0.")


def make_optimizer(built: BuiltModel, name: str, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of this name over the parameters of the model that require gradients."""
    import torch

    parameters = [p for p in built.module.parameters() if p.requires_grad]
    if not parameters:
        raise InputError(
            f"model '{built.name}' has no parameter that requires a gradient, so there is nothing to train."
        )
    optimizer: torch.optim.Optimizer = getattr(torch.optim, OPTIMIZERS[name])(parameters, lr=lr)
    return optimizer
