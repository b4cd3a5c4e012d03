"""Plans that compute parts of the model again in the backward: equal, in less memory, whenever a plan says."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import ScheduleError, TransformError
from superscaler.ir.communication import bytes_moved
from superscaler.ir.program import Collective, Program, Value, Wait, ended
from superscaler.models import build
from superscaler.plans.lib.schedules import RULES
from superscaler.runtime.step import Step
from superscaler.simulate.kernels import Works
from superscaler.simulate.rates import flops_of
from tests.helpers.graphs import graph_of
from tests.helpers.live import Live
from tests.helpers.ran import Around, SProgram, captured, equal, exact, on_ranks, trained
from tests.helpers.rewrites import on_top, recomputed, sharded
from tests.helpers.sweeps import few, slow


def in_blocks(m: Around, x: Tensor, y: Tensor) -> Tensor:
    x = m.into(x)
    for block in m.h:
        x = x + block(x)
    return nn.functional.cross_entropy(m.out(x), y)


def in_balance(m: Around, x: Tensor, y: Tensor) -> Tensor:
    """Return a loss that reads a result of each block, as one that balances experts does."""
    x, more = m.into(x), torch.zeros(())
    for block in m.h:
        found = block(x)
        x, more = x + found, more + found.square().mean()
    return nn.functional.cross_entropy(m.out(x), y) + more


def of_blocks(count: int, batch: int, *layers: nn.Module, forward: Callable[..., Tensor] = in_blocks) -> ss.Graph:
    h = nn.ModuleList(copy.deepcopy(nn.Sequential(*layers)) for _ in range(count))
    module = Around(forward, into=nn.Linear(16, 16), h=h, out=nn.Linear(16, 4))
    return captured(lambda: (module, (torch.randn(batch, 16), torch.randint(0, 4, (batch,)))))


@cache
def normed() -> ss.Graph:
    """Capture blocks with batch norms, whose buffers change, and dropout."""
    return of_blocks(2, 8, nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3))


@cache
def stack(forward: Callable[..., Tensor] = in_blocks) -> ss.Graph:
    """Capture blocks whose insides are far larger than what one hands to the next, and than their weights."""
    return of_blocks(8, 4096, nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), forward=forward)


PLANS = ["single", "data_parallel", "tensor_parallel", "pipeline_1f1b:microbatches=2"]
REGIONS = [("gpt2:size=tiny", "blocks"), ("gpt2:size=tiny", "attn"), ("gpt2:size=tiny", "one"),
           ("gpt2:size=tiny", "all"), ("normed", "blocks"), ("mixtral:size=tiny", "blocks")]  # fmt: skip


@pytest.mark.parametrize(("spec", "inside"), few(REGIONS, 4))
def test_recompute_changes_no_number(spec: str, inside: str) -> None:
    graph = normed() if spec == "normed" else graph_of(spec)
    for plan in PLANS if spec == "normed" else PLANS[2:] if spec != "mixtral:size=tiny" else PLANS[1:2]:
        # The norms are of the whole batch.
        name = plan.replace("microbatches=2", "microbatches=1") if spec == "normed" else plan
        found = equal(graph, recomputed(name, inside), 1 if plan == "single" else 2)
        assert "recomputed in the backward" in ss.Plan(found.compiled).explain()


def test_dropout_is_drawn_again_alike() -> None:
    plain, again = (ss.compile(normed(), plan, "local:1") for plan in ("single", recomputed("single")))
    ((losses, weights),), ((found, others),) = trained(plain), trained(again)
    assert found == losses
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("forward", [*slow(in_blocks), in_balance])
def test_recomputed_blocks_take_less_than_half_of_the_memory(forward: Callable[..., Tensor]) -> None:
    def peak(step: Step) -> int:
        with Live() as live:
            step(stack(forward).captured.batch)
        return live.peak

    plans = (ss.compile(stack(forward), plan, "local:1") for plan in ("single", recomputed("single")))
    before, after = (on_ranks(plan, peak)[0] for plan in plans)
    assert after < before / 2


def again(*layers: nn.Module) -> nn.Module:
    """Return layers that torch computes again."""
    return Around(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=nn.Sequential(*layers))


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_as_much_is_computed_again_as_torch_does() -> None:
    inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    h = [Around(lambda m, x: x + m.inner(x), inner=copy.deepcopy(inner)) for _ in range(4)]
    # The backward of a division needs what it divides, if the divisor has a gradient.
    h[0].function, h[0].last = (lambda m, x: m.inner(x) / m.last.weight), nn.LayerNorm(16, bias=False)
    module = Around(lambda m, x, y: nn.functional.cross_entropy(m.h(x), y), h=nn.Sequential(*h))
    graph = captured(lambda: (module, (torch.randn(8, 16), torch.randint(0, 16, (8,)))))
    batch, once = graph.captured.batch, list(map(again, h))
    ways = {"single": h, "recompute": once, "recompute:levels=2": [again(*once[:2]), again(*once[2:])]}
    equal(graph, "recompute:levels=2", 1)
    for spec, blocks in ways.items():
        module.h = nn.Sequential(*blocks)
        plan = ss.compile(graph, spec, "local:1").compiled
        (found,) = on_ranks(plan, lambda step: flops(lambda: step(batch)))
        kernels = [k for some in Works(plan.program).of(plan.program.devices[0]) for k in some]
        assert found == flops(lambda: module(*batch.values()).backward()) == sum(map(flops_of, kernels)), spec


def blocks_at_once(program: Program) -> int:
    """Return of how many blocks a device has gathered weights at once."""
    alive: set[Value] = set()
    most = 0
    for i in program.devices[0].instructions:
        if isinstance(i, Collective) and i.kind == "all_gather":
            alive.update(i.works)
        elif isinstance(i, Wait) and i.work in alive:
            alive.add(i.out)
        alive.difference_update(ended(i))
        most = max(most, len({found[1] for value in alive if (found := re.search(r"_h_(\d)_", str(value)))}))
    return most


def test_sharded_weights_are_gathered_again_late_and_freed_early() -> None:
    graph = graph_of("gpt2:size=tiny,layers=4,batch=16", "SGD")
    plain, again = exact(graph, sharded).program, equal(graph, recomputed(sharded)).program
    inside = 8 * sum(prod(t.shape) for t in graph.model.parameters() if ".h." in t.name)
    assert bytes_moved(again) == bytes_moved(plain) + inside
    assert blocks_at_once(again) == 2


@pytest.mark.parametrize("ahead", [*slow(0, 1), 2])
def test_weights_are_gathered_as_many_blocks_ahead_as_the_plan_says(ahead: int) -> None:
    plan = equal(graph_of("gpt2:size=tiny,layers=4,batch=16", "SGD"), recomputed(partial(sharded, ahead=ahead)))
    assert blocks_at_once(plan.program) == 1 + ahead
    assert any(str(entry).endswith(f"ahead={ahead}") for entry in plan.graph.journal)


def test_a_plan_says_when_to_compute_again() -> None:
    def early(graph: ss.Graph) -> None:
        first, second = graph.blocks
        ss.op_order(graph, graph.select(module=first.path, kind="R"), graph.select(module=second.path, kind="B"))

    def wrong(graph: ss.Graph) -> None:
        path = graph.blocks[0].path
        ss.op_order(graph, graph.select(module=path, kind="B"), graph.select(module=path, kind="R"))

    graph, late = graph_of("gpt2:size=tiny", "SGD"), recomputed("single")
    soon = equal(graph, on_top(late, early), 1).compiled
    codes = [plan.emitted.files["program_0.py"] for plan in (exact(graph, late, 1), soon)]
    at = [(code.index("add_7_r,) = rt.forward"), code.index('rt.backward("s6"')) for code in codes]
    assert at[0][0] > at[0][1]
    assert at[1][0] < at[1][1]
    with pytest.raises(ScheduleError, match=r"R of transformer.h.0.ln_1 \(layer_norm.r\), device 0 needs B of"):
        ss.compile(graph, on_top(late, wrong), "local:1")


@pytest.mark.parametrize("cut", [False, *slow(True)])
def test_a_backward_runs_where_its_op_is_computed_again(cut: bool) -> None:
    def elsewhere(graph: ss.Graph, cluster: ss.Cluster) -> None:
        ss.op_assign(graph, graph.ops, 0)
        made = ss.op_trans(graph, graph.select(module=graph.blocks[1].path), ss.Recompute())
        for parts in made:
            ss.op_assign(graph, ss.op_trans(graph, parts, ss.Split("batch", 2)) if cut else parts, [0, 1] if cut else 1)

    plan = equal(graph_of("gpt2:size=tiny,dropout=0.1", "SGD"), elsewhere)
    ran = [[type(i).__name__ for i in device.instructions] for device in plan.program.devices]
    assert ran[1].count("Backward") == ran[1].count("Forward") > 0
    assert ran[0].count("Forward") > ran[1].count("Forward")


@cache
def checkpointed(is_reentrant: bool = False) -> ss.Graph:
    built = build("gpt2:size=tiny,dropout=0.1")
    built.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    return ss.capture(
        built.module, built.args, built.kwargs, torch.optim.SGD(built.module.parameters(), lr=0.1), check=False
    )


def twins(graph: ss.Graph) -> list[str]:
    return [op.origin for op in graph.model.ops if op.origin]


def test_blocks_that_the_model_checkpoints_are_computed_again() -> None:
    asked = ss.compile(checkpointed(), "single", "local:1")
    written = ss.compile(graph_of("gpt2:size=tiny,dropout=0.1", "SGD"), recomputed("single"), "local:1")
    assert asked.compiled.emitted.files == written.compiled.emitted.files
    assert str(asked.compiled.graph.journal[-1]).startswith("the model's own checkpoint: op_trans")
    assert {op.module.split(".")[1] for op in asked.compiled.graph.forward_ops if op.region} == {"h"}
    reentrant = checkpointed(is_reentrant=True)
    assert equal(reentrant, PLANS[-1]).found["reference"] == "eager"


def test_a_plan_saves_what_the_model_checkpoints_or_computes_other_regions_again() -> None:
    graph = checkpointed()
    first, second = graph.blocks

    def saving(graph: ss.Graph) -> None:
        ss.op_trans(graph, graph.select(module=first.path), ss.Save())
        ss.op_trans(graph, [op for op in second.ops if op.target.startswith("aten.mm")], ss.Save())

    def selective(graph: ss.Graph) -> None:
        ss.op_trans(graph, graph.select(module=f"{first.path}.attn"), ss.Recompute())

    def late(graph: ss.Graph) -> None:
        selective(graph)
        ss.op_trans(graph, graph.select(module=first.path), ss.Save())

    plans = [equal(graph, on_top("single", rewrite), 1).graph for rewrite in (saving, selective)]
    products = {op.name for op in second.ops if op.target.startswith("aten.mm")}
    assert products
    assert set(twins(plans[0])) == {op.name for op in second.ops if op.has_mirror} - products
    module = {op.name: op.module for op in graph.ops}
    again = {module[name] for name in twins(plans[1])}
    assert {p for p in again if p.startswith(first.path)} == {p for p in module.values() if f"{first.path}.attn" in p}
    assert {p for p in again if p.startswith(second.path)} == {op.module for op in second.ops}
    with pytest.raises(TransformError, match=r"Save of .* comes after its Recompute"):
        ss.compile(graph, on_top("single", late), "local:1")


def sampled(m: Around, x: Tensor, y: Tensor) -> Tensor:
    """A region with a batch norm, whose buffers change, random numbers, and a part without gradients."""

    def noisy(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            noise = torch.rand_like(x) * m.into(x)
        return m.normed(x + noise) * scale, x.argmax(-1)

    h, _ = checkpoint(noisy, m.into(x), scale=x[:1], use_reentrant=False)
    return nn.functional.cross_entropy(m.out(h), y)


def test_what_is_random_or_changes_in_a_region_is_as_in_one_forward() -> None:
    module = Around(sampled, into=nn.Linear(16, 16), normed=nn.BatchNorm1d(16), out=nn.Linear(16, 4))
    with pytest.warns(UserWarning, match=r"changes normed.running_mean inside torch.utils.checkpoint \(3 buffers"):
        graph = captured(lambda: (module, (torch.randn(8, 16), torch.randint(0, 4, (8,)))))
    for plan, world in (("single", 1), ("data_parallel", 2)):
        ran = equal(graph, plan, world)
        assert ran.found["reference"] == "eager"
        assert twins(ran.graph)


def test_only_regions_with_a_backward_are_computed_again() -> None:
    def tuned(m: Around, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = checkpoint(lambda x, f=layer: torch.tanh(f(x)), x, use_reentrant=False)
        return checkpoint(lambda x: (torch.sigmoid(x) * x).mean(), x, use_reentrant=False)

    layers = nn.ModuleList(nn.Linear(8, 8).requires_grad_(k > 1) for k in range(4))
    plan = equal(captured(lambda: (Around(tuned, layers=layers), torch.randn(4, 8))), "data_parallel")
    again = {op.checkpoint for op in plan.graph.forward_ops if op.region}
    assert again == {"layers.2", "layers.3", "sigmoid"}


def test_a_twin_that_computes_something_else_is_refused() -> None:
    program = ss.compile(graph_of("mlp", "SGD"), recomputed("single", "all"), "local:1").compiled.program
    twin = next(op for op in program.model.ops if op.origin and op.args)
    ops = tuple(replace(op, origin="mul", args=()) if op is twin else op for op in program.model.ops)
    with pytest.raises(ScheduleError, match=f"{twin.name} does not recompute mul"):
        check_program(replace(program, model=replace(program.model, ops=ops)))


def test_a_recomputed_value_of_another_dtype_is_refused() -> None:
    program = ss.compile(graph_of("mlp", "SGD"), recomputed("single", "all"), "local:1").compiled.program
    tensors = program.model.tensors
    twin = next(tensor for tensor in tensors.values() if tensor.origin)
    wrong = {**tensors, twin.name: replace(twin, dtype="float64")}
    text = f"{twin.name} has dtype 'float64', but its original {twin.origin} has 'float32'."
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        check_program(replace(program, model=replace(program.model, tensors=wrong)))


@pytest.mark.parametrize("spec", ["gpt2:size=tiny", *slow("llama:size=tiny")])
def test_the_sum_that_ends_a_block_is_not_made_again_where_only_sums_would_read_it(spec: str) -> None:
    """Tensor parallel: of a block's two sums, that after attention is made again; that after the MLP is for a residual,
    whose gradient depends on no value.
    """

    def sums(plan: SProgram | str) -> int:
        code = equal(graph_of(spec, "SGD"), plan).code()
        return sum(isinstance(i, Collective) and i.kind == "all_reduce" and not i.notes[0].is_backward for i in code)

    assert sums(recomputed("tensor_parallel")) == sums("tensor_parallel") + len(graph_of(spec, "SGD").blocks)


def biased(m: Around, x: Tensor, y: Tensor) -> Tensor:
    """Two blocks of two layers, each recomputed. The first makes a bias of a weight, which the second reads, too."""

    def block(first: nn.Module, second: nn.Module, h: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = m.table[:4].mean(0) if bias is None else bias
        h = h + torch.tanh(first(h) + bias)
        return h + torch.tanh(second(h)), bias

    h, bias = checkpoint(block, m.a, m.b, x, None, use_reentrant=False)
    h, _ = checkpoint(block, m.c, m.d, h, bias, use_reentrant=False)
    return F.mse_loss(h, y)


@pytest.mark.parametrize("rule", ["zb_h1", "zb_h2", "pipeline_1f1b"])
def test_a_region_on_two_stages_is_computed_again_under_split_backwards(rule: str) -> None:
    """The gradient of the bias is a half W of the last stage, and the region of the bias does not wait for that."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(6, 6) for name in "abcd"}
    module = Around(biased, **layers, table=nn.Parameter(torch.randn(8, 6)))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    graph = ss.capture(module, (torch.randn(8, 6), torch.randn(8, 6)), optimizer=optimizer, check=False)
    regions = [op.checkpoint for op in graph.forward_ops if op.checkpoint]
    middle = next(k for k, op in enumerate(graph.forward_ops) if op.module == "b")

    def pipe(graph: ss.Graph, cluster: ss.Cluster) -> None:
        stages = [list(graph.forward_ops[:middle]), list(graph.forward_ops[middle:])]
        for device, ops in zip(cluster.devices, stages, strict=True):
            ss.op_assign(graph, ss.op_trans(graph, ops, ss.Microbatch(4)), device)
        table = RULES[rule](2, 4)
        if any(work.kind == "I" for row in table for work in row):
            ss.op_trans(graph, [op for op in graph.forward_ops if op.has_mirror], ss.SplitBackward())
        ss.order(graph, table, stages)

    assert len(set(regions)) == 2
    equal(graph, pipe)
