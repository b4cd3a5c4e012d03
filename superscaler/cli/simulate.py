"""`superscaler simulate` and `search`: seconds and bytes of a plan on a cluster, and the best plan, unrun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superscaler.cli.common import ModelRequest, command, option, warn_of_servers
from superscaler.cli.printing import Printer, table
from superscaler.cli.validate import Request
from superscaler.cluster.links import LOCAL
from superscaler.errors import InputError
from superscaler.specs.options import HALVES
from superscaler.specs.sizes import duration, read_bytes

if TYPE_CHECKING:
    from superscaler.cluster import Cluster
    from superscaler.simulate.prediction import Prediction
    from superscaler.verbs import Graph


@command
def simulate(
    printer: Printer,
    request: Request,
    memory: Annotated[
        str, option("--memory", "The memory of a device, as 32GB; default: what the cluster says.", "BYTES")
    ] = "",
    compare: Annotated[
        list[str] | None, typer.Option("--compare", metavar="PLAN", help="Another plan; may be repeated.")
    ] = None,
    torch_compile: Annotated[
        bool, typer.Option("--torch-compile", help="Of a step whose segments Inductor compiles, as of train.")
    ] = False,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Of a step that is replayed as a CUDA graph, as of train.")
    ] = False,
) -> bool:
    """Predict whether a plan fits into the memory of its devices, how long a step is, and why it is not shorter.

    A model of the library is captured without memory for its weights. Exit code 1 when the plan does not fit; with
    --compare, when none does.
    """
    way = read_bytes("--memory", memory) if memory else None, torch_compile, cuda_graph
    if os.path.isdir(request.model) and not request.plan:
        if compare or request.directory:
            raise InputError(f"{request.model} is a plan directory; give a model to compare plans of it.")
        from superscaler.verify.plan_dir import simulate_directory

        request.check_directory(but="cluster")
        only = simulate_directory(Path(request.model), request.cluster, *way)
        _show(printer, {request.model: only})
        return only.fits
    request.check_plan()
    _, cluster = request.read()
    from superscaler.simulate.predict import check_speeds

    check_speeds(cluster)
    specs = list(dict.fromkeys([request.plan, *(compare or ())]))
    for spec in specs:
        replace(request, plan=spec).read()
    graph = _shapes(request, cluster)
    from superscaler.plan import compile as compile_graph

    plan = compile_graph(graph, request.plan, cluster)
    found = {request.plan: plan.simulate(*way)}
    found |= {spec: compile_graph(graph, spec, cluster).simulate(*way) for spec in specs[1:]}
    if cuda_graph:
        found[f"{request.plan}, not replayed"] = plan.simulate(*way[:2])
    _show(printer, found)
    if not any(p.fits for p in found.values()):
        printer.show(f"plans that fit: superscaler search {request.model} --cluster {request.cluster}")
    warn_of_servers(printer, request.plan, cluster)
    return any(found[spec].fits for spec in specs)


@dataclass(frozen=True, kw_only=True)
class SearchRequest(ModelRequest):
    """A model and the cluster to find a plan for."""

    cluster: Annotated[str, option("--cluster", "a100:4x8 (servers x devices), or a YAML file", "CLUSTER")]


@command
def search(
    printer: Printer,
    request: SearchRequest,
    memory: Annotated[
        str, option("--memory", "The memory of a device, as 32GB; default: what the cluster says.", "BYTES")
    ] = "",
    where: Annotated[
        str,
        option(
            "--where",
            "Constraints, as 'tp <= 8, no recompute, schedule = zb_h1': of dp, tp, pp, microbatches, rows (of one on a "
            "device), chunks, zero, recompute, schedule.",
            "TEXT",
        ),
    ] = "",
    top: Annotated[int, option("--top", "The number of plans to show.")] = 5,
    seconds: Annotated[
        float | None, option("--seconds", "Begin no further whole plan after so many seconds; default: no limit.")
    ] = None,
    why_not: Annotated[
        list[str] | None, typer.Option("--why-not", metavar="PLAN", help="Say what speaks against it; repeatable.")
    ] = None,
    torch_compile: Annotated[
        bool, typer.Option("--torch-compile", help="Of steps whose segments Inductor compiles, as of train.")
    ] = False,
) -> bool:
    """Find the plan with the shortest step that fits, and say how far it can be from the best of the space.

    The space: pipelines (1F1B, interleaved, zero bubble) of stages with own numbers of blocks, tensor and data
    parallelism, ZeRO and FSDP, recomputation, microbatches. Blocks are compiled and simulated; then the best plans are,
    whole. Exit code 1 when none fits.
    """
    if top < 1:
        raise InputError(f"--top {top}: give 1 or more.")
    if seconds is not None and not seconds > 0:
        raise InputError(f"--seconds {seconds}: give a number above 0.")
    from superscaler.cluster import Cluster
    from superscaler.planner import constraints

    request.check()
    constraints.read(where)
    cluster = Cluster.parse(request.cluster)
    capacity = read_bytes("--memory", memory) if memory else None
    from superscaler.simulate.predict import check_speeds

    check_speeds(cluster)
    graph = _shapes(request, cluster)
    from superscaler.planner.search import reasons, why
    from superscaler.planner.search import search as find

    limit = float("inf") if seconds is None else seconds
    answer = find(graph, cluster, capacity, where, torch_compile, limit, printer.progress.say)
    best = answer.best.prediction
    within = best.step_seconds / answer.bound - 1
    lines = [
        answer.best.spec,
        f"  step {duration(best.step_seconds)}; nothing in this space is below {duration(answer.bound)} ({within:.0%} "
        "less at most)"
        if best.fits
        else "  no plan of the space fits; this one needs the least memory",
        *(f"  {line}" for line in reasons(answer)),
    ]
    printer.show("\n".join(lines))
    from superscaler.simulate.prediction import PLANS, plan_row

    names = ["plan", *PLANS]
    rows = [plan_row(found.spec, found.prediction) for found in answer.plans[:top]]
    printer.show(table(names, rows, names[1:-1], "The best plans"))
    against = {spec: why(spec, graph, cluster, answer, capacity, torch_compile) for spec in why_not or ()}
    for spec, text in against.items():
        printer.show(f"{spec}: {text}")
    printer.result = {
        "plan": answer.best.spec,
        "bound": answer.bound,
        "plans": {found.spec: found.prediction.as_json() for found in answer.plans[:top]},
        "why_not": against,
    }
    return best.fits


def _shapes(request: ModelRequest, cluster: Cluster) -> Graph:
    """Return the graph of a model without data: shapes are all that a prediction needs."""
    model, precision = _without_memory(request.model), _precision(request, cluster)
    return replace(request, model=model, precision=precision, no_check=True).capture()[0]


def _without_memory(model: str) -> str:
    """Return the spec of a model of the library with its weights on the meta device."""
    name, _, keys = model.partition(":")
    if name.endswith(".py") or "device=" in keys:
        return model
    return f"{name}:{keys},device=meta" if keys else f"{name}:device=meta"


def _precision(request: ModelRequest, cluster: Cluster) -> str | None:
    """Return the requested precision. The default on a GPU is that of its fastest products."""
    if request.precision or request.autocast or cluster.kind == LOCAL or cluster.device_kind is None:
        return request.precision
    return next((name for name, dtype in HALVES.items() if dtype in cluster.device_kind.flops), None)


def _rank(p: Prediction) -> tuple[bool, float]:
    return not p.fits, p.step_seconds if p.fits else p.fullest.peak_bytes


def _show(printer: Printer, found: Mapping[str, Prediction]) -> None:
    """Print the first prediction, and all in a table, the best first."""
    from superscaler.simulate.prediction import COLUMNS, PLANS, device_rows, plan_row, words

    first, *others = found.values()
    printer.show(words(first))
    if len(first.devices) > 1:
        printer.show(table(["devices", *COLUMNS], device_rows(first), right=[*COLUMNS]))
    printer.result = first.as_json()
    if others:
        best = sorted(found, key=lambda spec: _rank(found[spec]))
        names = ["plan", *PLANS]
        printer.show(table(names, (plan_row(spec, found[spec]) for spec in best), names[1:-1]))
        printer.result = {**printer.result, "plans": {spec: found[spec].as_json() for spec in best}}
