"""The command line, in the process of the tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from superscaler.cli import printing
from superscaler.cli.main import main

# Whether a phase is said depends on the load of the machine.
printing._PATIENCE = 600.0


def run(*arguments: object) -> int:
    """Run a command; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return int(ended.value.code or 0)


def answer(captured: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> tuple[dict[str, Any], str]:
    """Return the JSON object of a command with this exit code, and its standard error."""
    captured.readouterr()
    assert run(*arguments, "--json") == code
    out, err = captured.readouterr()
    return json.loads(out.splitlines()[-1]), err
