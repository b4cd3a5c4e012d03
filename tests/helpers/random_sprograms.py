"""Random sPrograms on small models as users write them: any cut, nesting, placement, microbatching and order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import superscaler as ss
from superscaler.errors import TransformError
from superscaler.ir.grid import UNASSIGNED, Mirror
from superscaler.ir.model import Op
from superscaler.ir.names import first
from superscaler.transform.algorithms import Algorithm
from superscaler.verbs import Cluster, Graph, Parts
from tests.helpers.graphs import captured_once


class Tied(nn.Module):
    """An embedding that is also the head, and one linear that is used three times, each time with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear, self.norm = nn.Embedding(12, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embedding(ids)
        h = h + torch.tanh(self.linear(h))
        h = h + torch.tanh(self.linear(self.norm(h)))
        h = h + self.linear(h)
        return F.cross_entropy(F.linear(h, self.embedding.weight).flatten(0, 1), labels.flatten())


class Convolutions(nn.Module):
    """Two convolutions and a classifier, whose classes have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, stride=2, padding=1)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(F.relu(self.second(F.relu(self.first(x)))).flatten(1))
        return F.cross_entropy(scores, labels, torch.tensor([0.5, 1.0, 2.0, 0.3, 0.7]))


class Towers(nn.Module):
    """Two inputs, two towers, and a contrastive loss that holds the batch twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.scale = nn.Linear(6, 8), nn.Linear(10, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        left, right = F.normalize(self.left(x), dim=-1), torch.tanh(self.right(z))
        similarity = torch.mul(left @ right.t(), self.scale.exp())
        labels = torch.arange(x.shape[0])
        return (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.t(), labels)) / 2


class Attention(nn.Module):
    """Attention written by hand, whose scores hold the sequence twice, and a product of the input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.mix(x)
        h = torch.softmax(h @ h.transpose(-1, -2) / 8**0.5, -1) @ h
        loss: Tensor = F.mse_loss(self.out(h), y) + (x[0] @ x[0].T).mean() * self.out.weight.pow(2).sum()
        return loss


class Auxiliary(nn.Module):
    """A loss that is scaled and added to after the cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gate, self.out = nn.Embedding(12, 8), nn.Linear(8, 6), nn.Linear(6, 12)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        gate = self.gate(self.embedding(ids))
        entropy = F.cross_entropy(self.out(torch.relu(gate)).flatten(0, 1), labels.flatten())
        loss: Tensor = entropy * 0.5 + gate.mean() + 0.1 * gate.square().sum()
        return loss


class Layers(nn.Module):
    """Five equal layers with a skip each, and an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norms = nn.Embedding(12, 8), nn.ModuleList(nn.LayerNorm(8) for _ in range(5))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = h + torch.tanh(layer(norm(h)))
        return F.cross_entropy(F.linear(h, self.embedding.weight).flatten(0, 1), labels.flatten())


class Ring(nn.Module):
    """Attention whose queries, keys and values lie between each other, then one of few queries under a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.ask, self.tell, self.out = (nn.Linear(8, n) for n in (24, 8, 8, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (2, 4, 3)).transpose(1, 2).unbind(-1)
        h = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        q, k = self.ask(h[:, :3]), self.tell(h)
        h = F.scaled_dot_product_attention(q, k, k, torch.ones(3, 6, dtype=torch.bool).tril())
        return F.mse_loss(self.out(h), y)


def _tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 12, (4, 6)), torch.randint(0, 12, (4, 6))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "tied": lambda: (Tied(), _tokens()),
    "convolutions": lambda: (Convolutions(), (torch.randn(8, 3, 8, 8), torch.randint(0, 5, (8,)))),
    "towers": lambda: (Towers(), (torch.randn(8, 6), torch.randn(8, 10))),
    "attention": lambda: (Attention(), (torch.randn(4, 6, 8), torch.randn(4, 6, 8))),
    "auxiliary": lambda: (Auxiliary(), _tokens()),
    "layers": lambda: (Layers(), _tokens()),
    "ring": lambda: (Ring(), (torch.randn(4, 6, 8), torch.randn(4, 3, 8))),
}


@cache
def captured(name: str) -> Graph:
    torch.manual_seed(0)
    module, args = MODELS[name]()
    return captured_once(
        f"small {name}", module, args, {}, torch.optim.AdamW(module.parameters(), lr=1e-2), check=False
    )


class Author:
    """Writes one random sProgram: `kind` free draws the parts of each op apart, layered those of runs of ops."""

    def __init__(self, graph: Graph, draw: random.Random, devices: int) -> None:
        self.graph, self.draw, self.devices = graph, draw, devices
        self.microbatches = 0
        self.mirrors: dict[str, Mirror] = {"copy": "copy", "route": "route"}

    def free(self) -> None:
        density, home = self.draw.choice([0.3, 0.7, 1.0]), self.draw.randrange(self.devices)
        for op in self.graph.forward_ops:
            if self.draw.random() < density:
                self.cut(op, depth=self.draw.choice([1, 2, 3]))
            else:
                ss.op_assign(self.graph, op, home)

    def layered(self) -> None:
        ops = self.graph.forward_ops
        batch = self.graph.factors["batch"].size
        self.microbatches = self.draw.choice([m for m in (0, 0, 2, 4) if not m or batch % m == 0])
        inner = self.draw.sample(range(1, len(ops)), min(4, len(ops) - 1))
        for start, end in pairwise([0, *sorted(inner), len(ops)]):
            chain = self.chain(ops[start:end])
            width = int(np.prod([len(a.sizes) if isinstance(a, ss.Split) else a.parts for a in chain], dtype=int))
            where = [self.draw.randrange(self.devices) for _ in range(width)]
            for op in ops[start:end]:
                parts = self.graph.parts(op)
                for algorithm in [*([ss.Microbatch(self.microbatches)] if self.microbatches else []), *chain]:
                    parts = ss.op_trans(self.graph, parts, algorithm)
                ss.op_assign(self.graph, parts, np.resize(where, parts.cells.size).reshape(parts.cells.shape))

    def chain(self, ops: tuple[Op, ...]) -> list[ss.Split | ss.Replicate]:
        chain: list[ss.Split | ss.Replicate] = []
        for _ in range(self.draw.randint(0, 2)):
            factors = cuttable(self.draw.choice(ops)) - {a.factor for a in chain if isinstance(a, ss.Split)}
            factor = self.draw.choice(sorted(factors)) if factors else ""
            size = self.graph.factors[factor].size if factor else 1
            size //= max(self.microbatches, 1) if factor == "batch" else 1
            chunks = [count for op in ops if (count := chunked(op).get(factor))]
            if size > 1 and self.draw.random() < 0.7:
                sizes = (size // chunks[0],) * chunks[0] if chunks else self.sizes(size)
                chain.append(ss.Split(factor, sizes=sizes))
            else:
                chain.append(ss.Replicate(2, self.mirrors.get(self.draw.choice(["", "copy", "route"]))))
        return chain

    def optimizers(self) -> None:
        share = self.draw.choice([0.0, 0.5, 1.0])
        for op in self.graph.ops:
            if not op.is_forward and self.draw.random() < share:
                self.cut(op, depth=self.draw.choice([0, 1, 1, 2]))

    def cut(self, op: Op, depth: int) -> None:
        """Cut an op into parts placed anywhere, and some of these parts again, apart from their neighbours."""
        parts, extents = self.graph.parts(op), [index.size for index in op.indices]
        for _ in range(self.draw.randint(0, depth)):
            algorithm, extents = self.algorithm(op, extents)
            parts = ss.op_trans(self.graph, parts, algorithm)
        self.place(parts)
        if self.draw.random() < 0.4:
            for part in parts.flat() if parts.cells.ndim else []:
                if self.draw.random() < 0.3:
                    self.place(ss.op_trans(self.graph, part, self.algorithm(op, extents)[0]))

    def algorithm(self, op: Op, extents: list[int]) -> tuple[Algorithm, list[int]]:
        """Return an algorithm for parts of these extents (1 where they differ), and the extents that it leaves."""
        indices = {f: op.find(f) for f in sorted(cuttable(op))}
        able = [(f, i) for f, i in indices.items() if i is not None and extents[i] > 1]
        if not able or self.draw.random() < 0.25:
            parts, mirror = self.draw.randint(1, 3), self.mirrors.get(self.draw.choice(["", "copy", "route"]))
            return ss.Replicate(parts, mirror if op.is_forward else None), extents
        factor, i = self.draw.choice(able)
        left = list(extents)
        if count := chunked(op).get(factor):
            left[i] = 1
            return ss.Split(factor, count), left
        if extents[i] % 2 == 0 and self.draw.random() < 0.5:
            left[i] //= 2
            return ss.Split(factor, 2), left
        left[i] = 1
        return ss.Split(factor, sizes=self.sizes(extents[i])), left

    def sizes(self, extent: int) -> tuple[int, ...]:
        inner = sorted(self.draw.sample(range(1, extent), self.draw.randint(1, min(3, extent - 1))))
        return tuple(b - a for a, b in pairwise([0, *inner, extent]))

    def place(self, parts: Parts) -> None:
        where = [self.draw.randrange(self.devices) for _ in range(parts.cells.size)]
        ss.op_assign(self.graph, parts, np.reshape(where, parts.cells.shape))

    def orders(self) -> None:
        """Order ops, single parts or groups of microbatches, mostly as they could run anyway."""
        ops = self.graph.ops
        for _ in range(self.draw.choice([0, 0, 1, 3])):
            first, second = sorted(self.draw.sample(range(len(ops)), 2))
            if self.draw.random() < 0.1:
                first, second = second, first
            if self.draw.random() < 0.4 and self.microbatches:
                a, b = self.draw.sample(range(self.microbatches), 2)
                trained = [op for op in self.graph.forward_ops if op.has_mirror]
                groups = (self.graph.select(ops=trained, microbatch=a, kind="B") for a in (a, b))
                ss.op_order(self.graph, *groups)
            else:
                one, other = (self.draw.choice(list(self.graph.parts(ops[k]).flat())) for k in (first, second))
                ss.op_order(self.graph, one, other)

    def recompute(self, apart: float) -> None:
        """Compute a few runs of ops, or any ops, again; twins with parts of their own as often as `apart` says."""
        left = list(self.graph.forward_ops)
        for _ in range(self.draw.choice([1, 1, 2, 3])):
            start = self.draw.randrange(len(left))
            run = left[start : start + self.draw.randint(1, len(left))]
            chosen = run if self.draw.random() < 0.7 else [op for op in left if self.draw.random() < 0.4]
            if any(op.has_mirror and not op.from_data for op in chosen) and len(chosen) < len(left):
                # Gradients of blocks are in a region: a new one has all of its ops or none.
                chosen += [
                    op for op in left if op.region in {c.region for c in chosen if c.region} and op not in chosen
                ]
                left = [op for op in left if op not in chosen]
                try:
                    made = ss.op_trans(self.graph, chosen, ss.Recompute())
                except TransformError as error:
                    if "of which one is inside the other" not in str(error):
                        raise
                    continue
                for parts in made:
                    if self.draw.random() < apart:
                        self.cut(parts.op, depth=self.draw.choice([0, 1, 2]))

    def blocks(self) -> None:
        """Before all else, compute attention in blocks of keys, which pass around; that of few queries cannot be."""
        # The gradient of a block comes from readers of the merged result, so copies have none of their own.
        self.mirrors["route"] = "copy"
        for op in [op for op in self.graph.forward_ops if "attention" in op.target]:
            try:
                ss.op_trans(self.graph, op, ss.AttentionBlocks(self.draw.choice([1, 3]), self.draw.random() < 0.5))
            except TransformError as error:
                if "as many queries as keys, because it is causal" not in str(error):
                    raise

    def split(self) -> None:
        """Split the backward of a few runs of ops, and mostly say when gradients of weights are made."""
        ops = [op for op in self.graph.forward_ops if self.draw.random() < 0.9]
        inner = sorted(self.draw.sample(range(1, len(ops)), self.draw.randint(0, 3)))
        for start, end in pairwise([0, *inner, len(ops)]):
            if any(self.graph.twins.get(op.name, op).has_mirror for op in ops[start:end]):
                ss.op_trans(self.graph, ops[start:end], ss.SplitBackward())
        if self.draw.random() < 0.7:
            for turn in range(self.graph.model.iterations):
                own = [op for op in self.graph.forward_ops if op.iteration == turn]
                ss.op_order(self.graph, *(self.graph.select(ops=own, kind=kind) for kind in "IW"))

    def copies(self) -> None:
        """Let some ops read copies, placed on hosts or anywhere, and let some updates run on hosts."""
        for _ in range(self.draw.choice([1, 2])):
            made = {o.tensor for op in self.graph.forward_ops if not op.from_data for o in op.outputs}
            able = [op for op in self.graph.forward_ops if made.intersection(o.tensor for o in op.inputs)]
            readers = [op for op in able if not op.is_copy and self.draw.random() < 0.3]
            for parts in ss.op_trans(self.graph, readers, ss.Insert()) if readers else ():
                if self.draw.random() < 0.3:
                    self.cut(parts.op, depth=self.draw.choice([0, 1, 2]))
                # A copy that is only where it is read changes nothing.
                if self.draw.random() < 0.5 or not self.moves(parts.op):
                    ss.op_assign(self.graph, parts.op, "host")
        # All updates of a weight are in one place.
        updates = [op for op in self.graph.ops if not op.is_forward]
        chosen = {first(op.name) for op in updates if not op.iteration and self.draw.random() < 0.3}
        if chosen:
            ss.op_assign(self.graph, [op for op in updates if first(op.name) in chosen], "host")

    def moves(self, copy: Op) -> bool:
        """Return whether a copy is not only where it is read. One that is not placed is where its first reader is."""
        readers = [self.devices_of(reader) for reader, _ in self.graph.model.uses[copy.outputs[0].tensor]]
        return (self.devices_of(copy) or readers[0]) != set().union(*readers)

    def devices_of(self, op: Op) -> set[int]:
        return {*self.graph.rows(op).device.tolist()} - {UNASSIGNED}

    def tapes(self) -> None:
        """Keep few tapes on the devices."""
        self.graph.offload_tapes(self.draw.choice([1, 1, 2]))

    def stale(self) -> None:
        """Read the weights of some ops one step stale."""
        weights = {op.inputs[0].tensor for op in self.graph.ops if not (op.is_forward or op.is_write)}
        share = self.draw.choice([0.3, 1.0])
        readers = [op for op in self.graph.forward_ops if any(o.tensor in weights for o in op.inputs)]
        chosen = [op for op in readers if self.draw.random() < share]
        if chosen:
            ss.op_trans(self.graph, chosen, ss.Stale())

    def regather(self) -> None:
        """Bring the weights of some ops again for their backward."""
        chosen = [op for op in self.graph.forward_ops if self.draw.random() < 0.6 and not op.region]
        if any(op.has_mirror and not op.from_data for op in chosen):
            ss.op_trans(self.graph, chosen, ss.Regather())

    def kept(self) -> None:
        """Keep some gathered weights until their last reader."""
        self.graph.keep_gathered([name for name in self.graph.updates if self.draw.random() < 0.6])

    def nearby(self) -> None:
        """Let the readers of some weights read copies of them, placed anywhere."""
        for weight in [name for name in self.graph.updates if self.draw.random() < 0.4]:
            readers = [op for op in self.graph.forward_ops if any(o.tensor == weight for o in op.inputs)]
            for copies in ss.op_trans(self.graph, readers, ss.Insert(weight)) if readers else ():
                self.cut(copies.op, depth=self.draw.choice([0, 1, 2]))

    def unroll(self) -> None:
        """Let a step have two iterations."""
        self.graph.unroll(2)

    def early(self) -> None:
        """Update a weight before the backward of an op that comes before all that read it."""
        trained = [op for op in self.graph.forward_ops if self.graph.twins.get(op.name, op).has_mirror]
        updates = [op for op in self.graph.ops if not (op.is_forward or op.is_write)]
        for update in self.draw.sample(updates, self.draw.choice([0, 1])):
            reads = [op for op in trained if any(o.tensor == update.inputs[0].tensor for o in op.inputs)]
            before = trained[: trained.index(reads[0])] if reads else []
            before = [op for op in before if op.iteration == update.iteration]
            if before:
                ss.op_order(self.graph, update, self.graph.select(ops=[self.draw.choice(before)], kind="B"))


def cuttable(op: Op) -> set[str]:
    return {index.factor for index in op.indices if index.mark != "frozen" and not index.follows}


def chunked(op: Op) -> dict[str, int]:
    """Return how many chunks along a factor a block of attention is cut into, if it is cut along it."""
    return {op.indices[i.follows[0]].factor: i.follows[2] for i in op.indices if i.follows}


def random_sprogram(
    seed: int, kind: str, apart: float | None = None, more: Sequence[str] = ()
) -> Callable[[Graph, Cluster], None]:
    """Return a random sProgram; with `apart` one that computes ops again (see `Author.recompute`), with the names of
    `more` methods of `Author` one that does these, in any order.
    """

    def sprogram(graph: Graph, cluster: Cluster) -> None:
        author = Author(graph, random.Random(seed), len(cluster.devices))
        rewrites = [partial(author.recompute, apart)] if apart is not None else []
        rewrites += [getattr(author, name) for name in more if name != "blocks"]
        if "blocks" in more:
            author.blocks()
        author.layered() if kind == "layered" else author.free()
        author.optimizers()
        author.orders()
        for rewrite in author.draw.sample(rewrites, len(rewrites)):
            rewrite()

    return sprogram
