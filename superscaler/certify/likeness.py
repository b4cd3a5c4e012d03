"""Likeness: whether the state of a cohort after some rounds equals its state before them, shifted."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from superscaler.certify.boxes import Boxes
from superscaler.certify.content import Content, Memory
from superscaler.certify.interpret import Post
from superscaler.certify.passes import Tape, made_by
from superscaler.certify.shift import Shift, Status
from superscaler.ir.program import Meets
from superscaler.ir.running.turns import is_still

Flags = Mapping[int, tuple[bool, ...]]


class Likeness:
    """A comparison of states. `posted`: the number of collectives of a round, by group.

    `moved`: the replaced memories and their replacements; `kept`: memories that stayed in place.
    """

    def __init__(self, shift: Shift, posted: Mapping[bytes, int]) -> None:
        self.shift, self.posted = shift, posted
        self.moved, self.kept = set[int](), set[int]()
        self._next: dict[tuple[int, int], Memory] = {}
        self._last: dict[tuple[int, int], Memory] = {}
        self._count = 0
        self._flags: Flags = {}

    def follows(self, before: Status, now: Status, count: int, flags: Flags) -> bool:
        """Return whether a status is another one, `count` rounds later. `flags`: of the memories of the other one."""
        self._count, self._flags = count, flags
        one, two = (status.works and status.works[1] for status in (before, now))
        return (
            before.past == now.past
            and self._same(self.shift.moved(before.value, count), now.value)
            and (one is None) == (two is None)
            and (one is None or two is None or self._in_place(one, two))
            and self._is_next(before, now)
        )

    def follow(self, before: Sequence[Post[Content]], now: Sequence[Post[Content]], flags: Flags) -> bool:
        """Return whether messages equal others, a round later."""
        self._count, self._flags = 1, flags
        return len(before) == len(now) and all(map(self._same_post, before, now))

    def _is_next(self, before: Status, now: Status) -> bool:
        if before.post is None or now.post is None:
            return before.post is now.post
        more = self._count * self.posted.get(now.post.peers.tobytes(), 0) if is_collective(now.post) else 0
        return (before.part, before.count + more) == (now.part, now.count) and self._same_post(before.post, now.post)

    def _same_post(self, before: Post[Content], now: Post[Content]) -> bool:
        a, b = (post.cohort.code[post.at] for post in (before, now))
        message = before.message + self._count * self.shift.message(before)
        return (
            type(a) is type(b)
            and is_still(a, b)
            and np.array_equal(before.peers, now.peers)
            and np.array_equal(message, now.message)
            and self._same([self.shift.moved(read, self._count) for read in before.read], list(now.read))
        )

    def _same(self, a: object, b: object) -> bool:
        match a, b:
            case Content(), Content():
                return (
                    (a.tensor, a.is_gradient, a.dtype, a.shape) == (b.tensor, b.is_gradient, b.dtype, b.shape)
                    and np.array_equal(a.box, b.box)
                    and self._same(a.addends, b.addends)
                    and self._in_place(a.memory, b.memory)
                )
            case Boxes(), Boxes():
                return np.array_equal(a.whole, b.whole)
            case Tape(), Tape():
                own = [[tape.inputs, tape.passed, tape.kept and tape.kept[1]] for tape in (a, b)]
                is_one = (a.number, a.is_on_host, _halves(a)) == (b.number, b.is_on_host, _halves(b))
                return is_one and np.array_equal(a.at, b.at) and self._same(*own)
            case Mapping(), Mapping():
                return a.keys() == b.keys() and all(self._same(a[key], b[key]) for key in a)
            case list() | tuple(), list() | tuple():
                return len(a) == len(b) and all(map(self._same, a, b))
        return a is None and b is None

    def _in_place(self, before: Sequence[Memory], now: Sequence[Memory]) -> bool:
        """Return whether memories replace others, the same ones for all values."""
        return len(before) == len(now) and all(map(self._is_in_place, before, now))

    def _is_in_place(self, before: Memory, now: Memory) -> bool:
        if before is now:
            self.kept.add(id(now))
        else:
            self.moved |= {id(before), id(now)}
        return (
            self._next.setdefault((self._count, id(before)), now) is now
            and self._last.setdefault((self._count, id(now)), before) is before
            and self._flags.get(id(before), flags_of(before)) == flags_of(now)
        )


def _halves(tape: Tape) -> object:
    """Return the half of a backward that has run on a tape, and which gradients it made; None for none."""
    return tape.kept and (tape.kept[0].half, made_by(tape.kept[0]))


def is_collective(post: Post[Content]) -> bool:
    return post.cohort.code[post.at].meets is Meets.GROUP


def flags_of(memory: Memory) -> tuple[bool, ...]:
    """Return whether a memory is held, whether it was changed, and whether it is the host's."""
    return memory.held is not None, memory.changed is not None, memory.is_on_host


def memories(status: Status) -> Iterator[Memory]:
    """Yield the memories of all values of a status."""
    found = [status.value] if isinstance(status.value, Content) else []
    if isinstance(status.value, Tape):
        passed = (c for some in status.value.passed.values() for group in some.values() for c in group.values())
        found = [*status.value.inputs, *passed]
    found += [content for content in (status.post.read if status.post else ()) if content is not None]
    for content in found:
        yield from content.memory
    yield from status.works[1] if status.works else ()
