"""What a careless user does with files: one message that names the thing, and nothing is lost."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

import superscaler as ss
from superscaler.cli import launch
from superscaler.cli.printing import Printer
from superscaler.errors import InputError
from superscaler.plan import Plan
from superscaler.store.plan import plan_files
from superscaler.train.resume import interrupted
from tests.helpers.commands import run
from tests.helpers.graphs import graph_of

MODEL = "mlp:layers=1,hidden=4,inputs=4,classes=4,batch=4"
ONE = ["--plan", "single", "--cluster", "local:1"]


STAGES = ["--plan", "pipeline_1f1b", "--cluster", "local:2"]


def test_out_keeps_what_is_not_of_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "plan"
    assert run("compile", MODEL, *STAGES, "--out", str(out)) == 0
    assert plan_files(out) == {file.name for file in out.iterdir()} >= {"program_0.py", "program_1.py"}
    mine = [out / "notes.txt", out / "program_7.py", out / "program_mine.py"]
    for file in mine:
        file.write_text("keep")
    (tmp_path / "link").symlink_to(out)
    assert run("compile", MODEL, *ONE, "--out", str(tmp_path / "link")) == 0
    assert [file.read_text() for file in mine] == ["keep"] * 3
    assert not (out / "program_1.py").exists()
    assert run("compile", MODEL, *ONE, "--out", str(out)) == 0


def test_out_with_a_file_of_a_name_that_the_plan_needs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    assert run("compile", MODEL, *ONE, "--out", str(out)) == 0
    (out / "program_1.py").write_text("keep")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    capsys.readouterr()
    assert run("compile", MODEL, *STAGES, "--out", str(out)) == 2
    told = f"error: {out}/program_1.py is not of the plan there; move it, or choose another --out.\n"
    assert capsys.readouterr().err == told
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.parametrize(
    "text", ['{"plan": "of a house"}', "{", '{"version": 1, "programs": [], "manifest": {}}', "\udcff"]
)
@pytest.mark.parametrize("others", [(), ("run.py", "program_0.py", "notes.txt")])
def test_out_with_a_plan_file_of_another_kind_is_refused(
    text: str, others: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plan.json", *others):
        (tmp_path / name).write_text(text if name == "plan.json" else "keep", errors="surrogateescape")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert run("compile", MODEL, *ONE, "--out", str(tmp_path)) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path}/plan.json is no plan that compile writes, or is damaged" in err
    assert len(err.splitlines()) == 1
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_empty_out_is_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("compile", "train"):
        assert run(command, MODEL, *ONE, "--out", "") == 2
        assert capsys.readouterr().err == "error: --out is empty; name a directory ('.' is the current one).\n"
    assert run("checkpoint", "import", str(tmp_path / "weights"), "--out", "") == 2
    assert capsys.readouterr().err == "error: --out is empty; name a folder ('.' is the current one).\n"
    with pytest.raises(InputError, match="save needs the name of a file or directory"):
        Plan.__new__(Plan).save("")
    assert not list(tmp_path.iterdir())
    assert run("compile", MODEL, *ONE, "--out", ".") == 0


def test_out_below_a_file_or_a_broken_link_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("keep")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for out in (tmp_path / "file" / "plan", tmp_path / "dangling", Path("/proc/plan")):
        assert run("compile", MODEL, *ONE, "--out", str(out)) == 2
        err = capsys.readouterr().err
        assert str(out) in err
        assert len(err.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "keep"


def test_a_model_that_no_memory_holds_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("capture", "mlp:hidden=999999999999") == 2
    err = capsys.readouterr().err
    assert "is too large for this machine" in err
    assert len(err.splitlines()) == 1


def test_a_plan_may_import_what_is_beside_it_and_has_typed_keys(tmp_path: Path) -> None:
    (tmp_path / "plans.py").write_text(
        "import superscaler as ss\n\n\ndef typed(graph, cluster, n: int, flag=False):\n    import beside\n"
        "    assert (n, flag, beside.DEVICE) == (2, True, 0)\n    ss.op_assign(graph, graph.ops, beside.DEVICE)\n"
    )
    (tmp_path / "beside.py").write_text("DEVICE = 0\n")
    assert run("validate", MODEL, "--plan", f"{tmp_path}/plans.py:typed:n=2,flag=yes", "--cluster", "local:1") == 0


def test_numbers_beyond_all_reason_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, shapes = str(tmp_path / "plan"), f"{MODEL},device=meta"
    assert run("compile", MODEL, *ONE, "--seed", str(2**64), "--out", out) == 2
    with pytest.raises(InputError, match="seed is 18446744073709551616, but it must be a whole number from 0"):
        ss.compile(graph_of(MODEL), "single", "local:1").save(out, seed=2**64)
    assert not list(tmp_path.iterdir())
    # The largest seed gives a plan that is read again, also where weights are drawn from it.
    assert run("compile", shapes, *ONE, "--seed", str(2**64 - 1), "--out", out) == 0
    assert run("explain", out) == 0
    assert run("compile", "mlp:layers=1000000000", *ONE) == 2
    assert "layers is 1000000000, but no more than 10000 can be built" in capsys.readouterr().err
    assert run("train", MODEL, *ONE, "--steps", str(10**20)) == 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("save: 2024", "--save is 2024 in --config, but it must be a file or folder; write its name in quotes."),
        ("out: true", "--out is True in --config, but it must be a directory; write its name in quotes."),
        ("set: weight_decay=0.1", "set is 'weight_decay=0.1', but it must be a list, as [A, B]."),
        ("plan: {dp: 2}", "plan is {'dp': 2}, but it must be one value."),
    ],
)
def test_an_option_of_another_form_in_a_file_is_one_line(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(f"model: {MODEL}\ncluster: local:1\n{option}\n")
    assert run("train", "--config", file, "--plan", "single") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --")
    assert err.endswith(f"{message}\n")
    assert len(err.splitlines()) == 1


@pytest.mark.dist
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_disk_as_standard_output_is_one_line(options: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "superscaler", "compile", MODEL, *ONE, *options]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: standard output cannot be written: No space left on device."
    assert "Traceback" not in done.stderr


def test_signs_in_a_name_are_shown_and_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["explain", "a\nb\x1b[1m"],
        ["capture", "a\nb\x1b[1m"],
        ["train", MODEL, *ONE, "--data", "a\nb\x1b[1m"],
    ):
        assert run(*arguments) == 2
        err = capsys.readouterr().err
        assert "a\\nb\\x1b[1m" in err
        assert len(err.splitlines()) == 1


def test_a_folder_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run("compile", MODEL, *ONE, "--out", "plan") == 2
    assert capsys.readouterr().err == "error: the current directory is gone: No such file or directory.\n"


def test_a_job_that_standard_output_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(InputError, match=r"'\\xfc' of the plan's path or options is not in ascii"):
        launch._print(Printer(as_json=False), "torchrun rün.py")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["simulate", MODEL, "--plan", "single", "--cluster", "a100:1x1", "--memory", "40"],
         "--memory is '40', which is 40 bytes; give the unit too, as 40GB."),
        (["capture", MODEL, "--set", "weight_decay"],
         "--set weight_decay has no value; write --set KEY=VALUE, as weight_decay=0.1."),
        (["compile", MODEL, "--cluster", "local:1", "--plan", "none"], "superscaler plans lists all. Or give a file"),
        (["checkpoint", "export", "kept", "--out", "new"], "kept does not exist"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_the_right_one(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*given) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert told in error
    assert "did you mean 'swin'" not in error


def test_the_name_of_a_module_is_answered_with_its_ops() -> None:
    with pytest.raises(InputError, match=r"^'transformer.h.0.mlp.c_fc' is a module, not an op; its ops are \w+"):
        graph_of("gpt2:size=tiny").op("transformer.h.0.mlp.c_fc")


def test_what_an_interrupted_run_leaves_is_told(tmp_path: Path) -> None:
    assert interrupted(None, None) == "nothing was saved; --save DIR --save-every N saves while training"
    assert interrupted(tmp_path, None).startswith("nothing was saved")
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000005" / "manifest.json").touch()
    last = f"the last checkpoint is {tmp_path}/step-00000005: go on with --resume {tmp_path}"
    assert interrupted(tmp_path, None) == f"Ctrl-C saves nothing; {last}"


def test_the_end_of_several_factors_is_answered_with_a_pattern() -> None:
    graph = graph_of("gpt2:size=tiny").copy()
    with pytest.raises(InputError, match=r"unknown factor 'mlp'.* Write '\*\.mlp' for all that end so\. A dim"):
        ss.op_trans(graph, graph.forward_ops, ss.Split("mlp", 2))
    assert ss.op_trans(graph, graph.forward_ops, ss.Split("*.mlp", 2))


@pytest.mark.parametrize("option", ["--data", "--eval"])
def test_a_missing_function_of_data_is_told_before_the_model_is_built(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def rows():\n    return []\n\n\ndef build():\n    raise ValueError('built')\n")
    model = f"{tmp_path}/mine.py:build"
    assert run("train", model, *ONE, option, "none.py:rows") == 2
    assert f"{option} none.py:rows: none.py is no file; give " in capsys.readouterr().err
    assert run("train", model, *ONE, option, f"{tmp_path}/mine.py:row") == 2
    assert "unknown function 'row'; did you mean 'rows'?" in capsys.readouterr().err
