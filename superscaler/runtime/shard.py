"""The safetensors file of a rank: written and hashed in one pass, a piece at a time, with rests between the pieces."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from threading import Event

import torch
from torch import Tensor

from superscaler.runtime.manifest import DTYPES

# As the format calls them (github.com/huggingface/safetensors).
NAMES = {getattr(torch, dtype): name for name, dtype in DTYPES.items()} | {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# Bytes after which nothing is done for so many times as long as they took: training has the cores then.
_PIECE, _REST = 1 << 22, 40


def write_tensors(file: Path, tensors: Mapping[str, Tensor], hurry: Event) -> str:
    """Write contiguous tensors on the CPU into a new file, without rests once `hurry` is set. Returns its sha256.

    Raises TypeError for a dtype that the format has not, and OSError.
    """
    # As the library does, so that each tensor starts at a multiple of its element's size.
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
