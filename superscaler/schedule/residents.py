"""Resident weights: a weight lives with its optimizer op, which by default follows the weight's readers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from superscaler.errors import ScheduleError
from superscaler.groups import collect, group_by
from superscaler.ir.graph import Graph
from superscaler.ir.grid import Axis, Grid, Ints
from superscaler.ir.mask import Box, extents, intersect
from superscaler.ir.model import Op, Operand, PTensor
from superscaler.ir.parts import expand
from superscaler.schedule.joins import project

Located = tuple[int, Box]


def place_updates(graph: Graph, world: int) -> None:
    """Place the optimizer ops that no op_assign placed: at the readers of their weight, or else at its makers. Outputs
    of the step go to all devices.
    """
    producers, uses, nexts = graph.model.producers, dict(graph.model.uses), graph.model.nexts
    for version, weight in graph.model.versions.items():
        # If all readers of a weight read an older version, the weight is where that is read.
        uses[weight] = uses[weight] or uses[version]
    for version, weight in graph.model.versions.items():
        uses[version] = uses[version] or uses[weight]
    homes = {op.inputs[0].tensor: op for op in graph.model.ops if not op.is_forward}
    grids: dict[Hashable, Grid] = {}
    for op in graph.model.ops:
        grid = graph.grids[op.name]
        if not op.is_forward and op.inputs[0].tensor in nexts:
            _stay(graph, op, homes[nexts[op.inputs[0].tensor]])
            continue
        if op.is_forward or grid.axes or grid.children or int(grid.devices) >= 0:
            continue
        if op.is_output:
            graph.grids[op.name] = Grid((Axis(None, (1,) * world),), np.arange(world))
            continue
        tensor = graph.model.tensors[op.inputs[0].tensor]
        ends = [(reader, reader.inputs[k]) for reader, k in uses[tensor.name]]
        if not ends:
            # The buffer is set, but never read.
            maker, j = producers[op.inputs[-1].tensor]
            ends = [(maker, maker.outputs[j])]
        portions = {p.key: p for p in (_Portions.of(graph, reader, operand) for reader, operand in ends)}
        key = frozenset(portions), op.is_whole, op.outputs[0].slots
        if key not in grids:
            readers = set[Located]().union(*(p.located() for p in portions.values()))
            grids[key] = _along(follow(op, tensor, readers), [*graph.mesh.values()])
        graph.grids[op.name] = grids[key].copy()


def check_copies(graph: Graph) -> None:
    """Raise ScheduleError for a copy of `Insert` on the devices of all its readers: it changes nothing."""
    known: dict[Hashable, set[Located]] = {}

    def located(op: Op, operand: Operand) -> set[Located]:
        portions = _Portions.of(graph, op, operand)
        if portions.key not in known:
            known[portions.key] = portions.located()
        return known[portions.key]

    for op in (op for op in graph.forward_ops if op.is_copy):
        readers = graph.model.uses[op.outputs[0].tensor]
        read = set[Located]().union(*(located(reader, reader.inputs[k]) for reader, k in readers))
        names = {reader.name for reader, _ in readers} if read == located(op, op.outputs[0]) else set()
        if entry := next((e for e in graph.journal if e.op in names and e.detail.startswith("Insert(")), None):
            raise ScheduleError(
                f"op_trans at {entry.where}: the copy {op.name} is where {entry.op} reads it, so it changes nothing; "
                f"place it elsewhere, as op_assign(graph, copies, 'host'), or leave {entry.detail} out."
            )


def _stay(graph: Graph, op: Op, before: Op) -> None:
    """Place the update of a later iteration where the update before it is. Raises ScheduleError if a plan places it
    elsewhere.
    """
    own, theirs, hosted = graph.grids[op.name], graph.grids[before.name], graph.policy.hosted
    is_same = own.signature() == theirs.signature() or _parts(graph, op) == _parts(graph, before)
    if own.is_touched and not (is_same and (op.name in hosted) == (before.name in hosted)):
        raise ScheduleError(
            f"{op.name} is cut or placed otherwise than {before.name}, but a weight stays where it is between the "
            "iterations of a step; cut and place both alike, or the first only."
        )
    graph.grids[op.name] = own if own.is_touched else theirs
    if before.name in hosted:
        graph.policy = replace(graph.policy, hosted=hosted | {op.name})


def _parts(graph: Graph, op: Op) -> tuple[object, ...]:
    """Return the places and the boxes of an op's parts, in whichever way a plan named them."""
    rows = graph.rows(op)
    return rows.keys, rows.boxes


@dataclass(frozen=True, slots=True)
class _Portions:
    """The portions of a tensor that the parts of an op read or make, as an operand of the op."""

    op: Op
    operand: Operand
    whole: tuple[int, ...]
    grid: Grid

    @staticmethod
    def of(graph: Graph, op: Op, operand: Operand) -> _Portions:
        """Return the portions of an operand; grid axes that change neither a device nor a portion are left out."""
        grid = graph.grids[op.name]
        if not grid.children:
            kept = [k for k, a in enumerate(grid.axes) if grid.devices.strides[k] or a.index in operand.slots]
            once = tuple(slice(None) if k in kept else 0 for k in range(len(grid.axes)))
            grid = Grid(tuple(grid.axes[k] for k in kept), grid.devices[once])
        return _Portions(op, operand, graph.model.tensors[operand.tensor].extents, grid)

    @property
    def key(self) -> Hashable:
        """Return a value that is equal only for portions that are equal and lie on equal devices."""
        return self.grid.signature(), tuple(i.size for i in self.op.indices), self.operand.slots, self.whole

    def located(self) -> set[Located]:
        """Return the device and the box of each portion."""
        rows = expand(self.op, self.grid)
        ends = np.stack(project(rows, self.operand, self.whole), axis=-1).tolist()
        boxes = (tuple((low, high) for low, high in box) for box in ends)
        return set(zip(rows.device.tolist(), boxes, strict=True))


def follow(op: Op, tensor: PTensor, readers: Collection[Located]) -> Grid:
    """Return the grid of an optimizer op at the readers of its weight; `readers` are (device, box) pairs.

    A device keeps the largest boxes that it reads. All of them together tile the weight, or else the boxes of one size
    do. If no boxes tile the weight, or the optimizer needs it whole, every reading device keeps all of it, which is
    always right.
    """
    kept = _maximal(readers)
    if op.is_whole:
        return _on_each(kept)
    shared = _regular(op, tensor, kept)
    if shared is not None:
        return shared
    by_size = group_by(kept, lambda place: extents(place[1]))
    grids = [_regular(op, tensor, places) for places in by_size.values()]
    found = [grid for grid in grids if grid is not None]
    if len(found) < len(grids):
        return _on_each(kept)
    return Grid((Axis(None, (1,) * len(found)),), np.full(len(found), -1), dict(enumerate(found)))


def _on_each(kept: Iterable[Located]) -> Grid:
    """Return the grid of an op with a copy on each device."""
    devices = sorted({device for device, _ in kept})
    return Grid((Axis(None, (1,) * len(devices)),), np.array(devices))


def _maximal(readers: Iterable[Located]) -> list[Located]:
    by_device: dict[int, set[Box]] = {}
    for device, box in readers:
        by_device.setdefault(device, set()).add(box)
    return sorted(
        (device, box)
        for device, boxes in by_device.items()
        for box in boxes
        if not any(other != box and intersect(other, box) == box for other in boxes)
    )


def _regular(op: Op, tensor: PTensor, kept: list[Located]) -> Grid | None:
    """Return a grid of splits and one replica axis, if the boxes are a product of ranges with equally many holders."""
    owners = collect((box, device) for device, box in kept)
    ranges = [sorted({box[slot] for box in owners}) for slot in range(len(tensor.extents))]
    counts = {len(devices) for devices in owners.values()}
    tiles = all(
        [lo for lo, _ in cuts] == [0, *(hi for _, hi in cuts[:-1])] and cuts[-1][1] == extent
        for cuts, extent in zip(ranges, tensor.extents, strict=True)
    )
    if not tiles or len(counts) != 1 or len(owners) != np.prod([len(cuts) for cuts in ranges], dtype=int):
        return None
    index_of = dict(enumerate(i for i in op.outputs[0].slots if i is not None))
    cut = [slot for slot, cuts in enumerate(ranges) if len(cuts) > 1]
    axes = [Axis(index_of[slot], tuple(hi - lo for lo, hi in ranges[slot])) for slot in cut]
    copies = counts.pop()
    shape = [len(a.sizes) for a in axes]
    devices = np.empty([*shape, copies], dtype=np.int64)
    for where in np.ndindex(*shape):
        place = dict(zip(cut, where, strict=True))
        box = tuple(cuts[place.get(slot, 0)] for slot, cuts in enumerate(ranges))
        devices[where] = owners[box]
    for at in reversed(range(len(axes))):
        axes[at : at + 1], devices = _by_device(axes[at], devices, at)
    return Grid((*axes, Axis(None, (1,) * copies)), devices)


def _along(grid: Grid, mesh: Sequence[int]) -> Grid:
    """Return a grid with an axis for each axis of a mesh that one of its axes is along, as those of forwards: equal
    parts on devices of a mesh [2, 4] are [2, 4], too, where they are in its order.
    """
    axes, devices = [*grid.axes], grid.devices
    if grid.children or not mesh or int(devices.max()) >= prod(mesh):
        return grid
    for at, axis in reversed([*enumerate(axes)]):
        line = devices[tuple(slice(None) if k == at else 0 for k in range(grid.devices.ndim))]
        widths = _widths(line, mesh) if len(set(axis.sizes)) == 1 else ()
        if len(widths) > 1:
            inner = [prod(widths[k + 1 :]) if axis.index is not None else 1 for k in range(len(widths))]
            pairs = zip(widths, inner, strict=True)
            axes[at : at + 1] = [replace(axis, sizes=(each * axis.sizes[0],) * width) for width, each in pairs]
            devices = devices.reshape(*devices.shape[:at], *widths, *devices.shape[at + 1 :])
    return Grid(tuple(axes), devices)


def _widths(line: Ints, mesh: Sequence[int]) -> tuple[int, ...]:
    """Return the number of devices of a line along each axis of a mesh, the outer axis first; nothing if they are no
    product.

    >>> _widths(np.array([0, 1, 2, 3, 4, 5]), [2, 3]), _widths(np.array([0, 3, 1, 4]), [2, 3])
    ((2, 3), (2, 2))
    """
    places, found = np.stack(np.unravel_index(line, mesh), axis=-1), list[int]()
    while (step := prod(found)) < len(line):
        changed = places[::step] != places[0]
        own = changed[1]
        width = next((k for k, some in enumerate(changed) if (some & ~own).any()), len(changed))
        if own.sum() != 1 or len(line) % (width * step):
            return ()
        found = [width, *found]
    wide = line.reshape(found)
    sides = [np.moveaxis(wide, at, 0).reshape(width, -1) for at, width in enumerate(found)]
    is_product = all((side - side[:1] == (side - side[:1])[:, :1]).all() for side in sides)
    return tuple(found) if is_product else ()


def _by_device(axis: Axis, devices: Ints, at: int) -> tuple[list[Axis], Ints]:
    """Return an axis as two if each device has equally many neighbours: the outer one is along the devices. Also return
    the devices along these.
    """
    count = len(axis.sizes)
    rows = np.moveaxis(devices, at, 0).reshape(count, -1)
    runs = 1 + int((rows[1:] != rows[:-1]).any(axis=1).sum())
    each = count // runs
    is_even = len(set(axis.sizes)) == 1 and 1 not in (runs, each) and count % runs == 0
    if not is_even or (rows[::each].repeat(each, 0) != rows).any():
        return [axis], devices
    outer, inner = Axis(axis.index, (each * axis.sizes[0],) * runs), Axis(axis.index, axis.sizes[:each])
    return [outer, inner], devices.reshape(*devices.shape[:at], runs, each, *devices.shape[at + 1 :])
