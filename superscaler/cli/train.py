"""`superscaler train`: compile a plan and train with it on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superscaler.cli.common import PlanRequest
from superscaler.cli.compile import Out, check_out
from superscaler.cli.options.command import command
from superscaler.cli.options.files import save_options
from superscaler.cli.printing import Printer
from superscaler.errors import InputError
from superscaler.interrupt import TemporaryFolder
from superscaler.specs.sizes import size
from superscaler.specs.user_file import file_of, from_file, is_function
from superscaler.timing import phase
from superscaler.train.options import RunOptions

if TYPE_CHECKING:
    from superscaler.plan import Plan

# A measured peak above so many predicted ones is said.
_TOLERATED = 1.1


@command
def train(printer: Printer, request: PlanRequest, training: RunOptions, out: Out = None) -> None:
    """Compile MODEL for local:N, start N processes and train; prints the losses. Exit code 1: a save has failed."""
    check(request, training.data, training.eval, out)
    if request.lengths and training.profile is not None:
        raise InputError("--profile records steps of one program, and --lengths trains with several; leave one out.")
    printer.progress.announce(f"train {request}: capture, compile, certify, then {training.steps} steps")
    with phase("import"):
        from superscaler.plan import save_evaluation
        from superscaler.simulate.system import System
        from superscaler.train import launch
        from superscaler.train.resume import ending, interrupted, unsaved
        from superscaler.verify.plan_dir import known_of

    launch.check(training)
    # A function that is not there is an error here, not in the ranks after a compilation.
    for kind, spec in (("data", training.data), ("evaluation", training.eval)):
        if is_function(spec):
            from_file(str(spec), kind, may_yield=True, is_new=False)
    if training.run is not None:
        save_options(training.run, printer.options)
    is_forked = launch.start_server()
    compiled, built = request.compile(System(torch_compile=training.torch_compile, cuda_graph=training.cuda_graph))
    if not compiled.trains:
        why = "gives no loss" if request.optimizer is None else "is captured with --optimizer none"
        raise InputError(
            f"{request.model} {why}, so there is nothing to train; return a scalar loss, or an "
            "object with .loss, from forward. For inference compile the model and call its step."
        )
    printer.show(f"precision: {compiled.precision}", compiled.memory())
    # The directory of --out, or one that is removed afterwards.
    with nullcontext(out) if out else TemporaryFolder("superscaler-plan-") as folder:
        compiled.save(folder, training.seed, evaluation=False)
        if training.eval:
            printer.progress.announce(f"evaluate {request}: capture in eval mode, and compile")
            plan, shapes = compiled.compiled, compiled.listed
            assert compiled.sprogram is not None
            save_evaluation(plan.graph, compiled.sprogram, plan.cluster, Path(folder), training.seed, shapes)
        facts = known_of(compiled.compiled.program, compiled.compiled.cluster, compiled.peak_bytes)
        known = {"named": request.model, **asdict(facts), **vars(training)}
        try:
            result = launch.train(Path(folder), world=compiled.compiled.program.world, is_forked=is_forked, **known)
        except KeyboardInterrupt:
            printer.progress.say(interrupted(training.save, training.resume))
            raise
    printer.show(
        _summary(result),
        *_more_memory(compiled, result["memory_bytes"]),
        *([ending(result)] if "saved" in result else []),
    )
    printer.result = {"model": built.name, "plan": request.plan, "cluster": request.cluster, **result}
    if failed := result.get("failed_saves"):
        printer.failure = unsaved(failed)


def check(request: PlanRequest, data: Path | None, evaluation: Path | None, out: Path | None) -> None:
    """Raise InputError for wrong options, before anything is built."""
    check_out(out)
    _, cluster = request.read()
    if not cluster.is_local:
        raise InputError(
            f"train starts processes on this machine, but --cluster is {cluster}; write local:N, "
            "or compile with --out, and start it as superscaler launch says."
        )
    for name, given, what in (
        ("--data", data, "a text or FILE.py:function"),
        ("--eval", evaluation, "FILE.py:function"),
    ):
        if given is not None and not os.path.isfile(file := file_of(given)):
            raise InputError(f"{name} {given}: {file} is no file; give {what}, or leave it out.")
    if evaluation is not None and not is_function(evaluation):
        raise InputError(f"--eval {evaluation} is no FILE.py:function; name a function that gives batches.")


def _more_memory(plan: Plan, measured: int) -> Iterator[str]:
    """Yield a line if a GPU needed clearly more memory than predicted. The memory of a process on a CPU includes
    libraries.
    """
    import torch

    if torch.cuda.is_available() and measured > _TOLERATED * (predicted := plan.peak_bytes) > 0:
        yield (
            f"the memory of rank 0 was {size(measured)}, {measured / predicted:.2f} times the predicted "
            f"{size(predicted)}; superscaler simulate shows what was counted"
        )


def _summary(result: Mapping[str, Any]) -> str:
    losses = result["losses"]
    return (
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps on {result['world']} devices; "
        f"{result['tokens_per_second']:,.0f} {result['unit']}/s, {result['seconds']:.1f} s"
    )
