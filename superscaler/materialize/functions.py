"""Functions of segments: parts of equal sizes share one."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from superscaler.ir.mask import Box
from superscaler.ir.model import Op
from superscaler.ir.parts import Rows
from superscaler.ir.program import Function, Shape
from superscaler.schedule.dataflow import Dataflow
from superscaler.schedule.segments import Segment


class Functions:
    """The functions made so far. A part is a segment and the position `at` of one of its keys."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self.made: list[Function] = []
        self._numbers: dict[Hashable, int] = {}
        # By the rows of a segment's ops: those of the layers of a model are often equal.
        self._own: dict[tuple[Rows, ...], _Own] = {}

    def start(self, segment: Segment, at: int) -> Shape:
        """Return the start of a part on each coordinate of its function."""
        return self.of(segment).starts[at]

    def number(self, segment: Segment, at: int, again: Sequence[int] = ()) -> int:
        """Return the number of a part's function. `again`: the numbers of the inputs that are regathered for it."""
        own = self.of(segment)
        key = (segment.number, own.forms[at], tuple(again))
        if key not in self._numbers:
            boxes = tuple(self._box(segment, op, at) for op in segment.ops)
            input_of = {(op.name, k): n for n, alias in enumerate(segment.aliases) for op, k in alias.uses}
            names = tuple(alias.tensor for alias in segment.aliases)
            outputs = tuple(o.tensor for o in segment.outputs)
            grads = tuple(segment.gradient_kinds)
            is_wide = partial(self.flow.model.is_widened, rounds=self.flow.graph.policy.gathers_halves)
            wide = tuple(n for n in grads if is_wide(names[n]))
            saved = tuple(n for n, o in enumerate(segment.outputs) if o.has_gradient)
            self._numbers[key] = len(self.made)
            where = own.coordinates, grads, wide, tuple(again), saved
            self.made.append(Function(segment.ops, boxes, names, input_of, outputs, segment.module, *where))
        return self._numbers[key]

    def of(self, segment: Segment) -> "_Own":
        """Return the parts of a segment."""
        key = tuple([self.flow.rows[op.name] for op in segment.ops])
        if key not in self._own:
            self._own[key] = self._find(segment)
        return self._own[key]

    def _find(self, segment: Segment) -> "_Own":
        rows = [(self.flow.rows[op.name], segment.row_of[op.name]) for op in segment.ops]
        lo = np.concatenate([own.lo[at] for own, at in rows], axis=1)
        hi = np.concatenate([own.hi[at] for own, at in rows], axis=1)
        forms = np.unique(hi - lo, axis=0, return_inverse=True)[1].reshape(-1).tolist()
        distinct, number = np.unique(lo, axis=1, return_inverse=True)
        left = iter(number.reshape(-1).tolist())
        coordinates = tuple(tuple(next(left) for _ in op.indices) for op in segment.ops)
        return _Own(forms, list(map(tuple, distinct.tolist())), coordinates)

    def _box(self, segment: Segment, op: Op, at: int) -> Box:
        rows, row = self.flow.rows[op.name], segment.row_of[op.name][at]
        return tuple(zip(rows.lo[row].tolist(), rows.hi[row].tolist(), strict=True))


class _Own(NamedTuple):
    """The parts of a segment. `forms`: parts with equal forms share a function. `starts`: of each part on each
    coordinate; `coordinates`: for each op, the coordinate of each index. Indices that move alike share a coordinate.
    """

    forms: list[int]
    starts: list[Shape]
    coordinates: tuple[Shape, ...]
