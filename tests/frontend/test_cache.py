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
from torch import nn

import superscaler as ss
from superscaler import cache
from superscaler.frontend import capture as capturing
from superscaler.frontend.capture import Captured, capture
from superscaler.frontend.fingerprint import fingerprint
from superscaler.ir.text import print_model
from superscaler.models import build
from superscaler.usercode import load_file
from tests.frontend import own

HELPER = "def double(x):\n    return x * 2\n"
MODEL = """
import torch
from torch import nn
import helper
from helper import double

SCALE = 1.0

def shift(x):
    return x + 1.0

class Config:
    def __init__(self):
        self.power = 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.first = nn.Linear(4, 8)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(8, 4)
        self.register_buffer("bias", torch.zeros(4))
        self.gate = torch.tanh
        self.hidden = lambda x: x * 3

    def forward(self, x):
        h = self.drop(self.act(self.first(x)))
        return (self.gate(self.last(h)) ** self.config.power + self.bias + double(shift(x)) * SCALE).mean()
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
    first = capture(net(tmp_path), (X,), cache=True)
    again = net(tmp_path)
    with torch.no_grad():
        again.first.weight.mul_(2)
    second = capture(again, (X * 2,), cache=True)
    assert len(exports) == 1
    assert second.seconds["export"] == 0.0
    assert second.values["first.weight"].data_ptr() == again.first.weight.data_ptr()
    assert same(second, capture(again, tuple(second.batch.values())))
    assert not torch.equal(first.values["first.weight"], second.values["first.weight"])


# What changes -> how: a text of a file, or what is done to the module.
EDITS = {
    "a line of forward": ("self.last(h)", "self.last(h * 1.5)", "model.py"),
    "a function of the same file": ("x + 1.0", "x + 2.0", "model.py"),
    "a function of another file": ("x * 2", "x * 3", "helper.py"),
    "a global of the file": ("SCALE = 1.0", "SCALE = 2.0", "model.py"),
    "a dropout rate": ("Dropout(0.1)", "Dropout(0.2)", "model.py"),
    "a comment": ("SCALE", "# a line more\nSCALE", "model.py"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_changed_file_misses(tmp_path: Path, exports: list[nn.Module], edit: tuple[str, str, str]) -> None:
    capture(net(tmp_path), (X,), cache=True)
    changed = net(tmp_path, *edit)
    assert same(capture(changed, (X,), cache=True), capture(changed, (X,)))
    assert len(exports) == 3
    capture(net(tmp_path, *edit), (X,), cache=True)
    assert len(exports) == 3


def _forward(module: nn.Module) -> None:
    module.forward = lambda x: module.last(module.act(module.first(x))).sum()  # type: ignore[method-assign]


STATES: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda m: setattr(m.drop, "p", 0.3),
    "activation": lambda m: setattr(m, "act", nn.GELU()),
    "a function that it holds": lambda m: setattr(m, "gate", torch.sigmoid),
    "a lambda that it holds": lambda m: setattr(m, "gate", lambda x: x * 2),
    "a value of its config": lambda m: setattr(m.config, "power", 2),
    "the value of a buffer": lambda m: m.bias.fill_(0.5),
    "requires_grad": lambda m: m.first.weight.requires_grad_(False),
    "a shape": lambda m: (setattr(m, "first", nn.Linear(4, 6)), setattr(m, "last", nn.Linear(6, 4))),
    "a dtype": lambda m: m.register_buffer("bias", torch.zeros(4, dtype=torch.float64)),
    "tied weights": lambda m: setattr(m.last, "bias", m.bias_of_last),
    "evaluation": lambda m: m.drop.eval(),
    "a hook": lambda m: m.first.register_forward_hook(lambda module, args, output: output * 2),
    "its forward": _forward,
    "a constant of a function": lambda m: setattr(sys.modules["helper"].double, "__defaults__", ()),
    "a global of the file": lambda m: m.forward.__globals__.update(SCALE=3.0),
    "a function of another file": lambda m: setattr(sys.modules[type(m).__module__], "double", lambda x: x * 5),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_a_changed_module_misses(tmp_path: Path, exports: list[nn.Module], change: Callable[[Any], Any]) -> None:
    def make() -> Any:
        module = net(tmp_path)
        module.bias_of_last = nn.Parameter(torch.zeros(4))
        return module

    capture(make(), (X,), cache=True)
    changed = make()
    change(changed)
    assert same(capture(changed, (X,), cache=True), capture(changed, (X,)))
    assert len(exports) == 3


CALLS: dict[str, Callable[[Any], Any]] = {
    "batch": lambda m: capture(m, (X[:1],), cache=True),
    "input dtype": lambda m: capture(m.double(), (X.double(),), cache=True),
    "autocast": lambda m: capture(m, (X,), autocast="bf16", cache=True),
    "optimizer": lambda m: capture(m, (X,), optimizer=torch.optim.Adam(m.parameters()), cache=True),
    "decay": lambda m: capture(m, (X,), optimizer=_groups(m, 2), cache=True),
    "default dtype": lambda m: _with_default(m),
}


def _groups(module: nn.Module, first: int) -> torch.optim.Optimizer:
    found = list(module.parameters())
    return torch.optim.SGD([{"params": found[:first]}, {"params": found[first:], "weight_decay": 0.1}], lr=0.1)


def _with_default(module: nn.Module) -> Captured:
    torch.set_default_dtype(torch.float64)
    try:
        return capture(module, (X,), cache=True)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_other_arguments_miss(tmp_path: Path, exports: list[nn.Module], call: Callable[[Any], Any]) -> None:
    capture(net(tmp_path), (X,), optimizer=_groups(module := net(tmp_path), 1) and None, cache=True)
    capture(module, (X,), optimizer=_groups(module, 1), cache=True)
    assert len(exports) == 2
    call(net(tmp_path))
    assert len(exports) == 3


def test_options_of_the_optimizer_and_the_scaler_are_those_at_hand(tmp_path: Path, exports: list[nn.Module]) -> None:
    for lr in (0.1, 0.2):
        module = net(tmp_path)
        scaler = torch.amp.GradScaler("cpu", init_scale=lr * 1024)
        optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
        found = capture(module, (X,), optimizer=optimizer, autocast="fp16", scaler=scaler, cache=True)
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
    module, given = Options(), [{}, {"flip": True}, {"powers": (1,)}, {"powers": (1, 2)}, {"powers": (2,)}]
    for _ in range(2):
        found = [capture(module, (X,), kwargs, cache=True) for kwargs in given]
    assert len(exports) == len(given)
    for one, kwargs in zip(found, given, strict=True):
        assert same(one, capture(module, (X,), kwargs))


def test_what_hugging_face_models_find_by_name_counts() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def key() -> str | None:
        return fingerprint(built.module, built.args, built.kwargs)

    built = build("gpt2:size=tiny")
    found = [key(), key()]
    built.module.config._attn_implementation = "eager"  # type: ignore[union-attr]
    found.append(key())
    ALL_ATTENTION_FUNCTIONS.register("mine", lambda *_: None)
    try:
        found.append(key())
        ALL_ATTENTION_FUNCTIONS.register("mine", lambda *_: 0)
        found.append(key())
    finally:
        type(ALL_ATTENTION_FUNCTIONS)._global_mapping.pop("mine")
    assert found[0] == found[1] is not None
    assert len(set(found)) == 4


LAZY = {
    "of a library": ("def forward(self, x):", "def forward(self, x):\n        import json", 1),
    "for types": ("import torch", "import torch\nif torch.TYPE_CHECKING:\n    import unloaded", 1),
    "of what is beside": ("def forward(self, x):", "def forward(self, x):\n        import unloaded", 0),
}


@pytest.mark.parametrize("edit", LAZY.values(), ids=LAZY)
def test_imports_that_did_not_run_yet(tmp_path: Path, edit: tuple[str, str, int]) -> None:
    (tmp_path / "unloaded.py").write_text("")
    assert (fingerprint(net(tmp_path, *edit[:2]), (X,), {}) is not None) == edit[2]


def test_what_is_not_seen_is_not_kept(tmp_path: Path, exports: list[nn.Module]) -> None:
    module = net(tmp_path)
    module.source = (n for n in range(3))
    capture(module, (X,), cache=True)
    capture(module, (X,), cache=True)
    capture(net(tmp_path, "self.last(h)", "self.last(h * len(__import__('os').environ))"), (X,), cache=True)
    assert len(exports) == 3
    assert cache.usage() == (0, 0)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:100], lambda data: b"", lambda data: data.replace(b"op ", b"po ")]
)
def test_a_damaged_entry_is_written_again(
    tmp_path: Path, folder: Path, exports: list[nn.Module], damage: Callable[[bytes], bytes]
) -> None:
    capture(net(tmp_path), (X,), cache=True)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    capture(net(tmp_path), (X,), cache=True)
    capture(net(tmp_path), (X,), cache=True)
    assert len(exports) == 2
    assert [f.name for f in folder.iterdir()] == [file.name]


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exports: list[nn.Module]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        capture(net(tmp_path), (X,), cache=True)
    assert len(exports) == 2
    assert cache.usage() == (0, 0)


def test_the_cache_is_bounded_and_keeps_what_was_used_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "ENTRIES", 3)
    for k, key in enumerate("abc"):
        cache.write(key, {"part": key.encode()})
        os.utime(folder / f"{key}.zip", (k, k))
    assert cache.read("a", "part") == [b"a"]
    cache.write("d", {"part": b"d"})
    assert sorted(f.stem for f in folder.iterdir()) == ["a", "c", "d"]
    monkeypatch.setattr(cache, "BYTES", 1000)
    cache.write("e", {"part": bytes(800)})
    assert [f.stem for f in folder.iterdir()] == ["e"]
    cache.write("f", {"part": bytes(1001)})
    assert [f.stem for f in folder.iterdir()] == ["e"]


@pytest.mark.parametrize(
    "spec", ["gpt2:size=tiny,dropout=0.1", "gpt2:size=tiny,device=meta", "mixtral:size=tiny", "swin:size=tiny"]
)
def test_a_plan_of_a_cached_capture_is_verified(spec: str, exports: list[nn.Module]) -> None:
    graphs = []
    for _ in range(2):
        built = build(spec)
        graphs.append(
            ss.capture(
                built.module,
                built.args,
                built.kwargs,
                cache=True,
                optimizer=torch.optim.SGD(built.module.parameters(), lr=1e-2),
            )
        )
    first, second = (g.captured for g in graphs)
    names = [[(n.name, n.target) for n in c.exported.graph.nodes if "aten" in str(n.target)] for c in (first, second)]
    assert names[0] == names[1]
    assert print_model(first.model) == print_model(second.model)
    assert list(first.values) == list(second.values)
    assert all(torch.equal(v, second.values[k]) for k, v in first.values.items())
    batch = built.make_batch(0) if built.make_batch else None
    assert ss.compile(graphs[1], "data_parallel", "local:2").verify(batch=batch)["equal"]
    assert len(exports) == 1


def test_registered_operators_and_segments_come_back(exports: list[nn.Module]) -> None:
    x = torch.linspace(-1, 1, 4 * 6 * 8).reshape(4, 6, 8)
    graphs = [
        ss.capture(m := own.Block(), (x,), cache=True, optimizer=torch.optim.SGD(m.parameters(), lr=1e-2))
        for _ in range(2)
    ]
    assert len(exports) == 1
    assert "ss_own.rms_norm.default" in {op.target for op in graphs[1].model.ops}
    assert ss.compile(graphs[1], "data_parallel", "local:2").verify()["equal"]


def test_a_damaged_program_is_exported_and_kept_again(tmp_path: Path, folder: Path, exports: list[nn.Module]) -> None:
    capture(net(tmp_path), (X,), cache=True)
    (file,) = folder.iterdir()
    data = file.read_bytes()
    at = data.rindex(b"program.pt2", 0, data.rindex(b"program.pt2")) + 100
    file.write_bytes(data[:at] + bytes(20) + data[at + 20 :])
    assert capture(net(tmp_path), (X,), cache=True).exported.graph_signature.user_inputs == ("x",)
    assert len(exports) == 2
    assert not file.exists()
    for _ in range(2):
        assert capture(net(tmp_path), (X,), cache=True).exported.graph_signature.user_inputs == ("x",)
    assert len(exports) == 3


def test_a_program_that_was_removed_is_exported_again(tmp_path: Path, folder: Path, exports: list[nn.Module]) -> None:
    capture(net(tmp_path), (X,), cache=True)
    found = capture(net(tmp_path), (X,), cache=True)
    for file in folder.iterdir():
        file.unlink()
    assert found.exported.graph_signature.user_inputs == ("x",)
    assert len(exports) == 2


def test_classes_made_at_run_time_count(tmp_path: Path, exports: list[nn.Module]) -> None:
    for number in (1.0, 1.0, 2.0):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4))
        made = {"forward": lambda self, x, n=number: nn.Sequential.forward(self, x).mean() * n}
        module.__class__ = type("Sequential", (nn.Sequential,), {**made, "__module__": nn.Sequential.__module__})
        assert same(capture(module, (X,), cache=True), capture(module, (X,)))
    assert len(exports) == 5
    traced = [torch.fx.symbolic_trace(net(tmp_path, *edit)) for edit in ((), (), ("x + 1.0", "x + 2.0", "model.py"))]
    keys = [fingerprint(module, (X,), {}) for module in traced]
    assert keys[0] is None or (keys[0] == keys[1] != keys[2])


def test_processes_share_the_cache(tmp_path: Path, folder: Path) -> None:
    net(tmp_path)
    program = textwrap.dedent("""
        import sys, torch, superscaler as ss
        sys.path.insert(0, sys.argv[1])
        import model
        module = model.Net()
        optimizer = torch.optim.SGD(module.parameters())
        found = ss.capture(module, (torch.ones(2, 4),), optimizer=optimizer, cache=True)
        print(found.captured.seconds["export"] > 0)
    """)
    command = [sys.executable, "-c", program, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate()[0].strip() for p in both] == ["True", "True"]
    assert len(list(folder.iterdir())) == 1
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_hashes_are_the_same_in_every_process() -> None:
    program = textwrap.dedent("""
        from superscaler.frontend.fingerprint import fingerprint
        from superscaler.models import build
        for name in ("gpt2", "mixtral", "swin", "t5"):
            built = build(name + ":size=tiny")
            print(fingerprint(built.module, built.args, built.kwargs))
    """)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in "12"
    ]
    one, other = (run.communicate()[0].split() for run in runs)
    assert one == other
    assert len(set(one) - {"None"}) == 4
