"""The time of recomputed work: as late as possible, when the backward reaches its region.

Work is (kind, segment number, key), as in places. A *region run* is a region on one device and microbatch: (region,
device, microbatch).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product

from superscaler.groups import collect
from superscaler.ir.model import Model
from superscaler.schedule.dataflow import Key
from superscaler.schedule.segments import Segment
from superscaler.schedule.transfers import BACKWARD, REGATHER, Place, Transfer

Work = tuple[str, int, Key]
RegionRun = tuple[str, int, int]
# The kinds of work of segments.
RUNS = "FBIW"


def maker_of(segments: Sequence[Segment], place: Place) -> Work:
    """Return the work that makes the value at a place."""
    kind = segments[place.segment].gradient_kinds[place.number] if place.kind == BACKWARD else place.kind
    return kind, place.segment, place.key


def reader_of(segments: Sequence[Segment], place: Place) -> Work:
    """Return the work that reads the value at a place."""
    kind = segments[place.segment].first_backward if place.kind in (BACKWARD, REGATHER) else place.kind
    return kind, place.segment, place.key


class RecomputeOrder:
    """The region runs of a schedule, without those of `ordered` regions: a plan sets their time."""

    def __init__(
        self, model: Model, segments: Sequence[Segment], transfers: Sequence[Transfer], ordered: frozenset[str]
    ) -> None:
        self.segments, self.transfers = segments, transfers
        self.twins = [s for s in segments if s.region and s.region not in ordered]
        # For each region, itself and those around it.
        self.around: dict[str, list[str]] = {}
        for twins in model.twins.values():
            regions = [op.region for op in twins if op.region not in ordered]
            self.around |= {region: regions[: n + 1] for n, region in enumerate(regions)}
        # The last segment with a backward in each region, or in one inside it: the backward enters there.
        mirrored = sorted((s for s in self.twins if s.has_mirror), key=lambda s: s.position)
        self.last = {region: s for s in mirrored for region in self.around[s.region]}

    def visits(self, work: Work) -> list[RegionRun]:
        """Return the region runs that work belongs to, of nested regions all."""
        kind, number, key = work
        regions = self.around.get(self.segments[number].region, []) if kind in RUNS else []
        return [(region, key[0], key[1]) for region in regions]

    @cached_property
    def runs(self) -> Mapping[RegionRun, Sequence[Work]]:
        """Return the recomputed work of each region run."""
        return collect(
            ((segment.region, key[0], key[1]), ("F", segment.number, key))
            for segment in self.twins
            for key in segment.keys
        )

    @cached_property
    def entries(self) -> Mapping[Work, Sequence[RegionRun]]:
        """Return the backwards with which the backward of each region run begins, each with those."""
        found: dict[Work, list[RegionRun]] = {}
        for region, segment in self.last.items():
            for key in segment.keys:
                work = segment.first_backward, segment.number, key
                found.setdefault(work, []).append((region, key[0], key[1]))
        return found

    @cached_property
    def waits(self) -> Mapping[RegionRun, Sequence[Work]]:
        """Return the backwards that each region run waits for: all that the backward of its last segment waits for; if
        others read only what is before that, all of the last op that reads a result of the region.

        A loss that balances experts reads a result of each block: its backward alone does not reach them. An op behind
        the whole region never waits for it, whatever else is recomputed. A half W may come long after the I of the
        region. Where it alone reads a result that a device makes, as a bias of positions that later stages read, the
        device waits for what the others of the region wait for.
        """
        found: dict[RegionRun, tuple[tuple[bool, tuple[bool, int]], dict[Work, None]]] = {}
        for transfer in self.transfers if self.twins else ():
            for p, r in transfer.links if transfer.kind == BACKWARD and not transfer.is_to_updates else ():
                for place, source in product(transfer.readers[r].places, transfer.pieces[p].places):
                    maker, position = maker_of(self.segments, source), self.segments[source.segment].position
                    for visit in self.visits(place[:3]):
                        if (last := self.last.get(visit[0])) is None or position <= last.position:
                            continue
                        is_entry = place.segment == last.number
                        rank = maker[0] != "W", (is_entry, 0 if is_entry else position)
                        if visit not in found or rank > found[visit][0]:
                            found[visit] = rank, {}
                        if rank == found[visit][0]:
                            found[visit][1][maker] = None
        of_all = collect(
            ((region, microbatch), work)
            for (region, _, microbatch), ((is_needed, _), works) in found.items()
            for work in works
            if is_needed
        )
        return {
            (region, device, microbatch): list(works if is_needed else of_all.get((region, microbatch), works))
            for (region, device, microbatch), ((is_needed, _), works) in found.items()
        }
