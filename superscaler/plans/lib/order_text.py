"""Orders of pipelines as short text: for each device its kinds of work, and in parentheses those that repeat.

`FF(FB)BB/F(FB)B/(FB)` is 1F1B on three devices, of any number of microbatches from 3 on. The n-th F of a row is that of
microbatch n, the n-th B or I the backward of that; W is the other half of the oldest I. A stage has its number before
each work where a device has several: `0F3F3B0B/1F2F2B1B`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

from superscaler.plans.lib.tables import Table
from superscaler.verbs import Action, InputError

# The stage and the kind of a work.
Work = tuple[int, str]
_WORK = r"\d*[FRBIW]"
_ROW = re.compile(rf"(?P<first>(?:{_WORK})*)(?:\((?P<turn>(?:{_WORK})+)\))?(?P<last>(?:{_WORK})*)")


def is_order(text: str) -> bool:
    """Return whether a text is an order.

    >>> is_order("F(FB)B/(FB)"), is_order("zb_h1"), is_order("F(F)(B)")
    (True, False, False)
    """
    return all(row and _ROW.fullmatch(row) for row in text.split("/"))


def microbatches_of(text: str) -> int | None:
    """Return the number of microbatches of an order without turns, None for others.

    >>> microbatches_of("FFBB/FBFB"), microbatches_of("F(FB)B/(FB)")
    (2, None)
    """
    return None if "(" in text else max(Counter(_works(text.partition("/")[0], 0)).values(), default=0)


def table_of_order(text: str, devices: int, microbatches: int) -> Table:
    """Return the table of an order for so many microbatches. Raises InputError for another number of devices, and for a
    row that does not make this number of each work.

    >>> [" ".join(map(str, row)) for row in table_of_order("F(FB)B/(FB)", 2, 3)]
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """
    rows = text.split("/")
    if len(rows) != devices:
        raise InputError(
            f"order {text} has {len(rows)} rows, but the pipeline {devices} devices; write a row for each."
        )
    return [_row(row, device, microbatches) for device, row in enumerate(rows)]


def _row(text: str, device: int, microbatches: int) -> list[Action]:
    found = _ROW.fullmatch(text)
    assert found is not None
    first, turn, last = (_works(part or "", device) for part in found.group("first", "turn", "last"))
    around, again = (
        Counter((stage, _counted(kind)) for stage, kind in some if kind != "W") for some in ([*first, *last], turn)
    )
    turns = max(((microbatches - around[work]) // again[work] for work in again), default=0)
    for work in around | again:
        if around[work] + turns * again[work] != microbatches or turns < 0:
            each = f" and {again[work]} in each turn" if again[work] else ""
            raise InputError(
                f"row {device} of an order, {text}, has {around[work]} {work[0]}{work[1]}{each}, which makes no "
                f"{microbatches} microbatches; write as many of each, or take another number of microbatches."
            )
    return list(_numbered([*first, *turn * turns, *last]))


def _counted(kind: str) -> str:
    """Return the kind by which a work is counted: a backward is whole, or two halves."""
    return "B" if kind == "I" else kind


def _numbered(works: Sequence[Work]) -> Iterator[Action]:
    """Yield works with their microbatches: I and B are counted together, and W is the half of the oldest I."""
    numbers, halves = Counter[Work](), defaultdict[int, deque[int]](deque)
    for stage, kind in works:
        if kind == "W" and halves[stage]:
            yield Action(stage, "W", halves[stage].popleft())
            continue
        counted = stage, _counted(kind)
        yield Action(stage, kind, numbers[counted])
        halves[stage] += [numbers[counted]] if kind == "I" else []
        numbers[counted] += 1


def _works(text: str, device: int) -> list[Work]:
    return [(int(work[:-1] or device), work[-1]) for work in re.findall(_WORK, text)]


def print_order(rows: Sequence[Sequence[Work]]) -> str:
    """Return the text of rows, each in its microbatches' order; what repeats is a turn.

    >>> print_order([[(0, kind) for kind in "FFBFBFBB"], [(1, kind) for kind in "FBFBFBFB"]])
    'F(FB)B/(FB)'
    """
    return "/".join(_print(row, device) for device, row in enumerate(rows))


def _print(row: Sequence[Work], device: int) -> str:
    words = [work[1] if {stage for stage, _ in row} == {device} else f"{work[0]}{work[1]}" for work in row]
    start, length, times = _turn(words)
    turn, end = f"({''.join(words[start : start + length])})" if times > 1 else "", start + length * times
    return "".join(words[:start]) + turn + "".join(words[end if turn else start :])


def _turn(words: Sequence[str]) -> tuple[int, int, int]:
    """Return the start of the turns that shorten a row most, the length of one, and their number: each has as many of
    each kind.
    """
    kinds, best = {*words}, (0, 1, 1)
    for length in range(len(kinds), len(words) // 2 + 1, len(kinds)):
        same = [a == b for a, b in zip(words, words[length:], strict=False)]
        run = 0
        for at, is_same in enumerate([*same, False]):
            if is_same:
                run += 1
                continue
            start, times, run = at - run, run // length + 1, 0
            counts = Counter(words[start : start + length])
            is_even = counts.keys() == kinds and len({*counts.values()}) == 1
            if times > 1 and is_even and length * (times - 1) > best[1] * (best[2] - 1):
                best = start, length, times
    return best
