"""`superscaler simulate` and `search`: seconds and bytes of a plan on a cluster, and the best plan, unrun."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superscaler.cli.common import ModelRequest, warn_of_servers
from superscaler.cli.options import completion
from superscaler.cli.options.command import command
from superscaler.cli.options.declare import option, path
from superscaler.cli.options.lengths import read_mixture, show_mixture
from superscaler.cli.options.search import SearchOptions
from superscaler.cli.options.system import SystemOptions
from superscaler.cli.printing import Printer, table
from superscaler.cli.validate import Request
from superscaler.errors import InputError
from superscaler.specs.file_errors import writing
from superscaler.specs.options import with_key
from superscaler.specs.sizes import duration
from superscaler.timing import phase

if TYPE_CHECKING:
    from superscaler.cluster import Cluster
    from superscaler.compiler import SProgram
    from superscaler.plan import Plan
    from superscaler.planner.resumed import Run
    from superscaler.planner.search import Answer
    from superscaler.planner.whole.programs import Found
    from superscaler.simulate.prediction import Prediction
    from superscaler.verbs import Graph


@command
def simulate(
    printer: Printer,
    request: Request,
    options: SystemOptions,
    compare: Annotated[
        list[str] | None, typer.Option("--compare", metavar="PLAN", help="Another plan; may be repeated.")
    ] = None,
) -> bool:
    """Predict whether a plan fits into the memory of its devices, how long a step is, and why it is not shorter.

    A model of the library is captured without memory for its weights. Exit code 1 when the plan does not fit; with
    --compare, when none does.
    """
    options.check()
    if os.path.isdir(request.model) and not request.plan:
        return _directory(printer, request, options, compare or ())
    request.check_plan()
    request = replace(request, model=options.packed(request.model))
    _, cluster = request.read()
    from superscaler.simulate.predict import check_speeds

    check_speeds(cluster)
    specs = list(dict.fromkeys([request.plan, *(compare or ())]))
    sprograms = [replace(request, plan=spec).read(options.capacity, options.system)[0] for spec in specs]
    if request.lengths:
        return _mixture(printer, request, sprograms, cluster, options)
    graph = _shapes(request, cluster)
    from superscaler.compiler import compile_graph
    from superscaler.plan import Plan

    # Nothing runs: a plan that is saved or trained is certified then.
    plans = (Plan(compile_graph(graph, sprogram, cluster, certified=False)) for sprogram in sprograms)
    plan = next(plans)
    found = {request.plan: _predicted(plan, options)}
    found |= {spec: _predicted(own, options) for spec, own in zip(specs[1:], plans, strict=True)}
    if options.cuda_graph:
        found[f"{request.plan}, not replayed"] = _predicted(plan, replace(options, cuda_graph=False))
    _show(printer, found)
    if not any(p.fits for p in found.values()):
        printer.show(f"plans that fit: superscaler search {request.model} --cluster {request.cluster}")
    warn_of_servers(printer, request.plan, cluster)
    return any(found[spec].fits for spec in specs)


def _directory(printer: Printer, request: Request, options: SystemOptions, compare: Sequence[str]) -> bool:
    """Print the prediction of a saved plan. Return whether it fits."""
    if compare or request.directory:
        raise InputError(f"{request.model} is a plan directory; give a model to compare plans of it.")
    from superscaler.verify.plan_dir import simulate_directory

    request.check_directory(but="cluster")
    only = simulate_directory(Path(request.model), request.cluster, options.capacity, options.system)
    _show(printer, {request.model: only})
    return only.fits


def _mixture(
    printer: Printer, request: Request, sprograms: Sequence[SProgram], cluster: Cluster, options: SystemOptions
) -> bool:
    """Print the predictions of the steps of a mixture of lengths, and its means. Return whether all fit."""
    if len(sprograms) > 1 or options.documents:
        what = "--compare shows steps" if len(sprograms) > 1 else "--documents fill rows"
        raise InputError(f"{what} of one length, and --lengths is a mixture of several; leave one of them out.")
    graph = _shapes(request, cluster)
    from superscaler.plan import compile as compile_graph
    from superscaler.recapture.shapes import sizes_at

    shares = read_mixture(request.lengths)
    plan = compile_graph(graph, sprograms[0], cluster, [*shares])
    found: dict[int, Prediction] = {}
    for length in shares:
        sizes = sizes_at(graph.model, length)
        found[length] = _predicted(next(one for one in (plan, *plan.others) if one.sizes == sizes), options)
    return show_mixture(printer, shares, found)


def _predicted(plan: Plan, options: SystemOptions) -> Prediction:
    from superscaler.simulate.predict import predict

    with phase("simulate"):
        return predict(plan.compiled.program, plan.compiled.cluster, options.capacity, options.system)


@dataclass(frozen=True, kw_only=True)
class SearchRequest(ModelRequest):
    """A model and the cluster to find a plan for."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model: see compile; with --like that of DIR.")] = ""
    cluster: Annotated[
        str, option("--cluster", "a100:4x8 (servers x devices), or a YAML file", "CLUSTER", completion.clusters)
    ]
    like: Annotated[
        Path | None,
        path("--like", "DIR", "Checkpoints of a run that shall go on on --cluster, with its model and optimizer."),
    ] = None


@command
def search(printer: Printer, request: SearchRequest, options: SearchOptions) -> bool:
    """Find the plan with the shortest step that fits, and say how far it can be from the best of the space.

    The space: pipelines of stages with own numbers of blocks, tensor, expert and data parallelism, ZeRO and FSDP,
    recomputation, microbatches; and what saves more memory, where that is short. Blocks are compiled and simulated;
    then the best plans are, whole. With --like, the plan is for a run that goes on. Exit code 1 when no plan fits.
    """
    cluster, batches = options.check_search(request.cluster)
    request, run = _like(request)
    request = replace(request, model=options.packed(request.model))
    request.check()
    from superscaler.launch.second import prepare
    from superscaler.planner import WORK

    prepare(WORK)
    graph = _shapes(request, cluster)
    from superscaler.planner.reasons import held_back, why, words

    if run is not None:
        run.check(graph)
    answer, seconds = _found(printer, request, options, graph, cluster, batches)
    best, shown = answer.best, {_with_batch(found, batches): found for found in answer.plans[: options.top]}
    way = request.cluster, cluster.is_local, request.optimizer or "", request.precision or ""
    changes = [] if run is None else [run.goes_on(best.choice, *way)]
    printer.show(words(answer, bool(batches)), *changes)
    _show_plans(printer, shown, seconds)
    asked = graph, cluster, answer, options.capacity, options.system
    against = {spec: why(spec, *asked) for spec in options.why_not or ()}
    printer.show(*(f"{spec}: {text}" for spec, text in against.items()))
    if options.out is not None:
        printer.show(_written(options.out, request, options, cluster, answer))
    printer.result = {
        "plan": best.spec,
        "batch": best.choice.batch,
        "bound": answer.bound,
        "held_back": held_back(answer) if best.prediction.fits else "memory",
        "plans": {name: found.prediction.as_json() for name, found in shown.items()},
        "measured": seconds,
        "why_not": against,
    }
    return best.prediction.fits


def _found(
    printer: Printer,
    request: SearchRequest,
    options: SearchOptions,
    graph: Graph,
    cluster: Cluster,
    batches: Sequence[int],
) -> tuple[Answer, dict[str, float]]:
    """Return the answer of a search, and the seconds of the steps that were measured."""
    from superscaler.planner.search import search as find

    limit, say = options.seconds or float("inf"), printer.progress.say
    where, system, measured = options.where, options.system, options.measure or 0
    answer = find(graph, cluster, options.capacity, where, system, limit, say, batches, measured=measured)
    if not options.measure or not answer.best.prediction.fits:
        return answer, {}
    seconds = _measured(request, cluster, answer, options)
    return answer.ranked(seconds), seconds


def _written(out: Path, request: SearchRequest, options: SearchOptions, cluster: Cluster, answer: Answer) -> str:
    """Write the best plan into a file. Return a line with the command that compiles it."""
    from superscaler import __version__
    from superscaler.planner.written import text_of

    if not answer.best.prediction.fits:
        return f"{out} is not written: no plan fits"
    batch = str(answer.best.choice.batch)
    model = with_key(request.model, "batch", batch, is_replaced=True) if options.batch else request.model
    given = {"optimizer": request.optimizer, "precision": request.precision, "autocast": request.autocast}
    pairs = [*given.items(), *(("set", option) for option in request.options or ())]
    more = [text for name, value in pairs if value for text in (f"--{name}", value)]
    verb, end = ("train", ["--steps", "N"]) if cluster.is_local else ("compile", ["--out", out.stem])
    command = shlex.join(["superscaler", verb, model, "--plan", str(out), "--cluster", request.cluster, *more, *end])
    facts = {"constraints": options.where, "memory of a device": options.memory, "steps": options.said}
    title = f"A plan of {model} for {request.cluster}, found by superscaler {__version__}."
    with writing(out, "name a new file in a folder that exists"), out.open("x", encoding="utf-8") as file:
        file.write(text_of(answer, title, facts, command))
    return f"written to {out}: {command}"


def _like(request: SearchRequest) -> tuple[SearchRequest, Run | None]:
    """Return the request with what the checkpoints of --like were trained with, and the run of these."""
    if request.like is None:
        if not request.model:
            raise InputError("search has neither MODEL nor --like DIR; give one of them.")
        return request, None
    from superscaler.planner.resumed import Run

    run = Run.read(request.like, request.model)
    return replace(request, **run.options(request.optimizer, request.precision)), run


def _measured(request: SearchRequest, cluster: Cluster, answer: Answer, options: SearchOptions) -> dict[str, float]:
    """Return the seconds of a step of the best plans that fit, trained on this machine."""
    from superscaler.plan import compile as compile_graph
    from superscaler.planner.measured import measured

    graph = request.on(cluster).capture()[0]
    specs = [found.spec for found in answer.finalists(options.measure or 0)]

    def save(spec: str, out: Path) -> None:
        compile_graph(graph, spec, cluster).save(out, evaluation=False)

    return measured(specs, save, len(cluster.devices), options.torch_compile, options.cuda_graph)


def _with_batch(found: Found, batches: Sequence[int]) -> str:
    """Return the text of a plan, with its batch where there are several."""
    return f"{found.spec}, batch {found.choice.batch}" if len(batches) > 1 else found.spec


def _show_plans(printer: Printer, plans: Mapping[str, Found], seconds: Mapping[str, float]) -> None:
    """Print the best plans in a table, with what was measured."""
    from superscaler.simulate.prediction import PLANS, plan_row

    names, more = ["plan", *PLANS], ["measured"] if seconds else []
    rows = [
        [*plan_row(name, found.prediction), *(duration(seconds[name]) if name in seconds else "" for _ in more)]
        for name, found in plans.items()
    ]
    printer.show(table([*names, *more], rows, [*names[1:-1], *more], "The best plans"))


def _shapes(request: ModelRequest, cluster: Cluster) -> Graph:
    """Return the graph of a model without data: shapes are all that a prediction needs."""
    return replace(request.on(cluster), model=with_key(request.model, "device", "meta"), no_check=True).capture()[0]


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
