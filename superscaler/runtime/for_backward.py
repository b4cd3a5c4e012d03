"""Operators without readers of their results: they record the data of their backward, and their kernels do not run."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
# Kernels whose backward needs at most their inputs. Others run: copies, which a product may save, among them.
_PRODUCTS = frozenset({_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm})
_POINTWISE = frozenset({_ATEN.add, _ATEN.sub, _ATEN.mul, _ATEN.div, _ATEN.neg})


def for_backward() -> AbstractContextManager[Any]:
    """Return a context for results without readers. If a backward is recorded, products and sums give zeros there,
    without memory. Otherwise it changes nothing, nor in code of torch.compile, which has no modes.
    """
    return nullcontext() if torch.compiler.is_compiling() or not torch.is_grad_enabled() else _Unread()


class _Unread(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode below autograd, which records each operator as usual."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kind, tensors = func.overloadpacket, [x for x in args if isinstance(x, Tensor)]
        if kind in _PRODUCTS:
            *_, a, b = tensors
            return _zeros(a, (*a.shape[:-1], b.shape[-1]), a.dtype)
        if kind in _POINTWISE:
            shape = torch.broadcast_shapes(*(x.shape for x in tensors))
            dtype = torch.result_type(*args[:2]) if len(args) > 1 else args[0].dtype
            return _zeros(tensors[0], shape, dtype)
        return func(*args, **(kwargs or {}))


def _zeros(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return like.new_zeros((), dtype=dtype).expand(shape)
