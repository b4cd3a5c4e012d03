"""The state of a device's memory between repetitions of a loop, and its move to the end of the loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from superscaler.simulate.holders import Holders
from superscaler.simulate.repeats.steady import Pace
from superscaler.simulate.storages import Storage


@dataclass(eq=False)
class Held:
    """The state of memory, moved by so many repetitions. `key`: all that names, handles and tapes hold, with
    the numbers of `storages`; `born`: their births.

    Two are equal if each storage is the same, or made by the same instruction a repetition later.
    """

    pace: Pace
    turns: int
    key: list[object] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held) or self.key != other.key:
            return False
        pairs = zip(self.storages, self.born, other.storages, other.born, strict=True)
        return all(s is t or abs(b - a) == self.pace.length for s, a, t, b in pairs)

    def number(self, storage: Storage | None) -> int:
        """Return the number of a storage, in the order in which they are asked for."""
        if storage is None:
            return -1
        if id(storage) not in self._numbers:
            self._numbers[id(storage)] = len(self.storages)
            self.storages.append(storage)
            self.born.append(storage.born)
        return self._numbers[id(storage)]

    def every(self, storages: Iterable[Storage]) -> list[int]:
        return [self.number(s) for s in storages]

    def by_number(self, storages: Mapping[int, Storage]) -> list[tuple[int, int]]:
        return [(n, self.number(storages[n])) for n in sorted(storages)]

    def name_of(self, storage: Storage) -> object:
        return storage.name and self.pace.moved(storage.name, self.turns)


def held(run: Holders, pace: Pace, turns: int) -> Held:
    """Return the state of memory, moved by so many repetitions."""
    found = Held(pace, turns)
    names, tapes = sorted(pace.names(run.names, turns).items()), sorted(pace.names(run.tapes, turns).items())
    handles = sorted(pace.names(run.handles, turns).items())
    shared = {id(h.shared): n for n, (_, h) in enumerate(handles)}
    found.key = [
        [(name, found.number(s)) for name, s in names],
        [(work, h.size, found.number(h.result), shared[id(h.shared)]) for work, h in handles],
        [found.every((*h.shared, *h.held)) for _, h in handles],
        [(task, id(t.segment), found.by_number(t.known), found.by_number(t.held)) for task, t in tapes],
        [(found.number(t.others), found.number(t.away), found.by_number(t.moved)) for _, t in tapes],
        [(tensor, found.every(some)) for tensor, some in run.outputs.items()],
        [(_batch(pace, batch, turns), found.number(s)) for batch, s in run.sent],
        found.every(run.copied),
        [(*sizes, found.number(s)) for *sizes, s in run.waiting],
        pace.names(run.sizes, turns),
        {pace.moved(name, turns) for name in run.strided},
        (run.total, run.on_host, *run.alive),
    ]
    found.key += [
        (s.bytes, s.category, found.name_of(s), s.is_on_host, s.holders, s.tapes, id(s.tape)) for s in found.storages
    ]
    return found


def skip(run: Holders, pace: Pace, turns: int, before: Held, now: Held) -> None:
    """Move the state of memory by so many repetitions, in which it does the same as in the last one."""
    place = {id(s): n for n, s in enumerate(run.every)}
    made = [s for s, old in zip(now.storages, before.storages, strict=True) if s is not old]
    for storage in sorted(made, key=lambda s: place[id(s)]):
        # Another one takes its place in the last repetition. A tape may name storages that are dead.
        run.every[place[id(storage)]] = replace(storage, died=run.at if storage.died is None else storage.died)
        storage.born += turns * pace.length
        storage.died = None if storage.died is None else storage.died + turns * pace.length
        storage.name = storage.name and pace.moved(storage.name, turns)
        run.every.append(storage)
    run.names, run.handles = pace.names(run.names, turns), pace.names(run.handles, turns)
    run.tapes, run.sizes = pace.names(run.tapes, turns), pace.names(run.sizes, turns)
    run.strided = {pace.moved(name, turns) for name in run.strided}
    run.sent = [(_batch(pace, batch, turns), s) for batch, s in run.sent]
    run.rows += run.rows[-pace.length :] * turns
    run.during += run.during[-pace.length :] * turns


def _batch(pace: Pace, batch: int, turns: int) -> int:
    """Return the number of a batch of sends later: a point of messages, or before 0 that of a collective."""
    return batch + turns * (pace.points if batch >= 0 else -pace.length)
