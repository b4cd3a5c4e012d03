"""What a module's operators read on a batch of some shapes, without its data: numbers, and tensors of no input.

Parameters and inputs are on the meta device. Tensors that are made from neither, as positions, masks and buffers, have
their values: a module that reads a length reads another number or tensor on a shorter batch, or runs other operators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from superscaler.frontend.base.captured import Captured
from superscaler.frontend.base.oracle import call_with, largest
from superscaler.frontend.effects.untouched import untouched, without_checks
from superscaler.groups import collect
from superscaler.ir.model import Model, Op

_META = torch.device("meta")
_ATEN = torch.ops.aten
# Operators that read the shape of their operand only.
_FILLS = frozenset(
    [_ATEN.ones_like, _ATEN.zeros_like, _ATEN.full_like, _ATEN.new_ones, _ATEN.new_zeros, _ATEN.new_full]
)
# Types of the arguments of operators that may be numbers.
_OF_NUMBERS = ("Tensor", "number")
# Differences of constants by rounding, relative to the largest element.
_CLOSE = 1e-5


class Reading(NamedTuple):
    """The operators that run on the batch or on parameters, their numbers, and the known tensors that they read."""

    calls: list[object]
    tensors: list[Tensor]

    def is_alike(self, shorter: Reading) -> bool:
        """Return whether a smaller batch reads the same: of each tensor the first elements along each dim."""
        if self.calls != shorter.calls or len(self.tensors) != len(shorter.tensors):
            return False
        pairs = {(id(a), id(b)): (a, b) for a, b in zip(self.tensors, shorter.tensors, strict=True)}
        return all(_begins_with(*pair) for pair in pairs.values())


def _begins_with(long: Tensor, short: Tensor) -> bool:
    if long.dim() != short.dim() or long.dtype != short.dtype:
        return False
    if any(n < m for n, m in zip(long.shape, short.shape, strict=True)):
        return False
    first = long[tuple(slice(0, n) for n in short.shape)]
    close = _CLOSE * largest(short) if short.is_floating_point() else 0.0
    return torch.equal(first, short) or (close > 0 and torch.allclose(first, short, 0.0, close, equal_nan=True))


def reading(captured: Captured, batch: Mapping[str, Tensor]) -> Reading | None:
    """Return the reading of a module on a batch of these shapes, None if its code raises."""
    module = captured.call.module
    parameters = {name: p.to(_META) for name, p in module.named_parameters()}
    buffers = {name: b if b.is_meta else b.detach().cpu().clone() for name, b in module.named_buffers()}
    args, kwargs = captured.call.arguments({name: x.to(_META) for name, x in batch.items()})
    # A module's code may raise any exception.
    with suppress(Exception), untouched(module), without_checks(), torch.no_grad(), _Reader() as reader:
        call_with(module, parameters | buffers, args, kwargs)
        return reader.found
    return None


class _Reader(TorchDispatchMode):
    """A recorder of what operators read. What is made of no input has values, and is on the CPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Reading([], [])
        self._as_meta: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, dict(kwargs or {})
        is_known = packet in _FILLS or not any(x.is_meta for x in _tensors((*args, *kwargs.values())))
        if is_known and (packet in _FILLS or kwargs.get("device") == _META):
            kwargs["device"] = torch.device("cpu")
        if not is_known:
            given = [(a, args[k] if k < len(args) else kwargs.get(a)) for k, a in _numbers(func)]
            self.found.calls.append((packet, [x for _, x in given if isinstance(x, int | float)]))
            args = [self._without_values(x) for x in args]
            kwargs = {name: self._without_values(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)

    def _without_values(self, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [self._without_values(one) for one in x]
        if not isinstance(x, Tensor) or x.is_meta:
            return x
        if id(x) not in self._as_meta:
            self._as_meta[id(x)] = x, torch.empty_like(x, device=_META)
        self.found.tensors.append(x.cpu())
        return self._as_meta[id(x)][1]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


@cache
def _numbers(func: Any) -> list[tuple[int, str]]:
    """Return the positions and names of the arguments of an operator that may be numbers: no sizes."""
    return [(k, a.name) for k, a in enumerate(func._schema.arguments) if str(a.type) in _OF_NUMBERS]


@contextmanager
def few_layers(module: nn.Module, model: Model) -> Iterator[bool]:
    """Run a module with one of the equal blocks of each list only. Yield whether any is left out."""
    lists = {n: m for n, m in module.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1}
    ops = collect(pair for op in model.ops if op.is_forward for pair in _blocks(op, lists))
    is_less = False
    with untouched(module):
        for name, part in lists.items():
            kinds = [tuple(_kind(model, op, f"{name}.{k}") for op in ops.get((name, k), ())) for k in range(len(part))]
            kept = [part[k] for k, kind in enumerate(kinds) if kind not in kinds[:k]]
            is_less = is_less or len(kept) < len(part)
            part._modules = {str(k): one for k, one in enumerate(kept)}
        yield is_less


def _blocks(op: Op, lists: Collection[str]) -> Iterator[tuple[tuple[str, int], Op]]:
    """Yield the lists and the numbers of the blocks in which an op is."""
    words = op.module.split(".")
    for at, word in enumerate(words):
        if word.isdigit() and (name := ".".join(words[:at])) in lists:
            yield (name, int(word)), op


def _kind(model: Model, op: Op, block: str) -> tuple[object, ...]:
    """Return the computation of an op of a block: equal for equal blocks, whatever their parameters are."""
    tensors = [model.tensors[operand.tensor] for operand in op.inputs]
    read = [(x.shape, x.dtype, x.kind, x.name if x.kind == "constant" else "") for x in tensors]
    return op.target, op.args, op.kwargs, op.module.removeprefix(block), tuple(read)
