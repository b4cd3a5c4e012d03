"""Where gradients flow: from the loss back to the trained parameters, through floating-point results only."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch.fx import Node

from superscaler.frontend.trace import Trace, dtype_of, outputs, reads, target_of
from superscaler.ir.graph import TensorKind
from superscaler.ops.table import row_of

_DETACH = "aten.detach.default"


def remove_idle_detaches(trace: Trace, trained: Iterable[Node]) -> None:
    """Drop detaches that have no gradient to stop, or that are on the way to another stop only."""
    stopped = _stopped(trace)
    reached = _forward(trace, trained, stopped)
    for node in trace.calls():
        if target_of(node) == _DETACH and (reads(node)[0] not in reached or node in stopped):
            trace.replace(node, *reads(node))


def _stopped(trace: Trace) -> set[Node]:
    """Return the tensors all of whose readers stop gradients, or give what is stopped."""
    passing, calls = set(trace.results), trace.calls()
    for node in reversed(calls):
        if not row_of(target_of(node)).stops and passing.intersection(outputs(node)):
            passing.update(reads(node))
    return {x for node in calls for x in outputs(node)} - passing


def with_gradient(trace: Trace, trained: Iterable[Node]) -> set[Node]:
    """Return the tensors whose gradient is needed: on a differentiable path from a trained parameter to the loss."""
    reached = _forward(trace, trained)
    needed = reached.intersection([trace.loss])
    for node in reversed(trace.calls()):
        if needed.intersection(outputs(node)) and not row_of(target_of(node)).stops:
            needed.update(reached.intersection(reads(node)))
    return needed


def _forward(trace: Trace, trained: Iterable[Node], removed: Collection[Node] = ()) -> set[Node]:
    """Return what trained parameters reach, through detached tensors too that are `removed`."""
    reached = set(trained)
    for node in trace.calls():
        if (not row_of(target_of(node)).stops or outputs(node)[0] in removed) and reached.intersection(reads(node)):
            reached.update(x for x in outputs(node) if dtype_of(x).is_floating_point)
    return reached


def depends(trace: Trace, kind: TensorKind) -> set[Node]:
    """Return the tensors that depend on leaves of this kind."""
    found = set(trace.leaves(kind))
    for node in trace.calls():
        if found.intersection(reads(node)):
            found.update(outputs(node))
    return found
