"""Where gradients flow: from the loss back to the trained parameters, through floating-point results only."""

from __future__ import annotations

from collections.abc import Collection

from superscaler.frontend.trace import Call, Trace

_STOPS = frozenset({"aten.detach.default", "ss.count_labels"})


def remove_idle_detaches(trace: Trace, trained: set[str]) -> dict[str, str]:
    """Return the detached tensors that have no gradient to stop, or on the way to another stop only, each with the
    tensor that it equals.
    """
    stopped = _stopped(trace)
    reached = _forward(trace, trained, stopped)
    same: dict[str, str] = {}
    for call in trace.calls:
        source = call.args[0].name if call.target == "aten.detach.default" else ""
        if source and (source not in reached or call.outputs[0] in stopped):
            same[call.outputs[0]] = same.get(source, source)
    return same


def _stopped(trace: Trace) -> set[str]:
    """Return the tensors all of whose readers stop gradients, or give what is stopped."""
    passing = set(trace.results)
    for call in reversed(trace.calls):
        if call.target not in _STOPS and passing.intersection(call.outputs):
            passing.update(call.reads())
    return {name for call in trace.calls for name in call.outputs} - passing


def with_gradient(trace: Trace, trained: set[str]) -> set[str]:
    """Return the tensors whose gradient is needed: on a differentiable path from a trained parameter to the loss."""
    reached = _forward(trace, trained)
    needed = {trace.loss} & reached
    for call in reversed(trace.calls):
        if needed.intersection(call.outputs) and call.target not in _STOPS:
            needed.update(name for name in call.reads() if name in reached)
    return needed


def has_mirror(call: Call, needed: set[str]) -> bool:
    return bool(needed.intersection(call.outputs))


def _forward(trace: Trace, trained: set[str], removed: Collection[str] = ()) -> set[str]:
    """Return what trained parameters reach, through detached tensors too that are `removed`."""
    reached = set(trained)
    for call in trace.calls:
        if (call.target not in _STOPS or call.outputs[0] in removed) and reached.intersection(call.reads()):
            reached.update(name for name in call.outputs if trace.specs[name].dtype.is_floating_point)
    return reached


def depends(trace: Trace, kinds: tuple[str, ...]) -> set[str]:
    """Return the tensors that depend on leaves of these kinds."""
    found = {name for name, kind in trace.kinds.items() if kind in kinds}
    for call in trace.calls:
        if found.intersection(call.reads()):
            found.update(call.outputs)
    return found
