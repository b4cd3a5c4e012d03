"""The functions of emitted code against torch, and the random numbers against what chance allows."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from superscaler.runtime.functional import (
    attention_block,
    attention_dropout,
    attention_gradient,
    attention_merge,
    count_labels,
    cross_entropy,
    draw,
    dropout,
)
from superscaler.runtime.functions import draws
from tests.helpers.live import Live

EXTENTS = (64, 48, 32)
WHOLE = [(0, size) for size in EXTENTS]


def numbers(seed: int = 0, step: int = 0, op: int = 0) -> torch.Tensor:
    return draw(seed, step, op, WHOLE, EXTENTS, "cpu").double()


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1])


@pytest.mark.parametrize("box", [[(0, 64), (0, 48), (0, 32)], [(3, 40), (47, 48), (5, 31)], [(2, 2), (0, 48), (1, 9)]])
def test_uniform_depends_on_the_element_and_never_on_the_box(box: list[tuple[int, int]]) -> None:
    whole = draw(5, 6, 7, WHOLE, EXTENTS, "cpu")
    part = draw(5, 6, 7, box, EXTENTS, "cpu")
    assert torch.equal(part, whole[tuple(slice(low, high) for low, high in box)])


def test_uniform_blocks_do_not_show() -> None:
    long = draw(1, 2, 3, [(0, 300_000)], [300_000], "cpu")
    assert torch.equal(long[131_000:131_200], draw(1, 2, 3, [(131_000, 131_200)], [300_000], "cpu"))
    assert draw(1, 2, 3, [], [], "cpu").shape == ()
    assert draw(1, 2, 3, [], [], "cpu") == long[0]


@pytest.mark.parametrize("made", ["numbers", "zeros", "nothing"])
def test_a_kernel_that_gives_other_numbers_is_not_used(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mix(rows: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
        if made == "nothing":
            raise RuntimeError("no compiler")
        if made == "numbers":
            draws._mix(rows.unsqueeze(1), columns, out)

    monkeypatch.setitem(sys.modules, "superscaler.runtime.functions.triton_draws", SimpleNamespace(mix=mix))
    with nullcontext() if made == "numbers" else pytest.warns(UserWarning, match="kernel of random numbers"):
        found = draws._kernel.__wrapped__(torch.device("cpu"))
    assert found is (mix if made == "numbers" else None)


INTERPRETED = """
import torch
from superscaler.runtime.functions import draws, triton_draws

for rows, columns in (1, 1), (3, 101), (37, 257), (300, 4096), (0, 5):
    words = [torch.randint(-(2**63), 2**63 - 1, (n,)) for n in (rows, columns)]
    own, other = torch.empty(rows, columns), torch.empty(rows, columns)
    draws._mix(words[0].unsqueeze(1), words[1], own)
    triton_draws.mix(words[0].unsqueeze(1), words[1], other)
    assert torch.equal(own, other), (rows, columns)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch's builds for GPUs")
def test_tritons_kernel_gives_the_numbers_of_torch() -> None:
    """In Triton's interpreter, on a CPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True, timeout=120)


def test_uniform_is_what_splitmix64_computes() -> None:
    """The same element by Python's integers, at an index that needs more than 32 bits."""
    index, word = 2**40 + 12345, (1 << 64) - 1
    z = (index * 0x9E3779B97F4A7C15 + draws._key(-1, 2**70, 3)) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    z ^= z >> 31
    assert float(draw(-1, 2**70, 3, [(index, index + 1)], [2**41], "cpu")) == (z >> 40) * 2.0**-24


def test_uniform_has_the_moments_of_a_uniform_distribution() -> None:
    x = numbers()
    deviation = 1 / math.sqrt(x.numel())
    assert x.min() >= 0
    assert x.max() < 1
    assert abs(x.mean() - 0.5) < 5 * deviation * math.sqrt(1 / 12)
    assert abs(x.var() - 1 / 12) < 5 * deviation * math.sqrt(1 / 180)
    counts = torch.histc(x, 64, 0, 1)
    expected = x.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * math.sqrt(2 * 63)


def test_neighbours_seeds_steps_and_ops_are_independent() -> None:
    x = numbers()
    limit = 5 / math.sqrt(x.numel())
    for dim in range(3):
        n = x.shape[dim]
        assert abs(correlation(x.narrow(dim, 0, n - 1), x.narrow(dim, 1, n - 1))) < 1.1 * limit
    for other in (numbers(seed=1), numbers(step=1), numbers(op=1)):
        assert abs(correlation(x, other)) < limit
    swapped = [numbers(1, 2, 3), numbers(3, 2, 1), numbers(2, 1, 3)]
    assert all(abs(correlation(a, b)) < limit for a in swapped for b in swapped if a is not b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_keeps_what_it_should(dtype: torch.dtype) -> None:
    x = torch.randn(EXTENTS, dtype=dtype, requires_grad=True)
    random = draw(0, 0, 0, WHOLE, EXTENTS, "cpu").flatten()
    kept = (random.reshape(EXTENTS) >= 0.3).to(dtype) / 0.7
    y = dropout(x, 0.3, random.clone())
    assert y.dtype == dtype
    assert torch.equal(y, x * kept)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], kept)
    assert abs((kept > 0).double().mean() - 0.7) < 5 * math.sqrt(0.21 / kept.numel())
    assert torch.equal(dropout(x, 0.0, random.clone()), x)
    assert not dropout(x, 1.0, random).any()


MASK = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(3)) > 0.5
MASK[0, 0, 1] = False


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("mask", "is_causal", "scale"),
    [(None, False, None), (None, True, 0.2), (MASK, False, None), (MASK.double().log(), False, None)],
)
def test_attention_without_dropout_is_torch_attention(
    kv_heads: int, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> None:
    torch.manual_seed(0)
    shapes = [(2, 4, 5, 8), (2, kv_heads, 7, 8), (2, kv_heads, 7, 6)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    ours = attention_dropout(q, k, v, mask, 0.0, is_causal, scale, torch.zeros(2, 4, 5, 7))
    expected = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=True)
    assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-14)
    weights = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (q, k, v), weights), torch.autograd.grad(expected, (q, k, v), weights), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-13)


def test_attention_drops_probabilities() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64) for _ in range(3))
    random = draw(0, 0, 0, [(0, 2), (0, 3), (0, 5), (0, 5)], [2, 3, 5, 5], "cpu")
    probabilities = (q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1)
    expected = (probabilities * (random >= 0.4) / 0.6) @ v
    assert torch.allclose(attention_dropout(q, k, v, None, 0.4, False, None, random), expected, rtol=1e-12)


def test_parts_of_the_loss_sum_to_the_mean() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(12, 9), torch.randint(0, 9, (12,))
    labels[:5] = -100
    count = count_labels(labels, -100, torch.float32)
    assert count == 7
    assert count.shape == ()
    parts = sum(cross_entropy(x, y, count, -100) for x, y in zip(logits.chunk(3), labels.chunk(3), strict=True))
    assert torch.allclose(parts, F.cross_entropy(logits, labels))


@pytest.mark.parametrize(
    ("rows", "classes", "dtype"), [(999, 5003, "float32"), (7, 5, "float64"), (999, 5003, "bfloat16")]
)
def test_the_loss_has_the_bits_of_torch_and_takes_less_memory(rows: int, classes: int, dtype: str) -> None:
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(rows, classes), torch.randint(0, classes, (rows,))
    logits, labels[::5] = logits.to(getattr(torch, dtype)).requires_grad_(), -100
    count = count_labels(labels, -100, torch.promote_types(logits.dtype, torch.float32))
    found, peaks = [], []
    for one in (cross_entropy, _torch_loss):
        with Live([logits, labels, count]) as live:
            loss = one(logits, labels, count, -100)
            found.append((loss.detach(), *torch.autograd.grad(loss, logits, 1.7 * torch.ones_like(loss))))
        peaks.append(live.peak)
    assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))
    if rows > 500:
        # Of halves: what the backward makes, and its sources in float32.
        assert peaks[0] < (1.1 if dtype == "float32" else 3.2) * logits.nbytes < 0.55 * peaks[1]


def _torch_loss(logits: torch.Tensor, labels: torch.Tensor, count: torch.Tensor, ignore_index: int) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, count.dtype))
    return F.cross_entropy(wide, labels, reduction="sum", ignore_index=ignore_index) / count


@pytest.mark.parametrize("channels", [5, 3])
@pytest.mark.parametrize(("is_causal", "mask"), [(True, ""), *((False, m) for m in ("", "bool", "added", "row"))])
def test_attention_in_blocks_is_attention(is_causal: bool, mask: str, channels: int) -> None:
    """Of grouped heads, all keys or those before, chunk by chunk or all queries at once; and its gradients: those of
    each block by itself, of a kernel where queries and values have equal channels.
    """
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 12, size, dtype=torch.float64, requires_grad=True)
        for heads, size in ((4, 5), (2, 5), (2, channels))
    )
    seen = torch.rand(12 if mask != "row" else 1, 12) < 0.6
    seen[0] = mask == "row"
    given = {"": None, "added": torch.randn(2, 4, 12, 12, dtype=torch.float64)}.get(mask, seen)
    expected = F.scaled_dot_product_attention(q, k, v, given, is_causal=is_causal, scale=0.3, enable_gqa=True)
    expected = expected.nan_to_num()
    result, total = torch.zeros(0), torch.zeros(0)
    steps = [
        [
            ((at - step) % 3, "all" if not is_causal or at >= step > 0 else "none" if at < step else "before")
            for at in range(3)
        ]
        for step in range(3)
    ]
    for step, sees in enumerate(steps):
        block = attention_block(q, k, v, given, 0.3, sees, 3)
        with torch.no_grad():
            for mine, theirs in zip(attention_block(q, k, v, given, 0.3, sees, 3), block, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
        for at, (keys, how) in enumerate(sees):
            own = given if given is None or given.shape[-2] == 1 else given[..., at * 4 : at * 4 + 4, :]
            own = own if own is None else own[..., keys * 4 : keys * 4 + 4]
            parts = (x[..., n * 4 : n * 4 + 4, :] for x, n in ((q, at), (k, keys), (v, keys)))
            alike = attention_block(*parts, own, 0.3, [(0, how)], 1)
            assert torch.equal(alike[0], block[0][..., at * 4 : at * 4 + 4, :])
            assert torch.equal(alike[1], block[1][..., at * 4 : at * 4 + 4])
        result, total = attention_merge(result, total, *block) if step else block
    assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    whole = result.detach(), total.detach()
    shares = sum(attention_gradient(q, k, v, given, *whole, 0.3, sees, 3) for sees in steps)
    ends = result, expected, shares
    found, wanted, each = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in ends)
    assert torch.equal(shares, torch.zeros_like(expected))
    for theirs, *ours in zip(wanted, found, each, strict=True):
        for mine in ours:
            assert torch.allclose(mine, theirs.nan_to_num(), rtol=1e-10, atol=1e-12)
