"""The program of a plan directory, parsed from its files `model.txt` and `program.txt`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from superscaler.errors import InputError, PlanError
from superscaler.ir.program import Program
from superscaler.ir.text.model import parse_model
from superscaler.ir.text.program import parse_program
from superscaler.specs.file_errors import reading
from superscaler.store.folder import Whole
from superscaler.store.plan_head import MODEL_FILE, PROGRAM_FILE, REWRITE


def program_of(plan: Whole, damage: InputError | None = None) -> Program:
    """Return the program of a plan directory. With `damage`, found by hashes, any error in it is one of a damaged
    file.
    """
    with naming(plan.path / MODEL_FILE, damage):
        model = parse_model(plan.text(MODEL_FILE))
    with naming(plan.path / PROGRAM_FILE, damage):
        return parse_program(plan.text(PROGRAM_FILE), model)


@contextmanager
def naming(what: object, damage: InputError | None) -> Iterator[None]:
    """Name the file and the remedy in a PlanError. With `damage`, any other error is one of a damaged file."""
    with reading(what, REWRITE, (Exception,) if damage is not None else ()):
        try:
            yield
        except PlanError as error:
            raise type(error)(f"{what}: {error} {REWRITE.capitalize()}.") from error
