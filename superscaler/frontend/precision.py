"""Weights in bf16 or fp16: a copy of a module in that dtype. The optimizer keeps float32 copies of its weights."""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from superscaler.errors import CaptureError, InputError, brief, unknown
from superscaler.frontend.base.training import Optimizers
from superscaler.frontend.effects.calls import refuse_hooks
from superscaler.specs.options import HALVES


class Narrowed(NamedTuple):
    """A module, its optimizer and its example arguments."""

    module: nn.Module
    optimizer: Optimizers | None
    args: Any
    kwargs: Any


def narrowed(given: Narrowed, precision: str) -> Narrowed:
    """Return copies with floating-point parameters, buffers and inputs in the dtype of a precision.

    Batch norms stay as they are, because running averages of 16 bits lose small changes; torch's take 16-bit inputs. So
    do the frequencies of rotary embeddings, whose products with large positions need more digits.
    """
    if str(precision) not in HALVES:
        raise InputError(unknown("precision", precision, HALVES))
    # A parameter's hooks would not be in the copy.
    refuse_hooks(given.module)
    dtype = getattr(torch, HALVES[precision])
    kept = set(map(id, _kept(given.module)))
    memo: dict[int, Any] = {}
    for x in (*given.module.parameters(), *given.module.buffers(), *pytree.tree_leaves((given.args, given.kwargs))):
        if isinstance(x, Tensor) and x.is_floating_point() and id(x) not in kept:
            memo[id(x)] = _as(x, dtype)
    try:
        return copy.deepcopy(given, memo)
    except Exception as error:
        # The module's own `__deepcopy__` may raise any exception.
        raise CaptureError(
            f"{type(given.module).__name__} cannot be copied for precision={precision!r} ({type(error).__name__}: "
            f"{brief(error)}); leave what cannot be copied out of the module."
        ) from error


def _kept(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of a module that keep their dtype. Rotary embeddings call their frequencies `inv_freq`."""
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            yield from (*part.parameters(), *part.buffers())
    yield from (x for name, x in module.named_buffers() if name.endswith("inv_freq"))


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype, as a parameter if it is one; itself if it has that dtype."""
    if x.dtype == dtype:
        return x
    other = x.detach().to(dtype)
    return (
        nn.Parameter(other, x.requires_grad) if isinstance(x, nn.Parameter) else other.requires_grad_(x.requires_grad)
    )
