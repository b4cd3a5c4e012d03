"""Gradients are summed while others are computed: segments end, and sums start, where there are enough of them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from superscaler import Cluster, Graph
from superscaler.ir.program import Backward, Collective, Forward, Instruction, Update, Wait
from superscaler.materialize import buckets
from superscaler.plans import resolve
from superscaler.schedule import segments
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal, exact
from tests.helpers.sweeps import slow

LAYERS = 4
GPT = f"gpt2:size=tiny,layers={LAYERS},batch=16"


@pytest.fixture(params=[1, *slow(150_000, 400_000)])
def few_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As many bytes of gradients as are worth an all_reduce: of one tensor, of a layer, of some layers."""
    for module in (segments, buckets):
        monkeypatch.setattr(module, "SEGMENT_BYTES", request.param)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 300_000)
    return int(request.param)


def sums(code: tuple[Instruction, ...]) -> list[int]:
    """Return where all_reduces start after the first backward."""
    first = next(at for at, i in enumerate(code) if isinstance(i, Backward))
    found = [at for at, i in enumerate(code) if isinstance(i, Collective) and i.kind == "all_reduce"]
    return [at for at in found if at > first]


@pytest.mark.parametrize(
    ("spec", "world"),
    [("hybrid:dp=2,pp=2,microbatches=2", 4), *slow(("hybrid:dp=2,tp=2", 4), ("hybrid:dp=4,tp=1,pp=1", 4))],
)
def test_any_size_of_buckets_gives_the_same_step(spec: str, world: int, few_bytes: int) -> None:
    equal(graph_of(GPT, "SGD"), spec, world)


def test_sums_that_are_sent_last_start_after_all_backwards(few_bytes: int) -> None:
    def last(graph: Graph, cluster: Cluster) -> None:
        graph.send_gradients_last()
        resolve("data_parallel")(graph, cluster)

    ran = equal(graph_of(GPT, "SGD"), last)
    assert min(sums(ran.code())) > max(at for at, i in enumerate(ran.code()) if isinstance(i, Backward))
    assert str(ran.graph.journal[0]).startswith(f"{__file__}:")


def test_sums_start_between_the_backwards_and_are_waited_for_before_the_update(few_bytes: int) -> None:
    for device in equal(graph_of(GPT, "SGD"), "data_parallel", 4).program.devices:
        code = device.instructions
        backwards = [at for at, i in enumerate(code) if isinstance(i, Backward)]
        update = next(at for at, i in enumerate(code) if isinstance(i, Update))
        started = sums(code)
        # Embeddings, the head, and each layer, or two together.
        assert len(backwards) >= (LAYERS if few_bytes < 400_000 else LAYERS // 2)
        early = [(a, b) for a, b in pairwise(backwards) if any(a < at < b for at in started)]
        assert len(early) >= len(backwards) - 3
        for at in started:
            start = code[at]
            assert isinstance(start, Collective)
            waits = [n for n, i in enumerate(code) if isinstance(i, Wait) and i.work in start.works]
            assert len(waits) == len(start.works)
            assert all(backwards[-1] < n < update for n in waits)
        for i in code:
            if isinstance(i, Collective) and len(i.works) > 1:
                assert i.bytes <= 2 * max(300_000, few_bytes)


def test_small_gradients_share_one_sum_and_the_number_of_labels_is_summed_before_the_model_runs() -> None:
    """What is made of the batch alone is sent first, so that no device waits for it in the middle."""
    program = exact(graph_of(GPT, "SGD"), "data_parallel").program
    for device in program.devices:
        code = device.instructions
        assert len(sums(code)) == 1
        assert sum(isinstance(i, Backward) for i in code) == 2
        count = next(at for at, i in enumerate(code) if isinstance(i, Collective) and i.kind == "all_reduce")
        work = next(at for at, i in enumerate(code) if isinstance(i, Forward) and program.functions[i.function].grads)
        waited = next(at for at, i in enumerate(code) if isinstance(i, Wait))
        assert count < work < waited
