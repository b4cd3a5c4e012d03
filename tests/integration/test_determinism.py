"""The same input gives the same bytes, whatever the process hashes strings to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# What a process with another seed of hashes than this one does, and this one, too.
SCRIPT = """
import torch
import superscaler as ss
from superscaler.models import build
built = build("gpt2:size=tiny")
graph = ss.capture(built.module, built.args, built.kwargs, torch.optim.AdamW(built.module.parameters(), lr=1e-3))
ss.compile(graph, "hybrid:dp=2,tp=2,pp=2,microbatches=2", "local:8").save(folder)
"""


def test_two_processes_emit_equal_bytes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    command = [sys.executable, "-c", f"folder = {str(tmp_path / '1')!r}\n{SCRIPT}"]
    subprocess.run(command, env=environment, timeout=200, check=True)
    exec(SCRIPT, {"folder": tmp_path / "2"})
    names = sorted(path.name for path in (tmp_path / "1").iterdir() if path.is_file())
    assert names == sorted(path.name for path in (tmp_path / "2").iterdir() if path.is_file())
    assert "segments.py" in names
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name
