"""Whole plans: compiled with the real verbs and simulated; a step of many microbatches is on the line through two steps
of few.

From three times as many microbatches as stages on, each further one adds as many seconds and bytes.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from superscaler.cluster import Cluster
from superscaler.compiler import compile_graph
from superscaler.ir.graph import Graph
from superscaler.ir.program import Program
from superscaler.planner.kinds import of_batch
from superscaler.planner.space import Choice
from superscaler.plans import resolve
from superscaler.simulate.predict import predict
from superscaler.simulate.prediction import DeviceTimes, Prediction
from superscaler.simulate.system import System

# The microbatches of both steps, for each stage of the pipeline.
_FEW, _MORE = 3, 4
# The step of fewer than so many for each stage is compiled with all of them.
_MANY = 2 * _MORE
# Numbers of the devices, which are not of a step.
_CONSTANT = {"peak_flops", "capacity", "reserved"}
Row = TypeVar("Row", Prediction, DeviceTimes)


def predicted(
    graph: Graph, cluster: Cluster, memory: int | None, system: System, choice: Choice, certified: bool = False
) -> tuple[Prediction, Program | None]:
    """Return the prediction of a plan of a graph's model, and its program; None if the step is on a line. Raises
    PlanError if the model does not allow it. `certified`: see `compile_graph`; all microbatches are compiled.
    """

    def of(microbatches: int) -> tuple[Prediction, Program]:
        own = replace(choice, microbatches=microbatches)
        program = compile_graph(of_batch(graph, own.batch), resolve(own.spec), cluster, certified).program
        return predict(program, cluster, memory, system), program

    if certified or choice.microbatches <= _MANY * choice.pp:
        return of(choice.microbatches)
    few, more = (of(n * choice.pp)[0] for n in (_FEW, _MORE))
    times = (choice.microbatches - _MORE * choice.pp) / ((_MORE - _FEW) * choice.pp)
    rows = {device: row for row in few.devices for device in row.devices}
    devices = tuple(_on_line(rows[row.devices[0]], row, times) for row in more.devices)
    return replace(_on_line(few, more, times), devices=devices), None


def _on_line(few: Row, more: Row, times: float) -> Row:
    """Return a row with the numbers of `more`, and so many times what it has beyond `few`."""

    def line(a: Any, b: Any) -> Any:
        if isinstance(b, dict):
            return {key: line(a.get(key, 0), value) for key, value in b.items()}
        grown = b + max(b - a, 0) * times
        return round(grown) if isinstance(b, int) else grown

    names = {f.name for f in fields(more)} - _CONSTANT
    pairs = {name: (getattr(few, name), getattr(more, name)) for name in names}
    return replace(more, **{name: line(a, b) for name, (a, b) in pairs.items() if isinstance(b, (int, float, dict))})
