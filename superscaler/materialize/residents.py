"""What is on a device before a step begins: weights at rest, and slices of inputs, constants and frozen weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from superscaler.ir.mask import Box
from superscaler.ir.parts import HOSTS
from superscaler.ir.program import Load, Value, Weight
from superscaler.materialize.code import Code
from superscaler.schedule.edges import Edges
from superscaler.schedule.transfers import UPDATE, Place


class Residents:
    """Weights of each device by name. `of` has those at rest, by where their update reads."""

    def __init__(self, edges: Edges, code: Code) -> None:
        self.code, self.edges = code, edges
        self.weights: list[dict[Value, Weight]] = [{} for _ in code.of]
        self.of: dict[Place, Weight] = {}
        # Of outputs, which are at rest nowhere, where they are given.
        self.given: dict[Place, tuple[str, Box]] = {}
        self._slices: dict[tuple[int, str, Box], Value] = {}
        self._count: Counter[tuple[int, str, int]] = Counter()

    def load_weights(self) -> Iterator[tuple[Place, Value]]:
        """Load all weights at rest; yield where each is made, and its name."""
        nexts = self.edges.model.nexts
        for tensor, op in self.edges.homes.items():
            rows, held = self.edges.rows[op.name], self.edges.held(op, 0)
            counted = set() if op.is_write else set(self.edges.whole(held))
            for row, key in enumerate(rows.keys):
                rank, box = key[0], held.box(row)
                place = Place(UPDATE, self.edges.home_number[tensor], key, 0)
                if op.is_output:
                    self.given[place] = tensor, box
                    continue
                if tensor in nexts:
                    self.of[place] = self.of[place._replace(segment=self.edges.home_number[nexts[tensor]])]
                    yield place, self.of[place].name
                    continue
                name = self.code.fresh(rank, self.code.like(tensor)._replace(part=key[2]))
                weight = Weight(name, tensor, box, not op.is_write, row in counted, op.group, rank >= HOSTS)
                self.weights[rank % HOSTS][name] = self.of[place] = weight
                self.code.write(rank, Load(name, tensor, box))
                yield place, name

    def slice(self, rank: int, tensor: str, box: Box, microbatch: int = -1) -> Value:
        """Return the name of a slice of an input, a constant, or a frozen weight: every device can have any."""
        key = (rank, tensor, box)
        if key not in self._slices:
            like = self.code.like(tensor)._replace(microbatch=microbatch, slice=self._count[rank, tensor, microbatch])
            self._count[rank, tensor, microbatch] += 1
            name = self._slices[key] = self.code.fresh(rank, like)
            if self.code.tensors[tensor].kind != "input":
                self.weights[rank][name] = Weight(name, tensor, box, False, False)
            self.code.write(rank, Load(name, tensor, box))
        return self._slices[key]
