"""Statements of emitted code: the lines of one instruction."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from superscaler.collectives import KINDS, ONE
from superscaler.emit.lines import deleted
from superscaler.emit.lists import Instruction, Item, Lists, Row, Run, Waits, names
from superscaler.emit.names import Spelling
from superscaler.emit.tables import Entries, TableEntry, TableQuery, entries_of_tables
from superscaler.ir import program as p
from superscaler.ir.mask import Box
from superscaler.ir.program import CollectiveArg, Function, Program, Role, Shape, Value
from superscaler.ops.table import PLACED, RANDOM, parts_of

# The most names of weights that an update lists.
MOST_NAMES = 8


class Statements:
    """The lines of the instructions of a program. Data that differ by device go into numbered tables."""

    def __init__(
        self,
        program: Program,
        functions: Sequence[str],
        rows: Iterable[p.Instruction],
        lists: Lists,
        spelling: Spelling,
    ) -> None:
        self.program, self.model, self.functions = program, program.model, functions
        self.lists, self.spelling = lists, spelling
        # The numbers of the gradients that the first half of a split backward makes, by segment and part: those of all
        # microbatches, whose second halves may be one loop.
        self.first_halves = dict[tuple[int, int], set[int]]()
        for i in rows:
            if isinstance(i, p.Backward) and i.half == "input":
                own = self.first_halves.setdefault((i.task.segment, i.task.part), set())
                own.update(n for n, pair in enumerate(_made(i)) if pair != (None, None))
        self.entries = entries_of_tables()
        # What was asked for, with the answer.
        self.asked: list[tuple[TableQuery, TableEntry]] = []
        # The rows of the current instruction: in each layer, now and in the second repetition by microbatches.
        self.now: Sequence[Row] = ()
        self.later: Sequence[Row] = ()
        self.count = 1

    def number(self, table: str, get: Callable[[Any], Any]) -> str:
        """Return the number, in a table, of the entry that `get` takes from the current instruction of each sample."""
        order = slice(None, None, self.spelling.direction)
        entries, later = (tuple(tuple(map(get, row)) for row in rows[order]) for rows in (self.now, self.later))
        asked = TableQuery(table, entries, later, self.count)
        self.asked.append((asked, asked.number(self.entries)))
        return self.spelling.entry(*self.asked[-1][1])

    def entries_of(self, samples: slice) -> dict[str, Entries] | None:
        """Return the entries of some of the samples; None if alone they have other numbers."""
        found = entries_of_tables()
        return found if all(asked.of(samples).number(found) == answer for asked, answer in self.asked) else None

    def _function(self, i: p.Forward) -> Function:
        return self.program.functions[i.function]

    def name(self, value: Value) -> str:
        return self.spelling.value(value)

    def tuple_of(self, values: Iterable[Value | None]) -> str:
        return _tuple(self.spelling.read(values))

    def targets(self, values: Iterable[Value | None]) -> str:
        """Return the left side of values that are made together, with the sign; "" if there are none."""
        made = self.spelling.made(self.lists.items(values))
        return f"{_tuple(made)} = " if set(made) - {"_"} else ""

    def _line(self, i: Instruction, before: Instruction | None) -> str:
        match i:
            case p.Load():
                number = self.number("inputs", lambda j: (j.tensor, j.box))
                return f"{self.name(i.out)} = rt.input({number})  # {i.tensor}"
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
            case p.Offload():
                alive = f", {self.tuple_of(i.alive)}" if i.alive else ""
                return f"rt.offload({self._task(i)}{alive})"
            case p.Fetch():
                return f"rt.fetch({self._task(i)})"
            case Waits():
                return self._waits(i)
            case p.Update():
                return self._update(i)
            case p.Give():
                return f"rt.give({i.tensor!r}, {self.name(i.value)}, {i.shape})"
            case p.Loss() if not self.model.loss:
                return "return rt.finish()"
            case p.Loss():
                counted, of = self.number("counted", lambda j: j.counted), f", {i.of}" * (self.model.iterations > 1)
                return f"return rt.loss({self.tuple_of(i.parts)}, {counted}{of})"
            case p.Free():
                return self._free(i.names, before)
            case _:
                raise TypeError(i)

    def _waits(self, i: Waits) -> str:
        works = self.spelling.read(i.works, is_popped=True)
        if len(i.works) == 1:
            made = f"{self.name(i.outs[0])} = {works[0]}.wait().reshape({i.shapes[0]})"
        else:
            made = f"{self.targets(i.outs)}rt.wait_all({_tuple(works)}, {self.number('shapes', lambda j: j.shapes)})"
        # Handles in a dict were taken out of it.
        left = [v for v in i.works if not self.spelling.variable(self.lists.owner(v)).endswith("]")]
        return "\n".join([made, self._free(left, i)]).strip()

    def _update(self, i: p.Update) -> str:
        early = ", early=True" * i.is_early
        given = self.spelling.read(i.weights)
        weights = _tuple(given)
        if len(given) > MOST_NAMES:
            weights = f"rt.weights_at({self.number('updates', lambda j: tuple(map(str, j.weights)))})"
        update = f"rt.update({weights}, {self.tuple_of(i.gradients)}{early})" if i.weights else ""
        write = f"rt.write({self.tuple_of(i.buffers)}, {self.tuple_of(i.values)})" if i.buffers else ""
        # An update that sets buffers only is left out, except the last one: global norms wait for it.
        update = update or "rt.update()" * (not i.is_early)
        return "\n".join(some for some in (update, write) if some) or "pass"

    def _free(self, values: Sequence[Value], before: Instruction | None) -> str:
        """Return the lines that end values. A value whose name the instruction before took over has ended already."""
        made = {*map(self.lists.owner, names(before, Role.WRITE) if before else ())}
        taken = {self.spelling.variable(v) for v in made}
        owners = dict.fromkeys(map(self.lists.owner, values))
        several = self.spelling.ended([v for v in owners if v in made or self.spelling.variable(v) not in taken])
        cleared = [name[1:].replace(".values()", ".clear()") for name in several if name.startswith("*")]
        others = [name for name in several if not name.startswith("*")]
        return "\n".join([deleted(others)] * bool(others) + cleared)

    def _backward(self, i: p.Backward) -> str:
        first = tuple(sorted(self.first_halves.get((i.task.segment, i.task.part), ())))
        made = [n for n in range(len(i.outputs)) if not i.half or (n in first) == (i.half == "input")]
        places = list(_numbered(self.lists.items(i.outputs)))
        sums = {n for n, total in enumerate(i.sums) if total is not None}
        names = self.spelling.made(item for n, item in places if item or (n in made and n not in sums))
        left = f"{_tuple(names)} = " if {*names} - {"_"} else ""
        given = [self._task(i), *([] if i.half == "weight" else [self.tuple_of(i.gradients)])]
        given += [f"{first}"] if i.half == "input" else []
        given += [f"again={self.tuple_of(i.again)}"] if i.again else []
        into = ((made.index(n), run) for n, run in _numbered(self.lists.items(i.sums)) if isinstance(run, Run))
        if text := ", ".join(f"{n}: {self._sums(run)}" for n, run in into):
            given.append(f"into={{{text}}}")
        return f"{left}rt.backward{i.half and '_'}{i.half}({', '.join(given)})"

    def _sums(self, run: Run) -> str:
        name = self.spelling.variable(run.of)
        if self.spelling.is_whole(run):
            return name
        return f"({name}, {self.spelling.place(run)}, {self.spelling.place(run, run.size)})"

    def _forward(self, i: p.Forward) -> str:
        function = f"segments.{self.functions[i.function]}"
        draws, extra = partial(Function.boxes_at, targets=RANDOM), ""
        if draws(self._function(i), i.at):
            entry = self.number("draws", lambda j: (j.function, tuple(draws(self._function(j), j.at))))
            extra = f", draws={entry}"
        if self._parts(i):
            extra += f", parts={self.number('parts', self._parts)}"
        tape = "" if self._function(i).grads else ", tape=False"
        left, inputs = self.targets(i.outputs), self.tuple_of(i.inputs)
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
        if not (i.pieces or i.largest):
            return f'{out} = rt.zeros({i.shape}, "{i.dtype}")'
        boxes, extra = self.number("boxes", lambda j: j.boxes), ", largest=True" * i.largest
        return f'{out} = rt.combine({self.tuple_of(i.pieces)}, {boxes}, {i.view}, {i.shape}, "{i.dtype}"{extra})'

    def _collective(self, i: p.Collective) -> str:
        group = self.number("groups", lambda j: j.group)
        made = self.targets(i.works)
        root = f", {i.root}" if i.root >= 0 else ""
        wire = f', wire="{i.dtype}"' if i.wide else ""
        largest = ", largest=True" * i.largest
        rounded = f', rounded="{i.dtype}"' * bool(i.given)
        if len(i.works) > 1 or i.wide:
            along = f", ways={self.number('ways', _ways)}" if _has_slots(i.ways[0]) else ""
            given = f"{self.tuple_of(i.sources)}, {group}{root}{along}{largest}{rounded}{wire}"
            return f"{made}rt.{i.kind}_bucket({given})"
        (work,), (way,) = i.works, i.ways
        slots = [f", {slot}" for slot in (way.scatter_slot, way.gather_slot) if slot >= 0]
        sizes = f", {way.sizes}" if way.sizes else ""
        # Members that hold nothing need the shape and dtype to receive.
        received = f', {way.shape}, "{i.dtype}"' if KINDS[i.kind].held is ONE else ""
        made = "" if work is None else f"{self.name(work)} = "
        given = f"{self._given(i, 0)}, {group}{root}{''.join(slots)}{sizes}{received}{largest}{rounded}"
        return f"{made}rt.{i.kind}({given})"

    def _given(self, i: p.Collective, k: int) -> str:
        """Return the source of the k-th tensor given to a collective, in slots if these matter."""
        source, way = i.sources[k], i.ways[k]
        is_cut = source is not None and way.view != way.local and _has_slots(way)
        return ("None" if source is None else self.name(source)) + (f".reshape({way.view})" if is_cut else "")

    def _task(self, i: p.Tasked) -> str:
        later = self.later[0][0]
        assert isinstance(later, p.Tasked)
        return self.spelling.task(i.task, later.task)

    def _message(self) -> str:
        return self.number("messages", lambda j: (j.peer, j.message))


def _made(i: p.Backward) -> Iterator[tuple[Value | None, Value | None]]:
    """Yield each gradient that a backward makes, and its sum."""
    return zip(i.outputs, i.sums or (None,) * len(i.outputs), strict=True)


def _has_slots(way: CollectiveArg) -> bool:
    """Return whether a collective gathers or scatters a slot, so that its source is given in slots."""
    return way.slot >= 0


def _ways(i: p.Collective) -> tuple[tuple[Shape, int, Shape], ...]:
    """Return, for each tensor of a collective: its shape in slots, the gathered or scattered slot, the sizes."""
    return tuple((way.view, way.slot, way.sizes) for way in i.ways)


def _numbered(items: Iterable[Item]) -> Iterator[tuple[int, Item]]:
    """Yield items, each with the number of its first value."""
    at = 0
    for item in items:
        yield at, item
        at += item.size if isinstance(item, Run) else 1


def _tuple(sources: Sequence[str]) -> str:
    """Return the source of a tuple; a list is written alone."""
    if len(sources) == 1:
        (one,) = sources
        return one[1:] if one[0] == "*" and not one.endswith(".values()") else f"({one},)"
    return f"({', '.join(sources)})"
