"""ZeRO in its stages: exactly the traffic and the memory at rest that the formulas say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import InputError, ScheduleError
from superscaler.ir.communication import bytes_moved
from superscaler.ir.parts import block_of
from superscaler.ir.program import Backward, Collective, Free, Update, Wait
from superscaler.models import build
from superscaler.plans import resolve
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal
from tests.helpers.sweeps import few, slow


def elements(graph: ss.Graph, inside: str = "") -> int:
    return sum(prod(tensor.shape) for tensor in graph.model.parameters() if inside in tensor.name)


@pytest.mark.parametrize("spec", ["gpt2:size=tiny", pytest.param("llama:size=tiny", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("copies", "shard"), [(2, 2), *slow((1, 4), (2, 4), (4, 2))])
def test_traffic_and_what_rests_are_those_of_the_formulas(spec: str, copies: int, shard: int) -> None:
    graph, n = graph_of(spec), copies * shard
    psi, repeated = elements(graph), elements(graph, graph.blocks[0].path.rpartition(".")[0] + ".")
    parallel = ss.compile(graph, resolve("data_parallel"), f"local:{n}").compiled.program
    # What is left are the parts of the loss.
    left = bytes_moved(parallel) - 4 * 2 * (n - 1) * psi
    for plan, again in (("zero:stage=1", 0), ("zero:stage=3", repeated), ("fsdp:recompute=false", repeated)):
        program = ss.compile(graph, resolve(f"{plan},shard={shard}"), f"local:{n}").compiled.program
        # Gathered, and scattered, within a group; a slice is then added up between groups.
        inside, between = copies * (shard - 1) * (2 * psi + again), 2 * (copies - 1) * psi
        assert bytes_moved(program) == 4 * (inside + between) + left
        for device in program.devices:
            assert sum(prod(hi - lo for lo, hi in w.box) for w in device.weights if w.trained) == psi // shard


def test_each_microbatch_gathers_and_scatters_where_gradients_or_weights_are_not_kept() -> None:
    graph = graph_of("gpt2:size=tiny")
    psi, repeated = elements(graph), elements(graph, ".h.")

    def moved(plan: str) -> int:
        return bytes_moved(ss.compile(graph, resolve(plan), "local:2").compiled.program) // 4 - 2

    assert moved("zero:stage=1,microbatches=4") == 2 * psi
    assert moved("zero:stage=2,microbatches=4") == psi + 4 * psi
    assert moved("zero:stage=3,microbatches=4") == (psi - repeated) + 4 * (psi + 2 * repeated)


def test_fsdp_computes_blocks_again_if_asked_to() -> None:
    graph = graph_of("gpt2:size=tiny")
    for recompute, asked in (("false", []), ("true", [block.path for block in graph.blocks])):
        made = ss.compile(graph, f"fsdp:recompute={recompute}", "local:2").compiled.graph
        assert list(dict.fromkeys(block_of(op.module) for op in made.model.ops if op.origin)) == asked


def test_layers_of_a_stage_of_layers_are_computed_again_one_by_one() -> None:
    graph = graph_of("swin:size=tiny").copy()
    resolve("zero:stage=3")(graph, ss.Cluster.local(1))
    assert (len(graph.blocks), len({op.region for op in graph.forward_ops if op.region})) == (2, 4)


def test_groups_of_slices_reduce_in_one_bucket_each() -> None:
    """On more devices, too, than a path is searched for."""
    cluster, shard = "v100:8x8", 8
    plan = ss.compile(graph_of("gpt2:size=tiny,batch=64"), resolve(f"zero:shard={shard}"), cluster)
    code = [i for i in plan.compiled.program.devices[0].instructions if isinstance(i, Collective)]
    many = [(i.kind, i.group) for i in code if len(i.works) > 1]
    group, others = tuple(range(shard)), tuple(range(0, len(plan.compiled.program.devices), shard))
    assert many == [("all_gather", group), ("reduce_scatter", group), ("all_reduce", others)]
    assert plan.compiled.fold is not None


def test_sums_over_servers_hold_up_no_backward() -> None:
    """The slices of a block arrive, and go on to the other servers, once the next backward has ended."""
    model = build("gpt3:layers=4,hidden=1024,heads=16,seq=64,vocabulary=512,batch=8,device=meta")
    optimizer = torch.optim.AdamW(model.module.parameters())
    graph = ss.capture(model.module, model.args, model.kwargs, optimizer, check=False)
    code = ss.compile(graph, "fsdp:shard=4", "v100:2x4").compiled.program.devices[0].instructions[:]
    begun, waits, backwards = dict[object, int](), list[tuple[int, int]](), 0
    for i in code:
        if isinstance(i, Backward):
            backwards += 1
        elif isinstance(i, Collective) and i.kind == "reduce_scatter" and len(i.group) == 4:
            begun |= dict.fromkeys(i.works, backwards)
        elif isinstance(i, Wait) and i.work in begun:
            waits.append((begun[i.work], backwards))
    early = [(start, end) for start, end in waits if start < backwards]
    assert len({start for start, _ in early}) >= 3
    assert all(start < end for start, end in early)


def test_options_that_do_not_hold_are_refused() -> None:
    graph = graph_of("mlp")
    with pytest.raises(InputError, match="zero: devices=4 is not divisible by shard=3; choose shard from 1, 2 or 4"):
        ss.compile(graph, resolve("zero:shard=3"), "local:4")
    for option in ("stage=4", "keep=-1", "microbatches=0", "microbatches=-1"):
        with pytest.raises(InputError, match=f"zero:.*{option}.*: choose stage 1"):
            ss.compile(graph, resolve(f"zero:{option}"), "local:4")


class Adapted(nn.Module):
    """A frozen product beside a trained one of two thin matrices (LoRA)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.thin = nn.Sequential(nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.thin(x))


@cache
def adapted() -> ss.Graph:
    def run(m: Around, x: Tensor, y: Tensor) -> Tensor:
        for block in m.h:
            x = block(x)
        return nn.functional.cross_entropy(x, y)

    module = Around(run, h=nn.ModuleList(Adapted(32) for _ in range(3)))
    return captured(lambda: (module, (torch.randn(8, 32), torch.randint(0, 4, (8,)))))


def test_frozen_weights_rest_in_slices_and_are_gathered_for_forward_and_backward() -> None:
    keep = 3
    program = equal(adapted(), f"zero:stage=3,keep={keep}", 4).program
    trained, frozen = elements(adapted(), ".thin."), elements(adapted(), ".base.")
    for device in program.devices:
        held = [prod(hi - lo for lo, hi in w.box) for w in device.weights if ".base." in w.tensor]
        assert sum(held) == frozen / 4
    data = bytes_moved(equal(adapted(), "data_parallel", 4).program) - 8 * 2 * 3 * trained
    assert bytes_moved(program) == data + 8 * 3 * (3 * trained + 2 * frozen)


PLANS = [
    ("zero:stage=1", 2, 1),
    ("zero:stage=3,shard=2,microbatches=2", 4, 2),
    ("zero:2,stage=3 x tensor_parallel:2", 4, 4),
    ("zero:2,stage=3 x pipeline_1f1b:2,microbatches=2", 4, 2),
]


@pytest.mark.parametrize(("plan", "devices", "slices"), few(PLANS, 0))
def test_frozen_weights_in_slices_multiply_with_other_plans(plan: str, devices: int, slices: int) -> None:
    weights = equal(adapted(), plan, devices).program.devices[0].weights
    sizes = [prod(hi - lo for lo, hi in w.box) for w in weights if w.tensor.endswith("base.weight")]
    assert set(sizes) == {32 * 32 // slices}


def test_a_frozen_weight_is_placed_and_never_updated() -> None:
    def placed(graph: ss.Graph, cluster: ss.Cluster) -> None:
        resolve("data_parallel")(graph, cluster)
        factor = graph.model.tensors["h.0.base.weight"].factors[0]
        ss.place(graph, "h.0.base.weight", ss.Split(factor, sizes=(8, 24)), cluster.devices, ahead=0)
        graph.unroll(2)

    program = equal(adapted(), placed).program
    rows = [w for device in program.devices for w in device.weights if w.tensor == "h.0.base.weight"]
    assert [prod(hi - lo for lo, hi in w.box) for w in rows] == [8 * 32, 24 * 32]
    assert not any(w.trained or w.counted for w in rows)
    first, name = program.devices[0], rows[0].name
    code = [replace(i, names=tuple({*i.names} - {name})) if isinstance(i, Free) else i for i in first.instructions]
    at, update = [(at, i) for at, i in enumerate(code) if isinstance(i, Update)][-1]
    code[at] = replace(update, buffers=(*update.buffers, name), values=(*update.values, name))
    with pytest.raises(ScheduleError, match="changes h_0_base_weight, which no op updates"):
        check_program(replace(program, devices=(replace(first, instructions=tuple(code)), *program.devices[1:])))


def test_a_weight_of_two_stages_is_compiled_once_for_all_replicas_of_its_slices() -> None:
    graph = graph_of("gpt2:size=tiny,batch=64")
    plan = ss.compile(graph, "pipeline_1f1b:2,microbatches=2 x zero:16,stage=1", "h100:4x8")
    assert plan.compiled.fold is not None
    assert plan.compiled.fold.widths == (16,)


def test_a_bias_that_slices_would_cut_roughly_is_whole_so_that_devices_run_one_program() -> None:
    graph = graph_of("gpt2:size=tiny,layers=1,hidden=96,heads=2,batch=20")
    plan = ss.compile(graph, "zero:20,stage=1", "h100:4x5")
    rest = {op.inputs[0].tensor: plan.compiled.graph.grids[op.name] for op in graph.updates.values()}
    # 96 channels are 4 or 5 a device, and 384 are 19 or 20.
    assert rest["transformer.ln_f.weight"].axes[-1].index is None
    assert rest["transformer.h.0.mlp.c_fc.weight"].axes[-1].index is not None
