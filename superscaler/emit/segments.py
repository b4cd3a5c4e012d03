"""Source of functions: the text of `segments.py`, one function per distinct text, shared by layers and devices."""

import keyword
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from superscaler.emit.blocks import Blocks, Row, parameter, starred
from superscaler.emit.lines import WIDTH, deleted, wrapped
from superscaler.emit.lists import Run
from superscaler.emit.repeats import LAYER, Repeat, span
from superscaler.ir.mask import Box, extents
from superscaler.ir.model import Model, Op, Operand
from superscaler.ir.names import draw_number, first, unique
from superscaler.ir.program import Function, Program, Value
from superscaler.ir.variants import unread_twins
from superscaler.ops.call import Local, ranges
from superscaler.ops.table import RANDOM, biased_products, parts_of, reads_inputs, row_of, unfused

HEAD = '''"""The segments of this plan: what runs on a device between two communications. Written by superscaler."""

import torch
import torch.nn.functional as F

from superscaler.runtime import functional
'''

# More ranges of inputs are written by block.
MOST_RANGES = 2
_DRAWS, _PARTS = Value("random"), Value("parts")
# A line of a function, and whether only the backward of its op is needed.
Line = tuple[str, bool]


class Draw(NamedTuple):
    """A random tensor of an op on one part: the number of its op, the box of its elements in the whole tensor, and the
    number of iterations of the step before it.
    """

    op: int
    box: Box
    extents: tuple[int, ...]
    shape: tuple[int, ...]
    ahead: int = 0


def draws_of(model: Model, function: Function, boxes: Sequence[Box]) -> list[Draw]:
    """Return the random tensors that a function draws, in order, for random ops on these boxes."""
    drawn = ((op, random) for op in function.ops if (random := row_of(op.target).random))
    return [
        Draw(draw_number(first(op.origin or op.name)), *random(op, box, model.tensors), ahead=op.iteration)
        for (op, random), box in zip(drawn, boxes, strict=True)
    ]


def emit_segments(program: Program) -> tuple[str, list[str]]:
    """Return the text and the name of each function of the program."""
    texts: dict[tuple[str, str], str] = {}
    found: list[tuple[str, str]] = []
    taken: Counter[str] = Counter()
    unread = unread_twins(program.model)
    alike: dict[str, tuple[str, str]] = {}
    for function in program.functions:
        writer = _Writer(program, function, unread)
        lines = writer.write()
        found.append((writer.decorator() if function.grads else "", _source(lines)))
        if function.grads:
            plain = "\n".join(line for line, _ in lines)
            alike[plain] = found[-1] if found[-1][1] == plain else alike.get(plain, found[-1])
    # A function that runs without gradients is one of those with the same lines that run with them.
    pairs = zip(found, program.functions, strict=True)
    found = [key if function.grads else alike.get(key[1], key) for key, function in pairs]
    for key, function in zip(found, program.functions, strict=True):
        if key not in texts:
            stem = _stem(function.module, "segment")
            taken[stem] += 1
            texts[key] = f"{stem}_{taken[stem]}"
    text = HEAD + "".join(f"\n\n{head}def {name}{body}" for (head, body), name in texts.items())
    return "\n".join(map(wrapped, text.split("\n"))), [texts[key] for key in found]


def _stem(path: str, default: str = "") -> str:
    """Return a name for a module path or a tensor: its last names, without numbers."""
    words = [w for w in path.split(".") if w and not w.isdigit()]
    name = re.sub(r"\W", "_", "_".join(words[-2:]) or default)
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"_{name}"


class _Writer:
    def __init__(self, program: Program, function: Function, unread: frozenset[str]) -> None:
        self.tensors = program.model.tensors
        self.function, self.unread = function, unread
        self.draws = self.parts = 0
        self.taken = {"torch", "F", "functional", "random", "parts", "float"}
        self.boxes = dict(zip((op.name for op in function.ops), function.boxes, strict=True))
        self.products = biased_products(function.ops, function.outputs, self.tensors)
        self.ops = unfused(function.ops, self.products)
        self.inputs = [parameter(n) for n in range(len(function.inputs))]
        constant = {*range(len(self.inputs))}.difference(function.grads)
        # The numbers of the inputs with a property that the executor asks for.
        self.flags = {"constant": constant, "wide": {*function.wide}, "again": {*function.again}}
        results = [_value(tensor) for tensor in function.outputs]
        self.blocks = Blocks(list(map(self._row, self.ops)), self.inputs, results, self._ends())
        if self.blocks.repeats:
            self.taken |= {"inputs", "weights", LAYER, "range", "reversed"}
        # The inputs from the first one on that differs by block are a list.
        self.listed = min((n for n, v in enumerate(self.inputs) if v in self.blocks.own), default=len(self.inputs))
        is_weight = all(
            self.tensors[tensor].kind in ("parameter", "buffer") for tensor in function.inputs[self.listed :]
        )
        self.list = "weights" if is_weight else "inputs"
        self.names: dict[Hashable, str] = {}
        self.parameters = [self._named(v) for v in self.inputs if v not in self.blocks.own]
        self.repeat: Repeat | None = None

    def write(self) -> list[Line]:
        """Return the lines of the function from its parameters on, without its name."""
        body, at = [(line, False) for line in self._lists()], 0
        module = None
        while at < len(self.blocks.rows):
            if self.repeat is None and (repeat := self.blocks.repeats.get(at)) is not None:
                body += [(line, False) for line in self._enter(repeat)]
                module, self.repeat = None, repeat
            row, indent = self.blocks.rows[at], "    " * (1 if self.repeat is None else 2)
            where = starred(row.op.module)
            lines = [f"# {where}"] if where != module and where else []
            module = where
            lines.append(self._line(row))
            lines += [deleted(names)] if (names := self._deleted(at)) else []
            lines += self._last(at)
            body += [(indent + line, row.is_unread) for line in lines]
            at += 1
            if self.repeat is not None and at == self.repeat.start + self.repeat.length:
                at, module, ended = self.repeat.end, None, self.blocks.after.get(self.repeat.start, ())
                self.repeat = None
                body += [(f"    {deleted(list(map(self._name, ended)))}", False)] * bool(ended and at < len(self.ops))
        results = ", ".join(self._name(_value(tensor)) for tensor in self.function.outputs)
        given = [self._name(v) for v in self.inputs[: self.listed]] + [f"*{self.list}"] * bool(self.blocks.own)
        extra = ["random"] * bool(self.draws) + ["parts"] * bool(self.parts)
        end = f"    return ({results},)\n" if self.function.outputs else "    return ()\n"
        return [(f"({', '.join(given + extra)}):", False), *body, (end, False)]

    def _lists(self) -> Iterator[str]:
        """Yield the lines before the first op: values that are kept by block, and inputs between those of blocks."""
        kept = (self._named(v) for row in self.blocks.rows for v in row.made if self.blocks.is_kept(v))
        yield from (f"    {name} = {{}}" for name in dict.fromkeys(name.partition("[")[0] for name in kept))
        numbers = [n for n in range(self.listed, len(self.inputs)) if self.inputs[n] not in self.blocks.own]
        for run in _runs(numbers):
            names = _tuple(self._name(self.inputs[n]) for n in run)
            yield f"    {names} = {self._part(str(run[0] - self.listed), str(run[-1] + 1 - self.listed), len(run))}"

    def _enter(self, repeat: Repeat) -> Iterator[str]:
        """Yield the first lines of a loop over blocks."""
        first, last = (self.blocks.rows[n].op.module for n in (repeat.start, repeat.end - repeat.length))
        if text := span(first, last):
            yield f"    # {text}"
        yield f"    {repeat.head}"
        inputs = self.blocks.inputs(repeat)
        for step, some in groupby(inputs, lambda pair: pair[1]):
            for run in _runs([n for n, _ in some]):
                names = _tuple(self._named(self.inputs[n]) for n in run)
                start, stop = (repeat.layer.number(n - self.listed, step) for n in (run[0], run[-1] + 1))
                yield f"        {names} = {self._part(start, stop, len(run))}"

    def _part(self, start: str, stop: str, size: int) -> str:
        """Return the source of inputs in the list of inputs by block."""
        if size == 1:
            return f"{self.list}[{start}]"
        return f"{self.list}[{start}{':' if start.isdigit() else ' : '}{stop}]"

    def decorator(self) -> str:
        """Return the line before the source with the gradients that a forward needs; '' if it needs all."""
        function = self.function
        given = [f"{name}={self._numbers(some)}" for name, some in self.flags.items() if some]
        given += [f"saved={function.saved}"] if function.saved != tuple(range(len(function.outputs))) else []
        return f"@functional.segment({', '.join(given)})\n" if given else ""

    def _numbers(self, some: Collection[int]) -> str:
        """Return the source of inputs: their names, and the numbers of those in the list of blocks."""
        names = [self._name(self.inputs[n]) for n in sorted(some) if n < self.listed]
        left = {n for n in some if n >= self.listed}
        ranges = list(_runs(left))
        if len(ranges) > MOST_RANGES:
            pairs = ((one.count, *pair) for one in self.blocks.repeats.values() for pair in self.blocks.inputs(one))
            ranges = [range(n, n + step * count, step) for count, n, step in pairs if n in left]
            ranges += _runs(left.difference(*ranges))
        return repr((*names, *ranges))

    def _ends(self) -> dict[Value, int]:
        """Return, for each value, the row of the last op that reads it. A value and its views share memory, and end
        together. What the last op reads ends with the function.
        """
        shared: dict[str, list[str]] = {}
        last: dict[int, int] = {}
        for n, op in enumerate(self.ops):
            product = self.products.get(op.name)
            read = [o.tensor for o in (*(product.inputs if product else ()), *op.inputs)]
            outputs = [o.tensor for o in op.outputs]
            if not row_of(op.target).is_view:
                shared |= {tensor: [tensor] for tensor in outputs}
            elif read[0] in shared:
                shared[read[0]] += outputs
                shared |= dict.fromkeys(outputs, shared[read[0]])
            last |= {id(shared[tensor]): n for tensor in (*read, *outputs) if tensor in shared}
        kept = {id(shared[tensor]) for tensor in self.function.outputs if tensor in shared}
        groups = [group for key, group in {id(group): group for group in shared.values()}.items() if key not in kept]
        return {_value(t): last[id(group)] for group in groups for t in group if last[id(group)] < len(self.ops) - 1}

    def _row(self, op: Op) -> Row:
        product, slots = self.products.get(op.name), list[Value | Run]()
        readers = [(product, 0), (product, 1), (op, 1)] if product else [(op, k) for k in range(len(op.inputs))]

        def held(slot: Value | Run) -> str:
            slots.append(slot)
            return f"slot{len(slots) - 1}_"

        names = [held(self._read(reader, k)) for reader, k in readers]
        if product:
            source = row_of(product.target).biased.format(*names)
        else:
            random = f"random({held(Run(_DRAWS, self.draws, 1))})" if op.target in RANDOM else ""
            shapes = [self._local(op, o) for o in op.inputs]
            results, box = [self._local(op, o) for o in op.outputs], self.boxes[op.name]
            self.draws += bool(random)
            placed = enumerate(parts_of(op, box, self.tensors), self.parts)
            parts = {key: f"parts[{held(Run(_PARTS, n, 1))}]" for n, key in placed}
            self.parts += len(parts)
            local = Local(op, box, names, shapes, results, self.tensors, random, parts)
            source = row_of(op.target).text(local)
        numbers = [number for r, k in readers if (number := self.function.input_of.get((r.name, k))) is not None]
        made = tuple(_value(o.tensor) for o in op.outputs)
        flags = tuple(n in some for n in numbers for some in self.flags.values())
        is_unread = bool(self.function.grads) and op.has_mirror and reads_inputs(op)
        is_unread &= self.unread.issuperset(o.tensor for o in op.outputs)
        return Row(op, source, tuple(slots), made, flags, is_unread)

    def _read(self, op: Op, k: int) -> Value:
        number = self.function.input_of.get((op.name, k))
        return _value(op.inputs[k].tensor) if number is None else self.inputs[number]

    def _line(self, row: Row) -> str:
        names = [self._name(x) if isinstance(x, Value) else self._number(x) for x in row.slots]
        source = re.sub(r"\bslot(\d+)_", lambda found: names[int(found[1])], row.text)
        return f"{', '.join(map(self._named, row.made))} = {source}"

    def _deleted(self, at: int) -> list[str]:
        """Return the names to delete after a row; in a loop, those of the first repetition."""
        if self.repeat is None:
            return list(map(self._name, self.blocks.deleted.get(at, ())))
        ended = self.blocks.deleted.get(at + self.repeat.length, ())
        return [self._name(self.blocks.at(self.repeat, v, 0)) for v in ended]

    def _last(self, at: int) -> list[str]:
        """Return the lines that end, in the last repetition of a loop, what no repetition reads any more."""
        if self.repeat is None:
            return []
        ended = self.blocks.last.get(self.repeat.end - self.repeat.length + at - self.repeat.start, ())
        names = list(map(self._name, ended))
        return [f"if {LAYER} == {self.repeat.last}:", f"    {deleted(names)}"] if names else []

    def _number(self, run: Run) -> str:
        return str(run.start) if self.repeat is None else self.repeat.number(run.start, run)

    def _name(self, value: Value) -> str:
        """Return the source of a value with a name."""
        name = self.names[self.blocks.place(value)[0]]
        return f"{name}[{self.blocks.number(value, self.repeat)}]" if self.blocks.is_kept(value) else name

    def _named(self, value: Value) -> str:
        """Return the source of a value that gets a name, if its place has none."""
        place = self.blocks.place(value)[0]
        if place not in self.names:
            tensor = self.function.inputs[int(value.name[1:])] if value in self.inputs else value.name
            self.names[place] = unique(self._short(tensor), self.taken)
        return self._name(value)

    def _short(self, tensor: str) -> str:
        """Return a name that is equal in all layers: without numbers of blocks and of repeated ops."""
        tensor = first(self.tensors[tensor].origin or tensor)
        if self.tensors[tensor].kind == "activation":
            name = re.sub(r"_\d+$", "", re.sub(r"\W", "_", tensor))
            return f"{name}_" if keyword.iskeyword(name) else name
        return _stem(tensor)

    def _local(self, op: Op, operand: Operand) -> tuple[int, ...]:
        tensor = self.tensors[operand.tensor]
        return tensor.local_shape(extents(ranges(operand, tensor, self.boxes[op.name])))


def _source(lines: Iterable[Line]) -> str:
    """Return the source of lines; those without readers are in a context."""
    found, before = list[str](), ("", False)
    for line, is_unread in lines:
        indent = line[: len(line) - len(line.lstrip())]
        if is_unread and before != (indent, True):
            found.append(f"{indent}with functional.for_backward():")
        found.append("    " * is_unread + line)
        before = indent, is_unread
    return "\n".join(found)


def _value(tensor: str) -> Value:
    return Value(tensor, microbatch=0)


def _runs(numbers: Iterable[int]) -> Iterator[range]:
    """Yield the ranges of numbers one after the other."""
    for _, some in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [n for _, n in some]
        yield range(run[0], run[-1] + 1)


def _tuple(names: Iterable[str]) -> str:
    """Return the source of targets; brackets let a long one be broken."""
    text = ", ".join(names)
    return f"({text})" if len(text) > WIDTH // 2 else text
