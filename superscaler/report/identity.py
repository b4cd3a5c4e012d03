"""The identity of a plan: hashes of its sources and of its code. Equal sources give equal plans."""

import hashlib
import json
import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import superscaler
from superscaler.bits import bytes_of
from superscaler.cluster import Cluster
from superscaler.compiler import Compiled
from superscaler.ir.graph import Graph
from superscaler.ir.grid import Grid
from superscaler.ir.model import Model
from superscaler.ir.text.model import print_model
from superscaler.ir.variants import without_sources, without_twins
from superscaler.store.cache import sources
from superscaler.store.folder import digest
from superscaler.store.operators import homes


def manifest(compiled: Compiled, values: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the identity of a plan: the entries of `origin`, and the hash of the code."""
    code = digest(json.dumps(dict(compiled.emitted.files), sort_keys=True))
    return {**origin(compiled.graph, compiled.cluster, values), "code": code}


def origin(graph: Graph, cluster: Cluster, values: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the sources of a plan: hashes of the model, the transformed and placed graph, the cluster, the users'
    files that register operators, the weights `values`, our own sources, and versions. Equal sources give equal plans.
    """
    model = without_sources(without_twins(graph.model))
    return {
        "model": digest(print_model(model)),
        "plan": digest(_plan_text(graph)),
        "cluster": digest(f"{cluster} {cluster.device_kind} {cluster.links}"),
        "operators": operators_hash(homes(own_operators(model))),
        "weights": hash_values(kept_values(graph, values)),
        "sources": sources(),
        "superscaler": superscaler.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def own_operators(model: Model) -> set[str]:
    """Return the operators that are neither torch's nor ours."""
    return {op.target for op in model.ops if op.target.split(".")[0] not in ("aten", "ss")}


def operators_hash(operators: Mapping[str, Any]) -> str:
    """Return the hash of what registers operators, wherever that is."""
    found = {target: home and [home["module"], home["sha256"]] for target, home in operators.items()}
    return digest(json.dumps(found, sort_keys=True))


def kept_values(graph: Graph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that a plan directory holds: the model's tensors, and the rest of the module's state."""
    fixed = graph.captured.fixed if graph.captured else {}
    return {**{name: value for name, value in values.items() if name in graph.model.tensors}, **fixed}


def hash_values(values: Mapping[str, Tensor]) -> str:
    """Return the sha256 of tensors: their names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name, value in sorted(values.items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(bytes_of(value.cpu()).numpy().data)
    return found.hexdigest()


def _plan_text(graph: Graph) -> str:
    """Return the journal without file positions, then the facts that it lacks: cuts, devices, members of orders."""
    lines = [f"{e.verb} {e.op} {e.detail}" for e in graph.journal]
    lines += [f"{op.name} {_grid_text(graph.grids[op.name])}" for op in graph.model.ops]
    return "\n".join([*lines, *(f"{o.before!r} {'turns' if o.turns else 'before'} {o.after!r}" for o in graph.orders)])


def _grid_text(grid: Grid) -> str:
    children = {cell: _grid_text(child) for cell, child in sorted(grid.children.items())}
    return f"{grid.axes} {grid.distinct.tolist()} {children}"
