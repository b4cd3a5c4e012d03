"""SuperScaler parallelizes an unmodified PyTorch training step. Names are loaded when they are first used."""

from __future__ import annotations

import importlib

# As in `typing`, which takes longer to import than all that is here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    # As themselves: what a package has for others, to those who read types.
    from superscaler.cluster import Cluster as Cluster
    from superscaler.errors import PlanError as PlanError
    from superscaler.frontend.users.register import register as register
    from superscaler.plan import Plan as Plan
    from superscaler.plan import capture as capture
    from superscaler.plan import compile as compile
    from superscaler.plan import load as load
    from superscaler.planner.search import search as search
    from superscaler.plans.lib.products import along_axis as along_axis
    from superscaler.plans.lib.schedules import schedule_1f1b as schedule_1f1b
    from superscaler.plans.lib.shared import decompose_losses as decompose_losses
    from superscaler.plans.lib.shared import tensor_splits as tensor_splits
    from superscaler.plans.lib.stages import stages as stages
    from superscaler.simulate.system import System as System
    from superscaler.store.tensors import load_weights as load_weights
    from superscaler.train.feed import batches as batches
    from superscaler.verbs import Action as Action
    from superscaler.verbs import Algorithm as Algorithm
    from superscaler.verbs import AttentionBlocks as AttentionBlocks
    from superscaler.verbs import Axis as Axis
    from superscaler.verbs import Block as Block
    from superscaler.verbs import Decompose as Decompose
    from superscaler.verbs import Device as Device
    from superscaler.verbs import Dispatch as Dispatch
    from superscaler.verbs import Graph as Graph
    from superscaler.verbs import Group as Group
    from superscaler.verbs import InputError as InputError
    from superscaler.verbs import Insert as Insert
    from superscaler.verbs import Mesh as Mesh
    from superscaler.verbs import Microbatch as Microbatch
    from superscaler.verbs import Op as Op
    from superscaler.verbs import Parts as Parts
    from superscaler.verbs import Recompute as Recompute
    from superscaler.verbs import Regather as Regather
    from superscaler.verbs import Replicate as Replicate
    from superscaler.verbs import Rewrite as Rewrite
    from superscaler.verbs import Save as Save
    from superscaler.verbs import Shard as Shard
    from superscaler.verbs import Split as Split
    from superscaler.verbs import SplitBackward as SplitBackward
    from superscaler.verbs import Stage as Stage
    from superscaler.verbs import Stale as Stale
    from superscaler.verbs import ValueSplit as ValueSplit
    from superscaler.verbs import op_assign as op_assign
    from superscaler.verbs import op_order as op_order
    from superscaler.verbs import op_trans as op_trans
    from superscaler.verbs import order as order
    from superscaler.verbs import place as place
    from superscaler.verbs import sprogram as sprogram

__version__ = "0.1.0"

_VERBS = (
    "Algorithm", "AttentionBlocks", "Axis", "Block", "Decompose", "Device", "Dispatch", "Graph", "Group", "InputError",
    "Insert", "Mesh", "Microbatch", "Op", "Parts", "Recompute", "Regather", "Replicate", "Rewrite", "Save", "Shard",
    "Split", "SplitBackward", "Stage", "Stale", "ValueSplit", "Action", "op_assign", "op_order", "op_trans", "order",
    "place", "sprogram",
)  # fmt: skip
_HOMES = {
    "Cluster": "superscaler.cluster",
    "PlanError": "superscaler.errors",
    "batches": "superscaler.train.feed",
    "along_axis": "superscaler.plans.lib.products",
    "load_weights": "superscaler.store.tensors",
    "search": "superscaler.planner.search",
    "System": "superscaler.simulate.system",
    "register": "superscaler.frontend.users.register",
    "schedule_1f1b": "superscaler.plans.lib.schedules",
    **dict.fromkeys(("Plan", "capture", "compile", "load"), "superscaler.plan"),
    "stages": "superscaler.plans.lib.stages",
    **dict.fromkeys(("decompose_losses", "tensor_splits"), "superscaler.plans.lib.shared"),
    **dict.fromkeys(_VERBS, "superscaler.verbs"),
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that neither `import superscaler` nor `--help` waits for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'superscaler' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
