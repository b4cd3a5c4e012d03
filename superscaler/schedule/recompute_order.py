"""The time of recomputed work: as late as possible, when the backward reaches its region.

Work is (kind, segment number, key), as in places. A *region run* is a region on one device and microbatch: (region,
device, microbatch).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product

from superscaler.schedule.dataflow import Key
from superscaler.schedule.segments import Segment
from superscaler.schedule.transfers import BACKWARD, REGATHER, Place, Transfer

Work = tuple[str, int, Key]
RegionRun = tuple[str, int, int]
# The kinds of work of segments.
RUNS = "FBIW"


def maker_of(segments: Sequence[Segment], place: Place) -> Work:
    """Return the work that makes the value at a place."""
    kind = segments[place.segment].given[place.number] if place.kind == BACKWARD else place.kind
    return kind, place.segment, place.key


def reader_of(segments: Sequence[Segment], place: Place) -> Work:
    """Return the work that reads the value at a place."""
    kind = segments[place.segment].taking if place.kind in (BACKWARD, REGATHER) else place.kind
    return kind, place.segment, place.key


class RecomputeOrder:
    """The region runs of a schedule, without those of `ordered` regions, whose time a plan sets."""

    def __init__(self, segments: Sequence[Segment], transfers: Sequence[Transfer], ordered: frozenset[str]) -> None:
        self.segments, self.transfers = segments, transfers
        self.twins = [s for s in segments if s.region and s.region not in ordered]
        # The last segment of each region: the backward enters there.
        self.last = {s.region: s for s in sorted(self.twins, key=lambda s: s.position)}

    def visit(self, work: Work) -> RegionRun:
        """Return the region run that work belongs to; region '' if none."""
        kind, number, key = work
        return self.segments[number].region if kind in RUNS else "", key[0], key[1]

    @cached_property
    def runs(self) -> Mapping[RegionRun, Sequence[Work]]:
        """Return the recomputed work of each region run."""
        found: dict[RegionRun, list[Work]] = {}
        for work in (("F", segment.number, key) for segment in self.twins for key in segment.keys):
            found.setdefault(self.visit(work), []).append(work)
        return found

    @cached_property
    def entries(self) -> Mapping[Work, RegionRun]:
        """Return the backwards with which the backward of each region run begins."""
        entered = ((segment.taking, segment.number, key) for segment in self.last.values() for key in segment.keys)
        return {work: self.visit(work) for work in entered}

    @cached_property
    def waits(self) -> Mapping[RegionRun, Sequence[Work]]:
        """Return the backwards that each region run waits for, all of the last op that reads a result of the region.

        An op behind the whole region never waits for it, whatever else is recomputed.
        """
        found: dict[RegionRun, tuple[int, dict[Work, None]]] = {}
        for transfer in self.transfers if self.twins else ():
            for p, r in transfer.links if transfer.kind == BACKWARD and not transfer.is_to_updates else ():
                for place, source in product(transfer.readers[r].places, transfer.pieces[p].places):
                    visit, position = self.visit(place[:3]), self.segments[source.segment].position
                    if visit[0] not in self.last or position <= self.last[visit[0]].position:
                        continue
                    if position > found.get(visit, (-1,))[0]:
                        found[visit] = position, {}
                    if position == found[visit][0]:
                        found[visit][1][maker_of(self.segments, source)] = None
        return {visit: list(sources) for visit, (_, sources) in found.items()}
