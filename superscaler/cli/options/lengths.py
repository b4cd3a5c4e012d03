"""The lengths of `--lengths`, with their shares of the steps, and the predictions for these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from superscaler.cli.printing import Printer, table
from superscaler.errors import InputError
from superscaler.specs.sizes import duration, number

if TYPE_CHECKING:
    from superscaler.simulate.prediction import Prediction


def read_mixture(text: str) -> dict[int, float]:
    """Return lengths with their shares, which add up to 1; without shares all are equal. Raises InputError for others.

    >>> read_mixture("512:3,2048:1"), read_mixture("8,16"), read_mixture("")
    ({512: 0.75, 2048: 0.25}, {8: 0.5, 16: 0.5}, {})
    """
    pairs = [part.strip().partition(":") for part in text.split(",")] if text.strip() else []
    found = {int(length): _share(share) for length, _, share in pairs if length.isdecimal() and int(length)}
    if len(found) < len(pairs) or any(not math.isfinite(x) or x <= 0 for x in found.values()):
        raise InputError(
            f"--lengths is '{text}', but it must be different lengths above 0, as 512,1024, or these with shares above "
            "0, as 512:0.6,2048:0.4."
        )
    total = sum(found.values())
    return {length: share / total for length, share in found.items()}


def _share(text: str) -> float:
    try:
        return float(text) if text else 1.0
    except ValueError:
        return 0.0


def show_mixture(printer: Printer, shares: Mapping[int, float], found: Mapping[int, Prediction]) -> bool:
    """Print the predictions of the steps of each length, and their means. Return whether all fit."""
    from superscaler.simulate.prediction import PLANS, plan_row, words

    fullest = max(found.values(), key=lambda p: p.fullest.peak_bytes)
    seconds = sum(shares[length] * p.step_seconds for length, p in found.items())
    amount = sum(shares[length] * (p.tokens or p.samples) for length, p in found.items())
    unit, fits = "tokens" if fullest.tokens else "samples", all(p.fits for p in found.values())
    names, texts = ["length", "share", *PLANS], {length: plan_row(str(length), p) for length, p in found.items()}
    rows = [(name, f"{shares[length]:.0%}", *more) for length, (name, *more) in texts.items()]
    mean = f"mixture: step {duration(seconds)} in the mean, {number(amount / seconds)} {unit}/s"
    printer.show(words(fullest), table(names, rows, names[:-1]), f"{mean}; its memory is that of the largest, above")
    by_length = {str(length): {"share": shares[length], **p.as_json()} for length, p in found.items()}
    speed = {"step_seconds": seconds, f"{unit}_per_second": amount / seconds}
    printer.result = {**fullest.as_json(), **speed, "fits": fits, "lengths": by_length}
    return fits
