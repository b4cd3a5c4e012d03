"""`superscaler explain` and `superscaler diff`: the contents of plan directories, in words."""

from pathlib import Path
from typing import Annotated

import typer

from superscaler.cli.options.command import command
from superscaler.cli.options.declare import option
from superscaler.cli.printing import Printer

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A plan directory that compile --out wrote.")]


@command
def explain(
    printer: Printer,
    plan: Directory,
    svg: Annotated[
        Path | None,
        option("--svg", "Draw instead: the predicted step, and exchanges of several steps, with layouts.", "FILE"),
    ] = None,
    timeline: Annotated[
        bool, option("--timeline", "Show instead the step alone, predicted kernel by kernel, in characters.")
    ] = False,
) -> None:
    """Print a plan in words: splits, weights and communication by block; the order; the totals of a step.
    --timeline draws the work of devices by time, with their waits.
    """
    from superscaler.report.words import read, words

    printer.result = found = read(plan)
    if svg is None and not timeline:
        # Kernels are recorded with torch, whose import takes seconds: words need none.
        printer.show(words(found), "", f"devices by time: superscaler explain {plan} --timeline")
        return
    from superscaler.report.picture import save
    from superscaler.report.pixels import drawing
    from superscaler.verify.plan_dir import subject_of

    subject = subject_of(plan)
    if timeline:
        printer.show(*subject.notes, drawing(subject.timelines[-1], subject.details))
    if svg is not None:
        save(subject, svg)
        printer.show(f"the predicted step and {len(found['paths'])} exchanges of several steps drawn in {svg}")


@command
def diff(printer: Printer, plan_a: Directory, plan_b: Directory) -> bool:
    """Print the differences between two plans. Exit code 0 when they are equal, 1 when they differ."""
    from superscaler.report.words import difference, read

    both = read(plan_a), read(plan_b)
    lines = difference(*both)
    printer.show("\n".join(lines) or "equal plans")
    printer.result = {"equal": not lines, "differences": lines, "bytes_moved": [x["bytes_moved"] for x in both]}
    return not lines
