"""Plans that save memory: they keep what they say, and refuse careless options in one line."""

from __future__ import annotations

import re
from math import prod

import pytest

import superscaler as ss
from superscaler.errors import PlanError
from superscaler.ir.parts import block_of
from superscaler.ir.program import Backward, Forward
from superscaler.plan import Plan
from superscaler.planner.kinds import reduced, runs
from superscaler.plans import resolve
from superscaler.simulate.memory import memories
from tests.helpers.counted import counted
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import slow
from tests.verbs.chains import chain


def compiled(spec: str, plan: str, devices: int) -> Plan:
    return ss.compile(graph_of(spec), resolve(plan), f"local:{devices}")


REFUSED = [
    ("gradient_accumulation:microbatches=9", 1, "microbatches=9 of a batch of 8; choose 1 to 8"),
    ("gradient_accumulation:microbatches=3", 2, "batch=8 is not divisible by devices=2 x microbatches=3; give batch=6"),
    ("hybrid:dp=2,pp=2,microbatches=3", 4, "batch=8 is not divisible by dp=2 x microbatches=3; give batch=6 or 12"),
    ("zero:stage=1", 3, "batch=8 is not divisible by devices=3; give batch=6 or 9, or choose devices from 1, 2, 4"),
    (
        "pipeline_1f1b:1,microbatches=8 x data_parallel:2",
        2,
        "has 1 of 8 elements of batch there, and 2 does not divide 1",
    ),
    ("gradient_accumulation:microbatches=8", 2, "or choose devices x microbatches from 1, 2, 4 or 8."),
    ("gradient_accumulation:microbatches=0", 1, "microbatches=0 of a batch of 8; choose 1 to 8"),
    ("chain_recompute:limit=1e9,microbatches=0", 1, "microbatches=0 of a batch of 8"),
    ("recompute:what=blocks", 1, "recompute:what=blocks: choose block, full, attention."),
    ("co_shard:parts=1", 1, "co_shard:parts=1: give 2 or more"),
    ("co_shard:parts=3", 1, "co_shard:parts=3 divides no factor of this model: h.0.attn.heads of size 4"),
    ("hybrid:1 x tensor_parallel", 2, "hybrid places all ops itself, so it cannot be multiplied; only plans along"),
    ("co_shard:blocks=2", 1, "co_shard:blocks=2: give all, or first:N."),
    ("co_shard:factors=head", 1, "co_shard:factors=head: unknown factor 'head'; did you mean 'heads'"),
    ("co_shard:factors=vocabulary", 1, "co_shard:parts=4: none of these blocks has a factor to cut"),
    ("recompute x swap:2", 2, "Recompute of layer_norm is asked for twice; leave it out of one of them."),
    ("co_shard:1,parts=2 x recompute", 1, "is asked for twice; leave it out of one of them."),
    ("chain_recompute:1,every=1 x pipeline_1f1b:2,recompute=early", 2, "is asked for twice; leave it out"),
    ("pipeline_1f1b:offload=-1", 2, "offload=-1: a device keeps 1 tape or more; choose 1, 2, ..., or 0 to keep all."),
    ("pipeline_1f1b:recompute=soon", 2, "recompute=soon: choose early or late."),
    ("hybrid:recompute=block", 1, "hybrid:recompute=block: choose none, selective, full."),
    ("zero:2 x fsdp", 4, "fsdp and zero both cut the weights over their devices; choose one: fsdp has all weights in"),
    ("hybrid:zero=2", 1, "hybrid:zero=2: choose 0 or 1; for stages 2 and 3 zero is a factor of a product."),
    ("hybrid:pp=2,chunks=2,microbatches=3", 2, "3 microbatches do not come in rounds of 2, the number of pipeline"),
    ("hybrid:tp=3,sequence=true", 3, "sequence_parallel over 3 devices cuts the tokens that transformer.h.0 gives"),
    ("swap:what=state", 1, "swap:what=state: choose activations, optimizer, both."),
]


@pytest.mark.parametrize(("plan", "devices", "told"), REFUSED)
def test_careless_options_are_told_in_one_line(plan: str, devices: int, told: str) -> None:
    with pytest.raises(PlanError, match=re.escape(told)) as error:
        compiled("gpt2:size=tiny", plan, devices)
    assert "\n" not in str(error.value)


def test_a_plan_of_the_library_is_named_as_it_was_written_and_not_by_its_file() -> None:
    plan = "zb_h1:2,microbatches=2 x sequence_parallel:2,regather=true"
    with pytest.raises(PlanError) as error:
        ss.compile(graph_of("gpt2:size=tiny"), plan, "local:4")
    assert str(error.value) == (
        f"op_trans of '{plan}': Regather of embedding, which is split already; leave it out of one of them."
    )


def test_a_model_without_attention_has_none_to_compute_again() -> None:
    with pytest.raises(PlanError, match="recompute:what=attention: the model has nothing of this kind"):
        ss.compile(chain(), resolve("recompute:what=attention"), "local:1")


@pytest.mark.parametrize("recompute", ["full", *slow("selective")])
def test_weights_of_recomputed_layers_rest_in_as_small_slices_as_others(recompute: str) -> None:
    def rest(recompute: str) -> list[int]:
        program = compiled("gpt2:size=tiny", f"hybrid:dp=2,tp=2,zero=1,recompute={recompute}", 4).compiled.program
        boxes = ([weight.box for weight in device.weights if weight.trained] for device in program.devices)
        return [sum(prod(hi - lo for lo, hi in box) for box in own) for own in boxes]

    assert rest(recompute) == rest("none")


# Of a layer's weights, how much a layer more takes: the slice that rests, the gathered weights, the gradients. Buckets
# of gradients hold two layers, and some are in flight. Where what is gathered ends before gradients take its room, most
# is held when the backward begins, and the input of each layer (1 / 48) counts.
LAYERS = [
    ("zero:4,stage=1,microbatches=2 x recompute", (2, 3), 1 / 4 + 1 + 1), *slow(
        ("zero:4,stage=1 x recompute", (4, 5), 1 / 4 + 1 + 1 / 48), ("zero:4,stage=3", (9, 11), 1 / 4 + 1 / 4),
        ("hybrid:dp=4,zero=1,microbatches=2,recompute=full", (2, 3), 1 / 4 + 1 + 1),
        ("zero:4,stage=3,secondary=2", (9, 11), 1 / 4 + 1 / 2 + 1 / 48),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "layers", "share"), LAYERS)
def test_the_first_stage_of_zero_keeps_weights_whole_and_the_third_in_slices(
    plan: str, layers: tuple[int, int], share: float
) -> None:
    """Gradients of one microbatch become slices while gathered weights end. What is less than a layer does not grow."""
    peaks, graph = list[int](), graph_of(f"gpt2:size=tiny,hidden=256,layers={layers[1]}", "SGD")
    for one in (reduced(graph, runs(graph), layers[:1], 8), graph):
        made = ss.compile(one, plan, "local:4")
        peaks.append(memories(made.compiled.program)[0].peak)
    assert peaks[-1] == pytest.approx(counted(made, 0), rel=0.01)
    layer = 4 * sum(prod(tensor.shape) for tensor in graph.model.parameters() if ".h.0." in tensor.name)
    assert (peaks[1] - peaks[0]) / layer / (layers[1] - layers[0]) == pytest.approx(share, rel=0.01)


def regions(graph: ss.Graph) -> dict[str, set[str]]:
    """Return the modules of what is computed again, by block."""
    found: dict[str, set[str]] = {}
    for op in graph.model.ops:
        if op.origin:
            found.setdefault(op.region, set()).add(op.module)
    return found


def test_layers_inside_a_stage_are_regions_of_their_own() -> None:
    graph = graph_of("swin:size=tiny").copy()
    resolve("recompute")(graph, ss.Cluster.local(1))
    paths = [re.findall(r"layers\.\d+\.blocks\.\d+", " ".join(modules)) for modules in regions(graph).values()]
    assert sorted({path for found in paths for path in found}) == [
        f"layers.{stage}.blocks.{number}" for stage in (0, 1) for number in (0, 1)
    ]
    assert all(len(set(found)) == 1 for found in paths)


@pytest.mark.parametrize(("spec", "per_block"), [("gpt2:size=tiny", 1), ("llama:size=tiny", 1)])
def test_attention_alone_computes_no_product_with_a_weight_again(spec: str, per_block: float) -> None:
    plan = compiled(spec, "recompute:what=attention", 1)
    graph = plan.compiled.graph
    again = [op for op in graph.model.ops if op.origin]
    products = [op for op in again if op.flops]
    assert len(products) == per_block * len(graph.blocks)
    assert {"attention" in op.target for op in products} == {True}
    assert all(graph.model.tensors[o.tensor].kind == "activation" for op in products for o in op.inputs)
    assert {block_of(op.module) for op in again} == {block.path for block in graph.blocks}


def test_parts_of_blocks_are_made_one_after_the_other() -> None:
    plan = compiled("gpt2:size=tiny,layers=4,batch=16", "co_shard:parts=4,blocks=first:2", 1)
    assert {block_of(op.module).rpartition(".")[2] for op in plan.compiled.graph.model.ops if op.origin} == {"0", "1"}
    # A part is computed again, and its backward is done, before the next one is computed.
    (device,) = plan.compiled.program.devices
    tasks = [(type(i).__name__, i.task) for i in device.instructions if isinstance(i, Forward | Backward)]
    for segment in {task.segment for _, task in tasks}:
        own = [kind for kind, task in tasks if task.segment == segment]
        assert own in (["Forward"] * len(own), ["Forward", "Backward"] * (len(own) // 2))
    assert sum(task.part > 0 for kind, task in tasks if kind == "Backward") == 2 * 2 * 3


@pytest.mark.parametrize("sequence", ["ring_attention:2", *slow("ulysses:2", "sequence_parallel:2")])
def test_a_microbatch_starts_after_the_backward_of_the_one_before_it(sequence: str) -> None:
    """The loss divides by the labels of all microbatches, whose devices exchange the labels at the ends of their parts:
    no microbatch waits for that with its activations.
    """
    plan = compiled("llama:size=tiny", f"gradient_accumulation:1,microbatches=4 x {sequence}", 2)
    for device in plan.compiled.program.devices:
        code = [i for i in device.instructions if isinstance(i, Forward | Backward)]
        backward = {i.task for i in code if isinstance(i, Backward)}
        turns = [i.task.microbatch for i in code if i.task in backward]
        assert turns == sorted(turns)
    assert {*turns} == {0, 1, 2, 3}
