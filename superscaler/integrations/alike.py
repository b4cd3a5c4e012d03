"""What all ranks of a loop must have alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from superscaler.bits import bytes_of
from superscaler.errors import InputError
from superscaler.store.folder import digest

T = TypeVar("T")


def check_alike(facts: Mapping[str, str]) -> None:
    """Raise InputError on all ranks if one has other facts."""
    ranks = _of_all(facts)
    for rank, other in enumerate(ranks):
        for name in {**ranks[0], **other}:
            one, two = ranks[0].get(name, "missing"), other.get(name, "missing")
            if one != two:
                raise InputError(
                    f"{name} is {one} on rank 0 and {two} on rank {rank}; a plan is compiled for one of them: make it "
                    "equal on all ranks."
                )


def check_equal(batch: Mapping[str, Tensor]) -> None:
    """Raise InputError on all ranks if one has a batch of other hashes."""
    batches = _of_all({name: digest(bytes_of(x.cpu()).numpy().tobytes()) for name, x in batch.items()})
    if others := [rank for rank, other in enumerate(batches) if other != batches[0]]:
        raise InputError(
            f"rank {others[0]} was given another batch than rank 0; a plan takes the same global batch on all ranks: "
            "seed them alike, and do not share samples out."
        )


def check_done(when: str, what: str, sums: Mapping[str, int | None]) -> None:
    """Raise InputError on all ranks if one does something else, or has other tensors, by name and checksum."""
    ranks = _of_all((what, sums))
    first, own = ranks[0]
    for rank, (done, others) in enumerate(ranks):
        if done != first:
            raise InputError(
                f"{when} rank 0 {first}, and rank {rank} {done}: hooks must skip the same steps on all ranks."
            )
        if changed := [name for name in others if others[name] != own.get(name)]:
            raise InputError(
                f"{changed[0]} is not equal on ranks 0 and {rank} {when}: hooks must change it alike on all ranks, "
                "with random numbers of one seed."
            )


def _of_all(own: T) -> list[T]:
    """Return the objects of all ranks."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks
