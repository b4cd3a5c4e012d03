"""What a plan orders and asks for: orders between groups of parts; its policy; actions of a pipeline schedule as text
(`2F0`: stage 2, forward, microbatch 0); the picture of a stuck schedule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from superscaler.errors import InputError
from superscaler.ir.grid import place_name
from superscaler.ir.names import later
from superscaler.ir.parts import Address

_TEXT = re.compile(r"^(\d+)([FRBIW])(\d+)$")


@dataclass(frozen=True, slots=True)
class Policy:
    """What a plan asks for beside parts, places and orders.

    By update: `reduced`, the microbatches in which its gradient is reduced, if not once; `pieces`, the number of pieces
    of its gradient, each communicated separately. By weight: `ahead`, how many segments before its first reader it is
    gathered, if not one; `gathered_once`, whether that is done once a step. `hosted`: ops whose parts go to the hosts
    of the devices on which they would be.

    `overlaps`: gradients of weights are sent while others are computed. `sends_halves`: gradients of weights in halves
    travel in halves, where they are summed in slices. `gathers_halves`: weights that all readers cast to halves are
    cast before they are gathered. `gathers_each`: weights are gathered again for each microbatch, where they are
    gathered again for the backward. `kept_tapes`: the tapes that a device keeps, others are on its host; 0: all.
    """

    reduced: Mapping[str, int] = field(default_factory=dict)
    pieces: Mapping[str, int] = field(default_factory=dict)
    ahead: Mapping[str, int] = field(default_factory=dict)
    gathered_once: frozenset[str] = frozenset()
    hosted: frozenset[str] = frozenset()
    overlaps: bool = True
    sends_halves: bool = False
    gathers_halves: bool = False
    gathers_each: bool = True
    kept_tapes: int = 0

    def inherited(self, ops: Mapping[str, str], weights: Mapping[str, str]) -> Policy:
        """Return the policy in which new ops and weights are treated as old ones. Both are given as {new: old}."""
        return replace(
            self,
            reduced={**self.reduced, **{new: self.reduced[old] for new, old in ops.items() if old in self.reduced}},
            pieces={**self.pieces, **{new: self.pieces[old] for new, old in ops.items() if old in self.pieces}},
            hosted=self.hosted.union(new for new, old in ops.items() if old in self.hosted),
            ahead={**self.ahead, **{new: self.ahead[old] for new, old in weights.items() if old in self.ahead}},
            gathered_once=self.gathered_once.union(new for new, old in weights.items() if old in self.gathered_once),
        )


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a stage: kind F, R (recomputed forward), B, I or W of a microbatch.

    >>> str(Action.parse("2F0"))
    '2F0'
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def matches(text: str) -> bool:
        return _TEXT.match(text) is not None

    @staticmethod
    def parse(text: str) -> Action:
        found = _TEXT.match(text)
        if found is None:
            raise InputError(
                f"'{text}' is not an action; write stage, kind (F, R, B, I or W) and microbatch without spaces, as 2F0."
            )
        return Action(int(found[1]), found[2], int(found[3]))


def print_schedule(rows: Sequence[Sequence[Action]]) -> str:
    """Return the rows as text, one line a stage."""
    return "\n".join(" ".join(map(str, row)) for row in rows)


def parse_schedule(text: str) -> list[list[Action]]:
    return [[Action.parse(word) for word in line.split()] for line in text.splitlines()]


# Ops, each with the addresses of its parts that are meant, none for all.
Members = tuple[tuple[str, tuple[Address, ...]], ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Parts that `op_order` treats as one: those of some ops (or exact parts of them), of one microbatch and kind.

    Kind F: the forward of ops that take part in training (not of those that only prepare data). B: the mirrors. I and
    W: the halves of split mirrors. R: recomputed ops; of nested regions, those of the outermost. C: the communication
    that moves gradients to updates.
    """

    kind: str
    members: Members
    microbatch: int | None = None
    label: str = ""

    def __str__(self) -> str:
        return self.label

    def __or__(self, other: Group | Groups) -> Groups:
        """Return both as one group to order."""
        return Groups((self,)) | other

    def later(self, iteration: int) -> Group:
        """Return the same parts in another iteration of a step."""
        return replace(self, members=tuple((later(name, iteration), paths) for name, paths in self.members))


class Groups(tuple[Group, ...]):
    """Several groups that are ordered as one: `a | b`."""

    def __or__(self, other: Group | Groups) -> Groups:
        if not isinstance(other, Group | Groups):
            raise InputError(f"a group | {other!r}: only groups of graph.select are joined; select it first.")
        return Groups((*self, *(other if isinstance(other, Groups) else (other,))))

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Order:
    """One group before the other; or, with `turns`, both in alternation."""

    before: Group
    after: Group
    where: str
    turns: bool = False

    def __str__(self) -> str:
        return f"{self.before} {'in turns with' if self.turns else 'before'} {self.after}"

    def later(self, iteration: int) -> Order:
        """Return the same order in another iteration of a step."""
        return replace(self, before=self.before.later(iteration), after=self.after.later(iteration))


def changed(orders: Iterable[Order], change: Callable[[Group], Group]) -> list[Order]:
    """Return orders with other members (and kinds) of their groups. Groups that share members, those of other
    microbatches, share the changed ones.
    """
    known: dict[tuple[Members, str], Group] = {}

    def made(group: Group) -> Group:
        key = group.members, group.kind
        if key not in known:
            known[key] = change(group)
        return replace(group, kind=known[key].kind, members=known[key].members)

    return [replace(order, before=made(order.before), after=made(order.after)) for order in orders]


WIDTH, ROWS, FIRST = 100, 8, 2


@dataclass(frozen=True)
class Row:
    """The work done by a device, by step, and the work that it waits for."""

    device: int
    done: Mapping[int, str]
    waits: str


def timetable(rows: Sequence[Row]) -> list[str]:
    """Return the lines of at most `ROWS` rows, at most `WIDTH` wide, without steps that are empty in all rows.

    In wider tables, steps in the middle are left out.

    >>> rows = Row(0, {0: "F0", 1: "F1"}, "B0 waits for B0 on device 1"), Row(1, {1: "F0"}, "F1 waits")
    >>> print(*timetable(rows), sep="\\n")
      step      0  1
      device 0  F0 F1 ? B0 waits for B0 on device 1
      device 1  .  F0 ? F1 waits
    """
    shown = rows[:ROWS]
    steps = sorted({step for row in shown for step in row.done})
    fewer = [[*steps[:FIRST], ~steps[FIRST], *steps[start:]] for start in range(FIRST + 1, len(steps) + 1)]
    least = [[~steps[0], steps[-1]], [~steps[0]]] if len(steps) > 1 else []
    for columns in (steps, *fewer, *least):
        lines = _lines(shown, columns)
        if max(map(len, lines)) <= WIDTH:
            break
    lines = [line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines]
    more = len(rows) - ROWS
    return lines + ([f"  and {more} more device{'s' * (more > 1)}"] if more > 0 else [])


def _lines(rows: Sequence[Row], steps: Sequence[int]) -> list[str]:
    """Return a line for each row, under a head if there are steps; ~n stands for left-out steps from n on."""
    columns = [{-1: "..." if s < 0 else str(s), **{r.device: _cell(r, s) for r in rows}} for s in steps]
    left = max(len(place_name(row.device)) for row in rows)
    names = {-1: "step"} if steps else {}
    names |= {row.device: place_name(row.device) for row in rows}
    ends = {row.device: f"? {row.waits}" for row in rows}
    lines = []
    for device, name in names.items():
        cells = [f"{c[device]:{max(map(len, c.values()))}}" for c in columns if c[device]]
        lines.append("  " + " ".join([f"{name:{left}} ", *cells, ends.get(device, "")]).rstrip())
    return lines


def _cell(row: Row, step: int) -> str:
    """Return the text of a row at a step, empty after its last."""
    if (~step if step < 0 else step) > max(row.done, default=-1):
        return ""
    return "..." if step < 0 else row.done.get(step, ".")
