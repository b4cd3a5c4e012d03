"""Ranks that are given other batches than others: found by what travels with the loss, and named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.comm.alike import EVERY, FIRST
from superscaler.errors import InputError
from superscaler.launch.launch import launch
from superscaler.runtime.step import Step
from tests.helpers.ran import on_ranks

Batch = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(16, 8, dtype=dtype), nn.Linear(8, 16, dtype=dtype)

    def forward(self, ids: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.embedding(ids) * weight[..., None])
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batch(seed: int = 0, dtype: torch.dtype = torch.float32, rows: int = 4) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(16, (rows, 6), generator=draw) for _ in range(2))
    return {"ids": ids, "weight": torch.randn(rows, 6, generator=draw).to(dtype), "labels": labels}


def plan(name: str, world: int = 2, dtype: torch.dtype = torch.float32) -> ss.Plan:
    net = Net(dtype)
    graph = ss.capture(net, kwargs=batch(dtype=dtype), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), check=False)
    return ss.compile(graph, name, f"local:{world}")


def changed(name: str, change: Callable[[Tensor], object]) -> Batch:
    found = batch()
    change(found[name])
    return found


def put(x: Tensor, row: int, column: int, value: float) -> None:
    x[row, column] = value


OTHERS: dict[str, tuple[Batch, str]] = {
    "another batch": (batch(1), "'ids' and 'weight' and 'labels'"),
    "one label in a row of the other rank": (
        changed("labels", lambda x: put(x, 3, 5, int(x[3, 5] + 1) % 16)),
        "'labels'",
    ),
    "one label in its own row": (changed("labels", lambda x: put(x, 0, 0, int(x[0, 0] + 1) % 16)), "'labels'"),
    "rows in another order": (changed("ids", lambda x: x.copy_(x.flip(0))), "'ids'"),
    "a number in the last bit": (changed("weight", lambda x: x[1].nextafter_(torch.tensor(9.0))), "'weight'"),
    "a number that is none": (changed("weight", lambda x: put(x, 1, 1, torch.nan)), "'weight'"),
    "a huge number": (changed("weight", lambda x: put(x, 1, 1, 3e38)), "'weight'"),
}


@pytest.mark.parametrize("name", ["data_parallel", "tensor_parallel", "pipeline_1f1b:microbatches=2"])
def test_a_rank_with_another_batch_is_named_in_the_first_step(name: str) -> None:
    made = plan(name)
    for other, inputs in OTHERS.values() if name == "data_parallel" else [*OTHERS.values()][:1]:

        def work(step: Step, other: Batch = other) -> str:
            with pytest.raises(InputError) as caught:
                step(other if step.rank else batch())
            return str(caught.value)

        for found in on_ranks(made, work):
            assert found.startswith(f"step 1 was given another {inputs} on rank 1 than on rank 0; a plan takes the")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_loss_of_any_dtype_carries_the_numbers(dtype: torch.dtype) -> None:
    def work(step: Step) -> str:
        step(batch(0, dtype))
        with pytest.raises(InputError) as caught:
            step(batch(int(step.rank in (1, 3)), dtype))
        return str(caught.value)

    for found in on_ranks(plan("data_parallel", 4, dtype), work):
        assert "step 2 was given another 'ids' and 'weight' and 'labels' on ranks 1, 3 than on rank 0" in found


def test_numbers_that_are_none_or_infinite_are_alike() -> None:
    given = changed("weight", lambda x: x.copy_(torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -0.0, 0.0])))
    losses = on_ranks(plan("data_parallel"), lambda step: [float(step(given)) for _ in range(3)])
    assert all(loss != loss for found in losses for loss in found)


def test_what_begins_later_is_found_later() -> None:
    def work(step: Step) -> int:
        for number in range(1, EVERY + 2):
            try:
                step(batch(int(step.rank and number > FIRST)))
            except InputError:
                return number
        return 0

    assert on_ranks(plan("data_parallel"), work) == [EVERY, EVERY]


def test_the_loss_does_not_depend_on_what_travels_with_it() -> None:
    """The loss of a step that is checked, of one that is not, and of one device."""
    (alone,) = on_ranks(plan("single", 1), lambda step: [float(step(batch(k))) for k in range(4)])
    for found in on_ranks(plan("tensor_parallel"), lambda step: [float(step(batch(k))) for k in range(4)]):
        assert found == pytest.approx(alone, rel=1e-6)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, seed: int = 0) -> None:
        self.all = batch(seed, rows=12)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> Batch:
        return {name: x[row] for name, x in self.all.items()}


SHARED = ["data_parallel", "tensor_parallel", "hybrid:dp=2,tp=2", "hybrid:dp=2,tp=1,pp=2,microbatches=2"]


@pytest.mark.parametrize("name", SHARED)
def test_rows_that_a_rank_reads_by_itself_are_its_own(name: str) -> None:
    """A rank that reads some samples only is compared with those that read the same ones."""
    world = 4 if name.startswith("hybrid") else 2
    made = plan(name, world)

    def work(step: Step) -> list[float]:
        given = ss.batches(step, Rows())
        # What a user does with a batch may change the rows that were not read.
        return [float(step({**found, "weight": found["weight"] * 2 - 1})) for found in islice(given, 4)]

    assert len({str(found) for found in on_ranks(made, work)}) == 1

    def wrong(step: Step) -> str:
        try:
            step(next(ss.batches(step, Rows(int(step.rank == world - 1)))))
        except InputError as error:
            return str(error)
        return ""

    # Under data parallelism alone no two ranks read the same samples; in the pipeline each stage has two ranks.
    found = on_ranks(made, wrong)
    assert all(("was given another" in text) == (name in ("tensor_parallel", "hybrid:dp=2,tp=2")) for text in found)


def test_batches_of_inference_are_compared_too() -> None:
    net = Net()
    graph = ss.capture(net.eval(), kwargs=batch(), optimizer=None, check=False)

    def work(step: Step) -> str:
        step(batch())
        with pytest.raises(InputError) as caught:
            step(batch(step.rank))
        return str(caught.value)

    for found in on_ranks(ss.compile(graph, "data_parallel", "local:2"), work):
        assert "on rank 1 than on rank 0" in found


def rank(folder: Path) -> None:
    """Train in a process: by equal batches, then by others."""
    step = ss.load(folder / "plan")
    communicator = step.state.communicator
    found: dict[str, Any] = {"losses": [], "sums": []}
    reduce = communicator.all_reduce
    calls: list[int] = []
    communicator.all_reduce = lambda *given, **options: (calls.append(1), reduce(*given, **options))[1]  # type: ignore
    for _ in range(4):
        found["losses"].append(float(step(batch())))
        found["sums"].append(len(calls))
    step.alike._calls = EVERY - 1  # type: ignore[union-attr]
    try:
        step(batch(step.rank))
    except InputError as error:
        found["error"] = str(error)
    (folder / f"found{step.rank}").write_text(json.dumps(found))
    step.close()


@pytest.mark.dist
def test_processes_with_other_batches_are_refused(tmp_path: Path) -> None:
    plan("data_parallel").save(tmp_path / "plan", evaluation=False)
    launch(Path(__file__), [str(tmp_path)], 2)
    ranks = [json.loads((tmp_path / f"found{k}").read_text()) for k in range(2)]
    (alone,) = on_ranks(plan("single", 1), lambda step: [float(step(batch())) for _ in range(4)])
    for found in ranks:
        assert found["losses"] == pytest.approx(alone, rel=1e-6)
        # A checked step has no sum more than others.
        first, second, third, fourth = found["sums"]
        assert first == second - first == third - second == fourth - third
        assert found["error"].startswith("step 5 was given another 'ids' and 'weight' and 'labels' on rank 1 than on")


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
