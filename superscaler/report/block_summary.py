"""Facts of a plan as plain data: splits, places, weights and communication by block."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from math import prod
from typing import Any

from superscaler.cluster import Cluster
from superscaler.compiler import Compiled
from superscaler.groups import collect, group_by
from superscaler.ir.communication import TransferRow, bytes_moved, paths
from superscaler.ir.graph import Graph
from superscaler.ir.grid import HOSTS, Grid
from superscaler.ir.grid import Axis as Cut
from superscaler.ir.layout import Path, layout_of
from superscaler.ir.mask import extents
from superscaler.ir.model import Op, Operand, width
from superscaler.ir.orders import Action
from superscaler.ir.program import Instruction, Meets, Program, calls
from superscaler.ir.variants import without_twins
from superscaler.report.event_notes import OUTSIDE, home_of
from superscaler.report.model import collapse, describe, span
from superscaler.report.places import MOST, NO_GROUPS, Groups, Places
from superscaler.report.schema import VERSION, Axis, Block, Order, Sent, Split, Weights, plain


def account(compiled: Compiled) -> dict[str, Any]:
    """Return explain.json, which `superscaler.report.explain` puts into words. Equal blocks share one entry."""
    every = _Blocks(compiled)
    model = without_twins(compiled.graph.model)
    found, optimizer = describe(model), model.optimizer
    equal = group_by(map(every.describe, every.ops), lambda block: replace(block, names=()))
    blocks = [replace(one, names=tuple(b.names[0] for b in blocks)) for one, blocks in equal.items()]
    return {
        "version": VERSION,
        "world": compiled.program.world,
        "cluster": str(compiled.cluster),
        "model": {
            **{k: found[k] for k in ("parameters", "parameter_bytes", "trained_parameters", "buffers", "flops")},
            "ops": sum(found["ops"].values()),
            "optimizer": optimizer.name or "inference",
            "options": [dict(options) for options in optimizer.groups],
            **({"precision": optimizer.precision} if optimizer.precision else {}),
        },
        "blocks": plain(Block, blocks),
        "schedule": plain(Order, every.schedule()),
        "relaxations": [{"name": r.name, "ops": list(r.ops)} for r in compiled.schedule.relaxations],
        "orders": list(map(str, compiled.graph.orders)),
        "summary": summary(compiled),
        "counts": compiled.counts,
        "totals": _totals(compiled.moves),
        "paths": [every.path(path) for path in paths(compiled.program)],
        "bytes_moved": bytes_moved(compiled.program),
    }


def summary(compiled: Compiled) -> str:
    """Return one line per distinct program: its devices, its segments, its communication per step."""
    groups = group_by(range(compiled.program.world), lambda rank: compiled.emitted.programs[rank])
    fold = compiled.fold
    mesh = "" if fold is None else f", folded over {' x '.join(map(str, fold.widths))} places"
    ages = [age for age in compiled.graph.model.ages.values() if age]
    stale = f"; {len(ages)} weights are stale by {span(ages)}" if ages else ""
    lines = [f"{len(groups)} distinct program{'s' * (len(groups) != 1)} for {compiled.cluster}{mesh}{stale}"]
    stages = _stages(compiled.graph)
    for name, ranks in groups.items():
        code = compiled.program.devices[ranks[0]].instructions
        kinds = Counter(map(_sent, code))
        runs = Counter(_letter(compiled.program, i) for i in code if i.runs_segment)
        work = ", ".join(f"{runs[kind]} {kind}" for kind in "FRBIW" if runs[kind] or kind in "FB")
        sent = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()) if kind) or "no communication"
        functions = (compiled.program.functions[i.function] for _, i in calls(code))
        modules = list(dict.fromkeys(f.module for f in functions if f.module))
        shown = f"{modules[0]} .. {modules[-1]}" if len(modules) > 1 else "".join(modules)
        order = _microbatches(compiled, code, stages)
        devices = ", ".join(map(str, ranks[:16])) + (f", ... ({len(ranks)})" if len(ranks) > 16 else "")
        lines.append(f"  {name}: devices {devices}: {work}; {sent}; {shown}")
        lines += [f"    {order}"] if order else []
    return "\n".join(lines)


def _sent(i: Instruction) -> str:
    """Return the kind of transfer that a device starts for others or its host; "" for none. Losses do not count."""
    if i.meets in (Meets.NOBODY, Meets.ALL) or (i.meets is Meets.PEER and not i.is_send):
        return ""
    return i.kind if i.task is None else f"{type(i).__name__.lower()} of a tape"


def _letter(program: Program, i: Instruction) -> str:
    """Return the letter of a kind of work: F, R (recomputed forward), C (copy), B, or I or W for half of it."""
    if i.is_mirror:
        return {"": "B", "input": "I", "weight": "W"}[i.half]
    ops = program.functions[i.function].ops
    return "C" if any(op.is_copy for op in ops) else "R" if any(op.origin for op in ops) else "F"


def _microbatches(compiled: Compiled, code: Sequence[Instruction], stages: Mapping[str, int | str]) -> str:
    """Return the order of a device's forwards and backwards by microbatch, as F0 F1 B0 ...; empty without microbatches.

    With stages in an order, they have numbers: 2F0 2F1 2B0 ...
    """
    program, segments = compiled.program, compiled.schedule.segments
    # Forwards outside stages that keep nothing and are not recomputed only prepare data: they are left out.
    numbered = []
    for i, task in ((i, i.task) for i in code if i.runs_segment and i.task is not None and i.task.microbatch >= 0):
        ops = segments[task.segment].ops
        stage = stages.get(ops[0].origin or ops[0].name, "")
        if stage != "" or i.is_mirror or program.functions[i.function].grads or any(o.region for o in ops):
            numbered.append(f"{stage}{_letter(program, i)}{task.microbatch}")
    return " ".join(word for word, _ in groupby(numbered))


def _stages(graph: Graph) -> dict[str, int | str]:
    """Return the stage number of each op in a group with the label of an action (2F0)."""
    groups = (group for order in graph.orders for group in (order.before, order.after) if group.kind == "F")
    labelled = (group for group in groups if Action.matches(group.label))
    return {name: Action.parse(group.label).stage for group in labelled for name, _ in group.members}


def _totals(moves: Iterable[TransferRow]) -> list[dict[str, Any]]:
    """Return the transfers by direction, way and kind: their number, the bytes of sources, and bytes on links."""
    found = sorted(group_by(moves, lambda m: (_direction(m), m.way, m.kind)).items(), reverse=True)
    return [{"direction": d, "way": way, "kind": kind, **_add(some)} for (d, way, kind), some in found]


def _add(moves: Sequence[TransferRow]) -> dict[str, Any]:
    return {what: sum(getattr(move, what) for move in moves) for what in ("count", "bytes", "moved")}


def _sums(
    moves: Sequence[TransferRow], everywhere: Mapping[tuple[int, ...], list[tuple[int, ...]]], cluster: Cluster
) -> dict[str, Any]:
    """Return the sums of transfers of one kind, and their seconds in turn: the lower bound and the prediction.

    A transfer in a bucket counts its share; groups without a common device are assumed to run at once.
    """
    groups = list(dict.fromkeys(group for move in moves for group in everywhere[move.group]))
    seconds: Counter[str] = Counter()
    for together, some in group_by(moves, lambda move: move.together).items():
        count, size = (sum(getattr(move, what) for move in some) for what in ("count", "bytes"))
        own = list(dict.fromkeys(group for move in some for group in everywhere[move.group]))
        are_disjoint = len({d for group in own for d in group}) == sum(map(len, own))
        waves = [own] if are_disjoint else [[group] for group in own]
        for what, formula in (("seconds", cluster.seconds), ("bound", cluster.bound)):
            each = sum(formula(some[0].kind, wave, size / count * together) for wave in waves) / together
            seconds[what] += count / len(own) * each
    rounded = {what: float(f"{value:.3g}") for what, value in seconds.items()}
    groups = [group[:1] for group in groups] if moves[0].way == "copies" else groups
    return {"groups": Groups.of(groups, moves[0].kind), **_add(moves), **rounded}


def _direction(move: TransferRow | Path) -> str:
    return "backward" if move.is_backward else "forward"


def _short(block: str, name: str) -> str:
    """Return a name in a numbered block without the block's own path, so that equal blocks read alike."""
    words = block.split(".")
    prefixes = (".".join((*words[k:], "")) for k in range(len(words))) if words[-1].isdigit() else ()
    return next((name[len(prefix) :] for prefix in prefixes if name.startswith(prefix)), name)


class _Blocks:
    """The ops, weights and transfers of each block; those outside of all blocks are grouped by their module."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled, self.graph = compiled, compiled.graph
        self.model, fold = compiled.graph.model, compiled.fold
        self.groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {
            group: fold.everywhere(group) if fold is not None and group else [group]
            for group in {move.group for move in compiled.moves}
        }
        self.producers, self.uses = self.model.producers, dict(self.model.uses)
        writes = [op for op in self.model.ops if op.is_write]
        for op in writes:
            name = op.inputs[1].tensor
            self.uses[name] = [*self.uses[name], (op, 1)]
        self.layouts: dict[tuple[str, bool], str] = {}
        self.ops = group_by(self.model.forward_ops, home_of)
        # A weight belongs to its first reader, a constant of several blocks to none, an activation to its producer.
        self.home = {name: self._reader(name, [op for op, _ in found]) for name, found in self.uses.items() if found}
        self.home |= {name: home_of(op) for name, (op, _) in self.producers.items()}
        written = {op.inputs[0].tensor: self.home.get(op.inputs[1].tensor, OUTSIDE) for op in writes}
        self.home = {**written, **self.home}
        for name in self.home.values():
            self.ops.setdefault(name, [])
        block_of_op = {op.name: name for name, ops in self.ops.items() for op in ops}
        block_of_op |= {op.name: self.home[op.inputs[0].tensor] for op in self.model.ops if not op.is_forward}
        self.moves: dict[str, list[TransferRow]] = group_by(compiled.moves, lambda move: self.home[move.tensor])
        split = (s for s in compiled.schedule.segments if s.backwards == "IW")
        self.halves = {op.name: len(set(s.gradient_kinds.values())) for s in split for op in s.ops if op.has_mirror}
        self.journal = group_by(self.graph.journal, lambda entry: block_of_op.get(entry.op, ""))
        self.places: dict[str, dict[Any, list[int]]] = {}
        self.trained: set[str] = set()
        for rank in range(compiled.program.world):
            for weight in compiled.program.weights(rank):
                places = self.places.setdefault(weight.tensor, {}).setdefault(weight.box, [])
                places.append(rank + HOSTS * weight.host)
                self.trained |= {weight.tensor} if weight.trained else set()

    def _reader(self, tensor: str, ops: Sequence[Op]) -> str:
        blocks = {home_of(op) for op in ops}
        return OUTSIDE if len(blocks) > 1 and self.model.tensors[tensor].kind != "parameter" else home_of(ops[0])

    def describe(self, name: str) -> Block:
        def within(call: str) -> str:
            return re.sub(r"'([^']*)'", lambda quoted: f"'{_short(name, quoted[1])}'", call)

        asked = Counter(f"{e.verb} {within(e.detail)}" for e in self.journal.get(name, ()))
        splits, weights, devices = tuple(self._splits(name)), tuple(self._weights(name)), Places.of(self.devices(name))
        recomputed = sum(bool(op.origin) for op in self.ops[name])
        halves = [self.halves.get(op.name, 0) for op in self.ops[name]]
        counts = asked, recomputed, halves.count(2), halves.count(1)
        return Block((name,), len(self.ops[name]) - recomputed, devices, splits, weights, self._moves(name), *counts)

    def devices(self, name: str) -> set[int]:
        return {d % HOSTS for op in self.ops[name] for d in self.graph.grids[op.name].used()}

    def schedule(self) -> list[Order]:
        """Return the order of the microbatches for each set of devices that run the same blocks in it."""
        run = collect((device, name) for name in self.ops for device in self.devices(name))
        programs, devices = self.compiled.emitted.programs, self.compiled.program.devices
        # Devices with one program have one order: any of them is a sample.
        first = dict(zip(programs, count()))
        stages = _stages(self.graph)
        order = {name: _microbatches(self.compiled, devices[k].instructions, stages) for name, k in first.items()}
        found = group_by(range(len(programs)), lambda rank: (tuple(run.get(rank, ())), order[programs[rank]]))
        return [Order(Places.of(d), b, text) for (b, text), d in found.items()]

    def _splits(self, name: str) -> Iterator[Split]:
        def key(op: Op) -> tuple[tuple[Axis, ...], Places]:
            grid = self.graph.grids[op.name]
            return _axes(op, grid, name), Places.of(grid.used())

        # Recomputed ops that are split as their originals are skipped; most are.
        grids = self.graph.grids
        shown = (op for op in self.ops[name] if not op.origin or grids[op.name] is not grids[op.origin])
        for (axes, devices), some in group_by(shown, key).items():
            yield Split(axes, devices, len(some), tuple(dict.fromkeys(_label(op, name) for op in some)))

    def _weights(self, name: str) -> Iterator[Weights]:
        def key(tensor: str) -> Weights:
            spec, places = self.model.tensors[tensor], self.places[tensor]
            elements = [prod(extents(box)) for box in places]
            is_even = len(set(elements)) == 1 or len(places) > MOST
            percent = () if is_even else tuple(round(100 * n / prod(spec.shape)) for n in elements)
            return Weights(spec.kind, tensor in self.trained, len(places), Groups.of(list(places.values())), percent)

        for row, tensors in group_by((t for t in self.places if self.home[t] == name), key).items():
            widths = {t: width(self.model.tensors[t].dtype) for t in tensors}
            held = {t: sum(prod(extents(b)) * len(at) for b, at in self.places[t].items()) for t in tensors}
            yield replace(
                row,
                bytes=sum(prod(self.model.tensors[t].shape) * w for t, w in widths.items()),
                held_bytes=sum(held[t] * w for t, w in widths.items()),
                of=tuple(collapse(t) if row.kind == "constant" else _short(name, t) for t in tensors),
            )

    def _moves(self, name: str) -> tuple[Sent, ...]:
        def key(move: TransferRow) -> Sent:
            row = Sent(_direction(move), move.way, move.reason)
            if move.way == "local":
                return row
            layouts = self._layouts(move.tensor, move.is_backward)
            return replace(row, kind=move.kind, tensor=self._tensor(move.tensor, name), layouts=layouts)

        # The number of local copies depends on the ends of segments, in which equal blocks may differ.
        found = (
            row if row.way == "local" else replace(row, **_sums(moves, self.groups, self.compiled.cluster))
            for row, moves in group_by(self.moves.get(name, ()), key).items()
        )
        order = sorted(found, key=lambda row: (row.direction == "backward", row.reason if row.way == "local" else ""))
        return tuple(order)

    def _layouts(self, tensor: str, is_backward: bool) -> str:
        """Return the layouts of a tensor, or of its gradient, at its producers and at its readers."""
        if (tensor, is_backward) not in self.layouts:
            op, k = self.producers.get(tensor) or (self.compiled.schedule.flow.homes[tensor], 0)
            made = self._counts(op, op.outputs[k], not is_backward, is_backward)
            read = [self._counts(reader, reader.inputs[n], is_backward, is_backward) for reader, n in self.uses[tensor]]
            read = [text for text in dict.fromkeys(read) if text != made] or [made]
            sides = (", ".join(read), made) if is_backward else (made, ", ".join(read))
            self.layouts[tensor, is_backward] = " -> ".join(sides)
        return self.layouts[tensor, is_backward]

    def _counts(self, op: Op, operand: Operand, is_made: bool, is_gradient: bool) -> str:
        # An update has no mirror that could route gradients: each of its copies reads the whole gradient.
        layout = layout_of(self.graph.grids[op.name], operand, is_made, is_gradient and op.is_forward)
        return "irregular" if layout is None else layout.counts

    def path(self, path: Path) -> dict[str, Any]:
        """Return the layouts and steps of a path; layouts as `Layout.parse` reads them."""
        steps = [
            {
                "kind": step.kind,
                "groups": [list(group) for group in step.groups],
                "moved": step.moved,
                "seconds": float(f"{step.seconds:.3g}"),
                "layout": str(step.layout),
            }
            for step in path.steps
        ]
        return {
            "direction": _direction(path),
            "tensors": list(dict.fromkeys(self._tensor(tensor) for tensor in path.tensors)),
            "count": path.count,
            "sizes": list(path.sizes),
            "dtype": path.dtype,
            "layout": str(path.source),
            "steps": steps,
        }

    def _tensor(self, tensor: str, block: str = "") -> str:
        return _label(self.producers[tensor][0], block) if tensor in self.producers else _short(block, tensor)


def _label(op: Op, block: str) -> str:
    """Return an op by its module in the block and the name of its operator, as `attn.c_proj mm`."""
    module = _short(block, op.module + ".").rstrip(".")
    return f"{module} {op.target.split('.')[1]}".strip()


def _axes(op: Op, grid: Grid, block: str) -> tuple[Axis, ...]:
    """Return the meaning of each axis of an op's grid; `devices` if its parts go to different ones."""
    found: list[Axis] = []
    for level, axis in enumerate(grid.axes):
        if len(axis.sizes) == 1:
            continue
        places = range(grid.unbroadcast.shape[level])
        groups = [sorted(set(grid.unbroadcast.take(k, axis=level).reshape(-1).tolist())) for k in places]
        factor = "" if axis.index is None else _short(block, op.indices[axis.index].factor)
        sizes = axis.sizes if len(set(axis.sizes)) > 1 else ()
        devices = Groups.of(groups) if len(set(map(tuple, groups))) > 1 else NO_GROUPS
        found.append(Axis(_how(axis), len(axis.sizes), factor, sizes, devices))
    if grid.children:
        inner = [_axes(op, child, block) for child in grid.children.values()]
        found.append(Axis("nested", len(inner), axes=tuple(dict.fromkeys(inner))))
    return tuple(found)


def _how(axis: Cut) -> str:
    if axis.is_microbatch:
        return "microbatches"
    return "split" if axis.index is not None else "value" if axis.partial_inputs else "copies"
