"""Training steps of models, and what must hold of their plans. Those of the library's models are captured once for all
tests, since compiling changes no graph; processes share what is captured by its cache.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import superscaler as ss
from superscaler.frontend.base.training import given_optimizers, read_optimizer
from superscaler.models import build
from superscaler.plan import capture_named
from tests.helpers.ran import equal

OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@cache
def graph_of(spec: str, optimizer: str = "AdamW", lr: float | None = None) -> ss.Graph:
    """Return the training step of a model of the library, which is captured once: with another optimizer, captures
    differ in the kind and the options of their updates only (tests/frontend/test_capture.py).
    """
    if (optimizer, lr) == ("AdamW", None):
        return captured_with(spec, optimizer)
    once = graph_of(spec).captured
    made = optimizer_of(once.call.module, optimizer, lr)
    trained = read_optimizer(once.call.module, made).optimizer
    ops = tuple(replace(op, target=f"ss.{trained.name}") if op.is_update else op for op in once.model.ops)
    model = replace(once.model, ops=ops, optimizer=trained)
    call = replace(once.call, optimizers=given_optimizers(once.call.module, made))
    return ss.Graph(model, replace(once, model=model, call=call))


def captured_with(spec: str, optimizer: str) -> ss.Graph:
    built = build(spec)
    # `equal` and `verify` compare what plans of it do with the module.
    made = optimizer_of(built.module, optimizer)
    return captured_once(spec, built.module, built.args, built.kwargs, made, check=False)


def captured_once(
    name: str, module: nn.Module, args: Any, kwargs: Any, made: torch.optim.Optimizer, **options: Any
) -> ss.Graph:
    """Capture a training step, once for all processes, until the file of its module changes."""
    file = Path(inspect.getfile(type(module)))
    text = f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}"
    return capture_named(text, module, args, kwargs, made, **options)


def optimizer_of(module: nn.Module, name: str, lr: float | None = None) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](module.parameters(), **({"lr": lr} if lr else {}))


def step_of(module: nn.Module, *args: Any, lr: float = 0.1, **options: Any) -> ss.Graph:
    """Return the training step of a module by SGD."""
    options.setdefault("optimizer", torch.optim.SGD(module.parameters(), lr=lr))
    return ss.capture(module, args, **options)


def assert_equal(graph: ss.Graph, plan: Any = "data_parallel", cluster: int = 2) -> dict[str, Any]:
    """Return what is found of a plan, which must be equal to the user's module in float64."""
    found = equal(graph, plan, cluster).found
    assert found["reference"] == "eager", found["note"]
    return found
