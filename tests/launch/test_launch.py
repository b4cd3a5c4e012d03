"""Ranks as processes: they train, and when one dies the message names it and the others end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from superscaler import artifact, interrupt
from superscaler.errors import InputError, RuntimeFailure
from superscaler.launch.launch import _describe, first_failure
from superscaler.launch.process import _Brief
from superscaler.launch.watch import Spot
from superscaler.train.launch import train
from tests.faults.kills import is_alive

ROOT = Path(__file__).parents[2]

# A step whose loss is the sum over the ranks of their numbers, and what happens at the third one.
RUN = """
import os, signal, sys, time
from multiprocessing import parent_process
from pathlib import Path
from types import SimpleNamespace
import torch
from superscaler.errors import RuntimeFailure
from superscaler.comm.distributed import connect
from superscaler.runtime.metrics import Known, metrics
from superscaler.train.loop import main

class Step:
    inputs = {{"input_ids": ((2, 8), "int64"), "labels": ((2, 8), "int64")}}
    bounds = {{}}
    choice = SimpleNamespace(inputs=[inputs], listed=[None])
    watch = form = None
    trains = True
    iterations = 1
    lr = 0.5
    count = 0

    def __init__(self):
        self.communicator = connect(timeout=60)
        self.rank, self.world = self.communicator.rank, self.communicator.world
        (Path(sys.argv[0]).parent / f"pid{{self.rank}}").write_text(str(os.getpid()))

    def __call__(self, batch, clip=None, check_finite=False):
        self.count += 1
        rank = self.rank
        if self.count == 3:
            {fault}
        return self.communicator.all_reduce(torch.tensor(float(rank + 1)), tuple(range(self.world))).wait()

    def metrics(self):
        return metrics(0.01, self.inputs, None, Known())

    def close(self):
        self.communicator.close()

main([str(Path(__file__).parent), *sys.argv[1:]], load=lambda directory, **options: Step())
"""


TRAIN = "import sys, pathlib; from superscaler.train.launch import train; "
TRAIN += "train(pathlib.Path(sys.argv[1]), world=2, steps=5)"
# The same with forks as ranks, for several plans in turn.
FORKS = """
import os, sys, pathlib
from superscaler.errors import PlanError
from superscaler.train.launch import start_server, train
os.setsid()
assert start_server(), "no fork"
for plan in sys.argv[1:]:
    try:
        print(train(pathlib.Path(plan), world=2, steps=5, is_forked=True)["losses"], flush=True)
    except PlanError as error:
        print(error, flush=True)
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def write(plan: Path, fault: str = "pass") -> Path:
    (plan / "run.py").write_text(RUN.format(fault=fault))
    return plan


def fail(plan: Path, fault: str, world: int = 2) -> str:
    started = time.monotonic()
    with pytest.raises(RuntimeFailure) as caught:
        train(write(plan, fault), world=world, steps=5)
    assert time.monotonic() - started < 30
    assert not any(is_alive(int(file.read_text())) for file in plan.glob("pid*"))
    return str(caught.value)


@pytest.mark.dist
def test_training_returns_the_losses(plan: Path) -> None:
    handler, threads = signal.getsignal(signal.SIGINT), os.environ.get("OMP_NUM_THREADS")
    report = train(write(plan, 'assert os.environ["OMP_NUM_THREADS"] >= "1"'), world=2, steps=4, seed=1)
    assert report["losses"] == [3.0] * 4
    assert report["world"] == 2
    assert report["tokens_per_second"] > 0
    assert report["seconds"] > 0
    assert report["gradient_norms"] == []
    assert signal.getsignal(signal.SIGINT) is handler
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.dist
def test_a_rank_that_raises_is_named_with_its_exception(plan: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = fail(plan, 'if rank == 1: raise ValueError("no cheese left")')
    assert message == "rank 1 of 2 failed with exit code 1: ValueError: no cheese left. All 2 ranks have ended."
    assert "in __call__" in capfd.readouterr().err


@pytest.mark.dist
def test_bad_input_that_only_the_ranks_see_is_bad_input(plan: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (plan / "text").write_bytes(b"short")
    with pytest.raises(InputError, match="has 5 bytes, but one sequence needs 8"):
        train(write(plan), world=2, steps=2, data=plan / "text")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("where", [Spot.text, "at program_1.py:3 (loss)"])
def test_a_killed_rank_is_where_its_watch_saw_it(where: str, tmp_path: Path) -> None:
    (tmp_path / "at1").write_text(where)
    text = _describe(1, ProcessFailure(1, 1, -signal.SIGKILL, "none"), 2, "", tmp_path)
    assert text.startswith(f"rank 1 of 2 was killed by SIGKILL {where} (the system does this when memory runs out)")


@pytest.mark.dist
def test_ranks_that_are_forks_train_and_fail_as_others(plan: Path) -> None:
    faults = {
        "pass": "[3.0, 3.0, 3.0, 3.0, 3.0]",
        "if rank == 1: raise ValueError('no cheese left')": "rank 1 of 2 failed with exit code 1: ValueError: no",
        "if rank == 1: os._exit(3)": "rank 1 of 2 failed with exit code 3",
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)": "rank 1 of 2 was killed by SIGKILL",
        # As `timeout` sends it: to the launcher and all that it started.
        "if rank == 1: os.killpg(parent_process().pid, signal.SIGTERM)": "training was stopped by SIGTERM",
    }
    folders = [plan / str(number) for number in range(len(faults))]
    for folder, fault in zip(folders, faults, strict=True):
        folder.mkdir()
        write(folder, fault)
    words = [sys.executable, "-c", FORKS, *map(str, folders)]
    # As users have it: without the number of threads that tests set.
    environment = {name: value for name, value in os.environ.items() if "_NUM_THREADS" not in name}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    said = done.stdout.splitlines()
    assert len(said) == len(faults), done.stderr
    for line, message in zip(said, faults.values(), strict=True):
        assert line.startswith(message)
    assert not any(is_alive(int(file.read_text())) for file in plan.glob("*/pid*"))


@pytest.mark.dist
def test_a_rank_that_exits_is_named_although_it_said_nothing(plan: Path) -> None:
    assert fail(plan, "if rank == 1: os._exit(3)").startswith("rank 1 of 2 failed with exit code 3")


@pytest.mark.dist
@pytest.mark.parametrize("code", [TRAIN, FORKS], ids=["python", "forks"])
def test_interrupting_ends_all_ranks(code: str, plan: Path) -> None:
    write(plan, "time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", code, str(plan)], stderr=subprocess.PIPE, text=True) as process:
        killer = threading.Timer(60, process.kill)
        killer.start()
        deadline = time.monotonic() + 40
        while len(list(plan.glob("pid*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        text = process.communicate()[1]
        killer.cancel()
    assert time.monotonic() - started < 30
    assert "KeyboardInterrupt" in text
    assert "death signal" not in text
    assert "leaked" not in text
    pids = [int(file.read_text()) for file in plan.glob("pid*")]
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


@pytest.mark.dist(python="real")
def test_no_rank_outlives_a_launcher_that_is_killed_while_they_start(plan: Path) -> None:
    (plan / "run.py").write_text(artifact.RUN.format(world=2))
    # What ranks import in the place of torch, and the launcher not.
    (plan / "torch.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(__file__).with_name('pid' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", TRAIN, str(plan)]) as process:
        deadline = time.monotonic() + 40
        while len(pids := [int(file.read_text() or 0) for file in plan.glob("pid*")]) < 2 or not all(pids):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.1)


def test_a_rank_whose_launcher_ended_before_it_looked_ends() -> None:
    code = "from superscaler.interrupt import begin_rank; begin_rank(); import time; time.sleep(60)"
    with subprocess.Popen(["true"]) as ended:
        pass
    told = {"TORCHELASTIC_RUN_ID": "x", interrupt.LAUNCHER: str(ended.pid)}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **told}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_bad_arguments_start_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it has no run.py"):
        train(tmp_path, world=2, steps=3)
    write(tmp_path)
    for arguments, message in (
        ({"world": 0, "steps": 3}, "not on 0"),
        ({"world": 2, "steps": 0}, "0 steps"),
        ({"world": 2, "steps": 3, "data": tmp_path / "none"}, "does not exist"),
        ({"world": 2, "steps": 3, "clip": 0.0}, "clip is 0.0, but a norm"),
    ):
        with pytest.raises(InputError, match=message):
            train(tmp_path, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", ["PeerLost: rank 0", "RuntimeError: Gloo connectFullMesh failed with [pair.cc]"])
def test_the_rank_that_failed_by_itself_is_named(lost: str) -> None:
    """A rank that lost a peer may be seen to end before the one that it lost."""
    texts = {0: lost, 1: "InputError: the data is too short."}
    failures = {
        rank: SimpleNamespace(error_file_data={"message": {"message": text}}, exitcode=1, timestamp=rank)
        for rank, text in texts.items()
    }
    assert first_failure(failures)[0] == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("is_ended", [False, True])
def test_an_error_is_recorded_whole_or_not_at_all(
    is_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun raises on the record of a rank that it ended while the rank wrote it."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    if is_ended:
        monkeypatch.setattr(json, "dump", lambda data, fp: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) if is_ended else nullcontext():
        _Brief().record_exception(InputError("no such file"))
    assert file.exists() != is_ended
    if not is_ended:
        assert json.loads(file.read_text())["message"]["message"] == "InputError: no such file"
