"""Each command on a small model: what it prints, what its JSON holds, and what it leaves on disk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from superscaler.store import cache
from superscaler.store.plan import read_plan, shapes_in
from superscaler.store.plan_head import PLAN_FILE
from tests.helpers.commands import answer, run
from tests.helpers.sweeps import slow

MODEL = "mlp:layers=2,hidden=8,inputs=4,classes=4,batch=8"
TWO = ["--plan", "data_parallel", "--cluster", "local:2"]


def test_capture_counts_operators_parameters_and_factors(capsys: pytest.CaptureFixture[str]) -> None:
    found, err = answer(capsys, "capture", MODEL)
    # Two hidden linears and the head.
    assert found["parameters"] == (4 * 8 + 8) + (8 * 8 + 8) + (8 * 4 + 4)
    assert found["trained_parameters"] == found["parameters"]
    assert found["ops"]["aten.gelu.default"] == 2
    assert found["updates"] == 6
    # A product of (8, k) and (k, n) is 2 * 8 * k * n FLOPs.
    assert found["flops"] == 2 * 8 * (4 * 8 + 8 * 8 + 8 * 4)
    assert found["unsupported"] == {}
    batch = next(f for f in found["factors"] if f["name"] == "batch")
    assert batch["size"] == 8
    assert set(batch["where"]) == {"x.0", "labels.0"}
    assert "aten.gelu.default" in err


def test_capture_names_an_operator_without_a_rule_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "odd.py"
    source.write_text(
        "import torch\n\n\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.eye(3))\n\n"
        "    def forward(self, x):\n"
        "        y = torch.linalg.matrix_exp(self.weight)\n"
        "        return (torch.linalg.matrix_exp(y) @ x).sum()\n\n\n"
        "def odd():\n    return Odd(), (torch.ones(3, 2),)\n"
    )
    assert run("capture", f"{source}:odd") == 0
    out = capsys.readouterr().out
    named = [line for line in out.splitlines() if line.startswith("operators without a rule")]
    assert len(named) == 1
    assert named[0].count("matrix_exp") == 1
    assert "(2)" in named[0]


@pytest.mark.slow
def test_capture_of_many_layers_is_as_long_as_of_few(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = []
    for layers in (2, 6):
        assert run("capture", f"gpt2:size=tiny,layers={layers},device=meta") == 0
        out = capsys.readouterr().out
        lengths.append(len(out.splitlines()))
        assert "h.*.attn.heads" in out
        assert "aten.layer_norm.default (" + str(2 * layers + 1) + ") needs the whole dim: hidden" in out
    assert lengths[0] == lengths[1]


def test_capture_json_has_what_the_tables_show(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = answer(capsys, "capture", "gpt2:size=tiny,layers=2,batch=4")
    factors = {f["name"]: f for f in found["factors"]}
    heads = factors["h.1.attn.heads"]
    assert (heads["size"], heads["summed"], heads["frozen"]) == (4, 1, 0)
    assert heads["spatial"] == heads["ops"] - heads["summed"]
    assert "transformer.h.1.attn.c_proj.weight.0" in heads["where"]
    assert found["parameter_bytes"] == 4 * found["parameters"]
    # Two layers: the queries, keys and values; 64 wide, 32 long.
    assert found["activation_bytes"] > 4 * (2 * 3 * 4 * 32 * 64)
    operators = {row["operator"]: row for row in found["operators"]}
    assert {name: row["count"] for name, row in operators.items()} == found["ops"]
    assert operators["aten.layer_norm.default"]["frozen"] == {"hidden": 5}
    assert {
        key: value
        for key, value in next(r for r in found["frozen"] if "split" in r["operator"]).items()
        if key != "factors"
    } == {"operator": "aten.split.Tensor", "reason": "needs the whole dim", "count": 2}


def test_a_model_without_trained_parameters_is_not_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "frozen.py").write_text(
        "import torch\n\n\ndef f():\n    return torch.nn.Identity(), (torch.ones(()),)\n"
    )
    assert run("capture", f"{tmp_path}/frozen.py:f", "--optimizer", "adamw") == 2
    assert "no parameter that requires a gradient" in capsys.readouterr().err


def test_compile_replaces_a_plan_but_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_dir = tmp_path / "plan"
    found, _ = answer(capsys, "compile", MODEL, *TWO, "--out", out_dir)
    assert {"export", "total"} <= found["seconds"].keys()
    assert (found["distinct_programs"], found["cluster"]) == (1, "local:2")
    assert min(found[key] for key in ("parts", "instructions", "bytes_moved")) > 0
    assert run("compile", MODEL, *TWO, "--out", str(out_dir)) == 0
    assert "start it with: torchrun --nproc-per-node 2 " in capsys.readouterr().out
    assert run("compile", MODEL, "--plan", "single", "--cluster", "local:1", "--out", str(out_dir)) == 0
    assert json.loads((out_dir / PLAN_FILE).read_text())["world"] == 1
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    assert run("compile", MODEL, *TWO, "--out", str(tmp_path / "notes")) == 2
    assert run("compile", MODEL, *TWO, "--out", str(tmp_path / "notes" / "mine.txt")) == 2
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


def test_validate_ends_with_1_when_something_is_unassigned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "import superscaler as ss\n\n\n"
        "@ss.sprogram\n"
        "def forgetful(graph, cluster):\n"
        "    for op in graph.ops[1:]:\n"
        "        ss.op_assign(graph, op, cluster.devices[0])\n"
    )
    assert run("validate", MODEL, "--plan", f"{source}:forgetful", "--cluster", "local:1") == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_verify_gives_the_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    found, err = answer(capsys, "verify", MODEL, *TWO)
    assert all(found[name] is True for name in ("equal", "conservation", "deadlock_free"))
    assert max(found[k] for k in ("loss_error", "gradient_error", "parameter_error")) < 1e-12
    assert "equal to one device" in err
    assert (found["reference"], found["module_compared"], found["note"]) == ("eager", True, "")
    assert "was not compared" not in err


@pytest.mark.parametrize(
    ("shapes", "reference", "against", "why"),
    [
        ("auto", "export", "the export of the module", "the module has no data"),
        ("small", "graph", "the captured graph", "it has the shapes of the capture"),
    ],
)
def test_verify_of_shapes_only_draws_weights_and_inputs_and_says_why_the_module_was_not_compared(
    shapes: str, reference: str, against: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, err = answer(capsys, "verify", MODEL + ",device=meta", *TWO, "--shapes", shapes)
    assert (found["equal"], found["reference"], found["module_compared"]) == (True, reference, False)
    assert f"against {against} only" in err
    assert f"note: the module itself was not compared: {why}" in err


INFERENCE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return {"logits": self.last(hidden), "more": (hidden, 3)}


def model(frozen: bool = False):
    torch.manual_seed(0)
    return Net().requires_grad_(not frozen), (torch.randn(8, 8),)
"""


def test_a_model_without_a_loss_is_inference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.write_text(INFERENCE)
    for model, options in ((f"{file}:model", ()), (f"{file}:model:frozen=true", ()), (MODEL, ("--optimizer", "none"))):
        found, err = answer(capsys, "capture", model, *options)
        assert (found["trains"], found["mirrors"], found["updates"]) == (False, 0, 0)
        assert "inference: no gradient is computed, nothing is updated; a step returns return" in err
        found, err = answer(capsys, "verify", model, *TWO, *options)
        assert (found["equal"], found["trains"], found["module_compared"]) == (True, False, True)
        assert "output error: " in err
        assert "gradient error" not in err
    assert run("compile", f"{file}:model", *TWO, "--out", str(tmp_path / "plan")) == 0
    assert run("validate", str(tmp_path / "plan")) == 0
    capsys.readouterr()
    assert run("explain", str(tmp_path / "plan")) == 0
    out = capsys.readouterr().out
    assert ", inference, on 2 devices of local:2" in out
    assert run("explain", str(tmp_path / "plan"), "--timeline") == 0
    drawn = capsys.readouterr().out
    assert "Nothing is known about the speed of local:2: its times are those of a core with 50 Gflop/s" in drawn
    assert re.search(r"\na step of .*\n  devices 0, 1  [Foc~ ]{100} +\d+%\n  F forward, ", drawn)
    assert run("train", f"{file}:model", *TWO) == 2
    assert "net.py:model gives no loss, so there is nothing to train" in " ".join(capsys.readouterr().err.split())
    for options in (("--optimizer", "adamw"), ("--optimizer", "no")):
        assert run("capture", f"{file}:model", *options) == 2


@pytest.mark.slow
def test_a_saved_plan_of_inference_runs_on_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.write_text(INFERENCE)
    found, _ = answer(capsys, "verify", f"{file}:model", *TWO, "--processes")
    assert (found["equal"], found["outputs"]) == (True, ["return.logits", "return.more.0"])
    assert found["bytes_moved"] == found["bytes_planned"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--gpu",), "needs a CUDA device"), (("--gpu", "--processes"), "--processes and --gpu are two ways")],
)
def test_verify_on_a_gpu_that_is_not_there(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run("verify", "mlp", *TWO, *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_verify_ends_with_1_when_not_equal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = {
        **{"equal": False, "loss_error": 0.5, "gradient_error": float("nan"), "parameter_error": 0.0},
        **{"conservation": True, "deadlock_free": False, "worst_tensor": "head.weight on device 1"},
        "first_difference": "head.weight[0:10, 0:64] on device 1 arrives off by 0.5 at linear (head)",
        "options": {"clip": {"value": 0.25, "error": 0.75}},
        **{"shrunk": {}, "reference": "export", "note": "the module has no data", "stale": [0]},
        "module_compared": False,
        **{"trains": True, "outputs": [], "dropped": [0, 0]},
        **{"trained_dtype": "float32", "trained_error": 0.5, "trained_allowed": 0.0},
    }
    monkeypatch.setattr("superscaler.plan.Plan.verify", lambda *_: result)
    assert run("verify", MODEL, *TWO, "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == {**result, "gradient_error": None}
    assert "NOT equal: head.weight[0:10, 0:64] on device 1" in err
    assert "deadlock free: NO" in err
    assert "with clip 0.25: 0.75" in err
    assert "two steps in float64 against the export of the module only" in err
    assert "note: the module itself was not compared: the module has no data" in err


@pytest.mark.parametrize("kind", [*slow("autocast"), "precision"])
def test_autocast_and_precision_are_known_to_all_commands_that_capture(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, scale in (("bf16", None), ("fp16", 65536.0)):
        assert run("compile", MODEL, *TWO, f"--{kind}", name, "--out", tmp_path / name) == 0
        optimizer = json.loads((tmp_path / name / PLAN_FILE).read_text())["optimizer"]
        assert (optimizer.get("precision", ""), optimizer["scaler"].get("scale")) == (
            name * (kind == "precision"),
            scale,
        )
    capsys.readouterr()
    for arguments in (["capture", MODEL], ["verify", MODEL, *TWO], ["train", MODEL, *TWO]):
        assert run(*arguments, f"--{kind}", "fp8") == 2
        assert f"unknown {kind} 'fp8'" in capsys.readouterr().err


def test_autocast_is_casts_and_precision_is_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "capture", MODEL, "--autocast", "bf16")[0]["ops"]["aten._to_copy.default"] > 0
    for command in ("verify", "validate"):
        assert answer(capsys, command, MODEL, *TWO, "--autocast", "fp16")[0]["conservation"] is True
    bf16 = "--precision", "bf16"
    assert run("compile", MODEL, *TWO, *bf16, "--out", tmp_path / "bf16") == 0
    capsys.readouterr()
    assert run("explain", tmp_path / "bf16") == 0
    assert "AdamW on float32 copies of bf16 weights, on 2 devices" in capsys.readouterr().out
    assert run("validate", MODEL, tmp_path / "bf16", *bf16, "--json") == 0
    capsys.readouterr()
    for arguments in (["capture", MODEL], ["verify", MODEL, *TWO], ["train", MODEL, *TWO]):
        assert run(*arguments, *bf16, "--autocast", "bf16") == 2
        assert "--autocast and --precision exclude each other" in capsys.readouterr().err


@pytest.mark.dist
def test_training_with_copies_goes_on_under_another_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two processes save slices of copies, one process goes on from them."""
    folder, options = tmp_path / "saved", ("--precision", "bf16", "--clip", "1")
    zero = "--plan", "zero:stage=3", "--cluster", "local:2"
    first = answer(capfd, "train", MODEL, *zero, *options, "--steps", "2", "--save", folder)[0]["losses"]
    head = json.loads(next(folder.glob("step-*/manifest.json")).read_text())
    assert head["optimizer"]["precision"] == "bf16"
    assert all("copy" in entry["states"] for entry in head["tensors"].values() if entry["states"])
    one = "--plan", "single", "--cluster", "local:1"
    rest = answer(capfd, "train", MODEL, *one, *options, "--steps", "4", "--resume", folder)[0]["losses"]
    assert (len(first), len(rest)) == (2, 2)
    assert rest == pytest.approx(first, rel=0.1)
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["loss"] for entry in entries] == [*first, *rest]


@pytest.mark.dist
def test_train_in_float16_scales_the_loss(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = "--steps", "4", "--autocast", "fp16", "--clip", "1", "--out", str(tmp_path / "plan")
    more = "--run", str(tmp_path / "run"), "--warmup", "2", "--set", "weight_decay=0.1"
    found, _ = answer(capfd, "train", MODEL, *TWO, *options, *more)
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["loss"] for entry in entries] == found["losses"]
    assert [entry["lr"] for entry in entries] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
    assert all(entry["tflops"] > 0 for entry in entries)
    assert json.loads((tmp_path / "plan" / PLAN_FILE).read_text())["optimizer"]["groups"][0]["weight_decay"] == 0.1
    file = tmp_path / "run" / "options.yaml"
    assert run("compile", "--config", str(file)) == 2
    assert f"--config {file}: unknown option 'steps'" in capfd.readouterr().err
    kept = [line for line in file.read_text().splitlines() if line.split(":")[0] in ("model", "plan", "autocast")]
    file.write_text("\n".join(kept))
    assert answer(capfd, "compile", "--config", file, "--cluster", "local:4")[0]["cluster"] == "local:4"
    assert (tmp_path / "plan" / PLAN_FILE).is_file()
    assert (found["world"], found["tokens_per_second"] > 0) == (2, True)
    assert len(found["losses"]) == 4
    assert len(found["gradient_norms"]) == 4
    assert None not in found["losses"] + found["gradient_norms"]


def test_plans_of_one_model_of_the_library_are_captured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x).square().mean()\n\n\n"
        "def build():\n    return Net(4, 4), (torch.ones(8, 4),)\n"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = ["--plan", "single", "--cluster", "local:1"]
    assert run("validate", "mlp", *TWO, "--no-cache") == 0
    assert run("validate", f"{file}:build", *TWO) == 0
    assert cache.usage() == (0, 0)
    for command, plan in (("validate", TWO), ("verify", one), ("compile", TWO)):
        assert run(command, "mlp", *plan) == 0
        assert cache.usage()[0] == 1
    assert run("verify", "mlp", *TWO, "--lr", "0.5") == 0
    assert cache.usage()[0] == 1
    assert run("verify", "mlp:hidden=16", *TWO) == 0
    assert cache.usage()[0] == 2


def test_a_module_that_is_not_its_graph_is_refused_unless_nobody_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "clocked.py"
    file.write_text(
        "import time\nimport torch\n\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return (super().forward(x) * (time.perf_counter_ns() % 997)).mean()\n\n\n"
        "def build():\n    return Net(4, 4), (torch.ones(8, 4),)\n"
    )
    assert run("capture", f"{file}:build") == 2
    assert "(Net.forward) does in step 1 what the captured graph does not: the loss is" in capsys.readouterr().err
    assert run("capture", f"{file}:build", "--no-check") == 0
    assert "steps are those of the module" not in capsys.readouterr().out
    assert run("capture", MODEL) == 0
    assert "2 steps are those of the module; the largest difference is 0.0e+00" in capsys.readouterr().out


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    for with_word, with_option in (
        (["help"], ["--help"]),
        (["help", "launch", "slurm"], ["launch", "slurm", "--help"]),
    ):
        assert run(*with_word) == 0
        said = capsys.readouterr().out
        assert run(*with_option) == 0
        assert said == capsys.readouterr().out
        assert "Usage: superscaler" in said


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("train gpt2:size=ti", ["gpt2:size=tiny"]),
        ("simulate gpt2 --plan hybrid:dp=2,t", ["hybrid:dp=2,tp="]),
        ("validate gpt2 --cluster a1", ["a100:"]),
        ("train gpt2 --optimizer adamw", ["adamw"]),
    ],
)
def test_the_shell_completes_models_keys_of_plans_and_clusters(
    words: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the shell's script asks, which `superscaler --install-completion` writes."""
    monkeypatch.setenv("_SUPERSCALER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"superscaler {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    run()
    assert capsys.readouterr().out.split() == offered


def test_compile_writes_a_program_for_each_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "words.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Words(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = nn.Embedding(9, 4)\n\n"
        "    def forward(self, ids):\n"
        "        return self.table(ids).square().mean()\n\n\n"
        "def words():\n    return Words(), (torch.zeros(8, 8, dtype=torch.int64),)\n"
    )
    model = [f"{tmp_path}/words.py:words", "--plan", "single", "--cluster", "local:1", "--out", tmp_path / "plan"]
    assert run("compile", *model, "--lengths", "4,6") == 0
    sizes = [read_plan(folder).head["inputs"]["ids"][0] for folder in shapes_in(tmp_path / "plan")]
    assert [list(size) for size in sizes] == [[8, 4], [8, 6]]
    assert run("compile", *model) == 0
    assert shapes_in(tmp_path / "plan") == []
    capsys.readouterr()
    assert run("compile", *model, "--lengths", "4,x") == 2
    assert "--lengths is '4,x', but it must be different lengths above 0" in capsys.readouterr().err
