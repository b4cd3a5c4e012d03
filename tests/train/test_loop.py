"""The loop of a rank on a step that is made here."""

from __future__ import annotations

import io
import json
import re
import resource
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from superscaler.errors import InputError
from superscaler.runtime.metrics import Known, metrics
from superscaler.train.log import Metrics
from superscaler.train.loop import choose_batches, train_rank
from superscaler.train.options import parse


class FakeStep:
    """Its loss is the step number; it keeps the batches that it was given."""

    watch = None
    trains = True
    iterations = 1
    lr = 0.5

    def __init__(self, inputs: dict[str, tuple[tuple[int, ...], str]], rank: int = 0) -> None:
        self.inputs = inputs
        self.choice = Namespace(inputs=[inputs])
        self.bounds: dict[str, int] = {}
        self.rank = rank
        self.world = 2
        self.last_norm: float | None = None
        self.batches: list[Mapping[str, Tensor]] = []
        self.is_closed = False

    def __call__(self, batch: Mapping[str, Tensor], clip: float | None = None, check_finite: bool = False) -> Tensor:
        self.batches.append(batch)
        self.last_norm = None if clip is None else 2 * clip
        return torch.tensor(float(len(self.batches)))

    def metrics(self) -> dict[str, Any]:
        return metrics(0.01, self.inputs, self.last_norm, Known())

    def close(self) -> None:
        self.is_closed = True


TEXT: dict[str, tuple[tuple[int, ...], str]] = {"input_ids": ((2, 8), "int64"), "labels": ((2, 8), "int64")}
FLOATS: dict[str, tuple[tuple[int, ...], str]] = {"x": ((4, 8), "float32"), "labels": ((4,), "int64")}


def train(arguments: list[str], step: FakeStep) -> None:
    train_rank(parse(arguments)[1], Path(), lambda _, **options: step)


def test_a_rank_trains_and_writes_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, metrics = FakeStep(TEXT), tmp_path / "metrics"
    train(["--steps", "3", "--clip", "0.5", "--metrics", str(metrics)], step)
    entries = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [entry["loss"] for entry in entries] == [1, 2, 3]
    assert [entry["tokens"] for entry in entries] == [16, 16, 16]
    assert [entry["gradient_norm"] for entry in entries] == [1.0, 1.0, 1.0]
    assert 1e7 < entries[-1]["memory_bytes"] < 1e12
    told = capsys.readouterr().err
    assert "step 3/3  loss 3.0000" in told
    assert re.search(r"  memory \d+\.\d\d GB", told)
    assert step.is_closed


def test_a_full_disk_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one for metrics, some of which fit or none, nor one for what is printed."""
    metrics = tmp_path / "metrics"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for path, steps in ((metrics, [0, 1]), (Path("/dev/full"), [])):
        said = io.StringIO()
        monkeypatch.setattr("sys.stderr", said)
        step = FakeStep(TEXT)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (350, before[1]))
            train(["--steps", "4", "--metrics", str(path)], step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert len(step.batches) == 4
        lines = [line for line in said.getvalue().splitlines() if "--metrics" in line]
        assert lines == [
            f"warning: --metrics {path} cannot be written: No space left on device; training goes on.",
            f"warning: --metrics {path} is incomplete: it has no line of {4 - len(steps)} steps.",
        ]
        if steps:
            assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == steps
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr("sys.stderr", io.TextIOWrapper(full, write_through=True))
        train(["--steps", "4"], step)
    assert len(step.batches) == 8


def test_the_first_loss_that_is_not_finite_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(FakeStep):
        def __call__(
            self, batch: Mapping[str, Tensor], clip: float | None = None, check_finite: bool = False
        ) -> Tensor:
            return super().__call__(batch) / (2 - len(self.batches))

    train(["--steps", "3"], Broken(TEXT))
    told = capsys.readouterr().err
    assert told.count("warning") == 1
    assert "warning: the loss of step 2 is inf; --check-finite names the operator that made it so." in told


def test_ranks_see_the_same_batches_and_only_rank_0_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    for inputs in (TEXT, FLOATS):
        steps = [FakeStep(inputs, rank) for rank in (0, 1)]
        for step in reversed(steps):
            train(["--steps", "2", "--seed", "3"], step)
            assert (capsys.readouterr().err == "") == (step.rank == 1)
        for mine, theirs in zip(steps[0].batches, steps[1].batches, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in inputs)


def test_models_that_read_no_text_get_random_tensors_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    batch = choose_batches(FakeStep(FLOATS), None, 0)(0)
    assert batch["x"].dtype == torch.float32
    assert "random tensors for x, labels" in capsys.readouterr().err
    translation = choose_batches(FakeStep({**TEXT, "labels": ((2, 5), "int64")}), None, 0)(0)
    assert translation["labels"].shape == (2, 5)
    with pytest.raises(InputError, match="this one reads x, labels"):
        choose_batches(FakeStep(FLOATS), Path("text"), 0)


def test_the_vocabulary_of_the_plan_is_checked() -> None:
    step = FakeStep(TEXT)
    step.bounds = {"input_ids": 100}
    with pytest.raises(InputError, match="256, but the model's is 100"):
        choose_batches(step, None, 0)


def test_an_empty_path_is_not_the_current_directory(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--save", "--resume", "--weights", "--data", "--metrics"):
        with pytest.raises(SystemExit, match="2"):
            parse([option, ""])
        assert f"argument {option}: it is empty; '.' is the current folder" in capsys.readouterr().err


def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was killed while it wrote a line of a step after its last checkpoint; a line of the user's own stays."""
    file, link = tmp_path / "metrics", tmp_path / "link"
    lines = [f'{{"step": {step}, "loss": {step}}}\n' for step in range(5)]
    file.write_text("a note\n" + "".join(lines[:3]) + '{"step": 1, "evaluation": {}}\n' + lines[3] + lines[4][:9])
    link.symlink_to(file)
    log = Metrics(link, 2)
    log.add({"step": 2, "loss": 9})
    log.close()
    kept = ["a note", *map(str.strip, lines[:2]), '{"step": 1, "evaluation": {}}', '{"step": 2, "loss": 9}']
    assert file.read_text().splitlines() == link.read_text().splitlines() == kept
    assert (tmp_path / "metrics.replaced").read_text() == lines[2] + lines[3] + lines[4][:9] + "\n"
    assert "note: 3 lines of " in capsys.readouterr().err
    Metrics(file, 3).close()
    assert file.read_text().splitlines() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "metrics", "metrics.replaced"]
