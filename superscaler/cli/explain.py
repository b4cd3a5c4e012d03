"""`superscaler explain` and `superscaler diff`: what plan directories hold, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from superscaler.cli.common import AsJson, printing
from superscaler.report.explain import difference, read, words

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A plan directory that compile --out wrote.")]


def explain(
    plan: Directory,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw instead: exchanges of several steps, with layouts, bytes and seconds."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a plan does: per block its splits, weights and communication; the order; the totals of a step."""
    with printing(as_json) as printer:
        found = read(plan)
        if svg is None:
            printer.show(words(found))
        else:
            from superscaler.report.picture import save

            save(found, svg)
            count = len(found["paths"])
            printer.show(f"{count} path{'s' if count > 1 else ''} of several steps drawn in {svg}")
        printer.result = found


def diff(plan_a: Directory, plan_b: Directory, as_json: AsJson = False) -> None:
    """Say what differs between two plans. Exit code 0 when they are equal, 1 when they differ."""
    with printing(as_json) as printer:
        a, b = read(plan_a), read(plan_b)
        lines = difference(a, b)
        printer.show("\n".join(lines) or "equal plans")
        moved = [x["bytes_moved"] for x in (a, b)]
        printer.result = {"equal": not lines, "differences": lines, "bytes_moved": moved}
    if lines:
        raise typer.Exit(1)
