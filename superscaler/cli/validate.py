"""`superscaler validate`: whether a plan can run, without running it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from superscaler.cli.common import PlanRequest, Printer, command, option
from superscaler.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Request(PlanRequest):
    """A plan to compile, or a directory that has one."""

    model: Annotated[str, typer.Argument(metavar="MODEL | DIR", help="A model, or a plan directory as it stands.")]
    plan: Annotated[str, option("--plan", "The plan of a model: see compile.", "PLAN")] = ""
    cluster: Annotated[str, option("--cluster", "The cluster of a model: see compile.", "CLUSTER")] = ""


@command
def validate(
    printer: Printer,
    request: Request,
    no_manifest: Annotated[
        bool, option("--no-manifest", "Of a directory: leave its hashes out, ask the certificate alone.")
    ] = False,
) -> None:
    """Certify the program of a plan: every read finds its elements with their whole value, no device waits forever.

    Exit code 1 and the instruction, the tensor and the device when it does not hold.
    """
    if os.path.isdir(request.model) and not request.plan:
        from superscaler.verify.saved import validate_directory

        printer.result = validate_directory(Path(request.model), manifest=not no_manifest)
        printer.show(f"the plan in {request.model} holds: its program is certified, and its files are what that says")
        return
    for name in ("plan", "cluster"):
        if not getattr(request, name):
            raise InputError(
                f"{request.model} is no directory that can be read, so that it is a model; give --{name}, too."
            )
    compiled, _ = request.compile()
    printer.result = compiled.validate()
    printer.show(compiled.summary(), "the plan holds: every part is covered, and no device waits forever")
