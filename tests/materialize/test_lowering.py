"""The steps of a dozen transfers, word for word. After a wanted change: pytest tests/materialize --update-golden."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from superscaler.cluster import Cluster
from superscaler.ir.mask import Box
from superscaler.ir.model import PTensor
from superscaler.materialize.lowering import lower
from superscaler.materialize.steps import CollectiveStep, Join, LoweringOptions, Message, slots_of
from superscaler.schedule.transfers import BACKWARD, FORWARD, UPDATE, End, Place, Transfer
from tests.helpers.sweeps import slow

TEXT = Path(__file__).parent / "lowering.txt.golden"
SERVERS = Cluster.parse("v100:2x4")
Boxes = dict[int, Box]


def context(size: int) -> LoweringOptions:
    tensor = PTensor("x", (size, size), "float32", "activation", ((0,), (1,)), (size, size))
    return LoweringOptions({"x": tensor}, frozenset(), SERVERS)


def transfer(
    held: Boxes,
    read: Boxes,
    links: list[tuple[int, int]] | None = None,
    classes: tuple[int, ...] = (),
    kind: str = FORWARD,
    reads: str = FORWARD,
    also: Boxes | None = None,
) -> Transfer:
    """Pieces and readers by device, `also` of a second reader there, all linked if not told otherwise."""
    pieces = tuple(End(d, box, (Place(kind, 0, (d, 0, 0), 0),)) for d, box in held.items())
    readers = tuple(End(d, box, (Place(reads, 1, (d, 0, 0), 0),)) for d, box in (*read.items(), *(also or {}).items()))
    every = [(p, r) for p in range(len(pieces)) for r in range(len(readers))]
    return Transfer("x", kind, pieces, readers, tuple(every if links is None else links), classes)


def cases(size: int) -> dict[str, Transfer]:
    """Return transfers of a square matrix, by what devices hold and read."""

    def whole(*devices: int) -> Boxes:
        return dict.fromkeys(devices, ((0, size), (0, size)))

    def sliced(slot: int, *devices: int, cuts: tuple[int, ...] = ()) -> Boxes:
        """Cut a slot evenly, or at twelfths of it."""
        twelfths = [0, *cuts, 12] if cuts else [12 * n // len(devices) for n in range(len(devices) + 1)]
        ends = [(lo * size // 12, hi * size // 12) for lo, hi in itertools.pairwise(twelfths)]
        return {d: (end, (0, size)) if slot == 0 else ((0, size), end) for d, end in zip(devices, ends, strict=True)}

    return {
        "on one device": transfer(whole(0), {0: sliced(0, 0, 1)[0]}),
        "addends, whole": transfer(whole(0, 1, 2), whole(0, 1, 2)),
        "slices, whole": transfer(sliced(0, 2, 0, 1, 3), whole(0, 1, 2, 3)),
        "addends, slices": transfer(whole(0, 1), sliced(1, 1, 0)),
        "uneven slices, whole": transfer(sliced(0, 2, 0, 1, cuts=(5, 9)), whole(0, 1, 2)),
        "addends, uneven slices": transfer(whole(0, 1), sliced(1, 1, 0, cuts=(7,))),
        "slices of which one is far larger, whole": transfer(sliced(0, 0, 1, 2, cuts=(10, 11)), whole(0, 1, 2)),
        "uneven rows, uneven columns": transfer(sliced(0, 0, 1, cuts=(7,)), sliced(1, 0, 1, cuts=(7,))),
        "rows, columns": transfer(sliced(0, 0, 1), sliced(1, 0, 1)),
        "one, several": transfer(whole(0), whole(0, 1, 2)),
        "addends, whole on one of them": transfer(whole(0, 1, 2), whole(1)),
        "slices, whole on one of them": transfer(sliced(1, 2, 0, 1, 3), whole(0)),
        "addends, whole and slices of it": transfer(
            {**whole(0), **{1: whole(0)[0]}}, whole(0, 1), also={0: sliced(0, 0, 1)[0], 1: sliced(1, 0, 1)[1]}
        ),
        "one, one": transfer(whole(0), whole(5)),
        "thirds, halves": transfer(sliced(0, 0, 1, 2), sliced(0, 0, 1), [(0, 0), (1, 0), (1, 1), (2, 1)]),
        "rows, columns on devices in another order": transfer(sliced(0, 0, 1), sliced(1, 1, 0)),
        "addends, whole on another server": transfer(whole(0, 1, 2, 3), whole(4, 5, 6, 7)),
        "copies, copies on another server": transfer(
            whole(0, 1, 2, 3), whole(4, 5, 6, 7), [(n, n) for n in range(4)], (0, 0, 0, 0)
        ),
        "copies, slices elsewhere": transfer(whole(0, 1), sliced(0, 2, 3), [(0, 0), (1, 1)], (0, 0)),
        "copies of addends, slices": transfer(
            whole(2, 3, 6, 4, 5, 0, 1, 7),
            {d: ((size * k // 8, size * (k + 1) // 8), (0, size)) for k, d in enumerate((0, 2, 7, 5, 6, 4, 1, 3))},
            [(p, r) for p in range(0, 8, 2) for r in range(8)],
            (0, 0, 1, 1, 2, 2, 3, 3),
        ),
        "slices, more slices": transfer(sliced(0, 0, 1), sliced(0, 2, 3, 4, 5)),
        "a tied gradient: addends of the whole, and slices, to the whole": transfer(
            {**whole(0, 1), **sliced(0, 4, 5)}, whole(0, 1), kind=BACKWARD, reads=UPDATE
        ),
        "a gradient that rests in slices, in two groups": transfer(
            whole(0, 1, 4, 5), {**sliced(0, 0, 1), **sliced(0, 4, 5)}, kind=BACKWARD, reads=UPDATE
        ),
    }


def test_steps_in_words(request: pytest.FixtureRequest) -> None:
    text = "\n".join(f"{name}\n{lower(case, context(4096))}\n" for name, case in cases(4096).items())
    if request.config.getoption("--update-golden"):
        TEXT.write_text(text)
    assert TEXT.read_text() == text


@pytest.mark.parametrize("size", [48, *slow(1200)])
@pytest.mark.parametrize("name", cases(12))
def test_every_reader_gets_the_whole_value_of_its_box(name: str, size: int) -> None:
    """Every step reads what is there, and what readers join is the sum of their pieces, of replicas one."""
    case, drawn = cases(size)[name], np.random.default_rng(0)
    found = lower(case, context(size))
    matrix, classes = np.zeros((size, size)), case.classes or tuple(range(len(case.pieces)))
    values = [drawn.integers(9, size=(size, size)) for _ in range(len(case.pieces))]
    there = {slot[:2]: values[classes[slot.item]][index(slot.box)] for slot in slots_of(case)}
    for steps in found.rounds:
        started = {}
        for step in steps:
            if isinstance(step, CollectiveStep):
                sources, outs = step.sources, step.outs
            else:
                sources, outs = list(step.sources) if isinstance(step, Join) else [step.source], [step.out]
            made = matrix * 0
            for source in sources:
                assert isinstance(step, CollectiveStep | Message) or source.device == outs[0].device
                made[index(source.box)] += there[source[:2]]
            arrived = {out[:2]: made[index(out.box)] for out in outs}
            assert there.keys().isdisjoint(arrived)
            (started if isinstance(step, CollectiveStep | Message) else there).update(arrived)
        there |= started
    for r, (reader, slots) in enumerate(zip(case.readers, found.ends, strict=True)):
        mine, wanted = matrix * 0, matrix * 0
        for slot in slots:
            assert slot.device == reader.device
            mine[index(slot.box)] += there[slot[:2]]
        for p in {classes[p]: p for p, other in case.links if other == r}.values():
            wanted[index(case.pieces[p].box)] += values[classes[p]][index(case.pieces[p].box)]
        assert (mine[index(reader.box)] == wanted[index(reader.box)]).all()


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)
