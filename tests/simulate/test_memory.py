"""The predicted memory of devices is what their emitted code takes, and what the formulas of the field say."""

from __future__ import annotations

from math import prod

import pytest
import torch

import superscaler as ss
from superscaler.ir.program import Update
from superscaler.models import build
from superscaler.simulate.memory import memories
from superscaler.simulate.storages import CATEGORIES
from tests.helpers.counted import PLANS, counted
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import slow

# Activations dominate.
GPT2, LLAMA = "gpt2:size=tiny,layers=4,batch=16", "llama:size=tiny,layers=4,seq=128"
ZERO_3 = "zero:stage=3,microbatches=2"
MIXTRAL, SWIN = "mixtral:size=tiny,seq=64", "swin:size=tiny"
FAST = [(GPT2, "single", 1), (GPT2, "zb_h1", 2), (GPT2, "zero:stage=3", 2), (GPT2, "swap:what=both", 1)]
FAST += [(GPT2, "sequence_parallel", 2)]
SWEEP = [(model, plan, n) for model in (GPT2, LLAMA) for plan, n in PLANS if (model, plan, n) not in FAST]
# Experts are predicted to have as many tokens each: of more tokens that is less wrong.
SWEEP += [
    (MIXTRAL, "expert_parallel", 2),
    (SWIN, "single", 1),
    ("mixtral:size=tiny,seq=128", "zero:stage=3", 2),
    ("mbart:size=tiny", "interlaced:microbatches=4", 2),
]


@pytest.mark.parametrize(("model", "plan", "devices"), [*FAST, *slow(*SWEEP)])
def test_the_peak_is_that_of_the_emitted_code(model: str, plan: str, devices: int) -> None:
    compiled = ss.compile(graph_of(model), plan, f"local:{devices}")
    for found in memories(compiled.compiled.program):
        assert found.peak == pytest.approx(counted(compiled, found.rank), rel=0.01)
        assert found.peak == sum(found.parts.values()) == found.during.max() == found.during[found.at]
        assert set(found.parts) == set(CATEGORIES)
        # Nothing but weights, states and the outputs of the step outlives it: zero_grad frees gradients.
        left = dict(zip(CATEGORIES, found.curve[-1].tolist(), strict=True))
        assert not left["gradients"] + left["activations"] + left["gathered"] + left["communication"]


def test_microbatches_one_after_the_other_keep_the_activations_of_one() -> None:
    """The number of labels of all microbatches is counted before the first forward, which would wait for it."""
    (whole,), (four,) = (
        memories(ss.compile(graph_of(GPT2), plan, "local:1").compiled.program)
        for plan in ("single", "gradient_accumulation:microbatches=4")
    )
    assert four.parts["activations"] < 0.26 * whole.parts["activations"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["copies", "autocast"])
@pytest.mark.parametrize("plan", ["zero:stage=2,microbatches=2", "single", "tensor_parallel", "pipeline_1f1b"])
def test_halves_count_with_their_casts_and_copies(plan: str, precision: str) -> None:
    built = build("gpt2:size=tiny,seq=8")
    optimizer = torch.optim.AdamW(built.module.parameters())
    given = {"autocast": "bf16"} if precision == "autocast" else {"precision": "bf16"}
    graph = ss.capture(built.module, built.args, built.kwargs, optimizer, check=False, **given)
    compiled = ss.compile(graph, plan, f"local:{1 if plan == 'single' else 2}")
    for found in memories(compiled.compiled.program):
        assert found.peak == pytest.approx(counted(compiled, found.rank), rel=0.01)


def test_a_small_weight_that_devices_share_unevenly_takes_no_more_than_an_even_one() -> None:
    """No two of these devices do the same, but a gradient leaves each of them as soon as all have made it."""
    even, uneven = (
        memories(
            ss.compile(
                graph_of(f"mlp:layers=6,hidden=2048,classes={n},device=meta"), ZERO_3, "local:4"
            ).compiled.program
        )
        for n in (36, 34)
    )
    assert (len(even), len(uneven)) == (1, 4)
    assert all(found.peak == pytest.approx(even[0].peak, rel=0.001) for found in uneven)


def test_gradients_are_scaled_in_place() -> None:
    """What clipping needs are float64 copies of one gradient, for the norm."""
    compiled = ss.compile(graph_of("mlp"), "single", "local:1")
    (plain,), (clipped,) = (memories(compiled.compiled.program, clips=clips) for clips in (False, True))
    code = compiled.compiled.program.devices[0].instructions
    assert isinstance(code[clipped.at], Update)
    measured = [counted(compiled, 0, clip=clip) for clip in (None, 1e-6)]
    assert [plain.peak, clipped.peak] == pytest.approx(measured, rel=0.02)
    assert measured[1] - measured[0] < 1.1 * 16 * max(prod(t.shape) for t in compiled.compiled.graph.model.parameters())


def test_the_largest_tensors_have_the_module_that_made_them_and_their_microbatch() -> None:
    compiled = ss.compile(graph_of(GPT2), "gpipe", "local:2")
    found = memories(compiled.compiled.program, largest=40)[0]
    kept = [held for held in found.largest if held.microbatch >= 0]
    assert {held.microbatch for held in kept} == set(range(4))
    assert "transformer.h.0.mlp.act" in {held.made_by for held in kept}
    assert all(held.made_by for held in found.largest)
    assert [held.bytes for held in found.largest] == sorted((h.bytes for h in found.largest), reverse=True)


def test_the_first_tensor_beyond_a_capacity_is_named_with_its_block() -> None:
    program = ss.compile(graph_of(GPT2), "single", "local:1").compiled.program

    def excess(capacity: int) -> str:
        return memories(program, capacity=capacity)[0].excess

    (found,) = memories(program)
    rest = found.parts["weights"] + found.parts["optimizer"]
    assert excess(found.peak) == ""
    assert excess(found.peak - 1).endswith(f"in {found.place}")
    assert excess(found.parts["weights"] - 1).endswith("before the step")
    # The more memory there is, the later is the block whose activations do not fit.
    blocks = [excess(rest + found.parts["activations"] * n // 10) for n in (1, 4)]
    assert ["transformer.h.0" in blocks[0], "transformer.h.1" in blocks[1]] == [True, True], blocks
    assert [block for block in found.kept if block] == [f"transformer.h.{n}" for n in range(4)]
    assert sum(found.kept.values()) <= found.parts["activations"]
    assert found.place == "the forward of cross_entropy_loss"
