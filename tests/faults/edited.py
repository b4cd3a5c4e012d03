"""Edits of a saved plan: what a hand, a disk or another plan may do to its files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import superscaler as ss
from superscaler.models import build

# Changes a folder that holds the plan; `other` holds another one.
Change = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Edit:
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


def save_plan(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model, plan, cluster = PLANS[name]
    built = build(model)
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-3)
    ss.compile(ss.capture(built.module, built.args, built.kwargs, optimizer), plan, cluster).save(folder)


# Ways to edit.


def text(file: str, old: str, new: str) -> Change:
    """Replace what first matches a pattern."""

    def change(folder: Path, _: Path) -> None:
        before = (folder / file).read_text()
        after, count = re.subn(old, new, before, count=1, flags=re.MULTILINE)
        assert count == 1, (file, old)
        assert after != before, (file, old)
        (folder / file).write_text(after)

    return change


def lines(file: str, turn: Callable[[list[str]], Sequence[str]]) -> Change:
    def change(folder: Path, _: Path) -> None:
        before = (folder / file).read_text().splitlines()
        after = list(turn(list(before)))
        assert after != before, file
        (folder / file).write_text("".join(f"{line}\n" for line in after))

    return change


def find(code: Sequence[str], pattern: str) -> int:
    return next(n for n, line in enumerate(code) if re.search(pattern, line))


def moved(code: list[str], pattern: str, before: str) -> list[str]:
    """Return the lines with one moved before another."""
    line = code.pop(find(code, pattern))
    code.insert(find(code, before), line)
    return code


def data(turn: Callable[[dict[str, Any]], Any]) -> Change:
    """Change plan.json: what `turn` returns, or what it did to it."""

    def change(folder: Path, _: Path) -> None:
        before = (folder / PLAN).read_text()
        plan = json.loads(before)
        found = turn(plan)
        after = json.dumps(plan if found is None else found)
        assert json.loads(after) != json.loads(before)
        (folder / PLAN).write_text(after)

    return change


def table(rank: int, turn: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the tables of one device."""

    def change(plan: dict[str, Any]) -> None:
        turn(plan["devices"][rank])

    return data(change)


def weight(rank: int, name: str, **new: Any) -> Change:
    def change(tables: dict[str, Any]) -> None:
        next(w for w in tables["weights"] if w["name"] == name).update(new)

    return table(rank, change)


def tensors(turn: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def change(folder: Path, _: Path) -> None:
        values = load_file(folder / WEIGHTS)
        turn(values)
        save_file(values, folder / WEIGHTS)

    return change


def content(file: str, new: bytes | str) -> Change:
    return lambda folder, _: (folder / file).write_bytes(new if isinstance(new, bytes) else new.encode()) and None


def cut(file: str) -> Change:
    """Keep the first half of a file."""

    def change(folder: Path, _: Path) -> None:
        old = (folder / file).read_bytes()
        (folder / file).write_bytes(old[: len(old) // 2])

    return change


def gone(file: str) -> Change:
    return lambda folder, _: (folder / file).unlink()


def a_folder(file: str) -> Change:
    def change(folder: Path, _: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return change


def theirs(*files: str) -> Change:
    """Take files of the other plan."""

    def change(folder: Path, other: Path) -> None:
        for file in files:
            shutil.copyfile(other / file, folder / file)

    return change


def put(place: Any, key: Any, value: Any) -> None:
    place[key] = value


def drop_entry(place: Any, key: Any) -> None:
    del place[key]


EDITS: list[Edit] = []


def edit(name: str, plan: str, change: Change, *places: str, is_other: bool = False) -> None:
    EDITS.append(Edit(name, plan, places, change, is_other))


# The code of devices.

_REDUCED = r"(?s)linear_product_1_work = .*?linear_product_1 = linear_product_1_work.wait\(\)"
edit("sum dropped", "grid", text(CODE, _REDUCED, "linear_product_1 = linear_product_1_m0"), CODE)
edit("sum over another group", "grid", text(CODE, r"(all_reduce\(d_gelu_1, )1", r"\g<1>0"), CODE)
edit("gathered along another dim", "grid", text(CODE, r"(all_gather\(.*, )1\)", r"\g<1>0)"), CODE)
edit("tensors of a bucket exchanged", "grid", text(CODE, r"bucket\((\(\w+), (\w+)", r"bucket((\2, \1"), CODE)
edit("gradients exchanged", "grid", text(CODE, r"bias', (d_layers_0_)bias__2", r"bias', d_layers_1_bias__2"), CODE)
edit("weight not updated", "grid", text(CODE, r"^ *\('head_weight'.*\n", ""), CODE)
edit("no gradient wanted", "grid", text(CODE, '"0111"', '"0110"'), CODE)
edit("task of another part", "pipe", text(CODE, '"s0_m1"', '"s0_m0"'), CODE)
edit("gradient not saved", "grid", text(CODE, r'"11", \(0,\)', '"11", ()'), CODE)
edit("function of another segment", "grid", text(CODE, "segments.layers_2", "segments.head_1"), CODE)
edit("send dropped", "pipe", text(CODE, r"^ *rt.send\(linear_m1.*\n", ""), CODE)
edit("message of another number", "pipe", text(CODE, r"(rt.send\(linear_m0, )0", r"\g<1>1"), CODE)
edit("received too early", "pipe", lines(CODE, lambda c: moved(c, r"rt\.recv", r"rt\.send")), CODE)
edit("received in another dtype", "pipe", text(CODE, r'(rt.recv.*)"float32"', r'\1"float64"'), CODE)
edit("arrives in another shape", "pipe", text(CODE, r"reshape\(\((\d+), (\d+)\)", r"reshape((\2, \1)"), CODE)
edit("added up one too few", "pipe", text("program_1.py", r"^ *d_head_bias\w* (\+=|= .* \+).*\n", ""), "program_1.py")
edit("slice of another table entry", "grid", text(CODE, r"(rt.slice\(.*\), )0", r"\g<1>1"), CODE)
edit("loss of nothing", "grid", text(CODE, r"rt.loss\(\(\w+,\)", "rt.loss(()"), CODE)
edit("deleted before it is read", "grid", lines(CODE, lambda c: moved(c, r"del .*\bgelu_1_m0", "head_1")), CODE)
edit("line twice", "pipe", text(CODE, r"^( *rt.send\(.*\n)", r"\1\1"), CODE)
edit("lines exchanged", "grid", lines(CODE, lambda c: moved(c, r"gelu_1_m0,\) =", "linear_product_1 =")), CODE)
edit("line of other work", "grid", text(CODE, r"^(import segments)$", r"\1\nimport os"), CODE)
edit("not Python", "grid", text(CODE, r"rt\.forward\(", "rt.forward(("), CODE)
edit("comment", "grid", text(CODE, "# layers.1", "# layers.2"), CODE, is_other=True)
edit("another weight read", "grid", text(CODE, r'rt.weight\("layers_0_bias"', 'rt.weight("layers_1_bias"'), CODE)

# Segments.

edit("another activation", "grid", text(SEGMENTS, r"F\.gelu\(", "F.silu("), SEGMENTS)
edit("another segment's activation", "grid", text(SEGMENTS, r"(?s)(def layers_2.*?)gelu = F.gelu", r"\1gelu = F.relu"), SEGMENTS)  # fmt: skip  # noqa: E501
edit("bias left out", "grid", text(SEGMENTS, r"linear_product \+ layers_bias", "linear_product"), SEGMENTS)
edit("inputs exchanged", "grid", text(SEGMENTS, r"def layers_1\(x, (\w+), (\w+), (\w+)", r"def layers_1(x, \3, \2, \1"), SEGMENTS)  # fmt: skip  # noqa: E501
edit("segment left out", "grid", text(SEGMENTS, r"(?s)def head_1.*?\n\n\n", ""), SEGMENTS)
edit("segment renamed", "grid", text(SEGMENTS, "def head_1", "def head_3"), SEGMENTS)
edit("labels counted without a class", "grid", text(SEGMENTS, "labels, -100, torch", "labels, -1, torch"), SEGMENTS)
edit("segments empty", "grid", content(SEGMENTS, ""), SEGMENTS)

# Tables of one device.

edit("group of others", "grid", table(1, lambda t: put(t["groups"], 0, [0, 2])), PLAN)
edit("group in another order", "grid", table(1, lambda t: put(t["groups"], 1, [1, 0])), PLAN)
edit("group outside the world", "grid", table(1, lambda t: put(t["groups"], 1, [0, 9])), PLAN)
edit("groups left out", "grid", table(2, lambda t: put(t, "groups", [])), PLAN)
edit("another peer", "pipe", table(0, lambda t: put(t["messages"][0], 0, 0)), PLAN)
edit("another message", "pipe", table(0, lambda t: put(t["messages"][0], 1, 7)), PLAN)
edit("messages exchanged", "pipe", table(0, lambda t: t["messages"].reverse()), PLAN)
edit("another box of a slice", "grid", table(1, lambda t: put(t["boxes"][0], 1, [4, 9])), PLAN)
edit("larger box of a slice", "grid", table(1, lambda t: put(t["boxes"][0], 1, [4, 10])), PLAN)
edit("other rows of a weight", "grid", weight(1, "layers_0_bias", box=[[0, 4]]), PLAN)
edit("more rows of a weight", "grid", weight(1, "layers_0_bias", box=[[0, 8]]), PLAN)
edit("another tensor as a weight", "grid", weight(1, "layers_1_bias", tensor="layers.0.bias"), PLAN)
edit("unknown tensor as a weight", "grid", weight(1, "layers_1_bias", tensor="layers.7.bias"), PLAN)
edit("weight not trained", "grid", weight(3, "head_weight", trained=False), PLAN)
edit("weight counted twice", "grid", weight(3, "head_bias", counted=True), PLAN)
edit("weight of another group", "grid", weight(3, "head_bias", group=1), PLAN)
edit("weight not there", "grid", table(2, lambda t: t["weights"].pop()), PLAN)
edit("other rows of the batch", "grid", table(3, lambda t: put(t["inputs"][1][1], 0, [0, 8])), PLAN)
edit("another input", "pipe", table(1, lambda t: put(t["inputs"][0], 0, "x")), PLAN)
edit("loss counted twice", "grid", table(1, lambda t: put(t["counted"][0], 0, True)), PLAN)
edit("loss not counted", "pipe", table(1, lambda t: put(t["counted"][0], 1, False)), PLAN)
edit("tables of two devices exchanged", "grid", data(lambda p: put(p, "devices", p["devices"][::-1])), PLAN)
edit("tables of a device left out", "grid", data(lambda p: p["devices"].pop()), PLAN)
edit("tables of a device empty", "grid", data(lambda p: put(p["devices"], 1, {})), PLAN)
edit("a number as text", "grid", table(0, lambda t: put(t["groups"], 0, ["0", "2"])), PLAN)

# The rest of plan.json.

edit("device runs another program", "pipe", data(lambda p: put(p["programs"], 1, "program_0")), PLAN)
edit("device runs an unknown program", "pipe", data(lambda p: put(p["programs"], 1, "program_7")), PLAN, "program_7")
edit("device runs a file elsewhere", "pipe", data(lambda p: put(p["programs"], 1, "../program_1")), PLAN, "program_1")
edit("another world", "grid", data(lambda p: put(p, "world", 8)), PLAN)
edit("no world", "grid", data(lambda p: drop_entry(p, "world")), PLAN)
edit("another version", "grid", data(lambda p: put(p, "version", 99)), PLAN)
edit("another dtype of an input", "grid", data(lambda p: put(p["inputs"]["x"], 1, "float16")), PLAN)
edit("another shape of an input", "grid", data(lambda p: put(p["inputs"]["x"], 0, [8, 32])), PLAN)
edit("an input left out", "grid", data(lambda p: drop_entry(p["inputs"], "x")), PLAN)
edit("another cut of a tensor", "grid", data(lambda p: put(p["slots"], "x", [[2, 8], [32]])), PLAN)
edit("more classes", "grid", data(lambda p: put(p["bounds"], "labels", 100)), PLAN)
edit("another dtype of the loss", "grid", data(lambda p: put(p, "loss_dtype", "float64")), PLAN)
edit("another learning rate", "grid", data(lambda p: put(p["optimizer"]["groups"][0], "lr", 1.0)), PLAN)
edit("another optimizer", "grid", data(lambda p: put(p["optimizer"], "name", "SGD")), PLAN)
edit("no group of the optimizer", "grid", data(lambda p: put(p["optimizer"], "groups", [])), PLAN)
edit("operators of a file that is not there", "grid", data(lambda p: put(p, "operators", {"my.op": ["my", "my.py"]})), PLAN, "my.op", "my.py")  # fmt: skip  # noqa: E501
edit("another seed", "grid", data(lambda p: put(p, "seed", 1)), PLAN, is_other=True)
edit("no manifest", "grid", data(lambda p: drop_entry(p, "manifest")), PLAN, "manifest", is_other=True)
for key in ("model", "weights", "code"):
    change_ = data(lambda p, k=key: put(p["manifest"], k, "0" * 64))
    edit(f"another {key} in the manifest", "grid", change_, PLAN, key, "manifest", is_other=True)
edit("foreign JSON", "grid", content(PLAN, '{"name": "something else"}'), PLAN)
edit("a list", "grid", content(PLAN, "[]"), PLAN)
edit("a number", "grid", content(PLAN, "1"), PLAN)
edit("devices as a number", "grid", data(lambda p: put(p, "devices", 4)), PLAN)
edit("not JSON", "grid", content(PLAN, "{world: 4"), PLAN)
edit("not text", "grid", content(PLAN, b"\xff\xfe\x00\x01"), PLAN)

# Whole files.

for file in (PLAN, SEGMENTS, CODE, WEIGHTS, *TOLD):
    edit(f"{file} deleted", "grid", gone(file), file)
    edit(f"{file} empty", "grid", content(file, ""), file)
    edit(f"{file} cut short", "grid", cut(file), file)
    edit(f"{file} of another plan", "grid", theirs(file), file, "program_1.py", PLAN)
    edit(f"{file} a folder", "grid", a_folder(file), file)
edit("code and tables of another plan", "grid", theirs(PLAN, CODE, SEGMENTS), PLAN, "program_1.py", CODE, SEGMENTS)

# What is checked, line by line, whatever its form.


def digit(line: str, by: int) -> str:
    """Return a line whose last number is another."""
    found = list(re.finditer(r"\d+", line))[-1]
    return line[: found.start()] + str(int(found[0]) + by) + line[found.end() :]


def with_number(code: list[str]) -> int:
    """Return a line in the middle that has a number."""
    return next(n for n in range(len(code) // 2, len(code)) if re.search(r"\d", code[n]))


for file in TOLD:
    edits: dict[str, Callable[[list[str]], Sequence[str]]] = {
        "a line left out": lambda c: [*c[: len(c) // 2], *c[len(c) // 2 + 1 :]],
        "a line twice": lambda c: [*c[: len(c) // 2], c[len(c) // 2], *c[len(c) // 2 :]],
        "a line of other text": lambda c: [*c[: len(c) // 2], "something else", *c[len(c) // 2 + 1 :]],
        "the first line left out": lambda c: c[1:],
        "the last line left out": lambda c: c[:-1],
        "a number larger": lambda c: [*c[: (n := with_number(c))], digit(c[n], 1), *c[n + 1 :]],
        "a number much larger": lambda c: [*c[: (n := with_number(c))], digit(c[n], 10**9), *c[n + 1 :]],
        "lines in reverse": lambda c: c[::-1],
    }
    for what, turn in edits.items():
        edit(f"{file}: {what}", "grid", lines(file, turn), file, "device", CODE, PLAN)

# The weights.


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


def _scaled(values: dict[str, torch.Tensor]) -> None:
    values["head.bias"] = values["head.bias"] + 1


def _shorter(values: dict[str, torch.Tensor]) -> None:
    values["head.bias"] = values["head.bias"][:-1].clone()


def _rounded(values: dict[str, torch.Tensor]) -> None:
    values["head.bias"] = values["head.bias"].half()


edit("a weight of other values", "grid", tensors(_scaled), WEIGHTS, "weights", is_other=True)
edit("a weight of another shape", "grid", tensors(_shorter), WEIGHTS, "head.bias")
edit("a weight of another dtype", "grid", tensors(_rounded), WEIGHTS, "head.bias")
edit("a weight left out", "grid", tensors(lambda v: v.pop("head.bias")), WEIGHTS, "head.bias")
edit("weights that overlap", "grid", _overlapped, WEIGHTS)
edit("foreign weights", "grid", lambda folder, _: save_file({"a": torch.zeros(2)}, folder / WEIGHTS), WEIGHTS)
