"""A file and a plan directory are written whole or not at all, whatever fails or interrupts it."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import InputError
from superscaler.specs.whole_file import write_file
from superscaler.store import folder as store
from superscaler.store.plan import read_plan
from superscaler.store.plan_head import NEW
from superscaler.store.tensor_file import NAMES, write_tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Files.


@pytest.mark.parametrize("what", ["fsync", "replace"])
def test_what_fails_half_way_leaves_the_older_file(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    for data in ("new", b"old"):
        write_file(file, data)
    monkeypatch.setattr(os, what, full)
    with pytest.raises(OSError, match="No space left"):
        write_file(file, "new")
    assert contents(tmp_path) == {"file": b"old"}


def test_a_link_is_replaced_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("keep")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    write_file(tmp_path / "link", "new")
    # The longest name, too.
    write_file(tmp_path / ("x" * 255), "data")
    assert contents(tmp_path) == {"theirs": b"keep", "link": b"new", "x" * 255: b"data"}


# Files of tensors, hashed while they are written.


def test_the_library_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0, 4), (5, 7)]
    tensors = {f"{d}{s}": (torch.rand(s) * 9).to(getattr(torch, d)) for d in NAMES for s in shapes}
    found = write_tensors(tmp_path / "file", tensors)
    assert found == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()
    stored = load_file(tmp_path / "file")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_what_has_no_name_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^a is of torch\.complex64, which no safetensors file holds$"):
        write_tensors(tmp_path / "file", {"a": torch.zeros(2, dtype=torch.complex64)})
    assert not (tmp_path / "file").exists()


def test_who_is_waited_for_does_not_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superscaler.store.tensor_file._REST", 10**9)
    hurry = Event()
    thread = Thread(target=write_tensors, args=(tmp_path / "file", {"a": torch.zeros(1 << 22)}, hurry), daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    hurry.set()
    thread.join(60)
    assert load_file(tmp_path / "file")["a"].shape == (1 << 22,)


# Plan directories.


class Net(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@pytest.fixture(scope="module")
def plans() -> list[ss.Plan]:
    """Return two plans, of which only the first has a program_1.py."""
    net = Net(4, 4)
    graph = ss.capture(net, (torch.ones(8, 4),), optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    chosen = (("pipeline_1f1b:stages=2,microbatches=2", "local:2"), ("single", "local:1"))
    return [ss.compile(graph, plan, cluster) for plan, cluster in chosen]


@pytest.mark.parametrize("what", ["write_tensors", "sync"])
def test_a_full_disk_leaves_the_older_plan(
    what: str, plans: list[ss.Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans[0].save(tmp_path / "plan", evaluation=False)
    before = contents(tmp_path)
    monkeypatch.setattr(store, what, full)
    with pytest.raises(InputError, match=rf"{tmp_path}/plan cannot be written: No space left on device; choose"):
        plans[1].save(tmp_path / "plan", evaluation=False)
    assert contents(tmp_path) == before
    read_plan(tmp_path / "plan").check()
    with pytest.raises(InputError, match="No space left"):
        plans[1].save(tmp_path / "new" / "plan", evaluation=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan"]


def test_what_was_interrupted_while_it_moved_is_refused_and_then_finished(
    plans: list[ss.Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans[0].save(tmp_path, evaluation=False)
    (tmp_path / "notes.txt").write_text("mine")
    replaced: list[str] = []

    def replace(source: Path, target: Path) -> None:
        replaced.append(target.name)
        if len(replaced) == 6:
            raise KeyboardInterrupt
        rename(source, target)

    rename = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            plans[1].save(tmp_path, evaluation=False)
    assert (tmp_path / NEW / "plan.json").is_file()
    with pytest.raises(InputError, match=rf"{tmp_path}/\S+ is not what compile wrote there"):
        ss.load(tmp_path)
    # Whatever is written next: what was aside comes first.
    for plan, world in ((plans[0], 2), (plans[1], 1)):
        assert plan.save(tmp_path, evaluation=False) is True
        found = read_plan(tmp_path)
        found.check()
        assert found.head["world"] == world
        assert (tmp_path / "program_1.py").exists() == (world == 2)
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert not (tmp_path / NEW).exists()


def test_a_folder_in_the_place_of_a_file_is_not_removed(plans: list[ss.Plan], tmp_path: Path) -> None:
    plans[0].save(tmp_path, evaluation=False)
    (tmp_path / "journal.txt").unlink()
    (tmp_path / "journal.txt").mkdir()
    with pytest.raises(InputError, match=r"journal\.txt is not of the plan there; move it"):
        plans[1].save(tmp_path, evaluation=False)
    assert read_plan(tmp_path).head["world"] == 2
