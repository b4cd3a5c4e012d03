"""Data of users: the same batches in the same order under every plan, and each rank reads only what its plan reads."""

from __future__ import annotations

import copy
import math
import random
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import superscaler as ss
from superscaler.errors import InputError
from superscaler.frontend.checks import shorter
from superscaler.runtime.step import Step
from superscaler.train.feed import Samples, feed, fitting
from tests.helpers.ran import Around, on_ranks
from tests.helpers.sweeps import few, slow

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


def test_a_function_that_draws_its_data_gives_all_ranks_the_same(tmp_path: Path) -> None:
    file = tmp_path / "drawn.py"
    file.write_text(
        "import torch\n\ndef rows():\n    return [{'inputs_0': torch.randn(8), 'inputs_1': k % 4} for k in range(8)]\n"
        "\ndef stream():\n    yield {'inputs_0': torch.randn(4, 8), 'inputs_1': torch.arange(4)}\n"
    )

    def work(step: Step) -> Tensor:
        torch.seed()
        return torch.stack([feed(step, Path(f"{file}:{name}"), seed=3)(2)["inputs_0"] for name in ("rows", "stream")])

    assert torch.equal(*(on_ranks(plan("single", 1), work)[0] for _ in range(2)))


# Plans of four devices -> how many of the four rows of a batch each of them reads.
SHARES = [
    ("data_parallel", [1, 1, 1, 1]),
    ("tensor_parallel", [4, 4, 4, 4]),
    ("hybrid:dp=2,tp=2", [2, 2, 2, 2]),
    ("hybrid:dp=2,tp=1,pp=2,microbatches=2", [2, 2, 2, 2]),
    ("zero:stage=3", [1, 1, 1, 1]),
    ("zero:stage=2,microbatches=1,shard=2", [1, 1, 1, 1]),
    ("fsdp", [1, 1, 1, 1]),
    ("zero:2,stage=1 x tensor_parallel:2", [2, 2, 2, 2]),
    ("data_parallel:2 x tensor_parallel:2", [2, 2, 2, 2]),
    ("gradient_accumulation:microbatches=1", [1, 1, 1, 1]),
]


@pytest.mark.parametrize(("name", "shares"), few(SHARES, 0))
def test_each_rank_reads_its_rows_of_the_same_batches(name: str, shares: list[int]) -> None:
    def work(step: Step) -> Any:
        x, _ = names(step)
        samples = Samples(step, Rows(10, names(step)), seed=3)
        found = [samples.at(number) for number in range(6)]
        again = Samples(step, Rows(10, names(step)), seed=3).at(5)
        assert torch.equal(again[x], found[5][x])
        losses = [float(step(batch)) for batch in found]
        return [batch[x][:, 0] for batch in found], samples.read, losses

    ranks = on_ranks(plan(name, 4), work)
    whole = on_ranks(plan("single", 1), work)[0]
    for share, (read, count, losses) in zip(shares, ranks, strict=True):
        assert count == 6 * share
        assert losses == pytest.approx(whole[2])
        assert all(set(a.tolist()) <= {*b.tolist(), 0.0} for a, b in zip(read, whole[0], strict=True))
    # An epoch has all samples, two in its third batch, whose other labels count nothing; the next has another order.
    epochs = [torch.cat(whole[0][k : k + 3])[:10].tolist() for k in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [*range(10)]
    assert epochs[0] != epochs[1]


class Drawn(Rows):
    """Samples that draw, as augmented images do."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        x, _ = self.names
        drawn = torch.rand(8) + random.random() + np.random.rand()
        return {**super().__getitem__(row), x: drawn}


def test_what_samples_draw_is_the_same_on_all_ranks_and_after_a_resume() -> None:
    # Ranks are threads here, which share the generators.
    lock = threading.Lock()

    def work(step: Step) -> list[Tensor]:
        x, _ = names(step)
        with lock:
            before = random.getstate(), torch.get_rng_state()
            samples = Samples(step, Drawn(10, names(step)), seed=3)
            found = [samples.at(number)[x] for number in range(4)]
            assert random.getstate() == before[0]
            assert torch.equal(torch.get_rng_state(), before[1])
            assert torch.equal(Samples(step, Drawn(10, names(step)), seed=3).at(3)[x], found[3])
        return found

    (whole,) = on_ranks(plan("single", 1), work)
    halves = on_ranks(plan("data_parallel"), work)
    # Rows that a rank does not read are zeros.
    assert all(torch.equal(sum(some), x) for some, x in zip(zip(*halves, strict=True), whole, strict=True))
    assert len({float(x) for batch in whole for x in batch[:, 0]}) == 16


def test_batches_come_in_order_and_go_on_after_the_last() -> None:
    said: list[str] = []

    def work(step: Step) -> list[Tensor]:
        x, _ = names(step)
        loader = DataLoader(Rows(10, names(step)), batch_size=4, shuffle=True, collate_fn=collate)
        at = feed(step, loader, 5, said.append)
        return [at(number)[x][:, 0] for number in range(6)]

    (read,) = on_ranks(plan("single", 1), work)
    epochs = [torch.cat(read[k : k + 3])[:10].tolist() for k in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [*range(10)]
    assert epochs[0] != epochs[1]
    assert not said


def row_losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(m.last(m.first(x).relu()), y, ignore_index=3)  # type: ignore[operator]


def pairs(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(m.last(x) @ m.last(x).t(), y)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("function", "fills"),
    [
        (row_losses, True),
        (lambda m, x, y: nn.functional.cross_entropy(m.last(m.first(x)), y, reduction="sum", ignore_index=3), True),
        (lambda m, x, y: nn.functional.cross_entropy(m.last(m.first(x)), y, m.first.bias[:4].detach().abs()), True),
        (lambda m, x, y: nn.functional.cross_entropy(m.last(m.first(x)), y, reduction="sum") / len(x), False),
        (lambda m, x, y: nn.functional.cross_entropy(m.last(x) - nn.functional.one_hot(y, 4), y), False),
        (lambda m, x, y: row_losses(m, m.norm(x), y), False),
        (lambda m, x, y: row_losses(m, x, y) + m.last(x).square().mean(), False),
        (lambda m, x, y: row_losses(m, x - x.mean(0), y), False),
        (lambda m, x, y: row_losses(m, x.flip(0), y), False),
        (lambda m, x, y: row_losses(m, x, y * 1), False),
        (pairs, False),
    ],
)
def test_a_batch_of_fewer_rows_is_filled_where_rows_are_apart(function: Any, fills: bool) -> None:
    """It trains as the module does on these rows alone; elsewhere it is left out."""
    torch.manual_seed(0)
    module = Around(function, first=nn.Linear(8, 8), last=nn.Linear(8, 4), norm=nn.BatchNorm1d(8))
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    plain = copy.deepcopy(module)
    trained = [p for name, p in module.named_parameters() if function is not pairs or name.startswith("last")]
    graph = ss.capture(module, (x, y), optimizer=torch.optim.SGD(trained, lr=0.1))

    def work(step: Step) -> Any:
        a, b = names(step)
        given = step.padding.filled({a: x[:3], b: y[:3]}, step.inputs)
        if len(given[a]) == 3:
            return None
        return step(given), {w["tensor"]: step.state.weights[w["name"]].detach() for w in step.state.tables["weights"]}

    for found in on_ranks(ss.compile(graph, "data_parallel", "local:2"), work):
        assert (found is not None) == fills
        if found is None:
            continue
        loss = plain(x[:3], y[:3])
        gradients = dict(
            zip(
                ("first.weight", "last.bias"),
                torch.autograd.grad(loss, [plain.first.weight, plain.last.bias]),
                strict=True,
            )
        )
        torch.testing.assert_close(found[0], loss.detach())
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[1][name], plain.get_parameter(name).detach() - 0.1 * gradient)


def by_number(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(m.last(x), y, reduction="sum") * (1 / y.numel())  # type: ignore[operator]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("function", "needs"),
    [
        (by_number, True),
        (lambda m, x, y: nn.functional.cross_entropy(m.last(x), y, reduction="sum") / torch.tensor(len(x)), True),
        (lambda m, x, y: row_losses(m, x / torch.arange(len(x)).numel(), y), True),
        (lambda m, x, y: row_losses(m, x / 4, y), False),
    ],
)
def test_a_model_that_is_not_run_needs_all_rows_where_a_number_depends_on_them(
    function: Any, needs: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one, and one without data: whose losses are divided by the number of rows of the capture."""
    monkeypatch.setattr(shorter, "MOST_FLOPS", 0)
    module = Around(function, first=nn.Linear(8, 8), last=nn.Linear(8, 4)).to(device)
    x, y = torch.randn(4, 8, device=device), torch.zeros(4, dtype=torch.long, device=device)
    assert ss.capture(module, (x, y), optimizer=torch.optim.SGD(module.parameters())).model.is_whole == needs


class Attention(nn.Module):
    """Scores of the next token, from all tokens where the mask is not 0, or from those before."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.table, self.head = kind, nn.Embedding(16, 8, dtype=dtype), nn.Linear(8, 16, dtype=dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        x = self.table(input_ids)
        mask = attention_mask[:, None, :].bool() if self.kind in ("masked", "squares") else None
        attended = nn.functional.scaled_dot_product_attention(x, x.tanh(), x, mask, is_causal=self.kind == "causal")
        loss = nn.functional.cross_entropy(self.head(x + attended).mT, labels)
        return loss + x.square().mean() if self.kind == "squares" else loss


@pytest.mark.parametrize(
    ("kind", "fills"), [*slow(("masked", True)), *slow(("causal", True)), ("both ways", False), ("squares", False)]
)
def test_a_batch_of_shorter_sequences_is_filled_where_the_module_trains_alike(kind: str, fills: bool) -> None:
    """Losses are those of the module on the short rows alone, also of fewer rows, under each plan."""
    torch.manual_seed(0)
    full = {name: torch.randint(0, 16, (4, 8)) for name in ("input_ids", "attention_mask", "labels")}
    full["attention_mask"] = torch.ones(4, 8).long()
    short = {name: x[:3, :5] for name, x in full.items()}

    def work(step: Step) -> Any:
        (given,) = fitting([short], step.choice, print)
        rows = [{name: x[k % 3] for name, x in short.items()} for k in range(4)]
        read = Samples(step, rows, seed=0).at(0)["labels"]
        assert (read[:, 5:] == -100).all() or step.world > 1
        return [float(step(given)) for _ in range(2)]

    for dtype, near in ((torch.float64, 1e-9), (torch.float32, 1e-5))[: 2 if kind == "masked" else 1]:
        module = Attention(kind, dtype)
        plain, optimizer = copy.deepcopy(module), torch.optim.SGD(module.parameters(), lr=0.1)
        graph = ss.capture(module, kwargs=full, optimizer=optimizer)
        assert bool(graph.model.shorter) == fills
        losses, sgd = [], torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(2):
            sgd.zero_grad()
            losses.append(plain(**short))
            losses[-1].backward()
            sgd.step()
        for name in ("single", "data_parallel", "gradient_accumulation:microbatches=2", "tensor_parallel") * fills:
            found = on_ranks(ss.compile(graph, name, f"local:{1 + (name != 'single')}"), work)
            assert found[0] == pytest.approx([x.item() for x in losses], rel=near)


class Lengths(nn.Module):
    """Scores of the next token from those before, in a form that depends on the number of tokens above some length."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.head = kind, nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.register_buffer("near", torch.linspace(0.5, 1.0, 8))
        self.register_buffer("far", torch.linspace(2.0, 3.0, 8))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, long = self.table(input_ids), input_ids.shape[1]
        for layer in self.layers:
            x = x + layer(x).tanh()
        positions = torch.arange(long, device=input_ids.device)
        if self.kind == "branch":
            x = x * (self.far if long > 24 else self.near)
        elif self.kind == "values":
            x = x * torch.where(positions.max() + 1 > 24, self.far, self.near)
        elif self.kind == "number":
            x = x * math.log(max(long, 24))
        elif self.kind == "kept":
            x = x * self.frequencies(long)
        elif self.kind == "positions":
            x = x * torch.cos(positions[:, None] * self.near)
        attended = nn.functional.scaled_dot_product_attention(x, x.tanh(), x, is_causal=True)
        return nn.functional.cross_entropy(self.head(x + attended).mT, labels)

    def frequencies(self, long: int) -> Tensor:
        if long > 24:
            self.register_buffer("near", self.far, persistent=False)
        return self.near


@pytest.mark.parametrize(
    ("kind", "fills"),
    [("branch", False), ("values", False), ("number", False), ("kept", False), ("positions", True), ("plain", True)],
)
def test_sequences_below_a_length_at_which_the_module_changes_are_not_filled(kind: str, fills: bool) -> None:
    """Lengths of a few elements are all alike: the captured one is beyond the change."""
    torch.manual_seed(0)
    batch = {name: torch.randint(0, 16, (4, 48)) for name in ("input_ids", "labels")}
    short = {name: x[:, :20] for name, x in batch.items()}
    module = Lengths(kind)
    plain = copy.deepcopy(module)
    graph = ss.capture(module, kwargs=batch, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    assert bool(graph.model.shorter) == fills

    def work(step: Step) -> float:
        return float(step(step.padding.filled(short, step.inputs)))

    if fills:
        (found,) = on_ranks(ss.compile(graph, "single", "local:1"), work)
        assert found == pytest.approx(float(plain(**short).detach()), rel=1e-5)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 4)

    def forward(self, Batch: dict[str, Any], scale: Tensor) -> Tensor:  # noqa: N803
        return nn.functional.cross_entropy(self.last(Batch["In-X"][0]) * scale, Batch["labels"])


def test_a_step_takes_nested_inputs_as_the_module_does() -> None:
    """It takes the names of the capture, too: torch.export writes paths, in lower case."""
    given = {"Batch": {"In-X": [torch.randn(4, 8)], "labels": torch.arange(4)}, "scale": torch.tensor(2.0)}
    named = {"batch_in_x_0": given["Batch"]["In-X"][0], "batch_labels": torch.arange(4), "scale": torch.tensor(2.0)}
    module = Nested()
    wanted = float(module(**given).detach())
    graph = ss.capture(module, kwargs=given, optimizer=torch.optim.SGD(module.parameters(), lr=0.0))
    for batch in (given, named):
        (found,) = on_ranks(ss.compile(graph, "single", "local:1"), lambda step, batch=batch: float(step(batch)))
        assert found == pytest.approx(wanted, rel=1e-6)


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0] if name != "unread"}


def test_bad_data_is_one_line() -> None:
    def work(step: Step) -> None:
        x, y = names(step)
        short = [{x: [0.0] * 7, y: 0}] * 5
        for data, message in (
            (Rows(3, names(step)), "the data has 3 samples, but one batch of this plan has 4"),
            ([{x: 1.0}] * 5, f"has no '{y}'"),
            ([1, 2], "is an int; give a dict with"),
            (7, "data is an int; give a data set"),
            ([{x: torch.zeros(2, 7), y: torch.zeros(2).long()}], "the data has no batch of the shapes of this plan"),
            (short, "of shape (7,), but this plan was compiled for (8,)"),
            ([{x: [0.0] * 8, y: 1.5}] * 5, f"'{y}' is of torch.float32, but this plan was compiled for torch.int64"),
            ([{x: [0.0] * 8, y: "cat"}] * 5, f"'{y}' is no tensor, but 'cat'"),
            ([{x: torch.zeros(4, 8), y: [[1], [2, 3]]}], f"'{y}' is no tensor, but [[1], [2, 3]]"),
        ):
            with pytest.raises(InputError) as caught:
                feed(step, data, 0, lambda _: None)(0)
            assert message in str(caught.value)
        assert not list(fitting([], step.choice, print))

    on_ranks(plan("single", 1), work)


WIDER = {"float64": "float32"}


@pytest.mark.parametrize("is_stream", [True, False])
def test_data_of_another_dtype_is_refused_as_by_a_step(is_stream: bool) -> None:
    """Only float64 becomes float32, in silence."""
    tensor = {"inputs_0": torch.arange(32.0).reshape(4, 8) / 7, "inputs_1": torch.arange(4)}

    def work(step: Step) -> None:
        for name, wanted in zip(names(step), ("float32", "int64"), strict=True):
            for kind in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"):
                given = {**tensor, name: tensor[name].to(getattr(torch, kind))}
                rows = [{n: x[k] for n, x in given.items()} for k in range(4)]
                once = [given] if is_stream else rows
                if kind == wanted or WIDER.get(kind) == wanted:
                    found = feed(step, once, 0)(0)
                    assert found[name].dtype == getattr(torch, wanted)
                    assert torch.equal(found[name].sort(0).values, tensor[name].sort(0).values)
                    continue
                with pytest.raises(InputError) as direct:
                    step(given)
                with pytest.raises(InputError) as fed:
                    feed(step, once, 0)(0)
                assert str(fed.value) == str(direct.value)
                assert f"'{name}' is of torch.{kind}, but this plan was compiled for torch.{wanted}" in str(fed.value)

    on_ranks(plan("single", 1), work)


@pytest.mark.dist
def test_train_reads_and_evaluates_what_functions_give(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tests.helpers.commands import answer, run

    # One run of the file in a process gives both functions.
    (tmp_path / "data.py").write_text(f"{DATA}\n\ntorch.library.define('test_feed::once', '(Tensor x) -> Tensor')\n")
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n    def forward(self, x, y):\n"
        "        x = torch.nn.functional.dropout(x, 0.5, self.training)\n"
        "        return torch.nn.functional.cross_entropy(super().forward(x), y)\n\n\n"
        "def net():\n    torch.manual_seed(0)\n    return Net(8, 4), (torch.ones(4, 8), torch.zeros(4).long())\n"
    )
    found = []
    # Nothing can be recomputed where nothing is trained.
    for name, devices in (("single", 1), ("recompute:2,what=full", 2)):
        given = ["--plan", name, "--cluster", f"local:{devices}", "--steps", "4", "--eval-every", "3"]
        given += ["--data", f"{tmp_path}/data.py:rows:count=9", "--eval", f"{tmp_path}/data.py:held_out"]
        result, err = answer(capfd, "train", f"{tmp_path}/net.py:net", *given)
        assert "step 3/4  evaluation: error " in err
        found.append(result)
    assert found[0]["losses"] == pytest.approx(found[1]["losses"])
    assert [e["step"] for e in found[0]["evaluations"]] == [2, 3]
    for one, two in zip(found[0]["evaluations"], found[1]["evaluations"], strict=True):
        assert one["evaluation"] == pytest.approx(two["evaluation"])
    assert run("train", f"{tmp_path}/net.py:net", *given, "--eval", f"{tmp_path}/data.py") == 2
    assert "is no FILE.py:function" in capfd.readouterr().err
