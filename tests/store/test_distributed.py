"""Folders of torch.distributed.checkpoint: torch's own functions read ours, and ours read what torch's wrote."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.comm.threads import run_ranks
from superscaler.errors import InputError
from superscaler.runtime.load import modules
from superscaler.runtime.step import Step, build_step
from superscaler.store.convert import export, import_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
Optimizers = list[torch.optim.Optimizer]


class Net(nn.Module):
    """Tied weights, a frozen one, one that nothing reads, statistics, and names with `model.` and `state.`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Embedding(8, 6)
        self.state = nn.ModuleDict({"one": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6)})
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.model.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unread = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.state["norm"](torch.tanh(self.state["one"](self.model(x)) * self.frozen))
        return self.head(torch.tanh(h)).square().mean()


def adam(net: Net) -> Optimizers:
    """Two groups with other options, the frozen weight and the one that nothing reads in one of them."""
    state = net.state.parameters()
    first = {"params": [net.model.weight, net.frozen, net.unread], "weight_decay": 0.1}
    return [torch.optim.AdamW([first, {"params": state, "betas": (0.5, 0.9)}], lr=0.01)]


def momentum(net: Net) -> Optimizers:
    trained = [p for p in net.parameters() if p.requires_grad]
    return [torch.optim.SGD(trained, 0.05, momentum=0.9, nesterov=True)]


def two(net: Net) -> Optimizers:
    matrices = [net.state["one"].weight]
    others = [p for p in net.parameters() if p.requires_grad and p is not matrices[0]]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.Adagrad(others, 0.01, initial_accumulator_value=0.2)]


OPTIMIZERS: dict[str, Callable[[Net], Optimizers]] = {"adam": adam, "momentum": momentum, "two": two}
X = torch.randint(0, 8, (4,), generator=torch.Generator().manual_seed(1))


def made(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[Net, Optimizers]:
    torch.manual_seed(seed)
    net = Net().to(dtype)
    return net, OPTIMIZERS[name](net)


@cache
def planned(name: str, dtype: torch.dtype, plan: str) -> ss.Plan:
    net, optimizers = made(name, dtype)
    given = optimizers if len(optimizers) > 1 else optimizers[0]
    return ss.compile(ss.capture(net, (X,), optimizer=given), plan, f"local:{1 if plan == 'single' else 2}")


def eager(net: Net, optimizers: Optimizers, steps: int) -> None:
    for _ in range(steps):
        for one in optimizers:
            one.zero_grad()
        net(X).backward()
        for one in optimizers:
            one.step()


def saved(name: str, dtype: torch.dtype, folder: Path, plan: str = "single", steps: int = 2) -> None:
    def work(step: Step) -> None:
        for _ in range(steps):
            step({"x": X})
        step.save(folder)

    run(name, dtype, work, plan)


def run(name: str, dtype: torch.dtype, work: Callable[[Step], None], plan: str = "single") -> None:
    compiled = planned(name, dtype, plan).compiled
    described = describe(compiled)
    code, held = modules(compiled.emitted.files), compiled.graph.captured
    values = initial_values(compiled.graph.model, held.values)
    unread = {n: values[n] for n in described["tensors"] if n not in described["slots"]}

    def rank(communicator: Any) -> None:
        fixed = {n: v.clone() for n, v in {**unread, **held.fixed}.items()} if communicator.rank == 0 else {}
        work(build_step(described, code, {n: v.clone() for n, v in values.items()}, communicator, fixed))

    run_ranks(compiled.program.world, rank)


def loaded(folder: Path, net: Net, optimizers: Optimizers, **options: bool) -> None:
    """Load as torch's tutorial does: both states are read in place."""
    model, optimizer = get_state_dict(net, optimizers, options=StateDictOptions(**options))
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    set_state_dict(
        net, optimizers, model_state_dict=model, optim_state_dict=optimizer, options=StateDictOptions(**options)
    )


def differing(net: Net, other: Net) -> list[str]:
    theirs = other.state_dict()
    return [n for n, x in net.state_dict().items() if not torch.allclose(x.double(), theirs[n].double(), rtol=1e-12)]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_loads_an_export_and_its_next_step_is_that_of_the_module(name: str, steps: int, tmp_path: Path) -> None:
    saved(name, torch.float64, tmp_path / "kept", steps=steps)
    export(tmp_path / "kept", tmp_path / "out", "distributed", nn.Module)
    net, optimizers = made(name, torch.float64, seed=3)
    loaded(tmp_path / "out", net, optimizers)
    expected = made(name, torch.float64)
    eager(*expected, steps)
    assert differing(net, expected[0]) == []
    for _ in range(2):
        eager(net, optimizers, 1)
        eager(*expected, 1)
        assert differing(net, expected[0]) == []
    for ours, theirs in zip(optimizers, expected[1], strict=True):
        options = [{k: x for k, x in g.items() if k != "params"} for g in ours.param_groups]
        assert options == [{k: x for k, x in g.items() if k != "params"} for g in theirs.param_groups]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_trains_on_to_the_bit_in_the_trained_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Beside a module that gets the tensors of the step by hand."""
    by_hand, optimizers = made("adam", dtype, seed=4)

    def work(step: Step) -> None:
        for _ in range(2):
            step({"x": X})
        step.save(tmp_path / "kept")
        parameters, state = dict(by_hand.named_parameters()), step.state.updates.optimizer.state
        for entry in step.state.tables["weights"]:
            name, weight = step.plan["tensors"][entry["tensor"]]["name"], step.state.weights[entry["name"]]
            by_hand.state_dict()[name].copy_(weight.detach())
            if entry["trained"]:
                optimizers[0].state[parameters[name]] = {k: x.clone() for k, x in state[weight].items()}

    run("adam", dtype, work)
    by_hand.unread.data = made("adam", dtype)[0].unread.data
    by_hand.state_dict()["state.norm.num_batches_tracked"].fill_(2)
    export(tmp_path / "kept", tmp_path / "out", "distributed", nn.Module)
    net, theirs = made("adam", dtype, seed=3)
    loaded(tmp_path / "out", net, theirs)
    for _ in range(2):
        assert [n for n, x in net.state_dict().items() if not torch.equal(x, by_hand.state_dict()[n])] == []
        eager(net, theirs, 1)
        eager(by_hand, optimizers, 1)


class App(dcp.stateful.Stateful):
    """The state of an application, as in torch's own tutorial."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.state = {"model": model, "optim": optimizer}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


Made = Callable[[Any, Any], dict[str, Any]]
# What others give to `dcp.save`, from the states of a model and of its optimizer.
LAYOUTS: dict[str, Made] = {
    "model, optimizer": lambda model, optimizer: {"model": model, "optimizer": optimizer},
    "model, optim": lambda model, optimizer: {"model": model, "optim": optimizer, "epoch": 3, "lr": {"last_epoch": 2}},
    "app": lambda model, optimizer: {"app": App(model, optimizer)},
    "lightning": lambda model, optimizer: {"state_dict": model, "optimizer_0": optimizer, "rng": torch.ones(2)},
    "torchtitan": lambda model, optimizer: {**model, "optimizer": optimizer, "lr_scheduler": {"last_epoch": 2}},
    "no prefix": lambda model, optimizer: {**model, **optimizer},
    "without groups": lambda model, optimizer: {"model": model, "optimizer": {"state": optimizer["state"]}},
    "keys of ones own": lambda model, optimizer: {
        **{f"net.model.{n}": x for n, x in model.items()},
        **{f"optim.state.{n}.{k}": x for n, own in optimizer["state"].items() for k, x in own.items()},
    },
    "a second model": lambda model, optimizer: {
        "model": model, "average": {n: x * 2 for n, x in model.items()}, "optim": optimizer
    },
    "flat": lambda model, optimizer: {"model": model, "optimizer": optimizer},
    "flat, no prefix": lambda model, optimizer: {**model, **optimizer},
}  # fmt: skip
MODELS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "as it is": lambda model: model,
    "model": lambda model: {"model": model},
    "state_dict": lambda model: {"state_dict": model, "rng": torch.ones(2)},
    "app": lambda model: {"app": {"model": model}},
}


@cache
def theirs(flat: bool = False, optimizer: str = "adam") -> tuple[Net, Any, Any]:
    net, optimizers = made(optimizer, torch.float64)
    eager(net, optimizers, 2)
    net.unread.grad = torch.zeros_like(net.unread)
    return net, *get_state_dict(net, optimizers, options=StateDictOptions(flatten_optimizer_state_dict=flat))


def write(state: dict[str, Any], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_torch_saved_is_imported_and_trains_on(name: str, tmp_path: Path) -> None:
    _, model, optimizer = theirs(name.startswith("flat"))
    folder = write(LAYOUTS[name](copy.deepcopy(model), copy.deepcopy(optimizer)), tmp_path / "theirs")
    imported, _ = import_weights(folder, tmp_path / "ours", trust=True)

    def go_on(step: Step) -> None:
        step.restore(imported)
        for _ in range(2):
            step({"x": X})
        step.save(tmp_path / "kept")

    run("adam", torch.float64, go_on)
    expected, optimizers = made("adam", torch.float64)
    eager(expected, optimizers, 4)
    found = made("adam", torch.float64, seed=5)[0]
    ss.load_weights(found, tmp_path / "kept")
    assert differing(found, expected) == []


@pytest.mark.parametrize("name", MODELS)
def test_the_names_of_a_model_alone_are_as_they_were_saved(name: str, tmp_path: Path) -> None:
    net, model, _ = theirs()
    imported, _ = import_weights(write(MODELS[name](dict(model)), tmp_path / "theirs"), tmp_path / "ours", trust=True)
    found = made("adam", torch.float64, seed=5)[0]
    assert ss.load_weights(found, imported) == []
    assert differing(found, net) == []


def by_number(model: Any, _: Any) -> dict[str, Any]:
    net, optimizers = made("adam", torch.float64)
    eager(net, optimizers, 2)
    return {"model": model, "optimizer": optimizers[0].state_dict()}


REFUSED: dict[str, tuple[Made, str]] = {
    "by number": (by_number, r"by the numbers of parameters \(optimizer.state.0.*get_state_dict"),
    "two models": (
        lambda model, _: {"generator": model, "critic": model},
        r"has tensors under critic \(frozen, ...\) and generator \(frozen, ...\), and which are the model's is",
    ),
    "an optimizer of others": (
        lambda model, optimizer: {"model": {f"module.{n}x": x for n, x in model.items()}, "optim": optimizer},
        r"the optimizer's state of .*, but no tensor of that name",
    ),
    "an optimizer alone": (lambda _, optimizer: {"optim": optimizer}, r"the optimizer's state of .*, but no tensor"),
    "two optimizers": (
        lambda model, optimizer: {"model": model, "optim_a": optimizer, "optim_b": optimizer},
        r"has several optimizers of one parameter, under optim_a, optim_b",
    ),
    "rows": (
        lambda model, _: {"model": model, "optim": {"state": {"frozen": {"row": torch.ones(2)}}}},
        r"has row of frozen of shape \(2,\), but a state of the optimizer has the shape of its tensor, \(6,\)",
    ),
    "nothing": (lambda *_: {"epoch": 3}, r"has no tensors of a model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_is_not_clear_is_refused_at_the_import(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    _, model, optimizer = theirs()
    folder = write(make(copy.deepcopy(model), copy.deepcopy(optimizer)), tmp_path / "theirs")
    with pytest.raises(InputError, match=message):
        import_weights(folder, tmp_path / "ours", trust=True)
    assert not (tmp_path / "ours").exists()
