"""Recomputed runs of a chain of units, chosen so that a step takes the least time under a memory limit.

The choice is the optimal *persistent* one: a unit keeps its tape from its forward to its backward, or it is in a run
that keeps its first input only. A run is recomputed once, when the backward reaches its last unit. (Herrmann et al.,
"Optimal checkpointing for heterogeneous chains", may recompute a unit several times.)
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from superscaler.plans.lib.shared import layers, stretches
from superscaler.specs.file_errors import reading
from superscaler.verbs import Graph, InputError, Op

# Where more choices than this are left, bytes are rounded up to this fraction of the limit.
SLOTS = 500
Run = tuple[int, int]
# What is kept, the time that is added, and the runs so far.
_Choice = tuple[int, float, tuple[Run, ...]]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of a chain: bytes that its backward reads (`tape`), bytes of its inputs (`read`), the most bytes that its
    backward makes meanwhile; `seconds` of its forward, in any unit. A fixed one is never recomputed.
    """

    seconds: float
    tape: int
    read: int
    most: int = 0
    is_fixed: bool = False


def choose(units: Sequence[Unit], limit: int) -> list[Run] | None:
    """Return the cheapest runs (first unit, unit after the last) that need at most `limit` bytes, None if none do."""
    at: list[list[_Choice]] = [[(0, 0.0, ())], *([] for _ in units)]
    for first, unit in enumerate(units):
        choices = at[first] = _best(at[first], limit)
        at[first + 1] += [(k + unit.tape, s, r) for k, s, r in choices if k + unit.tape + unit.most <= limit]
        tape, seconds, most = unit.read, 0.0, 0
        for end in range(first, len(units)):
            if units[end].is_fixed:
                break
            tape, most = tape + units[end].tape, max(most, units[end].most)
            seconds += units[end].seconds
            found = (c for c in choices if c[0] + tape + most <= limit)
            at[end + 1] += [(k + unit.read, s + seconds, (*r, (first, end + 1))) for k, s, r in found]
    last = _best(at[-1], limit)
    return list(min(last, key=lambda c: c[1])[2]) if last else None


def _best(choices: list[_Choice], limit: int) -> list[_Choice]:
    """Return the Pareto-optimal choices: none keeps less bytes and takes no longer."""
    found: list[_Choice] = []
    for choice in sorted(choices):
        if not found or choice[1] < found[-1][1]:
            found.append(choice)
    if len(found) <= SLOTS:
        return found
    step = -(-limit // SLOTS)
    return _best([(-(-kept // step) * step, *rest) for kept, *rest in found], limit)  # type: ignore[misc]


def least(units: Sequence[Unit]) -> int:
    """Return the least limit that can be met."""
    whole = sum(u.tape + u.read + u.most for u in units)
    return bisect_left(range(whole), True, key=lambda limit: choose(units, limit) is not None)


def cheapest(graph: Graph, limit: float, times: str, parts: int) -> list[Run]:
    """Return the runs of `stretches` that take the least time under a limit of all memory of a device, for a batch in
    so many parts. Raises InputError for a limit that cannot be met, and for a bad file of times.
    """
    seconds = _seconds(times) if times else {}
    lacking = [layer.path for layer in layers(graph) if times and not seconds.get(layer.path, -1.0) >= 0]
    if lacking:
        raise InputError(f"times={times} has no seconds for {lacking[0]}; give a JSON object of seconds by block.")
    units = [_unit(graph, path, ops, seconds, parts) for path, ops in stretches(graph)]
    rest = sum(t.nbytes for t in graph.model.parameters())
    for t in graph.model.trained_parameters():
        # Gradients are added in float32 at least.
        rest += max(t.nbytes, 4 * prod(t.shape)) + prod(t.shape) * graph.model.optimizer.state_bytes(t.dtype)
    runs = choose(units, int(limit) - rest)
    if runs is None:
        raise InputError(
            f"limit={limit:.0f} cannot be met: a device needs up to {rest + least(units)} bytes, {rest} of them for "
            "weights, gradients and optimizer state; raise the limit, or take more devices or microbatches."
        )
    return runs


def _seconds(times: str) -> dict[str, float]:
    with reading(f"times={times}", "give a file that exists", kind="JSON object of seconds by block"):
        return {str(path): float(number) for path, number in json.loads(Path(times).read_text()).items()}


def _unit(graph: Graph, path: str, ops: Sequence[Op], seconds: dict[str, float], parts: int) -> Unit:
    """Return an upper bound of the bytes that a stretch of ops keeps: all inputs and outputs of ops with mirrors that
    may read them.
    """
    tensors, made = graph.model.tensors, {o.tensor for op in ops for o in op.outputs}

    def size(name: str) -> int:
        is_cut = any("batch" in dim for dim in tensors[name].slots)
        return tensors[name].nbytes // (parts if is_cut else 1)

    def total(names: Iterable[str]) -> int:
        return sum(size(name) for name in dict.fromkeys(names) if tensors[name].kind == "activation")

    keeping = [op for op in ops if op.has_mirror and not op.is_sum]
    tape = total(o.tensor for op in keeping for o in (*op.inputs, *op.outputs))
    read = total(o.tensor for op in ops for o in op.inputs if o.tensor not in made)
    # Gradients of what an op reads and makes, or of what leaves the stretch.
    most = max((total(o.tensor for o in (*op.inputs, *op.outputs)) for op in ops), default=0)
    flops = float(sum(op.flops for op in ops))
    return Unit(seconds.get(path, flops) if path else 0.0, tape, read, most, not path)
