"""The plan of evaluation of a captured step: its module in eval mode, captured for the same call and compiled."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from superscaler.cluster import Cluster
from superscaler.compiler import Compiled, SProgram, compile_graph
from superscaler.errors import InputError, brief
from superscaler.frontend.base.captured import Captured
from superscaler.frontend.capture import capture
from superscaler.frontend.checks.agreement import SKIPPED
from superscaler.ir.graph import Graph
from superscaler.planner.auto import plan_of
from superscaler.replaced import replaced
from superscaler.specs.file_errors import writing
from superscaler.specs.whole_file import write_file
from superscaler.store.plan_head import EVALUATION, REFUSED_FILE

# Plans under which evaluation runs where the trained plan's own has nothing to do without a backward (as recompute): of
# weights in slices, which fit wherever that plan does, then others for a batch that all devices do not divide.
_OTHERS = ("fsdp", "tensor_parallel", "pipeline_1f1b:microbatches=1")


def evaluated(captured: Captured, sprogram: SProgram, cluster: Cluster) -> tuple[Compiled, SProgram]:
    """Return the compiled plan of a captured module in eval mode, and its sProgram: the given one, else, with a line in
    the log, the first plan of `_OTHERS` that can be compiled. Raises InputError with the reason if there is none.
    """
    try:
        found = in_eval_mode(captured)
    except Exception as error:
        # The forward in eval mode is the user's, which training never runs.
        raise InputError(f"the module in eval mode cannot be captured: {error}") from error
    graph, reasons = Graph(found.model, found), list[str]()
    for program in (sprogram, *_OTHERS):
        own = plan_of(program) if isinstance(program, str) else program
        try:
            made = compile_graph(graph, own, cluster)
        except Exception as error:
            # So is an sProgram, which may read what a graph without a backward lacks.
            reasons.append(brief(str(error)))
            continue
        if reasons:
            text = "evaluation runs under %s, since the plan has nothing to do without a backward: %s"
            logging.getLogger(__name__).info(text, program, reasons[0])
        return made, own
    raise InputError(f"the module in eval mode cannot be compiled for {cluster}: {reasons[0]}")


def in_eval_mode(captured: Captured) -> Captured:
    """Return the capture of the module of a captured step in eval mode, for the same example. The module stays as it
    is. Raises CaptureError where the module in eval mode cannot be captured.
    """
    call = captured.call
    kind, dtype = call.autocast or ("cpu", None)
    with ExitStack() as stack:
        for part in call.module.modules():
            stack.enter_context(replaced((part, "training", False)))
        stack.enter_context(torch.autocast(kind, dtype, enabled=call.autocast is not None))
        # Compared with the module where the trained step was.
        check = bool(captured.checked) and not captured.checked.startswith(SKIPPED)
        return capture(call.module, call.args, call.kwargs, is_trained=False, is_kept=True, check=check)


def refuse(folder: Path, why: str) -> None:
    """Write into a plan directory, which has no plan of evaluation, why."""
    own = folder / EVALUATION
    with writing(own, "choose another directory"):
        own.mkdir(exist_ok=True)
        write_file(own / REFUSED_FILE, f"{why}\n")
