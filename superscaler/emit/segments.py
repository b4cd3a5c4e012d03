"""Source of functions: the text of `segments.py`, one function per distinct text, shared by layers and devices."""

import keyword
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from superscaler.emit.lines import deleted, wrapped
from superscaler.ir.mask import Box, extents
from superscaler.ir.model import Model, Op, Operand, draw_number, first
from superscaler.ir.model_text import unique
from superscaler.ir.program import Function, Program
from superscaler.ops.call import Local, ranges
from superscaler.ops.table import RANDOM, biased_products, parts_of, row_of, unfused

HEAD = '''"""The segments of this plan: what runs on a device between two communications. Written by superscaler."""

import torch
import torch.nn.functional as F

from superscaler.runtime import functional
'''


@dataclass(frozen=True, slots=True)
class Draw:
    """A random tensor of an op on one part: the number of its op, the box of its elements in the whole tensor, and the
    number of iterations of the step before it.
    """

    op: int
    box: Box
    extents: tuple[int, ...]
    shape: tuple[int, ...]
    ahead: int = 0


def draws_of(model: Model, function: Function, boxes: Sequence[Box]) -> list[Draw]:
    """Return the random tensors that a function draws, in order, if its random ops are parts with these boxes."""
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
    for function in program.functions:
        writer = _Writer(program, function)
        body = writer.write()
        found.append((writer.decorator() if function.grads else "", body))
    # A function that runs without gradients is one of those with the same text that run with them.
    pairs = list(zip(found, program.functions, strict=True))
    alike = {key[1]: key for key, function in pairs if function.grads}
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
    return name if name.isidentifier() else f"_{name}"


class _Writer:
    def __init__(self, program: Program, function: Function) -> None:
        self.tensors = program.model.tensors
        self.function = function
        self.draws = self.parts = 0
        self.taken = {"torch", "F", "functional", "random", "parts", "float"}
        self.value: dict[str, str] = {}
        self.boxes = dict(zip((op.name for op in function.ops), function.boxes, strict=True))
        self.products = biased_products(function.ops, function.outputs, self.tensors)
        self.ops = unfused(function.ops, self.products)
        self.parameters = [unique(self._short(tensor), self.taken) for tensor in function.inputs]

    def write(self) -> str:
        """Return the source of the function from its parameters on, without its name."""
        parameters = self.parameters
        lines: list[str] = []
        module, dying = None, self._dying()
        for op in self.ops:
            where = re.sub(r"\b\d+\b", "*", op.module)
            if where != module and where:
                lines.append(f"    # {where}")
            module = where
            lines.append("    " + self._line(op, parameters))
            if op.name in dying:
                lines.append(f"    {deleted([self.value[tensor] for tensor in dying[op.name]])}")
        results = ", ".join(self.value[o] for o in self.function.outputs)
        lines.append(f"    return ({results},)" if self.function.outputs else "    return ()")
        extra = ["random"] * bool(self.draws) + ["parts"] * bool(self.parts)
        return f"({', '.join(parameters + extra)}):\n" + "\n".join(lines) + "\n"

    def decorator(self) -> str:
        """Return the line before the source that says which gradients a forward needs; '' if it needs all."""
        function = self.function
        constant = {*range(len(self.parameters))}.difference(function.grads)
        numbers = {"constant": sorted(constant), "wide": function.wide, "again": function.again}
        given = [f"{name}={tuple(self.parameters[n] for n in some)}" for name, some in numbers.items() if some]
        given += [f"saved={function.saved}"] if function.saved != tuple(range(len(function.outputs))) else []
        return f"@functional.segment({', '.join(given)})\n" if given else ""

    def _dying(self) -> dict[str, list[str]]:
        """Return, for each op, the values that nothing reads after it. A value and its views share memory, and die
        together.
        """
        shared: dict[str, list[str]] = {}
        last: dict[int, str] = {}
        for op in self.ops:
            product = self.products.get(op.name)
            read = [o.tensor for o in (*(product.inputs if product else ()), *op.inputs)]
            outputs = [o.tensor for o in op.outputs]
            if not row_of(op.target).is_view:
                shared |= {tensor: [tensor] for tensor in outputs}
            elif read[0] in shared:
                shared[read[0]] += outputs
                shared |= dict.fromkeys(outputs, shared[read[0]])
            last |= {id(shared[tensor]): op.name for tensor in (*read, *outputs) if tensor in shared}
        kept = {id(shared[tensor]) for tensor in self.function.outputs if tensor in shared}
        found: dict[str, list[str]] = {}
        for group in {id(group): group for group in shared.values() if id(group) not in kept}.values():
            if last[id(group)] != self.ops[-1].name:
                found.setdefault(last[id(group)], []).extend(group)
        return found

    def _line(self, op: Op, parameters: list[str]) -> str:
        if (product := self.products.get(op.name)) is not None:
            inputs = [(product, 0), (product, 1), (op, 1)]
            names = [self._name(reader, k, parameters) for reader, k in inputs]
            source = row_of(product.target).biased.format(*names)
        else:
            names = [self._name(op, k, parameters) for k in range(len(op.inputs))]
            random = f"random({self.draws})" if op.target in RANDOM else ""
            shapes = [self._local(op, o) for o in op.inputs]
            results, box = [self._local(op, o) for o in op.outputs], self.boxes[op.name]
            self.draws += bool(random)
            parts = {key: f"parts[{n}]" for n, key in enumerate(parts_of(op, box, self.tensors), self.parts)}
            self.parts += len(parts)
            local = Local(op, box, names, shapes, results, self.tensors, random, parts)
            source = row_of(op.target).text(local)
        for output in op.outputs:
            self.value[output.tensor] = unique(self._short(output.tensor), self.taken)
        return f"{', '.join(self.value[o.tensor] for o in op.outputs)} = {source}"

    def _name(self, op: Op, k: int, parameters: list[str]) -> str:
        number = self.function.input_of.get((op.name, k))
        return self.value[op.inputs[k].tensor] if number is None else parameters[number]

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
