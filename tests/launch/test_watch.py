"""A rank that hangs, is stopped or killed, and a launcher that is killed: all ranks end, and the culprit is named."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch.distributed import HashStore

import superscaler as ss
from superscaler.errors import InputError
from superscaler.launch import watch
from tests.faults.kills import is_alive
from tests.helpers.small_plans import Net

ROOT = Path(__file__).parents[2]
# Trains the plan; where rank 1 has an op that takes long, that is after its second step. What must be waited for is
# less than for users.
RUN = """
import os, sys, time
from pathlib import Path
from superscaler.launch import watch
from superscaler.runtime import executor
from superscaler.runtime.load import load
from superscaler.train.loop import main

watch.SILENCE, watch.LEAST = 4.0, 3.0
here = Path(__file__).parent
whole = executor.Rank.forward

def forward(self, *args):
    if self.steps == 2:
        (here / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    if self.steps == 2 and (here / "hang").exists() and self.communicator.rank == 1:
        while True:
            time.sleep(0.1)
    time.sleep(0.02)
    return whole(self, *args)

executor.Rank.forward = forward
# This file is not the one that compile wrote.
main([str(here), *sys.argv[1:]], load=lambda directory, **options: load(directory, manifest=False))
"""
TRAIN = "import sys, pathlib; from superscaler.train.launch import train; "
TRAIN += "train(pathlib.Path(sys.argv[1]), world=2, steps=10**9)"


class Launch(NamedTuple):
    process: subprocess.Popen[str]
    ranks: list[int]

    def end(self) -> str:
        """Wait until all ranks have ended; return what the launcher said."""
        deadline = time.monotonic() + 30
        while any(map(is_alive, self.ranks)):
            assert time.monotonic() < deadline, "a rank lives on"
            time.sleep(0.2)
        return self.process.communicate(timeout=30)[1]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Launch]]:
    """Yield a launch for each test. All train at the same time, until their ranks have trained two steps; then one of
    each hangs, is stopped or is killed. All wait at the same time, too, for what is said of that.
    """
    module, folder = Net(), tmp_path_factory.mktemp("watch")
    graph = ss.capture(module, (torch.randn(4, 8),), optimizer=torch.optim.SGD(module.parameters(), lr=1e-3))
    ss.compile(graph, "pipeline_1f1b:stages=2,microbatches=2", "local:2").save(folder / "plan", evaluation=False)
    (folder / "plan" / "run.py").write_text(RUN)
    found = {}
    with ExitStack() as stack:
        for name in ("launcher", "stop", "kill", "hang"):
            plan = shutil.copytree(folder / "plan", folder / name)
            command, environment = [sys.executable, "-c", TRAIN, str(plan)], {**os.environ, "PYTHONPATH": str(ROOT)}
            if name == "hang":
                (plan / "hang").touch()
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            found[name] = process
        deadline = time.monotonic() + 90
        while len(list(folder.glob("*/pid*"))) < 8:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        # The watchdogs look once a second.
        time.sleep(3.0)
        launches = {
            name: Launch(process, [int((folder / name / f"pid{rank}").read_text()) for rank in range(2)])
            for name, process in found.items()
        }
        assert all(map(is_alive, launches["launcher"].ranks))
        launches["launcher"].process.kill()
        os.kill(launches["stop"].ranks[1], signal.SIGSTOP)
        os.kill(launches["kill"].ranks[1], signal.SIGKILL)
        yield launches
        # If another process runs the test of the stopped rank, nobody ends it, and it keeps the launcher's pipe open.
        for rank in (rank for launch in launches.values() for rank in launch.ranks if is_alive(rank)):
            os.kill(rank, signal.SIGKILL)


@pytest.mark.dist
def test_no_rank_outlives_its_launcher(launches: dict[str, Launch]) -> None:
    launches["launcher"].end()


@pytest.mark.dist
def test_a_stopped_rank_is_named(launches: dict[str, Launch]) -> None:
    text = launches["stop"].end()
    assert f"rank 1 on {socket.gethostname()} does not answer: it sent nothing for" in text
    assert "rank 0 is at program_0.py:" in text


@pytest.mark.dist
def test_a_killed_rank_is_named_with_its_line(launches: dict[str, Launch]) -> None:
    text = launches["kill"].end()
    assert re.search(r"rank 1 of 2 was killed by SIGKILL at program_1\.py:\d+ \(.+\) \(the system", text), text
    # That of the launcher, which is a line of Python here.
    assert text.count("Traceback") == 1


@pytest.mark.dist
def test_a_rank_that_hangs_is_named_with_its_line(launches: dict[str, Launch]) -> None:
    text = launches["hang"].end()
    assert "rank 1 hangs: it has been at program_1.py:" in text
    assert "rt.forward(" in text
    found = re.search(r"in step 2 for (\d+) s", text)
    assert found is not None
    assert int(found[1]) >= 3


class Lost(Exception):
    """What a watch does at the end: it ends the process."""


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[watch.Watch, dict[str, Any]]]:
    """Yield the watch of rank 0, and the last word of rank 1, a process that runs; each look is a second."""

    def fail(text: str, other: int | None = None) -> NoReturn:
        raise Lost(text, other)

    monkeypatch.setattr(watch, "_fail", fail)
    process = subprocess.Popen(["sleep", "60"])
    store, word = HashStore(), {"text": "a line", "host": socket.gethostname(), "pid": process.pid, "limit": 40.0}
    store.set("watch1", json.dumps(word))
    yield watch.Watch(store, 0, 2, "", lambda: (0, 0)), word
    process.kill()
    process.wait()


def silent(watching: watch.Watch) -> tuple[int, str, int | None]:
    """Return after how many looks a watch gives up, what it says, and the process that it ends."""
    for look in range(1000):
        try:
            watching._listen()
        except Lost as lost:
            return look, *lost.args
    raise AssertionError


def test_a_rank_that_holds_pythons_lock_is_waited_for(listening: tuple[watch.Watch, dict[str, Any]]) -> None:
    watching, word = listening
    looks, text, other = silent(watching)
    assert (looks, other) == (41, word["pid"])
    assert "rank 1 on" in text
    assert "Its process runs, so one call holds Python's lock (GIL)" in text


def test_a_stopped_rank_is_not_waited_for(listening: tuple[watch.Watch, dict[str, Any]]) -> None:
    watching, word = listening
    os.kill(word["pid"], signal.SIGSTOP)
    while Path(f"/proc/{word['pid']}/stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    looks, text, _ = silent(watching)
    assert looks == 16
    assert "lock" not in text


def test_a_rank_elsewhere_may_hold_the_lock_as_long_as_the_user_says(
    listening: tuple[watch.Watch, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watching, word = listening
    watching._store.set("watch1", json.dumps(word | {"host": "another"}))
    looks, text, other = silent(watching)
    assert (looks, other) == (61, None)
    assert "SUPERSCALER_SILENCE=SECONDS allows more" in text
    monkeypatch.setenv("SUPERSCALER_SILENCE", "70")
    assert silent(watch.Watch(watching._store, 0, 2, "", lambda: (0, 0)))[0] == 71
    monkeypatch.setenv("SUPERSCALER_SILENCE", "-1")
    with pytest.raises(InputError, match="SUPERSCALER_SILENCE is '-1', but it must be a number of seconds above 0"):
        watch.Watch(watching._store, 0, 2, "", lambda: (0, 0))


def test_a_watch_that_is_not_closed_ends_before_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread in the store's code aborted the process."""
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(watch.atexit, "register", ends.append)
    store = HashStore()
    watching = watch.Watch(store, 0, 2, "", lambda: (0, 0))
    watching.start()
    (end,) = ends
    end()
    assert not any(thread.is_alive() for thread in watching._threads)
    assert store.get("watch0") == b"closed"
