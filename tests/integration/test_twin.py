"""What verify runs in float64 does the same as what trains: the same work, collectives, buckets and messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import superscaler as ss
from superscaler.compiler import Compiled, finish
from superscaler.ir.communication import bytes_moved
from superscaler.ir.text.model import parse_model, print_model
from superscaler.verify.oracles import retype
from tests.helpers.ran import Around

# What depends on how wide an element is.
WIDTHS = ("dtype", "bytes", "wide", "given")


def layers() -> nn.Module:
    """Return blocks of four products, each weight of 8 MiB: in float32 three of them fill a bucket, in float64 one."""
    sizes = (1024, 2048, 1024, 2048, 1024)
    blocks = (nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))) for _ in range(2))

    def forward(m: Around, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = x + layer(x)
        return x.square().mean()

    return Around(forward, layers=nn.ModuleList(blocks))


def small() -> nn.Module:
    """Return products with weights of 4 MiB: in float32 two gradients are worth a sum, in float64 one."""

    def forward(m: Around, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x).tanh()
        return x.square().mean()

    return Around(forward, layers=nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(6)))


def two() -> nn.Module:
    first, second = nn.Linear(8, 128, bias=False), nn.Linear(128, 64, bias=False)
    return Around(lambda m, x: m.second(m.first(x)).square().sum(), first=first, second=second)


def to_copies(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """The first product leaves value parts on one server, which four copies on another one read."""
    for op in graph.forward_ops:
        summed = next((i.factor for i in op.indices if i.mark == "summed"), None)
        is_first = op.module == "first"
        cut = ss.Split(summed, 4) if is_first and summed else ss.Replicate(4)
        ss.op_assign(graph, ss.op_trans(graph, op, cut), [0, 1, 2, 3] if is_first else [4, 5, 6, 7])


def on_meta(make: Callable[[], nn.Module], size: tuple[int, int], plan: Any, cluster: str) -> Compiled:
    with torch.device("meta"):
        module, x = make(), torch.randn(size)
    graph = ss.capture(module, (x,), optimizer=torch.optim.SGD(module.parameters()), check=False)
    return ss.compile(graph, plan, cluster).compiled


CASES: dict[str, Callable[[], Compiled]] = {
    "buckets": lambda: on_meta(layers, (8, 1024), "data_parallel", "local:2"),
    "segments": lambda: on_meta(small, (8, 1024), "data_parallel", "local:2"),
    "path": lambda: on_meta(two, (64, 8), to_copies, "v100:2x4"),
}


def told(compiled: Compiled) -> list[Any]:
    """Return all instructions without what depends on how wide an element is."""
    return [
        (device.rank, type(i).__name__, *((f.name, getattr(i, f.name)) for f in fields(i) if f.name not in WIDTHS))
        for device in compiled.program.devices
        for i in device.instructions
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_copy_in_float64_exchanges_what_the_model_does(name: str) -> None:
    compiled = CASES[name]()
    exact = finish(retype(compiled.graph, "float64"), compiled.cluster)
    assert told(exact) == told(compiled)
    assert bytes_moved(exact.program) == 2 * bytes_moved(compiled.program)
    model = exact.graph.model
    assert parse_model(print_model(model)).tensors == model.tensors
