"""A plan on two servers, started with the command that compile prints.

The servers are on one machine: network namespaces with addresses, names and a link of their own.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from superscaler.train.launch import train
from tests.helpers.commands import run
from tests.helpers.sweeps import slow

ROOT = Path(__file__).parents[2]
CLUSTER = "{{name: two servers, preset: local, servers: 2, devices_per_server: {}}}"


NAMES, ADDRESSES = ("server0", "server1"), ("10.9.0.1", "10.9.0.2")
_TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")
# Holds the namespaces of a server until its input ends. Names are those of a file; nobody is asked for others.
_SERVER = """
set -e
hostname "$0"
mount --bind "$1/hosts" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
ip link set lo up
echo ready
exec cat
"""


def why_not() -> str:
    """Return why there can be no servers here; nothing if there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} on this machine"
    made = subprocess.run(["unshare", "-n", "-m", "-u", "true"], capture_output=True, check=False)
    return "this user may not make network namespaces" if made.returncode else ""


@contextmanager
def servers(folder: Path) -> Iterator[list[list[str]]]:
    """Yield for each of two servers the command that runs another one on it. They end with this process."""
    lines = ("127.0.0.1 localhost", *(f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True)))
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    with ExitStack() as stack:
        enter = [stack.enter_context(_server(name, folder)) for name in NAMES]
        pids = [command[2] for command in enter]
        _run("ip", "link", "add", "link0", "netns", pids[0], "type", "veth", "peer", "name", "link1", "netns", pids[1])
        for number, address in enumerate(ADDRESSES):
            _run(*enter[number], "ip", "address", "add", f"{address}/24", "dev", f"link{number}")
            _run(*enter[number], "ip", "link", "set", f"link{number}", "up")
        yield enter


@contextmanager
def _server(name: str, folder: Path) -> Iterator[list[str]]:
    command = ["unshare", "-n", "-m", "-u", "sh", "-c", _SERVER, name, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        yield ["nsenter", "-t", str(holder.pid), "-n", "-m", "-u", f"--wd={os.getcwd()}"]
        holder.stdin.close()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _last_words(process: subprocess.Popen[str]) -> str:
    """Return the standard error of a process when it has ended, which it has to within four minutes."""
    try:
        return process.communicate(timeout=240)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return f"stopped after four minutes: {process.communicate()[1]}"


@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plan", "each"), [("data_parallel", 1), *slow(("hybrid:dp=2,tp=2", 2))])
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_servers_train_as_one(
    plan: str, each: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder, cluster = tmp_path / "plan", CLUSTER.format(each)
    assert run("compile", "mlp", "--plan", plan, "--cluster", cluster, "--out", str(folder)) == 0
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    assert "start it on each of 2 servers, one of which is HOST, with: torchrun" in printed
    command = shlex.split(printed.partition("with: ")[2].replace("HOST", NAMES[0]))
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
    assert losses == train(folder, world=2 * each, steps=4)["losses"]
