"""Origins of values that are not finite, in straight code: the ops of a segment, forward and backward."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superscaler.ir.model import Op
from superscaler.ir.program import Task
from superscaler.runtime.statements import Line, lines_of, names_in, ops_of

# The kinds of origins; the first found of these is reported. A given value may be infinite on purpose, as a mask is. A
# sum over ranks is the origin only if no rank has another one.
FORWARD, BACKWARD, GIVEN, SUM = KINDS = ("forward", "backward", "given", "sum")


@dataclass(frozen=True, slots=True)
class Origin:
    """The step that made non-finite numbers from finite ones, in words; `turned`: the step that made nan from
    infinity.
    """

    kind: str
    number: int
    text: str
    turned: str = ""


class Bad(NamedTuple):
    """A value that is not finite."""

    origin: Origin
    has_nan: bool


def is_bad(x: object) -> bool:
    return isinstance(x, Tensor) and not bool(x.isfinite().all())


def counted(x: Tensor) -> str:
    """Return the number of elements that are not finite, in words.

    >>> counted(torch.tensor([1.0, float("inf"), float("nan")]))
    '2 of 3 elements not finite (1 nan, 1 inf)'
    """
    kinds = {"nan": x.isnan(), "inf": x.isposinf(), "-inf": x.isneginf()}
    found = {name: int(flags.sum()) for name, flags in kinds.items()}
    counts = ", ".join(f"{number:,} {name}" for name, number in found.items() if number)
    return f"{sum(found.values()):,} of {x.numel():,} elements not finite ({counts})"


def ranges_of(values: Mapping[str, Any]) -> str:
    """Return the least and largest element of the first floating-point values, in words."""
    ranges = [
        f"{name} from {x.min().item():.4g} to {x.max().item():.4g}"
        for name, x in values.items()
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel()
    ]
    return ", ".join(ranges[:3])


class Origins:
    """The values of names in straight code, and which of them are not finite."""

    def __init__(self, numbers: Iterator[int], values: dict[str, Any], bad: dict[str, Bad]) -> None:
        self.numbers, self.values, self.bad = numbers, values, bad

    def read(self, names: Iterable[str]) -> list[Bad]:
        return [self.bad[name] for name in names if name in self.bad]

    def mark(
        self, name: str, value: Any, read: Sequence[Bad], where: object, kind: str, describe: Callable[[], str]
    ) -> None:
        """Record whether a value that `where` made is finite. `read`: its inputs that are not finite. Without any, the
        value is an origin of this kind, and `describe` returns its text.
        """
        self.bad.pop(name, None)
        if not is_bad(value):
            return
        has_nan = bool(value.isnan().any())
        # A nan comes from a nan, if any was read.
        nans = [bad.origin for bad in read if bad.has_nan and has_nan]
        if read:
            found = min(nans or [bad.origin for bad in read], key=lambda origin: (origin.kind == GIVEN, origin.number))
        else:
            found = Origin(kind, next(self.numbers), describe())
        if read and has_nan and not nans:
            found = replace(found, turned=f"{where} made nan of that")
        self.bad[name] = Bad(found, has_nan)


class Segment(Origins):
    """A segment that ran, to be run again op by op, and its mirror backwards."""

    def __init__(self, program: Any, line: Line, arguments: list[Any]) -> None:
        self.tag, self.code, inputs, self.flags, self.saved = (line.value(a, program.values) for a in arguments[:5])
        self.parameters = self.code.__code__.co_varnames[: self.code.__code__.co_argcount]
        values = {n: x.detach() for n, x in zip(self.parameters, inputs, strict=False)}
        for name in self._wanted():
            values[name].requires_grad_()
        if len(arguments) > 5:
            values["random"] = program.step.state.random(arguments[5].value)
        read = [program.read(names_in(node)) for node in arguments[2].elts]
        super().__init__(
            program.numbers, values, {n: bad[0] for n, bad in zip(self.parameters, read, strict=False) if bad}
        )
        self.program = program
        self.lines: list[Line] = []
        self.ops: dict[str, Op] = {}
        self.tape: list[tuple[Line, dict[str, Tensor], dict[str, Tensor]]] = []
        # The line that runs the mirror; the gradient given to it, per result; the faults of the gradients it makes.
        self.call: Line | None = None
        self.given: list[tuple[int, Tensor, list[Bad]]] = []
        self.mirrored: list[Bad | None] | None = None

    def _wanted(self) -> list[str]:
        """Return the inputs that want a gradient."""
        return [name for name, flag in zip(self.parameters, self.flags, strict=False) if flag == "1"]

    def _results(self) -> list[str]:
        return [node.id for node in self.lines[-1].statement.value.elts]

    def forward(self) -> list[Bad | None]:
        """Run the segment, once; return the faults of its results."""
        if not self.lines:
            self.lines = lines_of(self.code)
            function = self.program.function(self.tag)
            self.ops = {} if function is None else ops_of(function, self.lines, self.parameters)
            self._run()
        return [self.bad.get(name) for name in self._results()]

    def _run(self) -> None:
        for line in (line for line in self.lines if line.writes):
            leaves = {n: x for n in line.reads if isinstance(x := self.values.get(n), Tensor)}
            leaves = {n: x.detach().requires_grad_(x.requires_grad) for n, x in leaves.items()}
            made = {**self.values, **leaves}
            with torch.enable_grad():
                line.run(made)
            outputs = {n: made[n] for n in line.writes}
            self.tape.append((line, leaves, outputs))
            for name, x in outputs.items():
                self.values[name] = x.detach().requires_grad_(x.requires_grad)
                describe = partial(self._made, line, "the forward of ", x, leaves)
                self.mark(name, x, self.read(line.reads), self._called(line), FORWARD, describe)

    def take(self, call: Line, given: Sequence[ast.expr]) -> None:
        """Record the gradients given to the mirror, from the line that runs it or its first half."""
        values = ((k, node, call.value(node, self.program.values)) for k, node in zip(self.saved, given, strict=True))
        self.call = call
        self.given = [(k, x, self.program.read(names_in(node))) for k, node, x in values if x is not None]

    def backward(self) -> list[Bad | None]:
        """Run the mirror, once; return the faults of the gradients of inputs that want one."""
        if self.mirrored is None:
            self.mirrored = self._mirror()
        return self.mirrored

    def _mirror(self) -> list[Bad | None]:
        self.forward()
        assert self.call is not None
        found, results = Origins(self.numbers, {}, {}), self._results()
        for k, value, read in self.given:
            self._add(found, results[k], value, read, self.call, partial(self.program.made, self.call, value))
        for line, leaves, outputs in reversed(self.tape):
            pairs = [(x, found.values[n]) for n, x in outputs.items() if x.requires_grad and n in found.values]
            wanted = {n: x for n, x in leaves.items() if x.requires_grad}
            if not pairs:
                continue
            made = torch.autograd.grad(
                [x for x, _ in pairs], [*wanted.values()], [g for _, g in pairs], allow_unused=True
            )
            read = found.read(outputs) + self.read(leaves)
            inner = {**{f"d_{n}": found.values.get(n) for n in outputs}, **leaves}
            for name, x in zip(wanted, made, strict=True):
                if x is not None:
                    self._add(found, name, x, read, line, partial(self._made, line, "the backward of ", x, inner))
        return [found.bad.get(name) for name in self._wanted()]

    def _add(
        self, found: Origins, name: str, value: Tensor, read: Sequence[Bad], line: Line, describe: Callable[[], str]
    ) -> None:
        """Add to the gradient of a name."""
        before = found.read([name])
        found.mark(name, value, read, f"the backward of {self._called(line)}", BACKWARD, describe)
        if name in found.values:
            value = found.values[name] + value
            describe = partial(
                self._made, line, f"the sum of the gradients of {name}, after the backward of ", value, {}
            )
            found.mark(
                name, value, before + found.read([name]), f"the sum of the gradients of {name}", BACKWARD, describe
            )
        found.values[name] = value

    def _called(self, line: Line) -> str:
        """Return the op of a line, its module, and the line."""
        op = self.ops.get(line.writes[0]) if line.writes else None
        return f"{op.name}{f' ({op.module})' if op.module else ''} at {line}" if op is not None else str(line)

    def _made(self, line: Line, role: str, value: Tensor, inputs: Mapping[str, Any]) -> str:
        microbatch = Task.parse(self.tag).microbatch
        where = f"{self.program.where}{f', microbatch {microbatch}' if microbatch >= 0 else ''}"
        of = f" of finite ones, {ranges}" if (ranges := ranges_of(inputs)) else ""
        return f"{role}{self._called(line)} {where}, which made {counted(value)}{of}"
