"""Floating-point operations of a call, counted by torch on tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from superscaler.frontend.trace import Call, Spec, overload, substitute, without_data

_COUNTED = ("mm", "bmm", "matmul", "linear", "addmm", "baddbmm", "mv", "dot", "conv", "scaled_dot_product", "einsum")
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


class FlopCounter:
    """Counts each operator and shape once; operators that are no contraction count nothing."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def count(self, call: Call, specs: dict[str, Spec]) -> int:
        if call.target == "ss.attention_dropout":
            q, k, v, mask, _, causal, scale = call.args
            options = {"scale": scale, "enable_gqa": specs[q.name].shape[:-2] != specs[k.name].shape[:-2]}
            return self._cached(call, _ATTENTION, (q, k, v, mask, 0.0, causal), options, specs)
        if call.target == "ss.experts":
            (tokens, hidden), (_, chosen), *_, (_, outputs, width) = (specs[name].shape for name in call.reads())
            return 2 * tokens * chosen * width * (2 * hidden + outputs)
        if not call.target.startswith("aten.") or not any(word in call.target for word in _COUNTED):
            return 0
        return self._cached(call, overload(call.target), call.args, call.kwargs, specs)

    def _cached(
        self, call: Call, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], specs: dict[str, Spec]
    ) -> int:
        options = repr(substitute((args, kwargs), lambda _: None))
        key = (call.target, tuple((specs[n].shape, specs[n].dtype) for n in call.reads()), options)
        if key not in self.known:
            self.known[key] = _count(function, args, kwargs, specs)
        return self.known[key]


def _count(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], specs: dict[str, Spec]) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*without_data(args, specs), **without_data(kwargs, specs))
    return int(counter.get_total_flops())
