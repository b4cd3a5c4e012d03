"""What the SPMD plans send of activations, per layer and direction: exactly what the formulas of their authors say.

Of a batch b of sequences of s tokens of h channels (keys and values of k each) on P devices, in elements, all devices
together; published figures are those of one device and one sequence, and so 1 / (b P) of these:

Megatron's sequence parallelism   4 b s h (P - 1)       two all_gathers and two reduce_scatters
Megatron's tensor parallelism     8 b s h (P - 1)       four all_reduces; of a loss over a cut vocabulary 6 b s (P - 1)
Ulysses                           2 b s (h + k) (P - 1) / P   all_to_all of queries, keys, values and the result
ring                              2 b s k (P - 1)       keys and values, from neighbour to neighbour

And of weights, in bytes: gradients of Psi bf16 weights to their slices 4 Psi (P - 1), in halves 2 Psi (P - 1); to all
8 Psi (P - 1), in halves 4 Psi (P - 1). ZeRO-1 gathers and scatters 2 Psi (P - 1), whatever is recomputed and however
many microbatches m there are; ZeRO-2 scatters the gradients of each, (1 + m) Psi (P - 1).

Those of Ulysses are 4 b s h (P - 1) / P where h = k. A ring that keeps nothing sends keys and values again for the
backward; their gradients go straight to the devices that made them: as many elements, but to others than neighbours.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
from torch import nn

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import ScheduleError
from superscaler.ir.communication import bytes_moved, links
from superscaler.ir.program import Backward, Collective, Forward, Program, Send
from superscaler.models import build
from superscaler.runtime.step import Step
from superscaler.simulate.memory import memories
from tests.helpers.counted import counted
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal, exact, moved, on_ranks
from tests.helpers.sweeps import few, slow
from tests.integration.test_recompute import blocks_at_once
from tests.plans.test_equal import MESHED

# Of both models.
BATCH, TOKENS, HIDDEN, KEYS = 8, 32, 64, 32
GPT, LLAMA = "gpt2:size=tiny", "llama:size=tiny"
DEEP, ROWS = "gpt2:size=tiny,layers=4,batch=16", 16


@cache
def program(model: str, layers: int, plan: str, devices: int) -> Program:
    graph = graph_of(model + ",layers=1" * (layers == 1))
    return ss.compile(graph, plan, f"local:{devices}").compiled.program


def activations(found: Program) -> Counter[tuple[str, str]]:
    """Return how many elements of activations all devices put on links, by direction and kind."""
    elements: Counter[tuple[str, str]] = Counter()
    for i in (i for device in found.devices for i in device.instructions):
        if not isinstance(i, Collective | Send):
            continue
        ways = i.ways if isinstance(i, Collective) else [None]
        for note, way in zip(i.notes, ways, strict=True):
            if found.model.tensors[note.tensor].kind == "parameter":
                continue
            is_again = bool(found.model.tensors[note.tensor].origin) and note.tensor.endswith(".r")
            direction = "backward" if note.is_backward else "again" if is_again else "forward"
            if way is None:
                elements[direction, "send"] += i.bytes // 4
            else:
                # Each device of a group tells of all of them.
                elements[direction, i.kind] += prod(way.view) * links(i.kind, len(i.group)) // len(i.group)
    return elements


def per_layer(model: str, plan: str, devices: int) -> dict[tuple[str, str], int]:
    one, two = (activations(program(model, layers, plan, devices)) for layers in (1, 2))
    return {key: count for key in two if (count := two[key] - one[key])}


@pytest.mark.parametrize("devices", [*slow(2), 4])
def test_sequence_parallel(devices: int) -> None:
    each = 2 * BATCH * TOKENS * HIDDEN * (devices - 1)
    ways = [(direction, kind) for direction in ("forward", "backward") for kind in ("all_gather", "reduce_scatter")]
    assert per_layer(GPT, "sequence_parallel", devices) == dict.fromkeys(ways, each)


def test_megatron_gathers_again_for_the_backward_what_it_does_not_keep() -> None:
    """Inputs of products once more, or with each layer recomputed what its forward communicates, but for its last sum,
    which nobody reads.
    """
    again = "full"
    each, ways = 2 * BATCH * TOKENS * HIDDEN, ("all_gather", "reduce_scatter")
    expected = {(direction, kind): each for direction in ("forward", "backward") for kind in ways}
    recomputed = {("again", "all_gather"): each, ("again", "reduce_scatter"): each // 2}
    expected |= recomputed if again == "full" else {("forward", "all_gather"): 2 * each}
    assert per_layer(GPT, f"hybrid:tp=2,sequence=true,recompute={again}", 2) == expected


def test_a_sequence_cut_by_tensor_parallelism_passes_from_stage_to_stage_once() -> None:
    """Without sequence parallelism each of the tensor-parallel devices sends all."""
    chunks = 2
    plan, passed = f"hybrid:tp=2,pp=2,microbatches=4,chunks={chunks}", (2 * chunks - 1) * ROWS * TOKENS * HIDDEN
    for options, count in (("", 2), (",sequence=true", 1)):
        found = activations(ss.compile(graph_of(DEEP, "SGD"), plan + options, "local:4").compiled.program)
        assert {found[direction, "send"] for direction in ("forward", "backward")} == {count * passed}


@pytest.mark.parametrize(("model", "keys", "devices"), [*slow((GPT, HIDDEN, 2), (LLAMA, KEYS, 2)), (GPT, HIDDEN, 4)])
def test_ulysses(model: str, keys: int, devices: int) -> None:
    each = 2 * BATCH * TOKENS * (HIDDEN + keys) * (devices - 1) // devices
    expected = {("forward", "all_to_all"): each, ("backward", "all_to_all"): each}
    assert per_layer(model, "ulysses", devices) == expected


RINGS = [(GPT, HIDDEN, ""), (LLAMA, KEYS, ":recompute=false"), (GPT, HIDDEN, ":recompute=false"), (LLAMA, KEYS, "")]


@pytest.mark.parametrize(("model", "keys", "options"), few(RINGS, 0))
def test_ring_attention(model: str, keys: int, options: str) -> None:
    directions = ["forward", "backward"] if options else ["forward", "again", "backward"]
    each = 2 * BATCH * TOKENS * keys * 3
    assert per_layer(model, f"ring_attention{options}", 4) == {(direction, "send"): each for direction in directions}


def test_zigzag() -> None:
    """Of eight chunks, two a device, the first of a half and the last of the other are on one device: of eight ways on
    of a chunk two need no link. Of the 64 pairs of chunks 16 are of one device, whose gradients need none.
    """
    chunk = 2 * BATCH * TOKENS * KEYS // 8
    expected = {("forward", "send"): 7 * 6 * chunk, ("again", "send"): 7 * 6 * chunk, ("backward", "send"): 48 * chunk}
    assert per_layer(LLAMA, "ring_attention:zigzag=true", 4) == expected


def test_keys_pass_from_neighbour_to_neighbour() -> None:
    found = program(LLAMA, 1, "ring_attention", 4)
    for device in found.devices:
        for i in device.instructions:
            if isinstance(i, Send) and not i.notes[0].is_backward:
                assert i.peer == (device.rank + 1) % 4
    # All are at the same step at a time: none waits for keys that its neighbour passes on after its own work.
    work = [[i.task for i in device.instructions if isinstance(i, Forward | Backward)] for device in found.devices]
    assert all(other == work[0] for other in work)


@pytest.mark.parametrize(("model", "devices"), [(GPT, 4), *slow((GPT, 2), (LLAMA, 4))])
def test_a_loss_over_a_cut_vocabulary_takes_three_numbers_a_token(model: str, devices: int) -> None:
    """The largest score, the sum of exponentials and the label's score, each in an all_reduce; no scores. And a row of
    the embedding for each token, forward only, whether or not it shares the head's weight; the head's input has a
    gradient.
    """
    found, rows = activations(program(model, 1, "tensor_parallel", devices)), 2 * (devices - 1) * BATCH * TOKENS
    blocks = per_layer(model, "tensor_parallel", devices)
    assert blocks == {("forward", "all_reduce"): 2 * rows * HIDDEN, ("backward", "all_reduce"): 2 * rows * HIDDEN}
    assert {key: count - blocks[key] for key, count in found.items()} == {
        ("forward", "all_reduce"): rows * HIDDEN + 3 * rows,
        ("backward", "all_reduce"): rows * HIDDEN,
    }


def test_axial_parallelism_has_collectives_only() -> None:
    found = exact(graph_of(MESHED), "dap").program
    assert {kind for _, kind in activations(found)} == {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"}


def test_a_parameter_server_gets_one_sum_and_sends_each_worker_the_weights() -> None:
    """Of psi weights 2 psi for each worker beside the server, which may be a worker itself: gradients are summed on
    the way to the server, and the new weights broadcast. An all_reduce of workers would be 3 psi.
    """

    devices, apart = 4, 1

    def served(graph: ss.Graph, cluster: ss.Cluster) -> None:
        server, workers = cluster.devices[0], list(cluster.devices[apart:])
        for op in graph.forward_ops:
            ss.op_assign(graph, ss.op_trans(graph, op, ss.Split("batch", len(workers))), workers)
        for weight in graph.updates:
            ss.place(graph, weight, ss.Replicate(1), [server])

    ran = equal(graph_of(f"{GPT},batch=6"), served, devices)
    psi = sum(prod(tensor.shape) for tensor in ran.graph.model.parameters())
    # What is left are counts of labels and the parts of the loss.
    assert 0 <= bytes_moved(ran.program) // 8 - 2 * (devices - 1) * psi < 10


@pytest.mark.parametrize(("options", "gathers"), [("breadth_first:2", 2), *slow(("interleaved:2", 2 * 4))])
def test_a_breadth_first_pipeline_gathers_the_weights_of_a_chunk_once(options: str, gathers: int) -> None:
    """For the forward of all microbatches, and once more for the backward; other orders for each microbatch."""
    ran = exact(graph_of(DEEP, "SGD"), f"zero:2,stage=3 x {options},microbatches=4,chunks=2", 4)
    inside, found = sum(prod(t.shape) for t in ran.graph.model.parameters() if ".h." in t.name), Counter[str]()
    for i in (i for device in ran.program.devices for i in device.instructions if isinstance(i, Collective)):
        for note, way in zip(i.notes, i.ways, strict=True):
            if ".h." in note.tensor and ran.graph.model.tensors[note.tensor].kind == "parameter":
                found[i.kind] += prod(way.view) * links(i.kind, len(i.group)) // len(i.group)
    assert found == {"all_gather": gathers * inside, "reduce_scatter": inside}
    # Those of a block, and of the next one, which are on their way.
    assert blocks_at_once(ran.program) == 2


MIXTRAL, MEGATRON = "mixtral:size=tiny", "hybrid:dp=4,zero=1,recompute=full,microbatches="
# Psi (P - 1) elements so many times; beside them the number of labels, both ways, and the tokens of each expert.
ONCE = [
    (GPT, MEGATRON + "2", 2, 2),
    *slow((MIXTRAL, "zero:4,stage=1,microbatches=2 x recompute", 2, 98), (GPT, MEGATRON + "1", 2, 2)),
    *slow((GPT, MEGATRON + "4", 2, 2), (LLAMA, MEGATRON + "2", 2, 2)),
    *slow((LLAMA, "zero:4,stage=2,microbatches=2 x recompute", 3, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("model", "plan", "times", "left"), ONCE)
def test_the_first_stages_of_zero_gather_weights_once_a_step(model: str, plan: str, times: int, left: int) -> None:
    """Ops that are recomputed read the same copy as all microbatches."""
    graph = graph_of(model + ",batch=16" * plan.endswith("microbatches=4"))
    ran = equal(graph, plan, 4)
    psi = sum(prod(tensor.shape) for tensor in ran.graph.model.parameters())
    assert ran.found["bytes_moved"] == 8 * 3 * (times * psi + left)
    if model == GPT:
        # In float32, whose speeds are known; the count of labels has 8 bytes.
        sent = ss.compile(graph, plan, "a100:1x4").simulate().links
        assert sum(sent.values()) == 4 * 3 * times * psi + 8 * 3 * left


def of_weights(program: Program, inside: str, server: int) -> Counter[tuple[str, str]]:
    """Return how many elements of weights in some modules, and of their gradients, collectives put on links, by kind
    and by what they cross: servers of so many devices, or not.
    """
    found = Counter[tuple[str, str]]()
    for i in (i for device in program.devices for i in device.instructions if isinstance(i, Collective)):
        where = "between" if len({rank // server for rank in i.group}) > 1 else "inside"
        for note, way in zip(i.notes, i.ways, strict=True):
            tensor = program.model.tensors[note.tensor]
            if program.model.tensors[tensor.origin or note.tensor].kind == "parameter" and inside in note.tensor:
                found[i.kind, where] += prod(way.view) * links(i.kind, len(i.group)) // len(i.group)
    return found


NEARBY = [
    (LLAMA, "zero:stage=3,secondary=2,microbatches=2", 2), *slow((GPT, "fsdp:secondary=2", 1)),
    *slow((GPT, "zero:stage=3,keep=1,secondary=2,microbatches=4", 4), ("mixtral:size=tiny", "fsdp:secondary=2", 1)),
]  # fmt: skip


@pytest.mark.parametrize(("model", "plan", "microbatches"), NEARBY)
def test_copies_of_weights_in_a_server_are_made_once_and_gathered_inside(
    model: str, plan: str, microbatches: int
) -> None:
    """Of two servers of two devices (hpZ): psi elements cross to the other server once a step, in each direction half.
    Each microbatch gathers in each server, for the forward and for the backward; its gradients cross.
    """
    graph = graph_of(model + ",batch=16" * (microbatches == 4))
    ran = equal(graph, plan, 4)
    block = graph.blocks[0].path.rpartition(".")[0] + "."
    psi = sum(prod(tensor.shape) for tensor in graph.model.parameters())
    layers = sum(prod(tensor.shape) for tensor in graph.model.parameters() if block in tensor.name)
    assert of_weights(ran.program, block, 2) == {
        ("all_gather", "between"): layers,
        ("all_gather", "inside"): microbatches * 2 * 2 * layers,
        ("reduce_scatter", "between"): microbatches * 3 * layers,
    }
    gathered = layers + microbatches * 4 * layers + 3 * (psi - layers)
    # What is left are counts of labels and of the tokens of experts.
    assert 0 <= ran.found["bytes_moved"] // 8 - gathered - microbatches * 3 * psi < 3 * 100
    for device in ran.program.devices:
        assert sum(prod(hi - lo for lo, hi in w.box) for w in device.weights if w.trained) == psi // 4


@pytest.mark.slow
def test_simulate_counts_what_copies_of_weights_spare_the_network() -> None:
    """A ring over four devices crosses servers twice with 3 / 4 of the weights."""
    graph = graph_of(GPT)
    layers = sum(prod(tensor.shape) for tensor in graph.model.parameters() if ".h." in tensor.name)
    flat, nearby = (
        ss.compile(graph, f"zero:stage=3{options}", "v100:2x2").simulate().links["network"]
        for options in ("", ",secondary=2")
    )
    assert flat - nearby == 4 * layers * (2 * 2 * 3 / 4 - 1)


# Devices; channels; of a sequence the tokens that are looked up, that have a label, that stages hand on.
INTERLACED = [
    (DEEP, 4, 64, (32, 32, 96)), ("mbart:size=tiny", 2, 48, (20 + 12, 12, 20)),
    *slow((DEEP, 2, 64, (32, 32, 32)), ("mbart:size=tiny", 4, 48, (20 + 12, 12, 3 * 20 + 12))),
]  # fmt: skip


@pytest.mark.parametrize(("model", "devices", "hidden", "tokens"), INTERLACED)
def test_an_interlaced_pipeline_sums_rows_and_gradients_where_one_stage_reads_them(
    model: str, devices: int, hidden: int, tokens: tuple[int, int, int]
) -> None:
    """Over P - 1 devices: rows to the stages that read them, their gradient back, the head's input to all, its gradient
    back. Twice what stages hand on. The loss takes three numbers a token, in all_reduces. The vocabulary rests in
    slices, also where encoder, decoder and head share it.
    """
    plan = ss.compile(graph_of(model, "SGD"), f"interlaced:{devices},microbatches=4", f"local:{devices}")
    looked, labelled, passed = tokens
    shared = 2 * hidden * (looked + labelled) + 6 * labelled
    found = plan.compiled.program
    assert sum(activations(found).values()) == (ROWS if model == DEEP else BATCH) * (
        (devices - 1) * shared + 2 * hidden * passed
    )
    vocabulary = max(found.model.parameters(), key=lambda tensor: prod(tensor.shape))
    for device in found.devices:
        held = sum(prod(hi - lo for lo, hi in w.box) for w in device.weights if w.tensor == vocabulary.name)
        assert held == prod(vocabulary.shape) // devices


@cache
def halves() -> ss.Graph:
    built = build(f"{GPT},layers=1")
    adam = torch.optim.AdamW(built.module.parameters())
    return ss.capture(built.module, built.args, built.kwargs, adam, precision="bf16", check=False)


@pytest.mark.parametrize("devices", [*slow(2), 4])
def test_sums_of_halves_for_all_devices_travel_in_halves_both_ways(devices: int) -> None:
    """Two numbers travel in float32: the count of labels, and the loss."""
    graph = halves()
    plan = ss.compile(graph, "data_parallel:halves=true", f"local:{devices}")
    psi = sum(prod(tensor.shape) for tensor in graph.model.parameters())
    each = 2 * psi * (devices - 1)
    ways = {(kind, "bfloat16", "float32"): each for kind in ("reduce_scatter", "all_gather")}
    assert moved(plan.compiled.program) == {**ways, ("all_reduce", "float32", ""): 8 * (devices - 1)}
    assert memories(plan.compiled.program)[0].peak == pytest.approx(counted(plan, 0), rel=0.01)


def test_each_addend_is_rounded_and_so_is_the_sum_of_all() -> None:
    """Bit for bit: eager gradients of each device's rows, added in float32; those of float32 weights stay."""
    torch.manual_seed(0)
    layers = {"bias": nn.Linear(6, 8), "norm": nn.BatchNorm1d(8)}
    module, x = Around(lambda m, x: m.norm(m.bias(x)).square().mul(x[:, :1]).sum(), **layers), torch.randn(16, 6)
    module.eval()
    sgd = torch.optim.SGD(module.parameters(), lr=1.0)
    graph = ss.capture(module, (x,), optimizer=sgd, precision="bf16", check=False)
    plan = ss.compile(graph, "data_parallel:halves=true", "local:2")
    plan.validate()
    (batch,) = graph.captured.batch.values()
    narrow = graph.captured.call.module
    weights = dict(narrow.named_parameters())
    made = [torch.autograd.grad(narrow(rows), list(weights.values())) for rows in batch.chunk(2)]

    def copies(step: Step) -> dict[str, torch.Tensor]:
        step(graph.captured.batch)
        states = step.state.updates.optimizer.state
        return {name: states[w].get("copy", w.detach()).clone() for name, w in step.state.weights.items()}

    exact = 0
    for found in on_ranks(plan, copies):
        for (name, weight), one, two in zip(weights.items(), *made, strict=True):
            total = one.float() + two.float()
            expected = weight.detach().float() - total.to(weight.dtype).float()
            assert torch.equal(found[name.replace(".", "_")], expected), name
            exact += torch.equal(expected, weight.detach().float() - total)
    # The sums of float32 weights, of each rank.
    assert exact == 2 * 2


def test_weights_of_one_size_travel_each_in_its_own_dtype() -> None:
    """The float32 one comes first; both are cut alike, and so are their gradients."""
    wide, narrow = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8).bfloat16())

    def forward(m: Around, x: torch.Tensor) -> torch.Tensor:
        return ((x @ m.wide).bfloat16() @ m.narrow).float().square().mean()

    graph = captured(lambda: (Around(forward, wide=wide, narrow=narrow), torch.randn(4, 8)))
    found = moved(ss.compile(graph, "data_parallel:halves=true", "local:2").compiled.program)
    ways = {(kind, "bfloat16", "float32"): 2 * 64 for kind in ("reduce_scatter", "all_gather")}
    assert found == {**ways, ("all_reduce", "float32", ""): 2 * 4 * 64}


def test_gradients_of_halves_travel_in_halves_and_are_added_in_float32() -> None:
    """A microbatch's gradient is made in bf16, so that nothing is rounded; the plan predicts what it needs."""
    graph = halves()
    psi = sum(prod(tensor.shape) for tensor in graph.model.parameters())
    plans = {each: ss.compile(graph, f"zero:halves={each == 2}", "local:2") for each in (4, 2)}
    for each, plan in plans.items():
        sums = {key: count for key, count in moved(plan.compiled.program).items() if key[0] == "reduce_scatter"}
        way = ("bfloat16", "float32") if each == 2 else ("float32", "")
        assert sums == {("reduce_scatter", *way): each * psi}
    assert plans[2].verify()["equal"]
    program = plans[2].compiled.program
    check_program(program)
    first, second = program.devices
    wrong = [replace(i, dtype="float16") if isinstance(i, Collective) and i.wide else i for i in second.instructions]
    with pytest.raises(ScheduleError, match=r"rounds the gradient of .* to float16 to move it"):
        check_program(replace(program, devices=(first, replace(second, instructions=tuple(wrong)))))
    assert memories(plans[2].compiled.program)[0].peak == pytest.approx(counted(plans[2], 0), rel=0.01)
