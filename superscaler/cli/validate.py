"""`superscaler validate`: certifies a plan without running it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from superscaler.cli.common import PlanRequest
from superscaler.cli.options import completion
from superscaler.cli.options.command import command
from superscaler.cli.options.declare import option
from superscaler.cli.printing import Printer
from superscaler.errors import InputError

# The options of a request that a saved plan has.
_FIXED = {
    **{name: f"--{name}" for name in ("plan", "cluster", "optimizer", "lr", "autocast", "precision")},
    "options": "--set",
    "no_overlap": "--no-overlap",
    "lengths": "--lengths",
}


@dataclass(frozen=True, kw_only=True)
class Request(PlanRequest):
    """A plan to compile, or the directory of a saved one."""

    model: Annotated[
        str,
        typer.Argument(metavar="MODEL | DIR", help="A model, or a plan directory.", autocompletion=completion.models),
    ]
    directory: Annotated[str, typer.Argument(metavar="[DIR]", help="A plan directory that may be of the model.")] = ""
    plan: Annotated[str, option("--plan", "The plan of a model: see compile.", "PLAN", completion.plans)] = ""
    cluster: Annotated[
        str, option("--cluster", "The cluster of a model: see compile.", "CLUSTER", completion.clusters)
    ] = ""

    def check_plan(self) -> None:
        """Raise InputError unless a model has a plan and a cluster."""
        for name in ("plan", "cluster"):
            if not getattr(self, name):
                raise InputError(
                    f"{self.model} is no directory that can be read, so it is taken for a model; give --{name}, too."
                )

    def check_directory(self, but: str = "") -> None:
        """Raise InputError for an option that a saved plan has already, other than `but`."""
        plain = {field.name: field.default for field in fields(self)}
        for name, flag in _FIXED.items():
            if name != but and getattr(self, name) != plain[name]:
                raise InputError(f"{self.model} is a saved plan, which has its {flag}; leave it out, or compile anew.")


@command
def validate(
    printer: Printer,
    request: Request,
    no_manifest: Annotated[
        bool, option("--no-manifest", "For a directory: skip its hashes, check the certificate only.")
    ] = False,
) -> bool:
    """Certify the program of a plan: every read finds its elements with their whole value, no device waits forever.

    Exit code 1 and the instruction, the tensor and the device when it does not hold. Given a model and a directory,
    also check that the plan there has that model and its weights: exit code 1 and the first difference when it has not.
    """
    if request.directory:
        return _compare(printer, request, not no_manifest)
    if os.path.isdir(request.model) and not request.plan:
        request.check_directory()
        from superscaler.verify.plan_dir import validate_directory

        printer.result = validate_directory(Path(request.model), manifest=not no_manifest)
        printer.show(
            f"the plan in {request.model} holds: its program is certified, and its files belong to it",
            *_of_compiled(printer.result),
        )
        return True
    request.check_plan()
    printer.progress.announce(f"validate {request}: capture, compile, then certify the programs; nothing is run")
    compiled, _ = request.compile()
    printer.result = compiled.validate()
    printer.show(
        f"precision: {compiled.precision}",
        compiled.summary(),
        "the plan holds: every part is covered, no device waits forever, its code does what the program says",
        *_of_compiled(printer.result),
    )
    return True


def _of_compiled(found: Mapping[str, Any]) -> list[str]:
    """Return a line about the program of compiled steps, if they have one of their own, which holds, too."""
    plain, compiled = found["works"], found["compiled_works"]
    if compiled == plain:
        return []
    return [f"so does the program of --torch-compile, with longer segments: {compiled} calls a step, not {plain}"]


def _compare(printer: Printer, request: Request, manifest: bool) -> bool:
    """Certify a plan directory, and compare it with a newly captured model."""
    if request.plan or request.cluster:
        raise InputError(f"the plan in {request.directory} has a cluster; leave --plan and --cluster out.")
    from superscaler.cli.verify import real_batch
    from superscaler.verify.against import compare_directory, precision_of
    from superscaler.verify.plan_dir import validate_directory

    checks = validate_directory(Path(request.directory), manifest)
    # Autocast casts the weights of the plan as they are.
    kept = None if request.autocast else precision_of(Path(request.directory))
    graph, built = replace(request, no_cache=True, precision=request.precision or kept).capture()
    found = compare_directory(graph, Path(request.directory), real_batch(built))
    printer.result = {**checks, **found}
    what = f"{found['operators']} operators and {found['weights']} weights"
    ran = f", of which the plan computes {found['rewritten']} in other steps" if found["rewritten"] else ""
    verdict = f"of {request.model}: its {what} are those of the module{ran}"
    verdict = verdict if found["equal"] else f"NOT of {request.model}: {found['first_difference']}"
    printer.show(f"the plan in {request.directory} is {verdict}")
    return bool(found["equal"])
