"""The same input gives the same bytes, whatever the process hashes strings to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, torch
from superscaler.cluster import Cluster
from superscaler.models import build
from superscaler.plan import capture, compile
from superscaler.plans import resolve
built = build("gpt2:size=tiny")
graph = capture(built.module, built.args, built.kwargs, torch.optim.AdamW(built.module.parameters(), lr=1e-3))
compile(graph, resolve("hybrid:dp=2,tp=2,pp=2,microbatches=2"), Cluster.local(8)).save(sys.argv[1])
"""


def test_two_processes_emit_equal_bytes(tmp_path: Path) -> None:
    runs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        out = tmp_path / seed
        runs.append(subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)], env=environment))
    assert [run.wait(timeout=200) for run in runs] == [0, 0]
    names = sorted(path.name for path in (tmp_path / "1").iterdir() if path.is_file())
    assert names == sorted(path.name for path in (tmp_path / "2").iterdir() if path.is_file())
    assert "segments.py" in names
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name
