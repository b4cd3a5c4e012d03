"""The segments of emitted code on symbols: each call of torch gives a symbol, which is the call and its arguments.

A segment must make the calls of its function's operators, in their order, with their shapes and numbers. The wanted
calls come from the rows of the operators. Loops, lists and names are those of Python: nothing here looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from superscaler.ir.mask import extents
from superscaler.ir.model import Model, Op, Operand
from superscaler.ir.program import Function
from superscaler.ir.variants import unread_twins
from superscaler.ops.call import Local, ranges
from superscaler.ops.table import RANDOM, biased_products, parts_of, reads_inputs, row_of, unfused
from superscaler.translation.values import Differs, stays

# A call: its name, its arguments, and whether only its backward is needed.
Term = tuple[object, ...]


class Symbol:
    """The result of a call in a segment, or something that it is given. `number`: that of its term."""

    __slots__ = ("number", "run")

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number

    def __del__(self) -> None:
        self.run.live[self.number] -= 1

    def __getattr__(self, name: str) -> Path:
        return Path(self.run, f".{name}", self)

    def __iter__(self) -> Iterator[Symbol]:
        return iter(self.run.items(self))

    def __bool__(self) -> bool:
        raise Differs("a segment decides by the value of a tensor")


def _operator(name: str) -> Callable[..., Symbol]:
    return lambda self, *others: self.run.call(f".{name}", (self, *others), {})


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OTHERS = "eq ne lt le gt ge neg pos invert abs getitem"
for _name in (*_BINARY.split(), *(f"r{name}" for name in _BINARY.split()), *_OTHERS.split()):
    setattr(Symbol, f"__{_name}__", _operator(f"__{_name}__"))


class Path:
    """A name in torch, `F` or `functional`, or an attribute of a symbol; it can be called."""

    __slots__ = ("name", "of", "run")

    def __init__(self, run: Run, name: str, of: Symbol | None = None) -> None:
        self.run, self.name, self.of = run, name, of

    def __getattr__(self, name: str) -> Path:
        return Path(self.run, f"{self.name}.{name}", self.of)

    def __call__(self, *args: object, **kwargs: object) -> Symbol:
        return self.run.call(self.name, args if self.of is None else (self.of, *args), kwargs)


class Run:
    """One run of a segment: its calls, in order. With `wanted`, each must be the next of those. `has_tape`: a backward
    is recorded.
    """

    def __init__(self, has_tape: bool, wanted: Run | None = None) -> None:
        self.terms: list[Term] = []
        # How many symbols of each term there are. By term: into how many results it is taken apart.
        self.live: list[int] = []
        self.results: dict[int, int] = {}
        # By call: the terms that must be gone when it is made.
        self.ended: dict[int, list[int]] = {}
        self.is_unread = False
        self._has_tape, self._wanted = has_tape, wanted

    def symbol(self, *term: object) -> Symbol:
        """Return the symbol of a new term."""
        number, wanted = len(self.terms), self._wanted
        if wanted is not None:
            if number >= len(wanted.terms):
                raise Differs(f"{_shown(term)} is behind the last call of the segment's operators")
            if wanted.terms[number] != term:
                raise Differs(f"{_shown(term)} is made where the operators make {_shown(wanted.terms[number])}")
            for ended in wanted.ended.get(number, ()):
                if self.live[ended] and stays(partial(self.live.__getitem__, ended)):
                    raise Differs(f"the result of {_shown(self.terms[ended])} is held, which nothing reads any more")
        self.terms.append(term)
        self.live.append(1)
        return Symbol(self, number)

    def call(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Symbol:
        given = tuple([_argument(a) for a in args]), tuple([(k, _argument(v)) for k, v in kwargs.items()])
        return self.symbol(name, *given, self.is_unread)

    def items(self, of: Symbol, count: int | None = None) -> list[Symbol]:
        """Return the results of a call that has several."""
        known = self.results if self._wanted is None else self._wanted.results
        count = known.get(of.number, 1) if count is None else count
        self.results[of.number] = count
        return [self.symbol("result", k, of.number) for k in range(count)]

    @contextmanager
    def unread(self) -> Iterator[None]:
        # Without a tape it changes nothing.
        self.is_unread = self._has_tape
        yield
        self.is_unread = False

    def random(self, number: int) -> Symbol:
        return self.symbol("random", number)


class Parts:
    """The ranges of a part, which a segment gets as data."""

    def __getitem__(self, number: int) -> tuple[str, int]:
        return "part", number


def _argument(value: object) -> object:
    """Return an argument as a part of a term; numbers differ by type."""
    if isinstance(value, Symbol):
        return "term", value.number
    if isinstance(value, Path):
        return "path", value.name, value.of and value.of.number
    if isinstance(value, list | tuple):
        return "several", *map(_argument, value)
    if isinstance(value, slice):
        return "slice", *map(_argument, (value.start, value.stop, value.step))
    return type(value).__name__, repr(value)


def _shown(term: Term) -> str:
    return str(term[0])


class Wanted:
    """The calls that the operators of a function make, and the numbers of the terms that the segment returns."""

    def __init__(self, model: Model, function: Function) -> None:
        self.run, self._function, self._tensors = Run(bool(function.grads)), function, model.tensors
        self._products = biased_products(function.ops, function.outputs, model.tensors)
        self._boxes = dict(zip((op.name for op in function.ops), function.boxes, strict=True))
        self._inputs = [self.run.symbol("input", n) for n in range(len(function.inputs))]
        self._values = dict[str, Symbol]()
        self._names = {"__builtins__": {}, **names_of(self.run), "random": self.run.random, "parts": Parts()}
        self.draws = self.parts = 0
        unread, ops, after = unread_twins(model), unfused(function.ops, self._products), list[int]()
        for op in ops:
            is_unread = bool(function.grads) and op.has_mirror and reads_inputs(op)
            self.run.is_unread = is_unread and unread.issuperset(o.tensor for o in op.outputs)
            made = self._run(op)
            found = made if len(op.outputs) > 1 else [made]
            if isinstance(found, Symbol):
                found = self.run.items(found, len(op.outputs))
            self._values |= {o.tensor: x for o, x in zip(op.outputs, found, strict=True)}
            after.append(len(self.run.terms))
        self.outputs = [self._values[tensor].number for tensor in function.outputs]
        for number, row in self._ends(ops).items():
            self.run.ended.setdefault(after[row], []).append(number)

    def _run(self, op: Op) -> Any:
        """Make the calls of an operator; return its result."""
        product = self._products.get(op.name)
        readers = [(product, 0), (product, 1), (op, 1)] if product else [(op, k) for k in range(len(op.inputs))]
        given = {f"a{n}": self._operand(reader, k) for n, (reader, k) in enumerate(readers)}
        if product:
            source = row_of(product.target).biased.format(*given)
        else:
            shapes, results = ([self._shape(op, o) for o in side] for side in (op.inputs, op.outputs))
            random = f"random({self.draws})" * (op.target in RANDOM)
            keys = parts_of(op, self._boxes[op.name], self._tensors)
            parts = {key: f"parts[{n}]" for n, key in enumerate(keys, self.parts)}
            local = Local(op, self._boxes[op.name], [*given], shapes, results, self._tensors, random, parts)
            source = row_of(op.target).text(local)
            self.draws, self.parts = self.draws + bool(random), self.parts + len(parts)
        return eval(_code(source), {**self._names, **given})

    def _operand(self, op: Op, k: int) -> Symbol:
        number = self._function.input_of.get((op.name, k))
        return self._values[op.inputs[k].tensor] if number is None else self._inputs[number]

    def _shape(self, op: Op, operand: Operand) -> tuple[int, ...]:
        tensor = self._tensors[operand.tensor]
        return tensor.local_shape(extents(ranges(operand, tensor, self._boxes[op.name])))

    def _ends(self, ops: Sequence[Op]) -> dict[int, int]:
        """Return, by term, the operator after which its memory is not needed. A value and its views share memory."""
        root, last = dict[str, str](), dict[str, int]()
        for row, op in enumerate(ops):
            product = self._products.get(op.name)
            read = [o.tensor for one in (product, op) if one for o in one.inputs]
            for o in op.outputs:
                root[o.tensor] = root.get(read[0], "") if row_of(op.target).is_view else o.tensor
            last |= {root[tensor]: row for tensor in (*read, *(o.tensor for o in op.outputs)) if tensor in root}
        for tensor in self._function.outputs:
            last[root[tensor]] = len(ops)
        found = dict[int, int]()
        for tensor, of in root.items():
            number = self._values[tensor].number
            # What lies in the memory of an input ends with the input.
            found[number] = max(found.get(number, -1), last[of] if of else len(ops))
        return {n: row for n, row in found.items() if n >= len(self._inputs) and row < len(ops) - 1}


@lru_cache(1 << 12)
def _code(source: str) -> CodeType:
    return compile(source, "row", "eval")


def names_of(run: Run) -> dict[str, object]:
    """Return the names that the lines of a segment use."""
    return {"torch": Path(run, "torch"), "F": Path(run, "F"), "functional": Functional(run), "float": float}


class Functional(Path):
    """The functions of emitted code that torch lacks."""

    __slots__ = ()

    def __init__(self, run: Run) -> None:
        super().__init__(run, "functional")

    def for_backward(self) -> AbstractContextManager[None]:
        return self.run.unread()


class Segments:
    """The functions of `segments.py`, on symbols."""

    def __init__(self, text: str, name: str) -> None:
        self._names: dict[str, Any] = {"__builtins__": {"range": range, "reversed": reversed, "__import__": _import}}
        exec(compile(text, name, "exec"), self._names)

    def check(self, model: Model, function: Function, name: str) -> None:
        """Raise Differs unless a segment makes the calls of a function and returns its results."""
        segment = self._names.get(name)
        if not isinstance(segment, FunctionType):
            raise Differs(f"segments.py has no {name}")
        wanted = Wanted(model, function)
        run = Run(bool(function.grads), wanted.run)
        self._names.update(names_of(run))
        inputs = [run.symbol("input", n) for n in range(len(function.inputs))]
        extra = ({"random": run.random} if wanted.draws else {}) | ({"parts": Parts()} if wanted.parts else {})
        found = segment(*inputs, **extra)
        if [x.number for x in found] != wanted.outputs:
            raise Differs(f"{name} returns other results than its operators")
        if len(run.terms) < len(wanted.run.terms):
            raise Differs(f"{name} does not make {_shown(wanted.run.terms[len(run.terms)])}")
        if function.grads:
            _check_flags(segment.__dict__, function, name)


def _check_flags(found: Mapping[str, Any], function: Function, name: str) -> None:
    """Compare what a segment says of gradients with its function."""
    everything = {*range(len(function.inputs))}
    wanted = {"constant": everything - {*function.grads}, "wide": {*function.wide}, "again": {*function.again}}
    for flag, numbers in wanted.items():
        if {*found.get(flag, ())} != numbers:
            raise Differs(f"{name} has {flag}={found.get(flag)}, and the program has {numbers}")
    saved = found.get("saved")
    if tuple(range(len(function.outputs)) if saved is None else saved) != function.saved:
        raise Differs(f"{name} has saved={saved}, and the program has {function.saved}")


class _Marks:
    """The module `functional` while the functions of segments are defined."""

    @staticmethod
    def segment(**flags: Any) -> Callable[[FunctionType], FunctionType]:
        """Return a decorator that keeps the flags of a segment, inputs by their numbers."""

        def marked(segment: FunctionType) -> FunctionType:
            names = segment.__code__.co_varnames
            for flag, some in flags.items():
                numbers = some if flag == "saved" else [names.index(x) if isinstance(x, str) else x for x in some]
                segment.__dict__[flag] = [k for n in numbers for k in (n if isinstance(n, range) else [n])]
            return segment

        return marked


def _import(name: str, *others: object) -> object:
    """Return the modules that `segments.py` imports, with names that each run replaces."""
    return SimpleNamespace(functional=_Marks, nn=SimpleNamespace(functional=None))
