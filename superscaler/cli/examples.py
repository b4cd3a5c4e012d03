"""`superscaler examples`: files to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import superscaler
from superscaler.cli.common import Printer, command
from superscaler.errors import InputError
from superscaler.specs.file_errors import writing

_FOLDER = Path(superscaler.__file__).with_name("examples")


@command
def examples(
    printer: Printer,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write into.")] = Path("examples"),
) -> None:
    """Write examples into a folder: plans, a model and a loop of your own. Files that are there stay."""
    files = sorted(_FOLDER.glob("*.py"))
    with writing(directory, "name another folder"):
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            if (directory / file.name).exists():
                raise InputError(f"{directory / file.name} is there; name another folder.")
        for file in files:
            (directory / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    printer.show(*(f"{directory / file.name}: {first_line(file)}" for file in files))
    printer.result = {"files": [str(directory / file.name) for file in files]}


def first_line(file: Path) -> str:
    return file.read_text(encoding="utf-8").split("\n", 1)[0].strip('"')
