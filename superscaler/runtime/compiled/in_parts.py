"""Operators that round as another order of computation would: what rounding does to a function is measured by them."""

from collections.abc import Sequence
from functools import reduce
from itertools import repeat
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_MEANS = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}
_ADDS, _SCALES = (aten.add.Tensor, aten.sub.Tensor), (aten.mul.Tensor, aten.div.Tensor)
_SUMS = (*_MEANS, *_MEANS.values())


class InParts(TorchDispatchMode):
    """A mode that rounds as another order of computation would."""

    def __init__(self, parts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts = parts
        self.chance = torch.Generator().manual_seed(parts)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.addmm.default:
            bias, a, b = args
            return torch.add(bias * kwargs.get("beta", 1), self._product(torch.mm, a, b), alpha=kwargs.get("alpha", 1))
        if func in (aten.mm.default, aten.bmm.default):
            return self._product(func, *args)
        if func in _SUMS and args[0].dim() and args[0].is_floating_point():
            return self._sum(func, *args, **kwargs)
        if func in (*_ADDS, *_SCALES) and all(map(_is_scalar, args if func in _ADDS else args[:1])):
            return self._of_scalars(func, *args, **kwargs)
        return self._rounded(func, args, kwargs)

    def _sum(self, func: Any, x: Tensor, *more: Any, **options: Any) -> Tensor:
        """Return a sum, or a mean as a sum and a quotient, as the sum of those of pieces along its first dim."""
        dims = (more[0] if more else None) or range(x.dim())
        pieces = x.chunk(self.parts, dims[0])
        made: Tensor = reduce(torch.add, (_MEANS.get(func, func)(piece, *more, **options) for piece in pieces))
        return made / prod(x.shape[dim] for dim in dims) if func in _MEANS else made

    def _of_scalars(self, func: Any, x: Tensor, other: Any, **options: Any) -> Tensor:
        """Return a linear function of a scalar, as a loss, from parts: a plan computes it from the addends of each."""
        shares = self._shares()
        others = _parts(other, shares) if func in _ADDS else repeat(other)
        pairs = zip(_parts(x, shares), others, strict=False)
        made: Tensor = reduce(torch.add, (func(*pair, **options) for pair in pairs))
        return made

    def _shares(self) -> list[float]:
        shares = torch.rand(self.parts, generator=self.chance, dtype=torch.float64)
        return (shares / shares.sum()).tolist()

    def _product(self, func: Any, a: Tensor, b: Tensor) -> Tensor:
        parts = min(self.parts, a.shape[-1])
        pieces = (func(a[..., k::parts], b[..., k::parts, :]) for k in range(parts))
        made: Tensor = reduce(torch.add, pieces) if parts else func(a, b)
        return made

    def _rounded(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the results of an operator that adds, computed in float64, then rounded to its own dtypes."""
        plain = func(*args, **kwargs)
        tags = {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded}
        if func.is_view or func._schema.is_mutable or tags & set(func.tags):
            return plain
        given = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, (args, kwargs))
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves(given)):
            # It adds nothing. The zero tangent of a forward derivative, made so, has no memory that could be read.
            return plain
        try:
            wide = func(*given[0], **given[1])
        except (RuntimeError, NotImplementedError):
            # The operator is not implemented for float64.
            return plain
        return pytree.tree_map(self._as, wide, plain)

    def _as(self, x: Any, plain: Any) -> Any:
        """Return wide numbers rounded at random to a neighbour in the dtype of `plain`; representable ones stay. Of
        a scalar it is the sum of parts.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if not x.dim() and x.to(plain.dtype) != x:
            return reduce(torch.add, _parts(x, self._shares(), plain.dtype))
        chance = torch.rand(x.shape, generator=self.chance, dtype=x.dtype).to(x.device) - 0.5
        # A product, because the sum of an infinite number and its error may be none.
        return (x * (1 + chance * (torch.finfo(plain.dtype).eps / 2))).to(plain.dtype)


def _is_scalar(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.dim() and x.is_floating_point()


def _parts(x: Tensor, shares: Sequence[float], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the parts of a number, rounded."""
    return [(x.double() * share).to(dtype or x.dtype) for share in shares]
