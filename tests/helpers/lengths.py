"""Streams of batches of several lengths under a plan in one process, and the same loop of torch in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.compiler import Compiled
from superscaler.frontend.base.oracle import pieces, retyped
from superscaler.recapture.shapes import Shape, graph_at, listed
from superscaler.runtime.load import modules
from superscaler.runtime.shapes.forms import Saved
from superscaler.runtime.step import Step
from superscaler.store.pieces import Ranges, elements, index_of, located
from superscaler.verify.eager import Eager
from tests.helpers.ran import exact, on_ranks

Batch = Mapping[str, Tensor]
FLOOR = 1e-6


class Trained(NamedTuple):
    """The loss and the norm of each step, and whole weights after the last one."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


class Stream(NamedTuple):
    """What a rank trained: the loss and the norm of each step, and pieces of weights; and the sizes that ran."""

    losses: list[float]
    norms: list[float]
    weights: list[tuple[str, Ranges, Tensor]]
    ran: list[dict[str, tuple[int, ...]]]

    def gap(self, other: Trained) -> float:
        """Return the largest difference from a loop of torch, relative to the largest element of each tensor, which is
        at least FLOOR of the largest one: a bias without a gradient stays at rounding.
        """
        floor = FLOOR * max(float(x.abs().max()) for x in other.weights.values())
        numbers = zip((*self.losses, *self.norms), (*other.losses, *other.norms), strict=True)
        gaps = [abs(a - b) / abs(b) for a, b in numbers]
        for name, ranges, piece in self.weights:
            whole = other.weights[name]
            wanted = whole[index_of(map(elements, ranges))].reshape(piece.shape)
            gaps.append(float((piece - wanted).abs().max()) / max(float(whole.abs().max()), floor))
        return max(gaps)


def eager(graph: ss.Graph, batches: Sequence[Batch], clip: float) -> Trained:
    """Return what the module trains on batches as they are, in float64, by torch's own loop."""
    captured, losses, norms = graph.captured, list[float](), list[float]()
    (given,) = captured.call.optimizers
    known = {n: retyped(x.detach(), torch.float64).clone() for n, x in captured.call.module.state_dict().items()}
    weights = {name: known[name].requires_grad_() for _, names in given.groups for name in names}
    optimizer = given.over({name: [x] for name, x in weights.items()})
    assert optimizer is not None
    for batch in batches:
        own = {n: x.detach().clone() for n, x in known.items()}
        reference = Eager(captured, batch).step({**own, **pieces(graph.model, own)}, _no_draw)
        for name, x in weights.items():
            x.grad = reference.gradients[name]
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), clip)))
        assert reference.loss is not None
        losses.append(float(reference.loss))
        optimizer.step()
    return Trained(losses, norms, {name: x.detach() for name, x in weights.items()})


def _no_draw(*_: Any) -> Tensor:
    raise AssertionError("the module draws random numbers")


class Programs:
    """The programs of a plan in float64 for the shape of a capture and for others, to be run on threads."""

    def __init__(self, graph: ss.Graph, plan: str, world: int, shapes: Sequence[Shape]) -> None:
        self.base = exact(graph, plan, world)
        self.others = [exact(graph, plan, world) for graph in _graphs(graph, shapes)]

        self.saved = [_saved(one) for one in self.others]

    def run(self, work: Callable[[Step], Any]) -> list[Any]:
        """Return the results of a function of the step of each rank."""

        def on_rank(step: Step) -> Any:
            step.choice.saved = lambda: self.saved
            return work(step)

        return on_ranks(self.base, on_rank)

    def trained(
        self, batches: Sequence[Batch], clip: float, start: Path | None = None, end: Path | None = None
    ) -> list[Stream]:
        """Return what each rank trains on batches. `start`: checkpoints to go on from; `end`: a folder to save into."""

        def work(step: Step) -> Stream:
            if start is not None:
                step.restore(start)
            found = Stream([], [], [], [])
            for batch in ({n: retyped(x, torch.float64) for n, x in one.items()} for one in batches):
                found.losses.append(float(step(batch, clip=clip)))
                found.norms.append(float(step.last_norm or 0.0))
                found.ran.append({name: shape for name, (shape, _) in step.form.inputs.items()})
            for entry in (e for e in step.state.tables["weights"] if e["trained"]):
                weight = step.state.weights[entry["name"]].detach().clone()
                found.weights.append((*located(step.plan, entry), weight))
            if end is not None:
                step.save(end)
            return found

        return self.run(work)


# By captured graph and shape: plans of a graph share its captures at other shapes.
_AT: dict[tuple[int, str], tuple[object, ss.Graph]] = {}


def _graphs(graph: ss.Graph, shapes: Sequence[Shape]) -> Iterator[ss.Graph]:
    """Yield a graph at other shapes."""
    for one in listed(graph.captured, shapes):
        key = id(graph.captured), repr(one)
        if key not in _AT:
            _AT[key] = graph.captured, graph_at(graph.captured, one)
        yield _AT[key][1]


def _saved(compiled: Compiled) -> Saved:
    values = initial_values(compiled.graph.model, compiled.graph.captured.values)
    wide = {name: retyped(x, torch.float64) for name, x in values.items()}
    plan = json.loads(json.dumps(describe(compiled)))
    return Saved(plan, lambda: (modules(compiled.emitted.files), wide))
