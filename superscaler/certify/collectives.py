"""The effect of collectives on masks: the values that members must give, and the value that each of them gets."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from superscaler.certify.content import (
    Content,
    Sums,
    check_bytes,
    check_largest,
    check_shape,
    check_view,
    chunk_of,
    kind_of,
    must_equal,
    require_same_kind,
    rows_of,
)
from superscaler.certify.interpret import Refusal
from superscaler.certify.meanings import MEANINGS, Meaning
from superscaler.ir.cohorts import Cohort
from superscaler.ir.grid import Ints
from superscaler.ir.program import Collective, CollectiveArg
from superscaler.remembered import remembered


def meaning_of(i: Collective) -> Meaning:
    if i.kind not in MEANINGS:
        raise Refusal(f"is a {i.kind}, which is no collective.")
    return MEANINGS[i.kind]


class Collectives:
    """The collectives of a program on contents."""

    def __init__(self, sums: Sums) -> None:
        self.sums, self.model = sums, sums.kinds.model

    def check(self, cohort: Cohort, at: int, i: Collective, read: Sequence[Content | None]) -> None:
        """Raise Refusal for sources that do not fit a collective."""
        if not len(i.works) == len(i.sources) == len(i.ways):
            raise Refusal(f"starts {len(i.works)} collectives of {len(i.sources)} sources in {len(i.ways)} ways.")
        meaning = meaning_of(i)
        if meaning.to_one != (0 <= i.root < len(i.group)):
            raise Refusal(f"gives its result to device {i.root} of its group.")
        sizes = []
        for content, way in zip(read, i.ways, strict=True):
            sizes.append(way.elements)
            if content is None:
                continue
            if meaning.from_one:
                if cohort.devices[0] != cohort.data(at, "group")[0, 0]:
                    raise Refusal("is given a value by a device that only receives.")
                # Its source waits for nothing, so that no later check has this shape.
                if not meaning.cuts:
                    check_shape(self.model, content, way.shape)
            check_view(content, way.view)
            check_shape(self.model, content, way.local)
            if content.dtype != (i.given or i.wide or i.dtype):
                raise Refusal(f"is of {i.given or i.wide or i.dtype}, but is given {content.dtype}.")
            if (i.wide or i.given) and not self._may_round(i, content):
                raise Refusal(f"rounds {kind_of(content)} to {i.dtype} to move it.")
        check_bytes(i.bytes, sizes, i.dtype)

    def _may_round(self, i: Collective, content: Content) -> bool:
        """Return whether a collective may round a value: a gradient to the dtype of its weight, or to that to which all
        readers cast the weight; a weight to the latter, before it is gathered.
        """
        own, may = (
            [rounded.dtype] if (rounded := self.model.rounded.get(content.tensor)) else [],
            MEANINGS[i.kind].rounds,
        )
        if i.given:
            return "weight" in may and not (i.wide or content.is_gradient) and i.dtype in own
        own.append(self.model.tensors[content.tensor].dtype)
        return "gradient" in may and content.is_gradient and i.dtype in own

    def join(
        self, how: Collective, part: int, members: Sequence[tuple[Content, Ints]], position: Ints, group: Ints
    ) -> Content:
        """Return the result of a collective for its tensor `part`; see `Domain.join`."""
        way, given = how.ways[part], [rows_of(content, rows) for content, rows in members]
        if how.root >= 0 and (position != how.root).any():
            raise Refusal(f"gives its result to device {how.root} of its group only.")
        first = given[0]
        for content in given[1:]:
            require_same_kind(first, content)
        meaning, count = MEANINGS[how.kind], len(how.group)
        if meaning.adds:
            given = [self._sum(given, how)]
        if meaning.cuts:
            sizes = way.sizes if meaning.adds else ()
            given = [chunk_of(rows_of(content, group), way.scatter_slot, count, position, sizes) for content in given]
        joined = self._gathered(given, way) if meaning.joins else given[0]
        joined = joined if meaning.cuts else rows_of(joined, group)
        return self._arrived(replace(joined, dtype=how.dtype) if how.given else joined, way)

    def _sum(self, given: Sequence[Content], how: Collective) -> Content:
        """Return the sum, or the largest, of values with equal boxes."""
        first, *others = given
        check_largest(self.model, first, how.largest)
        for k, content in enumerate(others, 1):
            must_equal(content.box, first.box, f"{kind_of(content)} of member {k} of the group is")
        return self.sums.sum(first, first.box, given)

    def _gathered(self, given: Sequence[Content], way: CollectiveArg) -> Content:
        """Return one value, concatenated from chunks along a slot."""
        if not 0 <= way.gather_slot < given[0].box.shape[1]:
            raise Refusal(f"gathers slot {way.gather_slot}, but the value has {given[0].box.shape[1]}, from 0 on.")
        box = given[0].box
        sizes = way.sizes or (given[0].lengths[way.gather_slot],) * len(given)
        if len(sizes) != len(given):
            raise Refusal(f"gathers {len(given)} slices as {list(sizes)}.")
        *chunks, box = _put_together(box, way.gather_slot, tuple(sizes))
        for k, (content, expected) in enumerate(zip(given, chunks, strict=True)):
            must_equal(content.box, expected, f"{kind_of(content)} of member {k} of the group is")
        if all(content.addends is None for content in given):
            # Whole chunks that follow each other are a whole value.
            return Content(given[0].tensor, given[0].is_gradient, box, None, given[0].dtype)
        return self.sums.sum(given[0], box, given)

    def _arrived(self, content: Content, way: CollectiveArg) -> Content:
        check_shape(self.model, content, way.shape)
        return content


@remembered
def _put_together(box: Ints, slot: int, sizes: tuple[int, ...]) -> list[Ints]:
    """Return chunks of these sizes that follow each other along a slot, from the place of a box on, and their union."""
    ends, found = np.cumsum([0, *sizes]) + box[:, slot, :1], list[Ints]()
    for lo, hi in (*((k, k + 1) for k in range(len(sizes))), (0, -1)):
        found.append(box.copy())
        found[-1][:, slot] = ends[:, [lo, hi]]
    return found
