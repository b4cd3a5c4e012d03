"""Packed rows under plans: equal to the module on whole rows, whatever part of a document a device has."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from superscaler.runtime.functions import attention_kernels, documents
from superscaler.runtime.functions.attention_kernels import Block, Pair
from tests.helpers.packed import Lengths, packed
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
    "recompute:what=attention": 1,
}
ROWS = [(kind, plan, count) for kind in ("llama", "gpt2") for plan, count in PLANS.items()]


@pytest.mark.parametrize("least", [0, *slow(documents.LEAST_SCORES)])
@pytest.mark.parametrize(("kind", "plan", "count"), few(ROWS, 3, 7, 17))
def test_packed_rows_are_exact(kind: str, plan: str, count: int, least: int) -> None:
    # Rows this short take the square with a mask, unless kernels cost nothing.
    with patch.object(documents, "LEAST_SCORES", least):
        found = equal(packed(kind), plan, count).found
    assert (found["reference"], found["module_compared"]) == ("eager", True)
    assert max(found["loss_error"], found["gradient_error"]) < 1e-12


@pytest.mark.parametrize(
    ("plan", "lengths", "share"),
    [
        ("ring_attention", (128, 128), 1 / 2),
        ("ring_attention", (64, 192), 5 / 8),
        *slow(("ring_attention:zigzag=true", (64,) * 4, 1 / 4), ("ulysses", (64,) * 4, 1 / 4)),
    ],
)
def test_devices_compute_the_scores_of_their_documents(plan: str, lengths: tuple[int, ...], share: float) -> None:
    """Counted in the kernels of a step, beside those for rows of one document."""

    def scores(rows: Lengths) -> int:
        found = list[int]()

        def counted(block: Block) -> Pair:
            square = block.q.shape[0] * block.q.shape[1] * block.q.shape[-2] * block.k.shape[-2]
            found.append(square // 2 if block.sees == "before" else square * (block.sees == "all"))
            return kernel(block)

        kernel = attention_kernels.forward
        with patch.object(attention_kernels, "forward", counted):
            trained(exact(packed("llama", rows), plan, 2), 1)
        return sum(found)

    # Two rows of four heads in two layers.
    whole = scores(((256,),) * 2)
    assert whole == 2 * 4 * 2 * 256**2 // 2
    assert scores((lengths,) * 2) == share * whole
