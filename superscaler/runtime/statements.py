"""Emitted code one statement at a time: what each reads and makes, and which op of the model it is."""

from __future__ import annotations

import ast
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from superscaler.ir.graph import Op
from superscaler.ir.program import Function

# Python 3.11 cannot make syntax trees in two threads at a time: it counts the depths of both together.
PARSING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Line:
    """A statement of an emitted function, the names that it reads and makes, and of a `with` the lines within."""

    function: FunctionType
    statement: Any
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    inner: tuple[Line, ...]

    def run(self, names: dict[str, Any]) -> None:
        """Execute the statement; what it makes goes into `names`."""
        text = "\n" * (self.statement.lineno - 1) + ast.unparse(self.statement)
        exec(compile(text, self.function.__code__.co_filename, "exec"), self.function.__globals__, names)

    def value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        return eval(ast.unparse(node), self.function.__globals__, names)

    @property
    def call(self) -> tuple[str, list[Any]]:
        """Return the method that makes the value and its arguments, in order; no name where none does."""
        value = getattr(self.statement, "value", None)
        if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
            return "", []
        return value.func.attr, [*value.args, *(k.value for k in value.keywords)]

    def __str__(self) -> str:
        file = Path(self.function.__code__.co_filename).name
        return f"{file}:{self.statement.lineno} ({ast.unparse(self.statement)[:160]})"


def lines_of(function: FunctionType) -> list[Line]:
    """Return the statements of an emitted function."""
    with PARSING:
        tree = ast.parse(function.__globals__["__source__"])
    found = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function.__name__)
    return [_line(function, statement) for statement in found.body]


def _line(function: FunctionType, statement: ast.stmt) -> Line:
    inner = [_line(function, s) for s in statement.body] if isinstance(statement, ast.With) else []
    is_changed = isinstance(statement, ast.AugAssign)
    reads = (*names_in(statement), *(names_in(statement, ast.Store) if is_changed else ()))
    return Line(function, statement, reads, names_in(statement, ast.Store), tuple(inner))


def names_in(node: ast.AST, context: type[ast.expr_context] = ast.Load) -> tuple[str, ...]:
    """Return the names that a piece of code reads, or makes."""
    return tuple(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context))


def ops_of(function: Function, lines: Sequence[Line], parameters: Sequence[str]) -> dict[str, Op]:
    """Return which op each line is, by the first name that it makes; a product that is part of its addition is not."""
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
