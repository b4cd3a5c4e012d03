"""`superscaler simulate`: seconds and bytes of a plan on a cluster, before anything runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superscaler.cli.common import command, option, warn_of_servers
from superscaler.cli.printing import Printer, table
from superscaler.cli.validate import Request
from superscaler.cluster.links import LOCAL
from superscaler.errors import InputError, PlanError
from superscaler.specs.neighbours import neighbours
from superscaler.specs.options import HALVES
from superscaler.specs.sizes import read_bytes

if TYPE_CHECKING:
    from superscaler.cluster import Cluster
    from superscaler.simulate.prediction import Prediction

# The number of plans that are advised.
_BEST = 3
# The step of a clearly faster plan, in that of the given one.
_CLEARLY = 0.99
# The seconds that they may take without --advise: beside a plan that fits, and beside one that does not.
_SOON, _PATIENT = 3.0, 60.0


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
    advise: Annotated[
        bool | None,
        typer.Option(
            "--advise/--no-advise",
            help="Try plans that differ in one decision, and --torch-compile, and show the best of them. Default: "
            "those that are tried in 3 seconds; in 60 where the plan does not fit; none with --compare or --json.",
            show_default=False,
        ),
    ] = None,
    torch_compile: Annotated[
        bool, typer.Option("--torch-compile", help="Of a step whose segments Inductor compiles, as of train.")
    ] = False,
) -> bool:
    """Predict whether a plan fits into the memory of its devices, how long a step is, and why it is not shorter.

    A model of the library is captured without memory for its weights. Exit code 1 when the plan does not fit; with
    --compare, when none does.
    """
    way = read_bytes("--memory", memory) if memory else None, torch_compile
    if os.path.isdir(request.model) and not request.plan:
        if compare or advise or request.directory:
            raise InputError(f"{request.model} is a plan directory; give a model to compare plans of it.")
        from superscaler.verify.plan_dir import simulate_directory

        request.check_directory(but="cluster")
        only = simulate_directory(Path(request.model), request.cluster, *way)
        _show(printer, {request.model: only})
        return only.fits
    request.check_plan()
    _, cluster = request.read()
    _check_speeds(cluster)
    specs = list(dict.fromkeys([request.plan, *(compare or ())]))
    for spec in specs:
        replace(request, plan=spec).read()
    model, precision = _without_memory(request.model), _precision(request, cluster)
    shapes = replace(request, model=model, precision=precision, no_check=True)
    graph, _ = shapes.capture()
    from superscaler.plan import compile as compile_graph

    def predicted(spec: str) -> Prediction:
        return compile_graph(graph, spec, cluster).simulate(*way)

    start = time.monotonic()
    plan = compile_graph(graph, request.plan, cluster)
    found = {request.plan: plan.simulate(*way)} | {spec: predicted(spec) for spec in specs[1:]}
    limit = _patience(advise, bool(compare) or printer.as_json, found[request.plan].fits)
    ways = {spec: partial(predicted, spec) for spec in neighbours(request.plan) if spec not in found}
    if cluster.kind != LOCAL and not torch_compile:
        ways = {f"{request.plan} --torch-compile": partial(plan.simulate, way[0], torch_compile=True)} | ways
    tried = _tried(ways, limit, time.monotonic() - start)
    others = {spec: p for spec, p in tried if advise or _is_better(p, found[request.plan])}
    found |= {spec: others[spec] for spec in sorted(others, key=lambda spec: _rank(others[spec]))[:_BEST]}
    _show(printer, found, "What would help" if others else "")
    warn_of_servers(printer, request.plan, cluster)
    return any(found[spec].fits for spec in specs)


def _check_speeds(cluster: Cluster) -> None:
    """Raise InputError, before the model is built, for devices of unknown speed."""
    if cluster.device_kind is None or cluster.device_kind.speeds is None:
        raise InputError(
            f"--cluster {cluster}: nothing is known about the speed of {cluster}; measure this machine with "
            "superscaler doctor --measure --out machine.yaml and give --cluster machine.yaml, or name a preset, as "
            "a100:1x8."
        )


def _without_memory(model: str) -> str:
    """Return the spec of a model of the library with its weights on the meta device."""
    name, _, keys = model.partition(":")
    if name.endswith(".py") or "device=" in keys:
        return model
    return f"{name}:{keys},device=meta" if keys else f"{name}:device=meta"


def _precision(request: Request, cluster: Cluster) -> str | None:
    """Return the requested precision. The default on a GPU is that of its fastest products."""
    if request.precision or request.autocast or cluster.kind == LOCAL or cluster.device_kind is None:
        return request.precision
    return next((name for name, dtype in HALVES.items() if dtype in cluster.device_kind.flops), None)


def _patience(advise: bool | None, is_asked: bool, fits: bool) -> float:
    """Return the seconds within which other plans may be tried."""
    if advise is not None:
        return inf if advise else 0.0
    return 0.0 if is_asked else _SOON if fits else _PATIENT


def _tried(ways: Mapping[str, Callable[[], Prediction]], limit: float, each: float) -> Iterable[tuple[str, Prediction]]:
    """Yield the ways that hold, each with its prediction, while `each` more seconds still end before the limit."""
    end = time.monotonic() + limit - each
    for name, predict in ways.items():
        if limit == 0 or time.monotonic() > end:
            return
        try:
            yield name, predict()
        except PlanError:
            # A neighbour that the model or the cluster does not allow.
            continue


def _rank(p: Prediction) -> tuple[bool, float]:
    return not p.fits, p.step_seconds if p.fits else p.fullest.peak_bytes


def _is_better(p: Prediction, than: Prediction) -> bool:
    """Return whether a plan is worth to be shown unasked: it fits, needs less memory, or is clearly faster."""
    if p.fits and than.fits:
        return p.step_seconds < _CLEARLY * than.step_seconds
    return _rank(p) < _rank(than)


def _show(printer: Printer, found: Mapping[str, Prediction], title: str = "") -> None:
    """Print the first prediction, and all in a table under a title, the best first."""
    from superscaler.simulate.prediction import COLUMNS, PLANS, device_rows, plan_row, words

    first, *others = found.values()
    printer.show(words(first))
    if len(first.devices) > 1:
        printer.show(table(["devices", *COLUMNS], device_rows(first), right=[*COLUMNS]))
    printer.result = first.as_json()
    if others:
        best = sorted(found, key=lambda spec: _rank(found[spec]))
        names = ["plan", *PLANS]
        printer.show(table(names, (plan_row(spec, found[spec]) for spec in best), names[1:-1], title))
        printer.result = {**printer.result, "plans": {spec: found[spec].as_json() for spec in best}}
