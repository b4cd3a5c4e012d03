"""Optimizers as torch computes them: parameter groups, momentum, frozen parameters, under every placement."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from superscaler.cluster import Cluster
from superscaler.models import build
from superscaler.plan import capture, compile
from superscaler.plans import resolve


def two_groups(module: nn.Module) -> list[dict[str, object]]:
    parameters = list(module.parameters())
    flat = [p for p in parameters if p.dim() < 2]
    return [{"params": flat, "weight_decay": 0.0, "lr": 3e-3}, {"params": [p for p in parameters if p.dim() > 1]}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, amsgrad=True),
    "groups": lambda m: torch.optim.AdamW(two_groups(m), lr=1e-3, weight_decay=0.1),
    "frozen": lambda m: torch.optim.AdamW([p for n, p in m.named_parameters() if ".h.0." not in n], lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("spec", "world"), [("data_parallel", 2), ("tensor_parallel", 2), ("pipeline_1f1b:stages=2,microbatches=2", 2)]
)
def test_a_step_equals_torch(name: str, spec: str, world: int) -> None:
    built = build("gpt2:size=tiny")
    if name == "frozen":
        for key, parameter in built.module.named_parameters():
            parameter.requires_grad_(".h.0." not in key)
    graph = capture(built.module, built.args, built.kwargs, OPTIMIZERS[name](built.module))
    result = compile(graph, resolve(spec), Cluster.local(world)).verify()
    assert result["equal"], result
    updated = {op.inputs[0].tensor for op in graph.ops if not op.is_forward}
    assert any(".h.0." in tensor for tensor in updated) == (name != "frozen")
