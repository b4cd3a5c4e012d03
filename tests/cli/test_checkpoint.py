"""Train, stop, go on, look, export: the commands, as they are typed, on two processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from superscaler.store.checkpoint import check_folder, lock
from superscaler.store.pieces import whole
from superscaler.store.tensors import open_checkpoint
from tests.helpers.commands import answer, run
from tests.helpers.sweeps import slow

ROOT = Path(__file__).parents[2]
MODEL = "gpt2:size=tiny,layers=2,hidden=16,heads=2,vocab=256,seq=16,batch=8,dropout=0.1"
TWO = ["--plan", "data_parallel", "--cluster", "local:2"]
CODE = "from superscaler.cli.main import main; main()"

pytestmark = pytest.mark.dist


def train(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return answer(capfd, "train", MODEL, *arguments)[0]


def start(*arguments: str, limit: int | None = None) -> subprocess.Popen[str]:
    """Start `superscaler train`; no process of it may write a file of more than `limit` bytes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", CODE, "train", MODEL, *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )


def steps(folder: Path) -> int:
    return int((folder / "latest").read_text().removeprefix("step-").partition(".")[0])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that got SIGTERM."""
    folder = tmp_path_factory.mktemp("stopped")
    lines = []
    with start(*TWO, "--steps", "1000000", "--save", str(folder / "kept"), "--seed", "3") as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step "):
                process.send_signal(signal.SIGTERM)
                break
        lines += process.stdout.readlines()
    assert process.returncode == 0, lines
    assert f"saved in {folder}/kept/step-" in lines[-1]
    assert lines[-1].startswith("stopped by SIGTERM after step ")
    assert lines[-1].endswith(f"go on with --resume {folder}/kept\n")
    return folder / "kept"


def test_what_was_stopped_goes_on_bit_for_bit(stopped: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = steps(stopped)
    # The same folder twice: what is there is gone on from, and where nothing is, training starts anew.
    both = [["--save", str(folder), "--resume", str(folder)] for folder in (tmp_path / "a", stopped)]
    through = train(capfd, *TWO, "--steps", str(done + 3), *both[0], "--seed", "3")
    # The seeds are those of the checkpoint.
    resumed = train(capfd, *TWO, "--steps", str(done + 3), *both[1])
    assert resumed["losses"] == through["losses"][done:]
    assert (resumed["start"], resumed["steps"]) == (done, done + 3)
    name = f"step-{done + 3:08d}"
    assert resumed["saved"] == str(stopped / name)
    shards = [folder / name / "rank-00000.safetensors" for folder in (stopped, tmp_path / "a")]
    assert shards[0].read_bytes() == shards[1].read_bytes()
    other = train(capfd, "--plan", "single", "--cluster", "local:1", "--steps", str(done + 3), "--resume",
                  str(stopped / f"step-{done:08d}"))  # fmt: skip
    assert other["losses"] == pytest.approx(resumed["losses"], rel=1e-5)
    # It is saved beside the one that it goes on from, and none is written over.
    assert other["saved"] == str(stopped / f"{name}.1")
    assert (stopped / "latest").read_text() == f"{name}.1\n"


# The same model, of a library that has no save_pretrained.
OWN = """
from superscaler.models import build as library
from torch import nn
class Own(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.transformer, self.lm_head = module.transformer, module.lm_head
def build():
    built = library("SPEC")
    return Own(built.module), ()
"""


def test_inspect_export_and_import(stopped: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("checkpoint", "inspect", str(stopped), "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["tensors"]["transformer.h.0.attn.c_attn.weight"]["shape"] == [16, 48]
    assert found["training"]["model"] == MODEL
    assert run("checkpoint", "export", str(stopped), "--out", str(tmp_path / "hf")) == 0
    assert "strict" not in capfd.readouterr().out
    own = tmp_path / "own.py"
    own.write_text(OWN.replace("SPEC", MODEL))
    assert run("checkpoint", "export", str(stopped), "--out", str(tmp_path / "own"), "--model", f"{own}:build") == 0
    told = "lm_head.weight is left out, as it is transformer.wte.weight: load it with module.load_state_dict("
    assert told in capfd.readouterr().out
    assert (tmp_path / "hf" / "config.json").is_file()
    assert run("checkpoint", "import", str(tmp_path / "hf"), "--out", str(tmp_path / "again")) == 0
    both = [open_checkpoint(path) for path in (stopped, tmp_path / "again")]
    assert both[0].tensors.keys() == both[1].tensors.keys()
    for name, entry in both[0].tensors.items():
        assert torch.equal(*(stored.read(name, whole(entry.shape)) for stored in both)), name
    assert train(capfd, *TWO, "--steps", "1", "--weights", str(tmp_path / "again"))["world"] == 2
    assert run("checkpoint", "export", str(tmp_path / "again"), "--out", str(tmp_path / "no")) == 2
    assert "name the model to export with --model" in capfd.readouterr().err
    assert run("checkpoint", "export", str(stopped), "--out", str(tmp_path / "no"), "--model", "mlp") == 2
    assert "one of the model's own" in capfd.readouterr().err
    smaller = MODEL.replace("layers=2", "layers=1")
    assert run("checkpoint", "export", str(stopped), "--out", str(tmp_path / "no"), "--model", smaller) == 2
    assert "has 12 tensors that this model lacks, transformer.h.1.attn.c_attn.bias first" in capfd.readouterr().err
    assert run("checkpoint", "export", str(stopped), "--out", str(tmp_path / "no"), "--format", "pickle") == 2
    assert not (tmp_path / "no").exists()


def test_a_full_disk_ends_no_training(tmp_path: Path) -> None:
    # The weights fit, and their optimizer's state does not.
    saving = ["--save", str(tmp_path / "kept"), "--save-every", "2"]
    with start(*TWO, "--steps", "4", *saving, limit=100_000) as process:
        told, _ = process.communicate(timeout=120)
    assert process.returncode == 1, told
    assert told.count("warning: the checkpoint of step ") == 2
    assert f"{tmp_path}/kept/step-00000002/rank-00000.safetensors cannot be written" in told
    assert "in 4 steps on 2 devices" in told
    *_, ending, error = told.splitlines()
    assert ending == "nothing was saved"
    assert error.startswith("error: 2 checkpoints were not saved; the first: the checkpoint of step 2 was not saved: ")
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {".lock", "metrics.jsonl"}


def test_a_full_disk_ends_training_where_that_is_asked_for(tmp_path: Path) -> None:
    saving = ["--save", str(tmp_path / "kept"), "--save-every", "2", "--on-failed-save", "stop"]
    with start(*TWO, "--steps", "100000", *saving, limit=100_000) as process:
        told, _ = process.communicate(timeout=120)
    assert process.returncode == 1, told
    # It is told at once, not at the next save.
    assert "warning: the checkpoint of step 2 was not saved: " in told
    *_, ending, error = told.splitlines()
    assert ending.startswith("stopped by a failed save after step ")
    assert ending.endswith("; nothing was saved")
    assert error.startswith("error: 1 checkpoint was not saved; the first: the checkpoint of step 2 was not saved: ")


@pytest.mark.parametrize(("made", "why"), [("None", "returned a NoneType as batches"), *slow(("[{}]", "no 'x', but"))])
def test_an_evaluation_that_fails_at_the_end_loses_no_training(
    made: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superscaler.cli.printing._PATIENCE", 0.0)
    (tmp_path / "held_out.py").write_text(f"def batches():\n    return {made}\n")
    given = "--plan", "single", "--cluster", "local:1", "--steps", "2", "--save", tmp_path / "kept", "--no-cache"
    assert run("train", "mlp:layers=1,hidden=4", *given, "--eval", f"{tmp_path}/held_out.py:batches") == 2
    told = capfd.readouterr().err
    assert why in told
    assert steps(tmp_path / "kept") == 2
    # The second capture is said to be another one.
    first, second = told.split(
        "evaluate mlp:layers=1,hidden=4 under single on local:1: capture in eval mode, and compile"
    )
    assert all("exporting the model by torch.export" in part for part in (first, second))


def test_wrong_input_is_said_before_anything_is_built(
    stopped: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("a" * 100)
    (tmp_path / "weights").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "weights" / "model.safetensors")
    folder, done, held = str(stopped), steps(stopped), lock(tmp_path / "held", is_first=True)
    cases = {
        ("--save-every", "2"): "--save-every 2 needs --save DIR",
        ("--keep", "2"): "--keep 2 needs --save DIR",
        ("--on-failed-save", "stop"): "--on-failed-save stop needs --save DIR",
        ("--on-failed-save", "halt", "--save", "x"): "unknown --on-failed-save 'halt'",
        ("--save", folder): f"--save {folder} has the checkpoints of another run",
        ("--save", ""): "--save is empty",
        ("--save", str(tmp_path / "text")): "text is a file; choose a folder",
        ("--resume", str(tmp_path)): "is there; name a folder that --save, step.save or save_pretrained",
        (
            "--resume",
            str(tmp_path / "weights"),
        ): "is no checkpoint; start from it by --weights or step.load_weights, or",
        ("--resume", str(tmp_path / "no")): "no has no checkpoint yet; to start anew there, ",
        ("--resume", "n" * 300): "cannot be read: File name too long",
        ("--save", "n" * 300): "cannot be read: File name too long",
        ("--save", "/proc/kept"): "/proc/kept cannot be written: No such file or directory; choose another folder.",
        ("--save", str(tmp_path / "held")): f"another run saves into {tmp_path}/held: process {os.getpid()} on ",
        ("--resume", folder, "--weights", folder): "--weights has no use",
        ("--resume", folder, "--steps", str(done)): f"trained for {done} steps, and --steps {done} counts these",
        ("--resume", folder, "--steps", str(done + 9), "--data", str(tmp_path / "text")): (
            "was trained on the default, but --data is text (100 bytes)"
        ),
        ("--weights", str(tmp_path / "text")): "text is no safetensors file, or is damaged",
    }
    for arguments, message in cases.items():
        assert run("train", MODEL, *TWO, *arguments) == 2
        error = capfd.readouterr().err
        assert message in error, arguments
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    os.close(held)
    # What is only looked at is not made.
    check_folder(tmp_path / "new" / "kept")
    assert not (tmp_path / "new").exists()
