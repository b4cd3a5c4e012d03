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
from superscaler.certify.shift import Body, Key, Shift, Status, Unsteady, bodies
from superscaler.ir.program import Program, Task, Value

Added = Mapping[tuple[int, Value], Sequence[Content]]


@dataclass
class _Seen:
    """The state of a cohort before repetition `turn` of a loop, as far as the loop reads or changes it.

    `held`: the statuses of all names and tasks in that repetition. `has_sums`: whether all sums are made. `posted`: the
    number of collectives by group. `sent`: messages under way. `flags`: of each memory, see `flags_of`.
    """

    run: Run[Content]
    body: Body
    turn: int
    held: dict[Key, Status]
    has_sums: bool
    posted: dict[bytes, int]
    sent: dict[int, list[Post[Content]]]
    flags: dict[int, tuple[bool, ...]]

    def follows(self, other: _Seen) -> bool:
        return self.run is other.run and self.body is other.body and self.turn == other.turn + 1


class Rounds(Interpreter[Content]):
    """An interpreter on masks that omits rounds."""

    def __init__(self, program: Program, masks: Masks) -> None:
        super().__init__(program, masks)
        self.masks, self.shift = masks, Shift(program, masks.kinds, self.cohort_of)
        self.before: list[_Seen] = []
        try:
            self.bodies = [bodies(run.cohort, self.shift) for run in self.runs]
        except Unsteady:
            self.bodies = [[] for _ in self.runs]
        for run in self.runs:
            run.limit = self._stop(run)

    def _stop(self, run: Run[Content]) -> int | None:
        """Return the next place in the code of a cohort between repetitions of a loop."""
        for body in self.bodies[run.cohort.number]:
            if run.at < body.start:
                return body.start
            if run.at < body.end:
                return run.at + body.length - (run.at - body.start) % body.length
        return None

    def release(self, left: Sequence[Run[Content]]) -> bool:
        held = [run for run in left if run.at == run.limit]
        if held and len(held) == len(left):
            self._meet(left)
        for run in held:
            run.limit = self._stop(run)
        return bool(held)

    def _meet(self, left: Sequence[Run[Content]]) -> None:
        """Omit the next rounds, if the last one shifted all state that they use."""
        if any(posts for run in self.runs if run not in left for posts in run.sent.values()):
            # A round takes messages of devices that have ended, too, and these send no more.
            return
        now = [self._seen(run, body) for run in left if (body := self._body(run))]
        before, self.before = self.before, now if len(now) == len(left) else []
        added, self.masks.added = self.masks.added, {}
        if not before or len(before) != len(self.before) or not all(map(_Seen.follows, now, before)):
            return
        count = min(one.body.count - one.turn for one in now) - 1
        if count > 0 and all(self._is_steady(*pair, count) for pair in zip(before, now, strict=True)):
            for one, two in zip(before, now, strict=True):
                self._leave_out(one, two, count, added or {})
            self.before = []

    def _body(self, run: Run[Content]) -> Body | None:
        return next((b for b in self.bodies[run.cohort.number] if b.start <= run.at < b.end), None)

    def _seen(self, run: Run[Content], body: Body) -> _Seen:
        turn = (run.at - body.start) // body.length
        held = {key: self._status(run, key) for key in (*body.fixed, *self._window(body, turn))}
        posted = {group: len(posts) for group, posts in run.collectives.items()}
        sent = {to: list(posts) for to, posts in run.sent.items() if posts}
        flags = {id(m): flags_of(m) for status in held.values() for m in memories(status)}
        has_sums = all(name in run.values for name in body.sums)
        return _Seen(run, body, turn, held, has_sums, posted, sent, flags)

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

    def _is_steady(self, before: _Seen, now: _Seen, count: int) -> bool:
        """Return whether the last round shifted its state, and the state that `count` more rounds meet is shifted."""
        fixed = set(now.body.fixed)
        like = Likeness(self.shift, {key: now.posted[key] - n for key, n in before.posted.items()})
        later = {key: self.shift.key(key, 0 if key in fixed else 1) for key in before.held}
        return (
            before.has_sums
            and all(like.follows(before.held[a], now.held[b], 1, before.flags) for a, b in later.items())
            and all(self._go_on(like, now, key, count) for key in now.body.moving)
            and before.sent.keys() == now.sent.keys()
            and all(like.follow(before.sent[to], now.sent[to], before.flags) for to in now.sent)
            and self._is_apart(now, like, count)
            and all(self._is_own(now, group) for group, n in now.posted.items() if n != before.posted.get(group))
        )

    def _go_on(self, like: Likeness, now: _Seen, key: Key, count: int) -> bool:
        """Return whether the names of a kind follow each other: the next rounds reach names like the present ones, and
        the names that they leave behind have ended.
        """
        lo, hi = now.body.moving[key]
        left, last = (self.shift.key(key, now.turn + n) for n in (lo - 1, hi))
        status = now.held[last]
        after = (self._status(now.run, self.shift.key(last, n)) for n in range(1, count + 1))
        goes_on = all(like.follows(status, other, n, now.flags) for n, other in enumerate(after, 1))
        return goes_on and self._status(now.run, left).post is None

    def _is_apart(self, now: _Seen, like: Likeness, count: int) -> bool:
        """Return whether memory that moves belongs to moving names alone, and each sum has memory of its own."""
        run, body = now.run, now.body
        moving = set(self._window(body, now.turn))
        for key, (lo, hi) in body.moving.items():
            moving |= {self.shift.key(key, now.turn + n) for n in (lo - 1, *range(hi + 1, hi + count + 1))}
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

    def _is_own(self, now: _Seen, group: bytes) -> bool:
        """Return whether all devices of a group's collectives are in this cohort, and the loop waits for unfinished
        ones.
        """
        run = now.run
        waiting = {name for name, (post, _) in run.handles.items() if post.peers.tobytes() == group}
        known = run.groups.get(group)
        return known is not None and all(end is run for end, _ in known.ends) and waiting <= now.held.keys()

    # What the left out rounds do.

    def _leave_out(self, before: _Seen, now: _Seen, count: int, added: Added) -> None:
        run, body = now.run, now.body
        found = dict(self._later(now, count))
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
            each = [replace(one, addends=sums.addends_of(one)) for one in added.get((run.cohort.number, name), ())]
            run.values[name] = sums.sum(total, total.box, [total, *(self.shift.repeated(one, count) for one in each)])
        run.at += count * body.length

    def _later(self, now: _Seen, count: int) -> Iterator[tuple[Key, Status]]:
        """Yield the statuses, after `count` more rounds, of all names and tasks that these rounds touch."""
        shift = self.shift
        for key in now.body.fixed:
            yield key, _moved(shift, now.held[key], count)
        for key, (lo, hi) in now.body.moving.items():
            last = shift.key(key, now.turn + lo - 1)
            left = self._status(now.run, last)
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
