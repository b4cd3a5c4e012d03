"""Functions of segments: parts of equal sizes share one."""

from collections.abc import Hashable, Sequence

import numpy as np

from superscaler.ir.grid import Ints
from superscaler.ir.mask import Box
from superscaler.ir.model import Op
from superscaler.ir.program import Function, Shape
from superscaler.schedule.dataflow import Dataflow
from superscaler.schedule.segments import Segment


class Functions:
    """The functions made so far. A part is a segment and the position `at` of one of its keys."""

    def __init__(self, edges: Dataflow) -> None:
        self.edges = edges
        self.made: list[Function] = []
        self._numbers: dict[Hashable, int] = {}
        self._forms: dict[int, Ints] = {}
        self._starts: dict[int, tuple[Ints, tuple[Shape, ...]]] = {}

    def start(self, segment: Segment, at: int) -> Shape:
        """Return the start of a part on each coordinate of its function."""
        return tuple(self._coordinates(segment)[0][at].tolist())

    def number(self, segment: Segment, at: int, again: Sequence[int] = ()) -> int:
        """Return the number of a part's function. `again`: the numbers of the inputs that are regathered for it."""
        key = (segment.number, self.forms(segment)[at].tobytes(), tuple(again))
        if key not in self._numbers:
            boxes = tuple(self._box(segment, op, at) for op in segment.ops)
            input_of = {(op.name, k): n for n, alias in enumerate(segment.aliases) for op, k in alias.uses}
            names = tuple(alias.tensor for alias in segment.aliases)
            outputs = tuple(o.tensor for o in segment.outputs)
            grads = tuple(segment.given)
            wide = tuple(n for n in grads if self.edges.model.is_widened(names[n]))
            saved = tuple(n for n, o in enumerate(segment.outputs) if o.has_gradient)
            self._numbers[key] = len(self.made)
            where = self._coordinates(segment)[1], grads, wide, tuple(again), saved
            self.made.append(Function(segment.ops, boxes, names, input_of, outputs, segment.module, *where))
        return self._numbers[key]

    def forms(self, segment: Segment) -> Ints:
        """Return a row per key of a segment; parts with equal rows share a function."""
        if segment.number not in self._forms:
            columns = []
            for op in segment.ops:
                rows, at = self.edges.rows[op.name], segment.row_of[op.name]
                columns.append((rows.hi - rows.lo)[at])
            self._forms[segment.number] = np.concatenate(columns, axis=1)
        return self._forms[segment.number]

    def _coordinates(self, segment: Segment) -> tuple[Ints, tuple[Shape, ...]]:
        """Return the starts of a segment's parts [keys, coordinates] and, for each op, the coordinate of each index.
        Indices that move alike share a coordinate.
        """
        if segment.number not in self._starts:
            columns = [self.edges.rows[op.name].lo[segment.row_of[op.name]] for op in segment.ops]
            distinct, number = np.unique(np.concatenate(columns, axis=1), axis=1, return_inverse=True)
            left = iter(number.reshape(-1).tolist())
            self._starts[segment.number] = distinct, tuple(tuple(next(left) for _ in op.indices) for op in segment.ops)
        return self._starts[segment.number]

    def _box(self, segment: Segment, op: Op, at: int) -> Box:
        rows, row = self.edges.rows[op.name], segment.row_of[op.name][at]
        return tuple(zip(rows.lo[row].tolist(), rows.hi[row].tolist(), strict=True))
