"""Batches that depend on the seed and the step number only, so that all ranks and plans read the same batches."""

import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from superscaler.errors import InputError
from superscaler.specs.file_errors import reading
from superscaler.specs.user_file import file_of, is_function

Batch = dict[str, Tensor]
Shapes = Mapping[str, tuple[Sequence[int], str]]

# Bytes of the default text: too many for a small model to memorize, read in a tenth of a second.
_DEFAULT_BYTES = 4_000_000
# Integers below this are valid for any number of classes or tokens that is worth training.
_UNKNOWN_BOUND = 2


class TextBatches:
    """Byte-level text: {"input_ids", "labels"}, int64 of shape (batch, sequence), equal to each other.

    Labels are not shifted: language models of the Hugging Face library shift them in their loss. `path` None is the
    source of Python's standard library. Raises InputError for a bad file, or a vocabulary below 256.
    """

    def __init__(self, path: Path | None, batch: int, sequence: int, vocabulary: int, seed: int) -> None:
        if vocabulary < 256:
            raise InputError(f"text is read as bytes: that needs a vocabulary of 256, but the model's is {vocabulary}.")
        _check_seed(seed)
        self.batch = batch
        self.sequence = sequence
        self.seed = seed
        self._path = path
        check_text(path, sequence)

    def at(self, step: int) -> Batch:
        """Return the global batch of a step: pieces of the text that start at random places."""
        starts = np.random.default_rng([self.seed, step]).integers(0, len(self._text) - self.sequence + 1, self.batch)
        rows = np.stack([self._text[start : start + self.sequence] for start in starts])
        ids = torch.from_numpy(rows.astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    @cached_property
    def _text(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if self._path is None:
            return np.frombuffer(library_text(), dtype=np.uint8)
        return np.memmap(self._path, dtype=np.uint8, mode="r")


def drawn_among(makers: Sequence[Callable[[int], Batch]], seed: int) -> Callable[[int], Batch]:
    """Return a function from step number to batch, by one of several such functions that the seed and the step draw."""
    if len(makers) == 1:
        return makers[0]
    return lambda step: makers[int(np.random.default_rng([seed, step, len(makers)]).integers(len(makers)))](step)


def check_text(path: Path | None, sequence: int) -> None:
    """Raise InputError unless the file can be read and has more than `sequence` bytes. Python's own text always has."""
    if path is None or (is_function(path) and file_of(path).is_file()):
        return
    if not path.is_file():
        raise InputError(f"data file {path} does not exist or is not a file; give a text, or none for the default.")
    with reading(f"data file {path}", "give another text"), path.open("rb") as file:
        size = file.seek(0, 2)
    if size < max(1, sequence):
        raise InputError(
            f"data file {path} has {size} bytes, but one sequence needs {max(1, sequence)}; "
            "give a longer file or a shorter sequence."
        )


def library_text(limit: int = _DEFAULT_BYTES) -> bytes:
    """Return the .py files of Python's standard library, in a fixed order, cut to `limit` bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    found = bytearray()
    for file in _sources(root):
        found += file.read_bytes()
        if len(found) >= limit:
            break
    if not found:
        raise InputError(f"the default text needs Python's .py files, but {root} has none; give a text with --data.")
    return bytes(found[:limit])


def _sources(root: Path) -> Iterator[Path]:
    """Yield the .py files: those of a folder by name, then those of its folders."""
    for folder, folders, files in os.walk(root):
        # Installed packages are left out, and the tests, which not every system has.
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "test", "tests"})
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def synthetic_batch(inputs: Shapes, step: int, seed: int, bounds: Mapping[str, int]) -> Batch:
    """Return random tensors of these shapes and dtypes: normal floats, integers below their bound (default: 2)."""
    _check_seed(seed)
    return {
        name: _random(shape, torch_dtype(dtype), [seed, step, place], bounds.get(name, _UNKNOWN_BOUND))
        for place, (name, (shape, dtype)) in enumerate(sorted(inputs.items()))
    }


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name like `float32` or `torch.float32`."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"'{name}' is not a dtype of torch; use one like float32 or int64.")
    return dtype


def _random(shape: Sequence[int], dtype: torch.dtype, seed: list[int], bound: int) -> Tensor:
    generator = np.random.default_rng(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.from_numpy(np.asarray(generator.standard_normal(tuple(shape)))).to(dtype)
    high = 2 if dtype == torch.bool else bound
    return torch.from_numpy(np.asarray(generator.integers(0, high, tuple(shape)))).to(dtype)


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise InputError(f"the seed is {seed}, but it must be 0 or more.")
