"""Turns of a loop: alike but for names, tasks, messages and places, which move."""

from __future__ import annotations

from collections.abc import Iterator

from superscaler.ir.mask import extents
from superscaler.ir.program import KEYS, KINDS, ROLES, Instruction, Role, Task, Value

# The fields of each kind with names, or a task.
_NAMED = {kind: [n for n, role in ROLES[kind].items() if role in KEYS] for kind in KINDS}
# Those of places, which move: the start of a forward, which is that of its task, and boxes, whose extents stay.
_BOXES = ("box", "ranges")
_PLACES = ("at", *_BOXES)
_STILL = {
    kind: [
        name
        for name, role in ROLES[kind].items()
        if role not in (Role.MESSAGE, Role.NOTE) and name not in (*_NAMED[kind], *_PLACES)
    ]
    for kind in KINDS
}


def is_alike(one: Instruction, two: Instruction) -> bool:
    """Return whether two turns of an instruction may be in one loop: they differ at most in what moves, by any step."""
    if type(one) is not type(two) or one.outlives or not is_still(one, two):
        return False
    boxes = [(getattr(one, name), getattr(two, name)) for name in _BOXES if name in ROLES[type(one)]]
    is_sized = all(extents(a) == extents(b) for a, b in boxes)
    return is_sized and [key is None for key in keys(one)] == [key is None for key in keys(two)]


def is_still(one: Instruction, two: Instruction) -> bool:
    """Return whether the fields of two turns that move in no loop are equal."""
    return all(getattr(one, name) == getattr(two, name) for name in _STILL[type(one)])


def keys(i: Instruction) -> Iterator[Value | Task | None]:
    """Yield all names in an instruction, gaps included, and its task."""
    for name in _NAMED[type(i)]:
        value = getattr(i, name)
        yield from (value,) if isinstance(value, Value | Task) else value
