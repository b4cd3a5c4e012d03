"""The function of joined segments: the operators of all members, on the boxes of one part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from superscaler.ir.names import common_module
from superscaler.ir.program import Function, Shape
from superscaler.materialize.joined.groups import Form


class Columns(NamedTuple):
    """Coordinates of members that move alike in all parts, as one. `kept`: the first of each; `place`: that of each;
    `start`: a part on all coordinates of the members.
    """

    kept: tuple[int, ...]
    place: tuple[int, ...]
    start: Shape


def columns_of(starts: Sequence[Shape]) -> Columns:
    """Return the coordinates of parts that start at these numbers."""
    table = np.array(starts, dtype=np.int64).reshape(len(starts), -1)
    number = dict[bytes, int]()
    place = tuple(number.setdefault(column.tobytes(), len(number)) for column in table.T)
    return Columns(tuple(place.index(n) for n in range(len(number))), place, starts[0])


def function_of(functions: Sequence[Function], form: Form, columns: Columns) -> Function:
    """Return the function of a form."""
    own = [functions[n] for n in form.functions]
    boxes, coordinates, at = list[tuple[tuple[int, int], ...]](), list[Shape](), 0
    for f in own:
        count = 1 + max((c for where in f.coordinates for c in where), default=-1)
        boxes += f.boxes_at(columns.start[at : at + count])
        coordinates += [tuple(columns.place[at + c] for c in where) for where in f.coordinates]
        at += count
    number = {end: n for n, ends in enumerate(form.inputs) for end in ends}
    read = {use: number.get((k, n)) for k, f in enumerate(own) for use, n in f.input_of.items()}

    def having(flag: str) -> tuple[int, ...]:
        return tuple(n for n, ((k, place), *_) in enumerate(form.inputs) if place in getattr(own[k], flag))

    return Function(
        ops=tuple(op for f in own for op in f.ops),
        boxes=tuple(boxes),
        inputs=tuple(own[k].inputs[n] for (k, n), *_ in form.inputs),
        input_of={use: n for use, n in read.items() if n is not None},
        outputs=tuple(own[k].outputs[o] for k, o in form.outputs),
        module=common_module(op.module for f in own for op in f.ops),
        coordinates=tuple(coordinates),
        grads=having("grads"),
        wide=having("wide"),
        again=having("again"),
        saved=tuple(form.outputs.index(end) for end in form.saved),
    )
