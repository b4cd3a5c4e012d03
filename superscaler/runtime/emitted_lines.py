"""The ops of emitted segments by line: the op of a segment that a frame of the interpreter is at, in loops too."""

import ast
from collections.abc import Iterator, Sequence
from functools import lru_cache
from threading import Lock
from types import FrameType
from typing import NamedTuple

# Python 3.11 cannot make syntax trees in two threads at a time: it counts the depths of both together.
PARSING = Lock()


class Place(NamedTuple):
    """The number of the op of a line; in a loop of `size` ops, that in the first turn. `turns`: the values of the
    loop's variable, in order.
    """

    number: int
    size: int = 0
    variable: str = ""
    turns: range = range(0)


def op_at(frame: FrameType, source: str) -> int | None:
    """Return the number, among the ops of a segment as they run, of the op that a frame is at; None for no op."""
    place = _places(source).get(frame.f_lineno)
    if place is None or not place.turns:
        return place and place.number
    return place.number + place.size * place.turns.index(frame.f_locals[place.variable])


@lru_cache(2)
def _places(source: str) -> dict[int, Place]:
    with PARSING:
        tree = ast.parse(source)
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {line: place for function in functions for line, place in _numbered(function)}


def _numbered(function: ast.FunctionDef) -> Iterator[tuple[int, Place]]:
    """Yield each line of an op of a segment, and its place."""
    number, packed = 0, function.args.vararg.arg if function.args.vararg else None
    for node in _plain(function.body):
        body, name, turns = [node], "", range(0)
        if isinstance(node, ast.For):
            body, name, turns = node.body, ast.unparse(node.target), _turns(node.iter)
        ops = [one for one in _plain(body) if _is_op(one, packed)]
        for k, one in enumerate(ops):
            place = Place(number + k, len(ops), name, turns)
            yield from ((line, place) for line in range(one.lineno, (one.end_lineno or one.lineno) + 1))
        number += len(ops) * len(turns or (0,))


def _plain(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements; a context is replaced by its body."""
    for node in body:
        yield from node.body if isinstance(node, ast.With) else [node]


def _turns(head: ast.expr) -> range:
    """Return the values of `range(a, b)` or `reversed(range(a, b))`."""
    numbers = [node.value for node in ast.walk(head) if isinstance(node, ast.Constant) and isinstance(node.value, int)]
    turns = range(*numbers)
    return turns[::-1] if ast.unparse(head).startswith("reversed") else turns


def _is_op(node: ast.stmt, packed: str | None) -> bool:
    """Return whether a statement runs an op: it does not make a dict, or take inputs of the list `packed`."""
    if not isinstance(node, ast.Assign) or isinstance(node.value, ast.Dict):
        return False
    return not (isinstance(node.value, ast.Subscript) and ast.unparse(node.value.value) == packed)
