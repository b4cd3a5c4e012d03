"""`superscaler report`: a page about plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from superscaler.cli.common import Printer, command, path
from superscaler.specs.sizes import size


@command
def report(
    printer: Printer,
    plans: Annotated[
        list[Path], typer.Argument(metavar="DIR [DIR]", help="Plan directories that compile --out wrote.")
    ],
    out: Annotated[Path, path("--out", "FILE", "The page to write, as plan.html.", "file")],
) -> None:
    """Write a page about a plan, or about several beside each other: one file, which a browser opens offline."""
    from superscaler.report.page import save
    from superscaler.verify.plan_dir import subject_of

    subjects = [subject_of(plan) for plan in plans]
    save(subjects, out)
    printer.show(f"written to {out} ({size(out.stat().st_size)})")
    printer.result = {"out": str(out), "bytes": out.stat().st_size}
