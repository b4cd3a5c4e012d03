"""Coverage: the elements and addends in a value, and whether each of them occurs exactly once.

An *addend* of a value is one point of its summed indices; an addend of a gradient is one point of the iteration space
of a use. Addends are given as boxes in the slots of the tensor and in these indices. A part that reads only some
addends of an input, or of a gradient, passes them on: its own addends then include them. So a kind of addends is a tree
of links, a *chain*:

    made f sides            summed by op f
    use f k mirror sides    the gradient by input k of op f

`sides` are the inputs of f that are partial in a part: (group, input, chain), one for each group of inputs in which f
is linear. `mirror` is (output, chain) if parts have only some addends of the gradient of an output of f.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from superscaler.certify.boxes import Boxes
from superscaler.ir.model import Model, Op, Operand

# ("rest",), ("made", op, sides), ("use", op, input, mirror, sides); an empty chain inside stands for the whole value.
Chain = tuple[Any, ...]
Column = tuple[Any, ...]
# Per chain, boxes whose columns are first the slots of the tensor, then the columns of the chain.
Addends = Mapping[Chain, "Boxes"]
SEED: Chain = ("use", "", 0, (), ())


@dataclass(frozen=True)
class Kinds:
    """The kinds of addends of a model's tensors."""

    model: Model

    @cached_property
    def op(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.model.ops}

    @cached_property
    def uses(self) -> Mapping[str, Sequence[tuple[Op, int]]]:
        """Return, for each tensor with a gradient, the uses over which the gradient is summed, uses of its recomputed
        value included.
        """
        found: dict[str, list[tuple[Op, int]]] = {}
        for name, uses in self.model.uses.items():
            own = found.setdefault(self.model.origin(name), [])
            own += [(op, k) for op, k in uses if op.has_mirror and self.model.tensors[name].requires_grad]
        return found

    def heads(self, tensor: str, is_gradient: bool) -> tuple[Chain, ...]:
        """Return the chains of a whole value that no part passed on."""
        tensor = self.model.origin(tensor) if is_gradient else tensor
        if (tensor, is_gradient) not in self._heads:
            self._heads[tensor, is_gradient] = tuple(self._find_heads(tensor, is_gradient))
        return self._heads[tensor, is_gradient]

    @cached_property
    def _heads(self) -> dict[tuple[str, bool], tuple[Chain, ...]]:
        return {}

    def _find_heads(self, tensor: str, is_gradient: bool) -> Iterator[Chain]:
        if not is_gradient:
            made = self.model.producers.get(tensor)
            yield ("rest",) if made is None else ("made", made[0].name, ())
            return
        yield from (("use", op.name, k, (), ()) for op, k in self.uses.get(tensor, ()))
        if tensor in self.model.losses:
            yield SEED

    def columns(self, chain: Chain, tensor: str) -> Mapping[Column, int]:
        """Return the columns of a tensor's chain, behind its slots, with their full sizes."""
        if (chain, tensor) not in self._columns:
            self._columns[chain, tensor] = dict(self._find_columns(chain, tensor))
        return self._columns[chain, tensor]

    @cached_property
    def _columns(self) -> dict[tuple[Chain, str], Mapping[Column, int]]:
        return {}

    def _find_columns(self, chain: Chain, tensor: str) -> Iterator[tuple[Column, int]]:
        if chain[0] == "rest" or chain == SEED:
            return
        op = self.op[chain[1]]
        inner = [("i", k, sub) for _, k, sub in chain[-1]]
        if chain[0] == "use":
            own, inner = op.inputs[chain[2]], [("o", *chain[3]), *inner] if chain[3] else inner
        else:
            own = op.outputs[self.model.producers[tensor][1]]
        yield from (((op.name, i), op.indices[i].size) for i in op.summed(own))
        for side, number, sub in inner:
            other = (op.outputs if side == "o" else op.inputs)[number]
            extents = self.model.tensors[other.tensor].extents
            for slot, index in enumerate(other.slots):
                if index is None:
                    yield (op.name, side, number, slot), extents[slot]
            if sub:
                yield from (((op.name, side, number, *c), n) for c, n in self.columns(sub, other.tensor).items())

    def complete(self, tensor: str, is_gradient: bool, chains: Sequence[Chain]) -> tuple[Chain, ...]:
        """Return the chains whose sum, each once, is the whole value, as finely divided as `chains`."""
        tensor = self.model.origin(tensor) if is_gradient else tensor
        if not chains or set(chains) <= set(self.heads(tensor, is_gradient)):
            return self.heads(tensor, is_gradient)
        if not is_gradient:
            op, _ = self.model.producers[tensor]
            return tuple(("made", op.name, sides) for sides in self._sides(op, chains))
        found = [SEED] if tensor in self.model.losses else []
        for op, k in self.uses[tensor]:
            own = [c for c in chains if c[:3] == ("use", op.name, k)]
            found += [("use", op.name, k, *both) for both in product(self._mirrors(op, own), self._sides(op, own))]
        return tuple(found)

    def _mirrors(self, op: Op, chains: Sequence[Chain]) -> list[Chain]:
        if not any(c[3] for c in chains):
            return [()]
        return [
            (j, sub)
            for j, output in enumerate(op.outputs)
            if self.heads(output.tensor, True)
            for sub in self._below(output, True, [c[3][1] for c in chains if c[3] and c[3][0] == j])
        ]

    def _sides(self, op: Op, chains: Sequence[Chain]) -> list[Chain]:
        given = list(dict.fromkeys(side for c in chains for side in c[-1]))
        ways = [
            [
                (group, k, sub)
                for k in op.linear[group]
                for sub in self._below(op.inputs[k], False, [s for g, i, s in given if (g, i) == (group, k)])
            ]
            for group in sorted({group for group, *_ in given})
        ]
        return list(product(*ways))

    def _below(self, operand: Operand, is_gradient: bool, chains: Sequence[Chain]) -> Sequence[Chain]:
        inner = [c for c in chains if c]
        return self.complete(operand.tensor, is_gradient, inner) if inner else [()]

    def spread(self, tensor: str, chain: Chain, boxes: Boxes, goal: Chain) -> Boxes | None:
        """Return boxes of a chain as boxes of a finer chain, or None if that one does not refine it."""
        if chain == goal:
            return boxes
        if not _is_within(chain, goal):
            return None
        slots = len(self.model.tensors[tensor].extents)
        mine = {column: slots + n for n, column in enumerate(self.columns(chain, tensor))}
        wanted = self.columns(goal, tensor)
        shapes, at = boxes.shapes, boxes.at
        found = np.zeros((*shapes.shape[:2], slots + len(wanted), 2), dtype=np.int64)
        moved = np.zeros((len(at), slots + len(wanted)), dtype=np.int64)
        found[:, :, :slots], moved[:, :slots] = shapes[:, :, :slots], at[:, :slots]
        for n, (column, size) in enumerate(wanted.items(), slots):
            if column in mine:
                found[:, :, n], moved[:, n] = shapes[:, :, mine[column]], at[:, mine[column]]
            else:
                found[:, :, n, 1] = size
        return Boxes(moved, found)


def _is_within(chain: Chain, goal: Chain) -> bool:
    """Return whether `goal` refines `chain`."""
    if not chain or chain == goal:
        return True
    if not goal or (chain[:3] != goal[:3] and (chain[0] != "made" or chain[:2] != goal[:2])):
        return False
    if (
        chain[0] == "use"
        and chain[3]
        and not (goal[3] and chain[3][0] == goal[3][0] and _is_within(chain[3][1], goal[3][1]))
    ):
        return False
    finer = {group: (k, sub) for group, k, sub in goal[-1]}
    return all(
        group in finer and finer[group][0] == k and _is_within(sub, finer[group][1]) for group, k, sub in chain[-1]
    )
