"""Checkpoints and weights that were damaged, or made to harm: one line names the file, and nothing else happens."""

from __future__ import annotations

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
from superscaler.artifact import describe, initial_values
from superscaler.cli.main import main
from superscaler.comm.threads import run_ranks
from superscaler.errors import InputError
from superscaler.runtime.step import Step, build_step, modules
from superscaler.store.checkpoint import CheckpointHead
from superscaler.store.folder import digest
from superscaler.store.pieces import covers

SHARD, NAME = "rank-00000.safetensors", "step-00000001"


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
    found = ss.compile(graph, "single", "local:1").compiled
    described, code = json.loads(json.dumps(describe(found))), modules(found.emitted.files)
    values = initial_values(found.graph.model, found.graph.captured.values)
    made: Step = run_ranks(1, lambda communicator: build_step(described, code, values, communicator))[0]
    made({"x": torch.ones(2, 4)})
    return made


@pytest.fixture(scope="module")
def original(step: Step, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "kept"
    step.save(folder)
    return folder


def states(step: Step) -> list[Tensor]:
    assert step.state.optimizer is not None
    kept = [s for weight in step.state.weights.values() for s in step.state.optimizer.state[weight].values()]
    return [x.detach().clone() for x in (*step.state.weights.values(), *kept, torch.tensor(step.state.steps))]


def tree(folder: Path) -> dict[str, Any]:
    """Return all that is in a folder, without following links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = path.read_bytes()
        else:
            found[str(path)] = ""
    return found


# Manifests.


def edited(change: Callable[[Any], object], *, is_signed: bool = True) -> Callable[[Path], None]:
    """Return what changes the manifest as it is read, and writes down its hash again."""

    def spoil(kept: Path) -> None:
        file = kept / NAME / "manifest.json"
        found = json.loads(file.read_text())
        result = change(found)
        found = found if result is None else result
        if is_signed and isinstance(found, dict):
            found = CheckpointHead.signed(found)
        file.write_text(json.dumps(found))

    return spoil


def put(*path: Any) -> Callable[[Path], None]:
    """Return what puts the last of these at the place that the others name; `...` removes it."""
    *way, last, value = path

    def change(found: Any) -> None:
        for key in way:
            found = found[key]
        if value is ...:
            del found[last]
        else:
            found[last] = value

    return edited(change)


def piece(**changes: Any) -> Callable[[Path], None]:
    return edited(lambda m: m["tensors"]["a.weight"]["pieces"][0].update(changes))


def pieces(*ranges: Any) -> Callable[[Path], None]:
    """Return what gives a.weight, of shape (6, 4), these pieces."""
    made = [{"shard": SHARD, "key": "a_weight", "ranges": r} for r in ranges]
    return put("tensors", "a.weight", "pieces", made)


def text(change: Callable[[str], str]) -> Callable[[Path], None]:
    def spoil(kept: Path) -> None:
        file = kept / NAME / "manifest.json"
        file.write_text(change(file.read_text()))

    return spoil


def twice(kept: Path) -> None:
    file = kept / NAME / "manifest.json"
    line = next(line for line in file.read_text().splitlines() if '"a.weight"' in line)
    file.write_text(file.read_text().replace(line, f"{line.rstrip(',')},\n{line}"))


MANIFESTS: dict[str, Callable[[Path], None]] = {
    "a number": edited(lambda m: 3),
    "a list": edited(lambda m: [m]),
    "null": text(lambda t: "null"),
    "nothing": text(lambda t: ""),
    "half": text(lambda t: t[: len(t) // 2]),
    "no text": text(lambda t: "\x00\x01" + t),
    "deep": text(lambda t: "[" * 200_000 + "]" * 200_000),
    "deep in place": text(lambda t: t.replace('"seed": 0', '"seed": ' + "[" * 50_000 + "]" * 50_000)),
    "NaN": text(lambda t: t.replace('"step": 1', '"step": NaN')),
    "Infinity": text(lambda t: t.replace('"lr": [', '"lr": [Infinity,')),
    "a number of many digits": text(lambda t: t.replace('"step": 1', '"step": ' + "9" * 5000)),
    "a tensor twice": twice,
    "a hash of another": edited(lambda m: m.update(step=2), is_signed=False),
    "no hash": edited(lambda m: {k: v for k, v in m.items() if k != "sha256"}, is_signed=False),
    "another format": put("format", "a pickle"),
    "a format that is a list": put("format", [1]),
    "version 2": put("version", 2),
    "version true": put("version", "1"),
    **{f"no {key}": put(key, ...) for key in ("step", "seed", "optimizer", "scaler", "aliases", "training", "shards")},
    "no tensors": put("tensors", ...),
    "step below zero": put("step", -1),
    "step as text": put("step", "1"),
    "step true": put("step", True),
    "step beyond": put("step", 2**70),
    "step half": put("step", 1.5),
    "seed as text": put("seed", "0"),
    "optimizer as text": put("optimizer", "AdamW"),
    "optimizer without rates": put("optimizer", "lr", ...),
    "rate as text": put("optimizer", "lr", ["0.1"]),
    "rate below zero": put("optimizer", "lr", [-0.1]),
    "rate too large": put("optimizer", "lr", [1e999]),
    "two rates": put("optimizer", "lr", [0.1, 0.1]),
    "another optimizer": put("optimizer", "name", "SGD"),
    "scaler without numbers": put("scaler", {"scale": 1.0}),
    "scaler as a list": put("scaler", [1.0]),
    "aliases as a list": put("aliases", ["a.weight"]),
    "alias of a number": put("aliases", {"c": 3}),
    "training as text": put("training", "gpt2"),
    "training without data": put("training", {"seed": 0, "model": None}),
    "model with a line break": put("training", {"seed": 0, "data": None, "model": "gpt2\nrm"}),
    "shards as a list": put("shards", [SHARD]),
    "shard without size": put("shards", SHARD, "bytes", ...),
    "shard of negative size": put("shards", SHARD, "bytes", -1),
    "shard of another size": put("shards", SHARD, "bytes", 10**15),
    "shard hash too short": put("shards", SHARD, "sha256", "00"),
    "shard hash of another": put("shards", SHARD, "sha256", "0" * 64),
    "shard elsewhere": piece(shard="../../outside/" + SHARD),
    "shard by a whole path": piece(shard="/etc/passwd"),
    "shard that is the folder": piece(shard=".."),
    "shard of another name": piece(shard="weights.bin"),
    "shard that is not listed": piece(shard="rank-00007.safetensors"),
    "shard listed elsewhere": put("shards", "../x.safetensors", {"bytes": 1, "sha256": "0" * 64}),
    "shard with a zero byte": piece(shard="rank-00000\x00.safetensors"),
    "key that is not there": piece(key="other"),
    "key of another shape": piece(key="b_weight"),
    "key as a number": piece(key=3),
    "tensors as a list": put("tensors", []),
    "tensor as text": put("tensors", "a.weight", "x"),
    "tensor without shape": put("tensors", "a.weight", "shape", ...),
    "shape as text": put("tensors", "a.weight", "shape", "6, 4"),
    "shape of halves": put("tensors", "a.weight", "shape", [6.5, 4]),
    "shape below zero": put("tensors", "a.weight", "shape", [-6, -4]),
    "shape too large": put("tensors", "a.weight", "shape", [2**40, 2**20]),
    "shape of another model": edited(lambda m: (
        m["tensors"]["a.weight"].update(shape=[4, 6]),
        m["tensors"]["a.weight"]["pieces"][0].update(ranges=[[[0, 4]], [[0, 6]]]), None)[-1]),
    "shape of fewer dims": put("tensors", "a.weight", "shape", [24]),
    "dtype that is none": put("tensors", "a.weight", "dtype", "nn"),
    "dtype of another": put("tensors", "a.weight", "dtype", "int64"),
    "dtype of halves": put("tensors", "a.weight", "dtype", "float16"),
    "dtype as a number": put("tensors", "a.weight", "dtype", 7),
    "states as text": put("tensors", "a.weight", "states", "exp_avg"),
    "a state left out": put("tensors", "a.weight", "states", ["exp_avg"]),
    "a state of another optimizer": put("tensors", "a.weight", "states", ["momentum_buffer"]),
    "a state that is not stored": put("tensors", "a.weight", "states", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    "steps as text": put("tensors", "a.weight", "steps", "1"),
    "steps below zero": put("tensors", "a.weight", "steps", -1.0),
    "no steps": put("tensors", "a.weight", "steps", None),
    "pieces as an object": put("tensors", "a.weight", "pieces", {}),
    "no pieces": pieces(),
    "a piece twice": pieces([[[0, 6]], [[0, 4]]], [[[0, 6]], [[0, 4]]]),
    "pieces that overlap and leave a gap": pieces([[[0, 3]], [[0, 4]]], [[[0, 3]], [[0, 4]]]),
    "pieces that overlap": pieces([[[0, 4]], [[0, 4]]], [[[3, 6]], [[0, 4]]]),
    "pieces with a gap": pieces([[[0, 2]], [[0, 4]]], [[[3, 6]], [[0, 4]]]),
    "a piece beyond the tensor": pieces([[[0, 7]], [[0, 4]]]),
    "a piece far beyond": pieces([[[0, 2**60]], [[0, 4]]]),
    "a piece below zero": pieces([[[-1, 5]], [[0, 4]]]),
    "a piece backwards": pieces([[[6, 0]], [[0, 4]]]),
    "runs that overlap": pieces([[[0, 3], [0, 3]], [[0, 4]]]),
    "a run of three ends": pieces([[[0, 3, 6]], [[0, 4]]]),
    "ranges of one dim": pieces([[[0, 6]]]),
    "ranges as text": pieces("all"),
    "ranges of true": pieces([[[False, 6]], [[0, 4]]]),
    "a name with an escape": edited(lambda m: m["tensors"].update({"\x1b[2J": m["tensors"]["a.weight"]})),
    "no name": edited(lambda m: m["tensors"].update({"": m["tensors"]["a.weight"]})),
    "a tensor more": edited(lambda m: m["tensors"].update({"more": m["tensors"]["a.weight"]})),
    "a tensor less": put("tensors", "a.weight", ...),
}  # fmt: skip


# Files and folders.


def shard(change: Callable[[Path], object], *, is_signed: bool = True) -> Callable[[Path], None]:
    """Return what changes the shard, and writes down its size and hash again."""

    def spoil(kept: Path) -> None:
        file = kept / NAME / SHARD
        change(file)
        if is_signed:
            told = {"bytes": file.stat().st_size, "sha256": digest(file.read_bytes())}
            edited(lambda m: m["shards"].update({SHARD: told}))(kept)

    return spoil


def head(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Return what changes the header of a safetensors file."""

    def spoil(file: Path) -> None:
        data = file.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        found = json.loads(data[8 : 8 + size])
        result = change(found)
        made = (json.dumps(found) if result is None else str(result)).encode()
        file.write_bytes(struct.pack("<Q", len(made)) + made + data[8 + size :])

    return spoil


def first(**changes: Any) -> Callable[[Path], None]:
    return head(lambda h: next(v for k, v in h.items() if k in ("a_weight", "a.weight")).update(changes))


def cut(size: int) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(file.read_bytes()[:size] if size >= 0 else file.read_bytes() + b"more")


HEADS: dict[str, Callable[[Path], Any]] = {
    "nothing": cut(0),
    "seven bytes": cut(7),
    "half a header": cut(40),
    "half the data": lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]),
    "more data": cut(-1),
    "a header without end": lambda f: f.write_bytes(b"\xff" * 8 + f.read_bytes()[8:]),
    "a header of a terabyte": lambda f: f.write_bytes(struct.pack("<Q", 1 << 40) + f.read_bytes()[8:]),
    "a header that is no object": head(lambda h: "[1]"),
    "a header that is no text": lambda f: f.write_bytes(f.read_bytes()[:8] + b"\xff" * 20 + f.read_bytes()[28:]),
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


def linked(inside: str) -> Callable[[Path], None]:
    """Return what moves a file or folder out, and leaves a link to it."""

    def spoil(kept: Path) -> None:
        outside = kept.parent / "outside"
        outside.mkdir()
        shutil.move(kept / inside, outside / "target")
        (kept / inside).symlink_to(outside / "target")

    return spoil


def replaced(inside: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(kept: Path) -> None:
        (kept / inside).unlink()
        make(kept / inside)

    return spoil


def named(kept: Path) -> None:
    (kept / NAME).rename(kept / "mine")
    (kept / "latest").write_text("mine")


FILES: dict[str, Callable[[Path], None]] = {
    **{f"shard: {name}": shard(spoil) for name, spoil in HEADS.items()},
    "a shard of other numbers": shard(
        lambda f: save_file({k: v + 1 for k, v in load_file(f).items()}, f), is_signed=False
    ),
    "a shard of another dtype": shard(lambda f: save_file({k: v.double() for k, v in load_file(f).items()}, f)),
    "no shard": lambda kept: (kept / NAME / SHARD).unlink(),
    "a folder as a shard": replaced(f"{NAME}/{SHARD}", Path.mkdir),
    "a pipe as a shard": replaced(f"{NAME}/{SHARD}", os.mkfifo),
    "a link as a shard": linked(f"{NAME}/{SHARD}"),
    "a link to nothing as a shard": replaced(f"{NAME}/{SHARD}", lambda f: f.symlink_to("nowhere")),
    "a link as a manifest": linked(f"{NAME}/manifest.json"),
    "a folder as a manifest": replaced(f"{NAME}/manifest.json", Path.mkdir),
    "a pipe as a manifest": replaced(f"{NAME}/manifest.json", os.mkfifo),
    "a link as a checkpoint": linked(NAME),
    "a pointer to a folder above": lambda kept: (kept / "latest").write_text(".."),
    "a pointer to itself": lambda kept: (kept / "latest").write_text("."),
    "a pointer elsewhere": lambda kept: (kept / "latest").write_text(f"../kept/{NAME}"),
    "a pointer by a whole path": lambda kept: (kept / "latest").write_text(str(kept / NAME)),
    "a pointer with a path in it": lambda kept: (kept / "latest").write_text(f"{NAME}/../{NAME}"),
    "a pointer to another name": named,
    "an empty pointer": lambda kept: (kept / "latest").write_text(""),
    "a pointer of bytes": lambda kept: (kept / "latest").write_bytes(b"\xff\x00\x1b[2J"),
    "a long pointer": lambda kept: (kept / "latest").write_text("step-" + "0" * 10_000_000),
    "a folder as a pointer": replaced("latest", Path.mkdir),
    "a pipe as a pointer": replaced("latest", os.mkfifo),
}  # fmt: skip


class Evil:
    """What would leave a file, if it was unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line with which a command is refused."""
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2, error
    assert error.count("\n") == 1, error
    assert error.startswith("error: "), error
    return error


# What a checkpoint may be, of another model or optimizer.
OTHERS = (
    "two rates", "another optimizer", "shape of another model", "a state left out", "a state of another optimizer",
    "no steps", "a tensor more", "a tensor less", "a state that is not stored", "key that is not there",
    "key of another shape", "dtype of another", "dtype of halves", "a shard of another dtype",
)  # fmt: skip
ROWS = {**MANIFESTS, **FILES}


@pytest.mark.parametrize("name", ROWS)
def test_a_hostile_checkpoint_is_refused(
    name: str, step: Step, original: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = place / "kept"
    shutil.copytree(original, kept)
    ROWS[name](kept)
    files = tree(place)
    line = refused(step, place, lambda: step.restore(kept))
    assert str(kept) in line
    if name not in OTHERS and not name.startswith("shard: "):
        assert str(kept) in command(capsys, "inspect", str(kept))
        command(capsys, "export", str(kept), "--out", str(place / "out"), "--model", "mlp")
    assert tree(place) == files


def test_the_original_is_taken(step: Step, original: Path) -> None:
    assert step.restore(original) == 1


def plain(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    """Return what makes one file and spoils it."""

    def made(place: Path) -> Path:
        file = place / "weights.safetensors"
        save_file({n: p.detach().clone() for n, p in Net().named_parameters()}, file)
        make(file)
        return file

    return made


def indexed(content: Any) -> Callable[[Path], Path]:
    """Return what makes a folder of Hugging Face's with this index."""

    def made(place: Path) -> Path:
        folder = place / "hf"
        folder.mkdir()
        save_file({n: p.detach().clone() for n, p in Net().named_parameters()}, folder / "model-1.safetensors")
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "model.safetensors.index.json").write_text(text)
        return folder

    return made


def folder(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    def made(place: Path) -> Path:
        (place / "hf").mkdir()
        make(place / "hf")
        return place / "hf"

    return made


def weight_map(file: Any) -> dict[str, Any]:
    return {"weight_map": {n: file for n, _ in Net().named_parameters()}}


WEIGHTS: dict[str, Callable[[Path], Path]] = {
    **{name: plain(spoil) for name, spoil in HEADS.items()},
    "a name with an escape": plain(lambda f: save_file({"\x1b[2J": torch.zeros(2)}, f)),
    "an index that is no object": indexed([1]),
    "an index without a map": indexed({}),
    "an index of numbers": indexed({"weight_map": {"a.weight": 3}}),
    "a map that is a list": indexed({"weight_map": ["a.weight"]}),
    "an empty index": indexed(""),
    "half an index": indexed('{"weight_map": {'),
    "a deep index": indexed("[" * 200_000),
    "an index to a file outside": indexed(weight_map("../weights.safetensors")),
    "an index to a whole path": indexed(weight_map("/etc/passwd")),
    "an index to the folder above": indexed(weight_map("..")),
    "an index to a pickle": indexed(weight_map("pytorch_model.bin")),
    "an index to a file that is not there": indexed(weight_map("model-2.safetensors")),
    "an index of a tensor that is not there": indexed({"weight_map": {"other": "model-1.safetensors"}}),
    "an empty folder": folder(lambda f: None),
    "a pickle of torch.save": folder(lambda f: torch.save({"a.weight": torch.zeros(6, 4)}, f / "pytorch_model.bin")),
    "a folder as weights": folder(lambda f: (f / "model.safetensors").mkdir()),
    "a pipe as weights": folder(lambda f: os.mkfifo(f / "model.safetensors")),
    "a link to nothing": folder(lambda f: (f / "model.safetensors").symlink_to("nowhere")),
    "a link to itself": folder(lambda f: (f / "model.safetensors").symlink_to("model.safetensors")),
    "nothing at all": lambda place: place / "nowhere",
    "a pipe": lambda place: os.mkfifo(place / "pipe") or place / "pipe",
    "a name that is too long": lambda place: place / ("x" * 300),
    "a name under a file": lambda place: plain(lambda f: None)(place) / "x",
    "another shape": plain(lambda f: save_file({**load_file(f), "a.weight": torch.zeros(4, 6)}, f)),
    "another dtype": plain(lambda f: save_file({**load_file(f), "a.weight": torch.zeros(6, 4, dtype=torch.int32)}, f)),
    "a dtype of eight bits": plain(
        lambda f: save_file({**load_file(f), "a.weight": torch.zeros(6, 4).to(torch.float8_e4m3fn)}, f)
    ),
    "a tensor less": plain(lambda f: save_file({k: v for k, v in load_file(f).items() if k != "a.weight"}, f)),
}  # fmt: skip
# These are whole: only a model that is another one refuses them.
FITTING = ("another shape", "another dtype", "a tensor less")


@pytest.mark.parametrize("name", WEIGHTS)
def test_hostile_weights_are_refused(name: str, step: Step, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = WEIGHTS[name](place)
    refused(step, place, lambda: step.load_weights(path))
    module = Net()
    kept = [p.detach().clone() for p in module.parameters()]
    refused(step, place, lambda: ss.load_weights(module, path))
    assert all(torch.equal(a, b) for a, b in zip(kept, module.parameters(), strict=True))
    if name not in FITTING:
        files = tree(place)
        command(capsys, "import", str(path), "--out", str(place / "out"))
        assert tree(place) == files


METADATA: dict[str, Callable[[Path], object]] = {
    "nothing": lambda file: file.write_bytes(b""),
    "a text": lambda file: file.write_text("metadata"),
    "another object": lambda file: file.write_bytes(pickle.dumps({"a": 1})),
    "half": lambda file: file.write_bytes(file.read_bytes()[:50]),
    "a shard less": lambda file: next(file.parent.glob("*.distcp")).unlink(),
    "half a shard": lambda file: cut(30)(next(file.parent.glob("*.distcp"))),
}


@pytest.mark.parametrize("name", METADATA)
def test_a_broken_distributed_checkpoint_is_refused(
    name: str, original: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "export", str(original), "--format", "distributed", "--out", str(place / "theirs")])
    assert not ended.value.code
    METADATA[name](place / "theirs" / ".metadata")
    capsys.readouterr()
    files = tree(place)
    for trust in ([], ["--trust"]):
        command(capsys, "import", str(place / "theirs"), "--out", str(place / "out"), *trust)
        assert tree(place) == files


def test_a_pickle_is_not_read_unless_it_is_trusted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "theirs").mkdir()
    (place / "theirs" / ".metadata").write_bytes(pickle.dumps(Evil()))
    command(capsys, "import", str(place / "theirs"), "--out", str(place / "out"))
    assert not (place / "executed").exists()


def test_what_a_checkpoint_says_was_trained_is_not_run(
    original: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "evil.py").write_text("import os\nos.mkdir('executed')\n")
    kept = place / "kept"
    shutil.copytree(original, kept)
    for model in ("evil.py:f", str(place / "evil.py"), "evil.py"):
        put("training", {"seed": 0, "data": None, "model": model})(kept)
        assert "name the model to export with --model" in command(
            capsys, "export", str(kept), "--out", str(place / "out")
        )
    assert not (place / "executed").exists()


def test_pieces_cover_a_tensor_once() -> None:
    whole = [[[0, 6]], [[0, 4]]]
    assert covers((6, 4), [whole])
    assert covers((6, 4), [[[[0, 2], [4, 6]], [[0, 4]]], [[[2, 4]], [[0, 1]]], [[[2, 4]], [[1, 4]]]])
    assert covers((), [[]])
    assert not covers((), [[], []])
    # As many elements as the tensor has.
    assert not covers((6, 4), [[[[0, 6]], [[0, 2]]], [[[0, 3]], [[0, 4]]]])
