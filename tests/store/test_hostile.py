"""Checkpoints and weights that were damaged, or made to harm: one line names the file, and nothing else happens."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import superscaler as ss
from superscaler.cli.main import main
from superscaler.errors import InputError
from superscaler.runtime.step import Step
from superscaler.store.checkpoint import CheckpointHead
from superscaler.store.folder import check_types, digest
from superscaler.store.pieces import covers
from tests.faults.damaged import at, misfits
from tests.helpers.ran import on_ranks

SHARD, NAME = "rank-00000.safetensors", "step-00000001"
MANIFEST = f"{NAME}/manifest.json"
Change = Callable[[Path], object]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).square().sum()


@pytest.fixture(scope="module")
def step() -> Step:
    """Return a step of one rank, which has taken one."""
    torch.manual_seed(0)
    module = Net()
    graph = ss.capture(module, (torch.randn(2, 4),), optimizer=torch.optim.AdamW(module.parameters(), lr=0.1))
    (made,) = on_ranks(ss.compile(graph, "single", "local:1"), lambda step: step)
    made({"x": torch.ones(2, 4)})
    return made


@pytest.fixture(scope="module")
def original(step: Step, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "kept"
    step.save(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def kept(original: Path, place: Path) -> Path:
    return Path(shutil.copytree(original, place / "kept"))


def states(step: Step) -> list[Tensor]:
    assert step.state.updates.optimizer is not None
    found = [s for weight in step.state.weights.values() for s in step.state.updates.optimizer.state[weight].values()]
    return [x.detach().clone() for x in (*step.state.weights.values(), *found, torch.tensor(step.state.steps))]


def tree(folder: Path) -> dict[str, Any]:
    """Return all that is in a folder, without following links."""
    return {
        str(p): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else "" for p in folder.rglob("*")
    }


def binary(change: Callable[[bytes], bytes]) -> Change:
    return lambda file: file.write_bytes(change(file.read_bytes()))


# Manifests.


def edited(change: Callable[[Any], object], *, is_signed: bool = True) -> Change:
    """Return what changes the manifest as it is read, and writes down its hash again."""

    def spoil(kept: Path) -> None:
        found = json.loads((kept / MANIFEST).read_text())
        change(found)
        (kept / MANIFEST).write_text(json.dumps(CheckpointHead.signed(found) if is_signed else found))

    return spoil


def put(path: str, value: Any) -> Change:
    """Return what sets the value at a path of keys and numbers."""
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    return edited(lambda found: at(found, parents).update({last: value}))


def rows(start: int, end: int) -> list[Any]:
    """Return the ranges of some rows of a.weight, of shape (6, 4)."""
    return [[[start, end]], [[0, 4]]]


def text(change: Callable[[str], str], file: str = MANIFEST) -> Change:
    return lambda kept: (kept / file).write_text(change((kept / file).read_text()))


def more(name: str) -> Change:
    return edited(lambda m: m["tensors"].update({name: m["tensors"]["a.weight"]}))


A, PIECE = "tensors/a.weight/", "tensors/a.weight/pieces/0/"
# Values that no manifest has, and values of a manifest of another model or optimizer.
VALUES: list[tuple[str, Any]] = [
    ("format", "a pickle"), ("format", [1]), ("version", 2), ("version", "1"), ("step", -1), ("step", True),
    ("step", 2**70), ("step", 1.5), ("optimizer/lr", [-0.1]), ("optimizer/lr", [1e999]), ("optimizer/lr", ["0.1"]),
    ("scaler", {"scale": 1.0}), ("aliases", {"c": 3}), ("training", {"seed": 0, "model": None}),
    ("training", {"seed": 0, "data": None, "model": "gpt2\nrm"}),
    (f"shards/{SHARD}/bytes", -1), (f"shards/{SHARD}/bytes", 10**15), (f"shards/{SHARD}/sha256", "00"),
    (f"shards/{SHARD}/sha256", "0" * 64), ("shards", {"../x.safetensors": {"bytes": 1, "sha256": "0" * 64}}),
    *((f"{PIECE}shard", x) for x in (f"../../outside/{SHARD}", "/etc/passwd", "..", "weights.bin",
                                     "rank-00007.safetensors", "rank-00000\x00.safetensors")),
    (f"{A}shape", [6.5, 4]), (f"{A}shape", [-6, -4]), (f"{A}shape", [2**40, 2**20]), (f"{A}shape", [24]),
    (f"{A}dtype", "nn"), (f"{A}steps", -1.0),
]  # fmt: skip
OTHERS: list[tuple[str, Any]] = [
    ("optimizer/lr", [0.1, 0.1]), ("optimizer/name", "SGD"), (f"{PIECE}key", "other"), (f"{PIECE}key", "b_weight"),
    (f"{A}dtype", "int64"), (f"{A}dtype", "float16"), (f"{A}states", ["exp_avg"]), (f"{A}states", ["momentum_buffer"]),
    (f"{A}states", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]), (f"{A}steps", None),
]  # fmt: skip
PIECES: dict[str, list[Any]] = {
    "none": [], "one twice": [rows(0, 6)] * 2, "an overlap and a gap": [rows(0, 3)] * 2,
    "an overlap": [rows(0, 4), rows(3, 6)], "a gap": [rows(0, 2), rows(3, 6)], "beyond the tensor": [rows(0, 7)],
    "far beyond": [rows(0, 2**60)], "below zero": [rows(-1, 5)], "backwards": [rows(6, 0)],
    "runs that overlap": [[[[0, 3], [0, 3]], [[0, 4]]]], "a run of three ends": [[[[0, 3, 6]], [[0, 4]]]],
    "ranges of one dim": [[[[0, 6]]]], "ranges of true": [[[[False, 6]], [[0, 4]]]],
}  # fmt: skip
MANIFESTS: dict[str, Change] = {
    **{f"text {t[:9]!r} {len(t)}": text(lambda _, t=t: t) for t in ("3", "[{}]", "null", "", "[" * 200_000)},
    "half": text(lambda t: t[: len(t) // 2]),
    "no text": text(lambda t: "\x00\x01" + t),
    "deep in place": text(lambda t: t.replace('"seed": 0', '"seed": ' + "[" * 50_000 + "]" * 50_000)),
    "NaN": text(lambda t: t.replace('"step": 1', '"step": NaN')),
    "Infinity": text(lambda t: t.replace('"lr": [', '"lr": [Infinity,')),
    "a number of many digits": text(lambda t: t.replace('"step": 1', '"step": ' + "9" * 5000)),
    "a tensor twice": text(lambda t: t.replace('"tensors": {', '"tensors": {"a.weight": 1,')),
    "a hash of another": edited(lambda m: m.update(step=2), is_signed=False),
    "no hash": edited(lambda m: m.pop("sha256"), is_signed=False),
    **{f"{path} {str(value)[:40]}": put(path, value) for path, value in VALUES},
    **{f"pieces: {name}": put(f"{A}pieces", [{"shard": SHARD, "key": "a_weight", "ranges": r} for r in ranges])
       for name, ranges in PIECES.items()},
    "a name with an escape": more("\x1b[2J"),
    "no name": more(""),
}  # fmt: skip
OTHER_MANIFESTS: dict[str, Change] = {
    **{f"{path} {value}": put(path, value) for path, value in OTHERS},
    "another shape": put("tensors/a.weight", {"shape": [4, 6], "dtype": "float32", "states": [], "steps": None,
        "pieces": [{"shard": SHARD, "key": "a_weight", "ranges": [[[0, 4]], [[0, 6]]]}]}),
    "a tensor more": more("more"),
    "a tensor less": edited(lambda m: m["tensors"].pop("a.weight")),
}  # fmt: skip


def test_a_value_of_another_type_is_refused(original: Path) -> None:
    file = original / MANIFEST
    found = json.loads(file.read_text())
    places = [way for way, _ in misfits(found) if way]
    assert len(places) > 60
    for (*parents, last), other in list(misfits(found))[1:]:
        changed = copy.deepcopy(found)
        at(changed, parents)[last] = other
        with pytest.raises(InputError, match=r"manifest.json is no manifest of a checkpoint, or is damaged \("):
            check_types(file, json.dumps(changed).encode(), CheckpointHead)
    for key in found:
        with pytest.raises(InputError, match=rf"is damaged \({key} is .*: field required\)"):
            check_types(file, json.dumps({k: v for k, v in found.items() if k != key}).encode(), CheckpointHead)


# Files and folders.


def shard(change: Change, *, is_signed: bool = True) -> Change:
    """Return what changes the shard, and writes down its size and hash again."""

    def spoil(kept: Path) -> None:
        change(kept / NAME / SHARD)
        data = (kept / NAME / SHARD).read_bytes()
        if is_signed:
            put(f"shards/{SHARD}", {"bytes": len(data), "sha256": digest(data)})(kept)

    return spoil


def head(change: Callable[[Any], object]) -> Change:
    """Return what changes the header of a safetensors file."""

    def spoil(file: Path) -> None:
        data = file.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        found = json.loads(data[8 : 8 + size])
        result = change(found)
        made = (json.dumps(found) if result is None else str(result)).encode()
        file.write_bytes(struct.pack("<Q", len(made)) + made + data[8 + size :])

    return spoil


def first(**changes: Any) -> Change:
    return head(lambda h: next(v for k, v in h.items() if k in ("a_weight", "a.weight")).update(changes))


HEADS: dict[str, Change] = {
    **{f"{size} bytes": binary(lambda data, n=size: data[:n]) for size in (0, 7, 40)},
    "half the data": binary(lambda data: data[: len(data) // 2]),
    "more data": binary(lambda data: data + b"more"),
    "a header without end": binary(lambda data: b"\xff" * 8 + data[8:]),
    "a header of a terabyte": binary(lambda data: struct.pack("<Q", 1 << 40) + data[8:]),
    "a header that is no text": binary(lambda data: data[:8] + b"\xff" * 20 + data[28:]),
    "a header that is no object": head(lambda h: "[1]"),
    "a deep header": head(lambda h: "[" * 100_000 + "]" * 100_000),
    "data beyond the end": first(data_offsets=[0, 10**9]),
    "data backwards": first(data_offsets=[96, 0]),
    "data of two tensors": head(lambda h: h.update(more=next(iter(h.values())))),
    "a dtype that is none": first(dtype="F12"),
    "a shape that does not fit": first(shape=[6, 5]),
    "a shape too large": first(shape=[2**40, 2**40]),
    "a shape below zero": first(shape=[-6, -4]),
    "a pickle": lambda f: f.write_bytes(pickle.dumps({"a.weight": Evil()})),
    "a file of torch.save": lambda f: torch.save({"a.weight": torch.zeros(6, 4)}, f),
    "a text": lambda f: f.write_text("weights"),
}


class Evil:
    """What would leave a file, if it was unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def linked(inside: str) -> Change:
    """Return what moves a file or folder out, and leaves a link to it."""

    def spoil(kept: Path) -> None:
        (kept.parent / "outside").mkdir()
        shutil.move(kept / inside, kept.parent / "outside" / "target")
        (kept / inside).symlink_to(kept.parent / "outside" / "target")

    return spoil


def replaced(inside: str, make: Change) -> Change:
    return lambda kept: ((kept / inside).unlink(), make(kept / inside))


def named(kept: Path) -> None:
    (kept / NAME).rename(kept / "mine")
    (kept / "latest").write_text("mine")


POINTERS = {
    "a folder above": "..", "itself": ".", "elsewhere": f"../kept/{NAME}", "a path": f"{NAME}/../{NAME}",
    "nothing": "", "bytes": "\udcff\x00\x1b[2J", "a long name": "step-" + "0" * 10_000_000,
}  # fmt: skip
SPOILED_SHARDS: dict[str, Change] = {
    f"shard: {name}": shard(HEADS[name])
    for name in ("half the data", "a header without end", "data backwards", "a shape too large", "a pickle")
} | {"a shard of another dtype": shard(lambda f: save_file({k: v.double() for k, v in load_file(f).items()}, f))}
FILES: dict[str, Change] = {
    "a shard of other numbers": shard(
        lambda f: save_file({k: v + 1 for k, v in load_file(f).items()}, f), is_signed=False
    ),
    "no shard": lambda kept: (kept / NAME / SHARD).unlink(),
    **{f"a folder as {f}": replaced(f, Path.mkdir) for f in (f"{NAME}/{SHARD}", MANIFEST, "latest")},
    **{f"a pipe as {f}": replaced(f, os.mkfifo) for f in (f"{NAME}/{SHARD}", MANIFEST, "latest")},
    **{f"a link as {f}": linked(f) for f in (f"{NAME}/{SHARD}", MANIFEST, NAME)},
    "a link to nothing as a shard": replaced(f"{NAME}/{SHARD}", lambda f: f.symlink_to("nowhere")),
    **{f"a pointer to {name}": lambda kept, t=target: (kept / "latest").write_bytes(os.fsencode(t))
       for name, target in POINTERS.items()},
    "a pointer by a whole path": lambda kept: (kept / "latest").write_text(str(kept / NAME)),
    "a pointer to another name": named,
}  # fmt: skip


def refused(step: Step, place: Path, work: Callable[[], object]) -> str:
    """Return the one line with which something is refused; nothing has changed."""
    before, files = states(step), tree(place)
    with pytest.raises(InputError) as caught:
        work()
    assert all(torch.equal(a, b) for a, b in zip(before, states(step), strict=True))
    assert tree(place) == files
    line = str(caught.value)
    assert line.isprintable(), line
    assert len(line) < 1000
    assert str(place) in line
    return line


def command(capsys: pytest.CaptureFixture[str], place: Path, *arguments: str) -> str:
    """Return the one line with which a command is refused; nothing has changed."""
    files = tree(place)
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2, error
    assert error.count("\n") == 1, error
    assert error.startswith("error: "), error
    assert tree(place) == files
    return error


WHOLE = {**OTHER_MANIFESTS, **SPOILED_SHARDS}
DAMAGED = {**MANIFESTS, **FILES}


@pytest.mark.parametrize("name", {**DAMAGED, **WHOLE})
def test_a_hostile_checkpoint_is_refused(
    name: str, step: Step, kept: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each damage is shown to `restore`, every tenth also to the commands, which read by the same functions."""
    {**DAMAGED, **WHOLE}[name](kept)
    assert str(kept) in refused(step, place, lambda: step.restore(kept))
    if name in DAMAGED and list(DAMAGED).index(name) % 10 == 0:
        assert str(kept) in command(capsys, place, "inspect", str(kept))
        command(capsys, place, "export", str(kept), "--out", str(place / "out"), "--model", "mlp")


def test_the_original_is_taken(step: Step, original: Path) -> None:
    assert step.restore(original) == 1


# Weights of other programs.


def made(name: str, content: Callable[[Path], object] | Any) -> Callable[[Path], Path]:
    """Return what makes weights of another program, and spoils them or writes an index beside them."""

    def make(place: Path) -> Path:
        (place / "hf").mkdir()
        save_file({n: p.detach().clone() for n, p in Net().named_parameters()}, place / "hf" / name)
        if callable(content):
            content(place / "hf" / name)
            return place / "hf" / name
        index = content if isinstance(content, str) else json.dumps(content)
        (place / "hf" / "model.safetensors.index.json").write_text(index)
        return place / "hf"

    return make


def plain(spoil: Change) -> Callable[[Path], Path]:
    return made("weights.safetensors", spoil)


def indexed(content: Any) -> Callable[[Path], Path]:
    return made("model-1.safetensors", content)


def alone(name: str, make: Change) -> Callable[[Path], Path]:
    """Return what makes a folder with this alone."""

    def build(place: Path) -> Path:
        (place / "hf").mkdir()
        make(place / "hf" / name)
        return place / "hf"

    return build


def changed(**tensors: Tensor) -> Callable[[Path], Path]:
    more = {name.replace("_", "."): value for name, value in tensors.items()}
    return plain(lambda file: save_file({**load_file(file), **more}, file))


ELSEWHERE = ("../weights.safetensors", "/etc/passwd", "..", "pytorch_model.bin", "model-2.safetensors", 3)
INDICES = ([1], {}, {"weight_map": ["a.weight"]}, "", '{"weight_map": {', "[" * 200_000)
WEIGHTS: dict[str, Callable[[Path], Path]] = {
    **{name: plain(spoil) for name, spoil in HEADS.items()},
    "a name with an escape": plain(lambda f: save_file({"\x1b[2J": torch.zeros(2)}, f)),
    **{f"an index {str(content)[:20]} {len(content)}": indexed(content) for content in INDICES},
    **{f"an index to {f}": indexed({"weight_map": {n: f for n, _ in Net().named_parameters()}}) for f in ELSEWHERE},
    "an index of a tensor that is not there": indexed({"weight_map": {"other": "model-1.safetensors"}}),
    "an empty folder": alone("", lambda f: None),
    "a pickle": alone("pytorch_model.bin", lambda f: torch.save({"a.weight": torch.zeros(6, 4)}, f)),
    "a folder as weights": alone("model.safetensors", Path.mkdir),
    "a pipe as weights": alone("model.safetensors", os.mkfifo),
    **{f"a link to {target}": alone("model.safetensors", lambda f, t=target: f.symlink_to(t))
       for target in ("nowhere", "model.safetensors")},
    "nothing at all": lambda place: place / "nowhere",
    "a pipe": lambda place: os.mkfifo(place / "pipe") or place / "pipe",
    "a name that is too long": lambda place: place / ("x" * 300),
    "a name under a file": lambda place: plain(lambda f: None)(place) / "x",
    "a dtype of eight bits": changed(a_weight=torch.zeros(6, 4).to(torch.float8_e4m3fn)),
}  # fmt: skip
# These are whole: only a model that is another one refuses them.
FITTING = {
    "another shape": changed(a_weight=torch.zeros(4, 6)),
    "another dtype": changed(a_weight=torch.zeros(6, 4, dtype=torch.int32)),
    "a tensor less": plain(lambda f: save_file({k: v for k, v in load_file(f).items() if k != "a.weight"}, f)),
}


@pytest.mark.parametrize("name", {**WEIGHTS, **FITTING})
def test_hostile_weights_are_refused(name: str, step: Step, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = {**WEIGHTS, **FITTING}[name](place)
    refused(step, place, lambda: step.load_weights(path))
    module = Net()
    before = [p.detach().clone() for p in module.parameters()]
    refused(step, place, lambda: ss.load_weights(module, path))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    if name in WEIGHTS:
        command(capsys, place, "import", str(path), "--out", str(place / "out"))


METADATA: dict[str, tuple[str, Change]] = {
    "nothing": (".metadata", binary(lambda data: b"")),
    "a text": (".metadata", lambda file: file.write_text("metadata")),
    "another object": (".metadata", lambda file: file.write_bytes(pickle.dumps({"a": 1}))),
    "half": (".metadata", binary(lambda data: data[:50])),
    "a shard less": ("*.distcp", Path.unlink),
    "half a shard": ("*.distcp", binary(lambda data: data[:30])),
}


@pytest.mark.parametrize("name", METADATA)
def test_a_broken_distributed_checkpoint_is_refused(
    name: str, original: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "export", str(original), "--format", "distributed", "--out", str(place / "theirs")])
    assert not ended.value.code
    pattern, spoil = METADATA[name]
    spoil(next((place / "theirs").glob(pattern)))
    capsys.readouterr()
    for trust in ([], ["--trust"]):
        command(capsys, place, "import", str(place / "theirs"), "--out", str(place / "out"), *trust)


def test_a_pickle_is_not_read_unless_it_is_trusted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "theirs").mkdir()
    (place / "theirs" / ".metadata").write_bytes(pickle.dumps(Evil()))
    command(capsys, place, "import", str(place / "theirs"), "--out", str(place / "out"))


def test_what_a_checkpoint_says_was_trained_is_not_run(
    kept: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "evil.py").write_text("import os\nos.mkdir('executed')\n")
    for model in ("evil.py:f", str(place / "evil.py"), "evil.py"):
        put("training", {"seed": 0, "data": None, "model": model})(kept)
        error = command(capsys, place, "export", str(kept), "--out", str(place / "out"))
        assert "name the model to export with --model" in error


def test_pieces_cover_a_tensor_once() -> None:
    assert covers((6, 4), [[[[0, 6]], [[0, 4]]]])
    assert covers((6, 4), [[[[0, 2], [4, 6]], [[0, 4]]], [[[2, 4]], [[0, 1]]], [[[2, 4]], [[1, 4]]]])
    assert covers((), [[]])
    assert not covers((), [[], []])
    # As many elements as the tensor has.
    assert not covers((6, 4), [[[[0, 6]], [[0, 2]]], [[[0, 3]], [[0, 4]]]])
