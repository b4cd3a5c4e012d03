"""Batches smaller than that of the capture: whether the module trains alike by a filled batch and by the small one.

Labels are filled with the one that losses ignore, masks with 0, other inputs with anything. Torch runs the module on a
few rows with short sequences and with filled ones, and on fewer rows and filled ones, in float64 if it can; a module
that is too large, on the shapes of fewer rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import chain, combinations
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from superscaler.frontend.checks.agreement import MOST_ELEMENTS, MOST_FLOPS, WithoutDropout
from superscaler.frontend.oracle import call_with, dense, largest, largest_gap, retyped
from superscaler.frontend.results import loss_of
from superscaler.frontend.untouched import untouched
from superscaler.ops.inputs import bounds, fillings, ignored, pads_rows

if TYPE_CHECKING:
    from superscaler.frontend.capture import Captured
    from superscaler.ir.model import Model

# Rows and elements of a sequence that are run, and how many of these elements are filled.
_ROWS, _LONG, _FILLED = 2, 16, 5
# The largest difference relative to the largest element of a tensor, whose size is at least a share of the largest one.
_CLOSE, _FLOOR = {torch.float64: 1e-5, torch.float32: 1e-4}, 1e-6
# Types of the arguments of operators that may be numbers.
_OF_NUMBERS = ("Tensor", "number")
# Gradients of larger models would take too much memory.
_MOST = 10**9


def shorter(captured: Captured) -> dict[str, int]:
    """Return the dim of each input along which sequences may be shorter, all of a length by as much; none if the module
    differs.
    """
    model, dims = captured.model, sequences(captured.model)
    if not dims or not (dtypes := _dtypes(captured)):
        return {}
    sizes = sorted({model.tensors[name].shape[dim] for name, dim in dims.items()})
    some = chain.from_iterable(combinations(sizes, count) for count in range(1, len(sizes) + 1))
    return dims if all(_trains_alike(captured, *_batches(captured, dims, cut), dtypes) for cut in some) else {}


def needs_all_rows(captured: Captured) -> bool:
    """Return whether the module trains otherwise by filled rows than by fewer, although its ops keep rows apart.

    One that is large, has several losses or no data is run on shapes alone: whether its operators read a number that
    depends on how many rows there are.
    """
    model, rows = captured.model, max((len(x) for x in captured.batch.values() if x.dim()), default=1)
    is_large = sum(op.flops for op in model.ops) * (_ROWS + 1) > MOST_FLOPS * rows
    if not pads_rows(model):
        return False
    full, few = _fewer(captured)
    if is_large or not (dtypes := _dtypes(captured)):
        numbers = _numbers(captured, full)
        return numbers is None or numbers != _numbers(captured, few)
    return not _trains_alike(captured, full, few, dtypes)


class _Numbers(TorchDispatchMode):
    """A recorder of the numbers that operators compute with: no sizes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in func._schema.arguments if kwargs and a.name in kwargs]
        if func.overloadpacket is torch.ops.aten.lift_fresh and args[0].numel() == 1:
            # torch.tensor(number)
            self.found.append(args[0].item())
        elif func.overloadpacket is not torch.ops.aten.arange:
            self.found += [x for a, x in given if str(a.type) in _OF_NUMBERS and isinstance(x, int | float)]
        return func(*args, **(kwargs or {}))


def _numbers(captured: Captured, batch: Mapping[str, Tensor]) -> list[object] | None:
    """Return the numbers in the module's operators on a batch of these shapes, None if its code raises."""
    module = captured.call.module
    own = dict(chain(module.named_parameters(), module.named_buffers()))
    # The meta device is faster, but does not mix with tensors of others.
    for mode, device in ((nullcontext(), "meta"), (FakeTensorMode(allow_non_fake_inputs=True), None)):
        with untouched(module), suppress(Exception), torch.no_grad(), mode, _Numbers() as recorder:
            # A module's code may raise any exception.
            some, tensors = ({n: _empty(x, device) for n, x in named.items()} for named in (batch, own))
            args, kwargs = captured.call.arguments(some)
            call_with(module, tensors, args, kwargs)
            return recorder.found
    return None


def _empty(x: Tensor, device: str | None) -> Tensor:
    return torch.empty_like(x, device=device or ("cpu" if x.is_meta else x.device))


def _dtypes(captured: Captured) -> Sequence[torch.dtype]:
    """Return the dtypes in which the module can be run, the best first; none for one that is not."""
    module, elements = captured.call.module, sum(prod(t.shape) for t in captured.model.parameters())
    tensors = (*module.parameters(), *module.buffers(), *captured.batch.values())
    if captured.call.losses or elements > _MOST or any(x.is_meta for x in tensors):
        return ()
    return (torch.float64, torch.float32)[elements > MOST_ELEMENTS :]


def _trains_alike(
    captured: Captured, full: Mapping[str, Tensor], short: Mapping[str, Tensor], dtypes: Sequence[torch.dtype]
) -> bool:
    """Return whether the module trains by a filled batch as by the small one."""
    for dtype in dtypes:
        some, others = (_step(captured, batch, dtype) for batch in (full, short))
        if some and others:
            return _is_same(some, others, _CLOSE[dtype])
    return False


def sequences(model: Model) -> dict[str, int]:
    """Return the dim of each input that is a sequence: its size is that of dim 1 of an integer input."""
    shapes = {name: model.tensors[name].shape for name in model.inputs}
    sizes = {s[1] for name, s in shapes.items() if len(s) > 1 and "float" not in model.tensors[name].dtype}
    if len(sizes) not in (1, 2) or min(sizes) <= _FILLED:
        return {}
    dims = {name: [d for d, size in enumerate(s) if d and size in sizes] for name, s in shapes.items()}
    return {name: found[0] for name, found in dims.items() if found} if max(map(len, dims.values())) == 1 else {}


def _batches(
    captured: Captured, dims: Mapping[str, int], lengths: Collection[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a drawn batch whose sequences of some lengths are filled at the end, and the batch without that end."""
    full, cut, fills = {}, {}, fillings(captured.model)
    rows = {x.shape[0] for x in captured.batch.values() if x.dim()}
    for name, x in _drawn(captured).items():
        x = torch.ones_like(x) if fills[name] == 0 and name not in bounds(captured.model) else x
        x = x[:_ROWS] if x.dim() and len(rows) == 1 else x
        is_cut = name in dims and x.shape[dims[name]] in lengths
        if name in dims:
            x = x.narrow(dims[name], 0, min(_LONG, x.shape[dims[name]])).clone()
            short, end = x.split((x.shape[dims[name]] - _FILLED, _FILLED), dims[name])
            if is_cut and (value := fills[name]) is not None:
                end.fill_(value)
        full[name], cut[name] = x, short.clone() if is_cut else x
    return full, cut


def _drawn(captured: Captured) -> dict[str, Tensor]:
    """Return the example batch, with drawn values of the inputs that select rows or classes."""
    limits, generator = bounds(captured.model), torch.Generator().manual_seed(0)
    pairs = captured.batch.items()
    return {n: torch.randint(limits[n], x.shape, generator=generator).to(x) if n in limits else x for n, x in pairs}


def _fewer(captured: Captured) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a drawn batch whose last row is filled, and the batch without that row."""
    full, few, labels, limits = {}, {}, ignored(captured.model), bounds(captured.model)
    for name, x in _drawn(captured).items():
        if name in labels and name in limits:
            # A loss of ignored labels alone is no number.
            x = x.where(x != labels[name], (x + 1) % limits[name])
        full[name] = few[name] = x
        if x.dim() and len(x) > 1:
            few[name] = x[:_ROWS][: len(x) - 1]
            end = few[name][-1:].clone()
            full[name] = torch.cat([few[name], end.fill_(labels[name]) if name in labels else end])
    return full, few


def _step(captured: Captured, batch: Mapping[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the loss, the gradients and the buffers of a step of the module; nothing if its code raises."""
    module, device = captured.call.module, next(iter(captured.batch.values())).device.type
    leaves = {n: retyped(p.detach(), dtype).requires_grad_(p.requires_grad) for n, p in module.named_parameters()}
    buffers = {n: retyped(b.detach(), dtype).clone() for n, b in module.named_buffers()}
    args, kwargs = captured.call.arguments({n: retyped(x, dtype) for n, x in batch.items()})
    trained = [x for x in leaves.values() if x.requires_grad]
    try:
        with untouched(module), WithoutDropout(), torch.enable_grad(), torch.autocast(device, enabled=False):
            torch.manual_seed(0)
            loss = loss_of(call_with(module, {**leaves, **buffers}, args, kwargs), "the module")
            found = torch.autograd.grad(loss, trained, allow_unused=True) if trained else ()
    except Exception:
        # A module's code may raise any exception, in its backward too.
        return []
    gradients = [dense(g, x.detach()) for g, x in zip(found, trained, strict=True)]
    return [loss.detach(), *gradients, *(b for b in buffers.values() if b.is_floating_point())]


def _is_same(some: list[Tensor], others: list[Tensor], close: float) -> bool:
    """Return whether all tensors are equal but for rounding."""
    if not all(isfinite(float(pair[0])) for pair in (some, others)):
        return False
    floor = _FLOOR * max(map(largest, others))
    pairs = zip(some, others, strict=True)
    return all(largest_gap(one, other) <= close * max(largest(other), floor) for one, other in pairs)
