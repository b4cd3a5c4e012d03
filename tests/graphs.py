"""Training steps of the library's models, captured once for all tests: compiling changes no graph. Processes share what
is captured by its cache.
"""

from __future__ import annotations

from functools import cache

import torch

import superscaler as ss
from superscaler.models import build

RATES = {"AdamW": 1e-3, "SGD": 0.1}


@cache
def graph_of(spec: str, optimizer: str = "AdamW", lr: float | None = None) -> ss.Graph:
    built, kind = build(spec), getattr(torch.optim, optimizer)
    made = kind(built.module.parameters(), lr=lr or RATES[optimizer])
    return ss.capture(built.module, built.args, built.kwargs, made, cache=spec)
