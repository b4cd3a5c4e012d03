"""Batches smaller than that of the capture: whether the module trains alike by a filled batch and by the small one.

Labels are filled with the one that losses ignore, masks with 0, other inputs with anything. What a module reads must be
the same at the captured length and at smaller ones (`reading`). Torch runs it on a few rows with short sequences and
with filled ones, and on fewer rows and filled ones, in float64 if it can, with a few of its equal layers. Without data
or for several losses, it is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, combinations
from math import isfinite, prod

import torch
from torch import Tensor

from superscaler.frontend.base.captured import Captured
from superscaler.frontend.base.oracle import call_with, dense, largest, largest_gap, retyped
from superscaler.frontend.base.results import loss_of
from superscaler.frontend.checks.agreement import MOST_ELEMENTS, MOST_FLOPS, WithoutDropout
from superscaler.frontend.checks.reading import Reading, few_layers, reading
from superscaler.frontend.effects.untouched import untouched
from superscaler.ir.model import Model
from superscaler.ops.inputs import bounds, fillings, ignored, pads_rows

Batch = Mapping[str, Tensor]
# Rows and elements of a sequence that are run, and how many of these elements are filled.
_ROWS, _LONG, _FILLED = 2, 16, 5
# The largest difference relative to the largest element of a tensor, whose size is at least a share of the largest one.
_CLOSE, _FLOOR = {torch.float64: 1e-5, torch.float32: 1e-4}, 1e-6
# Larger parameters get no gradient in float32.
_SMALL = 10**5
# Gradients of larger models would take too much memory.
_MOST = 10**9


def shorter(captured: Captured) -> dict[str, int]:
    """Return the dim of each input along which sequences may be shorter, all of a length by as much; none if the module
    differs.
    """
    dims = sequences(captured.model)
    if not dims or not (dtypes := _dtypes(captured)):
        return {}
    sizes = sorted({captured.model.tensors[name].shape[dim] for name, dim in dims.items()})
    some = list(chain.from_iterable(combinations(sizes, count) for count in range(1, len(sizes) + 1)))

    def trains_alike() -> bool | None:
        whole = reading(captured, _few_rows(captured, captured.batch))
        for cut in some:
            reads = _reads_alike(captured, whole, dims, cut)
            if reads is False or (reads is None and _is_large(captured)):
                return False
            # A module that cannot be read runs on sequences of the captured length.
            found = _trains_alike(captured, *_batches(captured, dims, cut, _LONG if reads else max(sizes)), dtypes)
            if not found:
                return found
        return True

    return dims if _by_few_layers(captured, trains_alike) else {}


def needs_all_rows(captured: Captured) -> bool:
    """Return whether the module trains otherwise by filled rows than by fewer, although its ops keep rows apart.

    One that is large, has several losses or no data is only read: whether its operators read a number or a tensor that
    depends on how many rows there are.
    """
    if not pads_rows(captured.model):
        return False
    dims = captured.model.shorter
    dtypes = _dtypes(captured) if dims or not _is_large(captured) else ()
    full, few = ({n: _begin(x, dims.get(n)) for n, x in batch.items()} for batch in _fewer(captured))

    def trains_alike() -> bool | None:
        if dtypes:
            return _trains_alike(captured, full, few, dtypes)
        some, others = reading(captured, full), reading(captured, few)
        return None if some is None or others is None else some.is_alike(others)

    return not _by_few_layers(captured, trains_alike)


def _is_large(captured: Captured) -> bool:
    """Return whether steps on a few whole rows take too long."""
    rows = max((len(x) for x in captured.batch.values() if x.dim()), default=1)
    return sum(op.flops for op in captured.model.ops) * (_ROWS + 1) > MOST_FLOPS * rows


def _by_few_layers(captured: Captured, is_alike: Callable[[], bool | None]) -> bool:
    """Return whether something holds of the module with a few of its equal layers, of all if it does not run so."""
    with few_layers(captured.call.module, captured.model) as is_less:
        found = is_alike() if is_less else None
    return bool(is_alike() if found is None else found)


def _reads_alike(
    captured: Captured, whole: Reading | None, dims: Mapping[str, int], cut: Collection[int]
) -> bool | None:
    """Return whether the module reads the same of shorter sequences; None if it cannot be read."""
    batch, least = _few_rows(captured, captured.batch), min(cut)
    if whole is None:
        return None
    for length in {2, least - 1}:
        less = {n: _begin(x, dims[n], length) if n in dims and x.shape[dims[n]] in cut else x for n, x in batch.items()}
        found = reading(captured, less)
        if found is None or not whole.is_alike(found):
            return None if found is None else False
    return True


def _few_rows(captured: Captured, batch: Batch) -> Batch:
    rows = {x.shape[0] for x in captured.batch.values() if x.dim()}
    return {n: x[:_ROWS] if x.dim() and len(rows) == 1 else x for n, x in batch.items()}


def _begin(x: Tensor, dim: int | None, length: int = _LONG) -> Tensor:
    """Return the first elements of a sequence along its dim."""
    return x if dim is None else x.narrow(dim, 0, min(length, x.shape[dim]))


def _dtypes(captured: Captured) -> Sequence[torch.dtype]:
    """Return the dtypes in which the module can be run, the best first; none for one that is not."""
    module, elements = captured.call.module, sum(prod(t.shape) for t in captured.model.parameters())
    tensors = (*module.parameters(), *module.buffers(), *captured.batch.values())
    if captured.call.losses or elements > _MOST or any(x.is_meta for x in tensors):
        return ()
    return (torch.float64, torch.float32)[elements > MOST_ELEMENTS :]


def _trains_alike(captured: Captured, full: Batch, short: Batch, dtypes: Sequence[torch.dtype]) -> bool | None:
    """Return whether the module trains by a filled batch as by the small one; None if it does not run."""
    for dtype in dtypes:
        some, others = (_step(captured, batch, dtype) for batch in (full, short))
        if some and others:
            return _is_same(some, others, _CLOSE[dtype])
    return None


def sequences(model: Model) -> dict[str, int]:
    """Return the dim of each input that is a sequence: its size is that of dim 1 of an integer input."""
    shapes = {name: model.tensors[name].shape for name in model.inputs}
    sizes = {s[1] for name, s in shapes.items() if len(s) > 1 and "float" not in model.tensors[name].dtype}
    if len(sizes) not in (1, 2) or min(sizes) <= _FILLED:
        return {}
    dims = {name: [d for d, size in enumerate(s) if d and size in sizes] for name, s in shapes.items()}
    return {name: found[0] for name, found in dims.items() if found} if max(map(len, dims.values())) == 1 else {}


def _batches(captured: Captured, dims: Mapping[str, int], lengths: Collection[int], most: int) -> tuple[Batch, Batch]:
    """Return a drawn batch of at most so many elements whose sequences of some lengths are filled at the end, and the
    batch without that end.
    """
    full, cut, fills = {}, {}, fillings(captured.model)
    for name, x in _few_rows(captured, _drawn(captured)).items():
        x = torch.ones_like(x) if fills[name] == 0 and name not in bounds(captured.model) else x
        is_cut = name in dims and x.shape[dims[name]] in lengths
        if name in dims:
            x = _begin(x, dims[name], most).clone()
            left = min(_LONG, x.shape[dims[name]]) - _FILLED
            short, end = x.split((left, x.shape[dims[name]] - left), dims[name])
            if is_cut and (value := fills[name]) is not None:
                end.fill_(value)
        full[name], cut[name] = x, short.clone() if is_cut else x
    return full, cut


def _drawn(captured: Captured) -> Batch:
    """Return the example batch, with drawn values of the inputs that select rows or classes."""
    limits, generator = bounds(captured.model), torch.Generator().manual_seed(0)
    pairs = captured.batch.items()
    return {n: torch.randint(limits[n], x.shape, generator=generator).to(x) if n in limits else x for n, x in pairs}


def _fewer(captured: Captured) -> tuple[Batch, Batch]:
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
    if dtype == torch.float32:
        # The model is large. All of its layers have small parameters, too.
        leaves = _of_small(leaves)
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


def _of_small(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters whose large ones get no gradient, unless all are large."""
    is_mixed = any(x.requires_grad and x.numel() <= _SMALL for x in leaves.values())
    return {n: x.detach() if is_mixed and x.numel() > _SMALL else x for n, x in leaves.items()}


def _is_same(some: list[Tensor], others: list[Tensor], close: float) -> bool:
    """Return whether all tensors are equal but for rounding."""
    if not all(isfinite(float(pair[0])) for pair in (some, others)):
        return False
    floor = _FLOOR * max(map(largest, others))
    pairs = zip(some, others, strict=True)
    return all(largest_gap(one, other) <= close * max(largest(other), floor) for one, other in pairs)
