"""Source of device programs: one `step` function per distinct program; peers, groups and slices become data."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import fill

import numpy as np

from superscaler.emit.lines import WIDTH, wrapped
from superscaler.emit.lists import Lists, Makers, Waits, modules_of, named_weights, paths_of
from superscaler.emit.loops import Section, runs_of
from superscaler.emit.names import Spelling
from superscaler.emit.repeats import LAYER, Layers, Repeat, line, repeats_of, span
from superscaler.emit.segments import emit_segments
from superscaler.emit.statements import Statements
from superscaler.emit.tables import AllTables, Entries, Tables, tables_of
from superscaler.groups import collect
from superscaler.ir import program as p
from superscaler.ir.cohorts import alike
from superscaler.ir.communication import batches
from superscaler.ir.names import family
from superscaler.ir.program import Device, Program, Task, Value

HEAD = '''"""What {} in one training step. Written by superscaler; peers, groups and slices are in plan.json.{}"""

import segments


def step(rt):
'''


@dataclass(frozen=True, slots=True)
class Emitted:
    """The files of a plan: text by name, and for each device the file of its program and its tables."""

    files: dict[str, str]
    programs: tuple[str, ...]
    tables: Sequence[Tables]


def emit(program: Program) -> Emitted:
    """Return the Python source of a program. Equal programs give equal bytes."""
    segments, names = emit_segments(program)
    groups: dict[str, tuple[_Writer, list[int]]] = {}
    tables: dict[int, Callable[[], Tables]] = {}
    written = _written(program, names)
    for (ranks, _), (body, writer, entries) in zip(program.groups, written, strict=True):
        groups.setdefault(body, (writer, []))[1].extend(ranks)
        tables |= {rank: partial(tables_of, program, rank, entries) for rank in ranks}
    files, programs = {"segments.py": segments}, [""] * program.world
    for number, (body, (writer, found)) in enumerate(groups.items()):
        name, ranks = f"program_{number}", sorted(found)
        more = fill(" ".join(filter(None, (_places(program.mesh, ranks), writer.exchanged()))), WIDTH - 3)
        heads = (_head(ranks, most, more) for most in range(16, 0, -1))
        files[f"{name}.py"] = next(filter(_fits, heads)) + body
        for rank in ranks:
            programs[rank] = name
    return Emitted(files, tuple(programs), AllTables([tables[rank] for rank in range(program.world)]))


def _written(program: Program, names: list[str]) -> list[tuple[str, "_Writer", dict[str, Entries]]]:
    """Return, for each group of devices, its text, the writer and the entries in its tables. Groups that differ in
    their data alone are written once, if their data fit equal numbers.
    """
    found: dict[int, tuple[str, _Writer, dict[str, Entries]]] = {}
    for own in alike([samples[0] for _, samples in program.groups]):
        writer = _Writer(program, [device for n in own for device in program.groups[n][1]], names)
        body, start = writer.write(), 0
        for n in own:
            samples = program.groups[n][1]
            end = start + len(samples)
            entries = writer.entries if len(own) == 1 else writer.entries_of(slice(start, end))
            start = end
            if entries is None:
                alone = _Writer(program, samples, names)
                found[n] = alone.write(), alone, alone.entries
            else:
                found[n] = body, writer, entries
    return [found[n] for n in range(len(found))]


def _head(ranks: Sequence[int], most: int, more: str) -> str:
    """Return the lines before the body of a program, which name at most so many of its devices."""
    who = f"devices {_listed(ranks, most)} do" if len(ranks) > 1 else f"device {ranks[0]} does"
    return HEAD.format(who, more and f"\n{more}")


def _places(mesh: Mapping[str, int], ranks: Sequence[int]) -> str:
    """Return a sentence with the places of devices on a mesh; "" if it has no axis.

    >>> _places({"pp": 2, "dp": 4, "tp": 1}, [4, 5])
    'On the mesh pp=2, dp=4: pp 1, dp 0, 1.'
    """
    along = _along(mesh, ranks)
    sizes = ", ".join(f"{axis}={mesh[axis]}" for axis in along)
    found = [f"{axis} {_listed(own)}" for axis, own in along.items() if len(own) < mesh[axis]]
    return f"On {'all of ' * (not found)}the mesh {sizes}{': ' * bool(found)}{', '.join(found)}." if sizes else ""


def _along(mesh: Mapping[str, int], ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return the places of devices along each axis of a mesh that has several."""
    axes = {axis: size for axis, size in mesh.items() if size > 1}
    places = np.unravel_index(ranks, tuple(axes.values())) if axes else ()
    return {axis: sorted(set(own.tolist())) for axis, own in zip(axes, places, strict=True)}


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + " ..." * (len(ranks) > most)


def _fits(text: str) -> bool:
    return len(text.splitlines()[0]) <= WIDTH


class _Writer(Statements):
    """A writer of one program from its sampled devices; their differences go into numbered tables."""

    def __init__(self, program: Program, samples: Sequence[Device], names: list[str]) -> None:
        self.program, self.functions, self.rank = program, names, samples[0].rank
        found = runs_of([device.instructions for device in samples])
        rows = [i for run in found for i, *_ in run.rows if not isinstance(i, Waits)]
        self.at_rest = {i.out: i for i in p.loads(rows) if program.model.tensors[i.tensor].kind != "input"}
        makers: Makers = {}
        self.runs = [run.tidied(self.at_rest, makers) for run in found]
        self.modules = modules_of([w.tensor for w in samples[0].weights])
        self.weights = named_weights(samples[0].weights, rows, self.modules)
        self.lists = Lists([i for run in self.runs for i, *_ in run.rows], self.weights)
        self.runs = [run.changed(self.lists.in_order) for run in self.runs]
        self.declared = self._declared()
        self.forwards = {i.task._replace(microbatch=0): i for _, i in p.calls(rows)}
        layers = Layers()
        self.repeats = [self._repeats(run, own, layers) for run, own in zip(self.runs, self.declared, strict=True)]
        spelling = Spelling(self.runs, self.lists, layers.names(self.lists.taken), self.declared)
        super().__init__(program, names, rows, self.lists, spelling)

    def _declared(self) -> list[dict[int, list[Value]]]:
        """Return, by row of each section, the lists that the row is the first to write to."""
        known, found, written = set[Value](), [], iter(self.lists.written)
        for run in self.runs:
            found.append(dict[int, list[Value]]())
            moving = {self.lists.owner(v) for v in run.moving}
            for n in range(len(run.rows)):
                for of in next(written):
                    if of not in known:
                        turns = run.count if of in moving else 1
                        known |= {of._replace(microbatch=of.microbatch + k * run.period) for k in range(turns)}
                        found[-1].setdefault(n, []).append(of)
        return found

    def _repeats(self, run: Section, declared: Mapping[int, object], layers: Layers) -> list[Repeat]:
        """Return the loops over layers of a section."""
        code = [i for i, *_ in run.rows]
        # A batch is in one body as a whole, so that the form of its instructions has their places and its length.
        inside = {n: (n - a, b - a) for a, b in batches(code).items() for n in range(a, b + 1)}
        # The function of each task, and where an instruction is the first to write to a list.
        forwards = {n: self._forward_of(i.task) for n, i in enumerate(code) if i.runs_segment and i.task is not None}
        number = {n: forward.function for n, forward in forwards.items() if forward is not None}
        run_by = {n: (self.functions[f], bool(self.program.functions[f].grads)) for n, f in number.items()}
        lines = [line(i, self.lists, (run_by.get(n), n in declared, inside.get(n))) for n, i in enumerate(code)]

        def is_cut(n: int) -> bool:
            return n == len(code) or not (code[n].frees or inside.get(n, (0, 0))[0])

        return [r for one in repeats_of(lines, list(number), is_cut) if (r := layers.add(one, lines)) is not None]

    def write(self) -> str:
        lines = list[str]()
        for run, repeats, declared in zip(self.runs, self.repeats, self.declared, strict=True):
            self.count = run.count
            head = [self.spelling.enter(run)] if run.count > 1 else []
            lines += head
            lines += ("    " * len(head) + text for text in self._body(run, repeats, declared))
            self.spelling.leave()
        lines = [*self._top(), *lines]
        return "".join(f"{wrapped(f'    {line}')}\n" for line in lines)

    def _forward_of(self, task: Task) -> p.Forward | None:
        """Return a forward of the segment and the part of a task, None in a program without one."""
        return self.forwards.get(task._replace(microbatch=0))

    def exchanged(self) -> str:
        """Return a sentence with the peers of the first device of a program; "" if it has none."""
        kinds, peers = dict[tuple[int, ...], dict[str, None]](), dict[str, set[int]]()
        for i in (i for run in self.runs for i, *_ in run.rows):
            if i.group:
                kinds.setdefault(i.group, {})[i.kind] = None
            elif i.meets is p.Meets.PEER:
                peers.setdefault("sends to" if i.is_send else "receives from", set()).add(i.peer)
        groups = enumerate(entry[0] for entry, *_ in self.entries["groups"].pairs())
        found = [f"group {n} is {self._group(group)} ({', '.join(kinds.get(group, ()))})" for n, group in groups]
        found += [f"it {way} {_listed(sorted(some))}" for way, some in peers.items()]
        return f"On device {self.rank}: {'; '.join(found)}." if found else ""

    def _group(self, group: Sequence[int]) -> str:
        axes = [axis for axis, own in _along(self.program.mesh, group).items() if len(own) > 1]
        return _listed(group) + (f" along {', '.join(axes)}" if axes else "")

    def _top(self) -> Iterator[str]:
        """Yield the lines before the first instruction: dicts, sums and weights."""
        lists = dict.fromkeys(of for own in self.declared for some in own.values() for of in some)
        first = [of for of in lists if self.spelling.is_first(of)]
        by_layer = collect((name, of) for of in first if (name := self.spelling.dict_by_layer(of)))
        yield from (f"{name} = {{}}" for name in sorted(self.spelling.dicts - by_layer.keys()))
        for name, own in by_layer.items():
            layers = [self.spelling.layers[family(of)][1] for of in own]
            low, high = min(layers), max(layers) + 1
            yield f"{name} = {{{LAYER}: {self._sums_of(own[0])} for {LAYER} in range({low}, {high})}}"
        for of in first:
            if not self.spelling.dict_by_layer(of):
                yield f"{self.spelling.variable(of)} = {self._sums_of(of)}"
        known = set[Value]()
        for out in self.at_rest:
            owner = self.lists.owner(out)
            if out not in self.weights:
                yield f'{self.spelling.variable(out)} = rt.weight("{out}")'
            elif owner not in known:
                known.add(owner)
                own = [v for v in self.weights if self.lists.owner(v) == owner]
                paths = ", ".join(map(json.dumps, paths_of([self.weights[v] for v in own], self.modules)))
                name = self.spelling.variable(owner)
                yield f"{name if len(own) > 1 else f'({name},)'} = rt.weights_of({paths})"

    def _body(self, run: Section, repeats: Sequence[Repeat], declared: Mapping[int, list[Value]]) -> Iterator[str]:
        """Yield the lines of a section, its loops over layers included."""
        later = run.later or run.rows
        ends, at = batches([i for i, *_ in run.rows]), 0
        starts = {repeat.start: repeat for repeat in repeats}
        module, indent, end, repeat = "", "", -1, None
        while at < len(run.rows):
            if repeat is None and (repeat := starts.get(at)) is not None:
                yield from self._comment(run, repeat)
                yield self.spelling.enter_layers(repeat)
                indent = "    "
            if repeat is not None and at == repeat.start + repeat.tail and repeat.tail:
                yield from (f"{indent}if {LAYER} == {repeat.last}:", f"{indent}    break")
            times = [at] if repeat is None else [*repeat.times(at - repeat.start)]
            self.now, self.later = [run.rows[n] for n in times], [later[n] for n in times]
            i = self.now[0][0]
            if i.function >= 0 and repeat is None and (where := self.program.functions[i.function].module) != module:
                module = where
                if module and self.functions[i.function].rpartition("_")[0] != module.replace(".", "_"):
                    yield f"{indent}# {module}"
            for of in declared.get(at, ()):
                if not self.spelling.is_first(of):
                    yield f"{indent}{self.spelling.variable(of)} = {self._sums_of(of)}"
            if at in ends:
                yield f"{indent}with rt.together():"
                end = ends[at]
            before = run.rows[at - 1][0] if at else None
            lines = self._line(i, before).splitlines()
            yield from (indent + "    " * (at <= end) + text for text in lines)
            for row in self.now if run.count == 1 and self.spelling.is_keeping else ():
                self.spelling.note_effects(row[0])
            at += 1
            if repeat is not None and at == repeat.start + repeat.length:
                at, repeat, indent, module = repeat.end, None, "", ""
                self.spelling.leave_layers()

    def _sums_of(self, of: Value) -> str:
        return f"rt.sums({self.lists.size[family(of)]})"

    def _comment(self, run: Section, repeat: Repeat) -> Iterator[str]:
        """Yield a comment with the modules of the first and the last layer of a loop, up to what differs."""
        for at in range(repeat.length):
            ends = [run.rows[n][0] for n in (repeat.start + at, repeat.times(at)[-1])]
            known = [self._forward_of(i.task) for i in ends if i.runs_segment and i.task is not None]
            modules = [self._function(i).module for i in known if i is not None]
            if len(modules) == len(ends) and all(modules) and (text := span(*modules)):
                yield f"# {text}"
                return
