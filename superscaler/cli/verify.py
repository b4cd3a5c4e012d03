"""`superscaler verify`: whether a plan computes the same as the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from superscaler.cli.common import PlanRequest
from superscaler.cli.options.command import command
from superscaler.cli.options.declare import option
from superscaler.cli.printing import Printer
from superscaler.errors import InputError
from superscaler.report.model import collapse, span
from superscaler.timing import phase

if TYPE_CHECKING:
    from torch import Tensor

    from superscaler.models import BuiltModel


@command
def verify(
    printer: Printer,
    request: PlanRequest,
    processes: Annotated[bool, option("--processes", "Run each device as a process instead of a thread.")] = False,
    gpu: Annotated[bool, option("--gpu", "Run all devices, as threads, on this machine's first GPU.")] = False,
    shapes: Annotated[
        str,
        option("--shapes", "Shapes to run: model (as they are), small (shrunken), auto (small for what is too large)."),
    ] = "auto",
    torch_compile: Annotated[
        bool, typer.Option("--torch-compile", help="With segments that Inductor compiles, as those of train.")
    ] = False,
) -> bool:
    """Run two steps of the plan and of the model in float64 and compare; one more that is clipped, one with a scaled
    loss; then two in the trained dtype. There the plan's error may be as large as the rounding error of the model's own
    steps. Exit code 1 when they are not equal.
    """
    printer.progress.announce(f"verify {request}: capture, compile, then compare two steps with the module's")
    with phase("import"):
        from superscaler.simulate.system import System

    compiled, built = request.compile(System(torch_compile=torch_compile))
    printer.result = compiled.verify(_backend(processes, gpu), real_batch(built), shapes, torch_compile)
    printer.show(_certificate(printer.result, compiled.precision))
    for shape, found in printer.result.get("other_shapes", {}).items():
        printer.show(f"at the shape {shape}: {_certificate(found, compiled.precision)}")
    return bool(printer.result["equal"])


def _backend(processes: bool, gpu: bool) -> str:
    if processes and gpu:
        raise InputError("--processes and --gpu are two ways to run the devices; give one of them.")
    return "processes" if processes else "gpu" if gpu else "threads"


def real_batch(built: BuiltModel) -> dict[str, Tensor] | None:
    """Return real inputs for a model whose example inputs are shapes only; None if the examples are real."""
    import torch

    values = [*built.args, *built.kwargs.values()]
    if built.make_batch is None or not any(isinstance(v, torch.Tensor) and v.is_meta for v in values):
        return None
    return built.make_batch(0)


def _certificate(result: Mapping[str, Any], precision: str) -> str:
    ages, most = span(result["stale"]), max(result["stale"])
    stale = f"stale by {ages}: as W(t+1) = W(t) - lr grad(W(t-n)) on one device, n={ages}" if most else ""
    verdict = stale or "equal to one device" if result["equal"] else f"NOT equal: {result['first_difference']}"
    lost, of = result["dropped"]
    verdict += f", with a capacity of experts that drops {lost} of {of} choices" if of and result["equal"] else ""
    names = [*(_ERRORS if result["trains"] else ()), *(["output_error"] if result["outputs"] else ())]
    errors = "".join(f"\n  {name.replace('_', ' ')}: {result[name]:.3g}" for name in names)
    options = "".join(
        f"\n  with {name.replace('_', ' ')} {option['value']:.4g}: {option['error']:.3g}"
        for name, option in result["options"].items()
    )
    checks = "".join(f"\n  {name.replace('_', ' ')}: {'yes' if result[name] else 'NO'}" for name in _CHECKS)
    where = ", at small shapes: " + _shrunk(result["shrunk"]) if result["shrunk"] else ""
    partly = "" if result["module_compared"] else "the module itself was not compared: "
    why = f"\n  note: {partly}{result['note']}" if result["note"] else ""
    ran = _RUNS[result["reference"]].replace("two", f"{most + 2}" if most else "two")
    error, allowed = result["trained_error"], result["trained_allowed"]
    rounding = f"\n  in {result['trained_dtype']}: {error:.2g}, where the rounding of eager steps allows {allowed:.2g}"
    first = f"{verdict} ({ran}{where})\n  precision: {precision}"
    return f"{first}{errors}{options}{rounding if allowed else ''}{checks}{why}"


def _shrunk(sizes: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(dict.fromkeys(f"{collapse(name)} {before} -> {after}" for name, (before, after) in sizes.items()))


# reference -> the runs that were compared
_RUNS = {
    "eager": "two steps in float64 against the module itself, dropout off",
    "export": "two steps in float64 against the export of the module only, dropout off",
    "graph": "two steps in float64 against the captured graph only, dropout off",
    "": "it was not run",
}
_ERRORS = ("loss_error", "gradient_error", "parameter_error")
_CHECKS = ("conservation", "deadlock_free")
