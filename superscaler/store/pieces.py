"""Pieces of tensors, by ranges of elements."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from superscaler.ir.mask import Box, intersect

# Per dim of a tensor, the runs [start, end) of a piece of it, ascending.
Ranges = Sequence[Sequence[Sequence[int]]]


def runs(sizes: Sequence[int], box: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the elements of a dim that are in a box of its slots, as runs.

    >>> runs((3, 4, 16), ((0, 3), (0, 2), (0, 16)))
    [(0, 32), (64, 96), (128, 160)]
    """
    found, unit = [(0, 1)], 1
    for size, (low, high) in zip(reversed(sizes), reversed(box), strict=True):
        if found == [(0, unit)]:
            found = [(low * unit, high * unit)]
        else:
            found = [(k * unit + a, k * unit + b) for k in range(low, high) for a, b in found]
        unit *= size
    return found


def located(plan: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[str, Ranges]:
    """Return the user's tensor of a resident weight, and the weight's piece of it."""
    whole, box = plan["tensors"][entry["tensor"]], iter(entry["box"])
    found = [runs(sizes, [next(box) for _ in sizes]) for sizes in plan["slots"][entry["tensor"]]]
    if whole["start"]:
        found[whole["dim"]] = [(a + whole["start"], b + whole["start"]) for a, b in found[whole["dim"]]]
    return whole["name"], found


def resident(plan: Mapping[str, Any], rank: int) -> list[Mapping[str, Any]]:
    """Return the weights on a rank that are pieces of tensors of the user's module."""
    return [entry for entry in plan["devices"][rank]["weights"] if entry["tensor"] in plan["tensors"]]


def owners(plan: Mapping[str, Any]) -> list[list[tuple[Mapping[str, Any], Box]]]:
    """Return the weights that each rank saves, each with the box of it that no rank before saves; together they are the
    model, once.

    A trained weight is saved by the device that counts it in norms; elements of others by the first device that has
    them.
    """
    seen: dict[str, list[Box]] = {}
    found: list[list[tuple[Mapping[str, Any], Box]]] = []
    for device in plan["devices"]:
        found.append([])
        for entry in device["weights"]:
            box = tuple((low, high) for low, high in entry["box"])
            if entry["trained"]:
                new = [box] if entry["counted"] else []
            else:
                new = beyond(box, seen.setdefault(entry["tensor"], []))
                seen[entry["tensor"]] += new
            if entry["tensor"] in plan["tensors"]:
                found[-1] += [(entry, part) for part in new]
    return found


def beyond(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return the elements of a box that are in none of some others, as boxes without common elements.

    >>> beyond(((0, 4), (0, 2)), [((0, 2), (0, 2)), ((3, 4), (1, 2))])
    [((2, 3), (0, 2)), ((3, 4), (0, 1))]
    """
    left = [box]
    for other in others:
        left = [part for one in left for part in _less(one, other)]
    return left


def _less(box: Box, other: Box) -> list[Box]:
    common = intersect(box, other)
    if common is None:
        return [box]
    found: list[Box] = []
    for dim, (low, high) in enumerate(common):
        start, end = box[dim]
        ends = ((start, low), (high, end))
        found += [(*common[:dim], (a, b), *box[dim + 1 :]) for a, b in ends if a < b]
    return found


def part_of(plan: Mapping[str, Any], entry: Mapping[str, Any], box: Box, tensor: Tensor) -> Tensor:
    """Return the elements in a box of a resident weight, or of a state of it."""
    (_, whole), (_, part) = located(plan, entry), located(plan, {**entry, "box": box})
    if whole == part:
        return tensor.detach()
    common = overlap(whole, part)
    assert common is not None
    return tensor.detach().view(sizes(whole))[index_of(here for here, _ in common)]


def sizes(ranges: Ranges) -> tuple[int, ...]:
    """Return the shape of a piece."""
    return tuple(sum(b - a for a, b in dim) for dim in ranges)


def whole(shape: Sequence[int]) -> list[list[list[int]]]:
    """Return the piece that covers a whole tensor."""
    return [[[0, size]] for size in shape]


def overlap(one: Ranges, other: Ranges) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Return, per dim, the positions in each of two pieces of their common elements; None if they share none."""
    found = []
    for a, b in zip(one, other, strict=True):
        places = elements(a), elements(b)
        _, here, there = np.intersect1d(*places, assume_unique=True, return_indices=True)
        if not here.size:
            return None
        found.append((here, there))
    return found


def elements(dim: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the places of the elements in the runs of a dim."""
    return np.concatenate([np.arange(a, b) for a, b in dim]) if dim else np.zeros(0, dtype=np.int64)


def index_of(places: Iterable[np.ndarray]) -> tuple[Tensor, ...]:
    """Return the index of the elements at some places of each dim of a tensor."""
    return tuple(map(torch.from_numpy, np.ix_(*places)))


def covers(shape: Sequence[int], pieces: Sequence[Ranges]) -> bool:
    """Return whether pieces cover each element of a tensor once. Counts of elements do not show this: one may occur
    twice.

    Every index of every dim gets a random word; an element weighs the product of its dims' words, modulo 2**64. The
    pieces then weigh as much as the tensor if they cover each element once, and otherwise only with a chance of 2**-60.
    """
    draw = np.random.default_rng()
    words = [draw.integers(0, 2**63, size=size, dtype=np.uint64) * np.uint64(2) + np.uint64(1) for size in shape]
    sums = [[0, *np.cumsum(each, dtype=np.uint64).tolist()] for each in words]
    weight = 0
    for piece in pieces:
        if len(piece) != len(shape) or any(
            not 0 <= a <= b <= size for dim, size in zip(piece, shape, strict=True) for a, b in dim
        ):
            return False
        ends = [sum(total[b] - total[a] for a, b in dim) for dim, total in zip(piece, sums, strict=True)]
        weight += math.prod(ends)
    return (weight - math.prod(total[-1] for total in sums)) % 2**64 == 0
