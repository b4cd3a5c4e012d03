"""The doctor: what it tries out, and what it says when something is missing."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch._inductor.exc import InvalidCxxCompiler

from superscaler.cli import doctor as rooms
from superscaler.cli import measure as links
from superscaler.cli.printing import Printer
from superscaler.cluster import LOCAL, PRESETS, Cluster
from superscaler.measure.profile import Sample
from superscaler.simulate.rates import seconds
from superscaler.simulate.works import Kernel
from superscaler.store import cache
from tests.helpers.commands import answer, run


@pytest.mark.dist
def test_this_machine_is_ready(capfd: pytest.CaptureFixture[str]) -> None:
    found, _ = answer(capfd, "doctor")
    assert found["ready"] is True
    checks = {c["name"]: c for c in found["checks"]}
    assert {"python", "torch", "gloo (CPU)", "CUDA", "transformers", "cores", "memory", "cache"} <= checks.keys()
    assert checks["gloo (CPU)"]["found"] == "2 processes, all_reduce"


def test_the_cache_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.write("0", bytes(1_500_000))
    assert rooms._cache().found == f"{tmp_path}/superscaler: 1 captures, 1.5 MB"
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert cache.folder().is_absolute()


def test_the_folder_of_compiled_segments_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert rooms._compiled().found.endswith(f"compiled segments are kept in {tmp_path}")
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: raised(InvalidCxxCompiler()))
    assert not rooms._compiled().ok


def raised(error: Exception) -> str:
    raise error


def test_a_failed_probe_tells_which_rank_and_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'RuntimeError: no network' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(rooms.sys, "executable", str(fake))
    check = rooms.gloo()
    assert not check.ok
    assert check.required
    assert check.found.startswith("rank 0 of 2 failed with exit code 1: see its last output above.")


def test_missing_torch_is_not_ready_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rooms, "_version", lambda package: None)
    checks = {c["name"]: c for c in answer(capsys, "doctor", code=1)[0]["checks"]}
    assert checks["torch"]["ok"] is False
    assert "torch>=2.11,<2.16" in checks["torch"]["advice"]
    assert "superscaler[hf]" in checks["transformers"]["advice"]


@pytest.mark.parametrize(
    ("version", "ok"), [("2.10.0", False), ("2.11.0", True), ("2.13.1+cpu", True), ("2.16.0a0", False)]
)
def test_the_range_of_torch(
    version: str, ok: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rooms, "_version", lambda package: version)
    assert rooms.torch_in_range().ok is ok
    assert run("plans") == (0 if ok else 2)
    assert ok or capsys.readouterr().err == f"error: torch is {version}; pip install 'torch>=2.11,<2.16'.\n"


def test_the_range_of_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = next(d for d in project["dependencies"] if d.startswith("torch"))
    assert tuple(rooms.parse_version(v) for v in re.findall(r"[\d.]+", needed)) == rooms.TORCH


@pytest.mark.dist
def test_a_measured_cluster_is_taken_by_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By those of docs/clusters.md."""
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    (text,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    measure, use = (line.split()[1:] for line in text.splitlines())
    monkeypatch.chdir(tmp_path)
    # The smallest models alone.
    monkeypatch.setattr(links, "_MODELS", ["2"])
    monkeypatch.setattr(links, "_COLLECTIVES", ["2", "2"])
    file = tmp_path / "cluster.yaml"
    found, _ = answer(capfd, *measure)
    cluster = Cluster.parse(str(file))
    assert str(cluster) == found["cluster"]
    assert cluster.is_local
    assert cluster.links != PRESETS[LOCAL].links
    assert {kind: len(curve) for kind, curve in cluster.links.curves.items()}["all_reduce"] == 2
    assert all(0 < cluster.links.start(kind, 1024) < 0.1 for kind in cluster.links.curves)
    kind = cluster.device_kind
    assert kind is not None
    assert kind.speeds is not None
    assert set(kind.speeds.products) == {"float32", "bfloat16"}
    assert 1 <= kind.speeds.slowdown <= 20
    assert {"gelu float32", "product bfloat16", "_fused_adamw_ float32"} <= set(kind.speeds.operators)
    x = (4096, 1024), "float32"
    # Between 1 and 100 GB/s.
    assert 5e-4 < seconds(Kernel("add.Tensor", (x, x), (x,)), kind) < 5e-2
    kinds = {s["kind"] for s in found["samples"]}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"}
    assert all(len({s["size"] for s in found["samples"] if s["kind"] == kind}) >= 2 for kind in kinds)
    # Four digits are kept, the link is a line, and a line through points comes near the most of them.
    errors = sorted(abs(s["fitted"] / s["seconds"] - 1) for s in found["samples"])
    assert errors[-1] == pytest.approx(found["largest_error"])
    assert errors[len(errors) // 2] < 1
    assert run(*use) == 0


def test_kernels_of_a_gpu_are_those_that_were_measured_in_the_form_of_a_preset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x = ((8192, 4096), "float32")
    samples = [
        asdict(Sample(Kernel("add.Tensor", (x, x), (x,)), 2e-4)),
        asdict(Sample(Kernel("mm", (x, x), (x,)), 5e-3)),
    ]
    found = {"samples": samples, "floor": 2e-6, "issue": 24e-6, "host": 5e10, "units": 100, "memory": 70 * 10**9}
    kind, known = links._gpu(Printer(False), "NVIDIA H100 80GB HBM3", found)
    assert (kind.name, kind.memory, kind.flops) == (LOCAL, 70 * 10**9, PRESETS["h100"].device.flops)
    assert kind.speeds is not None
    assert (kind.speeds.units, kind.speeds.issue) == (100, 24e-6)
    assert known.host == replace(PRESETS["h100"].links.host, bandwidth=5e10)
    assert known.pair == PRESETS["h100"].links.pair
    other, _ = links._gpu(Printer(False), "NVIDIA T4", found)
    # The best that was measured.
    assert other.flops["float32"] > 1e12
    out = capsys.readouterr().out
    assert "the host starts a kernel in 24.0 us; copies to it: 50.0 GB/s" in out
    assert "what was not measured is that of the preset h100" in out
    assert "NVIDIA T4 is no preset; what was not measured is that of a100" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "x.yaml"], "--out is for a measurement; add --measure."),
        (["--cluster", "local:2"], "--cluster is for a measurement; add --measure."),
        (["--measure", "--out", "x.txt"], "--out x.txt does not end in .yaml, by which --cluster knows a file; "),
        (["--measure", "--out", "no/x.yaml"], "--out no/x.yaml is in a folder that does not exist; make no first."),
        (["--measure", "--out", "folder.yaml"], "--out folder.yaml cannot be written: it is a folder."),
        (
            ["--measure", "--cluster", "local:1"],
            "--cluster local:1 has 1 devices; write local:2 to local:64: links join ",
        ),
        (["--measure", "--cluster", "v100:1x2"], "--cluster v100:1x2 is not this machine, which alone can be measured"),
    ],
)
def test_what_cannot_be_measured_is_told(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "folder.yaml").mkdir()
    assert run("doctor", *options) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.yaml"]


def test_more_gpus_than_there_are_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert run("doctor", "--measure", "--cluster", "local:2") == 2
    assert "local:2 has 2 devices, but this machine has 1 GPUs; write local:1." in capsys.readouterr().err
