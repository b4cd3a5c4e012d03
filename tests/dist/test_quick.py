"""The process that forks for tests finds what Python itself would find."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.quick import quick_python


def test_the_process_that_forks_keeps_the_python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.found = True\n")
    (tmp_path / "mine.py").write_text("import sys; print(sys.found)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    python = quick_python(tmp_path, is_warm=False)
    done = subprocess.run([python, "-c", "import mine"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
    monkeypatch.delenv("PYTHONPATH")
    done = subprocess.run([python, "-c", "import mine"], capture_output=True, text=True, timeout=120, check=False)
    assert "No module named 'mine'" in done.stderr
