"""Ctrl-C at any moment is one line and exit code 130."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from superscaler.artifact import RUN

ROOT = Path(__file__).parents[2]
INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
# An import that makes another error of whatever comes, as those of compiled modules do.
TORCH = f"""
try:
    {INTERRUPT}
    import time; time.sleep(9)
except BaseException:
    raise ImportError("torch")
"""
WORK = f"""
from superscaler.interrupt import run
class Noisy:
    def __del__(self):
        {INTERRUPT}
def work():
    {{work}}
    print("it goes on")
run(work)
"""
CLEANED = f"""
    try:
        {INTERRUPT}
    except BaseException:
        print("cleaned", flush=True)
        raise ValueError from None
"""


FOLDER = """
    import os
    from superscaler.interrupt import TemporaryFolder
    with TemporaryFolder() as made:
        print(len(os.listdir(os.environ["TMPDIR"])), flush=True)
        if not os.fork():
            from superscaler.interrupt import _end
            _end(b"")
        os.wait()
        print(len(os.listdir(os.environ["TMPDIR"])), flush=True)
        import torch
"""


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["-m", "superscaler", "capture", "mlp"], ""),
        (["run.py"], ""),
        (["-c", WORK.format(work=CLEANED)], "cleaned\n"),
        (["-c", WORK.format(work="Noisy()")], ""),
        (["-c", WORK.format(work=FOLDER)], "1\n1\n"),
    ],
    ids=["command", "rank", "cleaning", "finalizer", "folder"],
)
def test_an_interrupt_is_one_line(arguments: list[str], shown: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "run.py").write_text(RUN.format(world=1))
    (tmp_path / "made").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": str(tmp_path / "made")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, shown, "interrupted\n")
    # A fork that ends leaves the folders to the process that made them.
    assert [*(tmp_path / "made").iterdir()] == []


def test_what_is_printed_goes_into_no_file_where_a_shell_closed_standard_output(tmp_path: Path) -> None:
    code = "import os; from superscaler.interrupt import run; run(lambda: os._exit(os.open('file', os.O_CREAT)))"
    command = ["bash", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode >= 3
