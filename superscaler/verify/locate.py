"""The first tensor of a plan that differs from the model, in the order of execution, against one device."""

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from superscaler.artifact import describe, slots_of
from superscaler.comm.threads import run_ranks
from superscaler.compiler import Compiled
from superscaler.errors import RuntimeFailure
from superscaler.frontend.base.oracle import dense, largest, largest_gap
from superscaler.ir.mask import Box, Mask, extents
from superscaler.ir.model import Model, Op
from superscaler.ir.program import Function, Program, calls
from superscaler.ir.variants import once, unread_twins, without_twins
from superscaler.materialize.local_tensors import task
from superscaler.ops.call import ranges
from superscaler.runtime.executor import take
from superscaler.runtime.load import modules
from superscaler.runtime.step import Step, build_step
from superscaler.schedule.dependencies import Node
from superscaler.schedule.segments import Segment
from superscaler.simulate.recording import callables

TOLERANCE = 1e-9
# Some true gradients are zero (bias of a key projection): errors are relative to at least FLOOR x the largest gradient.
FLOOR = 1e-3

Values = Mapping[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """A segment that ran on a device: kind F with its inputs and outputs, kind B with its given gradients."""

    given: Sequence[Tensor | None]
    made: Sequence[Tensor]


# By device, tag and kind.
Events = dict[tuple[int, str, str], Event]


def first_difference(exact: Compiled, values: Values, batch: Values, timeout: float) -> str:
    """Return one sentence: the first wrong tensor in execution order, its mask, device and op."""
    whole, gradients = model_step(exact.graph.model, {**values, **batch})
    events, failure = _record(exact, values, batch, timeout)
    found = next(_Search(exact, whole, gradients, events).differences(), "")
    return found or failure


def model_step(model: Model, known: Values, step: int = 0) -> tuple[Values, Values]:
    """Return every tensor of one step on whole tensors, in the names of the graph, and their gradients."""
    model, function, reads = _whole(model)
    made = function.outputs
    leaves = {name: known[name].detach().clone().requires_grad_() for name, wants in reads if wants}
    (run,) = callables(Program(model, (function,), ()), step=step)
    outputs = run(*(leaves[n] if wants else known[n] for n, wants in reads))
    found = dict(zip(made, outputs, strict=True))
    wanted = {n: t for n, t in {**found, **leaves}.items() if t.requires_grad}
    grads = torch.autograd.grad(found[model.loss], list(wanted.values()), allow_unused=True) if wanted else ()
    gradients = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(wanted.items(), grads, strict=True)}
    return {**known, **{n: t.detach() for n, t in found.items()}}, gradients


def _whole(model: Model) -> tuple[Model, Function, list[tuple[str, bool]]]:
    """Return a captured model, all its forward ops as one function, and that function's inputs: each tensor, and
    whether it wants a gradient.
    """
    model = once(without_twins(model))
    made = {o.tensor for op in model.forward_ops for o in op.outputs}
    uses = {
        (op.name, k): (o.tensor, op.has_mirror and model.tensors[o.tensor].requires_grad)
        for op in model.forward_ops
        for k, o in enumerate(op.inputs)
        if o.tensor not in made
    }
    reads = {use: n for n, use in enumerate(dict.fromkeys(uses.values()))}
    input_of = {place: reads[use] for place, use in uses.items()}
    boxes = tuple(tuple((0, i.size) for i in op.indices) for op in model.forward_ops)
    return model, Function(model.forward_ops, boxes, tuple(n for n, _ in reads), input_of, tuple(made), ""), list(reads)


def on_threads(
    exact: Compiled, values: Values, run: Callable[[Step], T], timeout: float, device: str = "cpu"
) -> list[T]:
    """Return the results of `run` on the step of each rank, each in a thread; all of them are on one `device`."""
    plan, code = describe(exact), modules(exact.emitted.files)
    return run_ranks(exact.program.world, lambda c: run(build_step(plan, code, values, c)), timeout, device)


def _record(exact: Compiled, values: Values, batch: Values, timeout: float) -> tuple[Events, str]:
    """Return inputs and outputs of each segment by device, tag and kind, and the reason if the step did not end."""
    events: Events = {}

    def run(step: Step) -> None:
        def watch(kind: str, name: str, given: Sequence[Tensor | None], made: Sequence[Tensor]) -> None:
            # Copies, because weights and sums later change in place.
            copies = [None if x is None else x.detach().clone() for x in given]
            events[step.rank, name, kind] = Event(copies, [x.clone() for x in made])

        step.state.watch = watch
        step([batch] * step.iterations if step.iterations > 1 else batch)

    try:
        on_threads(exact, values, run, timeout)
    except RuntimeFailure as error:
        return events, str(error) + _line_of(error, exact.emitted.files)
    return events, ""


def _line_of(error: BaseException, files: Mapping[str, str]) -> str:
    """Return the emitted line where a rank failed."""
    frames = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ else []
    found = [(f.filename, f.lineno) for f in frames if f.filename in files and f.lineno]
    if not found:
        return ""
    name, number = found[-1]
    return f"\n  {name}, line {number}: {files[name].splitlines()[number - 1].strip()}"


class _Search:
    def __init__(self, exact: Compiled, whole: Values, gradients: Values, events: Events) -> None:
        self.exact, self.whole, self.gradients, self.events = exact, whole, gradients, events
        self.flow, self.model = exact.whole_schedule.flow, exact.graph.model
        self.unread = unread_twins(self.model)
        self.floor = {"F": 0.0, "B": FLOOR * max(map(largest, gradients.values()), default=0.0)}
        # Partial values seen so far, by tensor and row.
        self.parts: dict[str, dict[int, Tensor]] = {}

    def differences(self) -> Iterator[str]:
        for node in self.exact.whole_schedule.order:
            segment = self.exact.whole_schedule.segments[node.number] if node.is_run else None
            # The step on one device has only the first iteration.
            if segment is None or node.kind not in ("F", segment.first_backward) or segment.ops[0].iteration:
                continue
            is_forward = node.kind == "F"
            event = self.events.get((node.key[0], str(task(node.number, node.key)), "F" if is_forward else "B"))
            if event is not None:
                yield from (self._forward if is_forward else self._backward)(node, segment, event)

    def _forward(self, node: Node, segment: Segment, event: Event) -> Iterator[str]:
        at = segment.at[node.key]
        for alias, given in zip(segment.aliases, event.given, strict=True):
            box = alias.box(at)
            # A partial input has only some addends here; only the sum of all parts can be compared.
            error = 0.0 if given is None or alias.shares is not None else self._error("F", alias.tensor, box, given)
            if not error <= TOLERANCE:
                op, _ = alias.uses[0]
                yield f"{_shown(alias.tensor, box, node)} arrives {_off(error)} at {_op_text(op)}"
        for output, made in zip(segment.outputs, event.made, strict=True):
            row = int(segment.row_of[output.op.name][at])
            wrong = self._output(output.op, output.slot, row, made)
            if wrong:
                yield self._inner(node, segment, event) or f"{wrong} on {_where(node)}"

    def _output(self, op: Op, j: int, row: int, made: Tensor) -> str:
        """Return the fault of an output of a part; for a value part, once all parts are there."""
        rows, operand = self.flow.rows[op.name], op.outputs[j]
        box = ranges(operand, self.model.tensors[operand.tensor], rows.box(row))
        whole = all(rows.box(row)[i] == (0, op.indices[i].size) for i in op.summed(operand))
        if whole and not rows.shares[row]:
            error = self._error("F", operand.tensor, box, made)
            return "" if error <= TOLERANCE else f"{Mask(operand.tensor, box)} is made {_off(error)} by {_op_text(op)}"
        parts = self.parts.setdefault(operand.tensor, {})
        parts[row] = made
        branch = self.flow.produced(op, j).whole
        if row not in branch or not all(r in parts for r in branch):
            return ""
        tensor = self.model.tensors[operand.tensor]
        total = torch.full(tensor.extents, -math.inf if tensor.largest else 0.0, dtype=made.dtype)
        for r in branch:
            place = ranges(operand, tensor, rows.box(r))
            here, part = total[tuple(slice(lo, hi) for lo, hi in place)], parts[r].reshape(extents(place))
            here.copy_(here.maximum(part) if tensor.largest else here + part)
        everything: Box = tuple((0, e) for e in tensor.extents)
        error = self._error("F", operand.tensor, everything, total.reshape(tensor.shape))
        text = f"{Mask(operand.tensor, everything)} is made {_off(error)} by {_op_text(op)}"
        return "" if error <= TOLERANCE else f"{text}, in {len(branch)} parts, the last"

    def _inner(self, node: Node, segment: Segment, event: Event) -> str:
        """Return the first wrong op inside a segment, on the segment's recorded inputs."""
        code = self.exact.program.devices[node.key[0]].instructions
        ran = next(i for _, i in calls(code) if i.task == task(node.number, node.key))
        function = self.exact.program.functions[ran.function]
        every = [(op, j) for op in function.ops for j in range(len(op.outputs))]
        shown = replace(function, outputs=tuple(op.outputs[j].tensor for op, j in every))
        (run,) = callables(Program(self.model, (shown,), ()))
        made = run(*(x for x in event.given if x is not None))
        at = segment.at[node.key]
        for (op, j), tensor in zip(every, made, strict=True):
            row = int(segment.row_of[op.name][at]) if op.name in segment.row_of else -1
            wrong = self._output(op, j, row, tensor) if row >= 0 else f"{_op_text(op)} runs where it does not belong"
            if wrong:
                return f"{wrong} on {_where(node)}"
        return ""

    def _backward(self, node: Node, segment: Segment, event: Event) -> Iterator[str]:
        at = segment.at[node.key]
        saved = [output for output in segment.outputs if output.has_gradient]
        # An output that the segment itself reads gets only a part of its gradient from outside.
        skipped = {operand.tensor for op in segment.ops for operand in op.inputs}
        for output, given in zip(saved, event.given, strict=True):
            row = int(segment.row_of[output.op.name][at])
            rows = self.flow.rows[output.op.name]
            name = self.model.origin(output.tensor)
            if rows.routes or output.tensor in skipped or name not in self.gradients:
                continue
            box = ranges(output.op.outputs[output.slot], self.model.tensors[name], rows.box(row))
            want = self._take(self.gradients[name], name, box)
            error = self._error("B", output.tensor, box, dense(given, want))
            if not error <= TOLERANCE:
                arrives = f"the gradient of {_shown(output.tensor, box, node)} arrives {_off(error)}"
                yield f"{arrives} at the backward of {_op_text(output.op)}"

    def _take(self, whole: Tensor, tensor: str, box: Box) -> Tensor:
        return take(whole, slots_of(self.model, tensor), box)

    def _error(self, kind: str, tensor: str, box: Box, have: Tensor) -> float:
        """Return the largest difference from the reference, relative to its largest element; 0 if nothing reads it."""
        if kind == "F" and tensor in self.unread:
            return 0.0
        whole = (self.whole if kind == "F" else self.gradients)[self.model.origin(tensor)]
        want = self._take(whole, tensor, box)
        if have.numel() != want.numel():
            return float("inf")
        return largest_gap(have.reshape(want.shape), want) / max(largest(whole), self.floor[kind], 1e-300)


def _shown(tensor: str, box: Box, node: Node) -> str:
    return f"{Mask(tensor, box)} on {_where(node)}"


def _off(error: float) -> str:
    return "wrong in shape" if error == float("inf") else f"off by {error:.2g}"


def _op_text(op: Op) -> str:
    return f"{op.name} ({op.module})" if op.module else op.name


def _where(node: Node) -> str:
    return f"device {node.key[0]}" + (f", microbatch {node.key[1]}" if node.key[1] >= 0 else "")
