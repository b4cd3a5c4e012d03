"""Recomputed regions inside others: equal, of the same random numbers, and in the memory that their levels leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import isqrt, prod

import pytest
import torch

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import InputError, ScheduleError, TransformError
from superscaler.plans import resolve
from superscaler.report.block_summary import summary
from tests.helpers.graphs import graph_of
from tests.helpers.ran import SProgram, equal, exact, trained
from tests.helpers.rewrites import on_top
from tests.helpers.sweeps import few, slow
from tests.integration.test_recompute import normed
from tests.plans.test_checkpoint_chain import peak

Regions = Callable[[ss.Graph], list[list[ss.Op]]]


def runs(graph: ss.Graph, count: int) -> list[list[ss.Op]]:
    """Return the ops of runs of so many blocks."""
    blocks = graph.blocks
    return [[op for block in blocks[k : k + count] for op in block.ops] for k in range(0, len(blocks), count)]


def inner(graph: ss.Graph) -> list[list[ss.Op]]:
    """Return the ops in the middle of each block."""
    return [list(block.ops[1:-1]) for block in graph.blocks]


def nested(plan: str, *levels: Regions) -> SProgram:
    """Return a plan that recomputes the regions of some levels, in this order."""
    return on_top(plan, lambda g: [ss.op_trans(g, ops, ss.Recompute()) for level in levels for ops in level(g)])


GPT = "gpt2:size=tiny,layers=4,dropout=0.1"
PAIRS, BLOCKS = partial(runs, count=2), partial(runs, count=1)
# Model, plan, devices, how often an op runs again at the most.
ROWS: list[tuple[str, SProgram | str, int, int]] = [
    ("normed", nested("data_parallel", BLOCKS, inner), 2, 2),
    (GPT, nested("single", inner, PAIRS, BLOCKS), 1, 3),
    (GPT, nested("tensor_parallel", BLOCKS, inner, PAIRS), 2, 3),
    (GPT, nested("pipeline_1f1b:microbatches=2", PAIRS, BLOCKS), 2, 2),
    (GPT, "zero:2,stage=3 x recompute:levels=2,microbatches=2", 2, 2),
    (GPT, "chain_recompute:1,every=sqrt x pipeline_1f1b:2,recompute=early,microbatches=2", 2, 2),
    (GPT, "co_shard:1,parts=2 x chain_recompute:1,every=2", 1, 3),
]


@pytest.mark.parametrize(("spec", "plan", "world", "most"), few(ROWS, 0))
def test_regions_in_regions_change_no_number(spec: str, plan: SProgram | str, world: int, most: int) -> None:
    ran = equal(normed() if spec == "normed" else graph_of(spec, "SGD"), plan, world)
    assert max(map(len, ran.graph.model.twins.values())) == most


@pytest.mark.slow
def test_a_folded_plan_is_equal_at_a_small_shape() -> None:
    plan = nested("hybrid:dp=4,tp=4,pp=2,microbatches=2", PAIRS, BLOCKS)
    found = ss.compile(graph_of("gpt2:size=tiny,layers=4", "SGD"), plan, "v100:4x8")
    assert found.compiled.fold is not None
    assert found.verify(shapes="small")["equal"]


def test_a_plan_says_when_the_outer_region_runs_again() -> None:
    plan = "chain_recompute:1,every=sqrt x pipeline_1f1b:2,recompute=early,microbatches=2"
    assert "0R0" in summary(ss.compile(graph_of(GPT, "SGD"), resolve(plan), "local:2").compiled)


def test_what_is_recomputed_twice_draws_the_same_numbers() -> None:
    order = (BLOCKS, inner)
    plain, again = (ss.compile(normed(), plan, "local:1") for plan in ("single", nested("single", *order)))
    ((losses, weights),), ((found, others),) = trained(plain), trained(again)
    assert found == losses
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_regions_that_overlap_are_refused() -> None:
    def crossed(graph: ss.Graph) -> list[list[ss.Op]]:
        return [[op for block in graph.blocks[1:3] for op in block.ops]]

    refused = r"Recompute of \S+ and \S+, but \S+ is recomputed with \S+ already; choose regions of which one is inside"
    for levels, told in (((PAIRS, crossed), refused), ((PAIRS, BLOCKS, PAIRS), "Recompute of .* is asked for twice")):
        with pytest.raises(TransformError, match=told):
            ss.compile(graph_of(GPT, "SGD"), nested("single", *levels), "local:1")
    for plan in ("recompute:levels=0", "recompute:levels=2,what=attention"):
        with pytest.raises(InputError, match="give 1 or more, and 1 for attention"):
            ss.compile(graph_of(GPT, "SGD"), resolve(plan), "local:1")


def test_two_mirrors_of_an_op_are_refused() -> None:
    program = exact(graph_of(GPT, "SGD"), nested("single", PAIRS, BLOCKS), 1).program
    outer = next(twins[0] for twins in program.model.twins.values() if len(twins) > 1 and twins[1].has_mirror)
    ops = tuple(replace(op, has_mirror=True) if op is outer else op for op in program.model.ops)
    with pytest.raises(ScheduleError, match="or another op that recomputes it has a backward too"):
        check_program(replace(program, model=replace(program.model, ops=ops)))


@cache
def measured(layers: int, plan: str) -> float:
    """Return the peak of a plan, in inputs of a block. Those of more blocks are larger, as are their gradients."""
    sizes = "seq=128" if layers < 16 else "hidden=32,seq=512"
    graph = graph_of(f"gpt2:size=tiny,layers={layers},{sizes},vocab=32,dropout=0", "SGD")
    edge = 4 * prod(graph.model.tensors[graph.blocks[1].ops[0].inputs[0].tensor].shape)
    rest = 2 * sum(tensor.nbytes for tensor in graph.model.parameters())
    return (peak(ss.compile(graph, resolve(plan), "local:1")) - rest) / edge


# Beside its parts and inputs, a block has at once its last gradient, what it adds to that, and two normalized inputs.
UNCUT = 4


@pytest.mark.parametrize("layers", [4, *slow(8, 9, 24, 48)])
def test_co_shard_keeps_the_inputs_of_blocks_and_one_part(layers: int) -> None:
    plain, two, four = (measured(layers, plan) for plan in ("recompute", "co_shard:parts=2", "co_shard:parts=4"))
    block = plain - layers
    assert four < two < plain
    assert two <= layers + UNCUT / 2 + block / 2
    assert four <= layers + UNCUT * 3 / 4 + block / 4
    assert layers < 24 or max(two / (layers + block / 2), four / (layers + block / 4)) < 1.1


@pytest.mark.parametrize("layers", [4, *slow(9, 25)])
def test_levels_keep_roots_of_the_number_of_blocks(layers: int) -> None:
    plain, two, three = (measured(layers, plan) for plan in ("recompute", *(f"recompute:levels={n}" for n in (2, 3))))
    block, root = plain - layers, isqrt(layers)
    assert block + 2 * root - 1 <= two <= block + 2 * root
    assert three <= two if layers < 16 else three < two
