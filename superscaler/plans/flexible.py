"""A plan from a table: the cuts of each module, along an axis of a mesh or on devices of its own.

    mesh: {dp: 2, tp: 2}                            # all devices; without it they are one axis, copies
    microbatches: 2                                 # without it 1
    modules:                                        # the last pattern that fits a module counts
      "*": {batch: dp}                              # factor: axis
      transformer.h.*.mlp: {batch: dp, h.*.mlp: tp}
      transformer.h.0.attn: {"batch, sequence": dp, h.0.attn.heads: {axis: tp, sizes: [1, 3]}}
      lm_head: {vocabulary: [200, 312], devices: [2, 3]}

A factor is named as for `Split`; of several, joined by commas, one is cut. It is cut along an axis, or into a number of
parts or a list of sizes: these lie on `devices` in order, the first factor outermost, or all at each place of the mesh.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from superscaler.errors import unknown
from superscaler.specs.yaml_file import of_kind, read, table
from superscaler.verbs import Cluster, Graph, InputError, Mesh, Microbatch, Split, op_assign, op_trans, sprogram


@sprogram
def flexible(graph: Graph, cluster: Cluster, choices: Any = "") -> None:
    if choices == "":
        raise InputError("flexible needs a table; give choices=FILE.yaml, as superscaler plans flexible shows.")
    known = {"mesh": {"copies": -1}, "microbatches": 1, "modules": {}}
    shape, microbatches, modules = table(read(choices, f"choices={choices}"), "choices: the table", known).values()
    mesh = cluster.mesh(**shape)
    chosen = {op.module: (list[Split](), mesh) for op in graph.forward_ops}
    for pattern, row in modules.items():
        fitting = [path for path in chosen if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")]
        if not fitting:
            raise InputError(f"choices: {unknown('module', pattern, chosen)}")
        chosen |= dict.fromkeys(fitting, _row(f"choices: {pattern}", row, mesh))
    op_trans(graph, graph.forward_ops, Microbatch(microbatches))
    for op in graph.forward_ops:
        splits, place = chosen[op.module]
        for split in splits:
            op_trans(graph, op, split)
        op_assign(graph, op, place)


def _row(where: str, row: Any, mesh: Mesh) -> tuple[list[Split], Mesh]:
    cuts = table(row, where)
    devices = of_kind([], cuts.pop("devices", []), f"{where}: devices")
    splits = [_split(f"{where}: {f}", f, how, mesh, f if devices else "") for f, how in cuts.items()]
    own = {split.axis: split.parts for split in splits} | {"copies": -1}
    return splits, Mesh(own, devices) if devices else mesh


def _split(where: str, factor: str, how: Any, mesh: Mesh, own: str) -> Split:
    short = {str: "axis", int: "parts", list: "sizes"}.get(type(how))
    axis, parts, sizes = table({short: how} if short else how, where, {"axis": "", "parts": 0, "sizes": []}).values()
    if axis and axis not in mesh.sizes:
        raise InputError(f"{where}: {unknown('axis of the mesh', axis, mesh.sizes)}")
    names, count = tuple(map(str.strip, factor.split(","))), parts or len(sizes) or mesh.sizes.get(axis, 0)
    return Split(names, count, tuple(sizes), axis=axis or own)
