"""Plans whose backward is split into gradients of activations (I) and of weights (W): equal, in any order of both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import PlanError, ScheduleError
from superscaler.ir.program import ONE, Backward
from superscaler.plans.lib.schedules import schedule_1f1b
from superscaler.plans.lib.stages import stages
from superscaler.report.block_summary import account, summary
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal, exact, trained
from tests.helpers.rewrites import halved, on_top
from tests.helpers.sweeps import few
from tests.integration.test_recompute import normed, of_blocks


@ss.sprogram
def pipeline(graph: ss.Graph, cluster: ss.Cluster, last: bool = False) -> None:
    """1F1B of two stages, all of whose backward is split: I and W in place of B, or W last."""
    parts = stages(graph, 2)
    for device, ops in enumerate(parts):
        ss.op_assign(graph, ss.op_trans(graph, ops, ss.Microbatch(4)), device)
        ss.op_trans(graph, ops, ss.SplitBackward())
    rows = []
    for row in schedule_1f1b(2, 4):
        kinds = {w: "I" if last else "IW" for w in row if w.kind == "B"}
        rows.append([replace(w, kind=kind) for w in row for kind in kinds.get(w, w.kind)])
        rows[-1] += [replace(w, kind="W") for w in row if w.kind == "B" and last]
    ss.order(graph, rows, parts)


MODELS = ["gpt2:size=tiny", "llama:size=tiny", "mbart:size=tiny", "alphafold2:size=tiny,layers=1,passes=2",
          "mixtral:size=tiny", "normed"]  # fmt: skip


@pytest.mark.parametrize("spec", few(MODELS, 0))
def test_a_split_backward_changes_no_number(spec: str) -> None:
    graph = normed() if spec == "normed" else graph_of(spec, "SGD")
    plans = [
        ("tensor_parallel", True, True),
        ("single", False, True),
        ("data_parallel", True, False),
        ("tensor_parallel", False, False),
        ("pipeline_1f1b:microbatches=1", False, False),
    ]
    for plan, again, last in plans if spec == "normed" else plans[:1] if spec == "mixtral:size=tiny" else plans[::4]:
        found = equal(graph, halved(plan, again, last), 1 if plan == "single" else 2)
        assert " I, " in summary(found.compiled)


def test_a_pipeline_runs_i_and_w_as_it_orders_them() -> None:
    last = True
    plan = equal(graph_of("gpt2:size=tiny", "SGD"), lambda g, c: pipeline(g, c, last)).compiled
    orders = [row["order"] for row in account(plan)["schedule"]]
    # The first stage gives gradients of weights only: I has nothing to do.
    assert orders == (
        ["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3 1W0 1W1 1W2 1W3"]
        if last
        else ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2 1F3 1I3 1W3"]
    )
    assert "not split, as it gives gradients of activations only, or of weights only" in ss.Plan(plan).explain()


def test_w_follows_its_i_and_what_others_wait_for_goes_first() -> None:
    plan = exact(graph_of("gpt2:size=tiny,layers=4,batch=16", "SGD"), halved("pipeline_1f1b:microbatches=1"))
    code = [i.half or type(i).__name__ for i in plan.program.devices[1].instructions]
    assert [half for half in code if half in ("input", "weight")] == ["input", "weight"] * 2
    # The gradient that the other stage waits for starts before those of weights are made.
    assert "Send" in code[len(code) - code[::-1].index("input") : len(code) - code[::-1].index("weight")]


def test_a_folded_plan_is_equal_at_a_small_shape() -> None:
    graph = of_blocks(2, 16, nn.Linear(16, 16), nn.Tanh())
    plan = ss.compile(graph, halved("hybrid:dp=4,tp=2,pp=2,microbatches=2", again=True), "v100:2x8")
    assert plan.compiled.fold is not None
    found = plan.verify(shapes="small")
    assert found["equal"], found
    assert "0F0 0F1 0R0 0I0 0W0" in summary(plan.compiled)


def in_half(m: Around, x: Tensor) -> Tensor:
    """Run blocks in half precision: casts of weights, whose gradients are added up in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        for block in m.h:
            x = x + block(x)
        return x.float().square().mean()


def test_half_precision_trains_bit_for_bit_as_unsplit() -> None:
    h = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
    graph = captured(lambda: (Around(in_half, h=h), torch.randn(8, 8)))

    def apart(graph: ss.Graph) -> None:
        """Casts of weights are not split, so that W gives their gradients to other segments."""
        for block in graph.blocks:
            ss.op_trans(graph, [op for op in block.ops if not op.from_weights], ss.SplitBackward())
        ss.op_order(graph, graph.select(kind="I"), graph.select(kind="W"))

    plans = "data_parallel", on_top("data_parallel", apart)
    whole, split = (ss.compile(graph, plan, "local:2") for plan in plans)
    files = split.compiled.emitted.files
    assert "rt.backward_weight(" in files["program_0.py"]
    assert "@functional.segment(wide=(" in files["segments.py"]
    for (losses, weights), (found, others) in zip(trained(whole), trained(split), strict=True):
        assert found == losses
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_the_order_of_halves_is_checked() -> None:
    def wrong(graph: ss.Graph) -> None:
        path = graph.blocks[0].path
        ss.op_order(graph, graph.select(module=path, kind="W"), graph.select(module=path, kind="I"))

    def twice(graph: ss.Graph) -> None:
        for _ in range(2):
            ss.op_trans(graph, graph.blocks[0].ops, ss.SplitBackward())

    graph = graph_of("gpt2:size=tiny", "SGD")
    for plan, rewrite, said in (
        (halved("single"), wrong, r"I of .*h.0.ln_1 \(layer_norm\), device 0 needs W of transformer.h.0.ln_1"),
        ("single", twice, "SplitBackward of layer_norm is asked for twice"),
        ("single", lambda graph: graph.select(kind="W"), r"W selects ops whose backward is split"),
    ):
        with pytest.raises(PlanError, match=said):
            ss.compile(graph, on_top(plan, rewrite), "local:1")


def test_a_first_half_that_no_reader_needs_is_not_written() -> None:
    """Device 1 keeps copies whose gradients of activations device 0 makes, too; the copies alone make none."""

    def make() -> tuple[nn.Module, Tensor]:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        net = Around(lambda m, x: (x + torch.tanh(m.second(m.first(x).relu()))).sum(), first=first, second=second)
        return net, torch.randn(4, 4)

    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        ss.op_trans(graph, list(graph.forward_ops), ss.SplitBackward())
        ss.op_assign(graph, graph.forward_ops, 0)
        for op in (op for op in graph.forward_ops if op.module == "second" or op.name == "tanh"):
            ss.op_assign(graph, ss.op_trans(graph, op, ss.Replicate(2)), [0, 1])

    ran = equal(captured(make), plan)
    for device in ran.program.devices:
        for i in device.instructions:
            assert not isinstance(i, Backward) or i.half != "input" or any((*i.outputs, *i.sums)), i
    assert ss.compile(captured(make), plan, "a100:1x2").simulate().step_seconds > 0


def test_halves_that_do_not_belong_together_are_refused() -> None:
    program = ss.compile(graph_of("gpt2:size=tiny", "SGD"), halved("single"), "local:1").compiled.program
    device = program.devices[0]
    code = list(device.instructions)
    runs = ((n, some) for n, some in enumerate(code) if isinstance(some, Backward) and some.half)
    (i, first), (w, second) = next(runs), next(runs)
    both = replace(second, outputs=tuple(a or b for a, b in zip(first.outputs, second.outputs, strict=True)))
    for at, other, said in (
        (w, [both], "makes a gradient that its first half has made"),
        (i, [], "has no first half that ran before it"),
        (w, [], "which nothing makes"),
        (i, [first, first], "has no forward that ran before it"),
        (i, [replace(first, half="")], "has no first half that ran before it"),
        (w, [replace(second, half="")], "has no forward that ran before it"),
        (w, [replace(second, half="both")], "is a half 'both' of 0 gradients"),
        (w, [replace(second, gradients=(ONE,))], "is a half 'weight' of 1 gradients"),
    ):
        edited = (*code[:at], *other, *code[at + 1 :])
        with pytest.raises(ScheduleError, match=said):
            check_program(replace(program, devices=(replace(device, instructions=edited),)))
