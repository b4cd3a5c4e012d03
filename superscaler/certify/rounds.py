"""Rounds: in one round, each cohort runs one repetition of its loop. Equal rounds, up to a shift, run once for all.

Two rounds run, and the state before the second is the state before the first, shifted (`Shift`). The same instructions,
also shifted, do the same to a shifted state, so by induction all later rounds do. Limits of indices are the only
numbers that do not move. The rounds before and after the omitted ones are within these, and so are all between. The
state after them is the present one shifted; only sums over microbatches get the addends of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from superscaler.certify.content import Content
from superscaler.certify.interpret import Interpreter, Post, Run
from superscaler.certify.likeness import Likeness, flags_of, is_collective, memories
from superscaler.certify.masks import Masks
from superscaler.certify.shift import Body, Key, Shift, Status, Unsteady, laps_of
from superscaler.ir.cohorts import Cohort
from superscaler.ir.program import Program, Task, Value
from superscaler.ir.running.machine import Lap


@dataclass
class _Seen:
    """The state of a cohort before repetition `turn` of a loop, as far as the loop reads or changes it. `count`: the
    number of rounds that may be left out then.

    `held`: the statuses of all names and tasks in that repetition. `posted`: the number of collectives by group.
    `sent`: messages under way. `flags`: of each memory, see `flags_of`. `added`: the addends of each sum since the last
    state. All sums are made: the machine asks for no state before the first repetition, and each adds to all of them.
    """

    body: Body
    turn: int
    count: int
    held: dict[Key, Status]
    posted: dict[bytes, int]
    sent: dict[int, list[Post[Content]]]
    flags: dict[int, tuple[bool, ...]]
    added: Mapping[Value, Sequence[Content]]


class _Run(Run[Content]):
    """A cohort whose rounds may be left out."""

    machine: Rounds

    def state(self, lap: Lap[Body], turns: int) -> _Seen | None:
        return self.machine.seen(self, lap, turns)

    def is_moved(self, before: _Seen, now: _Seen) -> bool:
        return self.machine.is_steady(self, before, now)

    def skip(self, lap: Lap[Body], turns: int, before: _Seen, now: _Seen) -> None:
        self.machine.leave_out(self, before, now)
        self.at += turns * lap.length


class Rounds(Interpreter[Content]):
    """An interpreter on masks that omits rounds."""

    def __init__(self, program: Program, masks: Masks) -> None:
        super().__init__(program, masks)
        self.masks, self.shift = masks, Shift(program, masks.kinds, self.cohort_of)
        try:
            self.bodies = [laps_of(run.cohort, self.shift) for run in self.runs]
        except Unsteady:
            self.bodies = [[] for _ in self.runs]

    def begin(self, cohort: Cohort) -> Run[Content]:
        return _Run(self, cohort)

    def laps(self, run: Run[Content]) -> Sequence[Lap[Body]]:
        return self.bodies[run.cohort.number]

    def seen(self, run: Run[Content], lap: Lap[Body], count: int) -> _Seen | None:
        """Return the state of a cohort; None if it may take messages of cohorts that have ended, which send no more."""
        added = self.masks.begin_sums(run.cohort.number)
        ended = (other for other in self.runs if other.at == len(other.cohort.code))
        if any(posts for other in ended for posts in other.sent.values()):
            return None
        body, turn = lap.step, (run.at - lap.start) // lap.length
        held = {key: self._status(run, key) for key in (*body.fixed, *self._window(body, turn))}
        posted = {group: len(posts) for group, posts in run.collectives.items()}
        sent = {to: list(posts) for to, posts in run.sent.items() if posts}
        flags = {id(m): flags_of(m) for status in held.values() for m in memories(status)}
        return _Seen(body, turn, count, held, posted, sent, flags, added)

    def _window(self, body: Body, turn: int) -> Iterator[Key]:
        for key, (lo, hi) in body.moving.items():
            yield from (self.shift.key(key, n + turn) for n in range(lo, hi + 1))

    def _status(self, run: Run[Content], key: Key) -> Status:
        number, passes = run.cohort.number, self.masks.passes
        if isinstance(key, Task):
            return Status(passes.tapes.get((number, key)), past="ran" * ((number, key) in passes.ran))
        post, part = run.handles.get(key, (None, 0))
        works = self.masks.memories.works.get((number, key))
        return Status(run.values.get(key), post, part, post.count if post else 0, run.gone.get(key, ""), works)

    def _set(self, run: Run[Content], key: Key, status: Status) -> None:
        number, passes, works = run.cohort.number, self.masks.passes, self.masks.memories.works
        if isinstance(key, Task):
            _put(passes.tapes, (number, key), status.value)
            (passes.ran.add if status.past else passes.ran.discard)((number, key))
            return
        _put(run.values, key, status.value)
        _put(run.handles, key, status.post and (status.post, status.part))
        _put(run.gone, key, status.past or None)
        _put(works, (number, key), status.works)

    # Whether the last round shifted the state.

    def is_steady(self, run: Run[Content], before: _Seen, now: _Seen) -> bool:
        """Return whether the last round shifted its state, and the state that all omitted rounds meet is shifted."""
        fixed = set(now.body.fixed)
        like = Likeness(self.shift, {key: now.posted[key] - n for key, n in before.posted.items()})
        later = {key: self.shift.key(key, 0 if key in fixed else 1) for key in before.held}
        return (
            all(like.follows(before.held[a], now.held[b], 1, before.flags) for a, b in later.items())
            and all(self._go_on(like, run, now, key) for key in now.body.moving)
            and before.sent.keys() == now.sent.keys()
            and all(like.follow(before.sent[to], now.sent[to], before.flags) for to in now.sent)
            and self._is_apart(run, now, like)
            and all(self._is_own(run, now, group) for group, n in now.posted.items() if n != before.posted.get(group))
        )

    def _go_on(self, like: Likeness, run: Run[Content], now: _Seen, key: Key) -> bool:
        """Return whether the names of a kind follow each other: the next rounds reach names like the present ones, and
        the names that they leave behind have ended.
        """
        lo, hi = now.body.moving[key]
        left, last = (self.shift.key(key, now.turn + n) for n in (lo - 1, hi))
        status = now.held[last]
        after = (self._status(run, self.shift.key(last, n)) for n in range(1, now.count + 1))
        goes_on = all(like.follows(status, other, n, now.flags) for n, other in enumerate(after, 1))
        return goes_on and self._status(run, left).post is None

    def _is_apart(self, run: Run[Content], now: _Seen, like: Likeness) -> bool:
        """Return whether memory that moves belongs to moving names alone, and each sum has memory of its own."""
        body = now.body
        moving = set(self._window(body, now.turn))
        for key, (lo, hi) in body.moving.items():
            moving |= {self.shift.key(key, now.turn + n) for n in (lo - 1, *range(hi + 1, hi + now.count + 1))}
        sums = [run.values[name] for name in body.sums]
        others = [run.values[name] for name in run.values.keys() - moving - set(body.sums)]
        still = {id(memory) for content in others for memory in content.memory}
        still |= {id(memory) for key in body.fixed for memory in memories(now.held[key])}
        loaded, weights = self.masks.memories.loaded, run.cohort.at_rest
        still |= {id(memory) for (n, name), memory in loaded.items() if n == run.cohort.number and name in weights}
        added = [memory for content in sums for memory in content.memory]
        own, known = {id(memory) for memory in added}, still | like.moved | like.kept
        is_own = len(own) == len(added) and own.isdisjoint(known) and not any(True in flags_of(m) for m in added)
        return is_own and like.moved.isdisjoint(still | like.kept)

    def _is_own(self, run: Run[Content], now: _Seen, group: bytes) -> bool:
        """Return whether all devices of a group's collectives are in this cohort, and the loop waits for unfinished
        ones.
        """
        waiting = {name for name, (post, _) in run.handles.items() if post.peers.tobytes() == group}
        known = run.groups.get(group)
        return known is not None and all(end is run for end, _ in known.ends) and waiting <= now.held.keys()

    # What the left out rounds do.

    def leave_out(self, run: Run[Content], before: _Seen, now: _Seen) -> None:
        """Give a cohort the state that it has after the omitted rounds."""
        body, count = now.body, now.count
        found = dict(self._later(run, now))
        waiting = {id(status.post): status.post for status in found.values() if status.post}
        for post in (*waiting.values(), *(post for some in run.sent.values() for post in some)):
            self.shift.post(post, count)
        for group, posts in run.collectives.items():
            more = count * (now.posted[group] - before.posted.get(group, 0))
            own = [post for post in waiting.values() if is_collective(post) and post.peers.tobytes() == group]
            first = min((post.count for post in own), default=len(posts))
            # Nobody waits for these any more.
            posts[first:first] = posts[:1] * more
            for post in own:
                post.count += more
        for key, status in found.items():
            self._set(run, key, status)
        for name in body.sums:
            total, sums = run.values[name], self.masks.sums
            each = [replace(one, addends=sums.addends_of(one)) for one in now.added.get(name, ())]
            run.values[name] = sums.sum(total, total.box, [total, *(self.shift.repeated(one, count) for one in each)])

    def _later(self, run: Run[Content], now: _Seen) -> Iterator[tuple[Key, Status]]:
        """Yield the statuses, after the omitted rounds, of all names and tasks that these rounds touch."""
        shift, count = self.shift, now.count
        for key in now.body.fixed:
            yield key, _moved(shift, now.held[key], count)
        for key, (lo, hi) in now.body.moving.items():
            last = shift.key(key, now.turn + lo - 1)
            left = self._status(run, last)
            yield from ((shift.key(last, n), _moved(shift, left, n)) for n in range(1, count + 1))
            for n in range(lo + now.turn, hi + now.turn + 1):
                yield shift.key(key, n + count), _moved(shift, now.held[shift.key(key, n)], count)


def _moved(shift: Shift, status: Status, count: int) -> Status:
    return status if status.value is None else replace(status, value=shift.moved(status.value, count))


def _put(table: dict[Any, Any], key: object, value: object) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
