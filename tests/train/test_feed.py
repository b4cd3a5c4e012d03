"""Data of users: the same batches in the same order under every plan, and each rank reads only what its plan reads."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import superscaler as ss
from superscaler.errors import InputError
from superscaler.runtime.step import Step
from superscaler.train.feed import Samples, feed, fitting
from tests.ran import Around, on_ranks

DATA = """
import torch


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.x, self.y = torch.randn(count, 8, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 4

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return {"x": self.x[row], "y": int(self.y[row]), "name": "unread"}


def rows(count: int = 10):
    return Rows(count)


def loader():
    return torch.utils.data.DataLoader(Rows(10), batch_size=4, shuffle=True)


def held_out():
    return torch.utils.data.DataLoader(Rows(8), batch_size=4), {"error": lambda out, batch: out.float()}
"""


@cache
def plan(name: str, devices: int = 2) -> ss.Plan:
    torch.manual_seed(0)
    module = Around(lambda self, x, y: nn.functional.cross_entropy(self.last(self.first(x).relu()), y),
                    first=nn.Linear(8, 16), last=nn.Linear(16, 4))  # fmt: skip
    batch = torch.randn(4, 8), torch.arange(4) % 4
    graph = ss.capture(module, batch, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    return ss.compile(graph, name, f"local:{devices}")


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, count: int, names: tuple[str, str]) -> None:
        self.count, self.names = count, names

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, Any]:
        x, y = self.names
        return {x: [float(row)] * 8, y: row % 4, "unread": "text"}


def names(step: Step) -> tuple[str, str]:
    first, second = step.inputs
    return first, second


@pytest.mark.parametrize(("name", "share"), [("data_parallel", 2), ("tensor_parallel", 4), ("hybrid:dp=2,tp=1", 2)])
def test_each_rank_reads_its_rows_of_the_same_batches(name: str, share: int) -> None:
    def work(step: Step) -> Any:
        x, _ = names(step)
        samples = Samples(step, Rows(10, names(step)), seed=3)
        found = [samples.at(number) for number in range(5)]
        again = Samples(step, Rows(10, names(step)), seed=3).at(4)
        assert torch.equal(again[x], found[4][x])
        losses = [float(step(batch)) for batch in found]
        return [batch[x][:, 0] for batch in found], samples.read, losses

    ranks = on_ranks(plan(name), work)
    whole = on_ranks(plan("single", 1), work)[0]
    for read, count, losses in ranks:
        assert count == 5 * share
        assert losses == pytest.approx(whole[2])
        assert all(set(a.tolist()) <= {*b.tolist(), 0.0} for a, b in zip(read, whole[0], strict=True))
    # Two batches an epoch: no sample is in both, and the next epoch has another order.
    first, second, third = (set(x.tolist()) for x in whole[0][:3])
    assert not first & second
    assert third != first


def test_batches_come_in_order_and_go_on_after_the_last() -> None:
    said: list[str] = []

    def work(step: Step) -> list[Tensor]:
        x, _ = names(step)
        loader = DataLoader(Rows(10, names(step)), batch_size=4, shuffle=True, collate_fn=collate)
        at = feed(step, loader, 5, said.append)
        return [at(number)[x][:, 0] for number in range(4)]

    (read,) = on_ranks(plan("single", 1), work)
    assert not set(read[0].tolist()) & set(read[1].tolist())
    assert sorted(read[0].tolist() + read[1].tolist()) != sorted(read[2].tolist() + read[3].tolist())
    (line,) = said
    assert "note: 1 of 3 batches are left out, with" in line
    assert "of shape (2, 8), not (4, 8)" in line


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0] if name != "unread"}


def test_bad_data_is_one_line() -> None:
    def work(step: Step) -> None:
        x, y = names(step)
        short = [{x: [0.0] * 7, y: 0}] * 5
        for data, message in (
            (Rows(3, names(step)), "the data has 3 samples, but one batch of this plan has 4"),
            ([{x: 1.0}] * 5, f"has no '{y}'"),
            ([1, 2], "is a int; give a dict with"),
            (7, "data is a int; give a data set"),
            ([{x: torch.zeros(2, 8), y: torch.zeros(2)}], "the data has no batch of the shapes of this plan"),
            (short, "of shape (7,), but this plan was compiled for (8,)"),
        ):
            with pytest.raises(InputError) as caught:
                feed(step, data, 0, lambda _: None)(0)
            assert message in str(caught.value)
        assert not list(fitting([], step.inputs, print))

    on_ranks(plan("single", 1), work)


@pytest.mark.dist
def test_train_reads_and_evaluates_what_functions_give(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import json

    from tests.commands import run

    (tmp_path / "data.py").write_text(DATA)
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n    def forward(self, x, y):\n"
        "        x = torch.nn.functional.dropout(x, 0.5, self.training)\n"
        "        return torch.nn.functional.cross_entropy(super().forward(x), y)\n\n\n"
        "def net():\n    torch.manual_seed(0)\n    return Net(8, 4), (torch.ones(4, 8), torch.zeros(4).long())\n"
    )
    found = []
    for name, devices in (("single", 1), ("data_parallel", 2)):
        given = ["--plan", name, "--cluster", f"local:{devices}", "--steps", "4", "--json", "--eval-every", "3"]
        given += ["--data", f"{tmp_path}/data.py:rows:count=9", "--eval", f"{tmp_path}/data.py:held_out"]
        assert run("train", f"{tmp_path}/net.py:net", *given) == 0
        out, err = capfd.readouterr()
        assert "step 3/4  evaluation: error " in err
        found.append(json.loads(out.splitlines()[-1]))
    assert found[0]["losses"] == pytest.approx(found[1]["losses"])
    assert [e["step"] for e in found[0]["evaluations"]] == [2, 3]
    for one, two in zip(found[0]["evaluations"], found[1]["evaluations"], strict=True):
        assert one["evaluation"] == pytest.approx(two["evaluation"])
    assert run("train", f"{tmp_path}/net.py:net", *given, "--eval", f"{tmp_path}/data.py") == 2
    assert "is no FILE.py:function" in capfd.readouterr().err
