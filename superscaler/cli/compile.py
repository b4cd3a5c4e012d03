"""`superscaler compile`: a model, a plan and a cluster -> a plan directory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from superscaler.cli.common import PlanRequest, warn_of_servers
from superscaler.cli.options.command import command
from superscaler.cli.options.declare import path
from superscaler.cli.options.lengths import read_mixture
from superscaler.cli.printing import Printer
from superscaler.cluster import Cluster
from superscaler.errors import InputError
from superscaler.launch.jobs import how_to_start

if TYPE_CHECKING:
    from superscaler.ir.graph import Graph
    from superscaler.recapture.shapes import Listed

Out = Annotated[
    Path | None, path("--out", "DIR", "Plan directory to write; another plan there is replaced.", "directory")
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**64 - 1, help="Seed of dropout, and of weights captured on meta.")
]


@command
def compile(
    printer: Printer,
    request: PlanRequest,
    out: Out = None,
    seed: Seed = 0,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Write MODEL in eval mode, too, for step.evaluate and step.infer.")
    ] = False,
) -> None:
    """Compile MODEL under a plan for a cluster, and write the programs of all devices."""
    check_out(out)
    if evaluation and out is None:
        raise InputError("--evaluation writes into the plan directory; give --out DIR, too.")
    sprogram, devices = request.read()
    from superscaler.plan import save_evaluation
    from superscaler.recapture.shapes import listed
    from superscaler.simulate.predict import precision_of

    graph, built = request.on(devices).capture()
    shapes = listed(graph.captured, [*read_mixture(request.lengths)])
    summary, counts, seconds, is_new = _compile_to(graph, sprogram, devices, out, seed, shapes)
    if evaluation and out is not None and graph.model.loss:
        save_evaluation(graph, sprogram, devices, out, seed, shapes)
    precision = precision_of(graph.model)
    printer.show(f"precision: {precision}", summary, _totals(seconds, counts), *saved(out, devices, is_new))
    warn_of_servers(printer, request.plan, devices)
    printer.result = {
        "model": built.name,
        "plan": request.plan,
        "cluster": str(devices),
        "precision": precision,
        "out": None if out is None else str(out),
        "unchanged": not is_new,
        "seconds": seconds,
        **counts,
    }


def _compile_to(
    graph: Graph,
    sprogram: Callable[[Graph, Cluster], Any],
    cluster: Cluster,
    directory: Path | None,
    seed: int,
    shapes: Sequence[Listed],
) -> tuple[str, dict[str, int], dict[str, float], bool]:
    """Compile a plan, certify it, and write it into a directory. If the directory holds the same plan already, it
    stays, and only the sProgram runs, unless there are further `shapes`.

    Returns the plan's summary and counts, the seconds per phase, and whether the plan was written.
    """
    from superscaler.artifact import initial_values, reuse, write
    from superscaler.compiler import finish, transform
    from superscaler.plan import Plan
    from superscaler.store.plan import remove_shapes

    planned, phases = transform(graph, sprogram, cluster)
    captured = graph.captured
    values = {} if directory is None else initial_values(graph.model, captured.values, seed)
    kept = None if directory is None or shapes else reuse(planned, cluster, directory, values, seed)
    if kept is not None and directory is not None:
        remove_shapes(directory)
        seconds = {**captured.seconds, **phases}
        return kept["summary"], kept["counts"], {**seconds, "total": sum(seconds.values())}, False
    plan = Plan(finish(planned, cluster, phases), sprogram, shapes)
    if directory is None:
        plan.certify()
        is_new = True
    elif shapes:
        is_new = plan.save(directory, seed, evaluation=False)
    else:
        plan.validate()
        is_new = write(plan.compiled, directory, values, seed)
    return f"{plan.summary()}\n{plan.memory()}", plan.counts, plan.seconds, is_new


def check_out(out: Path | None) -> None:
    """Raise InputError early, before the work, if the directory holds something else than a plan, or cannot be made."""
    if out is None:
        return
    # The nearest existing folder above: the rest will be made in it.
    above = next((p for p in (out, *out.parents) if os.path.lexists(p)), Path())
    if not os.path.isdir(above):
        kind = "a file" if above.exists() else "a link to nothing"
        raise InputError(f"--out {out}: {above} is {kind}; choose a directory.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: nothing can be written into {above}; choose another directory.")
    if above == out:
        from superscaler.store.plan import plan_files

        plan_files(out)


def saved(out: Path | None, cluster: Cluster, is_new: bool) -> list[str]:
    from superscaler.store.plan_head import RUN_FILE

    text = f"written to {out}" if is_new else f"unchanged: {out} holds this plan already"
    return [] if out is None else [f"{text}; {how_to_start(cluster, out / RUN_FILE)}"]


def _totals(seconds: dict[str, float], counts: dict[str, int]) -> str:
    """Return the counts and the seconds per phase, in two lines."""
    words = {name: re.sub(r"s\b", "" if counts[name] == 1 else "s", name.replace("_", " "), count=1) for name in counts}
    first = ", ".join(f"{count:,} {words[name]}" for name, count in counts.items())
    return first + "\nseconds: " + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
