"""Communication of tensor parallelism beside products: which of it, and for how long, from instructions and kernels.

Two ways are known (NVIDIA/NeMo, communication_overlap.rst; NVIDIA/TransformerEngine, pytorch/module/base.py):

  bulk        beside products that do not need it: sums of the gradients of inputs beside the gradients of weights, and
              inputs that are gathered again beside the gradients of inputs
  pipelined   beside the product that needs it, too: rows are gathered piece by piece while those that are there are
              multiplied, and those of a result are scattered while the next ones are computed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from superscaler.ir.program import Backward, Collective, Forward, Instruction, Role, Value, Wait, names
from superscaler.simulate.rates import products_of
from superscaler.simulate.times import Times, sooner
from superscaler.simulate.works import Kernel

# The pieces of a result that is scattered: TransformerEngine's `num_splits`. What is gathered has one a device.
_SPLITS = 4
_SUMS = ("all_reduce", "reduce_scatter")
_Kernels = Sequence[Kernel]


@dataclass(frozen=True, slots=True)
class Beside:
    """The part of a collective that products hide: what takes `limit` seconds, but for the share `last` of all.
    `slowdown`: the factor of the products beside it.
    """

    limit: float
    last: float
    slowdown: float

    def left(self, seconds: Times) -> Times:
        """Return the seconds that it costs: those that are not hidden, and those by which it slows the products.

        >>> Beside(limit=3.0, last=0.0, slowdown=1.5).left(4.0), Beside(limit=9.0, last=0.25, slowdown=1.5).left(4.0)
        (2.0, 2.0)
        """
        hidden = sooner(self.limit, seconds * (1 - self.last))
        return seconds - hidden / self.slowdown


@dataclass(eq=False)
class Overlap:
    """The overlap of a system. `seconds`: of a kernel; `slowdown`: its factor beside communication; `weights`: the
    names of tensors that are no rows of tokens.
    """

    seconds: Callable[[Kernel], float]
    slowdown: float
    is_pipelined: bool
    weights: frozenset[str]

    def of(self, code: Sequence[Instruction], kernels: Sequence[_Kernels]) -> Mapping[int, Beside]:
        """Return the part of each collective that products hide, by its number. `kernels`: of each instruction."""
        return _Scan(self, code, kernels).found


@dataclass(eq=False)
class _Scan:
    """A look at the instructions of a device in order. `makers`: the numbers of segments by their results; `started`
    and `there`: those of gathers by their handles and by their results.
    """

    overlap: Overlap
    code: Sequence[Instruction]
    kernels: Sequence[_Kernels]
    found: dict[int, Beside] = field(default_factory=dict)
    makers: dict[Value, int] = field(default_factory=dict)
    started: dict[Value, int] = field(default_factory=dict)
    there: dict[Value, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for at, i in enumerate(self.code):
            match i:
                case Collective(works=(Value() as work,), sources=(Value() as source,)):
                    self._start(at, i, work, source)
                case Wait() if i.work in self.started:
                    self.there[i.out] = self.started.pop(i.work)
                case Forward() | Backward():
                    self._run(at, i)

    def _start(self, at: int, i: Collective, work: Value, source: Value) -> None:
        if source.name in self.overlap.weights:
            return
        if i.kind == "all_gather":
            self.started[work] = at
        elif i.kind in _SUMS and source in self.makers:
            maker, shape = self.makers[source], i.ways[0].local
            if isinstance(self.code[maker], Backward):
                self._hide(at, _reading(self.kernels[maker], shape))
            elif self.overlap.is_pipelined and i.kind == "reduce_scatter":
                self._hide(at, _making(self.kernels[maker], shape), _SPLITS, last=1 / _SPLITS)

    def _run(self, at: int, i: Forward | Backward) -> None:
        for name in (name for name in names(i, Role.READ) if name in self.there):
            start = self.there.pop(name)
            gather = self.code[start]
            assert isinstance(gather, Collective)
            shape = gather.ways[0].shape
            if isinstance(i, Backward) and name in i.again:
                self._hide(start, _making(self.kernels[at], shape))
            elif self.overlap.is_pipelined:
                self._hide(start, _taking(self.kernels[at], shape), len(gather.group))
        self.makers |= {name: at for name in i.outputs if name is not None}

    def _hide(self, at: int, products: Iterator[Kernel], pieces: int = 0, last: float = 0.0) -> None:
        """Hide a collective behind products, but for one of their pieces."""
        slowdown = self.overlap.slowdown
        limit = sum(map(self.overlap.seconds, products)) * slowdown * (1 - 1 / pieces if pieces else 1.0)
        if limit:
            self.found[at] = Beside(limit, last, slowdown)


def _taking(kernels: _Kernels, rows: tuple[int, ...]) -> Iterator[Kernel]:
    """Yield the products whose left matrix has the rows."""
    return (kernel for kernel, m, _, k in _products(kernels) if _is(rows, m, k))


def _reading(kernels: _Kernels, rows: tuple[int, ...]) -> Iterator[Kernel]:
    """Yield the products whose right matrix has the rows, or one like it: gradients of weights."""
    return (kernel for kernel, _, n, k in _products(kernels) if _is(rows, k, n))


def _making(kernels: _Kernels, rows: tuple[int, ...]) -> Iterator[Kernel]:
    """Yield the products whose result has the rows."""
    return (kernel for kernel, m, n, _ in _products(kernels) if _is(rows, m, n))


def _products(kernels: _Kernels) -> Iterator[tuple[Kernel, int, int, int]]:
    return ((kernel, batch * m, n, k) for kernel in kernels for batch, m, n, k in products_of(kernel))


def _is(rows: tuple[int, ...], count: int, width: int) -> bool:
    return rows[-1:] == (width,) and prod(rows) == count * width
