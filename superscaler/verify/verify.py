"""The certificate: one step of a plan in float64 against the exported model, every replica of every weight compared."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from superscaler.artifact import initial_values, reads, slots_of, write
from superscaler.compiler import Compiled, finish
from superscaler.errors import InputError, PlanError, RuntimeFailure, unknown
from superscaler.ir.graph import Model
from superscaler.ir.mask import Mask
from superscaler.ir.program import Weight
from superscaler.runtime import functional
from superscaler.runtime.executor import take
from superscaler.runtime.launch import call
from superscaler.runtime.step import Step, check_batch, load
from superscaler.verify.checks import CHECKS
from superscaler.verify.locate import FLOOR, TOLERANCE, Values, first_difference, model_step, on_threads
from superscaler.verify.oracle import Reference, reference_step, retyped
from superscaler.verify.retype import retype
from superscaler.verify.small import shrink

# A plan above any of these is verified at a small shape, unless it is asked for as it is.
MOST_RANKS, MOST_ELEMENTS, MOST_FLOPS = 32, 100_000_000, 2 * 10**11


@dataclass(frozen=True, slots=True)
class Result:
    """What one rank found: the loss, its slices of gradients and of weights after the update, by local name, and the
    bytes that it put on links.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    weights: Values
    moved: int


def verify(
    compiled: Compiled, backend: str = "threads", batch: Values | None = None, shapes: str = "auto"
) -> dict[str, Any]:
    """Run one step of the plan and of the model in float64, dropout off, and compare.

    `backend`: "threads" runs all ranks in this process, "processes" under torch.distributed. `shapes`: "model" runs
    the plan as it is against the exported model; "small" runs it on few elements and places of the mesh (see `shrink`)
    against the graph on one device, whatever its size; "auto" is small for what is too large to run here. The checks
    are done on the plan as it is, always.

    Returns equal, loss_error (relative), gradient_error and parameter_error (largest over pTensors, buffers that the
    step changes included, and replicas, relative with a floor), worst_tensor, first_difference (text: the first check
    that does not hold, or the first tensor in execution order that is not the model's; empty when equal),
    conservation (the certificate of the whole program, see `verify.certificate`), deadlock_free, bytes_moved (what all
    ranks put on links in that step) and bytes_planned (what the plan said; equal), shapes, and shrunk (what ran
    smaller: before and after, by factor). Raises InputError for a plan that cannot run smaller but must.
    """
    if shapes not in ("auto", "model", "small"):
        raise InputError(unknown("shapes", shapes, ["auto", "model", "small"]))
    if batch is not None:
        check_batch(batch, reads(compiled.graph.model))
    if shapes == "model" or (shapes == "auto" and not _is_large(compiled)):
        exact = finish(retype(compiled.graph, "float64", dropout=False), compiled.cluster)
        return {**certify(exact, backend, batch), "shapes": "model", "shrunk": {}}
    refused = {name: _refusal(partial(check, compiled.program)) for name, check in CHECKS.items()}
    small = shrink(compiled, batch)
    exact = finish(retype(small.graph, "float64", dropout=False), small.cluster)
    values = {k: retyped(v, torch.float64) for k, v in small.values.items()}
    inputs = {k: retyped(v, torch.float64) for k, v in small.batch.items()}
    found = _compare(exact, backend, 60.0, values, inputs, _graph_step(exact, {**values, **inputs}))
    first = next((text for text in refused.values() if text), "") or found["first_difference"]
    whole = {name: not text and found[name] for name, text in refused.items()}
    told = {"equal": found["equal"] and not first, "first_difference": first, "shapes": "small", "shrunk": small.shrunk}
    return {**found, **whole, **told}


def _graph_step(exact: Compiled, known: Values) -> Reference:
    """Return what one step of the graph gives on one device."""
    model = exact.graph.model
    made, gradients = model_step(exact, known)
    buffers = {op.inputs[0].tensor: made[op.inputs[1].tensor] for op in model.ops if op.is_write}
    return Reference(made[model.loss], {n: g for n, g in gradients.items() if n in known}, buffers)


def _is_large(compiled: Compiled) -> bool:
    """Tell whether a plan is too large to be run here at its own shapes in float64."""
    model = compiled.graph.model
    elements = sum(prod(tensor.shape) for tensor in model.parameters())
    flops = sum(op.flops for op in model.ops)
    return len(compiled.cluster.devices) > MOST_RANKS or elements > MOST_ELEMENTS or flops > MOST_FLOPS


def certify(
    exact: Compiled, backend: str = "threads", batch: Values | None = None, timeout: float = 60.0
) -> dict[str, Any]:
    """Do what `verify` does with a plan that is in float64 already. `timeout`: of a message, in seconds.

    A plan that a check refuses is not run: its errors are infinite.
    """
    captured = exact.graph.captured
    values = {k: retyped(v, torch.float64) for k, v in initial_values(exact.graph.model, captured.values).items()}
    inputs = {k: retyped(v, torch.float64) for k, v in (batch or captured.batch).items()}
    expected = reference_step(captured, inputs, values, torch.float64, draw=_draw(exact.graph.model))
    return _compare(exact, backend, timeout, values, inputs, expected)


def _compare(
    exact: Compiled, backend: str, timeout: float, values: Values, inputs: Values, expected: Reference
) -> dict[str, Any]:
    if backend not in _BACKENDS:
        raise InputError(unknown("backend", backend, _BACKENDS))
    loss, gradients, buffers = expected
    refused = {name: _refusal(partial(check, exact.program)) for name, check in CHECKS.items()}
    first = next((text for text in refused.values() if text), "")
    errors = dict.fromkeys(("loss_error", "gradient_error", "parameter_error"), float("inf"))
    worst, moved, off = "", 0, ""
    try:
        results = [] if first else _BACKENDS[backend](exact, values, inputs, timeout)
    except RuntimeFailure:
        results, first = [], first_difference(exact, values, inputs, timeout)
        if not first:
            raise
    if results:
        moved = sum(r.moved for r in results)
        updated = {**_reference_update(exact.graph.model, values, gradients), **buffers}
        of_gradients = list(_errors(exact, [r.gradients for r in results], gradients))
        of_weights = list(_errors(exact, [r.weights for r in results], updated))
        found = [_largest(of_gradients), _largest(of_weights)]
        loss_error = max(float((r.loss - loss).abs() / loss.abs().clamp_min(1e-30)) for r in results)
        errors = dict(zip(errors, (loss_error, found[0][0], found[1][0]), strict=True))
        worst = found[0 if errors["gradient_error"] >= errors["parameter_error"] else 1][1]
        off = _first(of_gradients, "the gradient of ") or _first(of_weights, "after its update ")
        off = off or f"{exact.graph.model.loss}, the loss of the step, is off by {loss_error:.2g}"
    is_equal = all(error <= TOLERANCE for error in errors.values())
    if not is_equal and not first:
        first = first_difference(exact, values, inputs, timeout) or off
    return {
        "equal": is_equal,
        **errors,
        "worst_tensor": worst,
        "first_difference": first,
        **{name: not text for name, text in refused.items()},
        "world": exact.program.world,
        "backend": backend,
        "bytes_moved": moved,
        "bytes_planned": exact.program.bytes_moved,
        "loss": float(loss),
    }


def _draw(model: Model) -> Callable[[str, tuple[int, ...]], Tensor]:
    """Return what gives the random numbers of an operator in the first step of a plan."""
    numbers = {op.name: n for n, op in enumerate(model.ops)}

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        return functional.draw(0, 0, numbers.get(name, -1), [(0, size) for size in shape], shape, "cpu")

    return draw


def _refusal(check: Callable[[], None]) -> str:
    try:
        check()
    except PlanError as error:
        return str(error)
    return ""


def _reference_update(model: Model, values: Values, gradients: Values) -> dict[str, Tensor]:
    """Return the trained weights after one step of the user's optimizer on the whole tensors."""
    members: list[list[Tensor]] = [[] for _ in model.optimizer.groups]
    updated = {}
    for op in model.ops:
        if not op.is_forward and not op.is_write:
            name = op.inputs[0].tensor
            updated[name] = values[name].clone().requires_grad_()
            updated[name].grad = gradients[name].clone() if name in gradients else None
            members[op.group].append(updated[name])
    groups = [{"params": p, **dict(g)} for p, g in zip(members, model.optimizer.groups, strict=True) if p]
    if groups:
        getattr(torch.optim, model.optimizer.name)(groups).step()
    return {name: weight.detach() for name, weight in updated.items()}


def _errors(
    compiled: Compiled, found: Sequence[Mapping[str, Tensor | None]], expected: Values
) -> Iterator[tuple[float, Weight, int]]:
    """Return the error of each slice on each device."""
    model = compiled.graph.model
    floor = FLOOR * max((float(t.abs().max()) for t in expected.values() if t.numel()), default=1.0)
    for device in compiled.program.devices:
        for weight in device.weights:
            if weight.tensor not in expected:
                continue
            whole = expected[weight.tensor]
            want = take(whole, slots_of(model, weight.tensor), weight.box)
            have = found[device.rank].get(str(weight.name))
            have = torch.zeros_like(want) if have is None else have
            scale = max(float(whole.abs().max()), floor, 1e-300)
            error = float((have - want).abs().max()) / scale if have.shape == want.shape else float("inf")
            yield error, weight, device.rank


def _largest(errors: Sequence[tuple[float, Weight, int]]) -> tuple[float, str]:
    """Return the largest error, and the tensor and device where it is."""
    worst, where = 0.0, ""
    for error, weight, rank in errors:
        if not error <= worst:
            worst, where = error, f"{weight.tensor} on device {rank}"
    return worst, where


def _first(errors: Sequence[tuple[float, Weight, int]], what: str) -> str:
    """Return the first slice that is not equal."""
    found = ((Mask(w.tensor, w.box), rank, error) for error, w, rank in errors if not error <= TOLERANCE)
    return next((f"{what}{mask} on device {rank} is off by {error:.2g}" for mask, rank, error in found), "")


def _run(step: Step, batch: Values) -> Result:
    step.state.keep_gradients = True
    loss = step(batch)
    weights = {name: w.detach() for name, w in step.state.weights.items()}
    return Result(loss.detach(), dict(step.state.gradients), weights, step.bytes_moved)


def _threads(compiled: Compiled, values: Values, batch: Values, timeout: float) -> list[Result]:
    return on_threads(compiled, values, lambda step: _run(step, batch), timeout)


def _processes(compiled: Compiled, values: Values, batch: Values, _: float) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="superscaler-verify-") as name:
        folder = Path(name)
        write(compiled, folder / "plan", values)
        save_file(_plain(batch), folder / "batch")
        moved = call(_rank, compiled.program.world, name)
        return [_read(folder / f"rank{rank}", count) for rank, count in enumerate(moved)]


def _rank(name: str) -> int:
    """Run one step of the plan in a folder on this rank, and write what it found there; return the bytes moved."""
    folder = Path(name)
    step = load(folder / "plan")
    result = _run(step, load_file(folder / "batch"))
    given = {n: gradient for n, gradient in result.gradients.items() if gradient is not None}
    parts = {"": {"loss": result.loss}, "gradient ": given, "weight ": result.weights}
    stored = {f"{kind}{n}": value for kind, part in parts.items() for n, value in part.items()}
    save_file(_plain(stored), folder / f"rank{step.rank}")
    step.close()
    return result.moved


def _read(file: Path, moved: int) -> Result:
    stored = load_file(file)
    gradients, weights = (
        {n.removeprefix(kind): value for n, value in stored.items() if n.startswith(kind)}
        for kind in ("gradient ", "weight ")
    )
    return Result(stored["loss"], gradients, weights, moved)


def _plain(values: Values) -> dict[str, Tensor]:
    # Files of safetensors hold no views.
    return {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in values.items()}


_BACKENDS = {"threads": _threads, "processes": _processes}
