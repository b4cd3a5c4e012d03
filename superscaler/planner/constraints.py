"""Constraints of a search in words: `tp <= 8, no recompute, stage 0 has 5 blocks`.

They are separated by commas. A constraint is one of

    NAME SIGN VALUE            tp <= 8; SIGN: <=, <, >=, >, =, !=, of names = and != only
    NAME in (VALUE, ...)       schedule in (1f1b, zb_h1)
    no NAME                    no recompute: that is none; no zb_h1: another schedule
    NAME within a server       tp, or dp: the devices that share a batch
    STAGE has CONSTRAINT       stage 0 has tp >= 2
    STAGE has [SIGN] N blocks  last stage has <= 4 blocks
    STAGE has the embedding    or the head

STAGE is stage 0, stage -1, first stage, last stage, or each stage. Without one, a constraint holds for all stages.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from superscaler.errors import InputError, unknown
from superscaler.planner.space import LAYOUTS, LOSS, RECOMPUTE, SCHEDULES, SWAP, Choice

# Of a plan, and of one of its stages; None: of all of them.
Allows = Callable[[Choice, int | None], bool]
NUMBERS = ("dp", "tp", "pp", "microbatches", "rows", "chunks", "zero", "batch")
WORDS = {
    "recompute": tuple(RECOMPUTE), "schedule": tuple(SCHEDULES), "layout": tuple(LAYOUTS), "loss": tuple(LOSS),
    "swap": tuple(SWAP),
}  # fmt: skip
# What `no NAME` means: the value that is left, or no such value.
_NONE: dict[str, int | str] = {"dp": 1, "tp": 1, "pp": 1, "chunks": 1, "zero": 0, "recompute": "none", "swap": "none"}
_VALUES = {value: name for name, values in WORDS.items() for value in values if value not in ("none", "whole")}
_SIGNS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "=": operator.eq,
    "==": operator.eq,
}  # fmt: skip
# The decisions whose product is the number of neighboring devices that share something.
_INNER = {"tp": ("tp",), "dp": ("dp", "tp")}
# The largest batch that is searched.
_MOST_ROWS = 1_000_000
_SIGN = r"(?P<sign><=|>=|!=|==|<|>|=)"
_CLAUSE = re.compile(rf"(?P<name>\w+)\s*{_SIGN}\s*(?P<value>\w+)")
_AMONG = re.compile(r"(?P<name>\w+)\s+in\s*\((?P<values>[^()]*)\)")
_WITHIN = re.compile(r"(?P<name>\w+)\s+within\s+a\s+server")
_STAGE = re.compile(r"(?:stage\s+(?P<number>-?\d+)|(?P<which>first|last|each)\s+stage)\s+has\s+(?P<what>.+)")
_BLOCKS = re.compile(rf"{_SIGN}?\s*(?P<count>\d+)\s+blocks?")
_ENDS = {"first": 0, "last": -1, "each": None}
_FORMS = "tp <= 8, schedule in (1f1b, zb_h1), no recompute, tp within a server, stage 0 has 5 blocks"


class Limit(NamedTuple):
    """A limit on the number of blocks of a stage, -1: the last one, None: each."""

    stage: int | None
    sign: str
    number: int

    def holds(self, stage: int, stages: int, blocks: Any) -> Any:
        """Return whether so many blocks are allowed for one of so many stages. `blocks` may be an array."""
        is_meant = self.stage is None or self.stage % stages == stage
        return _SIGNS[self.sign](blocks, self.number) if is_meant else blocks == blocks


class Constraint(NamedTuple):
    """A constraint: its words, the plans that it allows, and the decision that it is about."""

    words: str
    allows: Allows
    about: str
    limit: Limit | None = None


def read(text: str, per_server: int = 1) -> list[Constraint]:
    """Return the constraints of a text. `per_server`: devices. Raises InputError for a clause that is none.

    >>> [found.words for found in read("tp in (2, 4), no recompute")]
    ['tp in (2, 4)', 'no recompute']
    """
    parts = re.split(r",(?![^(]*\))", text)
    return [_read(clause, clause.lower(), per_server) for part in parts if (clause := " ".join(part.split()))]


def _read(words: str, clause: str, per_server: int) -> Constraint:
    if found := _STAGE.fullmatch(clause):
        stage = int(found["number"]) if found["number"] else _ENDS[found["which"]]
        return _of_stage(words, stage, found["what"], per_server)
    if found := _WITHIN.fullmatch(clause):
        name = found["name"]
        if name not in _INNER:
            raise InputError(f"--where: '{words}': {unknown('group of devices', name, _INNER)}")
        return Constraint(words, lambda c, stage: _is_inside(c, stage, name, per_server), name)
    if clause.startswith("no "):
        name = clause[3:]
        if name not in (*_VALUES, *_NONE):
            raise InputError(f"--where: '{words}': {unknown('decision', name, (*_NONE, *_VALUES))}")
        if name in _VALUES:
            return _compared(words, _VALUES[name], "!=", (name,))
        return _compared(words, name, "=", (_NONE[name],))
    if found := _AMONG.fullmatch(clause):
        values = [value.strip() for value in found["values"].split(",")]
        return _compared(words, found["name"], "=", [_value(words, found["name"], value) for value in values])
    if found := _CLAUSE.fullmatch(clause):
        name, sign = found["name"], found["sign"]
        if name in WORDS and sign not in ("=", "==", "!="):
            raise InputError(f"--where: '{words}': {name} has names, not numbers; compare it by = or !=.")
        return _compared(words, name, sign, (_value(words, name, found["value"]),))
    raise InputError(f"--where: '{words}' is no constraint; write, between commas, one as {_FORMS}.")


def _value(words: str, name: str, text: str) -> int | str:
    """Return a value of a decision. Raises InputError if it has none such."""
    if name not in (*NUMBERS, *WORDS):
        raise InputError(f"--where: '{words}': {unknown('decision', name, (*NUMBERS, *WORDS))}")
    if name in WORDS and text not in WORDS[name]:
        raise InputError(f"--where: '{words}': {unknown(name, text, WORDS[name])}")
    if name in NUMBERS and not text.isdecimal():
        raise InputError(f"--where: '{words}': {name} is a number, not {text or 'empty'}; write one as {name} = 2.")
    return text if name in WORDS else int(text)


def _compared(words: str, name: str, sign: str, values: Sequence[int | str]) -> Constraint:
    """Return the constraint that a decision is as one of some values."""
    is_so = _SIGNS[sign]
    return Constraint(words, lambda c, at: all(any(is_so(x, v) for v in values) for x in values_of(c, name, at)), name)


def _of_stage(words: str, stage: int | None, what: str, per_server: int) -> Constraint:
    """Return a constraint on one stage, or on each."""
    if found := _BLOCKS.fullmatch(what):
        limit = Limit(stage, found["sign"] or "=", int(found["count"]))
        return Constraint(words, lambda c, _: _has(c, stage) and not c.is_even, "blocks", limit)
    if what in ("the embedding", "the head"):
        end = 0 if what == "the embedding" else -1

        def is_there(c: Choice, _: int | None) -> bool:
            # An interlaced pipeline has a share of both on each device.
            meant = [*range(c.stages)] if stage is None else [stage % c.stages]
            return _has(c, stage) and c.schedule != "interlaced" and meant == [end % c.stages]

        return Constraint(words, is_there, "stages")
    inner = _read(words, what, per_server)
    if inner.limit is not None or inner.about in ("stages", "blocks"):
        raise InputError(f"--where: '{words}' names two stages; name one.")
    return inner._replace(allows=lambda c, _: _has(c, stage) and inner.allows(c, stage))


def _has(c: Choice, stage: int | None) -> bool:
    return stage is None or -c.stages <= stage < c.stages


def values_of(c: Choice, name: str, stage: int | None = None) -> tuple[Any, ...]:
    """Return the values of a decision in a stage, None: in all of them."""
    every = c.each(name)
    return every if stage is None or len(every) == 1 else (every[c.place(stage)],)


def _is_inside(c: Choice, stage: int | None, name: str, per_server: int) -> bool:
    """Return whether each group of neighboring devices that share something is on one server, in a stage or in all."""
    meant, first = None if stage is None else c.place(stage), 0
    for place in range(c.pp):
        own = c.stage(place)
        size, end = prod(getattr(own, inner) for inner in _INNER[name]), first + own.dp * own.tp
        is_odd = meant in (None, place) and bool(per_server % size or first % size)
        if is_odd and any(at // per_server != (at + size - 1) // per_server for at in range(first, end, size)):
            return False
        first = end
    return True


def read_batches(text: str) -> list[int]:
    """Return the batches of a text: some of them, or all powers of two times the first up to the last.

    >>> read_batches("256..1024"), read_batches("96, 128")
    ([256, 512, 1024], [96, 128])
    """
    first, is_range, last = text.partition("..")
    numbers = [part.strip() for part in ([first, last] if is_range else text.split(","))] if text.strip() else []
    if not all(part.isdecimal() and 0 < int(part) <= _MOST_ROWS for part in numbers):
        raise InputError(f"--batch '{text}': give rows of a step from 1 to {_MOST_ROWS:,}, as 256..1024 or 256,384.")
    found = sorted({int(part) for part in numbers})
    if not is_range:
        return found
    if int(first) > int(last):
        raise InputError(f"--batch '{text}': the first is above the last; write {last.strip()}..{first.strip()}.")
    return [found[0] << k for k in range(_MOST_ROWS.bit_length()) if found[0] << k <= found[-1]]


def left(
    space: Sequence[Choice],
    constraints: Sequence[Constraint],
    sizes: Sequence[int] = (),
    ends: tuple[bool, bool] = (False, False),
) -> list[Choice]:
    """Return the plans that satisfy all constraints. `sizes`: the blocks that stay together; `ends`: whether the first
    stage of several can have none, and the last one. Raises InputError for a constraint that leaves none, and for those
    that all leave none together.
    """
    for one in constraints:
        if not _left(space, [one], sizes, ends):
            known = _values_text(space, one, sizes, ends)
            raise InputError(f"--where: no plan of the space satisfies '{one.words}'; {known}.")
    found = _left(space, constraints, sizes, ends)
    if not found:
        every = ", ".join(one.words for one in constraints)
        raise InputError(f"--where: no plan of the space satisfies '{every}' together; leave one of these out.")
    return found


def satisfies(constraints: Sequence[Constraint], c: Choice) -> bool:
    """Return whether a plan satisfies all constraints with the blocks that its stages have."""
    return all(one.allows(c, None) and (one.limit is None or _keeps(one.limit, c)) for one in constraints)


def _keeps(limit: Limit, c: Choice) -> bool:
    return bool(c.blocks) and all(limit.holds(k, c.stages, count) for k, count in enumerate(c.blocks))


def _left(
    space: Sequence[Choice], constraints: Sequence[Constraint], sizes: Sequence[int], ends: tuple[bool, bool]
) -> list[Choice]:
    limits = [one.limit for one in constraints if one.limit]
    found = [c for c in space if all(one.allows(c, None) for one in constraints)]
    can = {stages: not limits or _can_be_cut(stages, limits, sizes, ends) for stages in {c.stages for c in found}}
    return [c for c in found if can[c.stages]]


def _can_be_cut(stages: int, limits: Sequence[Limit], sizes: Sequence[int], ends: tuple[bool, bool]) -> bool:
    """Return whether blocks can be cut into so many stages, each with one or more, or none where that can be."""
    starts, reached = [0, *accumulate(sizes)], {0}
    for k in range(stages):
        least = 0 if stages > 1 and ((k == 0 and ends[0]) or (k == stages - 1 and ends[1])) else 1
        reached = {
            b for a in reached for b in range(a + least, len(starts))
            if all(limit.holds(k, stages, starts[b] - starts[a]) for limit in limits)
        }  # fmt: skip
    return len(sizes) in reached


def _values_text(space: Sequence[Choice], one: Constraint, sizes: Sequence[int], ends: tuple[bool, bool]) -> str:
    """Return the values of what a constraint is about in a space, in words."""
    most = max(c.stages for c in space)
    if one.about == "blocks":
        inner = f" (in groups of {max(sizes)})" if max(sizes, default=1) > 1 else ""
        empty = " and ".join(name for name, can in zip(("first", "last"), ends, strict=True) if can)
        none = f" (the {empty} of several: of 0, too)" if empty else ""
        return f"the model has {sum(sizes)} blocks{inner}, and a plan 1 to {most} stages of one or more{none}"
    if one.about == "stages":
        return f"the embedding is in stage 0, the head in the last one, of 1 to {most} stages"
    values = sorted({value for c in space for value in values_of(c, one.about)})
    stages = f", of 1 to {most} stages" if "stage" in one.words.lower() else ""
    return f"{one.about} is one of {', '.join(map(str, values))}{stages}"
