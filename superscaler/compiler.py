"""The whole pipeline: a captured graph and an sProgram -> one program per device, in the order of the paper."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from superscaler.cluster import Cluster
from superscaler.emit.steps import Emitted, emit
from superscaler.errors import InputError
from superscaler.garbage import without_garbage_collection
from superscaler.ir.graph import Op, PTensor
from superscaler.ir.program import Free, Program
from superscaler.ir.transformed import Graph
from superscaler.materialize.build import materialize
from superscaler.schedule.order import Schedule, complete

SProgram = Callable[[Graph, Cluster], Any]


@dataclass(frozen=True)
class Compiled:
    """Everything that compiling made. `seconds` per phase, whose sum is `total`."""

    graph: Graph
    cluster: Cluster
    schedule: Schedule
    program: Program
    emitted: Emitted
    seconds: Mapping[str, float]

    @property
    def counts(self) -> dict[str, int]:
        rows = self.schedule.edges.rows
        mirrors = sum(len(rows[op.name]) for op in self.graph.ops if op.has_mirror)
        return {
            "parts": sum(len(r) for r in rows.values()) + mirrors,
            "instructions": sum(not isinstance(i, Free) for d in self.program.devices for i in d.instructions),
            "distinct_programs": len(set(self.emitted.programs)),
            "emitted_bytes": sum(len(text) for text in self.emitted.files.values()),
            "bytes_moved": self.program.bytes_moved,
        }


def compile_graph(graph: Graph, sprogram: SProgram, cluster: Cluster) -> Compiled:
    """Transform, place and order a copy of `graph` as `sprogram` says; then complete, materialize and emit it.

    Raises PlanError with the reason when the plan cannot hold.
    """
    start = time.perf_counter()
    with without_garbage_collection():
        planned = graph.copy()
        sprogram(planned, cluster)
        return finish(planned, cluster, {"plan": time.perf_counter() - start})


def finish(planned: Graph, cluster: Cluster, seconds: Mapping[str, float] | None = None) -> Compiled:
    """Compile a graph whose parts are already made, placed and ordered."""
    check_devices(planned, cluster)
    clock = [time.perf_counter()]
    schedule = complete(planned)
    clock.append(time.perf_counter())
    program = materialize(schedule, len(cluster.devices))
    clock.append(time.perf_counter())
    emitted = emit(program)
    clock.append(time.perf_counter())
    phases = dict(seconds or {})
    for name, start, end in zip(("schedule", "materialize", "emit"), clock, clock[1:], strict=False):
        phases[name] = end - start
    phases["total"] = sum(phases.values())
    return Compiled(planned, cluster, schedule, program, emitted, phases)


def check_devices(graph: Graph, cluster: Cluster) -> None:
    """Raise PlanError if a part is placed on a device that the cluster does not have."""
    known = {device.id for device in cluster.devices}
    for op in graph.ops:
        for device in set(graph.rows(op).device.tolist()) - {-1}:
            if device not in known:
                raise InputError(
                    f"{op.name} is assigned to device {device}, but {cluster} has devices 0 to {max(known)}."
                )


FLOATS = ("float32", "bfloat16", "float16")


def retype(graph: Graph, dtype: str, dropout: bool) -> Graph:
    """Return the same plan for a model whose floating-point tensors and casts are all of `dtype`.

    Without `dropout`, all its probabilities are zero, so that the result can be compared.
    """
    model = graph.model
    tensors = {name: _retyped(tensor, dtype) for name, tensor in model.tensors.items()}
    ops = tuple(_retyped_op(op, dtype, dropout) for op in model.ops)
    twin = Graph(replace(model, tensors=tensors, ops=ops), graph.captured)
    twin.grids = {name: grid.copy() for name, grid in graph.grids.items()}
    twin.orders, twin.journal = list(graph.orders), list(graph.journal)
    return twin


def _retyped(tensor: PTensor, dtype: str) -> PTensor:
    return replace(tensor, dtype=dtype) if tensor.dtype in FLOATS else tensor


def _retyped_op(op: Op, dtype: str, dropout: bool) -> Op:
    args, kwargs = op.args, op.kwargs
    if not dropout and op.target == "ss.dropout":
        args = (args[0], 0.0)
    if not dropout and op.target == "ss.attention_dropout":
        args = (*args[:4], 0.0, *args[5:])
    casts = {f"torch.{name}": f"torch.{dtype}" for name in FLOATS}

    def swap(value: Any) -> Any:
        return casts.get(value, value) if isinstance(value, str) else value

    return replace(op, args=tuple(swap(a) for a in args), kwargs=tuple((k, swap(v)) for k, v in kwargs))
