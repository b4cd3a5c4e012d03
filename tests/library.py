"""Models of the library as tests of plans capture them."""

from __future__ import annotations

from functools import cache

import torch

import superscaler as ss
from superscaler.models import build


@cache
def captured(spec: str) -> ss.Graph:
    built = build(spec)
    return ss.capture(built.module, built.args, built.kwargs, torch.optim.AdamW(built.module.parameters(), lr=1e-3))
