"""Meshes of a pipeline's stages: one of all devices, or one of each stage, with numbers of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise

from superscaler.verbs import Cluster, Graph, InputError, Mesh, Op

# The meshes of stages by their place in the pipeline; of all stages together: None.
Meshes = Mapping[int | None, Mesh]


def each(name: str, given: int | str, stages: int) -> list[str]:
    """Return the value of all stages, or one of each, joined by `+`. Raises InputError for another number of values.

    >>> each("hybrid:recompute", "full+none", 2), each("hybrid:dp", 4, 2)
    (['full', 'none'], ['4'])
    """
    values = str(given).split("+")
    if len(values) not in (1, stages):
        raise InputError(
            f"{name}={given} has {len(values)} values, but there are {stages} stages (pp={stages}); write one for "
            f"all, or one for each stage, as {'+'.join([values[0]] * stages)}."
        )
    return values


def counts(name: str, given: int | str, stages: int) -> list[int]:
    """Return the number of all stages, or one of each. Raises InputError for what are no numbers of at least 1; one
    alone may be -1.
    """
    values = each(name, given, stages)
    if not all(re.fullmatch(r"-?\d+", value) for value in values):
        raise InputError(f"{name}={given}: write a whole number, as 4, or one for each stage, as 4+2.")
    numbers = [int(value) for value in values]
    if "+" in str(given) and min(numbers) < 1:
        raise InputError(f"{name}={given}: the number of a stage is {min(numbers)}; write 1 or more for each.")
    return numbers


def meshes(cluster: Cluster, pp: int, dps: int | str, tps: int | str) -> Meshes:
    """Return the mesh of all stages, which are `dp` x `tp` devices each, or that of each stage, where these differ.

    Raises InputError for other numbers than those of stages and devices.
    """
    dp, tp = counts("hybrid:dp", dps, pp), counts("hybrid:tp", tps, pp)
    if len({*dp}) == len({*tp}) == 1:
        return {None: cluster.mesh(pp=pp, dp=dp[0], tp=tp[0])}
    dp, tp = (values * (pp // len(values)) for values in (dp, tp))
    ends = [0, *accumulate(a * b for a, b in zip(dp, tp, strict=True))]
    if ends[-1] != len(cluster.devices):
        of_each = " + ".join(f"{a} x {b}" for a, b in zip(dp, tp, strict=True))
        raise InputError(
            f"hybrid: the stages have {of_each} = {ends[-1]} devices (dp x tp), but the cluster has "
            f"{len(cluster.devices)}; make the two numbers equal."
        )
    own = (cluster.devices[first:end] for first, end in pairwise(ends))
    # A stage is at its place along pp; the devices of other places are not asked for.
    return {
        at: Mesh({"pp": pp, "dp": a, "tp": b}, [*devices] * pp)
        for at, (a, b, devices) in enumerate(zip(dp, tp, own, strict=True))
    }


def at_place(graph: Graph, ops: Iterable[Op], place: int | None) -> list[Op]:
    """Return those of some ops that are at a place of the pipeline; all of them for None."""
    return [op for op in ops if place is None or place_of(graph, op) == place]


def place_of(graph: Graph, op: Op) -> int | None:
    """Return the place of an op's stage; None of an op without one."""
    return next((axis.at[0] for axis in graph.grids[op.name].axes if axis.is_stage), None)
