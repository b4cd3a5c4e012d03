"""The cache of captures: what hits, what misses when one thing changes, and what a damaged entry does."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.frontend import capture as capturing
from superscaler.frontend.base.captured import Captured
from superscaler.frontend.capture import capture
from superscaler.ir.text.model import print_model
from superscaler.models import build
from superscaler.plan import capture_named
from superscaler.store import cache
from tests.frontend import examples, own
from tests.helpers.graphs import step_of
from tests.helpers.sweeps import slow


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.1)
        self.last, self.spare = nn.Linear(8, 4), nn.Linear(8, 4)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.act(self.first(x)))
        return (torch.tanh(self.last(h)) + self.bias + x * 2).mean()


def net() -> Any:
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache.folder()


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return the modules that were exported since."""
    found: list[nn.Module] = []

    def export(module: nn.Module, *rest: Any) -> Any:
        found.append(module)
        return original(module, *rest)

    original = capturing.export
    monkeypatch.setattr(capturing, "export", export)
    return found


def same(one: Captured, other: Captured) -> bool:
    values = list(one.values) == list(other.values) and all(
        torch.equal(v, other.values[k]) and v.dtype == other.values[k].dtype for k, v in one.values.items()
    )
    batch = list(one.batch) == list(other.batch) and all(v is other.batch[k] for k, v in one.batch.items())
    return print_model(one.model) == print_model(other.model) and one.model == other.model and values and batch


def test_an_unchanged_model_hits_with_its_own_weights(tmp_path: Path, exports: list[nn.Module]) -> None:
    first = capture(net(), (X,), name="net")
    again = net()
    with torch.no_grad():
        again.first.weight.mul_(2)
    second = capture(again, (X * 2,), name="net")
    assert len(exports) == 1
    assert second.seconds["export"] == 0.0
    assert second.values["first.weight"].data_ptr() == again.first.weight.data_ptr()
    assert same(second, capture(again, tuple(second.batch.values())))
    assert not torch.equal(first.values["first.weight"], second.values["first.weight"])


@pytest.mark.slow
def test_an_entry_has_one_row_of_a_mask_of_a_whole_batch(folder: Path, exports: list[nn.Module]) -> None:
    model = build("gpt3:size=tiny,seq=32,batch=64,attention=eager,device=meta")
    first, second = (capture(model.module, model.args, model.kwargs, check=False, name="masks") for _ in range(2))
    assert len(exports) == 1
    masks = {n: x for n, x in first.values.items() if x.shape == (64, 1, 32, 32)}
    assert masks
    for name, mask in masks.items():
        assert torch.equal(second.values[name], mask)
        assert second.values[name].untyped_storage().nbytes() == 32 * 32 * mask.element_size()
    (entry,) = folder.iterdir()
    assert entry.stat().st_size < 32 * 32 * 64


class Looked(Exception):
    """What a capture is looked up by."""


def key(call: Callable[[], object]) -> str:
    """Return the key by which a capture looks for itself in the cache, without capturing."""

    def load(key: str, *_: object) -> None:
        raise Looked(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "load", load)
        with pytest.raises(Looked) as looked:
            call()
    return str(looked.value)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "dropout": lambda m: setattr(m.drop, "p", 0.3),
    "activation": lambda m: setattr(m, "act", nn.GELU()),
    "the value of a buffer": lambda m: m.bias.fill_(0.5),
    "requires_grad": lambda m: m.first.weight.requires_grad_(False),
    "a shape": lambda m: (setattr(m, "first", nn.Linear(4, 6)), setattr(m, "last", nn.Linear(6, 4))),
    "a dtype": lambda m: m.register_buffer("bias", torch.zeros(4, dtype=torch.float64)),
    "tied weights": lambda m: setattr(m.last, "bias", m.spare.bias),
    "evaluation": lambda m: m.drop.eval(),
}


def test_every_change_has_a_key_of_its_own() -> None:
    def key_after(change: Callable[[Any], Any]) -> str:
        module = net()
        change(module)
        return key(lambda: capture(module, (X,), name="net"))

    first, second = ([key_after(change) for change in CHANGES.values()] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(CHANGES)


def test_a_module_without_a_name_is_never_read_from_disk(exports: list[nn.Module]) -> None:
    """Its code may read anything. The name is that of a model of the library, and no argument of `ss.capture`."""
    module = net()
    for count in (1, 2):
        step_of(module, X)
        assert len(exports) == count
    assert cache.usage() == (0, 0)
    assert "cache" not in inspect.signature(ss.capture).parameters


def _groups(module: nn.Module, first: int) -> torch.optim.Optimizer:
    found = list(module.parameters())
    return torch.optim.SGD([{"params": found[:first]}, {"params": found[first:], "weight_decay": 0.1}], lr=0.1)


def _with_default(module: nn.Module) -> Captured:
    torch.set_default_dtype(torch.float64)
    try:
        return capture(module, (X,), name="net")
    finally:
        torch.set_default_dtype(torch.float32)


CALLS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: capture(m, (X,), name="net"),
    "other groups": lambda m: capture(m, (X,), optimizer=_groups(m, 1), name="net"),
    "batch": lambda m: capture(m, (X[:1],), name="net"),
    "input dtype": lambda m: capture(m.double(), (X.double(),), name="net"),
    "autocast": lambda m: capture(m, (X,), autocast="bf16", name="net"),
    "optimizer": lambda m: capture(m, (X,), optimizer=torch.optim.Adam(m.parameters()), name="net"),
    "groups": lambda m: capture(m, (X,), optimizer=_groups(m, 2), name="net"),
    "default dtype": _with_default,
}


def test_other_arguments_have_other_keys(tmp_path: Path) -> None:
    found = {name: key(lambda call=call: call(net())) for name, call in CALLS.items()}  # type: ignore[misc]
    assert len(set(found.values())) == len(CALLS), found


def test_options_of_the_optimizer_and_the_scaler_are_those_at_hand(tmp_path: Path, exports: list[nn.Module]) -> None:
    for lr in (0.1, 0.2):
        module = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=lr * 1024)
        optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
        found = capture(module, (X,), optimizer=optimizer, autocast="fp16", scaler=scaler, name="net")
        assert dict(found.model.optimizer.groups[0])["lr"] == lr
        assert dict(found.model.optimizer.scaler)["scale"] == lr * 1024
    assert len(exports) == 1


class Options(nn.Module):
    """Its inputs are more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, flip: bool = False, powers: tuple[int, ...] = (1,)) -> torch.Tensor:
        y = self.linear(-x if flip else x)
        return sum((y**p for p in powers), torch.zeros(())).mean()


def test_values_that_are_no_tensors_count(exports: list[nn.Module]) -> None:
    module, given = Options(), [{}, {"flip": True}, {"powers": (1, 2)}, {"powers": (2,)}]
    for _ in range(2):
        found = [capture(module, (X,), kwargs, name="net") for kwargs in given]
    assert len(exports) == len(given)
    assert same(found[-1], capture(module, (X,), given[-1]))


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data.replace(b"last", b"lost")])
def test_a_damaged_entry_is_written_again(
    tmp_path: Path, folder: Path, exports: list[nn.Module], damage: Callable[[bytes], bytes]
) -> None:
    capture(net(), (X,), name="net")
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    capture(net(), (X,), name="net")
    capture(net(), (X,), name="net")
    assert len(exports) == 2
    assert [f.name for f in folder.iterdir()] == [file.name]


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exports: list[nn.Module]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        capture(net(), (X,), name="net")
    assert len(exports) == 2
    assert cache.usage() == (0, 0)


def test_the_cache_is_bounded_and_keeps_what_was_used_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "ENTRIES", 3)
    for k, key in enumerate("abc"):
        cache.write(key, key.encode())
        os.utime(folder / key, (k, k))
    (folder / "old.tmp").touch()
    os.utime(folder / "old.tmp", (0, 0))
    (folder / "new.tmp").touch()
    assert cache.read("a") == b"a"
    cache.write("d", b"d")
    assert sorted(f.name for f in folder.iterdir()) == ["a", "c", "d", "new.tmp"]
    assert cache.usage() == (3, 3 * (32 + 1))
    (folder / "new.tmp").unlink()
    monkeypatch.setattr(cache, "BYTES", 1000)
    cache.write("e", bytes(950))
    assert [f.name for f in folder.iterdir()] == ["e"]
    cache.write("f", bytes(1001))
    assert [f.name for f in folder.iterdir()] == ["e"]


def normed(m: Any, h: Tensor) -> Tensor:
    return F.dropout(m.norm(h * m.table), 0.1) + torch.linspace(0, 1, 8)


SMALL: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "operators and segments": lambda: (own.Block(), torch.linspace(-1, 1, 4 * 6 * 8).reshape(4, 6, 8)),
    "dropout and buffers": lambda: (examples.Net(normed), torch.randn(4, 8)),
}
NAMED = ["gpt2:size=tiny,dropout=0.1", "swin:size=tiny", "gpt2:size=tiny,device=meta", "mixtral:size=tiny"]


def named(name: str, module: nn.Module, args: Any, kwargs: Any) -> ss.Graph:
    return capture_named(name, module, args, kwargs, torch.optim.SGD(module.parameters(), lr=0.1))


@pytest.mark.parametrize("spec", [*SMALL, *slow(*NAMED)])
def test_a_plan_of_a_cached_capture_is_verified(spec: str, exports: list[nn.Module]) -> None:
    graphs, counts, batch = [], [], None
    for _ in range(2):
        torch.manual_seed(0)
        if spec in SMALL:
            module, x = SMALL[spec]()
            graphs.append(named(spec, module, (x,), {}))
        else:
            built = build(spec)
            graphs.append(named(spec, built.module, built.args, built.kwargs))
            batch = built.make_batch(0) if built.make_batch else None
        counts.append(len(exports))
    first, second = (g.captured for g in graphs)
    assert print_model(first.model) == print_model(second.model)
    assert list(first.values) == list(second.values)
    assert all(torch.equal(v, second.values[k]) for k, v in first.values.items())
    assert ss.compile(graphs[1], "data_parallel", "local:2").verify(batch=batch)["equal"]
    assert counts[0] == counts[1] > 0


@pytest.mark.dist
def test_processes_share_the_cache(folder: Path) -> None:
    program = textwrap.dedent("""
        import torch
        from superscaler.frontend.capture import capture
        from superscaler.models import build
        built = build("mlp:layers=1,hidden=8,inputs=4,classes=4")
        print(capture(built.module, built.args, built.kwargs, name="mlp").seconds["export"] > 0)
    """)
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate()[0].strip() for p in both] == ["True", "True"]
    assert len(list(folder.iterdir())) == 1
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.mark.slow
def test_keys_are_the_same_in_every_process() -> None:
    program = textwrap.dedent("""
        from superscaler.frontend.capture_cache import key_of
        from superscaler.models import build
        for name in ("gpt2", "mixtral", "swin", "t5"):
            built = build(name + ":size=tiny")
            print(key_of(name, built.module, (built.args, built.kwargs)))
    """)
    command = [sys.executable, "-c", program]
    seeds = ({**os.environ, "PYTHONHASHSEED": seed} for seed in "12")
    one, other = (subprocess.check_output(command, env=seed, text=True, timeout=120).split() for seed in seeds)
    assert one == other
    assert len(set(one)) == 4
