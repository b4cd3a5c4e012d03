"""Chains of calls that torch has one operator for: one pass over memory, one tensor kept for the backward."""

from __future__ import annotations

from functools import cache
from math import pi, sqrt

import torch
from torch import Tensor, fx
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from superscaler.frontend.trace import Trace, dtype_of

_ATEN = torch.ops.aten


def fuse(trace: Trace) -> None:
    """Put gelu in the place of its approximation by tanh, as it is written out in GPT-2 and its like."""
    for match in _matcher().match(trace.graph):
        node = match.returning_nodes[0]
        # In halves each step of the chain is rounded.
        if dtype_of(node).itemsize > 2:
            trace.rewrite(node, _ATEN.gelu, match.placeholder_nodes[0], approximate="tanh")


def _tanh_gelu(x: Tensor) -> Tensor:
    cube = _ATEN.mul.Tensor(_ATEN.pow.Tensor_Scalar(x, 3.0), 0.044715)
    inner = _ATEN.mul.Tensor(_ATEN.add.Tensor(x, cube), sqrt(2.0 / pi))
    tanh = _ATEN.tanh.default(inner)
    return _ATEN.mul.Tensor(_ATEN.mul.Tensor(x, 0.5), _ATEN.add.Tensor(tanh, 1.0))  # type: ignore[no-any-return]


@cache
def _matcher() -> SubgraphMatcher:
    return SubgraphMatcher(fx.symbolic_trace(_tanh_gelu).graph)
