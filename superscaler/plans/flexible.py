"""A plan from a table: what of each module is cut, along which axis of a mesh or on which devices.

    mesh: {dp: 2, tp: 2}                            # all devices; without it they are one axis, copies
    microbatches: 2                                 # without it 1
    modules:                                        # of the patterns that fit a module the last one counts
      "*": {batch: dp}                              # factor: axis
      transformer.h.*.mlp: {batch: dp, h.*.mlp: tp}
      transformer.h.0.attn: {"batch, sequence": dp, h.0.attn.heads: {axis: tp, sizes: [1, 3]}}
      lm_head: {vocabulary: [200, 312], devices: [2, 3]}

A factor is what `Split` takes; of several, joined by commas, one is cut. It is cut along an axis, or into a number of
parts or a list of sizes: these lie on `devices` in order, the first factor outermost, or all at each place of the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from superscaler.errors import unknown
from superscaler.specs.yaml_file import read, table
from superscaler.verbs import Cluster, Graph, InputError, Mesh, Microbatch, Split, op_assign, op_trans, sprogram


@sprogram
def flexible(graph: Graph, cluster: Cluster, choices: Any = "") -> None:
    given = choices if isinstance(choices, Mapping) else read(choices, f"choices={choices}")
    given = table(given, "choices: the table", ("mesh", "microbatches", "modules"))
    mesh = cluster.mesh(**table(given.get("mesh", {"copies": -1}), "choices: mesh"))
    rows = {p: _row(f"choices: {p}", row, mesh) for p, row in table(given.get("modules"), "choices: modules").items()}
    paths = dict.fromkeys(op.module for op in graph.forward_ops)
    fits = {p: [path for path in paths if fnmatchcase(path, p) or fnmatchcase(path, f"{p}.*")] for p in rows}
    for pattern in (pattern for pattern, found in fits.items() if not found):
        raise InputError(f"choices: {unknown('module', pattern, paths)}")
    chosen = {path: rows[pattern] for pattern, found in fits.items() for path in found}
    op_trans(graph, graph.forward_ops, Microbatch(given.get("microbatches", 1)))
    for op in graph.forward_ops:
        splits, devices = chosen.get(op.module, ([], None))
        for split in splits:
            op_trans(graph, op, split)
        own = {split.axis: split.parts for split in splits} | {"copies": -1}
        op_assign(graph, op, mesh if devices is None else Mesh(own, devices))


def _row(where: str, row: Any, mesh: Mesh) -> tuple[list[Split], list[int] | None]:
    cuts = dict(table(row, where))
    devices = cuts.pop("devices", None)
    if not isinstance(devices, list | None):
        raise InputError(f"{where}: devices is {devices!r}; give a list of numbers.")
    return [_split(f"{where}: {factor}", factor, how, mesh, devices) for factor, how in cuts.items()], devices


def _split(where: str, factor: str, how: Any, mesh: Mesh, devices: list[int] | None) -> Split:
    kinds = {"axis": str, "parts": int, "sizes": list}
    cut = table(next(({key: how} for key, kind in kinds.items() if isinstance(how, kind)), how), where, kinds)
    if not cut or not all(isinstance(cut[key], kinds[key]) for key in cut):
        raise InputError(f"{where} is {how!r}; give an axis, a number of parts or a list of sizes.")
    axis, sizes = cut.get("axis", ""), cut.get("sizes", [])
    if axis and axis not in mesh.sizes:
        raise InputError(f"{where}: {unknown('axis of the mesh', axis, mesh.sizes)}")
    names, parts = tuple(map(str.strip, factor.split(","))), cut.get("parts") or len(sizes) or mesh.sizes.get(axis, 0)
    return Split(names, parts, tuple(sizes), axis=axis if axis or devices is None else factor)
