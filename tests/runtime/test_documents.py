"""Attention inside documents: equal to attention under their mask, for fewer scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from superscaler.runtime import functional
from superscaler.runtime.functions import documents
from superscaler.runtime.functions.tracing import traced
from tests.helpers.packed import numbers


def operands(q: tuple[int, ...], k: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    made = (torch.randn(shape, dtype=torch.float64) for shape in (q, k, k))
    return tuple(x.requires_grad_() for x in made)  # type: ignore[return-value]


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)


def assert_equal(one: Tensor, other: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Compare two results, and their gradients."""
    weights = torch.randn_like(other)
    found, wanted = (torch.autograd.grad((x * weights).sum(), inputs) for x in (one, other))
    for mine, theirs in zip((one, *found), (other, *wanted), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)


def drawn(random: Random, rows: int, tokens: int) -> Tensor:
    """Return numbers of documents: in order, or in pieces that come again."""
    found = [random.choices(range(4), k=tokens) for _ in range(rows)]
    return torch.tensor([sorted(row) for row in found] if random.random() < 0.6 else found)


@pytest.mark.parametrize("least", [0, documents.LEAST_SCORES])
@pytest.mark.parametrize("is_traced", [False, True])
def test_attention_inside_documents_is_attention_under_their_mask(least: int, is_traced: bool) -> None:
    random = Random(0)
    with patch.object(documents, "LEAST_SCORES", least):
        for _ in range(40):
            rows, tokens, is_causal = random.choice((1, 2, 3)), random.choice((12, 16)), random.random() < 0.6
            low = random.choice((0, 0, 4, 7))
            high = random.choice((tokens, low + 3))
            own = drawn(random, random.choice((1, rows)), tokens)
            # A part of the queries reads the keys up to its end.
            keys = high if is_causal else tokens
            mine, theirs = own[:, None, low:high, None], own[:, None, None, :keys]
            given = operands((rows, 4, high - low, 6), (rows, random.choice((2, 4)), keys, 6))
            mask = mine == theirs
            if is_causal:
                mask = mask & (torch.arange(keys) <= torch.arange(low, high).unsqueeze(-1))
            some = functional.documents(mine, theirs, [(low, high)], [tokens])
            if is_traced:
                with traced():
                    found = functional.attention_documents(*given, is_causal, 0.3, some)
            else:
                found = functional.attention_documents(*given, is_causal, 0.3, some)
            assert_equal(found, masked(*given, mask), given)


def test_queries_of_two_dims_are_in_stretches() -> None:
    """The second and third of four columns of three rows of tokens."""
    places = torch.tensor([1, 2, 5, 6, 9, 10])
    own = torch.tensor([[0] * 3 + [1] * 7 + [2] * 2])
    mine, theirs = own[:, None, places, None], own[:, None, None]
    given = operands((1, 2, 6, 4), (1, 2, 12, 4))
    mask = (mine == theirs) & (torch.arange(12) <= places.unsqueeze(-1))
    with patch.object(documents, "LEAST_SCORES", 0):
        some = functional.documents(mine, theirs, [(0, 3), (1, 3)], [3, 4])
        assert_equal(functional.attention_documents(*given, True, 0.3, some), masked(*given, mask), given)


@pytest.mark.parametrize("least", [0, documents.LEAST_SCORES])
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_of_a_ring_are_attention_inside_documents(least: int, is_causal: bool) -> None:
    own = drawn(Random(1), 2, 12)
    mine, theirs, given = own[:, None, :, None], own[:, None, None], operands((2, 4, 12, 6), (2, 2, 12, 6))
    mask = (mine == theirs) & (torch.ones(12, 12, dtype=torch.bool).tril() if is_causal else torch.tensor(True))
    result, total, every = torch.zeros(0), torch.zeros(0), [((0, 12),), (12,)]
    with patch.object(documents, "LEAST_SCORES", least):
        steps = [
            (functional.seen_by(*every, n, 3, is_causal), functional.documents(mine, theirs, *every, n, 3))
            for n in range(3)
        ]
        for step, (sees, some) in enumerate(steps):
            block = functional.attention_block(*given, None, 0.3, *sees, some)
            with torch.no_grad():
                plain = functional.attention_block(*given, None, 0.3, *sees, some)
            for one, other in zip(plain, block, strict=True):
                assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
            result, total = functional.attention_merge(result, total, *block) if step else block
        assert_equal(result, masked(*given, mask), given)
        whole = result.detach(), total.detach()
        shares = sum(functional.attention_gradient(*given, None, *whole, 0.3, *sees, some) for sees, some in steps)
        weights = torch.randn_like(result)
        found, wanted = (torch.autograd.grad((x * weights).sum(), given) for x in (shares, masked(*given, mask)))
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)


class Scores(TorchDispatchMode):
    """A counter of the scores that torch's kernels of attention compute, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"forward": 0, "backward": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func.name():
            is_backward = "backward" in func.name()
            q, k = args[1:3] if is_backward else args[:2]
            square = q.shape[0] * q.shape[-2] * k.shape[-2]
            is_causal = any(a is True for a in (*args, *(kwargs or {}).values()))
            self.counts["backward" if is_backward else "forward"] += square // (2 if is_causal else 1)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    with Scores() as scores:
        yield scores.counts


@pytest.mark.parametrize(
    ("lengths", "count"),
    [
        ([(256,)], 256**2 // 2),
        ([(64,) * 4], 4 * 64**2 // 2),
        ([(128, 64, 64), (64, 64, 128)], 2 * (128**2 + 2 * 64**2) // 2),
        # Kernels of their own take longer than the square.
        ([(2,) * 128], 256**2),
    ],
)
def test_only_scores_inside_documents_are_computed(lengths: list[tuple[int, ...]], count: int) -> None:
    own = numbers(lengths)
    given = operands((len(lengths), 2, 256, 8), (len(lengths), 2, 256, 8))
    some = functional.documents(own[:, None, :, None], own[:, None, None])
    with counted() as counts:
        functional.attention_documents(*given, True, None, some).sum().backward()
    assert counts == {"forward": count, "backward": count}


@pytest.mark.parametrize(("step", "count"), [(0, 2 * 64**2 // 2), (1, 0), (2, 0), (3, 0)])
def test_a_device_of_a_ring_skips_chunks_without_its_documents(step: int, count: int) -> None:
    """Device 2 of 4 with documents of 64, 64, 128 in 256 tokens sees keys of its own only; a step sends them all."""
    own = numbers([(64, 64, 128)])
    given, box = operands((2, 2, 64, 8), (2, 2, 64, 8)), [((128, 192),), (256,)]
    sees, at = functional.seen_by(*box, step, 4, True), (2 - step) % 4 * 64
    some = functional.documents(own[:, None, 128:192, None], own[:, None, None, at : at + 64], *box, step, 4)
    with counted() as counts, torch.no_grad():
        functional.attention_block(*given, None, None, *sees, some)
    assert counts["forward"] == count


def test_documents_without_data_have_given_lengths() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def run(lengths: tuple[int, ...]) -> int:
        with FakeTensorMode(), documents.packing(lengths), counted() as counts, torch.no_grad():
            own = torch.empty(2, 256, dtype=torch.int64)
            q = torch.empty(2, 2, 256, 8)
            some = functional.documents(own[:, None, :, None], own[:, None, None])
            functional.attention_documents(q, q, q, True, None, some)
        return counts["forward"]

    assert run(()) == 2 * 256**2 // 2
    assert run((64,)) == 2 * 4 * 64**2 // 2
    assert run((200, 56)) == run((200,)) == 2 * (200**2 + 56**2) // 2
