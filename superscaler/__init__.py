"""SuperScaler parallelizes an unmodified PyTorch training step. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from superscaler.cluster import Cluster
    from superscaler.errors import PlanError
    from superscaler.frontend.register import register
    from superscaler.plan import Plan, capture, compile, load
    from superscaler.runtime.weights import load_weights
    from superscaler.verbs import (
        Graph,
        Microbatch,
        Replicate,
        Split,
        ValueSplit,
        op_assign,
        op_order,
        op_trans,
        sprogram,
    )

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Graph",
    "Microbatch",
    "Plan",
    "PlanError",
    "Replicate",
    "Split",
    "ValueSplit",
    "__version__",
    "capture",
    "compile",
    "load",
    "load_weights",
    "op_assign",
    "op_order",
    "op_trans",
    "register",
    "sprogram",
]

_VERBS = ("Graph", "Microbatch", "Replicate", "Split", "ValueSplit", "op_assign", "op_order", "op_trans", "sprogram")
_HOMES = {
    "Cluster": "superscaler.cluster",
    "PlanError": "superscaler.errors",
    "load_weights": "superscaler.runtime.weights",
    "register": "superscaler.frontend.register",
    **dict.fromkeys(("Plan", "capture", "compile", "load"), "superscaler.plan"),
    **dict.fromkeys(_VERBS, "superscaler.verbs"),
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that neither `import superscaler` nor `--help` waits for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'superscaler' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
