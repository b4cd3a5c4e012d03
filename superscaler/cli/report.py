"""`superscaler report`: a page about plans."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from superscaler.cli.options.command import command
from superscaler.cli.options.declare import path
from superscaler.cli.printing import Printer
from superscaler.errors import InputError
from superscaler.specs.sizes import size


@command
def report(
    printer: Printer,
    plans: Annotated[
        list[Path], typer.Argument(metavar="DIR [DIR]", help="Plan directories that compile --out wrote.")
    ],
    out: Annotated[Path | None, path("--out", "FILE", "The page to write, as plan.html.", "file")] = None,
    trace: Annotated[
        Path | None, path("--trace", "FILE", "A trace in Chrome's JSON, which ui.perfetto.dev opens.", "file")
    ] = None,
    run: Annotated[
        list[Path] | None,
        typer.Option("--run", metavar="RUN_DIR", help="What train --profile recorded; may be repeated, for each DIR."),
    ] = None,
) -> None:
    """Write a page about a plan, or about several beside each other: one file, which a browser opens offline; or the
    same timelines as a trace.

    With --run, measured times stand above the predicted ones.
    """
    runs = run or []
    if len(runs) > len(plans):
        raise InputError(
            f"{len(runs)} runs of {len(plans)} plans; give --run at most once for each plan, in their order."
        )
    if out is None and trace is None:
        raise InputError("nothing is asked for; give --out plan.html, --trace trace.json, or both.")
    from superscaler.report import trace as traces
    from superscaler.report.page import write as page
    from superscaler.verify.plan_dir import subject_of

    subjects = [subject_of(plan, own) for plan, own in zip_longest(plans, runs)]
    written = {}
    for file, save in ((out, page.save), (trace, traces.save)):
        if file is not None:
            save(subjects, file)
            written[str(file)] = file.stat().st_size
    for found in subjects:
        printer.show(f"{found.title}: {found.simulation.prediction.precision}")
    printer.show("\n".join(f"written to {file} ({size(count)})" for file, count in written.items()))
    printer.result = {"written": written}
