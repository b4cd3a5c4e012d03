"""`superscaler explain` and `superscaler diff`: the contents of plan directories, in words."""

from pathlib import Path
from typing import Annotated

import typer

from superscaler.cli.common import Printer, command, option
from superscaler.report.words import difference, read, words

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A plan directory that compile --out wrote.")]


@command
def explain(
    printer: Printer,
    plan: Directory,
    svg: Annotated[
        Path | None,
        option("--svg", "Draw instead: exchanges of several steps, with layouts, bytes and seconds.", "FILE"),
    ] = None,
) -> None:
    """Print a plan in words: splits, weights and communication by block; the order; the totals of a step."""
    printer.result = found = read(plan)
    if svg is None:
        printer.show(words(found))
        return
    from superscaler.report.picture import save

    save(found, svg)
    count = len(found["paths"])
    printer.show(f"{count} path{'s' if count > 1 else ''} of several steps drawn in {svg}")


@command
def diff(printer: Printer, plan_a: Directory, plan_b: Directory) -> bool:
    """Print the differences between two plans. Exit code 0 when they are equal, 1 when they differ."""
    both = read(plan_a), read(plan_b)
    lines = difference(*both)
    printer.show("\n".join(lines) or "equal plans")
    printer.result = {"equal": not lines, "differences": lines, "bytes_moved": [x["bytes_moved"] for x in both]}
    return not lines
