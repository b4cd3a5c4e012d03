"""Contents of values while a program runs on masks: sums of addends, and the faults of incomplete sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from superscaler.certify.boxes import (
    Boxes,
    clipped,
    first_fault,
    is_tiled,
    is_tiled_everywhere,
    joined,
    lengths_of,
    one_each,
    region_of,
    taken,
)
from superscaler.certify.coverage import SEED, Addends, Chain, Kinds
from superscaler.certify.interpret import Refusal
from superscaler.ir.grid import Ints
from superscaler.ir.mask import Mask
from superscaler.ir.model import Model, width
from superscaler.ir.program import Instruction
from superscaler.remembered import is_same, remembered


@dataclass(eq=False, slots=True)
class Memory:
    """The memory of one or more values. `held`: the first instruction that read it. `changed`: the instruction that
    overwrote it. `is_on_host`: whether it is the host's.
    """

    held: Instruction | None = None
    changed: Instruction | None = None
    is_on_host: bool = False


def _own() -> tuple[Memory, ...]:
    return (Memory(),)


@dataclass(eq=False)
class Content:
    """The content of a value on each device of a cohort: a `box` [devices, slots, 2] of a tensor or of its gradient,
    and the addends in it. `addends` is None if the value is whole, each addend once. Zeros of no place have no tensor.

    `memory`: the memories that the value and its views may be in. `shape`: that of zeros without a tensor.
    """

    tensor: str
    is_gradient: bool
    box: Ints
    addends: Addends | None
    dtype: str
    memory: tuple[Memory, ...] = field(default_factory=_own)
    shape: tuple[int, ...] = ()

    @property
    def changed(self) -> Instruction | None:
        """The instruction that overwrote the memory of the value; None if its memory is intact."""
        return next((memory.changed for memory in self.memory if memory.changed), None)

    @property
    def held(self) -> Instruction | None:
        """The first instruction that read the value or a view of it."""
        return next((memory.held for memory in self.memory if memory.held), None)

    @property
    def is_on_host(self) -> bool:
        return any(memory.is_on_host for memory in self.memory)

    @property
    def lengths(self) -> tuple[int, ...]:
        return lengths_of(self.box)

    def but(self, box: Ints, addends: Addends | None) -> Content:
        """Return a copy of this content with another box and other addends; the memory is the same."""
        return Content(self.tensor, self.is_gradient, box, addends, self.dtype, self.memory, self.shape)

    @property
    def own_addends(self) -> Addends:
        """Return the addends of a value. A whole value counts as one addend, itself."""
        return {(): one_each(self.box)} if self.addends is None else self.addends


class Sums:
    """Sums of values, by the kinds of addends of a model."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds

    def addends_of(self, content: Content) -> Addends:
        """Return the addends of a value; a whole value has those of all chains of its tensor."""
        if content.addends is not None:
            return content.addends
        found = {}
        for chain in self.kinds.heads(content.tensor, content.is_gradient):
            found[chain] = one_each(self.region(content.box, chain, content.tensor))
        return found

    def region(self, box: Ints, chain: Chain, tensor: str) -> Ints:
        return region_of(box, tuple(self.kinds.columns(chain, tensor).values()))

    def total(self, parts: Sequence[Addends]) -> Addends:
        found: dict[Chain, list[Boxes]] = {}
        for part in parts:
            for chain, boxes in part.items():
                found.setdefault(chain, []).append(boxes)
        return {chain: joined(boxes) for chain, boxes in found.items()}

    def sum(self, like: Content, box: Ints, parts: Sequence[Content]) -> Content:
        if len(parts) == 1 and parts[0].addends is None and is_same(box, parts[0].box):
            return replace(parts[0])
        total = self.total([self.addends_of(part) for part in parts])
        return self.simplified(Content(like.tensor, like.is_gradient, box, total, like.dtype))

    def is_tiled(self, content: Content, chain: Chain, boxes: Boxes) -> bool:
        """Return whether a value has each of these addends once, on all devices."""
        return is_tiled_everywhere(boxes, self.region(content.box, chain, content.tensor))

    def simplified(self, content: Content, deep: bool = False) -> Content:
        """Return the same value; without its addends if these add up to the whole value.

        Unless `deep`, only addends of one box each are checked: that is cheap, and almost always enough.
        """
        if content.addends is None or not (self._is_one_box_each(content) or (deep and self.missing(content) is None)):
            return content
        return content.but(content.box, None)

    def _is_one_box_each(self, content: Content) -> bool:
        heads, addends = self.kinds.heads(content.tensor, content.is_gradient), content.addends
        return (
            addends is not None
            and len(heads) == len(addends)
            and all(
                chain in addends and len(addends[chain]) == 1 and self.is_tiled(content, chain, addends[chain])
                for chain in heads
            )
        )

    def missing(self, content: Content) -> tuple[Chain, Boxes | None] | None:
        """Return the first chain with missing or repeated addends, and its boxes; None if the value is whole."""
        assert content.addends is not None
        goals = self.kinds.complete(content.tensor, content.is_gradient, tuple(content.addends))
        covered: set[Chain] = set()
        for goal in goals:
            found = []
            for chain, boxes in content.addends.items():
                spread = self.kinds.spread(content.tensor, chain, boxes, goal)
                if spread is not None:
                    found.append(spread)
                    covered.add(chain)
            if not found or not self.is_tiled(content, goal, joined(found)):
                return goal, joined(found) if found else None
        extra = next((chain for chain in content.addends if chain not in covered), None)
        return None if extra is None else (extra, content.addends[extra])

    def faulty(self, content: Content) -> int:
        """Return the first device, by its row, on which a value is not whole."""
        goal, boxes = self.missing(content) or ((), None)
        if boxes is None:
            return 0
        return int(np.argmin(is_tiled(boxes, self.region(content.box, goal, content.tensor))))

    def fault(self, content: Content) -> str:
        """Return the fault of a value, in words: missing addends, or addends in it more than once."""
        goal, boxes = self.missing(content) or ((), None)
        row = self.faulty(content)
        slots = content.box.shape[1]
        region = self.region(content.box, goal, content.tensor)[row]
        cell, count = (region, 0) if boxes is None else first_fault(boxes.whole[row], region)
        names = self.kinds.columns(goal, content.tensor)
        pairs = zip(names.items(), cell[slots:].tolist(), strict=True)
        rest = [f"{self._column(column)} {lo}:{hi} of {size}" for (column, size), (lo, hi) in pairs]
        what = f"{Mask(content.tensor, box_of(cell[:slots]))}"
        why = f"the addends of {self._chain(goal, content.is_gradient)}" + (f" at {', '.join(rest)}" if rest else "")
        times = "lacks" if count == 0 else f"has {count} times"
        return f"{'the gradient of ' if content.is_gradient else ''}{what} {times} {why}."

    def _column(self, column: Any) -> str:
        # The columns of an operand's own addends follow those of the operand.
        while len(column) > 4:
            column = column[3:]
        return self.kinds.op[column[0]].indices[column[1]].factor if len(column) == 2 else f"slot {column[3]}"

    def _chain(self, chain: Chain, is_gradient: bool) -> str:
        if chain == SEED:
            return "the loss itself"
        if chain[0] == "rest":
            return "it"
        found = f"its use in {chain[1]}" if is_gradient else str(chain[1])
        inner = [(sub, False) for _, _, sub in chain[-1] if sub]
        if is_gradient and chain[3] and chain[3][1]:
            inner = [(chain[3][1], True), *inner]
        return found + "".join(f", there of {self._chain(*each)}" for each in inner)


def rows_of(content: Content, rows: Ints) -> Content:
    addends = content.addends
    if addends is not None:
        addends = {chain: boxes.rows(rows) for chain, boxes in addends.items()}
    return content.but(taken(content.box, rows), addends)


def cut_of(content: Content, box: Ints) -> Content:
    """Return the part of a value in a box inside its own."""
    addends = content.addends
    if addends is not None:
        addends = {chain: clipped(boxes, box) for chain, boxes in addends.items()}
    return content.but(box, addends)


def chunk_of(content: Content, slot: int, count: int, position: Ints, sizes: Sequence[int] = ()) -> Content:
    """Return each device's chunk of a value cut along a slot, evenly or into `sizes`."""
    if not 0 <= slot < content.box.shape[1]:
        raise Refusal(f"scatters slot {slot}, but the value has {content.box.shape[1]}, from 0 on.")
    size = content.lengths[slot]
    if size % count and not sizes:
        raise Refusal(f"scatters {size} elements over {count} devices.")
    sizes = tuple(sizes) or (size // count,) * count
    if len(sizes) != count or sum(sizes) != size:
        raise Refusal(f"scatters {size} elements over {count} devices as {list(sizes)}.")
    return cut_of(content, _chunk(content.box, slot, sizes, position))


@remembered
def _chunk(box: Ints, slot: int, sizes: tuple[int, ...], position: Ints) -> Ints:
    """Return boxes cut along a slot into these sizes, on each device the chunk at its position."""
    ends, found = np.cumsum([0, *sizes]), box.copy()
    found[:, slot] = box[:, slot, :1] + np.stack([ends[position], ends[position + 1]], axis=-1)
    return found


def box_of(box: Ints) -> tuple[tuple[int, int], ...]:
    return tuple((int(lo), int(hi)) for lo, hi in box.tolist())


def text_of(box: Ints) -> str:
    return ", ".join(f"{lo}:{hi}" for lo, hi in box.tolist())


def kind_of(content: Content) -> str:
    return f"the gradient of {content.tensor}" if content.is_gradient else content.tensor or "zeros"


def check_view(content: Content, view: Sequence[int]) -> None:
    if content.lengths != tuple(view):
        raise Refusal(f"views {kind_of(content)} of {list(content.lengths)} as {list(view)}.")


def check_bytes(count: int, sizes: Sequence[int], dtype: str) -> None:
    if count != sum(sizes) * width(dtype):
        raise Refusal(f"declares {count} bytes, but has {sum(sizes) * width(dtype)}.")


def require_same_kind(a: Content, b: Content) -> None:
    if (a.tensor, a.is_gradient, a.dtype) != (b.tensor, b.is_gradient, b.dtype):
        raise Refusal(f"adds {kind_of(b)} ({b.dtype}) to {kind_of(a)} ({a.dtype}).")


def must_equal(found: Ints, wanted: Ints, what: str, swap: bool = False) -> None:
    if found is wanted or is_same(found, wanted):
        return
    row = 0 if found.shape != wanted.shape else int(np.argmax((found != wanted).any(axis=(1, 2))))
    a, b = (wanted, found) if swap else (found, wanted)
    raise Refusal(f"{what} [{text_of(a[row])}], but it has [{text_of(b[row])}].", row)


def check_largest(model: Model, content: Content, largest: bool) -> None:
    if largest != model.tensors[content.tensor].largest:
        raise Refusal(f"{'takes the largest part of' if largest else 'adds up the parts of'} {kind_of(content)}.")


def check_shape(model: Model, content: Content, shape: Sequence[int]) -> None:
    expected = model.tensors[content.tensor].local_shape(content.lengths)
    if tuple(shape) != expected:
        raise Refusal(f"gives {kind_of(content)} the shape {tuple(shape)}, but it has {expected}.")
