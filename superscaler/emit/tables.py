"""Tables of a plan: the data of each device, by the numbers that its code uses."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from superscaler.emit.segments import Draw, draws_of
from superscaler.ir.fold import Folded
from superscaler.ir.grid import Ints
from superscaler.ir.instructions.fields import evenly, mover
from superscaler.ir.program import Program, Shape


class Table(list[Any]):
    """The entries of a table. `spans`: of entries that move evenly from each repetition to the next, the number of the
    first one, how many move together, and how often they are repeated.
    """

    def __init__(self, entries: Iterable[Any] = (), spans: Sequence[tuple[int, int, int]] = ()) -> None:
        super().__init__(entries)
        self.spans = spans

    def deciding(self, numbers: Ints) -> Ints:
        """Return the positions in evenly spaced `numbers` that decide for all: the first two and the last, if these are
        numbers of one entry in some of its repetitions.
        """
        first, step, last = int(numbers[0]), int(numbers[1] - numbers[0]), int(numbers[-1])
        at = bisect_right(self.spans, first, key=lambda span: span[0]) - 1
        start, width, count = self.spans[at] if at >= 0 else (0, 1, 0)
        is_one = step % width == 0 and start <= min(first, last) and max(first, last) < start + width * count
        return np.array([0, 1, len(numbers) - 1]) if is_one or not step else np.arange(len(numbers))


@dataclass(slots=True)
class Tables:
    """The data of one device: its entry in each table, by the number that the code uses."""

    weights: list[dict[str, Any]] = field(default_factory=list)
    inputs: list[tuple[str, Any]] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    messages: list[tuple[int, int]] = field(default_factory=list)
    boxes: list[Any] = field(default_factory=list)
    draws: list[list[dict[str, Any]]] = field(default_factory=list)
    parts: list[tuple[Any, ...]] = field(default_factory=list)
    counted: list[tuple[bool, ...]] = field(default_factory=list)
    ways: list[tuple[tuple[Shape, int, Shape], ...]] = field(default_factory=list)
    shapes: list[tuple[Shape, ...]] = field(default_factory=list)
    updates: list[tuple[str, ...]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class AllTables(Sequence[Tables]):
    """The tables of all devices; those of a folded program are made on demand."""

    made: Sequence[Callable[[], Tables]]

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, rank: Any) -> Any:
        return self.made[rank]()


@dataclass(slots=True)
class Entries:
    """The entries that the samples of a program need in one table. Entries of a loop hold the first and the second
    repetition, for each layer.
    """

    size: int = 0
    known: dict[Any, int] = field(default_factory=dict)
    rows: list[tuple[Any, Any, int]] = field(default_factory=list)

    def number(self, entries: tuple[Any, ...], later: tuple[Any, ...], count: int) -> int:
        """Return the number of the first of some entries, or of all entries of a loop in which they move evenly."""
        if entries == later and entries in self.known:
            return self.known[entries]
        found, count = self.size, 1 if entries == later else count
        self.size += count * len(entries)
        self.rows.append((entries, later, count))
        if count == 1:
            self.known[entries] = found
        return found

    def pairs(self) -> Iterator[tuple[Any, Any, int]]:
        """Yield each entry in the first and in the second repetition, and the number of its repetition."""
        for entries, later, count in self.rows:
            yield from ((*pair, turn) for turn in range(count) for pair in zip(entries, later, strict=True))


def entries_of_tables() -> dict[str, Entries]:
    return {f.name: Entries() for f in fields(Tables)}


# The number of the first of the entries, how many layers have one of their own, whether repetitions do.
TableEntry = tuple[int, int, bool]


class TableQuery(NamedTuple):
    """Entries of a table that an instruction needs: in each layer, by sample, now and in the second repetition."""

    table: str
    entries: tuple[tuple[Any, ...], ...]
    later: tuple[tuple[Any, ...], ...]
    turns: int

    def of(self, samples: slice) -> "TableQuery":
        """Return the entries of some of the samples."""
        entries, later = (tuple(entry[samples] for entry in some) for some in (self.entries, self.later))
        return self._replace(entries=entries, later=later)

    def number(self, known: Mapping[str, Entries]) -> TableEntry:
        """Return the number of the entries, which are added to their table. Equal ones are one entry."""
        entries, later = self.entries, self.later
        if all(entry == entries[0] for entry in (*entries, *later)):
            entries, later = entries[:1], later[:1]
        return known[self.table].number(entries, later, self.turns), len(entries), entries != later


def tables_of(program: Program, rank: int, entries: Mapping[str, Entries]) -> Tables:
    """Return the tables of a device, from the entries of its program."""
    devices = program.devices
    fold = devices.fold if isinstance(devices, Folded) and rank in devices.fold.places else None
    place = fold.place(rank) if fold is not None else ()

    def filled(table: str, get: Callable[[Any], Any]) -> Table:
        found, spans = list[Any](), list[tuple[int, int, int]]()
        for some, later, count in entries[table].rows:
            now = list(map(get, some))
            move = mover([now, list(map(get, later))])
            spans += [(len(found), len(now), count)] * (count > 1)
            found += now * count if move is None else chain.from_iterable(map(move, range(count)))
        return Table(found, spans)

    def even(table: str) -> Table:
        return filled(table, lambda entry: evenly(entry, place))

    def moved(members: tuple[int, ...]) -> tuple[int, ...]:
        return members if fold is None else fold.move(members, place)

    def draws(entry: Any) -> list[Draw]:
        function, boxes = evenly(entry, place)
        return draws_of(program.model, program.functions[function], boxes)

    drawn = filled("draws", draws)
    return Tables(
        [
            _record({f.name: getattr(w, f.name) for f in fields(w)}) | {"name": str(w.name)}
            for w in program.weights(rank)
        ],
        even("inputs"),
        filled("groups", lambda entry: moved(entry[0])),
        filled("messages", lambda entry: (moved((entry[0][0],))[0], entry[0][1])),
        even("boxes"),
        Table(([_record(draw._asdict()) for draw in some] for some in drawn), drawn.spans),
        even("parts"),
        even("counted"),
        *(filled(table, lambda entry: entry[0]) for table in ("ways", "shapes", "updates")),
    )


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    # Few weights are on hosts, or of later iterations.
    return {name: value for name, value in row.items() if value or name not in ("host", "ahead")}
