"""A safetensors file (github.com/huggingface/safetensors): its header, its hashes, and how it is written.

Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from superscaler.bits import bytes_of
from superscaler.specs.file_errors import reading, require_file

if TYPE_CHECKING:
    from torch import Tensor

# Name of a dtype in the format -> name in torch.
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8"},
    **{f"I{n}": f"int{n}" for n in (8, 16, 32, 64)},
}
NAMES = {name: kind for kind, name in DTYPES.items()} | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
# The largest header that the format allows, in bytes.
_HEADER = 10**8
# After each so many bytes the writer rests, this many times as long as they took: training has the cores then.
_PIECE, _REST = 1 << 22, 40


def reading_tensors(file: Path, remedy: str) -> AbstractContextManager[None]:
    """Name the file in errors of reading it."""
    return reading(file, remedy, (SafetensorError,), "safetensors file")


@contextmanager
def opened(file: Path, remedy: str) -> Iterator[Any]:
    """Open a safetensors file. Raises InputError for anything else."""
    require_file(file, remedy)
    with reading_tensors(file, remedy), safe_open(file, framework="pt") as stored:
        yield stored


def kinds(stored: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and dtype of each tensor of an opened file."""
    return {name: kind_of(stored.get_slice(name)) for name in stored.keys()}  # noqa: SIM118


def kind_of(view: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape and dtype of a slice."""
    return tuple(view.get_shape()), DTYPES.get(view.get_dtype(), view.get_dtype())


def tensor_hashes(file: Path, remedy: str, names: Iterable[str] | None = None) -> tuple[str, dict[str, str]]:
    """Return the hash of the header of a file, and by name those of tensors in it (default: of all).

    Raises InputError for a file of another size than its header says.
    """
    require_file(file, remedy)
    with reading(file, remedy), file.open("rb") as stream:
        size = stream.read(8)
        header = stream.read(min(int.from_bytes(size, "little"), _HEADER))
        found: dict[str, Any] = json.loads(header)
        base, end = 8 + len(header), max((entry["data_offsets"][1] for entry in found.values()), default=0)
        if base + end != file.stat().st_size:
            raise ValueError(f"it has {file.stat().st_size} bytes, not {base + end}")
        hashes = {}
        for name in found if names is None else names:
            start, end = found[name]["data_offsets"]
            stream.seek(base + start)
            hashes[name] = _hash_of(stream.read, end - start)
    return hashlib.sha256(size + header).hexdigest(), hashes


def _hash_of(read: Any, count: int) -> str:
    """Return the hash of the next bytes of a file."""
    found = hashlib.sha256()
    while count > 0 and (data := read(min(count, _PIECE))):
        found.update(data)
        count -= len(data)
    return found.hexdigest()


def write_tensors(file: Path, tensors: Mapping[str, Tensor], hurry: Event | None = None) -> str:
    """Write tensors into a new file, with rests until `hurry` is set. Returns its sha256.

    Raises TypeError for a dtype that the format lacks, and OSError.
    """
    # In the library's order: each tensor starts at a multiple of its element's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header, end = {}, 0
    for name, tensor in ordered.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in NAMES:
            raise TypeError(f"{name} is of {tensor.dtype}, which no safetensors file holds")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
    found = hashlib.sha256()
    with file.open("wb") as stream:
        started, written = time.thread_time(), 0
        for piece in chain(head, *map(_pieces, ordered.values())):
            stream.write(piece)
            found.update(piece)
            written += len(piece)
            if hurry is not None and written >= _PIECE:
                hurry.wait(_REST * (time.thread_time() - started))
                started, written = time.thread_time(), 0
    return found.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[bytes | memoryview]:
    data = bytes_of(tensor.cpu()).numpy()
    return (data[start : start + _PIECE].data for start in range(0, data.size, _PIECE))
