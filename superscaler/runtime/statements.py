"""Statements of emitted code, one at a time: the names that each reads and makes, and its op of the model."""

from __future__ import annotations

import ast
import copy
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from superscaler.ir.model import Op
from superscaler.ir.program import Function

# Python 3.11 cannot make syntax trees in two threads at a time: it counts the depths of both together.
PARSING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Line:
    """A statement of an emitted function, the names that it reads and makes, and the lines within a `with`."""

    function: FunctionType
    statement: Any
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    inner: tuple[Line, ...]

    def run(self, names: dict[str, Any]) -> None:
        """Execute the statement; its results go into `names`."""
        text = "\n" * (self.statement.lineno - 1) + ast.unparse(self.statement)
        exec(compile(text, self.function.__code__.co_filename, "exec"), self.function.__globals__, names)

    def value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        return eval(ast.unparse(node), self.function.__globals__, names)

    @property
    def call(self) -> tuple[str, list[Any]]:
        """Return the method that makes the value and its arguments, in order; '' if no method does."""
        value = getattr(self.statement, "value", None)
        if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
            return "", []
        return value.func.attr, [*value.args, *(k.value for k in value.keywords)]

    def __str__(self) -> str:
        file = Path(self.function.__code__.co_filename).name
        return f"{file}:{self.statement.lineno} ({ast.unparse(self.statement)[:160]})"


def lines_of(function: FunctionType) -> list[Line]:
    """Return the statements of an emitted function, those of loops once for each repetition."""
    with PARSING:
        tree = ast.parse(function.__globals__["__source__"])
    found = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function.__name__)
    return [_line(function, statement) for statement in _straight(found.body, _Unrolled())]


def _straight(statements: Sequence[ast.stmt], unrolled: _Unrolled) -> Iterator[ast.stmt]:
    for statement in statements:
        if isinstance(statement, ast.For):
            assert isinstance(statement.target, ast.Name)
            assert isinstance(statement.iter, ast.Call)
            for turn in range(*map(ast.literal_eval, statement.iter.args)):
                unrolled.names = {statement.target.id: turn}
                yield from _straight(statement.body, unrolled)
            unrolled.names = {}
        elif (found := unrolled.visit(copy.deepcopy(statement))) is not None:
            yield found


class _Unrolled(ast.NodeTransformer):
    """A rewriter of loop statements for one repetition: each element of a dict becomes a name of its own."""

    def __init__(self) -> None:
        # The variable of the loop; per dict, its present elements.
        self.names: dict[str, int] = {}
        self.dicts: dict[str, list[str]] = {}

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        if isinstance(node.value, ast.Dict):
            self.dicts[ast.unparse(node.targets[0])] = []
            return None
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if (found := self._method(node.value, "clear")) is None:
            return self.generic_visit(node)
        targets: list[ast.expr] = [ast.Name(name, ast.Del()) for name in found]
        found.clear()
        return ast.copy_location(ast.Delete(targets), node)

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        elements = list[ast.expr]()
        for one in node.elts:
            some = self._method(one.value, "values") if isinstance(one, ast.Starred) else None
            elements += [one] if some is None else [ast.Name(name, ast.Load()) for name in some]
        return self.generic_visit(ast.Tuple(elements, node.ctx))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(self.names[node.id]) if node.id in self.names else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        found = self.generic_visit(node)
        is_known = not any(isinstance(n, ast.Name | ast.Attribute) for n in ast.walk(found))
        return ast.Constant(eval(ast.unparse(found))) if is_known else found

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant(eval(ast.unparse(self.generic_visit(node))))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not isinstance(node.value, ast.Name) or node.value.id not in self.dicts:
            return self.generic_visit(node)
        there, microbatch = self.dicts[node.value.id], ast.unparse(self.visit(node.slice))
        name = _MICROBATCH.sub(f"_m{microbatch}", node.value.id)
        if isinstance(node.ctx, ast.Store) and name not in there:
            there.append(name)
        if isinstance(node.ctx, ast.Del):
            there.remove(name)
        return ast.Name(name, node.ctx)

    def _method(self, node: ast.expr, method: str) -> list[str] | None:
        """Return the elements of the dict whose method is called."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
            return self.dicts.get(ast.unparse(node.func.value))
        return None


# The suffix of a name of any microbatch, which takes the number of one.
_MICROBATCH = re.compile(r"_m(?=(_p\d+)?(_s\d+)?(_work)?(__\d+)?$)")


def _line(function: FunctionType, statement: ast.stmt) -> Line:
    inner = [_line(function, s) for s in statement.body] if isinstance(statement, ast.With) else []
    is_changed = isinstance(statement, ast.AugAssign)
    reads = (*names_in(statement), *(names_in(statement, ast.Store) if is_changed else ()))
    return Line(function, statement, reads, names_in(statement, ast.Store), tuple(inner))


def names_in(node: ast.AST, context: type[ast.expr_context] = ast.Load) -> tuple[str, ...]:
    """Return the names that a piece of code reads, or makes."""
    return tuple(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context))


def ops_of(function: Function, lines: Sequence[Line], parameters: Sequence[str]) -> dict[str, Op]:
    """Return the op of each line, by the first name that it makes; a product fused into an addition has none."""
    tensors = dict(zip(parameters, function.inputs, strict=False))
    parts: dict[str, set[str]] = {}
    found: dict[str, Op] = {}
    ops = iter(function.ops)
    for line in (line for line in lines if line.writes):
        reads = {tensors[name] for name in line.reads if name in tensors}
        for op in ops:
            given = set().union(*(parts.get(o.tensor, {o.tensor}) for o in op.inputs))
            if reads <= given:
                tensors |= {name: o.tensor for name, o in zip(line.writes, op.outputs, strict=False)}
                found[line.writes[0]] = op
                break
            parts |= {o.tensor: given for o in op.outputs}
    return found
