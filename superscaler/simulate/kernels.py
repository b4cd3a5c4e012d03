"""The kernels and the memory of segments: each distinct one runs once on fake tensors, forward and backward.

A fake tensor has a shape, a dtype and a storage, but no data. So what is recorded is what torch itself does: the casts
of autocast, the tensors that autograd keeps, the kernels of the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from superscaler.emit.segments import emit_segments
from superscaler.ir.mask import extents
from superscaler.ir.model import Model
from superscaler.ir.program import Backward, Forward, Function, Program
from superscaler.ops.call import ranges
from superscaler.runtime import split_backward as halves
from superscaler.simulate.callables import callables

# The shape and the dtype of a tensor.
Meta = tuple[tuple[int, ...], str]
Gradients = Sequence[Tensor | None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that runs: the name of the aten operator (`mm`, `add.Tensor`), the tensors that it reads and makes."""

    name: str
    inputs: tuple[Meta, ...]
    outputs: tuple[Meta, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """Kernels in the order in which they run. `peak`: the most bytes that are alive while they run, beside those that
    were alive before.
    """

    kernels: tuple[Kernel, ...]
    peak: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The work of a function as a Forward and its Backward call it.

    backward   no work without a tape, one, or two where the backward is split
    tape       the bytes that autograd keeps beside inputs and results: after the forward, and between two halves
    inputs     the numbers of the inputs whose memory the tape keeps; `outputs`: of the results
    views      for a result that is a view of an input, the number of the input
    results    the bytes of each result; `gradients`: of each gradient that is made
    """

    forward: Work
    backward: tuple[Work, ...]
    tape: tuple[int, ...]
    inputs: frozenset[int]
    outputs: frozenset[int]
    views: Mapping[int, int]
    results: tuple[int, ...]
    gradients: tuple[int, ...]


class Segments:
    """The segments of a program. Equal calls are recorded once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._run = callables(program.model, program.functions)
        _, self._names = emit_segments(program)
        self._known: dict[Hashable, Segment] = {}

    def of(self, forward: Forward, backward: Backward | None = None, first: Sequence[bool] = ()) -> Segment:
        """Return the segment of a forward and its backward. `first`: which gradients the first of two halves makes."""
        function = self.program.functions[forward.function]
        metas, wide = tuple(input_metas(self.program.model, function)), backward.wide if backward else ()
        key = self._names[forward.function], metas, forward.grads, forward.saved, wide, tuple(first)
        if key not in self._known:
            run = self._run[forward.function]
            self._known[key] = _Recorder().segment(run, metas, forward.grads, forward.saved, wide, first)
        return self._known[key]


def input_metas(model: Model, function: Function) -> Iterator[Meta]:
    """Yield the local shape and the dtype of each input of a function."""
    boxes = {op.name: (op, box) for op, box in zip(function.ops, function.boxes, strict=True)}
    reader = {number: place for place, number in function.input_of.items()}
    for number, name in enumerate(function.inputs):
        place, tensor = reader[number], model.tensors[name]
        op, box = boxes[place[0]]
        yield tensor.local_shape(extents(ranges(op.inputs[place[1]], tensor, box))), tensor.dtype


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each kernel, and counts the bytes of the storages that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self.sizes: dict[int, int] = {}
        self.alive = self.peak = 0
        # The storages that autograd saved, and those of the inputs and of the given gradients, which do not count.
        self.saved, self.given = set[int](), set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            results = _tensors(made)
            if not func.is_view:
                name = func.name().partition("::")[2]
                self.kernels.append(Kernel(name, _metas(_tensors((args, kwargs))), _metas(results)))
            for x in results:
                self._count(x)
        return made

    def segment(
        self,
        run: Callable[..., Sequence[Tensor]],
        metas: Sequence[Meta],
        grads: Sequence[bool],
        saved: Sequence[int],
        wide: Sequence[bool],
        first: Sequence[bool],
    ) -> Segment:
        """Run a function on fake inputs, then its backward, as the executor does."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            pairs = zip(metas, grads, strict=True)
            inputs = [torch.empty(s, dtype=getattr(torch, d), requires_grad=g) for (s, d), g in pairs]
            own = {_key(x): n for n, x in enumerate(inputs)}
            self.given.update(own)
            with torch.set_grad_enabled(any(grads)), saved_tensors_hooks(self._pack, lambda x: x):
                outputs, forward = self._work(lambda: list(run(*inputs)))
            keys, results = list(map(_key, outputs)), tuple(map(_bytes, outputs))
            ends = [
                (get_gradient_edge(outputs[k]), torch.empty_like(outputs[k])) for k in saved if outputs[k].requires_grad
            ]
            self.given.update(_key(x) for _, x in ends)
            kept = {key: size for key, size in zip(keys, results, strict=True) if key in self.saved - set(own)}
            del outputs
            tape, backward, made = [self.alive - sum(kept.values())], list[Work](), list[Gradients]()
            for half in _halves(ends, [x for x in inputs if x.requires_grad], wide, first):
                found, work = self._work(half)
                made.append(found)
                backward.append(work)
                tape.append(self.alive - sum({_key(x): _bytes(x) for x in found if x is not None}.values()))
            gradients = tuple(max(0 if x is None else _bytes(x) for x in of) for of in zip(*made, strict=True))
            return Segment(
                forward,
                tuple(backward),
                tuple(tape[: max(1, len(backward))]),
                frozenset(n for key, n in own.items() if key in self.saved),
                frozenset(n for n, key in enumerate(keys) if key in kept),
                {n: own[key] for n, key in enumerate(keys) if key in own},
                results,
                gradients,
            )

    def _work(self, run: Callable[[], T]) -> tuple[T, Work]:
        first, start = len(self.kernels), self.alive
        self.peak = start
        with self:
            made = run()
        return made, Work(tuple(self.kernels[first:]), self.peak - start)

    def _count(self, x: Tensor) -> None:
        storage, key = x.untyped_storage(), _key(x)
        if key not in self.sizes and key not in self.given:
            self.sizes[key] = storage.nbytes()
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.alive -= self.sizes.pop(key)

    def _pack(self, x: Tensor) -> Tensor:
        self.saved.add(_key(x))
        return x


def _halves(
    ends: Sequence[tuple[GradientEdge, Tensor]], leaves: Sequence[Tensor], wide: Sequence[bool], first: Sequence[bool]
) -> Iterator[Callable[[], Gradients]]:
    """Yield the backward as one function, or as two."""
    wides = wide or [False] * len(leaves)

    def widened(found: Gradients) -> Gradients:
        return [x.float() if w and x is not None else x for x, w in zip(found, wides, strict=True)]

    if not ends:
        return
    if not any(first):
        yield lambda: widened(halves.grad(ends, [get_gradient_edge(x) for x in leaves]))
        return
    rest = list[halves.Rest]()

    def begin() -> Gradients:
        found, left = halves.first_half(ends, leaves, first)
        rest.append(left)
        return widened(found)

    yield begin
    yield lambda: widened(halves.second_half(rest.pop()))


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _metas(tensors: Iterable[Tensor]) -> tuple[Meta, ...]:
    return tuple((tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in tensors)


def _key(x: Tensor) -> int:
    key: int = x.untyped_storage()._cdata
    return key


def _bytes(x: Tensor) -> int:
    return x.untyped_storage().nbytes()
