"""Packed rows under plans: equal to the module on whole rows, whatever part of a document a device has."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest

import superscaler as ss
from superscaler.errors import InputError
from superscaler.runtime.functions import attention_kernels, documents
from superscaler.runtime.functions.attention_kernels import Block, Pair
from tests.helpers.graphs import graph_of
from tests.helpers.packed import numbers, own, packed
from tests.helpers.ran import equal, exact, trained
from tests.helpers.sweeps import few, slow

PLANS = {
    "tensor_parallel": 2,
    "sequence_parallel": 2,
    "ring_attention": 2,
    "ring_attention:zigzag=true": 2,
    "ulysses": 2,
    "pipeline_1f1b:microbatches=2": 2,
    "hybrid:dp=1,tp=2,pp=2,microbatches=2": 4,
    "ring_attention:2 x ulysses:2": 4,
    "terapipe:microbatches=2,slices=2": 2,
    "data_parallel:2 x ring_attention:2": 4,
    "ring_attention:zigzag=documents,documents=4+8,chunks=2": 2,
    "recompute:what=attention": 1,
}
# A mask that is an input is not known to be causal, or to be of documents.
NOT_MASKED = ("terapipe:microbatches=2,slices=2", "ring_attention:zigzag=documents,documents=4+8,chunks=2")
ROWS = [
    (kind, plan, count)
    for kind in ("llama", "gpt2", "llama with a mask")
    for plan, count in PLANS.items()
    if "mask" not in kind or plan not in NOT_MASKED
]


@pytest.mark.parametrize("least", [0, *slow(documents.LEAST_SCORES)])
@pytest.mark.parametrize(("kind", "plan", "count"), few(ROWS, 10, 18))
def test_packed_rows_are_exact(kind: str, plan: str, count: int, least: int) -> None:
    # Rows this short take the square with a mask, unless kernels cost nothing.
    with patch.object(documents, "LEAST_SCORES", least):
        found = equal(packed(kind), plan, count).found
    assert (found["reference"], found["module_compared"]) == ("eager", True)
    assert max(found["loss_error"], found["gradient_error"]) < 1e-12


@pytest.mark.parametrize(
    ("plan", "lengths", "share"),
    [
        ("ring_attention", (64, 192), 5 / 8),
        *slow(
            ("ring_attention", (128, 128), 1 / 2),
            ("ring_attention:zigzag=true", (64,) * 4, 1 / 4),
            ("ulysses", (64,) * 4, 1 / 4),
        ),
    ],
)
def test_devices_compute_the_scores_of_their_documents(plan: str, lengths: tuple[int, ...], share: float) -> None:
    """Beside those for rows of one document, of two rows of four heads in two layers."""
    assert sum(scores(plan, lengths)) == share * (2 * 4 * 2 * 256**2 // 2)


def scores(plan: str, lengths: tuple[int, ...]) -> list[int]:
    """Return the scores that two devices compute in the forward of a step on two rows, the fewest first. They are
    counted in the kernels: half of a square for a causal one.
    """
    found, kernel = Counter[int](), attention_kernels.forward

    def counted(block: Block) -> Pair:
        square = block.q.shape[0] * block.q.shape[1] * block.q.shape[-2] * block.k.shape[-2]
        found[threading.get_ident()] += square // 2 if block.sees == "before" else square * (block.sees == "all")
        return kernel(block)

    with patch.object(attention_kernels, "forward", counted), patch.object(documents, "LEAST_SCORES", 0):
        trained(exact(packed("llama", (lengths,) * 2), plan, 2), 1)
    return sorted(found.values())


def share_of(lengths: Sequence[int], places: Sequence[int]) -> float:
    """Return the scores of the device with the most beside the mean, counted in the mask of a row."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    rows = np.tril(owner[:, None] == owner).sum(1)
    device = np.repeat(places, len(rows) // len(places))
    sums = [rows[device == d].sum() for d in range(max(places) + 1)]
    return float(max(sums) / np.mean(sums))


@pytest.mark.parametrize(
    ("lengths", "n", "chunks"),
    [((128, 64, 64), 2, 4), ((256,), 2, 2), ((64,) * 4, 4, 1), ((187, 63, 6), 4, 4), ((100, 28), 2, 1), ((3, 5), 4, 1)],
)
def test_chunks_of_a_ring_are_even_for_a_packing(lengths: tuple[int, ...], n: int, chunks: int) -> None:
    from superscaler.plans.lib.documents import ring

    graph = packed("llama", ((256,),) * 2)
    own = [op for op in graph.forward_ops if "attention" in op.target]
    places = ring(graph, own, n, "documents", "+".join(map(str, lengths)), 0)
    # As many chunks for each, as few as are even.
    assert Counter(places) == dict.fromkeys(range(n), chunks)
    times = 256 // sum(lengths)
    assert share_of(lengths * times, places) < 1.06
    for fewer in (c for c in (1, 2, 4) if c < chunks):
        assert share_of(lengths * times, ring(graph, own, n, "documents", "+".join(map(str, lengths)), fewer)) > 1.05


def test_devices_of_a_ring_compute_as_many_scores_for_the_packing_given() -> None:
    lengths = (64, 192)
    few, many = scores("ring_attention:zigzag=documents,documents=64+192", lengths)
    assert many <= 1.01 * few
    assert share_of(lengths, (0, 1, 1, 0)) > 1.15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("documents=4", "chunks= go with zigzag=documents"),
        ("zigzag=true,chunks=2", "chunks= go with zigzag=documents"),
        ("zigzag=both", "zigzag=both: choose true, false or documents"),
        (
            "zigzag=documents,documents=4+x",
            "documents of ring_attention is '4.x', but it must be the tokens of each document",
        ),
        (
            "zigzag=documents,documents=4+0",
            "documents of ring_attention is '4.0', but it must be the tokens of each document",
        ),
        ("zigzag=documents,documents=4,chunks=3", "cuts 16 tokens into 3 chunks for each, but 6 does not divide 16"),
    ],
)
def test_options_of_a_ring_that_say_nothing_are_refused(options: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ss.compile(packed("llama"), f"ring_attention:{options}", "local:2")


def test_chunks_of_a_ring_are_even_for_the_captured_batch() -> None:
    """Of rows with other documents, by positions or by numbers."""
    from superscaler.plans.lib.documents import ring

    lengths = ((40, 24), (16, 48), (64,), (10, 20, 34))
    both = [packed("llama", lengths), own(lambda d: (d.unsqueeze(-1) == d.unsqueeze(-2)).tril().unsqueeze(1), lengths)]
    for graph in both:
        attentions = [op for op in graph.forward_ops if "attention" in op.target]
        places = ring(graph, attentions, 2, "documents", "", 4)
        rows = sum(np.tril(np.equal.outer(d, d)).sum(1) for d in numbers(lengths).numpy())
        device = np.repeat(places, len(rows) // len(places))
        assert abs(int(rows[device == 0].sum()) - int(rows[device == 1].sum())) < 0.02 * rows.sum()
    unknown = own(lambda d: (d.unsqueeze(-1) * 2 == d.unsqueeze(-2) * 2).tril().unsqueeze(1), lengths)
    with pytest.raises(InputError, match="does not know the documents of a row: the captured batch has none"):
        ss.compile(unknown, "ring_attention:zigzag=documents", "local:2")


def test_a_model_without_documents_is_refused() -> None:
    with pytest.raises(InputError, match="needs attention inside documents, but this model has none; capture it with"):
        ss.compile(graph_of("llama:size=tiny"), "ring_attention:zigzag=documents,documents=8", "local:2")
