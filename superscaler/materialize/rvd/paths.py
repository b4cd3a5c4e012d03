"""The cheapest path of primitives from one layout to another, cached up to a renaming of devices."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from dataclasses import replace

import numpy as np

from superscaler.errors import InputError
from superscaler.ir.layout import Layout
from superscaler.materialize.rvd.search import LIMIT, Path, search
from superscaler.materialize.rvd.transitions import Costs, Shape, Symmetric

Cache = MutableMapping[Hashable, tuple[tuple[int, ...], Path]]


def find_path(
    source: Layout,
    goal: Layout,
    sizes: Shape,
    itemsize: int,
    costs: Costs,
    paths: Cache | None = None,
    limit: int = LIMIT,
) -> Path:
    """Return the cheapest path; `sizes` are the elements per slot, `limit` the most states to expand.

    `paths` caches results up to a renaming of devices that leaves the costs equal. Raises InputError where a layout
    does not cut the slots into equal parts, or names a device twice.
    """
    for layout in (source, goal):
        _check(layout, sizes)
    if paths is None:
        return search(source, goal, sizes, itemsize, costs, limit)
    devices, names = _names(source, goal)
    place = costs.place if isinstance(costs, Symmetric) else int
    places: dict[Hashable, int] = {}
    where = tuple(places.setdefault(place(d), len(places)) for d in devices)
    exact = () if isinstance(costs, Symmetric) else devices
    renamed = tuple(names[d] for d in goal.devices.reshape(-1).tolist())
    key = (source.devices.shape, goal.devices.shape, renamed, where, exact, sizes, itemsize, costs, limit)
    if key not in paths:
        paths[key] = devices, search(source, goal, sizes, itemsize, costs, limit)
    known, path = paths[key]
    return path if known == devices else _rename(path, dict(zip(known, devices, strict=True)))


def _names(source: Layout, goal: Layout) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return the devices in the order of their first appearance, and the number of each in it."""
    names: dict[int, int] = {}
    for device in source.devices.reshape(-1).tolist() + goal.devices.reshape(-1).tolist():
        names.setdefault(device, len(names))
    return tuple(names), names


def _rename(path: Path, names: dict[int, int]) -> Path:
    old = np.array(sorted(names))
    new = np.array([names[d] for d in old])

    def layout(of: Layout) -> Layout:
        return Layout(new[np.searchsorted(old, of.devices)])

    steps = tuple(
        replace(
            step,
            groups=tuple(tuple(names[d] for d in group) for group in step.groups),
            kept=tuple(names[d] for d in step.kept),
            layout=layout(step.layout),
        )
        for step in path.steps
    )
    return replace(path, source=layout(path.source), goal=layout(path.goal), steps=steps)


def _check(layout: Layout, sizes: Shape) -> None:
    parts = layout.shape[2]
    if len(parts) != len(sizes):
        raise InputError(f"layout {layout} cuts {len(parts)} slots, but the tensor has {len(sizes)}: {sizes}.")
    for slot, (k, n) in enumerate(zip(parts, sizes, strict=True)):
        if n % k:
            raise InputError(
                f"layout {layout} cuts slot {slot} of {n} elements into {k} parts, which are not equal; "
                "uneven parts are exchanged as exact pieces, not as layouts."
            )
    ids, counts = np.unique(layout.devices, return_counts=True)
    if (counts > 1).any():
        twice = int(ids[counts > 1][0])
        raise InputError(f"layout {layout} names device {twice} {counts.max()} times; each may appear once.")
