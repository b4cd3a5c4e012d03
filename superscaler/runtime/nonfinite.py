"""The origin of numbers that are not finite: a failed step is run again, one statement at a time.

A value that is not finite has its origin in the values that its statement read; if these are all finite, the statement
itself is the origin. Only values that reach the loss, a gradient or another rank are asked for their origin, so a mask
of -inf is harmless.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from superscaler.comm.communicator import PeerLost
from superscaler.errors import RuntimeFailure
from superscaler.ir.model_text import parse_model
from superscaler.ir.program import Forward, Function
from superscaler.ir.program_text import parse_program
from superscaler.runtime.origins import BACKWARD, FORWARD, GIVEN, KINDS, SUM, Origin, Origins, Segment, counted, is_bad
from superscaler.runtime.statements import PARSING, Line, lines_of, names_in
from superscaler.store.files import MODEL_FILE, PROGRAM_FILE
from superscaler.store.save import TrainingStep, share

# Calls that send values to other ranks or sum over ranks, calls that copy, and calls that end a step.
_COPIES = ("to_host", "to_device")
_STARTS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "reduce",
    "rd_gather",
    "broadcast",
    "send",
    "recv",
)
_ENDS = ("update", "write", "loss")


def run(step: TrainingStep, function: FunctionType) -> Tensor:
    """Run an iteration and return its loss.

    Raises RuntimeFailure, with nothing changed, if the loss or a gradient is not finite: on the rank with the origin,
    and as PeerLost on the others. With a loss scale only the loss is checked, because an update by gradients that are
    not finite is skipped.
    """
    rank, communicator = step.state, step.state.communicator
    rank.held = []
    try:
        loss: Tensor = function(rank)
    finally:
        held, rank.held = rank.held, None
    gradients = [] if rank.scaler else [pair for update, pairs in held for pair in pairs if update == rank.update]
    wrong = "" if loss.isfinite() else f"its loss is {float(loss)}"
    wrong = wrong or share(communicator, next((f"the gradient of {_name(step, n)}" for n in _wrong(gradients)), ""))
    if not wrong:
        for update, pairs in held:
            update(pairs)
        return loss
    rank.steps -= 1
    origin = StraightCode(step, function).origin()
    message = f"step {rank.steps + 1} is not finite ({wrong})"
    for kind in KINDS:
        mine = _text(origin) if origin is not None and origin.kind == kind else ""
        if first := share(communicator, mine):
            kind_of_error = RuntimeFailure if first == mine else PeerLost
            raise kind_of_error(f"{message}, which comes from {first}. No weight was changed by it.")
    if not loss.isfinite():
        raise RuntimeFailure(f"{message}: all its parts are finite, and their sum is too large for {loss.dtype}.")
    raise RuntimeFailure(f"{message}, but was finite when it was run again: it does not compute the same twice.")


def _wrong(gradients: Sequence[tuple[str, Tensor]]) -> list[str]:
    found = [g.isfinite().all() for _, g in gradients]
    finite = torch.stack([one.to(found[0].device) for one in found]).tolist() if found else []
    return [name for (name, _), is_finite in zip(gradients, finite, strict=True) if not is_finite]


def _name(step: TrainingStep, weight: str) -> str:
    """Return the user's name of a weight at rest."""
    tensor = next(w["tensor"] for w in step.state.tables["weights"] if w["name"] == weight)
    return str(step.plan["tensors"].get(tensor, {"name": tensor})["name"])


def _text(origin: Origin) -> str:
    return origin.text + (f"; {origin.turned}" if origin.turned else "")


class StraightCode(Origins):
    """The program of a rank, run up to its update, with the origins of all values that leave it."""

    def __init__(self, step: TrainingStep, function: FunctionType) -> None:
        super().__init__(count(), {"rt": step.state}, {})
        self.step, self.lines, self.where = step, lines_of(function), f"on rank {step.rank}"
        self.left: list[Origin] = []
        self.segments: dict[str, Segment] = {}
        # The line that started each operation, by the name of its handle.
        self.started: dict[str, Line] = {}
        self._functions: dict[str, Function] | None = None

    def origin(self) -> Origin | None:
        """Return the first origin of a value that reached the loss, a gradient or another rank."""
        for line in self.lines:
            self._run(line)
        return min(self.left, key=lambda origin: (KINDS.index(origin.kind), origin.number), default=None)

    def function(self, tag: str) -> Function | None:
        """Return the ops of a segment by the name of its task; None for a step of no plan directory."""
        if self._functions is None and self.step.directory is not None:
            with PARSING:
                model = parse_model((self.step.directory / MODEL_FILE).read_text())
                program = parse_program((self.step.directory / PROGRAM_FILE).read_text(), model)
            code = program.devices[self.step.rank].instructions
            self._functions = {str(i.task): program.functions[i.function] for i in code if isinstance(i, Forward)}
        return (self._functions or {}).get(tag)

    def _run(self, line: Line) -> None:
        method, arguments = line.call
        if line.inner:
            with line.value(line.statement.items[0].context_expr, self.values):
                for inner in line.inner:
                    self._run(inner)
            return
        is_start = method.removesuffix("_bucket") in _STARTS
        if is_start or method in _ENDS:
            self.left += [bad.origin for bad in self.read(line.reads)]
        if method in _ENDS:
            return
        if method == "forward":
            self.segments[arguments[0].value] = Segment(self, line, arguments)
        line.run(self.values)
        if is_start or method in _COPIES:
            self._start(line, arguments[0])
        elif method in ("forward", "backward", "backward_input", "backward_weight"):
            self._segment(line, method, arguments)
        else:
            self._plain(line, method, arguments)

    def _start(self, line: Line, sources: ast.expr) -> None:
        each = sources.elts if isinstance(sources, ast.Tuple) else [sources] * len(line.writes)
        for work, source in zip(line.writes, each, strict=True):
            self.started[work] = line
            read = self.read(names_in(source))
            self.bad |= {work: read[0]} if read else {}

    def _segment(self, line: Line, method: str, arguments: list[Any]) -> None:
        tag = arguments[0].value
        segment = self.segments.pop(tag) if method in ("backward", "backward_weight") else self.segments[tag]
        if method in ("backward", "backward_input"):
            segment.take(line, arguments[1].elts)
        if not any(is_bad(self.values[name]) for name in line.writes):
            return
        inner = segment.forward() if method == "forward" else segment.backward()
        if method in ("backward_input", "backward_weight"):
            wanted = arguments[2 if method == "backward_input" else 1].value
            inner = [found for found, is_wanted in zip(inner, wanted, strict=True) if is_wanted == "1"]
        for name, found in zip(line.writes, inner, strict=True):
            value = self.values[name]
            describe = partial(self.made, line, value)
            self.mark(
                name, value, [found] if found else [], line, FORWARD if method == "forward" else BACKWARD, describe
            )

    def _plain(self, line: Line, method: str, arguments: list[Any]) -> None:
        work = next((self.started[name] for name in line.reads if name in self.started), None)
        for name in line.writes:
            value, kind, describe = self.values[name], BACKWARD, partial(self.made, line, self.values[name])
            if method == "weight":
                kind, describe = GIVEN, partial(self._weight, arguments[0].value, value)
            elif method == "input":
                kind, describe = GIVEN, partial(self._input, arguments[0].value, value)
            elif work is not None:
                kind, describe = SUM, partial(self._sum, work, value)
            self.mark(name, value, self.read(line.reads), work or line, kind, describe)

    def made(self, line: Line, value: Tensor) -> str:
        return f"{line} {self.where}, which made {counted(value)} of finite ones"

    def _weight(self, name: str, value: Tensor) -> str:
        text = f"weight {_name(self.step, name)} {self.where}, which has {counted(value)} before the step"
        return f"{text}: it was loaded so, or an update before made it so"

    def _input(self, number: int, value: Tensor) -> str:
        return f"input {self.step.state.tables['inputs'][number][0]} {self.where}, which has {counted(value)}"

    def _sum(self, line: Line, value: Tensor) -> str:
        return f"{line} {self.where}, which gave {counted(value)}: all that is summed is finite, and the sum too large"
