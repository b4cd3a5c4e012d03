"""The cache of captures: what hits, what misses when one thing changes, and what a damaged entry does."""

from __future__ import annotations

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
from superscaler.errors import InputError
from superscaler.frontend import capture as capturing
from superscaler.frontend.capture import Captured, capture
from superscaler.ir.text.model import print_model
from superscaler.models import BuiltModel, build
from superscaler.specs import reads
from superscaler.specs.user_file import load_file
from superscaler.store import cache
from tests.frontend import own
from tests.frontend.examples import Net
from tests.graphs import step_of
from tests.sweeps import slow

HELPER = "def double(x):\n    return x * 2\n"
MODEL = """
import torch
from torch import nn
import helper
from helper import double

SCALE = 1.0

def shift(x):
    return x + 1.0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.power = 1
        self.first = nn.Linear(4, 8)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.1)
        self.last, self.spare = nn.Linear(8, 4), nn.Linear(8, 4)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x):
        h = self.drop(self.act(self.first(x)))
        return (torch.tanh(self.last(h)) ** self.power + self.bias + double(shift(x)) * SCALE).mean()
"""
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


def net(folder: Path, old: str = "", new: str = "", file: str = "model.py") -> Any:
    """Return the module of the example, loaded anew, with a text of one file replaced."""
    texts = {"model.py": MODEL, "helper.py": HELPER}
    assert old in texts[file]
    texts[file] = texts[file].replace(old, new)
    for name, text in texts.items():
        (folder / name).write_text(text)
    sys.modules.pop("helper", None)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        torch.manual_seed(0)
        return load_file(folder / "model.py").Net()
    finally:
        sys.dont_write_bytecode = before


def same(one: Captured, other: Captured) -> bool:
    values = list(one.values) == list(other.values) and all(
        torch.equal(v, other.values[k]) and v.dtype == other.values[k].dtype for k, v in one.values.items()
    )
    batch = list(one.batch) == list(other.batch) and all(v is other.batch[k] for k, v in one.batch.items())
    return print_model(one.model) == print_model(other.model) and one.model == other.model and values and batch


def test_an_unchanged_model_hits_with_its_own_weights(tmp_path: Path, exports: list[nn.Module]) -> None:
    first = capture(net(tmp_path), (X,), cache="net")
    again = net(tmp_path)
    with torch.no_grad():
        again.first.weight.mul_(2)
    second = capture(again, (X * 2,), cache="net")
    assert len(exports) == 1
    assert second.seconds["export"] == 0.0
    assert second.values["first.weight"].data_ptr() == again.first.weight.data_ptr()
    assert same(second, capture(again, tuple(second.batch.values())))
    assert not torch.equal(first.values["first.weight"], second.values["first.weight"])


@pytest.mark.slow
def test_an_entry_has_one_row_of_a_mask_of_a_whole_batch(folder: Path, exports: list[nn.Module]) -> None:
    model = build("gpt3:size=tiny,seq=32,batch=64,attention=eager,device=meta")
    first, second = (capture(model.module, model.args, model.kwargs, check=False, cache="masks") for _ in range(2))
    assert len(exports) == 1
    masks = {n: x for n, x in first.values.items() if x.shape == (64, 1, 32, 32)}
    assert masks
    for name, mask in masks.items():
        assert torch.equal(second.values[name], mask)
        assert second.values[name].untyped_storage().nbytes() == 32 * 32 * mask.element_size()
    (entry,) = folder.iterdir()
    assert entry.stat().st_size < 32 * 32 * 64


# What changes -> a text of a file, or what is done to the module.
CHANGES: dict[str, tuple[str, str, str] | Callable[[Any], Any]] = {
    "a comment": ("SCALE =", "# a line more\nSCALE =", "model.py"),
    "a function of another file": ("x * 2", "x * 3", "helper.py"),
    "dropout": lambda m: setattr(m.drop, "p", 0.3),
    "activation": lambda m: setattr(m, "act", nn.GELU()),
    "the value of a buffer": lambda m: m.bias.fill_(0.5),
    "requires_grad": lambda m: m.first.weight.requires_grad_(False),
    "a shape": lambda m: (setattr(m, "first", nn.Linear(4, 6)), setattr(m, "last", nn.Linear(6, 4))),
    "a dtype": lambda m: m.register_buffer("bias", torch.zeros(4, dtype=torch.float64)),
    "tied weights": lambda m: setattr(m.last, "bias", m.spare.bias),
    "evaluation": lambda m: m.drop.eval(),
}


def changed(folder: Path, change: Any) -> nn.Module:
    if isinstance(change, tuple):
        return net(folder, *change)
    module = net(folder)
    change(module)
    return module


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


def test_what_changed_misses_once(tmp_path: Path, exports: list[nn.Module]) -> None:
    capture(net(tmp_path), (X,), cache="net")
    change = CHANGES["a function of another file"]
    found = changed(tmp_path, change)
    assert same(capture(found, (X,), cache="net"), capture(found, (X,)))
    capture(changed(tmp_path, change), (X,), cache="net")
    assert len(exports) == 3


def test_every_change_has_a_key_of_its_own(tmp_path: Path) -> None:
    def key_after(change: Any) -> str:
        module = changed(tmp_path, change)
        return key(lambda: capture(module, (X,), cache="net"))

    first, second = ([key_after(change) for change in (lambda m: None, *CHANGES.values())] for _ in range(2))
    assert first == second
    assert len(set(first)) == 1 + len(CHANGES)


def doubled(x: Tensor, inplace: bool = False) -> Tensor:
    return x * 2


def plain_product(self: nn.Linear, x: Tensor) -> Tensor:
    return x @ self.weight.t()


def test_a_function_in_the_place_of_torchs_misses(
    tmp_path: Path, exports: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file changes: what runs by a name of torch's does."""
    targets = []
    for place, name, value in ((F, "relu", None), (F, "relu", doubled), (nn.Linear, "forward", plain_product)):
        if value is not None:
            monkeypatch.setattr(place, name, value)
        for _ in range(2):
            targets.append({op.target for op in capture(net(tmp_path), (X,), cache="net").model.ops})
    assert len(exports) == 3
    assert targets[0] == targets[1] != targets[2] == targets[3] != targets[4] == targets[5]


def test_a_name_stands_for_what_is_in_no_file(tmp_path: Path, exports: list[nn.Module]) -> None:
    module = net(tmp_path)
    capture(module, (X,), cache="net")
    module.power = 2
    assert "aten.pow.Tensor_Scalar" in {op.target for op in capture(module, (X,), cache="squared").model.ops}
    assert len(exports) == 2
    with pytest.raises(InputError, match=r"cache=True is not the name of a model.*cache='mine'"):
        ss.capture(module, (X,), optimizer=_groups(module, 1), cache=True)  # type: ignore[arg-type]


def _groups(module: nn.Module, first: int) -> torch.optim.Optimizer:
    found = list(module.parameters())
    return torch.optim.SGD([{"params": found[:first]}, {"params": found[first:], "weight_decay": 0.1}], lr=0.1)


def _with_default(module: nn.Module) -> Captured:
    torch.set_default_dtype(torch.float64)
    try:
        return capture(module, (X,), cache="net")
    finally:
        torch.set_default_dtype(torch.float32)


CALLS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: capture(m, (X,), cache="net"),
    "other groups": lambda m: capture(m, (X,), optimizer=_groups(m, 1), cache="net"),
    "batch": lambda m: capture(m, (X[:1],), cache="net"),
    "input dtype": lambda m: capture(m.double(), (X.double(),), cache="net"),
    "autocast": lambda m: capture(m, (X,), autocast="bf16", cache="net"),
    "optimizer": lambda m: capture(m, (X,), optimizer=torch.optim.Adam(m.parameters()), cache="net"),
    "groups": lambda m: capture(m, (X,), optimizer=_groups(m, 2), cache="net"),
    "default dtype": _with_default,
}


def test_other_arguments_have_other_keys(tmp_path: Path) -> None:
    found = {name: key(lambda call=call: call(net(tmp_path))) for name, call in CALLS.items()}  # type: ignore[misc]
    assert len(set(found.values())) == len(CALLS), found


def test_options_of_the_optimizer_and_the_scaler_are_those_at_hand(tmp_path: Path, exports: list[nn.Module]) -> None:
    for lr in (0.1, 0.2):
        module = net(tmp_path)
        scaler = torch.amp.GradScaler("cpu", init_scale=lr * 1024)
        optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
        found = capture(module, (X,), optimizer=optimizer, autocast="fp16", scaler=scaler, cache="net")
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
        found = [capture(module, (X,), kwargs, cache="net") for kwargs in given]
    assert len(exports) == len(given)
    assert same(found[-1], capture(module, (X,), given[-1]))


def test_code_that_is_loaded_in_a_forward_is_not_kept(tmp_path: Path, exports: list[nn.Module]) -> None:
    (tmp_path / "late.py").write_text("")
    sys.modules.pop("late", None)
    forward = "def forward(self, x):"
    late = f"import sys\n        sys.path.insert(0, {str(tmp_path)!r})\n        import late"
    edit = (forward, f"{forward}\n        {late}")
    for count in (0, 1):
        capture(net(tmp_path, *edit), (X,), cache="net")
        assert cache.usage()[0] == count
    assert len(exports) == 2


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data.replace(b"last", b"lost")])
def test_a_damaged_entry_is_written_again(
    tmp_path: Path, folder: Path, exports: list[nn.Module], damage: Callable[[bytes], bytes]
) -> None:
    capture(net(tmp_path), (X,), cache="net")
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    capture(net(tmp_path), (X,), cache="net")
    capture(net(tmp_path), (X,), cache="net")
    assert len(exports) == 2
    assert [f.name for f in folder.iterdir()] == [file.name]


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exports: list[nn.Module]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        capture(net(tmp_path), (X,), cache="net")
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
    "dropout and buffers": lambda: (Net(normed), torch.randn(4, 8)),
}
NAMED = ["gpt2:size=tiny,dropout=0.1", "swin:size=tiny", "gpt2:size=tiny,device=meta", "mixtral:size=tiny"]


@pytest.mark.parametrize("spec", [*SMALL, *slow(*NAMED)])
def test_a_plan_of_a_cached_capture_is_verified(spec: str, exports: list[nn.Module]) -> None:
    graphs, counts, batch = [], [], None
    for _ in range(2):
        torch.manual_seed(0)
        if spec in SMALL:
            module, x = SMALL[spec]()
            graphs.append(step_of(module, x, cache=spec))
        else:
            built = build(spec)
            graphs.append(step_of(built.module, *built.args, kwargs=built.kwargs, cache=spec))
            batch = built.make_batch(0) if built.make_batch else None
        counts.append(len(exports))
    first, second = (g.captured for g in graphs)
    assert print_model(first.model) == print_model(second.model)
    assert list(first.values) == list(second.values)
    assert all(torch.equal(v, second.values[k]) for k, v in first.values.items())
    assert ss.compile(graphs[1], "data_parallel", "local:2").verify(batch=batch)["equal"]
    assert counts[0] == counts[1] > 0


@pytest.mark.dist
def test_processes_share_the_cache(tmp_path: Path, folder: Path) -> None:
    net(tmp_path)
    program = textwrap.dedent("""
        import sys, torch, superscaler as ss
        sys.path.insert(0, sys.argv[1])
        import model
        module = model.Net()
        optimizer = torch.optim.SGD(module.parameters())
        found = ss.capture(module, (torch.ones(2, 4),), optimizer=optimizer, cache="net")
        print(found.captured.seconds["export"] > 0)
    """)
    command = [sys.executable, "-c", program, str(tmp_path)]
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
    # Not this process, which has loaded tests that key files by their contents.
    command = [sys.executable, "-c", program]
    seeds = ({**os.environ, "PYTHONHASHSEED": seed} for seed in "12")
    one, other = (subprocess.check_output(command, env=seed, text=True, timeout=120).split() for seed in seeds)
    assert one == other
    assert len(set(one)) == 4


READING = """
import json, os, socket, time
from datetime import datetime
from pathlib import Path
import torch
from torch import nn
from scales import FROM_HELPER

HERE = Path(__file__).parent
TOP = json.loads((HERE / "top.json").read_text())

class Net(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = scale

    def forward(self, x):
        return (self.linear(x) * self.scale).square().mean() + (FORWARD)

def build():
    torch.manual_seed(0)
    return Net(BUILD), (torch.ones(2, 4),)
"""
HELPED = """
import json
from pathlib import Path
FROM_HELPER = json.loads((Path(__file__).parent / "helper.json").read_text())
"""


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BuiltModel]:
    """Return what builds a model whose scale is an expression, as a new process does."""
    for name in ("top", "late", "helper"):
        (tmp_path / f"{name}.json").write_text("1.0")
    (tmp_path / "scales.py").write_text(HELPED)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(text: str, forward: str = "0") -> BuiltModel:
        (tmp_path / "reading.py").write_text(READING.replace("BUILD", text).replace("FORWARD", forward))
        sys.modules.pop("scales", None)
        monkeypatch.setattr(reads, "_ALL", reads.Reads())
        return build(f"{tmp_path / 'reading.py'}:build")

    return make


def scale_of(built: BuiltModel) -> float:
    """Return the number by which a captured model multiplies."""
    graph = step_of(built.module, *built.args, cache=built.cache)
    (op,) = [op for op in graph.model.ops if op.target == "aten.mul.Tensor"]
    return float(op.args[1])


def test_a_model_is_captured_again_when_what_its_file_read_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Callable[..., BuiltModel], exports: list[nn.Module]
) -> None:
    monkeypatch.setenv("SCALE", "1.0")
    text = "TOP * FROM_HELPER * float(os.environ['SCALE'])"
    found = [scale_of(built(text)) for _ in range(2)]
    for name in ("top", "helper"):
        (tmp_path / f"{name}.json").write_text("3.0")
        found.append(scale_of(built(text)))
    monkeypatch.setenv("SCALE", "2.0")
    found.append(scale_of(built(text)))
    assert (found, len(exports)) == ([1.0, 1.0, 3.0, 9.0, 18.0], 4)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("TOP", "top.json"),
        ("FROM_HELPER", "helper.json"),
        ("json.loads((HERE / 'late.json').read_bytes())", "late.json"),
        ("float(os.read(os.open(HERE / 'late.json', os.O_RDONLY), 3))", "late.json"),
        ("float(os.environ['SCALE'])", "SCALE"),
        ("float(os.getenv('SCALE', 1))", "SCALE"),
        ("float(os.environ.get('SCALE') or 1)", "SCALE"),
        ("float('SCALE' in os.environ) * 3", "SCALE"),
    ],
)
def test_what_the_file_of_a_model_reads_is_part_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Callable[..., BuiltModel], text: str, changes: str
) -> None:
    names = []
    for value in ("1.0", "1.0", "2.0"):
        if changes == "SCALE":
            monkeypatch.setenv("SCALE", value)
        else:
            (tmp_path / changes).write_text(value)
        names.append(built(text).cache)
    assert None not in names
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    "text",
    [
        "len(os.listdir(HERE))", "len(list(HERE.glob('*.json')))", "len(dict(os.environ))", "time.time()",
        "datetime.now().year", "1 + os.system('true')", "socket.getaddrinfo('localhost', 80)[0][4][1]",
    ],
)  # fmt: skip
def test_what_cannot_be_compared_gives_no_name(built: Callable[..., BuiltModel], text: str) -> None:
    assert built(text).cache is None


@pytest.mark.parametrize("forward", ["float(os.environ.get('SCALE') or 1)", "float((HERE / 'late.json').read_text())"])
def test_what_a_forward_reads_is_not_kept(built: Callable[..., BuiltModel], forward: str) -> None:
    scale_of(built("TOP", forward))
    assert cache.usage()[0] == 0
