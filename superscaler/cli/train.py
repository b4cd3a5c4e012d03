"""`superscaler train`: compile a plan and train with it on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from superscaler.cli.common import (
    AsJson,
    AutocastName,
    ClusterSpec,
    LearningRate,
    Model,
    NoCache,
    OptimizerName,
    PlanSpec,
    Request,
    compile_plan,
    printing,
)
from superscaler.cli.compile import Out, Seed, check_out
from superscaler.errors import InputError


def train(
    model: Model,
    plan: PlanSpec,
    cluster: ClusterSpec,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to train.")] = 20,
    lr: LearningRate = 1e-3,
    autocast: AutocastName = None,
    optimizer: OptimizerName = "adamw",
    clip: Annotated[float | None, typer.Option("--clip", help="Largest global norm of the gradients.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="Text to learn, byte by byte; default: Python's own.")
    ] = None,
    out: Out = None,
    seed: Seed = 0,
    no_cache: NoCache = False,
    as_json: AsJson = False,
) -> None:
    """Compile MODEL for local:N, start N processes and train; prints the losses."""
    with printing(as_json) as printer:
        request = Request(model, plan, cluster, optimizer, lr, autocast, no_cache)
        check(request, clip, data, out)
        compiled, built = compile_plan(request)
        with _directory(out) as directory:
            compiled.save(directory, seed)
            result = _launch(directory, compiled.compiled.program.world, steps, data, clip, seed)
        printer.show(_told(result))
        printer.result = {"model": built.name, "plan": plan, "cluster": cluster, **result}


def check(request: Request, clip: float | None, data: Path | None, out: Path | None) -> None:
    """Raise InputError for what is wrong before anything is built."""
    check_out(out)
    _, cluster = request.read()
    if not cluster.is_local:
        raise InputError(
            f"train starts processes on this machine, but --cluster is {cluster}; write local:N, "
            "or compile with --out and start the directory's run.py with torchrun on each server."
        )
    if clip is not None and not clip > 0:
        raise InputError(f"--clip is {clip}, but a norm to clip to is a number above 0.")
    if data is not None and not data.is_file():
        raise InputError(f"--data {data} is not a file; give a text, or leave it out.")


def _launch(
    directory: Path, world: int, steps: int, data: Path | None, clip: float | None, seed: int
) -> dict[str, Any]:
    from superscaler.train.launch import train as launch

    return launch(directory, world=world, steps=steps, data=data, clip=clip, seed=seed)


@contextmanager
def _directory(out: Path | None) -> Iterator[Path]:
    """Give the directory that was asked for, or one that is removed afterwards."""
    if out is not None:
        yield out
    else:
        with tempfile.TemporaryDirectory(prefix="superscaler-plan-") as folder:
            yield Path(folder)


def _told(result: Mapping[str, Any]) -> str:
    losses = result["losses"]
    return (
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps on {result['world']} devices; "
        f"{result['tokens_per_second']:,.0f} tokens/s, {result['seconds']:.1f} s"
    )
