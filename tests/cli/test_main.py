"""The command line's frame: help without torch, options that stay what they are, exit codes, where output goes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import superscaler
from superscaler import models, plans
from superscaler.cli import common
from superscaler.cli.main import app
from superscaler.cli.printing import printing
from superscaler.errors import InputError, ScheduleError
from superscaler.timing import phase
from tests.helpers.commands import run

COMPILED = ["--plan", "single", "--cluster", "local:1"]


def test_help_imports_nothing_that_takes_long() -> None:
    code = (
        "import sys\n"
        "from superscaler.cli.main import main\n"
        "for arguments in (['--help'], ['train', '--help'], ['--version']):\n"
        "    try:\n        main(arguments)\n"
        "    except SystemExit as ended:\n        assert ended.code == 0\n"
        "slow = {'torch', 'numpy', 'transformers', 'superscaler.store.plan', 'superscaler.report.schema'}\n"
        "print(sorted(slow & set(sys.modules)))\n"
        "import superscaler as ss\n"
        "ss.Cluster.local(2)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--save-every" in done.stdout


PLAN = """
import torch, superscaler as ss
from superscaler.models import build
built = build("mlp:layers=4,hidden=8,inputs=4,classes=4,batch=8")
optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-3)
graph = ss.capture(built.module, built.args, built.kwargs, optimizer, check=False)
ss.compile(graph, "hybrid:dp=2,tp=2,pp=2,microbatches=2", "local:8").save(folder, evaluation=False)
"""


def test_all_names_of_the_package_are_there() -> None:
    assert all(getattr(superscaler, name) is not None for name in superscaler.__all__)
    assert len(dir(superscaler)) == len(superscaler.__all__)


@pytest.mark.dist
def test_a_process_with_another_seed_of_hashes_emits_equal_bytes(tmp_path: Path) -> None:
    code = f"print(hash('a text'))\nfolder = {str(tmp_path / '1')!r}\n{PLAN}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) != hash("a text")
    exec(PLAN, {"folder": tmp_path / "2"})
    names = sorted(path.name for path in (tmp_path / "1").iterdir() if path.is_file())
    assert names == sorted(path.name for path in (tmp_path / "2").iterdir() if path.is_file())
    assert "segments.py" in names
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Splitt'"):
        superscaler.Splitt  # noqa: B018


def test_the_options_of_every_command() -> None:
    """A changed option breaks somebody's script: this list is changed on purpose or not at all."""
    import typer

    command = typer.main.get_command(app)
    commands = dict(command.commands)  # type: ignore[attr-defined]
    for group in ("checkpoint", "launch"):
        commands |= {f"{group} {name}": c for name, c in commands[group].commands.items()}
    every = {"--config", "--json", "--timings"}
    listed = {name: {o for p in c.params for o in p.opts} for name, c in commands.items()}
    assert all(every <= options for name, options in listed.items() if name not in ("checkpoint", "launch"))
    found = {name: sorted(options - every) for name, options in listed.items()}
    model = ["--autocast", "--lr", "--no-cache", "--no-check", "--optimizer", "--precision", "--set"]
    compiling = [*model, "--cluster", "--lengths", "--no-overlap", "--plan"]
    training = ["--clip", "--cuda-graph", "--data", "--ema", "--eval", "--eval-every", "--schedule", "--warmup"]
    training += ["--keep", "--on-failed-save", "--profile", "--resume", "--run", "--save", "--save-every", "--weights"]
    assert found == {
        "capture": [*model, "model"],
        "compile": sorted([*compiling, "--evaluation", "--out", "--seed", "model"]),
        "validate": sorted([*compiling, "--no-manifest", "directory", "model"]),
        "verify": sorted([*compiling, "--gpu", "--processes", "--shapes", "--torch-compile", "model"]),
        "simulate": sorted(
            [
                *compiling,
                "--attention",
                "--balance",
                "--broadcast",
                "--compare",
                "--cuda-graph",
                "--fused",
                "--memory",
                "--no-prefetch",
                "--overlap",
                "--documents",
                "--sum-halves",
                "--torch-compile",
                "directory",
                "model",
            ]
        ),
        "search": sorted(
            [
                *model,
                "--attention",
                "--balance",
                "--batch",
                "--broadcast",
                "--cluster",
                "--cuda-graph",
                "--documents",
                "--fused",
                "--like",
                "--measure",
                "--memory",
                "--no-prefetch",
                "--out",
                "--overlap",
                "--seconds",
                "--sum-halves",
                "--top",
                "--torch-compile",
                "--where",
                "--why-not",
                "model",
            ]
        ),
        "train": sorted(
            [*compiling, *training, "--check-finite", "--out", "--seed", "--steps", "--torch-compile", "model"]
        ),
        "checkpoint": [],
        "checkpoint export": ["--ema", "--format", "--model", "--out", "checkpoint"],
        "checkpoint import": ["--out", "--trust", "source"],
        "checkpoint inspect": ["checkpoint"],
        "launch": [],
        "launch kubernetes": ["--claim", "--image", "--max-restarts", "options", "plan"],
        "launch slurm": ["--max-restarts", "--partition", "--time", "options", "plan"],
        "launch torchrun": ["--max-restarts", "options", "plan"],
        "explain": ["--svg", "--timeline", "plan"],
        "report": ["--out", "--run", "--trace", "plans"],
        "diff": ["plan_a", "plan_b"],
        "plans": ["name"],
        "models": [],
        "doctor": ["--cluster", "--measure", "--out"],
        "examples": ["directory"],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["capture", "gtp2"], "error: unknown model 'gtp2'; did you mean 'gpt2'?"),
        (["capture", "mlp:layers=x"], "error: 'mlp:layers=x': layers is 'x', but it must be a whole number, as 4."),
        (["capture", "mlp", "--optimizer", "admaw"], "error: unknown optimizer 'admaw'; did you mean 'adamw'?"),
        (["capture", "mlp", "--lr", "0"], "error: --lr is 0.0, but a learning rate is a finite number above 0."),
        (["compile", "mlp", "--plan", "singel", "--cluster", "local:1"], "error: unknown plan 'singel'"),
        (["verify", "mlp", "--plan", "single", "--cluster", "locl:1"], "error: unknown cluster 'locl'"),
        (["validate", "no.py:f", *COMPILED], "error: there is no model file no.py"),
        (["train", "mlp", "--plan", "single", "--cluster", "v100:1x2"], "write local:N, or compile with --out"),
        (["train", "mlp", *COMPILED, "--clip", "0"], "error: --clip is 0.0"),
        (["train", "mlp", *COMPILED, "--data", "nowhere.txt"], "error: --data nowhere.txt: nowhere.txt is no file"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_what_there_is_has_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in (("plans", plans.names()), ("models", models.names())):
        assert run(command, "--json") == 0
        out, err = capsys.readouterr()
        found = json.loads(out)
        assert sorted(found) == names
        assert all(name in err for name in names)
        assert all(len(about["keys"]) + len(about.get("about", "")) > 1 for about in found.values())
    assert run("train", "-h") == 0
    told = capsys.readouterr().out
    # Where the names of plans and models are listed.
    plain = " ".join(told.replace("│", " ").split())
    assert "`superscaler plans`" in plain
    assert "`superscaler models`" in plain
    groups = [line.strip("╭─╮ ") for line in told.splitlines() if line.startswith("╭")]
    own = ["Learning rate and gradients", "Data and evaluation", "Checkpoints"]
    assert groups == ["Arguments", "Options", "Model and plan", *own, "Output"], groups
    assert run("plans", "zero") == 0
    out = capsys.readouterr().out
    assert "stage=1" in out
    assert "Frozen weights rest in slices" in out


@pytest.mark.parametrize("arguments", [["capture"], ["verify", "mlp"], ["trian"], ["train", "mlp", "--steps", "0"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments) == 2


@pytest.mark.parametrize(("error", "code"), [(ScheduleError("it makes a cycle."), 1), (InputError("bad."), 2)])
def test_an_error_ends_with_its_own_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(common.ModelRequest, "capture", fails)
    assert run("capture", "mlp", "--json") == code
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": str(error), "kind": type(error).__name__}
    assert err == f"error: {error}\n"
    assert run("capture", "mlp") == code
    assert capsys.readouterr() == ("", f"error: {error}\n")


def test_with_json_only_the_object_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with printing(as_json=True) as printer:
        print("said by a library")
        printer.show("said to people")
        printer.result = {"losses": [1.0, float("nan")], "size": (2, 3), "out": None}
    out, err = capsys.readouterr()
    assert json.loads(out) == {"losses": [1.0, None], "size": [2, 3], "out": None}
    assert out.count("\n") == 1
    assert "said by a library" in err
    assert "said to people" in err


def test_a_phase_that_takes_long_is_said_and_all_are_in_the_timings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("superscaler.cli.printing._PATIENCE", 0.05)
    with printing(as_json=False, timings=True) as printer:
        printer.progress.announce("train it")
        with phase("model"):
            pass
        with phase("export"):
            time.sleep(0.2)
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert first == "train it"
    assert second.endswith(" s] exporting the model by torch.export")
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["command", "model", "export", "all"]


def test_without_json_people_read_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with printing(as_json=False) as printer:
        printer.show("h.0.attn [bold]is no markup")
        printer.result = {"a": 1}
    assert capsys.readouterr() == ("h.0.attn [bold]is no markup\n", "")


def test_python_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "superscaler", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(superscaler.__file__).parents[1],
    )
    assert done.stdout == f"superscaler {superscaler.__version__}\n"
