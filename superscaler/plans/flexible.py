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

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from superscaler.errors import unknown
from superscaler.verbs import Cluster, Graph, InputError, Mesh, Microbatch, Split, op_assign, op_trans, sprogram

KEYS = ("mesh", "microbatches", "modules")
CUTS = {"axis": str, "parts": int, "sizes": list}


@sprogram
def flexible(graph: Graph, cluster: Cluster, choices: Any = "") -> None:
    given = _table("the table", choices if isinstance(choices, Mapping) else _read(choices), KEYS)
    mesh = cluster.mesh(**_table("mesh", given.get("mesh", {"copies": -1})))
    rows = {pattern: _row(pattern, row, mesh) for pattern, row in _table("modules", given.get("modules")).items()}
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
        own = {split.axis: split.parts for split in splits}
        op_assign(graph, op, mesh if devices is None else Mesh({**own, "copies": -1}, devices))


def _row(pattern: str, row: Any, mesh: Mesh) -> tuple[list[Split], list[int] | None]:
    cuts = dict(_table(pattern, row))
    devices = cuts.pop("devices", None)
    if not isinstance(devices, list | None):
        raise InputError(f"choices: {pattern}: devices is {devices!r}; give a list of numbers.")
    return [_split(f"{pattern}: {factor}", factor, how, mesh, devices) for factor, how in cuts.items()], devices


def _split(what: str, factor: str, how: Any, mesh: Mesh, devices: list[int] | None) -> Split:
    cut = _table(what, next(({key: how} for key, kind in CUTS.items() if isinstance(how, kind)), how), CUTS)
    if not cut or not all(isinstance(cut[key], CUTS[key]) for key in cut):
        raise InputError(f"choices: {what} is {how!r}; give an axis, a number of parts or a list of sizes.")
    axis, sizes = cut.get("axis", ""), cut.get("sizes", [])
    if axis and axis not in mesh.sizes:
        raise InputError(f"choices: {what}: {unknown('axis of the mesh', axis, mesh.sizes)}")
    names, parts = tuple(map(str.strip, factor.split(","))), cut.get("parts") or len(sizes) or mesh.sizes.get(axis, 0)
    return Split(names, parts, tuple(sizes), axis=axis if axis or devices is None else factor)


def _table(what: str, given: Any, known: Collection[str] = ()) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InputError(f"choices: {what} is {given!r}, but it must be a table of names.")
    for key in (key for key in given if known and key not in known):
        raise InputError(f"choices: {what}: {unknown('key', key, known)}")
    return given


def _read(file: str) -> Any:
    try:
        return yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"choices={file} cannot be read: {' '.join(str(error).split())}") from None
