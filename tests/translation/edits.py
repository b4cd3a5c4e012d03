"""Edits of emitted code that change what it does: drawn ones, by kinds."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from itertools import pairwise

Change = Callable[[random.Random], object]


def drawn(text: str, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Yield edits of a text, each with its kind; less than `count` where it has fewer places."""
    tree, draw = ast.parse(text), random.Random(seed)
    places = [(kind, n) for kind, find in KINDS.items() for n in range(sum(1 for _ in find(tree)))]
    # As many of each kind, as far as there are.
    draw.shuffle(places)
    seen = dict.fromkeys(KINDS, 0)
    order = []
    for kind, n in places:
        order.append((seen[kind], kind, n))
        seen[kind] += 1
    for _, kind, n in sorted(order)[:count]:
        other = ast.parse(text)
        for at, change in enumerate(KINDS[kind](other)):
            if at == n:
                change(draw)
                break
        yield kind, ast.unparse(ast.fix_missing_locations(other))


def numbers(tree: ast.AST) -> Iterator[Change]:
    """Another index, shape, table entry, or end of a loop; not the sizes of lists that are made."""
    made = {id(x) for node in _made(tree) for x in ast.walk(node)}

    def change(node: ast.Constant) -> Change:
        # Behind the end of a list, nothing changes.
        return lambda draw: setattr(node, "value", node.value - 1 if id(node) in ends else node.value + 1)

    for node in _bodies(tree):
        ends = {id(x) for s in ast.walk(node) if isinstance(s, ast.Slice) and s.upper for x in ast.walk(s.upper)}
        for x in ast.walk(node):
            if isinstance(x, ast.Constant) and type(x.value) is int and id(x) not in made:
                yield change(x)


def elements(tree: ast.AST) -> Iterator[Change]:
    """A tuple of a call without one of its elements."""
    for call in _calls(tree):
        for node in (x for a in [*call.args, *(k.value for k in call.keywords)] for x in ast.walk(a)):
            if isinstance(node, ast.Tuple | ast.List) and node.elts:
                yield lambda draw, own=node: own.elts.pop(draw.randrange(len(own.elts)))


def orders(tree: ast.AST) -> Iterator[Change]:
    """Two statements that call, one after the other, in the other order; waits have none."""
    for body in _lists(tree):
        for n, (one, two) in enumerate(pairwise(body)):
            if _is_call(one) and _is_call(two) and not (_is_wait(one) and _is_wait(two)):
                yield lambda draw, body=body, n=n: body.__setitem__(slice(n, n + 2), [body[n + 1], body[n]])


def deletions(tree: ast.AST) -> Iterator[Change]:
    """A `del` left out, unless nothing but the end of the step follows."""
    for body in _lists(tree):
        for n, node in enumerate(body[:-1]):
            if isinstance(node, ast.Delete) and not isinstance(body[n + 1], ast.Return):
                yield lambda draw, body=body, n=n: body.pop(n)


def statements(tree: ast.AST) -> Iterator[Change]:
    """A call left out, or repeated."""
    for body in _lists(tree):
        for n, node in enumerate(body):
            if _is_call(node):
                yield lambda draw, body=body, n=n: body.pop(n) if len(body) > 1 else body.insert(n, body[n])
                yield lambda draw, body=body, n=n: body.insert(n, body[n])


def names(tree: ast.AST) -> Iterator[Change]:
    """A value in the place of another one."""
    for function in _functions(tree):
        loads = [x for c in _calls(function) for x in ast.walk(c) if isinstance(x, ast.Name) and x.id not in _KNOWN]
        known = sorted({x.id for x in loads})
        for x in loads:
            if others := [name for name in known if name != x.id]:
                yield lambda draw, x=x, others=others: setattr(x, "id", draw.choice(others))


def words(tree: ast.AST) -> Iterator[Change]:
    """A call without one of its keywords."""
    for call in _calls(tree):
        for n in range(len(call.keywords)):
            yield lambda draw, call=call, n=n: call.keywords.pop(n)


KINDS: dict[str, Callable[[ast.AST], Iterator[Change]]] = {
    "number": numbers, "element": elements, "order": orders, "del": deletions, "statement": statements,
    "name": names, "word": words,
}  # fmt: skip
_KNOWN = {"rt", "segments", "torch", "F", "functional", "range", "reversed", "m", "l", "float"}


def _functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _bodies(tree: ast.AST) -> Iterator[ast.AST]:
    return (node for function in _functions(tree) for node in function.body)


def _lists(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for function in _functions(tree):
        for node in ast.walk(function):
            if isinstance(body := getattr(node, "body", None), list):
                yield body


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of functions, but for those that make lists or name weights."""
    made = {id(x) for node in _made(tree) for x in ast.walk(node)}
    for node in _bodies(tree):
        for x in ast.walk(node):
            if isinstance(x, ast.Call) and id(x) not in made and not _is_range(x):
                yield x


def _is_range(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in ("range", "reversed")


def _made(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what makes lists of sums, or names weights: more of them change nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.DictComp) or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("sums", "weights_of", "weight")
        ):
            yield node


def _is_call(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign | ast.Expr | ast.AugAssign):
        return False
    made = {id(x) for m in _made(node) for x in ast.walk(m)}
    calls = [x for x in ast.walk(node) if isinstance(x, ast.Call | ast.BinOp) and id(x) not in made]
    return bool(calls)


def _is_wait(node: ast.stmt) -> bool:
    return any(isinstance(x, ast.Attribute) and x.attr in ("wait", "wait_all") for x in ast.walk(node))
