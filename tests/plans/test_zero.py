"""ZeRO in its stages: exactly the traffic and the memory at rest that the formulas say."""

from __future__ import annotations

from math import prod

import pytest

import superscaler as ss
from superscaler.errors import InputError
from superscaler.ir.graph import block_of
from superscaler.ir.program import Collective
from superscaler.plans import resolve
from tests.graphs import graph_of


def elements(graph: ss.Graph, inside: str = "") -> int:
    return sum(prod(tensor.shape) for tensor in graph.model.parameters() if inside in tensor.name)


@pytest.mark.parametrize("spec", ["gpt2:size=tiny", pytest.param("llama:size=tiny", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("copies", "shard"), [(1, 4), (2, 2), (2, 4), (4, 2)])
def test_traffic_and_what_rests_are_those_of_the_formulas(spec: str, copies: int, shard: int) -> None:
    graph, n = graph_of(spec), copies * shard
    psi, repeated = elements(graph), elements(graph, graph.blocks[0].path.rpartition(".")[0] + ".")
    parallel = ss.compile(graph, resolve("data_parallel"), f"local:{n}").compiled.program
    # What is left are the parts of the loss.
    left = parallel.bytes_moved - 4 * 2 * (n - 1) * psi
    for plan, again in (("zero:stage=1", 0), ("zero:stage=3", repeated), ("fsdp:recompute=false", repeated)):
        program = ss.compile(graph, resolve(f"{plan},shard={shard}"), f"local:{n}").compiled.program
        # Gathered, and scattered, within a group; a slice is then added up between groups.
        inside, between = copies * (shard - 1) * (2 * psi + again), 2 * (copies - 1) * psi
        assert program.bytes_moved == 4 * (inside + between) + left
        for device in program.devices:
            assert sum(prod(hi - lo for lo, hi in w.box) for w in device.weights if w.trained) == psi // shard


def test_each_microbatch_gathers_and_scatters_where_gradients_or_weights_are_not_kept() -> None:
    graph = graph_of("gpt2:size=tiny")
    psi, repeated = elements(graph), elements(graph, ".h.")

    def moved(plan: str) -> int:
        return ss.compile(graph, resolve(plan), "local:2").compiled.program.bytes_moved // 4 - 2

    assert moved("zero:stage=1,microbatches=4") == 2 * psi
    assert moved("zero:stage=2,microbatches=4") == psi + 4 * psi
    assert moved("zero:stage=3,microbatches=4") == (psi - repeated) + 4 * (psi + 2 * repeated)


def test_fsdp_computes_blocks_again_if_asked_to() -> None:
    graph = graph_of("gpt2:size=tiny")
    for recompute, asked in (("false", []), ("true", [block.path for block in graph.blocks])):
        made = ss.compile(graph, f"fsdp:recompute={recompute}", "local:2").compiled.graph
        assert list(dict.fromkeys(block_of(op.module) for op in made.model.ops if op.origin)) == asked


@pytest.mark.parametrize(("cluster", "shard"), [("local:8", 4), ("v100:8x8", 8)])
def test_groups_of_slices_reduce_in_one_bucket_each(cluster: str, shard: int) -> None:
    """On more devices, too, than a path is searched for."""
    plan = ss.compile(graph_of("gpt2:size=tiny,batch=64"), resolve(f"zero:shard={shard}"), cluster)
    code = [i for i in plan.compiled.program.devices[0].instructions if isinstance(i, Collective)]
    many = [(i.kind, i.group) for i in code if len(i.works) > 1]
    group, others = tuple(range(shard)), tuple(range(0, len(plan.compiled.program.devices), shard))
    assert many == [("all_gather", group), ("reduce_scatter", group), ("all_reduce", others)]
    assert plan.compiled.fold is not None


def test_options_that_do_not_hold_are_refused() -> None:
    graph = graph_of("mlp")
    with pytest.raises(InputError, match="zero:shard=3 does not divide its 4 devices; choose 1, 2 or 4"):
        ss.compile(graph, resolve("zero:shard=3"), "local:4")
    for option in ("stage=4", "keep=-1", "microbatches=0", "microbatches=-1"):
        with pytest.raises(InputError, match=f"zero:.*{option}.*: choose stage 1"):
            ss.compile(graph, resolve(f"zero:{option}"), "local:4")
