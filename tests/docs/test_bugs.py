"""The page about bugs of other systems: each, made on purpose, is refused in the words of the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import superscaler as ss
from superscaler.certify.certificate import CHECKS
from superscaler.errors import PlanError
from superscaler.ir.program import Device, Free, Program
from superscaler.ir.text.program import parse_program, print_program
from superscaler.runtime.compiled import inductor
from superscaler.verify.plan_dir import validate_directory
from tests.helpers.graphs import graph_of

PAGE = (Path(__file__).parents[2] / "docs" / "bugs.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
COMPILER = "24. A compiler leaves a part of a gradient out"
BUGS = [title for title in SECTIONS if title[0].isdecimal() and title != COMPILER]


def blocks(bug: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[bug], re.DOTALL | re.MULTILINE)


@cache
def plan_of(command: str) -> ss.Plan:
    found = re.fullmatch(r"(\S+) --plan (.+) --cluster (\S+)", command)
    assert found, command
    return ss.compile(graph_of(found[1]), found[2].strip('"'), found[3])


def without_frees(device: Device) -> Device:
    return replace(device, instructions=tuple(i for i in device.instructions if not isinstance(i, Free)))


def edited(text: str, diff: Sequence[str]) -> str:
    """Return a text after a diff. In it `...` is anything; in a new line, what it was in the removed line."""
    lines, result, held = iter(text.splitlines()), list[str](), ()
    for sign, wanted in ((line[0], line[1:].strip()) for line in diff):
        if sign == "+":
            for piece in held:
                wanted = wanted.replace("...", piece, 1)
            result.append(f"  {wanted}")
            continue
        pattern = "(.*?)".join(map(re.escape, wanted.split("...")))
        matches = ((line, re.fullmatch(pattern, line.strip())) for line in lines)
        for line, match in matches:
            if match is not None:
                held, kept = (match.groups(), []) if sign == "-" else (held, [line])
                result += kept
                break
            result.append(line)
        else:
            raise AssertionError(f"there is no line {wanted}")
    return "\n".join([*result, *lines, ""])


def changed(program: Program, diff: Sequence[str]) -> Program:
    """Return a program after a diff of the devices that are named in its lines `@@ device 0, 2 @@`, or of all."""
    devices = [without_frees(device) for device in program.devices]
    hunks = re.split(r"^@@ devices? (.*) @@\n", "".join(f"{line}\n" for line in diff), flags=re.MULTILINE)
    everywhere = ", ".join(map(str, range(len(devices))))
    named = list(zip([everywhere, *hunks[1::2]], hunks[::2], strict=True))
    texts = [print_program(replace(program, devices=())).replace("of 0", f"of {len(devices)}")]
    for device in devices:
        text = print_program(replace(program, devices=(device,), functions=())).partition("\n")[2]
        for places, hunk in named:
            if hunk and str(device.rank) in places.split(", "):
                text = edited(text, hunk.splitlines())
        texts.append(text)
    return parse_program("".join(texts), program.model)


def check(program: Program) -> None:
    for check_one in CHECKS.values():
        check_one(program)


def make(bug: str, folder: Path) -> None:
    """Compile the plan of a bug, or certify its program, or its code in a folder."""
    for command in re.findall(r"^\$ superscaler compile (.*)$", SECTIONS[bug], re.MULTILINE):
        plan_of(command)
    for code in blocks(bug, "python"):
        names: dict[str, Any] = {}
        exec(compile(code, "mine.py", "exec"), names)
        ss.compile(graph_of("mlp"), names["plan"], "local:2")
    for diff in blocks(bug, "diff"):
        head, *lines = diff.splitlines()
        plan = plan_of(head.removeprefix("--- "))
        if lines[0].startswith("+++ "):
            plan.save(folder, evaluation=False)
            file = folder / lines[0].removeprefix("+++ plan/")
            file.write_text(edited(file.read_text(), lines[1:]))
            validate_directory(folder, manifest=False)
        check(changed(plan.compiled.program, lines))


def test_the_plans_of_the_page_hold_without_the_bugs() -> None:
    heads = {diff.splitlines()[0] for bug in BUGS for diff in blocks(bug, "diff")}
    for head in heads:
        check(changed(plan_of(head.removeprefix("--- ")).compiled.program, []))


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_refused_in_the_words_of_the_page(bug: str, tmp_path: Path) -> None:
    (shown,) = blocks(bug, "text")
    pattern = ".*".join(map(re.escape, " ".join(shown.split()).split("...")))
    with pytest.raises(PlanError) as refused:
        make(bug, tmp_path)
    said = " ".join(str(refused.value).replace(f"{tmp_path}/", "plan/").split())
    assert re.fullmatch(pattern, said), said


def test_a_compiler_that_leaves_a_gradient_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of the page. What it sets in the module is put back."""
    (code,), (shown,) = blocks(COMPILER, "python"), blocks(COMPILER, "text")
    monkeypatch.setattr(inductor, "compiled", inductor.compiled)
    with pytest.warns(UserWarning, match=".*".join(map(re.escape, shown.strip().split("...")))):
        exec(compile(code, "bugs.md", "exec"), {"graph": graph_of("mlp")})


def test_no_weight_is_left_out_of_the_norm_of_a_clipped_step() -> None:
    """A clipped step changes each weight as the module's does."""
    (command,) = re.findall(r"^\$ superscaler verify (.*)$", PAGE, re.MULTILINE)
    found = plan_of(command).verify()
    clip = found["options"]["clip"]
    assert found["equal"]
    assert 0 < clip["value"] < 1
    assert clip["error"] < 1e-9
