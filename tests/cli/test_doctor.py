"""The doctor: what it tries out, and what it says when something is missing."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from superscaler import cache
from superscaler.cli import doctor as rooms
from superscaler.cli.main import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.mark.dist
def test_this_machine_is_ready(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json") == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["ready"] is True
    checks = {c["name"]: c for c in found["checks"]}
    assert {"python", "torch", "gloo (CPU)", "CUDA", "transformers", "cores", "memory", "cache"} <= checks.keys()
    assert checks["gloo (CPU)"]["found"] == "2 processes, all_reduce"


def test_the_cache_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.write("0", {"part": bytes(1_500_000)})
    assert rooms._cache().found == f"{tmp_path}/superscaler: 1 captures, 1.5 MB"


def test_a_failed_probe_tells_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'RuntimeError: no network' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(rooms.sys, "executable", str(fake))
    check = rooms.gloo()
    assert not check.ok
    assert check.required
    assert check.found == "RuntimeError: no network"


def test_missing_torch_is_not_ready_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rooms, "_version", lambda package: None)
    assert run("doctor", "--json") == 1
    out, _ = capsys.readouterr()
    checks = {c["name"]: c for c in json.loads(out.splitlines()[-1])["checks"]}
    assert checks["torch"]["ok"] is False
    assert "torch>=2.11,<2.14" in checks["torch"]["advice"]
    assert "superscaler[hf]" in checks["transformers"]["advice"]


@pytest.mark.parametrize(
    ("version", "ok"), [("2.10.0", False), ("2.11.0", True), ("2.13.1+cpu", True), ("2.14.0a0", False)]
)
def test_the_range_of_torch(version: str, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "_version", lambda package: version)
    assert rooms._torch().ok is ok


def test_the_range_of_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = next(d for d in project["dependencies"] if d.startswith("torch"))
    assert tuple(rooms.parse_version(v) for v in re.findall(r"[\d.]+", needed)) == rooms.TORCH
