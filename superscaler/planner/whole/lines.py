"""Whole plans: compiled with the real verbs and simulated; a step of many microbatches is on the line through two steps
of few, and one of many blocks on that through two models of few.

From three times as many microbatches as stages on, each further one adds as many seconds and bytes. So does each
further block where devices do not wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from superscaler.cluster import Cluster
from superscaler.compiler import compile_graph
from superscaler.errors import PlanError
from superscaler.ir.graph import Graph
from superscaler.ir.grid import Ints
from superscaler.ir.loops import NONE
from superscaler.ir.parts import Block
from superscaler.ir.program import Instruction, Program, calls
from superscaler.planner.kinds import of_batch, reduced
from superscaler.planner.orders.measured import of_choice
from superscaler.planner.orders.works import Works
from superscaler.planner.space import Choice
from superscaler.plans import resolve
from superscaler.simulate.memory import DeviceMemory
from superscaler.simulate.predict import Simulation, overheads_of, simulate
from superscaler.simulate.prediction import DeviceTimes, Prediction
from superscaler.simulate.storages import CATEGORIES, TEMPORARY
from superscaler.simulate.system import System

# The microbatches of both steps, for each stage of the pipeline.
_FEW, _MORE = 3, 4
# The step of fewer than so many for each stage is compiled with all of them.
_MANY = 2 * _MORE
# The blocks of the smaller model in the longest run, and the further ones of the larger.
_SHORT, _FURTHER = 4, 2
# Models whose longest run has fewer blocks are compiled with all of them.
_DEEP = 24
# The waits for the host that further blocks may add, in seconds of the step. From the block on where the host is late,
# each adds more than those before it.
_WAITS = 1e-3
# Numbers of the devices, which are not of a step.
_CONSTANT = {"peak_flops", "capacity", "reserved"}
# In the place of a microbatch: after all of them.
_END = -2
Row = TypeVar("Row", Prediction, DeviceTimes)


class _At(NamedTuple):
    """An instruction of a device: its number, and what it has in common with those of equal blocks, which are its kind
    and the number of ops of its segment.
    """

    number: int
    like: tuple[type[Instruction], int]


class Whole(NamedTuple):
    """A plan that was compiled whole. `program`: None if its step is on a line. `works`: of a pipeline whose order may
    be improved, as they are in the simulated step of most microbatches.
    """

    prediction: Prediction
    program: Program | None
    works: Works | None = None


def predicted(
    graph: Graph,
    cluster: Cluster,
    memory: int | None,
    system: System,
    choice: Choice,
    certified: bool = False,
    runs: Sequence[Sequence[Block]] = (),
) -> Whole:
    """Return the prediction of a plan of a graph's model. Raises PlanError if the model does not allow it. `certified`:
    see `compile_graph`; all microbatches and blocks are compiled. `runs`: of equal blocks, which a plan without a
    pipeline is predicted with fewer of.
    """

    def simulated(own: Choice, counts: Sequence[int] = ()) -> Simulation:
        small = reduced(graph, runs, counts, own.batch) if counts else of_batch(graph, own.batch)
        program = compile_graph(small, resolve(own.spec), cluster, certified).program
        return simulate(program, cluster, memory, system)

    # Copies to the host hide that starts of kernels are late in a small model.
    is_line = choice.pp == 1 and choice.swap == "none" and not certified

    def of(microbatches: int) -> Whole:
        own = replace(choice, microbatches=microbatches)
        if is_line and (found := _of_blocks(lambda n: simulated(own, n), runs)):
            return Whole(found, None)
        whole = simulated(own)
        return Whole(whole.prediction, whole.program, of_choice(whole, own))

    if certified or choice.microbatches <= _MANY * choice.pp:
        return of(choice.microbatches)
    few, more = (of(n * choice.pp) for n in (_FEW, _MORE))
    times = (choice.microbatches - _MORE * choice.pp) / ((_MORE - _FEW) * choice.pp)
    works = more.works and more.works.of(choice.microbatches)
    return Whole(_lines(few.prediction, more.prediction, times), None, works)


def _lines(few: Prediction, more: Prediction, times: float) -> Prediction:
    rows = {device: row for row in few.devices for device in row.devices}
    devices = tuple(_on_line(rows[row.devices[0]], row, times) for row in more.devices)
    return replace(_on_line(few, more, times), devices=devices)


def _on_line(few: Row, more: Row, times: float) -> Row:
    """Return a row with the numbers of `more`, and so many times what it has beyond `few`."""

    def line(a: Any, b: Any) -> Any:
        if isinstance(b, dict):
            return {key: line(a.get(key, 0), value) for key, value in b.items()}
        grown = b + max(b - a, 0) * times
        return round(grown) if isinstance(b, int) else grown

    names = {f.name for f in fields(more)} - _CONSTANT
    pairs = {name: (getattr(few, name), getattr(more, name)) for name in names}
    return replace(more, **{name: line(a, b) for name, (a, b) in pairs.items() if isinstance(b, (int, float, dict))})


def _of_blocks(of: Callable[[Sequence[int]], Simulation], runs: Sequence[Sequence[Block]]) -> Prediction | None:
    """Return the prediction for a model on the line through two with fewer blocks in each run; None if its runs are
    short, or it is on none. `of`: from the blocks of each run to a simulated step.
    """
    lengths = [len(run) for run in runs]
    if max(lengths, default=0) < _DEEP:
        return None
    times = (max(lengths) - _SHORT) // _FURTHER
    # Each run has so many more in the larger model that the same number of further ones gives all of its blocks.
    further = [max(n - _SHORT, 0) // times for n in lengths]
    counts = [n - times * more for n, more in zip(lengths, further, strict=True)]
    try:
        few, more = of(counts), of([n + more for n, more in zip(counts, further, strict=True)])
    except PlanError:
        # The whole model may have room for what a smaller one does not allow, and has the errors of its own.
        return None
    a, b = few.prediction, more.prediction
    is_late = b.mean("host") - a.mean("host") > _WAITS * b.step_seconds
    if is_late or [m.rank for m in few.memories] != [m.rank for m in more.memories]:
        return None
    found = _lines(a, b, times - 1)
    rows = [_holding(row, few, more, times - 1) for row in found.devices]
    return None if None in rows else replace(found, devices=tuple(filter(None, rows)))


def _holding(row: DeviceTimes, few: Simulation, more: Simulation, times: int) -> DeviceTimes | None:
    """Return a row with the most bytes that any moment of the step has on its own line; None if the moment with the
    most of the larger model is on none, as in one segment of all blocks.
    """
    share, found = overheads_of(more.cluster).fragmentation, list[tuple[int, dict[str, int]]]()
    for a, b in zip(few.memories, more.memories, strict=True):
        if b.rank not in row.devices:
            continue
        moments = dict(_moments(few, more, (a, b), times))
        if b.at not in moments:
            return None
        parts = max(moments.values(), key=lambda own: int(own.sum()))
        peak = int(parts.sum())
        overhead = b.overhead + round(share * peak) - round(share * b.peak)
        found.append((peak + overhead, {**dict(zip(CATEGORIES, parts.tolist(), strict=True)), "overhead": overhead}))
    total, memory = max(found, key=lambda one: one[0])
    return replace(row, peak_bytes=total, memory=memory)


def _moments(few: Simulation, more: Simulation, pair: Sequence[DeviceMemory], times: int) -> Iterator[tuple[int, Ints]]:
    """Yield the bytes of a device by category in the instructions that both models have, each with its number in the
    larger one: the first and the last ones of each direction of each microbatch. Between these, bytes change evenly.
    """
    sections = [_sections(one.program, memory.rank) for one, memory in zip((few, more), pair, strict=True)]
    first, second = map(_bytes, pair)
    listed = overheads_of(more.cluster).listed
    for key in sections[0].keys() & sections[1].keys():
        for way in (1, -1):
            for kind, n, m in _alike(*(section[key][::way] for section in sections)):
                found = second[m] + (second[m] - first[n]) * times
                if kind.updates:
                    # Weights that are updated at once make no more.
                    found[TEMPORARY] = min(found[TEMPORARY], max(second[m][TEMPORARY], listed))
                yield m, found


def _alike(few: Sequence[_At], more: Sequence[_At]) -> Iterator[tuple[type[Instruction], int, int]]:
    """Yield the kinds and numbers of the instructions with which both begin, up to the middle of the fewer: gathers
    that its last blocks do not begin for further ones belong to the other end.
    """
    for a, b in zip(few[: len(few) // 2 + 1], more, strict=False):
        if a.like != b.like:
            return
        yield a.like[0], a.number, b.number


def _sections(program: Program, rank: int) -> dict[tuple[int, bool], list[_At]]:
    """Return the instructions of a device, with their numbers and what is equal for equal blocks, by microbatch and
    direction; those after the last segment apart.
    """
    code = next(device for device, _ in program.distinct if device.rank == rank).instructions
    functions = {call.task: len(program.functions[call.function].ops) for _, call in calls(code)}
    found, key = dict[tuple[int, bool], list[_At]](), (NONE, False)
    last = max((n for n, i in enumerate(code) if i.runs_segment), default=0)
    for n, i in enumerate(code):
        if i.runs_segment and i.task is not None:
            is_back = i.is_mirror or (key[1] and key[0] == i.task.microbatch)
            key = i.task.microbatch, is_back
        key = key if n <= last else (_END, True)
        found.setdefault(key, []).append(_At(n, (type(i), functions.get(i.task, 0) if i.task else 0)))
    return found


def _bytes(memory: DeviceMemory) -> Ints:
    """Return the most bytes of each instruction, by category."""
    rows = np.vstack([np.zeros((1, len(CATEGORIES)), dtype=np.int64), memory.curve[:-1]])
    rows[:, TEMPORARY] = memory.during - rows.sum(axis=1) + rows[:, TEMPORARY]
    return rows
