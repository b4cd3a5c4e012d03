"""A plan on two servers, started with the command that compile prints."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from servers import NAMES, servers, why_not

from superscaler.cli.main import main
from superscaler.train.launch import train

ROOT = Path(__file__).parents[2]
CLUSTER = "{name: two servers, preset: local, servers: 2, devices_per_server: 2}"


def _last_words(process: subprocess.Popen[str]) -> str:
    """Return the standard error of a process when it has ended, which it has to within four minutes."""
    try:
        return process.communicate(timeout=240)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return f"stopped after four minutes: {process.communicate()[1]}"


@pytest.mark.dist(python="real")
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_servers_train_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    plan = tmp_path / "plan"
    with pytest.raises(SystemExit) as ended:
        main(["compile", "mlp", "--plan", "hybrid:dp=2,tp=2", "--cluster", CLUSTER, "--out", str(plan)])
    assert ended.value.code == 0
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    assert "start it on each of 2 servers, one of which is HOST, with: torchrun" in printed
    command = shlex.split(printed.partition("with: ")[2].replace("HOST", NAMES[0]))
    # This Python's own.
    command[:1] = [sys.executable, "-m", "torch.distributed.run"]
    metrics = tmp_path / "metrics"
    command += ["--steps", "4", "--metrics", str(metrics)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with servers(tmp_path) as enter:
        ranks = [
            subprocess.Popen([*server, *command], env=environment, stderr=subprocess.PIPE, text=True)
            for server in enter
        ]
        texts = [_last_words(process) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(texts)
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert losses == train(plan, world=4, steps=4)["losses"]
