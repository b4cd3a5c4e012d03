"""Edits of a saved plan by a hand, or by another plan: each is refused with one message that says where.

Code and tables are compared with what the program says, as text and as data, so that one edit of a kind shows all; the
program and the model are read and certified. The manifest has a hash of each file: one edit of each is enough for it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import superscaler as ss
from superscaler.models import build
from tests.helpers.commands import run

# Changes a folder that holds the plan; `other` holds another one.
Change = Callable[[Path, Path], object]


class Edit(NamedTuple):
    """`change` of the files of `plan`; a refusal names one of `places`.

    Without the manifest nobody can tell an edit with `is_other` from another plan that holds.
    """

    name: str
    plan: str
    places: tuple[str, ...]
    change: Change
    is_other: bool = False


PLANS = {
    "grid": ("mlp:hidden=8", "hybrid:dp=2,tp=2,vocabulary=false", "local:4"),
    "pipe": ("mlp:hidden=12", "pipeline_1f1b:stages=2,microbatches=2", "local:2"),
}
PLAN, SEGMENTS, WEIGHTS, CODE = "plan.json", "segments.py", "initial.safetensors", "program_0.py"
# What tells a plan: as it is checked, and the model.
TOLD = ("program.txt", "model.txt")
EDITS: list[Edit] = []


def edit(name: str, change: Change, *places: str, plan: str = "grid", is_other: bool = False) -> None:
    EDITS.append(Edit(name, plan, places, change, is_other))


# Code.


def text(file: str, turn: Callable[[str], str]) -> Change:
    return lambda folder, _: (folder / file).write_text(turn((folder / file).read_text()))


def sub(file: str, old: str, new: str) -> Change:
    """Replace what first matches a pattern."""
    return text(file, lambda before: re.sub(old, new, before, count=1, flags=re.MULTILINE))


edit("a sum over another group", sub(CODE, r"(all_reduce\(d_gelu_1, )1", r"\g<1>0"), CODE)
edit("a weight not updated", sub(CODE, r"rt.update\(\(head\[1\], (.*)d_weights", r"rt.update((\1d_weights[1:]"), CODE)
edit(
    "a line twice",
    sub("program_1.py", r"^( *rt.recv\(.*\n| *\w+ = rt.recv\(.*\n)", r"\1\1"),
    "program_1.py",
    plan="pipe",
)
edit("no Python", sub(CODE, r"rt\.forward\(", "rt.forward(("), CODE)
edit("a comment", sub(CODE, "# layers.1", "# layers.2"), CODE)
edit("blanks at the end", text(CODE, lambda code: code + "\n"), CODE)
edit("another activation", sub(SEGMENTS, r"F\.gelu\(", "F.silu("), SEGMENTS)
edit("no segments", text(SEGMENTS, lambda _: ""), SEGMENTS)
edit("what starts a rank", text("run.py", lambda code: code + "import os\n"), "run.py")


# The data in plan.json.


def data(turn: Callable[[dict[str, Any]], object]) -> Change:
    def change(folder: Path, _: Path) -> None:
        plan = json.loads((folder / PLAN).read_text())
        turn(plan)
        (folder / PLAN).write_text(json.dumps(plan))

    return change


def put(*way: Any) -> Change:
    """Put the last of these at the place that the others name."""

    def turn(plan: Any) -> None:
        *parents, last, value = way
        for key in parents:
            plan = plan[key]
        plan[last] = value

    return data(turn)


edit("a number of a table", put("devices", 1, "groups", 0, [0, 2]), PLAN)
edit("a number outside of the world", put("devices", 1, "groups", 1, [0, 9]), PLAN)
edit("a number as text", put("devices", 0, "groups", 0, ["0", "2"]), PLAN)
edit("an empty table", put("devices", 2, "groups", []), PLAN)
edit("a flag", put("devices", 3, "weights", -1, "trained", False), PLAN)
edit("a name", put("devices", 1, "inputs", 0, 0, "x"), PLAN, plan="pipe")
edit("an entry left out", data(lambda p: p["devices"][2]["weights"].pop()), PLAN)
edit("tables of devices exchanged", data(lambda p: p["devices"].reverse()), PLAN)
edit("a device left out", data(lambda p: p["devices"].pop()), PLAN)
edit("another program of a device", put("programs", 1, "program_0"), PLAN, plan="pipe")
edit("an unknown program", put("programs", 1, "program_7"), PLAN, "program_7", plan="pipe")
edit("another world", put("world", 8), PLAN)
edit("an input left out", data(lambda p: p["inputs"].pop("x")), PLAN)
edit("an input more", data(lambda p: p["inputs"].update(z=p["inputs"]["x"])), PLAN)
edit("another learning rate", put("optimizer", "groups", 0, "lr", 1.0), PLAN)
edit("operators of nobody", put("operators", {"my.op.x": None}), PLAN)
edit("another seed", put("seed", 1), PLAN, is_other=True)
edit("another hash of the code", put("manifest", "code", "0" * 64), PLAN, "code", is_other=True)


# Files of another plan.


def theirs(*files: str) -> Change:
    return lambda folder, other: [shutil.copyfile(other / file, folder / file) for file in files]


for file in (PLAN, SEGMENTS, CODE, WEIGHTS, *TOLD):
    edit(f"{file} of another plan", theirs(file), file, "program_1.py", PLAN)
edit("code and tables of another plan", theirs(PLAN, CODE, SEGMENTS), PLAN, "program_1.py", CODE, SEGMENTS)


# What is checked, line by line, whatever its form.


def digit(code: list[str], by: int) -> list[str]:
    """Return the lines with another last number in one in the middle."""
    n = next(n for n in range(len(code) // 2, len(code)) if re.search(r"\d", code[n]))
    found = list(re.finditer(r"\d+", code[n]))[-1]
    return [*code[:n], f"{code[n][: found.start()]}{int(found[0]) + by}{code[n][found.end() :]}", *code[n + 1 :]]


def middle(*new: int | str) -> Callable[[list[str]], Sequence[str]]:
    """Replace the line in the middle by others; a number is the line itself."""

    def turn(code: list[str]) -> Sequence[str]:
        n = len(code) // 2
        return [*code[:n], *(code[n] if isinstance(line, int) else line for line in new), *code[n + 1 :]]

    return turn


LINES: dict[str, Callable[[list[str]], Sequence[str]]] = {
    "nothing": lambda code: [],
    "half": lambda code: code[: len(code) // 2],
    "a line left out": middle(),
    "a line twice": middle(0, 0),
    "a line of other text": middle("something else"),
    "the first line left out": lambda code: code[1:],
    "the last line left out": lambda code: code[:-1],
    "a number larger": lambda code: digit(code, 1),
    "a number much larger": lambda code: digit(code, 10**9),
    "lines in reverse": lambda code: code[::-1],
}
for file in TOLD:
    for what, turn in LINES.items():
        change = text(file, lambda t, turn=turn: "".join(f"{line}\n" for line in turn(t.splitlines())))
        edit(f"{file}: {what}", change, *TOLD, "device", CODE, PLAN)


# The weights.


def tensors(turn: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path, _: Path) -> None:
        values = load_file(folder / WEIGHTS)
        turn(values)
        save_file(values, folder / WEIGHTS)

    return change


def _overlapped(folder: Path, _: Path) -> None:
    """Let two tensors of one size have the same bytes; the file keeps its size."""
    before = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(before[:8], "little")
    header = json.loads(before[8 : 8 + length])
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    last = max(end for _, end in spans.values())
    one, other = next(
        (a, b) for a in spans for b in spans
        if a != b and last not in spans[a] and spans[a][1] - spans[a][0] == spans[b][1] - spans[b][0]
    )  # fmt: skip
    header[one]["data_offsets"] = spans[other]
    after = json.dumps(header, separators=(",", ":")).encode()
    (folder / WEIGHTS).write_bytes(len(after).to_bytes(8, "little") + after + before[8 + length :])


edit("other values", tensors(lambda v: v["head.bias"].add_(1)), WEIGHTS, "weights", is_other=True)
edit("another shape", tensors(lambda v: v.update({"head.bias": v["head.bias"][:-1].clone()})), WEIGHTS, "head.bias")
edit("another dtype", tensors(lambda v: v.update({"head.bias": v["head.bias"].half()})), WEIGHTS, "head.bias")
edit("a weight left out", tensors(lambda v: v.pop("head.bias")), WEIGHTS, "head.bias")
edit("weights that overlap", _overlapped, WEIGHTS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("plans") / name for name in PLANS}
    for name, folder in found.items():
        torch.manual_seed(0)
        model, plan, cluster = PLANS[name]
        built = build(model)
        optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-3)
        graph = ss.capture(built.module, built.args, built.kwargs, optimizer)
        ss.compile(graph, plan, cluster).save(folder, evaluation=False)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_plans_as_they_were_saved_hold(saved: dict[str, Path]) -> None:
    assert [
        run("validate", str(folder), *options) for folder in saved.values() for options in ((), ("--no-manifest",))
    ] == [0] * 4


FIRST = {edit.places[0]: edit for edit in reversed(EDITS)}
CASES = [(edit, ("--no-manifest",)) for edit in EDITS] + [(edit, ()) for edit in FIRST.values()]


@pytest.mark.parametrize(("edit", "options"), CASES, ids=lambda x: x.name if isinstance(x, Edit) else "".join(x))
def test_an_edit_is_refused_and_its_place_told(
    edit: Edit, options: tuple[str, ...], saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(saved[edit.plan], tmp_path / "plan"))
    edit.change(folder, next(saved[name] for name in PLANS if name != edit.plan))
    assert contents(folder) != contents(saved[edit.plan])
    code = run("validate", str(folder), *options)
    told = capsys.readouterr().err
    if code == 0 and options:
        assert edit.is_other, "it holds"
        return
    assert code in (1, 2)
    assert told.startswith("error: ")
    assert told.count("error: ") == 1
    assert any(place in told for place in edit.places), told
