"""Calls of a step that cannot be replayed: Python reads a number of a tensor, or data move between host and device."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from superscaler.errors import InputError

_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Operators whose result has a shape by data if an index is a mask.
_INDEXED = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._unsafe_index}
_MASKS = (torch.bool, torch.uint8)


class Reads(TorchDispatchMode):
    """A mode that notes the operators that cannot be replayed, or refuses the first one. `found`: their names."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self._refuses = refuses

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        why = "Python reads its result, or its shape depends on data" if is_read(func, args) else ""
        made = None if why and self._refuses else func(*args, **(kwargs or {}))
        if not why and _moves(args, made):
            why = "it moves data between host and GPU"
        if why:
            self.found.append(str(func.overloadpacket))
            if self._refuses:
                raise InputError(
                    f"a step of this plan calls {func.overloadpacket} ({why}), which no CUDA graph replays; leave "
                    "cuda_graph (--cuda-graph) out. Nothing was trained."
                )
        return made


def number(x: Tensor) -> float:
    """Return the number in a tensor, where no mode sees it: in a step that is not recorded."""
    with _disable_current_modes():
        return float(x)


def is_read(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether what an operator gives to Python, or the shape of its result, depends on data."""
    if func.overloadpacket in _INDEXED:
        return any(isinstance(x, Tensor) and x.dtype in _MASKS for x in args[1])
    return not _TAGS.isdisjoint(func.tags)


def _moves(args: Any, made: Any) -> bool:
    """Return whether an operator has tensors on a GPU and on the host. It takes scalars of the host as numbers, but for
    the one that it copies.
    """
    given = list(tensors_in(args))
    kinds = {x.is_cpu for x in given if x.dim() or len(given) == 1}
    return bool(kinds) and len(kinds | {x.is_cpu for x in tensors_in(made)}) > 1


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
