"""The certificate: steps of a plan in float64 and as trained against the user's module, on every replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from superscaler.artifact import initial_values, reads, write
from superscaler.certify.certificate import CHECKS
from superscaler.compiler import Compiled, finish
from superscaler.errors import InputError, PlanError, RuntimeFailure, unknown
from superscaler.frontend.base.oracle import default_dtype, retyped
from superscaler.interrupt import TemporaryFolder
from superscaler.ir.communication import bytes_moved
from superscaler.ir.model import Model
from superscaler.launch.launch import call
from superscaler.runtime.batch import check_batch
from superscaler.runtime.compiled.segments import CompiledSegments
from superscaler.runtime.load import load
from superscaler.runtime.step import Step
from superscaler.verify.compare import Comparison, Errors, noise_of
from superscaler.verify.eager import Unlike
from superscaler.verify.locate import TOLERANCE, Values, first_difference, model_step, on_threads
from superscaler.verify.oracles import FLOATS, Oracle, graph_step, oracles_of, recurrence, retype
from superscaler.verify.results import STEPS, Result, run_steps
from superscaler.verify.small import shrink
from superscaler.verify.trained import near, quiet

# A plan above any of these limits is verified at a small shape, unless shapes="model".
MOST_RANKS, MOST_ELEMENTS, MOST_FLOPS = 32, 100_000_000, 2 * 10**11
_SMALL = "it has the shapes of the capture; verify a small model with the same plan to compare it too"
Found = dict[str, Any]
_LIMITED = "it drops no choices of experts; without a capacity the plan is compared with it"


def verify(
    compiled: Compiled,
    backend: str = "threads",
    batch: Values | None = None,
    shapes: str = "auto",
    torch_compile: bool = False,
) -> Found:
    """Compare two steps of the plan (n + 2, if it reads weights of n updates ago) with the user's module, without
    dropout: in float64, then in the trained dtypes, where sums in parts may round (see `superscaler.verify.trained`).
    In float64 also a step that is clipped below its norm, and one with a scaled loss.

    Each step starts from the plan's current weights. The update of each slice is compared with that of torch's
    optimizer on the plan's gradient. `backend`: "threads" of this process, "processes" under torch.distributed, or
    "gpu", threads with the tensors of all devices on one GPU; the module runs where its weights are. `shapes`: "model"
    runs the plan at its own shapes against a copy of the module, or against the exported program if no copy can run;
    "small" on few elements and places (see `shrink`) against the graph on one device; "auto" is "small" for a plan that
    is too large to run here. The checks of the program always see the whole plan. `torch_compile`: its segments are
    compiled, as by `ss.load(directory, torch_compile=True)`.

    Returns a dict. equal: in both precisions. trained_dtype, trained_error (the one nearest to its limit),
    trained_allowed (that limit). The largest relative errors in float64: loss_error, gradient_error (with a floor),
    parameter_error (weights, buffers and optimizer state), output_error (of `outputs`). options: by "clip" and
    "loss_scale" the `value` and the largest `error` of that step; empty where nothing trains, or several iterations run
    at once, which take neither. worst_tensor. first_difference:
    text, empty when equal: the first failed check, the first wrong tensor in execution order, or a fault of capture.
    conservation and deadlock_free: see `certify.certificate`. trains. reference: "eager", "export" or "graph";
    module_compared: whether it is the user's module; note: why not. bytes_moved: on links in a step, measured on all
    ranks; bytes_planned: must be equal. stale: ages of the read weights, in updates; for [0, 1, 3] the reference is the
    recurrence with these ages. shapes. dropped: choices of experts without a row in the first step, and all choices.
    shrunk: sizes before and after, by factor. Raises InputError for a plan that cannot run smaller but must.
    """
    if shapes not in ("auto", "model", "small"):
        raise InputError(unknown("shapes", shapes, ["auto", "model", "small"]))
    if str(backend) not in _BACKENDS:
        raise InputError(unknown("backend", backend, _BACKENDS))
    run = Runs(backend, torch_compile)
    captured = compiled.graph.captured
    if batch is not None:
        check_batch(batch, reads(compiled.graph.model))
    if shapes == "model" or (shapes == "auto" and not _is_large(compiled)):
        exact = finish(retype(compiled.graph, "float64"), compiled.cluster)
        found = {**_certified(exact, replace(run, with_options=True), batch), "shapes": "model", "shrunk": {}}
        values, inputs = initial_values(compiled.graph.model, captured.values), batch or captured.batch
        return _as_trained(found, compiled, run, values, inputs)
    refused = _refusals(compiled)
    small = shrink(compiled, batch)
    exact, own = (finish(retype(small.graph, kind), small.cluster) for kind in ("float64", None))
    values = {k: retyped(v, torch.float64) for k, v in small.values.items()}
    inputs = {k: retyped(v, torch.float64) for k, v in small.batch.items()}
    oracles = {"graph": lambda: graph_step(exact, inputs)}
    found = _certificate(exact, replace(run, with_options=True), values, inputs, oracles)
    first = next((text for text in refused.values() if text), "") or found["first_difference"]
    whole = {name: not text and found[name] for name, text in refused.items()}
    found |= {**whole, "equal": found["equal"] and not first, "first_difference": first}
    found |= {"shapes": "small", "shrunk": small.shrunk, "note": _SMALL}
    return _as_trained(found, own, run, small.values, small.batch)


def _as_trained(found: Found, plan: Compiled, run: Runs, values: Values, inputs: Values) -> Found:
    """Return the results in float64, extended by those of steps in the plan's own dtypes if the plan was equal."""
    tensors = plan.graph.model.tensors.values()
    dtypes = sorted({t.dtype for t in tensors if t.kind == "parameter" and getattr(torch, t.dtype).is_floating_point})
    trained = {"trained_dtype": ", ".join(dtypes), "trained_error": float("inf"), "trained_allowed": 0.0}
    if not found["equal"]:
        return {**found, **trained}
    if not any(t.dtype in FLOATS for t in tensors):
        # All tensors are float64 or integers already.
        error = max(found[kind] for kind in Errors().largest)
        return {**found, **trained, "trained_error": error, "trained_allowed": TOLERANCE}
    try:
        own = quiet(plan)
        results = run(own, values, inputs)
        errors = near(own, values, results, oracles_of(own, inputs, None)[found["reference"]]())
    except (RuntimeFailure, Unlike) as why:
        errors = Errors(first=str(why), nearest=(float("inf"), 0.0))
    first = f"in {trained['trained_dtype']}, {errors.first}" if errors.first else ""
    trained |= dict(zip(("trained_error", "trained_allowed"), errors.nearest, strict=True))
    return {**found, **trained, "equal": errors.is_equal, "first_difference": first}


def _is_large(compiled: Compiled) -> bool:
    """Return whether a plan is too large to be run here at its own shapes in float64."""
    model = compiled.graph.model
    elements = sum(prod(tensor.shape) for tensor in model.parameters())
    flops = sum(op.flops for op in model.ops)
    return len(compiled.cluster.devices) > MOST_RANKS or elements > MOST_ELEMENTS or flops > MOST_FLOPS


def compare_with_eager(exact: Compiled, timeout: float = 60.0) -> Found:
    """Verify a plan in float64 on threads. `timeout`: of a message, in seconds. A plan that is refused is not run."""
    return _certified(exact, Runs("threads", timeout=timeout), None)


def _certified(exact: Compiled, run: Runs, batch: Values | None) -> Found:
    captured, model = exact.graph.captured, exact.graph.model
    values = {k: retyped(v, torch.float64) for k, v in initial_values(model, captured.values).items()}
    inputs = {k: retyped(v, torch.float64) for k, v in (batch or captured.batch).items()}
    oracles = oracles_of(exact, inputs, torch.float64)
    used = ["graph"] if _limits(model) else ["eager", "export"]
    return _certificate(exact, run, values, inputs, {name: oracles[name] for name in used})


def _limits(model: Model) -> dict[str, int]:
    """Return the rows of experts, if a group has more tokens, by the tensor that counts the wanted rows."""
    found = {}
    for op in (op for op in model.ops if op.target == "ss.dispatch"):
        x, rows = model.tensors[op.inputs[0].tensor], model.tensors[op.outputs[0].tensor]
        if rows.shape[1] * rows.shape[2] < x.shape[0]:
            found[op.outputs[1].tensor] = rows.shape[2]
    return found


def _dropped(exact: Compiled, known: Values) -> tuple[int, int]:
    """Return (dropped choices of experts, all choices) on one device."""
    limits = _limits(exact.graph.model)
    made = model_step(exact.graph.model, known)[0] if limits else {}
    lost = sum(int((made[wanted] - rows).clamp(min=0).sum()) for wanted, rows in limits.items())
    return lost, sum(int(made[wanted].sum()) for wanted in limits)


def _certificate(
    exact: Compiled,
    run: Runs,
    values: Values,
    inputs: Values,
    oracles: Mapping[str, Callable[[], Oracle]],
) -> Found:
    """Check the program, run it, and compare it with the first available oracle.

    If it differs, it is compared with the next one too, which shows whether the plan or the captured graph is wrong.
    """
    model, timeout = exact.graph.model, run.timeout
    refused = _refusals(exact)
    first = next((text for text in refused.values() if text), "")
    results: list[list[Result]] = []
    try:
        with default_dtype(torch.float64):
            results = [] if first else run(exact, values, inputs)
    except RuntimeFailure:
        first = _first_difference(exact, values, inputs, timeout)
        if not first:
            raise
    judged = _judged(exact, values, results, oracles) if results else []
    errors = judged[0][1].errors if judged else Errors(dict.fromkeys(Errors().largest, float("inf")))
    if not first and not errors.is_equal:
        is_plan_right = judged[-1][1].errors.is_equal
        first = f"the captured graph is not the module: {errors.first}; the plan equals the graph" * is_plan_right
        first = first or _first_difference(exact, values, inputs, timeout) or errors.first
    return {
        "equal": errors.is_equal,
        **errors.largest,
        "options": judged[0][1].options if judged else {},
        "worst_tensor": errors.worst,
        "first_difference": first,
        **{name: not text for name, text in refused.items()},
        "reference": judged[0][0] if judged else "",
        "module_compared": bool(judged) and judged[0][0] == "eager",
        "note": judged[0][2] or (_LIMITED if _limits(model) else "") if judged else "",
        "trains": bool(model.loss),
        "outputs": [t.name for t in model.tensors.values() if t.kind == "output"],
        "world": exact.program.world,
        "backend": run.backend,
        "bytes_moved": sum(steps[0].moved for steps in results),
        "bytes_planned": bytes_moved(exact.program),
        "stale": sorted({*model.ages.values()}) or [0],
        "dropped": _dropped(exact, {**values, **inputs}),
        "loss": float(results[0][0].loss) if results and model.loss else float("nan"),
    }


def _first_difference(exact: Compiled, values: Values, inputs: Values, timeout: float) -> str:
    with default_dtype(torch.float64):
        return first_difference(exact, values, inputs, timeout)


def _judged(
    exact: Compiled, values: Values, results: Sequence[Sequence[Result]], oracles: Mapping[str, Callable[[], Oracle]]
) -> list[tuple[str, Comparison, str]]:
    """Return (oracle, comparison, reason against the oracle before it), until one oracle finds the plan equal."""
    found, note = [], ""
    for name, make in oracles.items():
        try:
            oracle, comparison = make(), Comparison(exact, values)
            for number, step in enumerate(zip(*results, strict=True)):
                run = partial(recurrence, oracle, exact.graph.model, number=number)
                expected = run(comparison.known)
                noise = noise_of(run, comparison.known, expected)
                # Averages of numbers in torch's optimizers have the default dtype, as those of the plan had.
                with default_dtype(torch.float64):
                    comparison.add(step, expected, noise)
        except Unlike as why:
            note = str(why)
            continue
        found.append((name, comparison, note))
        if comparison.errors.is_equal:
            break
    return found


def _refusals(compiled: Compiled) -> dict[str, str]:
    """Return why each check of the certificate refuses a program; "" where it does not."""
    return {
        name: "" if compiled.certified else _refusal(partial(check, compiled.program)) for name, check in CHECKS.items()
    }


def _refusal(check: Callable[[], None]) -> str:
    try:
        check()
    except PlanError as error:
        return str(error)
    return ""


def _steps(compiled: Compiled) -> int:
    """Return the number of compared steps: until all read weights have changed, and one more."""
    return STEPS + max(compiled.graph.model.ages.values(), default=0)


@dataclass(frozen=True)
class Runs:
    """Runs a plan: on threads, processes or a GPU, maybe compiled. `with_options`: also a step that is clipped, and one
    with a scaled loss. `timeout`: seconds that a rank waits for another.
    """

    backend: str
    torch_compile: bool = False
    with_options: bool = False
    timeout: float = 60.0

    def __call__(self, compiled: Compiled, values: Values, batch: Values) -> list[list[Result]]:
        """Return the state of each rank after each step."""
        return _BACKENDS[self.backend](self, compiled, values, batch)

    def threads(self, compiled: Compiled, values: Values, batch: Values, device: str = "cpu") -> list[list[Result]]:
        def run(step: Step) -> list[Result]:
            step.state.compiled = CompiledSegments() if self.torch_compile else None
            return run_steps(step, batch, _steps(compiled), self.with_options)

        # A rank waits for those that compile.
        if not self.torch_compile:
            return on_threads(compiled, values, run, self.timeout, device)
        return on_threads(compiled.joined, values, run, 1800.0, device)

    def gpu(self, compiled: Compiled, values: Values, batch: Values) -> list[list[Result]]:
        if not torch.cuda.is_available():
            raise InputError(
                "verify on a GPU needs a CUDA device, and torch sees none; leave out --gpu (backend 'threads') for the "
                "CPU."
            )
        return self.threads(compiled, values, batch, "cuda")

    def processes(self, compiled: Compiled, values: Values, batch: Values) -> list[list[Result]]:
        with TemporaryFolder("superscaler-verify-") as name:
            folder = Path(name)
            write(compiled, folder / "plan", values)
            torch.save(dict(batch), folder / "batch")
            default = str(torch.get_default_dtype()).removeprefix("torch.")
            way = "compiled" if self.torch_compile else "plain"
            more = str(_steps(compiled)), "options" * self.with_options, default, way
            call(_rank, compiled.program.world, name, *more)
            files = [folder / f"rank{rank}" for rank in range(compiled.program.world)]
            # These files were written by this program.
            return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


def _rank(name: str, count: str, options: str, default: str, way: str) -> None:
    """Run the plan in a folder on this rank under a default dtype, and write its states after each step."""
    torch.set_default_dtype(getattr(torch, default))
    folder = Path(name)
    step = load(folder / "plan", torch_compile=way == "compiled")
    results = run_steps(step, torch.load(folder / "batch"), int(count), bool(options))
    torch.save(results, folder / f"rank{step.rank}")
    step.close()


_BACKENDS: Mapping[str, Callable[[Runs, Compiled, Values, Values], list[list[Result]]]] = {
    "threads": Runs.threads,
    "processes": Runs.processes,
    "gpu": Runs.gpu,
}
