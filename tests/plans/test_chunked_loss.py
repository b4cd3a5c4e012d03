"""The head and the loss in parts: the same step with as many operations, in which the scores never exist together."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

import superscaler as ss
from superscaler.errors import InputError
from superscaler.ir.communication import bytes_moved
from superscaler.models import build
from superscaler.simulate.memory import memories
from tests.helpers.counted import counted
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal, exact
from tests.helpers.sweeps import slow

# The scores take most of the memory.
WIDE = "gpt2:size=tiny,layers=2,seq=64,vocab=4096,batch=16"
SCORES = 16 * 64 * 4096 * 4


@pytest.mark.parametrize(
    ("plan", "beside", "devices", "less"),
    [
        *slow(
            ("chunked_loss:parts=8", "single", 1, SCORES),
            ("chunked_loss:1,parts=8 x zero:2,stage=3", "zero:stage=3", 2, SCORES // 2),
        ),
        # Its steps of a loss keep scores of all parts, unless these are in order.
        ("chunked_loss:1,parts=8 x tensor_parallel:2", "tensor_parallel", 2, SCORES),
        *slow(
            (
                "chunked_loss:1,parts=8 x pipeline_1f1b:2,microbatches=1",
                "pipeline_1f1b:2,microbatches=1",
                2,
                SCORES // 2,
            )
        ),
    ],
)
def test_the_scores_of_all_tokens_never_exist_together(plan: str, beside: str, devices: int, less: int) -> None:
    def peak(spec: str) -> int:
        compiled = ss.compile(graph_of(WIDE), spec, f"local:{devices}")
        found = max(memories(compiled.compiled.program), key=lambda m: m.peak)
        assert found.peak == pytest.approx(counted(compiled, found.rank), rel=0.01)
        return found.peak

    # Scores, their logarithms and gradients; the gradient of the head comes while a part of these is there.
    assert peak(beside) - peak(plan) > less


def test_nothing_is_computed_twice(tmp_path: Path) -> None:
    batch = (made := build(WIDE).make_batch) and made(0)
    found = {}
    for plan in ("single", "chunked_loss:parts=4", "chunked_loss:parts=4,microbatches=2"):
        folder = tmp_path / plan.replace(":", "_")
        ss.compile(graph_of(WIDE), plan, "local:1").save(folder, evaluation=False)
        step = ss.load(folder)
        with FlopCounterMode(display=False) as counter:
            loss = float(step(batch))
        found[plan] = counter.get_total_flops(), loss
    assert len({flops for flops, _ in found.values()}) == 1
    assert [loss for _, loss in found.values()] == pytest.approx([found["single"][1]] * 3, rel=1e-6)


def test_the_bytes_are_those_of_data_parallelism() -> None:
    """The gradient of the head is summed over devices once, after its last part."""
    graph = graph_of("llama:size=tiny")
    plain = bytes_moved(exact(graph, "data_parallel").program)
    parts = equal(graph, "chunked_loss:parts=4").found["bytes_moved"]
    assert plain == parts > 0


def test_microbatches_of_others_keep_the_activations_of_one() -> None:
    # Most activations are those of the layers.
    graph = graph_of("gpt2:size=tiny,layers=4,batch=16")

    def kept(plan: str) -> int:
        (found, *_) = memories(ss.compile(graph, plan, "local:2").compiled.program)
        return found.parts["activations"]

    # Wherever the microbatches come from.
    assert kept("chunked_loss:1 x zero:2,microbatches=4") < 0.4 * kept("chunked_loss:1 x zero:2")
    assert kept("chunked_loss:microbatches=4") < 0.4 * kept("chunked_loss")


@pytest.mark.parametrize(
    ("model", "plan", "error"),
    [
        (WIDE, "recompute:1,what=full x chunked_loss:1", "has a backward to order"),
        (WIDE, "chunked_loss:parts=1", "parts=1: give 2 or more"),
        (
            WIDE,
            "chunked_loss:parts=7",
            "on a device, which the loss sums over, are batch of 16, sequence of 64; choose",
        ),
        ("mlp:layers=1", "chunked_loss:parts=64", "parts=64"),
    ],
)
def test_what_has_no_such_parts_is_refused(model: str, plan: str, error: str) -> None:
    with pytest.raises(InputError, match=error):
        ss.compile(graph_of(model), plan, "local:1")
