"""Pieces of tensors by ranges of elements, and the safetensors files that hold them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor

from superscaler.store.manifest import DTYPES

# Per dim of a tensor, the runs [start, end) of a piece of it, ascending.
Ranges = list[list[tuple[int, int]]]


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
    """Return the user's tensor that a resident weight is a piece of, and the piece."""
    whole, box = plan["tensors"][entry["tensor"]], iter(entry["box"])
    found = [runs(sizes, [next(box) for _ in sizes]) for sizes in plan["slots"][entry["tensor"]]]
    if whole["start"]:
        found[whole["dim"]] = [(a + whole["start"], b + whole["start"]) for a, b in found[whole["dim"]]]
    return whole["name"], found


def owners(plan: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Return the weights that each rank saves; together they are the model, once.

    A trained weight is saved where it counts in norms; any other box on the first device that has it.
    """
    seen: set[tuple[str, str]] = set()
    found: list[list[Mapping[str, Any]]] = []
    for device in plan["devices"]:
        found.append([])
        for entry in device["weights"]:
            box = entry["tensor"], str([tuple(pair) for pair in entry["box"]])
            if entry["tensor"] in plan["tensors"] and (entry["counted"] if entry["trained"] else box not in seen):
                found[-1].append(entry)
            seen.add(box)
    return found


def sizes(ranges: Ranges) -> tuple[int, ...]:
    """Return the shape of a piece."""
    return tuple(sum(b - a for a, b in dim) for dim in ranges)


def whole(shape: Sequence[int]) -> Ranges:
    """Return the piece that covers a whole tensor."""
    return [[(0, size)] for size in shape]


def overlap(one: Ranges, other: Ranges) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Return, per dim, the positions in each of two pieces of their common elements; None if they share none."""
    found = []
    for a, b in zip(one, other, strict=True):
        places = _indices(a), _indices(b)
        _, here, there = np.intersect1d(*places, assume_unique=True, return_indices=True)
        if not here.size:
            return None
        found.append((here, there))
    return found


def _indices(found: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([np.arange(a, b) for a, b in found]) if found else np.zeros(0, dtype=np.int64)


# Names of dtypes in the format (github.com/huggingface/safetensors).
NAMES = {getattr(torch, dtype): name for name, dtype in DTYPES.items()} | {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# After each so many bytes the writer rests, this many times as long as they took: training has the cores then.
_PIECE, _REST = 1 << 22, 40


def write_tensors(file: Path, tensors: Mapping[str, Tensor], hurry: Event) -> str:
    """Write contiguous tensors on the CPU into a new file, without rests once `hurry` is set. Returns its sha256.

    Raises TypeError for a dtype that the format lacks, and OSError.
    """
    # In the library's order: each tensor starts at a multiple of its element's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header, end = {}, 0
    for name, tensor in ordered.items():
        if tensor.dtype not in NAMES:
            raise TypeError(f"{name} is of {tensor.dtype}, which no safetensors file holds")
        shape, start, end = list(tensor.shape), end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    found = hashlib.sha256()
    with file.open("wb") as stream:
        head: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        started, written = time.thread_time(), 0
        for piece in chain(head, *map(_pieces, ordered.values())):
            stream.write(piece)
            found.update(piece)
            written += len(piece)
            if written >= _PIECE:
                hurry.wait(_REST * (time.thread_time() - started))
                started, written = time.thread_time(), 0
    return found.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[bytes | memoryview]:
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return (data[start : start + _PIECE].data for start in range(0, data.size, _PIECE))
