"""Anti-dependencies: an update waits for all reads of its weight or buffer at rest, and of views of it.

Work is (kind, segment number, key), as in places.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from superscaler.groups import collect
from superscaler.schedule.dataflow import Dataflow, Key
from superscaler.schedule.joins import Required
from superscaler.schedule.recompute_order import Work
from superscaler.schedule.segments import Segment
from superscaler.schedule.transfers import FORWARD, UPDATE, End, Place, Transfer

# (work, the work that comes after it, the reason).
Dependency = tuple[Work, Work, str]


def of_weights(flow: Dataflow, segment_of: Mapping[str, Segment]) -> Iterator[Dependency]:
    """Yield the dependencies between the update of a weight and its readers: reads of this iteration come before the
    update, those of later iterations after it.
    """
    uses, nexts, known = flow.model.uses, flow.model.nexts, dict[Hashable, list[tuple[Key, Key]]]()
    for tensor, op in flow.homes.items():
        if op.is_rest:
            continue
        number, older = flow.home_number[tensor], flow.home_number.get(nexts.get(tensor, ""))
        if older is not None:
            yield from (((UPDATE, older, k), (UPDATE, number, k), "next iteration") for k in flow.rows[op.name].keys)
        for reader, k in (use for use in uses[tensor] if use[0].name in segment_of):
            ends = flow.required(op, 0), flow.required(reader, k)
            if ends not in known:
                known[ends] = _meetings(*ends, flow.rows[op.name].keys, flow.rows[reader.name].keys)
            segment = segment_of[reader.name]
            for home, key in known[ends]:
                yield (segment.last_kind, segment.number, key), (UPDATE, number, home), "read before update"
                if older is not None:
                    yield (UPDATE, older, home), ("F", segment.number, key), "read after update"


def updates_of(flow: Dataflow, transfer: Transfer, pieces: Sequence[End]) -> Iterator[Work]:
    """Yield the updates of the weight or buffer that a moved tensor is a view of, on the devices of its pieces."""
    base = flow.bases.get(transfer.tensor) if transfer.kind == FORWARD else None
    devices = {piece.device for piece in pieces if piece.places[0].kind == FORWARD}
    if base is not None and devices:
        rows = flow.rows[flow.homes[base].name]
        yield from ((UPDATE, flow.home_number[base], key) for key in rows.keys if key[0] in devices)


def last_of(segments: Sequence[Segment], place: Place) -> Work:
    """Return the last work that uses the value read at a place: a forward keeps it for the backward."""
    return (place.kind if place.kind == UPDATE else segments[place.segment].last_kind, *place[1:3])


def _meetings(one: Required, other: Required, keys: Sequence[Key], others: Sequence[Key]) -> list[tuple[Key, Key]]:
    """Return the pairs of parts of two ops on one device whose inputs share elements."""
    at = collect((key[0], row) for row, key in enumerate(keys))
    pairs = [(a, b) for b, key in enumerate(others) for a in at.get(key[0], ())]
    a, b = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    common = (np.maximum(one.lo[a], other.lo[b]) < np.minimum(one.hi[a], other.hi[b])).all(axis=1)
    return [(keys[pairs[n][0]], others[pairs[n][1]]) for n in np.flatnonzero(common)]
