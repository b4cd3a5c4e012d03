"""Small plans of every kind of sProgram, in float64: what single mutations are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import superscaler as ss
from superscaler.compiler import Compiled, finish
from superscaler.models import build
from superscaler.verify.oracles import retype
from tests.helpers.graphs import captured_once
from tests.helpers.random_sprograms import MODELS, random_sprogram

Captured = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]
SProgram = Callable[[ss.Graph, ss.Cluster], Any] | str


class Noise(nn.Module):
    """A layer with noise, whose numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second((h + torch.rand_like(h)).tanh()).square().mean()


class Net(nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square().mean()


class Normed(nn.Module):
    """A convolution, the statistics of the whole batch, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.norm(self.conv(x))).mean((2, 3))), y)


class Residual(nn.Module):
    """A row-parallel product, its bias and a skip, whose sum may stay in value parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        loss = F.cross_entropy(self.head(self.second(hidden) + x), labels, ignore_index=2)
        return loss * 0.5 + 0.1 * hidden.pow(2).mean()


def named(name: str) -> Callable[[], Captured]:
    def make() -> Captured:
        built = build(name)
        return built.module, tuple(built.args), dict(built.kwargs)

    return make


def mixture() -> Captured:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(
        **sizes, num_hidden_layers=1, intermediate_size=6, num_local_experts=4, output_router_logits=True
    )
    ids = torch.randint(0, 16, (4, 5))
    return MixtralForCausalLM(config), (), {"input_ids": ids, "labels": ids}


# Sprograms.


def by_tokens_and_experts(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Cut the experts where an op has them, else the batch."""
    weight = next(t for t in graph.model.tensors.values() if t.name.endswith("experts.gate_up_proj"))
    for op in graph.ops:
        factor = next((f for f in (weight.slots[0][-1], "batch") if op.find(f) is not None), "batch")
        ss.op_assign(graph, ss.op_trans(graph, op, ss.Split(factor, 2)), cluster.devices)


def in_value_parts(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Cut the hidden index; additions after the sum over it read value parts."""
    hidden = next(i.factor for op in graph.ops if op.module == "second" for i in op.indices if i.mark == "summed")
    made: set[str] = set()
    for op in graph.forward_ops:
        adds = op.target == "aten.add.Tensor" and op.module in ("second", "") and len(op.outputs[0].slots) == 2
        passes = adds and any(o.tensor in made for o in op.inputs)
        made |= {o.tensor for o in op.outputs if passes or (op.module == "second" and op.find(hidden) is not None)}
        algorithm = ss.ValueSplit(2) if passes else ss.Split(hidden, 2)
        ss.op_assign(graph, ss.op_trans(graph, op, algorithm), cluster.devices)


def uneven(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Cut the sequence unevenly where an op has it, else the vocabulary, else the batch."""
    for op in graph.ops:
        factor = next((f for f in ("sequence", "vocabulary", "batch") if op.find(f) is not None), "batch")
        size = graph.factors[factor].size
        algorithm = ss.Split(factor, sizes=(size // 4, size // 2, size - size // 4 - size // 2))
        ss.op_assign(graph, ss.op_trans(graph, op, algorithm), cluster.devices)


def with_updates_cut(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """ZeRO-1: data parallelism with the updates, and so the weights at rest, cut over the devices."""
    count = len(cluster.devices)
    for op in graph.ops:
        factor = "batch" if op.is_forward else op.indices[0].factor
        ss.op_assign(graph, ss.op_trans(graph, op, ss.Split(factor, count)), cluster.devices)


def with_updates_interleaved(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Data parallelism with two slices of each weight at rest on a device, that are updated as early as they can be."""
    for op in graph.ops:
        places = cluster.devices if op.is_forward else 2 * list(cluster.devices)
        factor = "batch" if op.is_forward else op.indices[0].factor
        ss.op_assign(graph, ss.op_trans(graph, op, ss.Split(factor, len(places))), places)
    for before, block in pairwise(graph.blocks):
        updates = [op for op in graph.ops if not op.is_forward and op.inputs[0].tensor.startswith(block.path)]
        ss.op_order(graph, updates, graph.select(module=before.path, kind="B"))


def routed(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Replicate every other op, and let its mirrors route: each reads what its own readers send."""
    for number, op in enumerate(graph.forward_ops):
        algorithm = ss.Replicate(2, "route") if number % 2 else ss.Split("batch", 2)
        ss.op_assign(graph, ss.op_trans(graph, op, algorithm), cluster.devices)


class Small(NamedTuple):
    """A plan: its model, its sProgram, on how many devices."""

    model: Callable[[], Captured]
    plan: SProgram
    world: int


MLP = named("mlp:hidden=8,inputs=6,classes=4,batch=8")
GPT = "gpt2:size=tiny,hidden=8,heads=2,seq=4,vocab=12,batch=4"


def of_random(model: str, seed: int, kind: str) -> Small:
    return Small(lambda: (*MODELS[model](), {}), random_sprogram(seed, kind), 4)


PLANS: dict[str, Small] = {
    "data": Small(MLP, "data_parallel", 2),
    "tensor": Small(named(f"{GPT},layers=1"), "tensor_parallel", 2),
    "pipeline": Small(named("mlp:hidden=8,inputs=6,classes=4,batch=6"), "pipeline_1f1b:stages=2,microbatches=3", 2),
    "hybrid": Small(named(f"{GPT},layers=2"), "hybrid:dp=2,tp=2,pp=2,microbatches=2", 8),
    "folded": Small(MLP, "hybrid:dp=4,tp=2", 8),
    "tied": Small(named(f"{GPT},layers=1"), "pipeline_1f1b:stages=2,microbatches=2", 2),
    "norm": Small(lambda: (Normed(), (torch.randn(4, 2, 3, 3), torch.randint(0, 3, (4,))), {}), "data_parallel", 2),
    "experts": Small(mixture, by_tokens_and_experts, 2),
    "values": Small(lambda: (Residual(), (torch.randn(4, 8), torch.tensor([2, 0, 1, 4])), {}), in_value_parts, 2),
    "uneven": Small(named(f"{GPT},layers=1"), uneven, 3),
    "slices": Small(named(f"{GPT},layers=2"), "seq1f1b:microbatches=1,slices=2", 2),
    "zero": Small(MLP, with_updates_cut, 2),
    "early": Small(MLP, with_updates_interleaved, 2),
    "routed": Small(lambda: (*MODELS["tied"](), {}), routed, 2),
    # Messages, broadcasts, all_to_all, paths of two steps, value parts: what random sprograms make of small models.
    "broadcasts": of_random("tied", 15, "free"),
    "exchanges": of_random("attention", 24, "free"),
    "noise": Small(lambda: (Noise(), (torch.randn(4, 6),), {}), "data_parallel", 2),
}


@cache
def exact(name: str) -> Compiled:
    return exact_of(PLANS[name])


def exact_of(small: Small) -> Compiled:
    """Return a plan in float64, dropout off."""
    torch.manual_seed(0)
    module, args, kwargs = small.model()
    halves = [list(module.parameters())[::2], list(module.parameters())[1::2]]
    groups = [{"params": params, "lr": lr} for params, lr in zip(halves, (1e-2, 1e-3), strict=True)]
    graph = captured_once("small plans", module, args, kwargs, torch.optim.AdamW(groups), check=False)
    plan = ss.compile(graph, small.plan, f"local:{small.world}")
    return finish(retype(plan.compiled.graph, "float64"), plan.compiled.cluster)
