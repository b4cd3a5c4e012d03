"""Programs as text, word for word, for a dozen plans. After a wanted change: pytest tests/golden --update-golden."""

from __future__ import annotations

from pathlib import Path

import pytest

from superscaler.certify.certificate import check_program
from superscaler.emit.device import emit
from superscaler.errors import InputError
from superscaler.ir.text.model import parse_model, print_model
from superscaler.ir.text.program import parse_program, print_program
from tests.helpers.small_plans import PLANS, exact

HERE = Path(__file__).parent / "programs"


@pytest.mark.parametrize("name", list(PLANS))
def test_a_program_prints_as_before_and_parses_back(name: str, request: pytest.FixtureRequest) -> None:
    compiled = exact(name)
    program, path = compiled.program, HERE / f"{name.replace(' ', '_')}.txt.golden"
    text = print_program(program)
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, path
    again = parse_program(text, parse_model(print_model(program.model)))
    assert again.functions == program.functions
    assert tuple(again.devices) == tuple(program.devices)
    emitted = emit(again)
    assert emitted.files == compiled.emitted.files
    assert list(emitted.tables) == list(compiled.emitted.tables)
    check_program(again)


def test_a_part_of_a_program_is_refused_with_its_line_and_the_reason() -> None:
    program = exact("pipeline").program
    lines = print_program(program).splitlines()
    half = len(lines) // 2
    for kept, told in (
        (
            lines[half:],
            r"line 1 of the program, '  .*', cannot be read: the first line is 'program of N devices'; lines",
        ),
        ([""] * half + lines[half:], r"line 1 of the program, '', cannot be read: the first line is 'program of N"),
        ([*lines[:2], "", *lines[2:]], "line 3 of the program, '', cannot be read: a line starts with program, mesh,"),
        (lines[:half], r"the text of the program is incomplete \(it has 1 of 2 devices\)"),
    ):
        with pytest.raises(InputError, match=told):
            parse_program("\n".join(kept), program.model)
