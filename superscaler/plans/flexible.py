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
    rows = {pattern: dict(_table(pattern, row)) for pattern, row in _table("modules", given.get("modules")).items()}
    places = {pattern: row.pop("devices", None) for pattern, row in rows.items()}
    for pattern, devices in places.items():
        if not isinstance(devices, list | None):
            raise InputError(f"choices: {pattern}: devices is {devices!r}; give a list of numbers.")
    splits = {p: [_split(p, *cut, mesh, places[p]) for cut in row.items()] for p, row in rows.items()}
    paths = dict.fromkeys(op.module for op in graph.forward_ops)
    chosen = {path: pattern for pattern in rows for path in paths if _fits(path, pattern)}
    for pattern in (p for p in rows if not any(_fits(path, p) for path in paths)):
        raise InputError(f"choices: {unknown('module', pattern, paths)}")
    op_trans(graph, graph.forward_ops, Microbatch(given.get("microbatches", 1)))
    for op in graph.forward_ops:
        own, devices = splits.get(chosen.get(op.module, ""), []), places.get(chosen.get(op.module, ""))
        for split in own:
            op_trans(graph, op, split)
        apart = {split.axis: split.parts for split in own}
        op_assign(graph, op, mesh if devices is None else Mesh({**apart, "copies": -1}, devices))


def _fits(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _split(pattern: str, factor: str, how: Any, mesh: Mesh, devices: Any) -> Split:
    what = f"{pattern}: {factor}"
    cut = _table(what, next(({key: how} for key, kind in CUTS.items() if isinstance(how, kind)), how), CUTS)
    axis, sizes = cut.get("axis", ""), cut.get("sizes", [])
    if axis and axis not in mesh.sizes:
        raise InputError(f"choices: {what}: {unknown('axis of the mesh', axis, mesh.sizes)}")
    if not cut or not all(isinstance(cut[key], CUTS[key]) for key in cut) or not isinstance(devices, list | None):
        raise InputError(
            f"choices: {what} is {how!r}; give an axis, a number of parts or a list of sizes, and devices."
        )
    names, parts = tuple(map(str.strip, factor.split(","))), cut.get("parts") or len(sizes) or mesh.sizes[axis]
    name = names if names[1:] else names[0]
    return Split(name, parts, tuple(sizes), axis=axis if axis or devices is None else factor)


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
