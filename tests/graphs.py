"""Training steps of the library's models, captured once for all tests: compiling changes no graph. Processes share what
is captured by its cache.
"""

from __future__ import annotations

from functools import cache, partial

import torch

import superscaler as ss
from superscaler.models import build

OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@cache
def graph_of(spec: str, optimizer: str = "AdamW", lr: float | None = None) -> ss.Graph:
    built = build(spec)
    made = OPTIMIZERS[optimizer](built.module.parameters(), **({"lr": lr} if lr else {}))
    return ss.capture(built.module, built.args, built.kwargs, made, cache=spec)
