"""Plan directories that no compile wrote: what a disk, an editor, another program or a stranger may leave there.

A table of changes by what they do; each is refused by whatever reads the directory, with words of the line beside it.
"""

from __future__ import annotations

import functools
import json
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from superscaler.store.folder import digest
from superscaler.store.plan_head import PlanHead

PLAN, EXPLAIN, WEIGHTS = "plan.json", "explain.json", "initial.safetensors"
CODE = ("program_0.py", "segments.py", "compiled_program_0.py", "compiled_segments.py")
FILES = (PLAN, EXPLAIN, WEIGHTS, "model.txt", "program.txt", "compiled_program.txt", "journal.txt", "run.py", *CODE)
Change = Callable[[Path], object]


class Damage(NamedTuple):
    """What is done to the directory, and what the line says that refuses it, and who reads it."""

    change: Change
    told: str
    readers: tuple[str, ...] = ("explain", "diff", "validate", "load")


DAMAGES: dict[str, Damage] = {}


def damage(name: str, change: Change, *told: str, **more: Any) -> None:
    assert name not in DAMAGES
    DAMAGES[name] = Damage(change, *told, **more)


# Any file.


def relink(file: Path, target: str) -> None:
    file.unlink()
    file.symlink_to(target)


def replace(file: Path, make: Callable[[Path], object]) -> None:
    file.unlink()
    make(file)


EVERY: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "is "),
    "empty": (lambda f: f.write_bytes(b""), ""),
    "cut short": (lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]), ""),
    "a folder": (lambda f: replace(f, Path.mkdir), "is a folder"),
    "a link to nothing": (lambda f: relink(f, "nowhere"), "is "),
    "a link to itself": (lambda f: relink(f, f.name), ""),
    "a link to a folder": (lambda f: relink(f, "."), "is a folder"),
    "a pipe": (lambda f: replace(f, os.mkfifo), "is not a file"),
    "no UTF-8": (lambda f: f.write_bytes(b"\xff\xfe" + f.read_bytes()), ""),
    "a byte more": (lambda f: f.write_bytes(f.read_bytes() + b"0"), ""),
    "a byte changed": (lambda f: f.write_bytes(f.read_bytes()[:-2] + b"~" + f.read_bytes()[-1:]), ""),
    "binary": (lambda f: f.write_bytes(bytes(range(256)) * 9), ""),
}
# Those with a reader of their own; of the others only the hash is looked at.
_READ, _ANY = (PLAN, EXPLAIN, WEIGHTS, "program.txt"), ("missing", "a pipe", "a byte changed")
for _file in FILES:
    for _name, (_change, _told) in EVERY.items() if _file in _READ else ((n, EVERY[n]) for n in _ANY):
        damage(f"{_file} {_name}", lambda folder, f=_file, c=_change: c(folder / f), _told)


# The text of plan.json.

RAW: dict[str, str | bytes] = {
    "an open brace": "{",
    "a list": "[]",
    "lists too deep": "[" * 100_000,
    "whole lists too deep": '{"version": 3, "world": ' + "[" * 5000 + "]" * 5000 + "}",
    "a number too long": '{"version": ' + "9" * 5000 + "}",
    "NaN": '{"version": NaN}',
    "a number too large": '{"version": 1e999}',
    "two objects": "{}{}",
    "a byte order mark": "\ufeff{}",
    "a comment": '{"version": 3 /* mine */}',
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07version\x94.",
}
for _name, _text in RAW.items():
    _bytes = _text if isinstance(_text, bytes) else _text.encode()
    damage(f"{PLAN}: {_name}", lambda folder, b=_bytes: (folder / PLAN).write_bytes(b), PLAN)
damage(
    f"{PLAN}: half a letter",
    lambda folder: (folder / PLAN).write_text((folder / PLAN).read_text().replace('"local:1"', '"\\ud800"')),
    PLAN,
)


# Its values, with hashes that fit: only types and what belongs together tell these.


def sealed(turn: Callable[[dict[str, Any]], object]) -> Change:
    """Change plan.json, and its own hashes with it."""

    def change(folder: Path) -> None:
        plan = json.loads((folder / PLAN).read_text())
        turn(plan)
        plan = PlanHead.signed(plan) if isinstance(plan.get("manifest"), dict) else plan
        (folder / PLAN).write_text(json.dumps(plan))

    return change


def put(path: str, value: Any) -> Change:
    """Set what a path of keys and numbers leads to."""

    def turn(plan: dict[str, Any]) -> None:
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        at(plan, parents)[last] = value

    return sealed(turn)


def at(found: Any, way: Sequence[Any]) -> Any:
    """Return what a way of keys and numbers leads to."""
    return functools.reduce(operator.getitem, way, found)


def misfits(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the place of each value in a JSON object, of the first one in each list, and one of another type."""
    yield way, [] if isinstance(value, dict) else {}
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield from misfits(item, (*way, key))


_HASH = "0" * 64
# Beside those of another type, all of which test_damaged.py makes.
VALUES: list[tuple[str, Any, str]] = [
    ("version", 1, "is of version 1, but this superscaler reads version 4"),
    ("version", None, "is of version None, but"),
    ("world", 0, "a world of 0"),
    ("world", 2, "1 devices, 1 programs and a world of 2"),
    ("world", 2**70, "world is '118"),
    ("world", "1", "world is '1': input should be a valid integer"),
    ("seed", 2**64, "seed is '18446744073709551616'"),
    ("programs", ["../program_0"], "programs, 0 is '../program_0'"),
    ("programs", [], "0 programs"),
    ("devices/0/weights/0/box", [[0]], "box, 0, 1 is "),
    ("devices/0/weights/0/box", [[-1, 2]], "box, 0, 0 is '-1'"),
    ("devices/0/weights/0/trained", 1, "trained is '1'"),
    ("devices/0/weights/0/more", 1, "more is '1'"),
    ("devices/0/draws", [[{}]], "draws, 0, 0, op is"),
    ("bounds", {"x": -1}, "bounds, x is '-1'"),
    ("slots", {"x": [[2**80]]}, "slots, x, 0, 0 is"),
    ("tensors/head.bias/kind", "neither", "kind is 'neither'"),
    ("operators", {"a.b.c": {"module": "../os", "file": "x.py", "sha256": _HASH}}, "operators, a.b.c, module"),
    ("operators", {"a.b.c": {"module": "os", "file": "", "sha256": _HASH}}, "operators, a.b.c, file"),
    ("manifest", {}, "manifest, model is"),
    *(("manifest/files", {name: _HASH}, f"manifest, files, {name}") for name in ("../run.py", "/run.py", "a/run.py")),
    ("manifest/files/run.py", _HASH, "run.py is not what compile wrote there"),
    ("manifest/tensors", {"nothing": _HASH}, WEIGHTS),
    ("manifest/header", _HASH, "initial.safetensors is not what compile wrote there"),
]
for _n, (_path, _value, _told) in enumerate(VALUES):
    damage(f"{PLAN} {_n}: {_path} {str(_value)[:40]}", put(_path, _value), _told)
for _key in ("version", "devices", "manifest"):
    damage(f"{PLAN} without {_key}", sealed(lambda plan, k=_key: plan.pop(k)), _key)

_RUN = ("validate", "load")
damage("an unknown dtype of the loss", put("loss_dtype", "float99"), "float99", readers=_RUN)
damage("an unknown dtype of an input", put("inputs/x", [[4, 4], "Tensor"]), "Tensor", readers=_RUN)
damage("an unknown optimizer", put("optimizer/name", "Adagrad"), "Adagrad", readers=_RUN)
damage("hashes of another plan", lambda f: (f / PLAN).write_text((f / PLAN).read_text().replace('"seed": 0', '"seed": 1')), "is not what compile wrote there")  # fmt: skip  # noqa: E501


# explain.json, with hashes that fit.


def explained(turn: Callable[[dict[str, Any]], object]) -> Change:
    def change(folder: Path) -> None:
        found = json.loads((folder / EXPLAIN).read_text())
        turn(found)
        text = json.dumps(found)
        (folder / EXPLAIN).write_text(text)
        sealed(lambda plan: plan["manifest"]["files"].update({EXPLAIN: digest(text)}))(folder)

    return change


TOLD: list[tuple[str, Any]] = [
    ("version", 99), ("world", "1"), ("blocks", [{}]), ("schedule", [{"devices": 0}]), ("counts", {"parts": -1}),
    ("totals", [{"way": "local"}]), ("bytes_moved", float("nan")), ("more", 1),
]  # fmt: skip
for _n, (_key, _value) in enumerate(TOLD):
    damage(f"{EXPLAIN} {_n}: {_key} {_value}", explained(lambda d, k=_key, v=_value: d.update({k: v})), EXPLAIN, readers=("explain", "diff"))  # fmt: skip  # noqa: E501


# What is certified, beyond numbers and depths.


def text(file: str, turn: Callable[[str], str]) -> Change:
    return lambda folder: (folder / file).write_text(turn((folder / file).read_text()))


for _file, _line in (
    ("program.txt", "program of 1000000000000 devices"),
    ("program.txt", f"program of {'9' * 5000} devices"),
    ("program.txt", 'mesh {"dp": 0}'),
    ("program.txt", "mesh [1]"),
    ("program.txt", "fold " + "[" * 5000),
    ("program.txt", "  x = " + "(" * 5000),
    ("program.txt", "  x = Weight(tensor=__import__('os'))"),
    ("model.txt", "model {}"),
    ("model.txt", 'model {"inputs": ' + "[" * 5000),
    ("model.txt", "op f = aten.f.default(" + "-" * 5000 + "1) : x[0] -> y[0] {n=2} {}"),
):
    damage(f"{_file}: {_line[:40]} {len(_line)}", text(_file, lambda t, n=_line: f"{n}\n{t}"), _file)


# The weights.


def weights(turn: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        values = load_file(folder / WEIGHTS)
        turn(values)
        save_file(values, folder / WEIGHTS)

    return change


def _long_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((2**62).to_bytes(8, "little") + (folder / WEIGHTS).read_bytes()[8:])


def _header(head: bytes) -> Change:
    return lambda folder: (folder / WEIGHTS).write_bytes(len(head).to_bytes(8, "little") + head)


damage("weights: a bit", weights(lambda v: v["head.bias"].view(torch.uint8)[0].bitwise_xor_(1)), WEIGHTS)
damage("weights: NaN", weights(lambda v: v["head.bias"].fill_(float("nan"))), WEIGHTS)
damage("weights: one left out", weights(lambda v: v.pop("head.bias")), WEIGHTS)
damage("weights: one more", weights(lambda v: v.update(more=torch.ones(2))), WEIGHTS)
damage("weights: another dtype", weights(lambda v: v.update({"head.bias": v["head.bias"].half()})), WEIGHTS)
damage("weights: another shape", weights(lambda v: v.update({"head.bias": v["head.bias"][None]})), WEIGHTS)
damage("weights: a long header", _long_header, WEIGHTS)
damage("weights: a deep header", _header(b"[" * 100_000), WEIGHTS)
damage("weights: a header of other types", _header(b'{"head.bias": {"data_offsets": ["a", {}]}}'), WEIGHTS)
damage("weights: offsets beyond the file", _header(b'{"head.bias": {"data_offsets": [0, %d]}}' % 2**80), WEIGHTS)
