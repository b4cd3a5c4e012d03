"""What a plan directory says about itself, what differs between two, and when compile leaves one as it is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from superscaler.compiler import finish
from superscaler.ir.grid import HOSTS
from superscaler.plan import Plan, compile
from superscaler.report import journal
from superscaler.report.block_summary import account
from superscaler.report.identity import manifest
from superscaler.report.places import Groups, Places, ranges
from superscaler.report.words import read
from superscaler.store.plan_head import EXPLAIN_FILE, PLAN_FILE, PlanHead
from superscaler.verbs import Algorithm, Cluster, Graph, Op, Replicate, Split, op_assign, op_trans
from tests.helpers.commands import answer, run
from tests.helpers.graphs import graph_of, step_of
from tests.helpers.sweeps import slow

GPT2 = "gpt2:size=tiny,layers=3,batch=4"
MLP = "mlp:layers=2,hidden=8,inputs=4,classes=4,batch=8"
FILES = [PLAN_FILE, EXPLAIN_FILE, "program_0.py", "segments.py", "run.py", "initial.safetensors"]
PLANS = [
    ("data_parallel", "local:2"),
    ("tensor_parallel", "local:2"),
    ("hybrid:dp=2,tp=2", "local:4"),
    ("hybrid:tp=2,pp=2,microbatches=2", "local:4"),
    ("pipeline_1f1b:stages=2,microbatches=4", "local:2"),
]


def plan_of(spec: str, cluster: str, model: str = GPT2, lr: float = 1e-3) -> Plan:
    return compile(graph_of(model, lr=lr), spec, cluster)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {spec: plan_of(spec, cluster) for spec, cluster in PLANS}


@pytest.fixture(scope="module")
def saved(plans: dict[str, Plan], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Some plans in directories, which no test changes."""
    folder, specs = tmp_path_factory.mktemp("plans"), ("data_parallel", "hybrid:dp=2,tp=2", PLANS[3][0])
    for number, spec in enumerate(specs):
        plans[spec].save(folder / str(number), evaluation=False)
    return {spec: folder / str(number) for number, spec in enumerate(specs)}


@pytest.fixture
def directory(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A plan directory of its own."""
    shutil.copytree(saved["data_parallel"], tmp_path / "plan")
    return tmp_path / "plan"


def blocks_of(plan: Plan) -> dict[str, dict[str, Any]]:
    return {name: block for block in account(plan.compiled)["blocks"] for name in block["names"]}


# explain


@pytest.mark.parametrize("spec", [spec for spec, _ in PLANS[2:]])
def test_bytes_and_weights_of_the_blocks_add_up_to_those_of_the_program(spec: str, plans: dict[str, Plan]) -> None:
    plan = plans[spec]
    blocks, totals = blocks_of(plan).values(), account(plan.compiled)["totals"]
    moves = [row for block in blocks for row in block["moves"]]
    assert plan.counts["bytes_moved"] > 0
    assert sum(row.get("moved", 0) for row in moves) == plan.counts["bytes_moved"]
    assert sum(row["moved"] for row in totals) == plan.counts["bytes_moved"]
    for direction in ("forward", "backward"):
        told = sum(row.get("moved", 0) for row in moves if row["direction"] == direction)
        assert told == sum(row["moved"] for row in totals if row["direction"] == direction)
    kinds = {t.name: t.kind for t in plan.compiled.graph.model.tensors.values()}
    rows = [row for block in blocks for row in block["weights"] if row["kind"] == "parameter"]
    assert sum(len(row["of"]) for row in rows) == list(kinds.values()).count("parameter")
    weights = [w for d in plan.compiled.program.devices for w in d.weights if kinds[w.tensor] == "parameter"]
    held = sum(4 * prod(hi - lo for lo, hi in weight.box) for weight in weights)
    assert sum(row["held_bytes"] for row in rows) == held


def groups(*members: tuple[int, ...]) -> dict[str, Any]:
    """Return groups of few devices as explain.json has them: a range of one number for each."""
    return {"each": [[{"devices": [[d, d, 1] for d in group]}] for group in members]}


def test_equal_blocks_are_told_once_with_megatrons_collectives(plans: dict[str, Plan]) -> None:
    plan = plans["hybrid:dp=2,tp=2"]
    text = plan.explain()
    assert "\ntransformer.h.0 to transformer.h.2: " in text
    assert "\n  devices 0 to 3: batch into 2 (0, 1 | 2, 3)\n" in text
    assert "\n    attn.heads into 2 (0, 2 | 1, 3): 15 ops: attn.c_attn mm, " in text
    block = blocks_of(plan)["transformer.h.1"]
    sent = {(r["direction"], r["tensor"]): r for r in block["moves"] if r["way"] == "collective"}
    # A product with rows cut gives partial sums, all reduced forward; the gradient of what enters, backward.
    forward = sent["forward", "attn.c_proj mm"]
    assert (forward["kind"], forward["groups"], forward["count"]) == ("all_reduce", groups((0, 1), (2, 3)), 2)
    # batch 2 of 4, sequence 32, hidden 64, in float32; a ring of 2 sends it once from either.
    assert forward["bytes"] == 2 * (2 * 32 * 64 * 4)
    assert forward["moved"] == 2 * forward["bytes"]
    assert forward["layouts"] == "R(1)V(2)D(2,1,1) -> R(2)V(1)D(2,1,1)"
    assert 0 < forward["bound"] < forward["seconds"]
    gradient = sent["backward", "mlp.c_fc.weight"]
    assert (gradient["groups"], gradient["bytes"]) == (groups((0, 2), (1, 3)), 2 * (64 * 128 * 4))
    assert gradient["layouts"] == "R(1)V(2)D(1,2) -> R(2)V(1)D(1,2)"


def layouts(plan: Plan, direction: str, of: str = "") -> set[str]:
    """Return the layouts between which collectives of these tensors convert."""
    rows = [row for block in blocks_of(plan).values() for row in block["moves"] if row["direction"] == direction]
    return {row["layouts"] for row in rows if row["way"] == "collective" and row["tensor"].endswith(of)}


def by_batch(graph: Graph, cluster: Cluster, update: Callable[[Op, int], Algorithm]) -> None:
    """Cut the batch; `update` says what becomes of the updates."""
    n = len(cluster.devices)
    for op in graph.ops:
        op_assign(graph, op_trans(graph, op, Split("batch", n) if op.is_forward else update(op, n)), cluster.devices)


@pytest.mark.parametrize(
    ("update", "goal"),
    [
        (lambda op, n: Replicate(n), "R(4)V(1)D(1,1)"),
        (lambda op, n: Split(op.indices[0].factor, n), "R(1)V(1)D(4,1)"),
    ],
)
def test_a_gradient_is_told_as_its_update_reads_it(update: Callable[[Op, int], Algorithm], goal: str) -> None:
    graph = graph_of("mlp:layers=1,hidden=8,inputs=8,classes=8,batch=8")
    plan = compile(graph, partial(by_batch, update=update), "local:4")
    assert layouts(plan, "backward", "weight") == {f"R(1)V(4)D(1,1) -> {goal}"}


class Counts(nn.Linear):
    """A buffer that holds a sum over the batch."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.copy_(x.sum(0))
        return super().forward(x).square().mean()


def test_a_value_is_told_as_the_write_of_its_buffer_reads_it() -> None:
    plan = compile(step_of(Counts(), torch.randn(8, 4)), "data_parallel", "local:2")
    assert layouts(plan, "forward") == {"R(1)V(2)D(1) -> R(2)V(1)D(1)"}


def test_what_equal_blocks_share_belongs_to_none_of_them() -> None:
    """The tables of rotary embeddings are read by all layers, and first by layer 0."""
    plan = plan_of("tensor_parallel", "local:2", "llama:size=tiny")
    assert ["model.layers.0", "model.layers.1"] in [block["names"] for block in account(plan.compiled)["blocks"]]
    shared = [row for row in blocks_of(plan)["the model"]["weights"] if row["kind"] == "constant"]
    assert sum(len(row["of"]) for row in shared) >= 2


def test_a_pipeline_tells_its_order_and_its_messages_and_each_way_its_reason(plans: dict[str, Plan]) -> None:
    text = plans["pipeline_1f1b:stages=2,microbatches=4"].explain()
    assert "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3" in text
    assert "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3" in text
    assert "forward: send over 0 -> 1, " in text
    assert "backward: send over 1 -> 0, " in text
    assert "one device sends to one other" in text
    assert "4 microbatches of batch" in text
    rows = [row for block in blocks_of(plans["hybrid:tp=2,pp=2,microbatches=2"]).values() for row in block["moves"]]
    assert {row["way"] for row in rows} == {"local", "collective", "messages"}
    assert all(row["reason"] for row in rows)


def test_explain_is_the_same_from_the_directory_and_imports_no_torch(
    saved: dict[str, Path], plans: dict[str, Plan]
) -> None:
    spec = "hybrid:dp=2,tp=2"
    code = (
        "import sys\nfrom superscaler.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print('torch' in sys.modules)"
    )
    arguments = [sys.executable, "-c", code, "explain", str(saved[spec])]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    text, _, rest = done.stdout.partition("\n\ndevices by time: ")
    assert text == plans[spec].explain()
    assert rest.splitlines() == [f"superscaler explain {saved[spec]} --timeline", "False"]


def test_json_is_the_saved_account_with_its_manifest(
    saved: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = saved["data_parallel"]
    found, _ = answer(capsys, "explain", directory)
    saved = json.loads((directory / PLAN_FILE).read_text())["manifest"]
    assert found["manifest"].items() <= saved.items()
    stored = json.loads((directory / EXPLAIN_FILE).read_text())
    assert {k: found[k] for k in stored} == stored


def test_an_irregular_plan_is_told() -> None:
    def mine(graph: Graph, cluster: Cluster) -> None:
        for op in graph.forward_ops:
            made = op_trans(graph, op, Split("batch", sizes=(6, 2)))
            op_assign(graph, made, [0, 1])
            if op.target == "aten.gelu.default":
                op_assign(graph, op_trans(graph, made[0], Split("batch", 2)), 0)

    text = compile(graph_of(MLP), mine, "local:2").explain()
    assert "batch into 2 of sizes 6, 2 (0 | 1)" in text
    assert "1 of these cut further (batch into 2)" in text


def test_numbers_of_devices_are_told_in_few_words_and_none_is_lost() -> None:
    assert ranges(range(1024)) == "0 to 1023"
    assert ranges(range(3, 64, 8)) == "3 to 59 by 8"
    assert ranges([7]) == "7"
    assert ranges([4, 0, 1, 9]) == "0, 1, 4, 9"
    assert ranges([2 + HOSTS, 0, HOSTS, 1 + HOSTS]) == "0, hosts of 0 to 2"


@given(numbers=st.sets(st.integers(0, 40) | st.integers(HOSTS, HOSTS + 9)), by=st.integers(0, 5))
def test_places_have_the_numbers_that_they_are_made_of(numbers: set[int], by: int) -> None:
    places = Places.of(numbers)
    assert list(places) == sorted(numbers)
    assert list(places.shifted(by)) == [d - by for d in sorted(numbers)]


def test_groups_are_told_by_their_ends_and_many_together() -> None:
    assert Groups.of([(3, 0, 1, 2), (7, 4, 5, 6)], "broadcast").words() == ("3 -> 0 to 2", "7 -> 4 to 6")
    assert Groups.of([(0, 1, 2, 3)], "reduce").words() == ("0 to 2 -> 3",)
    many = Groups.of([(d, d + 16) for d in range(16)])
    assert (many.each, many.words()) == ((), ("16 groups in 0 to 31",))


# diff


def test_diff_tells_splits_orders_and_bytes(
    saved: dict[str, Path], plans: dict[str, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = "hybrid:dp=2,tp=2", "hybrid:tp=2,pp=2,microbatches=2"
    assert run("diff", saved[first], saved[second]) == 1
    out = capsys.readouterr().out
    assert "  - op_trans Split('batch', parts=2, axis='dp'), 31 times" in out
    assert "  + op_trans Microbatch(2), 31 times" in out
    assert "  + 0F1 before 0B0" in out
    a, b = (plans[spec].counts["bytes_moved"] for spec in (first, second))
    assert f"  - {a:,} bytes on links" in out
    assert f"  + {b:,} bytes on links" in out
    assert "model:" not in out
    assert plans[first].diff(plans[second]) == out.rstrip("\n")
    plans[first].save(tmp_path / "again", evaluation=False)
    assert run("diff", saved[first], tmp_path / "again", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["differences"]) == (True, [])


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"model": MLP.replace("batch=8", "batch=16")}, "model: flops "),
        ({"lr": 1e-2}, "model: lr 0.001 -> 0.01"),
        ({"spec": "single", "cluster": "local:1"}, "cluster: local:2 -> local:1"),
        ({"cluster": "v100:1x2"}, "cluster: local:2 -> v100:1x2"),
    ],
)
def test_diff_tells_what_changed(other: dict[str, Any], line: str) -> None:
    usual: dict[str, Any] = {"spec": "data_parallel", "cluster": "local:2", "model": MLP}
    told = plan_of(**usual).diff(plan_of(**{**usual, **other}))
    assert line in told


def test_swapped_devices_are_another_plan() -> None:
    """The journal does not tell devices, and the account only sets of them: the manifest must."""

    def mine(graph: Graph, cluster: Cluster, first: int) -> None:
        for op in graph.forward_ops:
            op_assign(graph, op_trans(graph, op, Split("batch", 4)), [first, 0, 1, 1 - first])

    a, b = (compile(graph_of(MLP), partial(mine, first=first), "local:2") for first in (0, 1))
    assert list(map(str, a.compiled.graph.journal)) == list(map(str, b.compiled.graph.journal))
    assert manifest(a.compiled, {})["plan"] != manifest(b.compiled, {})["plan"]
    assert a.diff(b)


def test_the_manifest_does_not_depend_on_where_files_are(tmp_path: Path) -> None:
    text = "import superscaler as ss\n\ndef mine(graph, cluster):\n    ss.op_assign(graph, graph.ops, 0)\n"
    found = []
    for folder, before in (("a", ""), ("b", "\n")):
        source = tmp_path / folder / "mine.py"
        source.parent.mkdir()
        source.write_text(before + text)
        plan = plan_of(f"{source}:mine", "local:1", MLP)
        found.append(manifest(plan.compiled, plan.compiled.graph.captured.values))
    assert found[0] == found[1]


def test_the_journal_has_a_line_for_each_line_of_the_plan_and_no_folder_of_the_machine(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "import superscaler as ss\n\ndef mine(graph, cluster):\n"
        "    for op in graph.forward_ops:\n        ss.op_trans(graph, op, ss.Split('batch', 2))\n"
        "    ss.op_assign(graph, graph.ops, 0)\n"
    )
    graph = plan_of(f"{source}:mine", "local:1", MLP).compiled.graph
    cut, assigned = journal.text(journal.rows(graph.journal)).splitlines()
    assert re.fullmatch(r"mine.py:5: op_trans Split\('batch', parts=2\) of \w+(, \w+)+", cut)
    assert assigned.startswith("mine.py:6: op_assign 2 parts of ")
    library = journal.rows(plan_of("tensor_parallel", "local:2", MLP).compiled.graph.journal)
    assert all(row.where.startswith("superscaler/plans/") for row in library)
    assert journal.parse(journal.text(library)) == library


def test_a_journal_reads_back() -> None:
    rows = [
        journal.Row("a b/mine.py:5", "op_trans Split('x of y; z', sizes=(1, 2), axis='a of b')", ("h.0.mm", "add_1")),
        journal.Row("a b/mine.py:5", "op_assign 2 parts", ("loss",)),
        journal.Row("mine.py:7", "send_gradients_last", ()),
        journal.Row("mine.py:8", "op_order 0F0 before 0F1", ()),
    ]
    assert journal.parse(journal.text(rows)) == rows


# compile into a directory that holds a plan


def test_compiling_the_same_again_is_not_compiling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is told again without scheduling anything; a touched file is noticed, and all is done anew."""
    folder = tmp_path / "plan"
    arguments = ["compile", MLP, "--plan", "data_parallel", "--cluster", "local:2", "--out", str(folder)]
    runs: list[object] = []
    monkeypatch.setattr("superscaler.compiler.finish", lambda *a: (runs.append(a), finish(*a))[1])
    assert run(*arguments) == 0
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    first = capsys.readouterr().out.splitlines()
    assert "written to" in first[-2] + first[-1]
    assert run(*arguments) == 0
    again = capsys.readouterr().out.splitlines()
    assert "unchanged: " in again[-2] + again[-1]
    # What the plan needs is predicted while it is compiled.
    assert again[:-2] == [line for line in first[:-2] if not line.startswith("memory: ")]
    assert run(*arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["unchanged"] is True
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert len(runs) == 1
    for name in FILES[::3]:
        file = folder / name
        file.write_bytes(file.read_bytes().replace(b"a", b"b", 1))
        count = len(runs)
        assert run(*arguments) == 0
        assert len(runs) == count + 1, name


CHANGED = [
    {"model": MLP.replace("hidden=8", "hidden=16")}, {"--plan": "tensor_parallel"}, {"--cluster": "v100:1x2"},
    {"--seed": "1"}, {"--lr": "0.01"}, {"--optimizer": "sgd"}, {"--autocast": "bf16"},
]  # fmt: skip


def test_a_changed_plan_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = {"model": MLP, "--plan": "data_parallel", "--cluster": "local:2"}
    for number, changed in enumerate(({}, *CHANGED)):
        options = {**usual, **changed}
        if number:
            shutil.copytree(tmp_path / "0", tmp_path / str(number))
        model, out = options.pop("model"), str(tmp_path / str(number))
        pairs = [word for pair in options.items() for word in pair]
        assert run("compile", model, *pairs, "--out", out, "--json") == 0
        assert json.loads(capsys.readouterr().out)["unchanged"] is False, changed


@pytest.mark.parametrize(("name", "is_removed"), [*((name, False) for name in FILES), *slow(("run.py", True))])
def test_a_directory_that_was_touched_is_written_again(name: str, is_removed: bool, tmp_path: Path) -> None:
    plan, directory = plan_of("data_parallel", "local:2", MLP), tmp_path / "plan"
    assert plan.save(directory, evaluation=False) is True
    assert plan.save(directory, evaluation=False) is False
    file = directory / name
    whole = file.read_bytes()
    if is_removed:
        file.unlink()
    elif name == PLAN_FILE:
        file.write_bytes(whole.replace(b'"seed": 0', b'"seed": 1'))
    else:
        # In the weights, the last byte is of a number.
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert plan.save(directory, evaluation=False) is True
    assert file.read_bytes() == whole


def test_other_initial_weights_are_another_plan(tmp_path: Path) -> None:
    plan = plan_of("data_parallel", "local:2", MLP)
    assert plan.save(tmp_path / "plan", evaluation=False) is True
    values = plan.compiled.graph.captured.values
    name = next(iter(values))
    values[name] = values[name] + 1
    assert plan.save(tmp_path / "plan", evaluation=False) is True


# wrong input


def changing(file: str, old: str, new: str) -> Callable[[Path], object]:
    """Return what replaces a text of a file, which must be there."""

    def change(directory: Path) -> None:
        text = (directory / file).read_text()
        assert old in text
        (directory / file).write_text(text.replace(old, new))

    return change


WRONG = [
    (lambda d: (d / PLAN_FILE).write_text("{"), "is damaged"),
    (changing(EXPLAIN_FILE, '"world": 2', '"world": 3'), f"{EXPLAIN_FILE} is not what compile wrote there"),
    (lambda d: (d / EXPLAIN_FILE).unlink(), f"{EXPLAIN_FILE} is missing"),
    (
        changing(PLAN_FILE, f'"version": {PlanHead.VERSION}', '"version": 0'),
        f"is of version 0, but this superscaler reads version {PlanHead.VERSION}",
    ),
    (shutil.rmtree, "is not a plan directory"),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG)
def test_wrong_directories_are_one_message_and_exit_code_2(
    spoil: Any, message: str, directory: Path, saved: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert read(directory)["world"] == 2
    spoil(directory)
    for arguments in (["explain", str(directory)], ["diff", str(saved["data_parallel"]), str(directory), "--json"]):
        assert run(*arguments) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: ")
        assert (f"error: {json.loads(out)['error']}\n" == err) if "--json" in arguments else (out == "")
        assert message in err
        assert "superscaler compile" in err
        assert len(err.splitlines()) == 1
