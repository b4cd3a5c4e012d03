"""Source of device programs: one `step` function per distinct program; peers, groups and slices become data."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from superscaler.emit.lines import WIDTH, deleted, wrapped
from superscaler.emit.lists import modules_of, named_weights, paths_of
from superscaler.emit.loops import Row, Section, Spelling, runs_of
from superscaler.emit.segments import Draw, draws_of, emit_segments
from superscaler.ir import program as p
from superscaler.ir.fold import Folded, evenly
from superscaler.ir.mask import Box
from superscaler.ir.program import Device, Function, Instruction, Program, Value, Weight
from superscaler.ir.rendezvous import batches
from superscaler.ops.table import PLACED, RANDOM, parts_of

HEAD = '''"""What {devices} in one training step. Written by superscaler; peers, groups and slices are in plan.json."""

import {segments}


def step(rt):
'''


@dataclass(slots=True)
class Tables:
    """The data of one device: its entry in each table, by the number under which the code asks for it."""

    weights: list[dict[str, Any]] = field(default_factory=list)
    inputs: list[tuple[str, Any]] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    messages: list[tuple[int, int]] = field(default_factory=list)
    boxes: list[Any] = field(default_factory=list)
    draws: list[list[dict[str, Any]]] = field(default_factory=list)
    parts: list[tuple[Any, ...]] = field(default_factory=list)
    counted: list[tuple[bool, ...]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class AllTables(Sequence[Tables]):
    """The tables of all devices; those of a folded program are made on demand."""

    made: Sequence[Callable[[], Tables]]

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, rank: Any) -> Any:
        return self.made[rank]()


@dataclass(frozen=True, slots=True)
class Emitted:
    """The files of a plan: text by name, and for each device the file of its program and its tables."""

    files: dict[str, str]
    programs: tuple[str, ...]
    tables: Sequence[Tables]


def emit(program: Program) -> Emitted:
    """Return the Python source of a program. Equal programs give equal bytes."""
    segments, names = emit_segments(program)
    groups: dict[str, list[int]] = {}
    tables: dict[int, Callable[[], Tables]] = {}
    for ranks, samples in program.groups:
        writer = _Writer(program, samples, names)
        groups.setdefault(writer.write(), []).extend(ranks)
        tables |= {rank: partial(writer.tables_of, rank) for rank in ranks}
    files, programs = {"segments.py": segments}, [""] * program.world
    for number, (body, found) in enumerate(groups.items()):
        name, ranks = f"program_{number}", sorted(found)
        files[f"{name}.py"] = next(filter(_fits, (_head(ranks, most) for most in range(16, 0, -1)))) + body
        for rank in ranks:
            programs[rank] = name
    return Emitted(files, tuple(programs), AllTables([tables[rank] for rank in range(program.world)]))


def _head(ranks: Sequence[int], most: int) -> str:
    """Return the lines before the body of a program, which name at most so many of its devices."""
    shown = ", ".join(map(str, ranks[:most])) + (" ..." if len(ranks) > most else "")
    who = f"devices {shown} do" if len(ranks) > 1 else f"device {shown} does"
    return HEAD.format(devices=who, segments="segments")


def _fits(text: str) -> bool:
    return len(text.splitlines()[0]) <= WIDTH


@dataclass(slots=True)
class _Entries:
    """The entries that the samples of a program need in one table. Entries of a loop hold the first and the second
    repetition.
    """

    size: int = 0
    known: dict[Any, int] = field(default_factory=dict)
    rows: list[tuple[Any, Any, int]] = field(default_factory=list)

    def number(self, entry: Any, later: Any, count: int) -> int:
        """Return the number of an entry, or of the first of `count` entries that move evenly."""
        if entry == later and entry in self.known:
            return self.known[entry]
        found, count = self.size, 1 if entry == later else count
        self.size += count
        self.rows.append((entry, later, count))
        if count == 1:
            self.known[entry] = found
        return found


class _Writer:
    """A writer of one program from its sampled devices; their differences go into numbered tables."""

    def __init__(self, program: Program, samples: Sequence[Device], names: list[str]) -> None:
        self.program, self.model, self.functions = program, program.model, names
        self.runs = runs_of([device.instructions for device in samples])
        rows = [i for run in self.runs for i, *_ in run.rows]
        self.modules = modules_of([w.tensor for w in samples[0].weights])
        self.weights = named_weights(samples[0].weights, rows, self.modules)
        self.spelling = Spelling(self.runs, self.weights)
        self.loaded = set[str]()
        # The numbers of the gradients that the first half of a split backward makes, by segment and part.
        self.first_halves: dict[tuple[int, int], tuple[int, ...]] = {}
        self.entries = {f.name: _Entries() for f in fields(Tables)}
        # The current instruction of each sample, the same in the second repetition, and the number of repetitions.
        self.now: Row = ()
        self.later: Row = ()
        self.count = 1

    def number(self, table: str, get: Callable[[Any], Any]) -> str:
        """Return the number, in a table, of the entry that `get` takes from the current instruction of each sample."""
        entry, later = (tuple(map(get, some)) for some in (self.now, self.later))
        found = self.entries[table].number(entry, later, self.count)
        return str(found) if entry == later else self.spelling.number(found, 1)

    def tables_of(self, rank: int) -> Tables:
        devices = self.program.devices
        fold = devices.fold if isinstance(devices, Folded) and rank in devices.fold.places else None
        place = fold.place(rank) if fold is not None else ()

        def filled(table: str, get: Callable[[Any], Any]) -> list[Any]:
            found = list[Any]()
            for entry, later, count in self.entries[table].rows:
                if count == 1:
                    found.append(get(entry))
                    continue
                pair = get(entry), get(later)
                found += (evenly(pair, (turn,)) for turn in range(count))
            return found

        def even(table: str) -> list[Any]:
            return filled(table, lambda entry: evenly(entry, place))

        def moved(members: tuple[int, ...]) -> tuple[int, ...]:
            return members if fold is None else fold.move(members, place)

        draws = [draws_of(self.model, self.program.functions[f], boxes) for f, boxes in even("draws")]
        return Tables(
            [_record(w) | {"name": str(w.name)} for w in self.program.weights(rank)],
            even("inputs"),
            filled("groups", lambda entry: moved(entry[0])),
            filled("messages", lambda entry: (moved((entry[0][0],))[0], entry[0][1])),
            even("boxes"),
            [list(map(_record, some)) for some in draws],
            even("parts"),
            even("counted"),
        )

    def write(self) -> str:
        lines = [f"{name} = {{}}" for name in self.spelling.dicts] + self.spelling.lists
        for run in self.runs:
            self.count = run.count
            if run.count == 1:
                lines += self._body(run)
                continue
            lines.append(self.spelling.enter(run))
            lines += (f"    {line}" for line in self._body(run))
            self.spelling.leave()
        return "".join(f"{wrapped(f'    {line}')}\n" for line in lines)

    def _body(self, run: Section) -> Iterator[str]:
        module, end = "", -1
        ends = batches([row[0] for row in run.rows])
        for at, (now, later) in enumerate(zip(run.rows, run.later or run.rows, strict=True)):
            self.now, self.later = now, later
            if isinstance(now[0], p.Forward) and (where := self._function(now[0]).module) != module:
                module = where
                yield from [f"# {module}"] * bool(module)
            yield from self.spelling.declared(now[0])
            if at in ends:
                yield "with rt.together():"
                end = ends[at]
            yield from ("    " * (at <= end) + line for line in self._line(now[0]).splitlines())
            if run.count == 1:
                self.spelling.note_effects(now[0])

    def _function(self, i: p.Forward) -> Function:
        return self.program.functions[i.function]

    def name(self, value: Value) -> str:
        return self.spelling.value(value)

    def tuple_of(self, names: Sequence[Value | None], gap: str = "None") -> str:
        inner = self.spelling.tuple_items(names, gap)
        return f"({inner[0]},)" if len(inner) == 1 else f"({', '.join(inner)})"

    def _line(self, i: Instruction) -> str:
        match i:
            case p.Load():
                return self._load(i)
            case p.Forward():
                return self._forward(i)
            case p.Backward():
                return self._backward(i)
            case p.Slice():
                box = self.number("boxes", lambda j: j.ranges)
                return f"{self.name(i.out)} = rt.slice({self.name(i.source)}, {i.view}, {box}, {i.shape})"
            case p.Combine():
                return self._combine(i)
            case p.Accumulate():
                if i.largest:
                    return f"{self.name(i.out)} = {self.name(i.into)}.maximum({self.name(i.value)})"
                sign = "+=" if i.in_place else f"= {self.name(i.into)} +"
                return f"{self.name(i.out)} {sign} {self.name(i.value)}"
            case p.Collective():
                return self._collective(i)
            case p.Send():
                return f"rt.send({self.name(i.source)}, {self._message()})"
            case p.Recv():
                return f'{self.name(i.work)} = rt.recv({self._message()}, {i.shape}, "{i.dtype}")'
            case p.Copy():
                return f"{self.name(i.work)} = rt.{'to_host' if i.to_host else 'to_device'}({self.name(i.source)})"
            case p.Wait():
                work = self.name(i.work)
                if work.endswith("]"):
                    return f"{self.name(i.out)} = {work[:-1].replace('[', '.pop(')}).wait().reshape({i.shape})"
                return f"{self.name(i.out)} = {work}.wait().reshape({i.shape})\ndel {work}"
            case p.Update():
                early = ["early=True"] if i.is_early else []
                update = f"rt.update({', '.join([*self._pairs(i.weights, i.gradients), *early])})"
                write = f"rt.write({', '.join(self._pairs(i.buffers, i.values))})" if i.buffers else ""
                # An update that sets buffers only is left out, except the last one: global norms wait for it.
                is_one = bool(i.weights) or not i.is_early
                return "\n".join([update] * is_one + [write] * bool(write)) or "pass"
            case p.Give():
                return f"rt.give({i.tensor!r}, {self.name(i.value)}, {i.shape})"
            case p.Loss() if not self.model.loss:
                return "return rt.finish()"
            case p.Loss():
                counted, of = self.number("counted", lambda j: j.counted), f", {i.of}" * (self.model.iterations > 1)
                return f"return rt.loss({self.tuple_of(i.parts)}, {counted}{of})"
            case p.Free():
                return self._free(i.names)

    def _free(self, names: Sequence[Value]) -> str:
        several = self.spelling.ended(names)
        cleared = [name[1:].replace(".values()", ".clear()") for name in several if name.startswith("*")]
        others = [name for name in several if not name.startswith("*")]
        return "\n".join([deleted(others)] * bool(others) + cleared)

    def _backward(self, i: p.Backward) -> str:
        pairs = list(enumerate(zip(i.outputs, i.sums or (None,) * len(i.outputs), strict=True)))
        first = self.first_halves.get((i.task.segment, i.task.part), ())
        if i.half == "input":
            first = tuple(n for n, pair in pairs if pair != (None, None))
            self.first_halves[i.task.segment, i.task.part] = first
        made = [pair for n, pair in pairs if not i.half or (n in first) == (i.half == "input")]
        names = tuple(out for out, total in made if total is None)
        left = f"{self.tuple_of(names, '_')} = " if set(names) - {None} else ""
        given = [self._task(i), *([] if i.half == "weight" else [self.tuple_of(i.gradients)])]
        given += [f"{first}"] if i.half == "input" else []
        given += [f"again={self.tuple_of(i.again)}"] if i.again else []
        given += [f"into={{{self.spelling.into([total for _, total in made])}}}"] if any(i.sums) else []
        return f"{left}rt.backward{i.half and '_'}{i.half}({', '.join(given)})"

    def _pairs(self, weights: Sequence[Value], values: Sequence[Value]) -> list[str]:
        return [self.tuple_of(weights), self.tuple_of(values)] if weights else []

    def _load(self, i: p.Load) -> str:
        if self.model.tensors[i.tensor].kind == "input":
            number = self.number("inputs", lambda j: (j.tensor, j.box))
            return f"{self.name(i.out)} = rt.input({number})  # {i.tensor}"
        if i.out not in self.weights:
            return f'{self.name(i.out)} = rt.weight("{i.out}")'
        if not self.spelling.in_list(i.out):
            return f'({self.name(i.out)},) = rt.weights_of("{i.tensor}")'
        name, _ = self.spelling.list_of(i.out)
        if name in self.loaded:
            return ""
        self.loaded.add(name)
        members = [self.weights[weight] for weight in self.spelling.members(i.out)]
        return f"{name} = rt.weights_of({', '.join(map(json.dumps, paths_of(members, self.modules)))})"

    def _forward(self, i: p.Forward) -> str:
        left = f"{self.tuple_of(i.outputs)} = " if i.outputs else ""
        function = f"segments.{self.functions[i.function]}"
        draws, extra = partial(self._function(i).boxes_at, targets=RANDOM), ""
        if draws(i.at):
            extra = f", draws={self.number('draws', lambda j: (j.function, tuple(draws(j.at))))}"
        if self._parts(i):
            extra += f", parts={self.number('parts', self._parts)}"
        inputs = self.tuple_of(i.inputs)
        tape = "" if self._function(i).grads else ", tape=False"
        return f"{left}rt.forward({self._task(i)}, {function}, {inputs}{tape}{extra})"

    def _parts(self, i: p.Forward) -> tuple[Box, ...]:
        function = self._function(i)
        placed = (op for op in function.ops if op.target in PLACED)
        pairs = zip(placed, function.boxes_at(i.at, PLACED), strict=True)
        return tuple(part for op, box in pairs for part in parts_of(op, box, self.model.tensors).values())

    def _combine(self, i: p.Combine) -> str:
        whole, out = tuple((0, size) for size in i.view), self.name(i.out)
        if i.pieces and all(box == whole for box in i.boxes):
            first, *others = map(self.name, i.pieces)
            total = first + "".join(f".maximum({x})" if i.largest else f" + {x}" for x in others)
            return f"{out} = ({total})" if len(total) > 100 else f"{out} = {total}"
        boxes, extra = self.number("boxes", lambda j: j.boxes), ", largest=True" * i.largest
        return f'{out} = rt.combine({self.tuple_of(i.pieces)}, {boxes}, {i.view}, {i.shape}, "{i.dtype}"{extra})'

    def _collective(self, i: p.Collective) -> str:
        group = self.number("groups", lambda j: j.group)
        shown = [self._given(i, k) for k in range(len(i.works))]
        made = f"{self.tuple_of(i.works)} = " if any(i.works) else ""
        root = f", {i.root}" if i.root >= 0 else ""
        if len(i.works) > 1:
            dims = {"all_gather": [way.take for way in i.ways], "reduce_scatter": [way.give for way in i.ways]}
            along = root + (f", {tuple(dims[i.kind])}" if i.kind in dims else ", largest=True" * i.largest)
            along += f", {tuple(way.sizes for way in i.ways)}" if any(way.sizes for way in i.ways) else ""
            return f"{made}rt.{i.kind}_bucket(({', '.join(shown)}), {group}{along})"
        (work,), (way,) = i.works, i.ways
        sizes = f", {way.sizes}" if way.sizes else ""
        extra = {
            "all_reduce": ", largest=True" * i.largest,
            "reduce": "",
            "rd_gather": f", {way.take}",
            "all_gather": f", {way.take}{sizes}",
            "reduce_scatter": f", {way.give}{sizes}",
            "all_to_all": f", {way.give}, {way.take}",
            "broadcast": f', {way.shape}, "{i.dtype}"',
        }[i.kind]
        return f"{'' if work is None else f'{self.name(work)} = '}rt.{i.kind}({shown[0]}, {group}{root}{extra})"

    def _given(self, i: p.Collective, k: int) -> str:
        """Return the source of the k-th tensor given to a collective, in slots where these matter."""
        source, way = i.sources[k], i.ways[k]
        is_cut = source is not None and way.view != way.local and i.kind not in ("all_reduce", "broadcast", "reduce")
        return ("None" if source is None else self.name(source)) + (f".reshape({way.view})" if is_cut else "")

    def _task(self, i: p.Forward | p.Backward) -> str:
        later = self.later[0]
        assert isinstance(later, p.Forward | p.Backward)
        return self.spelling.task(i.task, later.task)

    def _message(self) -> str:
        return self.number("messages", lambda j: (j.peer, j.message))


def _record(row: Weight | Draw) -> dict[str, Any]:
    # Few weights are on hosts, or of later iterations.
    return {f.name: value for f in fields(row) if (value := getattr(row, f.name)) or f.name not in ("host", "ahead")}
