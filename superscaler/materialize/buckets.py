"""Buckets of collectives: those of one kind, group, dtype and purpose are sent together if they start together or are
not urgent. Rows of `KINDS` say which kinds the runtime can join.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from superscaler.materialize.steps import CollectiveStep
from superscaler.schedule.segments import SEGMENT_BYTES
from superscaler.schedule.transfers import Transfer

# As large as torch DDP's default bucket: several are in flight together, and each is far above the latency.
BUCKET_BYTES = 25 * 2**20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """A collective of a transfer, sent in `dtype`; with `casts` its sources are of another one, to which none of its
    results goes back.

    `like`: equal for collectives that may be sent together. `bytes`: of each source; `weight`: the same in the dtype of
    the trained model. `is_ordered`: the plan orders it, so the pieces of one turn start together.
    """

    number: int
    step: CollectiveStep
    dtype: str
    casts: bool
    like: Hashable
    bytes: int
    weight: int
    is_ordered: bool


@dataclass(slots=True)
class _Bucket:
    """Collectives that start together: as soon as a reader waits for one of them, or they are large enough."""

    group: tuple[int, ...]
    entries: list[Entry] = field(default_factory=list)
    microbatches: set[int] = field(default_factory=set)
    weight: int = 0
    is_due: bool = False


class Buckets:
    """Collectives that have not started. With `overlap`, those to updates start as soon as they are large enough."""

    def __init__(self, overlap: bool) -> None:
        self._overlap = overlap
        self._waiting: dict[Hashable, _Bucket] = {}

    def add(self, entry: Entry, transfer: Transfer, is_due: bool = False) -> None:
        """Add a collective. One to updates waits for a large enough bucket, unless it `is_due`, or is ordered."""
        is_late = transfer.is_to_updates
        way = "to updates" if is_late else "from weights at rest" if transfer.is_from_rest else "between segments"
        some = self._waiting.setdefault((entry.like, way), _Bucket(entry.step.how.group))
        some.entries.append(entry)
        some.microbatches |= transfer.microbatches if is_late else set()
        some.weight += entry.weight
        is_full = entry.is_ordered or some.weight >= SEGMENT_BYTES
        some.is_due |= is_due or not is_late or (self._overlap and is_full)

    def take(self, ended: Set[int]) -> Iterator[list[Entry]]:
        """Yield the buckets that are due, and all buckets of devices whose backward has `ended`."""
        due = [key for key, some in self._waiting.items() if some.is_due or not ended.isdisjoint(some.group)]
        for key in due:
            yield from _filled(self._waiting.pop(key).entries, attrgetter("weight"))

    def close(self, devices: Set[int], microbatch: int) -> bool:
        """Mark the buckets of other microbatches of these devices as due; return whether any bucket is due."""
        for some in self._waiting.values():
            is_one = len(some.microbatches) == 1 and -1 not in some.microbatches
            some.is_due |= is_one and microbatch not in some.microbatches and not devices.isdisjoint(some.group)
        return any(some.is_due for some in self._waiting.values())


def buckets(sizes: Sequence[int]) -> int:
    """Return the number of collectives to updates, of gradients of some bytes that are ready one after the other.

    >>> buckets([64 * 2**20, 1000, 2000, 64 * 2**20, 1000])
    4
    """
    found, waiting = 0, list[int]()
    for size in sizes:
        waiting.append(size)
        if sum(waiting) >= SEGMENT_BYTES:
            found += sum(1 for _ in _filled(waiting, int))
            waiting = []
    return found + sum(1 for _ in _filled(waiting, int))


def _filled(some: Sequence[T], weight: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield collectives of some bytes in runs of at most BUCKET_BYTES each. A larger tensor is sent alone."""
    found, room = list[T](), 0
    for one in some:
        if weight(one) > room:
            if found:
                yield found
            found, room = [], BUCKET_BYTES
        found.append(one)
        room -= weight(one)
    if found:
        yield found
