"""Plans on meshes that look the same along an axis are compiled at two places of it: all others must come out right.

Every random plan is compiled twice, folded and in full, and the two are compared device by device.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from random_graphs import largest_error, random_model
from random_meshes import MODELS, SHAPES, captured, mesh_plan

import superscaler as ss
from superscaler import compiler
from superscaler.compiler import Compiled, compile_graph
from superscaler.emit.steps import Tables
from superscaler.errors import PlanError
from superscaler.ir.fold import Folded
from superscaler.ir.program import Combine, Device, Forward, Free, Function, Instruction, Program, Recv, Send, Update
from superscaler.ir.transformed import Graph
from superscaler.materialize.check import check_program
from superscaler.materialize.names import reads, writes
from superscaler.materialize.rendezvous import check_rendezvous
from superscaler.schedule.conservation import check_conservation

SProgram = Callable[[Graph, ss.Cluster], Any]
# Wider than any mesh, so that nothing folds; which devices are close is found as ever.
NEVER = 1000


def both(graph: Graph, sprogram: SProgram, world: int, patch: pytest.MonkeyPatch) -> tuple[Compiled, Compiled] | None:
    """Return a plan folded and in full, or None if both are refused."""
    found: list[Compiled | str] = []
    for kept in (2, NEVER):
        patch.setattr(compiler, "KEPT", kept)
        try:
            found.append(compile_graph(graph, sprogram, ss.Cluster.local(world)))
        except PlanError as error:
            found.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    patch.undo()
    folded, full = found
    if isinstance(folded, Compiled) and isinstance(full, Compiled):
        return folded, full
    assert folded == full
    return None


def check_equal(folded: Compiled, full: Compiled) -> None:
    """All that a plan is does not depend on whether it was folded."""
    assert not isinstance(full.program.devices, Folded)
    for kind in ("parts", "instructions", "bytes_moved"):
        assert folded.counts[kind] == full.counts[kind], kind
    assert moves(folded.program) == moves(full.program)
    messages: dict[int, int] = {}
    for rank in range(full.program.world):
        mine, its = folded.program.devices[rank], full.program.devices[rank]
        assert mine.rank == its.rank == rank
        assert mine.weights == its.weights, rank
        difference = first_difference(mine, its, folded.program, full.program, messages)
        assert not difference, f"device {rank}: {difference}"
        assert entries(folded.emitted.tables[rank]) == entries(full.emitted.tables[rank]), rank
    assert len(set(messages.values())) == len(messages)


def moves(program: Program) -> Counter[tuple[Any, ...]]:
    """Return how much moves how, whichever devices tell of it."""
    found: Counter[tuple[Any, ...]] = Counter()
    for m in program.moves:
        for name in ("count", "bytes", "moved"):
            found[m.tensor, m.is_backward, m.way, m.kind, len(m.group), m.reason, name] += getattr(m, name)
    return found


def entries(tables: Tables) -> dict[str, set[str]]:
    """Return the entries of tables without their numbers, and of messages the peers."""
    found = {f.name: {repr(entry) for entry in getattr(tables, f.name)} for f in fields(Tables)}
    return {**found, "messages": {str(peer) for peer, _ in tables.messages}}


def first_difference(a: Device, b: Device, one: Program, other: Program, messages: dict[int, int]) -> str:
    """Return the first instruction that is not the same but for names, or an empty string."""
    called: dict[str, str] = {"_": "_", "one": "one"}
    for number, (i, j) in enumerate(zip(a.instructions, b.instructions, strict=False)):
        shown = f"instruction {number}: {i} is {j} in full"
        if type(i) is not type(j) or len(writes(i)) != len(writes(j)):
            return shown
        mapped = [called.get(n, n) for n in reads(i)]
        if (Counter(mapped) if isinstance(i, Combine | Update) else mapped) != (
            Counter(reads(j)) if isinstance(j, Combine | Update) else list(reads(j))
        ):
            return shown
        called.update(zip(writes(i), writes(j), strict=True))
        if data(i, called, one, messages) != data(j, {}, other, {}):
            return shown
    return "" if len(a.instructions) == len(b.instructions) else "another number of instructions"


def data(i: Instruction, called: dict[str, str], program: Program, messages: dict[int, int]) -> Any:
    """Return what an instruction is without its names, messages numbered as the other program numbers them."""
    match i:
        case Free():
            return {called.get(n, n) for n in i.names}
        case Combine():
            pieces = sorted((called.get(n, n), box) for n, box in i.pieces)
            return replace(i, out="", pieces=tuple(pieces))
        case Update():
            return [sorted((w, called.get(n, n)) for w, n in some) for some in (i.pairs, i.writes)]
        case Forward():
            return replace(i, inputs=(), outputs=(), function=0), computes(program.functions[i.function], program)
    kept = {f.name: getattr(i, f.name) for f in fields(i) if f.name not in NAMES}
    if isinstance(i, Send | Recv):
        del kept["message"]
    return kept


NAMES = ("out", "source", "work", "works", "sources", "into", "value", "outputs", "gradients", "parts")


def computes(function: Function, program: Program) -> list[Any]:
    found = []
    for op, box in zip(function.ops, function.boxes, strict=True):
        placed = program.model.placed(op)
        found.append((op.name, [hi - lo for lo, hi in box], [box[i] for i in placed]))
    return [*found, function.inputs, function.outputs]


def check_deterministic(graph: Graph, sprogram: SProgram, found: Compiled) -> None:
    again = compile_graph(graph, sprogram, found.cluster)
    assert again.emitted.files == found.emitted.files
    assert again.emitted.programs == found.emitted.programs
    assert list(again.emitted.tables) == list(found.emitted.tables)


def is_folded(found: Compiled) -> bool:
    return isinstance(found.program.devices, Folded)


def draw(seed: int) -> tuple[tuple[int, ...], int, float]:
    """Return the shape of a mesh, how many devices there are, and how much is odd."""
    some = random.Random(seed)
    shape = some.choice(SHAPES)
    size = 1
    for width in shape:
        size *= width
    return shape, size + some.choice([0, 0, 0, 1, 2]), some.choice([0.0, 0.0, 0.05, 0.2])
