"""Random numbers by element: each depends on (seed, step, op) and its place in the tensor only, under every plan."""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from superscaler.runtime.functions.attention_kernels import Box, Sizes

# The constants and shifts of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_WORD = 1 << 64
# Elements that a core mixes at a time, so that the words stay in its cache, and most of them in a row.
BLOCK = 1 << 16
_COLUMNS = 1 << 12
# The sizes of a random tensor, those of the whole one, and its shape in a segment.
Form = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def draw(seed: int, step: int, op: int, box: Box, extents: Sizes, device: torch.device | str, block: int = 0) -> Tensor:
    """Return float32 numbers in [0, 1) of the box's shape, multiples of 2**-24.

    An element depends on (seed, step, op) and its linear index in a tensor of `extents` only: every box over the same
    element has the same number, on every device. `block`: the elements that are mixed at a time; 0: BLOCK on a CPU, all
    on other devices. All at once are one kernel on a GPU with Triton.
    """
    assert all(0 <= low <= high <= size for (low, high), size in zip(box, extents, strict=True)), (box, extents)
    return numbers(_word(seed, step, op, box, extents), [high - low for low, high in box], extents, device, block)


def numbers(
    word: int | Tensor, sizes: Sequence[int], extents: Sizes, device: torch.device | str, block: int = 0
) -> Tensor:
    """Return the numbers of `draw` in a box of these sizes. `word`: that of its first element, an int64."""
    # The index of an element is a sum: that of its row and that of its column, the dims from `at` on.
    at = next((k for k in range(len(sizes)) if math.prod(sizes[k:]) <= _COLUMNS), max(len(sizes) - 1, 0))
    box = [(0, size) for size in sizes]
    rows = linear_index(box[:at], extents[:at], device).reshape(-1, 1).mul_(math.prod(extents[at:]))
    rows = rows.mul_(_signed(_GAMMA)).add_(word)
    columns = linear_index(box[at:], extents[at:], device).reshape(-1).mul_(_signed(_GAMMA))
    block = block or (BLOCK if rows.device.type == "cpu" else rows.numel() * columns.numel())
    some = rows.split(max(1, block // max(1, columns.numel())))
    if len(some) == 1:
        return mix(rows, columns).reshape(sizes)
    made = torch.empty(len(rows), len(columns), dtype=torch.float32, device=rows.device)
    for own, out in zip(some, made.split(len(some[0])), strict=True):
        _mix(own, columns, out)
    return made.reshape(sizes)


@dataclass(frozen=True)
class Draws:
    """The random tensors of a segment in a step. Called with a number, it draws one. `entries`: of plan.json. `given`:
    its words, where they are computed before the step.
    """

    seed: int
    step: int
    entries: Sequence[Mapping[str, Any]]
    device: torch.device
    given: Tensor | None = None

    def __call__(self, k: int) -> Tensor:
        sizes, extents, shape = self.forms()[k]
        word = self._word(self.entries[k]) if self.given is None else self.given[k + 1]
        return numbers(word, sizes, extents, self.device).reshape(shape)

    def _word(self, entry: Mapping[str, Any]) -> int:
        step = self.step + int(entry.get("ahead", 0))
        return _word(self.seed, step, entry["op"], entry["box"], entry["extents"])

    def words(self) -> Tensor:
        """Return an int64 for each tensor, which has all that differs between steps, ops and places; the first one is
        a constant of all, which a compiler must not see: it would compute the exact products of all indices.
        """
        if self.given is not None:
            return self.given
        return torch.tensor(self.integers(), dtype=torch.int64).to(self.device, non_blocking=True)

    def integers(self) -> list[int]:
        """Return the numbers of `words`."""
        return [_signed(_GAMMA), *map(self._word, self.entries)]

    def forms(self) -> tuple[Form, ...]:
        """Return the sizes and shapes, which equal layers share in all steps."""
        return tuple(
            (tuple(high - low for low, high in e["box"]), tuple(e["extents"]), tuple(e["shape"])) for e in self.entries
        )


def drawn(all_words: Tensor, k: int, form: Form) -> Tensor:
    """Return the numbers of the k-th tensor, for `Draws.words`, by operators that a compiler fuses."""
    sizes, extents, shape = form
    index = linear_index([(0, size) for size in sizes], extents, all_words.device)
    words = index * all_words[0] + all_words[k + 1]
    words = (words ^ _shift(words, 30)) * _signed(_FIRST)
    words = (words ^ _shift(words, 27)) * _signed(_SECOND)
    return (_shift(words, 40).to(torch.float32) * 2.0**-24).reshape(shape)


def linear_index(box: Box, extents: Sizes, device: torch.device | str) -> Tensor:
    """Return the numbers of the elements of a box, counted in row-major order of `extents`, in its shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for (low, high), size in zip(box, extents, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(low, high, device=device)
    return index


def _word(seed: int, step: int, op: int, box: Box, extents: Sizes) -> int:
    """Return the word of the first element of a box, as an int64."""
    offset = sum(low * math.prod(extents[k + 1 :]) for k, (low, _) in enumerate(box))
    return _signed((_key(seed, step, op) + offset * _GAMMA) % _WORD)


def _key(seed: int, step: int, op: int) -> int:
    """Return 64 bits that mix the three integers, of any size."""
    key = 0
    for word in (seed, step, op):
        key = (key + word + 1) * _GAMMA % _WORD
        key = (key ^ (key >> 30)) * _FIRST % _WORD
        key = (key ^ (key >> 27)) * _SECOND % _WORD
        key ^= key >> 31
    return key


@torch.library.custom_op("superscaler::mix", mutates_args=())
def mix(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the upper 24 bits of splitmix64's finalizer of sums of int64 words, (rows, 1) and (columns,), as float32
    multiples of 2**-24.
    """
    numbers = torch.empty(len(rows), len(columns), dtype=torch.float32, device=rows.device)
    run = _kernel(rows.device) if rows.device.type == "cuda" else None
    (run or _mix)(rows, columns, numbers)
    return numbers


@mix.register_fake
def _(rows: Tensor, columns: Tensor) -> Tensor:
    return rows.new_empty(len(rows), len(columns), dtype=torch.float32)


def _mix(rows: Tensor, columns: Tensor, out: Tensor) -> None:
    """Write the numbers of `mix` with torch's operators; int64 products wrap.

    The last step of the finalizer, x ^ (x >> 31), changes lower bits only.
    """
    words = rows + columns
    words.bitwise_xor_(_shift(words, 30)).mul_(_signed(_FIRST))
    words.bitwise_xor_(_shift(words, 27)).mul_(_signed(_SECOND))
    # The upper half of each word.
    torch.mul(_shift(words.view(torch.int32)[..., 1::2], 8), 2.0**-24, out=out)


def _shift(words: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch fills with the sign."""
    return (words >> bits).bitwise_and_((1 << (8 * words.element_size() - bits)) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the same bits."""
    return word - _WORD if word >= _WORD >> 1 else word


@cache
def _kernel(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """Return `_mix` as one Triton kernel, None where it is missing or gives other numbers."""
    try:
        from superscaler.runtime.functions.triton_draws import mix as fused
    except ImportError:
        return None
    rows, columns = (torch.arange(n, device=device).mul_(_signed(_GAMMA)) for n in (37, 101))
    own, other = (torch.zeros(37, 101, device=device) for _ in range(2))
    _mix(rows.unsqueeze(1), columns, own)
    # Whatever Triton's compiler cannot do on a machine, torch can.
    with contextlib.suppress(Exception):
        fused(rows, columns, other)
    if torch.equal(own, other):
        return fused
    warnings.warn(
        "Triton's kernel of random numbers does not run here; torch's are used, with many passes.", stacklevel=2
    )
    return None
