"""Random plans on device meshes, even along their axes or with one odd thing, on small models whose sizes 3 divides."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import superscaler as ss
from superscaler.ir.grid import Ints
from superscaler.ir.model import Op
from superscaler.transform.algorithms import Algorithm
from superscaler.verbs import Cluster, Graph, Parts
from tests.helpers.graphs import captured_once

SHAPES = [(3,), (4,), (5,), (6,), (3, 2), (2, 3), (4, 2), (2, 4), (3, 3), (3, 4), (4, 3),
          (3, 2, 2), (2, 3, 2), (2, 2, 3)]  # fmt: skip


class Tied(nn.Module):
    """An embedding that is also the head, one linear that is used twice, dropout, skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear, self.norm = nn.Embedding(24, 12), nn.Linear(12, 12), nn.LayerNorm(12)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = F.dropout(self.embedding(ids), 0.2)
        h = h + torch.tanh(self.linear(h))
        h = h + self.linear(self.norm(h))
        return F.cross_entropy(F.linear(h, self.embedding.weight).flatten(0, 1), labels.flatten())


class Attention(nn.Module):
    """Heads, whose scores hold the sequence twice, then an mlp; the loss has a second addend."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(12, 36, bias=False), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.mix(x).view(b, s, 3, 6, 2).permute(2, 0, 3, 1, 4).unbind(0)
        h = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        h = x + F.dropout(self.out(h.transpose(1, 2).reshape(b, s, 12)), 0.1)
        h = h + self.down(F.relu(self.up(h)))
        loss: Tensor = F.mse_loss(h, y) + 0.1 * self.up.weight.pow(2).sum()
        return loss


class Neighbours(nn.Module):
    """Reads slices, concatenations and running statistics: what is cut one way is read a little beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.cat([h[:, 1:], h[:, :1]], 1) + h
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        return F.mse_loss(self.last(h), y)


def _tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 24, (12, 6)), torch.randint(0, 24, (12, 6))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "tied": lambda: (Tied(), _tokens()),
    "attention": lambda: (Attention(), (torch.randn(12, 6, 12), torch.randn(12, 6, 12))),
    "neighbours": lambda: (Neighbours(), (torch.randn(12, 6, 6), torch.randn(12, 6, 6))),
}


@cache
def captured(name: str) -> Graph:
    torch.manual_seed(0)
    module, args = MODELS[name]()
    return captured_once(f"mesh {name}", module, args, {}, torch.optim.AdamW(module.parameters(), lr=1e-2), check=False)


Layout = list[tuple[int, list[str]]]


class Author:
    """Writes one random plan on a mesh: runs of ops share a layout; `odd` things break it here and there."""

    def __init__(self, graph: Graph, draw: random.Random, shape: tuple[int, ...], world: int, odd: float) -> None:
        self.graph, self.draw, self.odd = graph, draw, odd
        order = draw.sample(range(world), int(np.prod(shape))) if draw.random() < 0.5 else range(int(np.prod(shape)))
        self.mesh: Ints = np.array(order, dtype=np.int64).reshape(shape)
        batches = [f.size for f in graph.factors.values() if f.name == "batch"]
        self.microbatches = draw.choice([0, 0, 2]) if batches else 0
        # What parts of a value and routing replicas read depends on where they are, so they seldom fold.
        self.plain = draw.random() < 0.7
        self.loose = draw.choice([0.0, 0.0, 0.0, 0.5])
        self.outer = draw.choice([0, 0, self.mesh.ndim - 1])

    def write(self) -> None:
        ops = self.graph.forward_ops
        runs = min(self.draw.choice([1, 1, 2, 3, 4]), len(ops))
        bounds = [0, *sorted(self.draw.sample(range(1, len(ops)), runs - 1)), len(ops)]
        stage_axis = self.draw.choice([None, None, *range(self.mesh.ndim)])
        layout = self.layout(ops, self.mesh)
        for number, (start, end) in enumerate(pairwise(bounds)):
            mesh = self.mesh
            if stage_axis is not None and mesh.ndim > 1:
                mesh = mesh.take(number % mesh.shape[stage_axis], stage_axis)
            elif self.draw.random() < 0.15:
                mesh = mesh.take([0], self.draw.randrange(mesh.ndim))
            if self.is_odd() or self.draw.random() < self.loose:
                layout = self.layout(ops[start:end], self.mesh)
            own = [x for x in layout if x[0] < mesh.ndim]
            if self.draw.random() < 0.3:
                self.draw.shuffle(own)
            if self.is_odd():
                mesh = np.roll(mesh, 1, self.draw.randrange(mesh.ndim))
            for op in ops[start:end]:
                self.place(op, own, mesh)
        share = self.draw.choice([0.0, 0.0, 1.0, 1.0, 0.5])
        unread = {op.inputs[0].tensor for op in self.graph.ops} - {o.tensor for op in ops for o in op.inputs}
        for op in self.graph.ops:
            if not op.is_forward and (op.inputs[0].tensor in unread or self.draw.random() < share):
                self.home(op)
        if self.microbatches and self.draw.random() < 0.3:
            trained = [op for op in ops if op.has_mirror]
            ss.op_order(self.graph, *(self.graph.select(ops=trained, microbatch=m, kind="B") for m in (0, 1)))

    def is_odd(self) -> bool:
        return self.draw.random() < self.odd

    def layout(self, ops: tuple[Op, ...], mesh: Ints) -> Layout:
        """Return in nesting order the axes of a mesh, each with the factors to try for it."""
        found = []
        for axis in self.draw.sample(range(mesh.ndim), mesh.ndim) if self.draw.random() < 0.5 else range(mesh.ndim):
            held = sorted({i.factor for op in ops for i in op.indices if i.mark != "frozen"})
            tries = ["batch"] * (axis == 0 and self.draw.random() < 0.7)
            tries += self.draw.sample(held, min(len(held), self.draw.choice([0, 0, 1, 1, 2, 20])))
            found.append((axis, tries))
        return found

    def place(self, op: Op, layout: Layout, mesh: Ints) -> None:
        """Cut an op as its run is cut, and put the parts on the mesh."""
        if self.is_odd() and self.draw.random() < 0.3:
            layout = self.layout((op,), mesh)
        parts, extents = self.graph.parts(op), [i.size for i in op.indices]
        order: list[int] = [axis for axis, _ in layout]
        shape = [mesh.shape[axis] for axis in order]
        steps = [(tries, width) for (_, tries), width in zip(layout, shape, strict=True)]
        if self.microbatches:
            at = self.draw.randrange(len(order) + 1) if self.is_odd() else self.outer
            steps.insert(at, ([], 0))
            shape.insert(at, 1)
        for tries, width in steps:
            algorithm = self.algorithm(op, extents, tries, width) if width else ss.Microbatch(self.microbatches)
            parts, extents = self.cut(op, parts, extents, algorithm)
        devices = np.broadcast_to(mesh.transpose(order).reshape(shape), parts.cells.shape)
        if self.is_odd() and self.draw.random() < 0.1:
            devices = devices.copy()
            devices.reshape(-1)[self.draw.randrange(devices.size)] = self.draw.choice(self.mesh.reshape(-1).tolist())
        ss.op_assign(self.graph, parts, devices)
        if self.is_odd() and self.draw.random() < 0.1:
            self.nest(op, parts, extents)

    def cut(self, op: Op, parts: Parts, extents: list[int], algorithm: Algorithm) -> tuple[Parts, list[int]]:
        axis = algorithm.cut(op, tuple(extents))
        if axis.index is not None:
            size = axis.sizes[0] if len(set(axis.sizes)) == 1 else 1
            extents = [size if i == axis.index else e for i, e in enumerate(extents)]
        return ss.op_trans(self.graph, parts, algorithm), extents

    def algorithm(self, op: Op, extents: list[int], tries: list[str], width: int) -> Algorithm:
        for factor in tries:
            index = op.find(factor)
            # Microbatches come last where they are inside, and need something left.
            left = self.microbatches if factor == "batch" and self.microbatches else 1
            if index is not None and extents[index] % (width * left) == 0:
                return ss.Split(factor, width)
            if index is not None and extents[index] > width and factor != "batch" and self.is_odd():
                inner = sorted(self.draw.sample(range(1, extents[index]), width - 1))
                return ss.Split(factor, sizes=tuple(b - a for a, b in pairwise([0, *inner, extents[index]])))
            if index is None and dict(op.passes).get(factor) is not None and not self.plain:
                return ss.Split(factor, width)
        if self.plain:
            return ss.Replicate(width)
        if op.linear and self.draw.random() < 0.2:
            return ss.ValueSplit(width, self.draw.choice(self.draw.choice(op.linear)))
        mirror = self.draw.choice([None, None, "copy", "route"])
        return ss.Replicate(width, mirror if op.is_forward else None)

    def nest(self, op: Op, parts: Parts, extents: list[int]) -> None:
        """Transform one part, or each in the same way, apart from the others."""
        able = [
            x.factor
            for x, e in zip(op.indices, extents, strict=True)
            if e % 2 == 0 and op.indices[op.find(x.factor) or 0] == x
        ]
        algorithm = ss.Split(self.draw.choice(able), 2) if able else ss.Replicate(2)
        every = list(parts.flat())
        ss.op_trans(self.graph, every if self.draw.random() < 0.5 else [self.draw.choice(every)], algorithm)

    def home(self, op: Op) -> None:
        """Place an optimizer op: split over an axis (ZeRO), whole everywhere, or on a part of the mesh."""
        mesh = self.mesh.take([0], self.draw.randrange(self.mesh.ndim)) if self.is_odd() else self.mesh
        layout = [(axis, [f for f in tries if f != "batch"]) for axis, tries in self.layout((op,), mesh)]
        parts, extents = self.graph.parts(op), [i.size for i in op.indices]
        for axis, tries in layout:
            parts, extents = self.cut(op, parts, extents, self.algorithm(op, extents, tries, mesh.shape[axis]))
        ss.op_assign(self.graph, parts, mesh.transpose([axis for axis, _ in layout]))


def mesh_plan(
    seed: int, world: int, shape: tuple[int, ...], odd: float, iterations: int = 1
) -> Callable[[Graph, Cluster], None]:
    def sprogram(graph: Graph, cluster: Cluster) -> None:
        Author(graph, random.Random(seed), shape, world, odd).write()
        if iterations > 1:
            graph.unroll(iterations)

    return sprogram
