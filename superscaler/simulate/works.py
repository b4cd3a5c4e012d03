"""The kernels and the memory of a segment, as the recorder returns them.

Memory is counted by storages, in blocks of the sizes of torch's allocator. A storage that names of a program may hold
has a number in its call: inputs come first, then results, given gradients, and made gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from superscaler.ir.mask import Box

# The shape and the dtype of a tensor.
Meta = tuple[tuple[int, ...], str]
# The unit of torch's CUDA allocator: c10/cuda/CUDACachingAllocator.h, kMinBlockSize.
BLOCK = 512


def block(size: int) -> int:
    """Return the bytes of the allocator's block for a tensor of so many bytes.

    >>> block(0), block(1), block(512), block(513)
    (0, 512, 512, 1024)
    """
    return -(-size // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: the name of its aten operator (`mm`, `add.Tensor`), the tensors that it reads and makes.

    `causal`: attention in which a query sees no later key.
    """

    name: str
    inputs: tuple[Meta, ...]
    outputs: tuple[Meta, ...]
    causal: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Kernels in their order, and the memory that they take.

    `levels`: the bytes after each allocation, less those before the work; storages with a number count only in the work
    that makes them. `ended`: for each released storage, the number of allocations before its release.
    """

    kernels: tuple[Kernel, ...]
    levels: tuple[int, ...]
    ended: Mapping[int, int]
    _peaks: dict[frozenset[tuple[int, int]], int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def peak(self) -> int:
        """Return the most bytes beside those before the work, if others hold all storages that the work releases."""
        return max(self.levels, default=0)

    def peak_of(self, sizes: Mapping[int, int]) -> int:
        """Return the most bytes beside those before the work, if nothing else holds the storages of these sizes."""
        key = frozenset(sizes.items())
        if key not in self._peaks:
            freed = sorted((self.ended[n], size) for n, size in sizes.items() if n in self.ended)
            most = less = 0
            for at, level in enumerate(self.levels):
                while freed and freed[0][0] <= at:
                    less += freed.pop(0)[1]
                most = max(most, level - less)
            self._peaks[key] = most
        return self._peaks[key]


@dataclass(frozen=True, slots=True)
class Tape:
    """Storages that autograd keeps: those with a number, and others with their bytes and op (its number in the
    segment).
    """

    held: frozenset[int] = frozenset()
    others: tuple[tuple[int, int], ...] = ()

    @property
    def bytes(self) -> int:
        """Return the bytes of the storages without a number."""
        return sum(size for size, _ in self.others)


@dataclass(frozen=True, slots=True)
class Segment:
    """The work of a function, as a Forward and its Backward call it.

    backward   empty without a tape; one work, or two for a split backward
    tapes      after the forward, and between two halves
    sizes      the bytes of each storage with a number
    results    the number of the storage of each result; `bytes`: of its elements; `strides`: () if it is contiguous
    given      the number of the storage of each given gradient
    gradients  for each work of the backward, the storages of the gradients that it makes, by the number of the alias
    elements   the bytes of the elements of these gradients, by the number of the alias
    """

    forward: Work
    backward: tuple[Work, ...]
    tapes: tuple[Tape, ...]
    sizes: tuple[int, ...]
    results: tuple[int, ...]
    bytes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    given: tuple[int, ...]
    gradients: tuple[Mapping[int, int], ...]
    elements: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Call:
    """The way in which a function is called: with a tape or without, the given gradients, the aliases with gradients
    from the first of two halves (empty without halves), the aliases `added` to sums, and the dtypes of rounded inputs.
    """

    tape: bool
    given: tuple[bool, ...] = ()
    first: tuple[int, ...] = ()
    strides: tuple[tuple[int, tuple[int, ...]], ...] = ()
    parts: tuple[Box, ...] = ()
    added: tuple[int, ...] = ()
    rounded: tuple[tuple[int, str], ...] = ()
