"""Checks of the options of plans against the sizes of a model, before the model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from superscaler.errors import divisors
from superscaler.plans.lib.meshes import Meshes, each, meshes
from superscaler.plans.lib.place_table import check_microbatches
from superscaler.plans.lib.schedules import check_rounds, is_text
from superscaler.specs.options import check_divisible
from superscaler.verbs import Cluster, InputError, unknown

# What `hybrid:recompute=` computes again.
REGIONS = {"none": "", "selective": "attention", "full": "block"}
# The orders of `hybrid`: each stage is on one device of the pipeline.
ORDERS = "pipeline_1f1b", "gpipe", "zb_h1", "zb_h2", "zbv", "dualpipe_v"


def check_hybrid(
    sizes: Mapping[str, int], cluster: Cluster, dp: int | str = 1, tp: int | str = 1, pp: int = 1,
    microbatches: int = 1, chunks: int = 1, sequence: bool = False, recompute: str = "none", zero: int = 0,
    gather_halves: bool = False, schedule: str = ORDERS[0], **_: Any,
) -> Meshes:  # fmt: skip
    """Raise InputError for options that no model of these sizes has on a cluster; return the meshes of its stages."""
    if strange := [what for what in each("hybrid:recompute", recompute, pp) if what not in REGIONS]:
        raise InputError(f"hybrid:recompute={strange[0]}: choose {', '.join(REGIONS)}.")
    if schedule not in ORDERS and not is_text(schedule):
        message = unknown("schedule", schedule, ORDERS)
        raise InputError(f"hybrid:schedule={schedule}: {message} Or give an order, as F(FB)B/(FB).")
    if chunks != 1 and schedule != ORDERS[0]:
        raise InputError(
            f"hybrid:schedule={schedule},chunks={chunks}: chunks have the interleaved order; leave one of both out."
        )
    if zero not in (0, 1):
        raise InputError(f"hybrid:zero={zero}: choose 0 or 1; for stages 2 and 3 zero is a factor of a product.")
    if gather_halves and not zero:
        raise InputError("hybrid:gather_halves=true,zero=0: no weight is gathered; choose zero=1, or leave it out.")
    found = meshes(cluster, pp, dp, tp)
    for mesh in found.values():
        check_rows(sizes, microbatches, dp=mesh.sizes["dp"])
        check_divisible(sizes, "heads", tp=mesh.sizes["tp"])
        if sequence:
            check_divisible(sizes, "seq", tp=mesh.sizes["tp"])
    if chunks > 1:
        check_rounds(pp, microbatches)
    return found


def check_batch(sizes: Mapping[str, int], cluster: Cluster, **_: Any) -> None:
    """Raise InputError for a batch that the devices of a cluster do not divide."""
    check_rows(sizes, devices=len(cluster.devices))


def check_rows(sizes: Mapping[str, int], microbatches: int = 1, **devices: int) -> None:
    """Raise InputError unless each microbatch has rows of the batch, and several devices have equally many of each."""
    check_microbatches(microbatches, sizes.get("batch", max(microbatches, 1)))
    if prod(devices.values()) > 1:
        check_divisible(sizes, "batch", **devices, microbatches=microbatches)


def check_zero(
    sizes: Mapping[str, int], cluster: Cluster, shard: int = 0, microbatches: int = 1, gather_halves: bool = False,
    **_: Any,
) -> None:  # fmt: skip
    """Raise InputError for options that no model of these sizes has on a cluster."""
    n = len(cluster.devices)
    check_shards(sizes, n, shard or n, microbatches, gather_halves)


def check_shards(sizes: Mapping[str, int], n: int, shard: int, microbatches: int, gather_halves: bool) -> None:
    """Raise InputError for slices over n devices that they cannot have, or a batch that they do not divide."""
    if gather_halves and shard == 1 < n:
        raise InputError(
            f"zero:gather_halves=true,shard=1: each of {n} devices has whole weights, so none is gathered; choose a "
            "larger shard, or leave gather_halves out."
        )
    if shard < 1 or n % shard:
        raise InputError(f"zero: devices={n} is not divisible by shard={shard}; choose shard from {divisors(n)}.")
    check_rows(sizes, microbatches, devices=n)


def check_pipeline(sizes: Mapping[str, int], cluster: Cluster, stages: int | None = None, **_: Any) -> None:
    """Raise InputError for another number of stages than a cluster has devices."""
    check_stages(len(cluster.devices), stages)


def check_stages(n: int, stages: int | None) -> None:
    """Raise InputError for another number of stages than n devices."""
    if stages not in (None, n):
        raise InputError(f"pipeline:stages={stages} on {n} devices; give chunks, for {n} stages each, or leave it out.")


# By the name of a plan of the library.
CHECKS: Mapping[str, Callable[..., object]] = {
    "data_parallel": check_batch,
    "fsdp": check_zero,
    "hybrid": check_hybrid,
    "pipeline": check_pipeline,
    "zero": check_zero,
}
