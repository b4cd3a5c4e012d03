"""Seconds of attention inside documents, beside the square under a mask: a forward and a backward on one core.

`python benchmarks/documents.py` writes benchmarks/results/documents.txt: for each packing the scores beside those of
the square, and the seconds of torch's attention under the mask, of a causal row of one document, and of the documents:
the least of some runs that take turns. Then the scores of the device with the most in a ring, beside the mean.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from superscaler.models.family import positions
from superscaler.plans.lib.documents import areas, balanced, share
from superscaler.runtime import functional

RESULTS = Path(__file__).parent / "results" / "documents.txt"
ROWS, HEADS, WIDTH = 1, 4, 64
PACKINGS = [
    (2048, (2048,)), (2048, (1024, 1024)), (2048, (1024, 512, 512)), (2048, (256,) * 8), (2048, (64,) * 32),
    (4096, (2048, 1024, 1024)), (4096, (512,) * 8),
]  # fmt: skip
RINGS = [(8192, (4096, 2048, 2048)), (8192, (8192,)), (8192, (6000, 2000, 192)), (8192, (1024,) * 8)]


def numbers(length: int, lengths: Sequence[int]) -> Tensor:
    """Return the number of the document of each token (rows, tokens)."""
    return (positions(lengths, ROWS, length) == 0).cumsum(-1)


def ways(length: int, lengths: Sequence[int]) -> dict[str, Callable[[], object]]:
    """Return attention as functions that run it in both directions."""
    q, k, v = (torch.randn(ROWS, HEADS, length, WIDTH, requires_grad=True) for _ in "qkv")
    own = numbers(length, lengths)
    mine, theirs = own[:, None, :, None], own[:, None, None]
    weights = torch.randn(ROWS, HEADS, length, WIDTH)

    def both(run: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad((run() * weights).sum(), (q, k, v))

    def square() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, (mine == theirs).tril())

    def inside() -> Tensor:
        return functional.attention_documents(q, k, v, True, None, functional.documents(mine, theirs))

    causal = both(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return {"mask": both(square), "causal": causal, "documents": both(inside)}


def least(found: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Return the least seconds of each function, which take turns."""
    seconds = dict.fromkeys(found, float("inf"))
    for _ in range(runs):
        for name, run in found.items():
            start = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def lines(runs: int) -> list[str]:
    names = "".join(f"{name:>10}" for name in ("mask", "causal", "inside"))
    made = [f"{'tokens':>6}  {'documents':24} {'scores':>7}{names} {'mask/inside':>12}"]
    for length, lengths in PACKINGS:
        part = sum(areas(lengths, length, 1, True)) / length**2
        s = least(ways(length, lengths), runs)
        text = f"{len(lengths)} x {lengths[0]}" if len({*lengths}) == 1 else ", ".join(map(str, lengths))
        times = " ".join(f"{1e3 * s[name]:6.1f} ms" for name in s)
        made.append(f"{length:6}  {text:24} {part:7.1%} {times} {s['mask'] / s['documents']:12.2f}")
    made += ["", "Scores of the device with the most beside the mean, in a ring of 8 with 1 to 8 chunks each:", ""]
    made.append(f"{'tokens':>6}  {'documents':24} {'plain':>7} {'zigzag':>7} {'1':>7} {'2':>7} {'4':>7} {'8':>7}")
    for length, lengths in RINGS:
        plain = share(areas(lengths, length, 8, True), range(8), 8)
        zigzag = share(areas(lengths, length, 16, True), (*range(8), *reversed(range(8))), 8)
        even = [share(found := areas(lengths, length, 8 * c, True), balanced(found, 8), 8) for c in (1, 2, 4, 8)]
        text = f"{len(lengths)} x {lengths[0]}" if len({*lengths}) == 1 else ", ".join(map(str, lengths))
        made.append(f"{length:6}  {text:24} {' '.join(f'{x:7.2f}' for x in (plain, zigzag, *even))}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = f"torch {torch.__version__}, one core, float32: {ROWS} row, {HEADS} heads of {WIDTH}; forward and backward."
    text = "\n".join([head, "Scores are those inside documents beside the square.", "", *lines(options.runs)])
    RESULTS.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
