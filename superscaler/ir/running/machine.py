"""The machine: it runs code on domains, which give it a meaning. Code of one device runs alone, code of all in turns.

If a repetition of a loop leaves the state that the one before left, moved to the next microbatches, the next one does
the same again. So the rest is left out: the state is moved behind it. Codes that wait for each other repeat in rounds,
a repetition of each, and the states of all must be moved ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

C = TypeVar("C")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Lap(Generic[S]):
    """A loop of code: `count` times `length` instructions, from `start` on. `step`: the move to the next repetition."""

    start: int
    length: int
    count: int
    step: S

    @property
    def end(self) -> int:
        return self.start + self.length * self.count


class Domain(Generic[C, S]):
    """The meaning of code: its effect on a state."""

    def step(self, at: int, i: C) -> bool:
        """Run an instruction; return whether it ran. If it must wait for other code, it runs again later."""
        raise NotImplementedError

    def state(self, lap: Lap[S], turns: int) -> object:
        """Return the state between two repetitions, moved by so many of them; None if all of them must run."""

    def is_moved(self, before: Any, now: Any) -> bool:
        """Return whether a repetition only moved the state; `before`, `now`: the states at its ends."""
        return bool(before == now)

    def skip(self, lap: Lap[S], turns: int, before: Any, now: Any) -> None:
        """Do the last repetition again, so many times."""


D = TypeVar("D", bound=Domain[Any, Any])


@dataclass(eq=False)
class Walk(Generic[D]):
    """Code that runs on a domain. `laps`: its loops that repeat, in order; `limit`: where it stops next."""

    code: Sequence[Any]
    domain: D
    laps: Sequence[Lap[Any]] = ()
    at: int = 0
    limit: int = 0

    @property
    def lap(self) -> Lap[Any] | None:
        """The loop that the code is in."""
        return next((lap for lap in self.laps if lap.start <= self.at < lap.end), None)

    def advance(self) -> bool:
        """Run instructions up to the limit, or until one must wait; return whether any ran."""
        first = self.at
        while self.at < self.limit and self.domain.step(self.at, self.code[self.at]):
            self.at += 1
        return self.at > first

    def release(self) -> None:
        """Move the limit to the next place between repetitions, or to the end."""
        starts = [lap.start for lap in self.laps if self.at < lap.start]
        lap = self.lap
        self.limit = min([*starts, len(self.code)]) if lap is None else self.at + lap.length


@dataclass(eq=False)
class _Rounds:
    """The rounds of codes: `number` of them in a row up to the `ends`, places in loops, with the states before the last
    one. The `kept` last ones always run.
    """

    kept: int
    number: int = 0
    ends: Sequence[tuple[Lap[Any], int]] = ()
    states: Sequence[object] = ()

    def meet(self, walks: Sequence[Walk[Any]]) -> None:
        """Leave out the next rounds if the last one only moved the states of all codes."""
        before, self.ends = self.ends, [(lap, walk.at) for walk in walks if (lap := walk.lap) is not None]
        is_next = [(lap, at + lap.length) for lap, at in before] == self.ends and len(self.ends) == len(walks)
        self.number = self.number + 1 if is_next else 0
        if len(self.ends) < len(walks):
            return
        turns = min((lap.end - at) // lap.length for lap, at in self.ends) - self.kept
        # States are compared less often later.
        is_first, is_second = (_is_power(self.number - n) for n in (1, 2))
        if turns < 1 or not (is_first or is_second):
            return
        pairs = [(walk, lap) for walk, (lap, _) in zip(walks, self.ends, strict=True)]
        states, self.states = self.states, [walk.domain.state(lap, turns) for walk, lap in pairs]
        if is_second and all(map(_repeats, walks, states, self.states)):
            for (walk, lap), one, two in zip(pairs, states, self.states, strict=True):
                walk.domain.skip(lap, turns, one, two)
                walk.at += turns * lap.length
            self.ends = ()


def _repeats(walk: Walk[Any], before: object, now: object) -> bool:
    return before is not None and now is not None and walk.domain.is_moved(before, now)


def _is_power(number: int) -> bool:
    """Return whether a number is a power of two, or 0."""
    return number >= 0 and number & (number - 1) == 0


def execute(walks: Sequence[Walk[D]], kept: int = 0) -> list[Walk[D]]:
    """Run codes, and return those that wait for ever. The `kept` last repetitions of loops always run."""
    rounds, left = _Rounds(kept), list(walks)
    for walk in left:
        walk.release()
    while left:
        is_moving = sum([walk.advance() for walk in left]) > 0
        left = [walk for walk in left if walk.at < len(walk.code)]
        held = [walk for walk in left if walk.at == walk.limit]
        if not (is_moving or held):
            break
        if held and not is_moving:
            if len(held) == len(left):
                rounds.meet(left)
            for walk in held:
                walk.release()
    return left
