"""A plan that cannot be written leaves the older one, and an interrupted one is finished."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import InputError
from superscaler.store import folder as store
from superscaler.store.plan import NEW, read_plan


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


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["write_tensors", "sync"])
def test_a_full_disk_leaves_the_older_plan(
    what: str, plans: list[ss.Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans[0].save(tmp_path / "plan")
    before = contents(tmp_path)
    monkeypatch.setattr(store, what, full)
    with pytest.raises(InputError, match=rf"{tmp_path}/plan cannot be written: No space left on device; choose"):
        plans[1].save(tmp_path / "plan")
    assert contents(tmp_path) == before
    read_plan(tmp_path / "plan").check()


def test_what_was_interrupted_while_it_moved_is_refused_and_then_finished(
    plans: list[ss.Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plan"
    plans[0].save(folder)
    (folder / "notes.txt").write_text("mine")
    replaced: list[str] = []

    def replace(source: Path, target: Path) -> None:
        replaced.append(target.name)
        if len(replaced) == 6:
            raise KeyboardInterrupt
        rename(source, target)

    rename = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(store.os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            plans[1].save(folder)
    assert (folder / NEW / "plan.json").is_file()
    with pytest.raises(InputError, match=rf"{folder}/\S+ is not what compile wrote there"):
        ss.load(folder)
    # Whatever is written next: what was aside comes first.
    for plan, world in ((plans[0], 2), (plans[1], 1)):
        assert plan.save(folder) is True
        found = read_plan(folder)
        found.check()
        assert found.head["world"] == world
        assert (folder / "program_1.py").exists() == (world == 2)
        assert (folder / "notes.txt").read_text() == "mine"
        assert not (folder / NEW).exists()


def test_a_folder_in_the_place_of_a_file_is_not_removed(plans: list[ss.Plan], tmp_path: Path) -> None:
    plans[0].save(tmp_path)
    (tmp_path / "journal.txt").unlink()
    (tmp_path / "journal.txt").mkdir()
    with pytest.raises(InputError, match=r"journal\.txt is not of the plan there; move it"):
        plans[1].save(tmp_path)
    assert read_plan(tmp_path).head["world"] == 2


def test_copies_of_operators_that_a_new_plan_has_not_are_removed(plans: list[ss.Plan], tmp_path: Path) -> None:
    plans[0].save(tmp_path)
    # As of an older plan that had them, beside a file of the user's.
    text = (tmp_path / "plan.json").read_text()
    file = tmp_path / "operators" / "kernels" / "ops.py"
    file.parent.mkdir(parents=True)
    for path in (file, tmp_path / "operators" / "mine.py"):
        path.write_text("x = 1\n")
    listed = '"operators/kernels/ops.py": "", "run.py":'
    (tmp_path / "plan.json").write_text(text.replace('"run.py":', listed))
    plans[1].save(tmp_path)
    assert [str(f.relative_to(tmp_path)) for f in (tmp_path / "operators").rglob("*")] == ["operators/mine.py"]
