"""The menu: what a block of each kind, and what is outside of the blocks, takes on the devices of a stage.

The model with one block of each run, and with one more, is compiled with the real verbs and simulated. Differences are
the seconds and the bytes of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import NamedTuple

from superscaler.cluster import Cluster
from superscaler.compiler import compile_graph
from superscaler.errors import PlanError
from superscaler.ir.graph import Graph
from superscaler.ir.model import Model, width
from superscaler.ir.program import Program, Value, calls
from superscaler.planner.kinds import reduced, runs
from superscaler.planner.space import Choice, Use
from superscaler.plans import resolve
from superscaler.plans.lib.shared import batch_of, inner_blocks
from superscaler.simulate.predict import simulate
from superscaler.simulate.segments import Segments

# Of each compiled model: the second one adds its gradients to those of the first.
_MICROBATCHES = 2
# The rows of the microbatches that are measured; costs of others are on the line through these.
_FEW, _MANY = 1, 4


class Cost(NamedTuple):
    """Of a block, or of what is outside of the blocks, on a device: the seconds of a microbatch, `update`: those of a
    step's update; bytes of `weights`, of their `gradients`, of the `optimizer`'s state, and `kept` of a microbatch
    until its backward.
    """

    seconds: float
    update: float
    weights: float
    gradients: float
    optimizer: float
    kept: float

    def __sub__(self, other: Cost) -> Cost:
        """Return the difference to a smaller model, never below 0."""
        return Cost(*(max(a - b, 0.0) for a, b in zip(self, other, strict=True)))

    def plus(self, other: Cost, times: float) -> Cost:
        """Return the cost with so many others."""
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))

    def towards(self, other: Cost, share: float) -> Cost:
        """Return the cost at a share of the way to another one."""
        return Cost(*(max(a + share * (b - a), 0.0) for a, b in zip(self, other, strict=True)))


class Costs(NamedTuple):
    """The costs of a use: of a block of each run, of the rest, and the bytes beside them at the peak."""

    runs: tuple[Cost, ...]
    rest: Cost
    beside: float


class Menu:
    """The costs of uses, each measured when it is first asked for."""

    def __init__(self, graph: Graph, cluster: Cluster, torch_compile: bool = False) -> None:
        self.graph, self.cluster, self.torch_compile = graph, cluster, torch_compile
        self.runs = runs(graph)
        self._known: dict[Use, Costs | None] = {}

    @property
    def batch(self) -> int:
        """Return the rows of the batch."""
        return batch_of(self.graph)

    def sizes(self) -> list[int]:
        """Return the number of blocks, as `blocks=` of a pipeline counts them, in each block of the runs."""
        paths = [block.path for block in inner_blocks(self.graph)]
        blocks = chain.from_iterable(self.runs)
        return [sum(path == b.path or path.startswith(f"{b.path}.") for path in paths) for b in blocks]

    def costs(self, use: Use) -> Costs | None:
        """Return the costs of a use; None if the model does not allow it."""
        if use not in self._known:
            self._known[use] = self._measured(use) if use.rows in (_FEW, _MANY) else self._between(use)
        return self._known[use]

    def _between(self, use: Use) -> Costs | None:
        few, many = (self.costs(use._replace(rows=rows)) for rows in (_FEW, _MANY))
        if few is None or many is None:
            return None
        share = (use.rows - _FEW) / (_MANY - _FEW)
        blocks = tuple(a.towards(b, share) for a, b in zip(few.runs, many.runs, strict=True))
        beside = few.beside + share * (many.beside - few.beside)
        return Costs(blocks, few.rest.towards(many.rest, share), beside)

    def _measured(self, use: Use) -> Costs | None:
        count = range(len(self.runs))
        try:
            base, beside = self._cost(use, [1 for _ in count])
            # A block without an equal one is a part of the rest.
            larger = [
                self._cost(use, [1 + (n == k) for k in count])[0] if len(self.runs[n]) > 1 else base for n in count
            ]
        except PlanError:
            return None
        blocks = tuple(cost - base for cost in larger)
        rest = base
        for cost in blocks:
            rest -= cost
        return Costs(blocks, rest, beside)

    def _cost(self, use: Use, counts: Sequence[int]) -> tuple[Cost, float]:
        """Return the cost of a small model, and its bytes beside weights and activations at the peak."""
        graph = reduced(self.graph, self.runs, counts, use.rows * _MICROBATCHES)
        devices = type(self.cluster.devices)([*self.cluster.devices][: use.tp])
        cluster = replace(self.cluster, devices=devices, devices_per_server=use.tp)
        spec = Choice(1, use.tp, 1, use.rows, _MICROBATCHES, use.layout, use.recompute, loss=use.loss).spec
        program = compile_graph(graph, resolve(spec), cluster).program
        p = simulate(program, cluster, None, self.torch_compile, among=len(self.cluster.devices)).prediction
        update, memory = p.mean("optimizer"), p.fullest.memory
        weights, kept = memory["weights"] + memory["gathered"], kept_bytes(program, self.torch_compile)
        beside = sum(memory[part] for part in ("values", "communication", "temporary", "overhead"))
        # What is recomputed for a backward exists at the peak, too.
        beside += max(memory["activations"] - kept, 0)
        gradients = weights * _wide(graph.model)
        return Cost(
            (p.step_seconds - update) / _MICROBATCHES, update, weights, gradients, memory["optimizer"], kept
        ), beside


def _wide(model: Model) -> float:
    """Return the bytes of gradients for each byte of weights."""
    weights = [t for t in model.parameters() if t.requires_grad]
    wide = sum(prod(t.shape) * width(t.wide_dtype) for t in weights)
    return wide / max(sum(t.nbytes for t in model.parameters()), 1)


def kept_bytes(program: Program, torch_compile: bool = False) -> int:
    """Return the bytes that the first device keeps of its first microbatch from its forward to its backward."""
    segments, device = Segments(program, True, torch_compile), program.devices[0]
    tasks, weights = segments.tasks(device), {weight.name for weight in device.weights}
    named, others = dict[Value, int](), 0
    for i in (i for _, i in calls(device.instructions[:]) if i.task.microbatch == 0):
        is_again = any(op.origin for op in program.functions[i.function].ops)
        segment = tasks[i.task]
        ends = (*enumerate(i.inputs), *zip(segment.results, i.outputs, strict=True))
        # What is recomputed is kept for a moment only, but for its inputs.
        held = {n for n, _ in enumerate(i.inputs)} if is_again else segment.tapes[0].held
        named |= {name: segment.sizes[n] for n, name in ends if n in held and name not in weights}
        others += 0 if is_again else segment.tapes[0].bytes
    return others + sum(named.values())
