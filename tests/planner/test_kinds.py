"""A model with fewer blocks is the model that was captured with fewer: the same seconds and bytes, to the last bit."""

import pytest

import superscaler as ss
from superscaler.planner.kinds import bypass, reduced, runs
from superscaler.simulate.prediction import Prediction
from tests.helpers.graphs import graph_of

PLANS = ("hybrid:dp=2,tp=2,pp=1,microbatches=2,recompute=full", "sequence_parallel:2,regather=true x zero:2,stage=1")


@pytest.mark.parametrize("family", ["gpt2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama", "bert"))])
def test_a_reduced_model_is_the_smaller_one(family: str) -> None:
    # As small as it is named: two blocks, and eight rows.
    large, small = (graph_of(f"{family}:size=tiny{sizes}") for sizes in (",layers=4,batch=16", ""))
    (blocks,) = runs(large)
    assert len(blocks) == 4
    few = reduced(large, [blocks], [2], 8)
    for plan in PLANS:
        found, wanted = (_numbers(ss.compile(g, plan, "a100:1x4").simulate()) for g in (few, small))
        assert found == wanted


def _numbers(p: Prediction) -> dict[str, object]:
    """Return a prediction without the names of tensors and blocks: those that are left have their old ones."""
    found = p.as_json()
    kept = [list(d.pop("kept").values()) for d in found["devices"]]
    largest = [[count for _, count in d.pop("largest")] for d in found["devices"]]
    for device in found["devices"]:
        del device["peak_at"]
    return {**found, "kept": kept, "largest": largest}


def test_blocks_that_differ_are_runs_of_their_own() -> None:
    """Blocks of an encoder and of a decoder; the first block of T5 alone makes the biases of positions."""
    found = runs(graph_of("t5:size=tiny,layers=3"))
    assert [[block.path for block in run] for run in found] == [
        ["encoder.block.0"],
        ["encoder.block.1", "encoder.block.2"],
        ["decoder.block.0"],
        ["decoder.block.1", "decoder.block.2"],
    ]


def test_blocks_that_take_turns_are_one_block_of_a_run() -> None:
    """Layers of Swin have windows, and shifted windows, in turns; paths are dropped at a rate that grows with depth."""
    found = runs(graph_of("swin:size=tiny,depths=1-4"))
    assert [[block.path for block in run] for run in found][-1] == [
        f"swinv2.encoder.layers.1.blocks.{n}" for n in (0, 2)
    ]


def test_a_model_can_be_without_a_block_whose_results_have_an_input_of_their_shape() -> None:
    """Swin without its first block has all other ops. The first block of T5 makes biases, too, and stays."""
    graph = graph_of("swin:size=tiny,depths=1-4")
    found = runs(graph)
    assert len(found[0]) == 1
    small = reduced(graph, found, [0, *map(len, found[1:])], 1)
    dropped = {op.name for op in found[0][0].ops}
    assert {op.name for op in graph.forward_ops} - dropped == {op.name for op in small.forward_ops}
    assert ss.compile(small, "single", "a100:1x1").simulate().model_flops > 0
    t5 = graph_of("t5:size=tiny,layers=3")
    assert bypass(t5.model, runs(t5)[0][0]) is None
