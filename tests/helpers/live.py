"""The bytes of tensors that are alive while a step runs, for the benchmarks that count memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of storages that ops make or read, and the most there were at once; not those of `before`."""

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known = weakref.WeakSet[Any](x.untyped_storage() for x in before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)):
            if storage not in self.known:
                self.known.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, count: int) -> None:
        self.live += count
        self.peak = max(self.peak, self.live)
