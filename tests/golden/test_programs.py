"""Programs as text, word for word, for a dozen plans. After a wanted change: pytest tests/golden --update-golden."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_plans import PLANS, exact

from superscaler.certify.certificate import check_program
from superscaler.emit.device import emit
from superscaler.ir.text.model import parse_model, print_model
from superscaler.ir.text.program import parse_program, print_program

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
