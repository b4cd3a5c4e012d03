"""Models without the data of their weights, but with that of their buffers, such as the frequencies of rotary
embeddings.

Capture computes constants from buffers. Without their data, a model would have more operators than the one that trains.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# Tensors of at most so many elements have data while a model is built. Buffers are small, most weights are not.
_SMALL = 1 << 19


class _SmallOnCpu(TorchFunctionMode):
    """Makes small new tensors on the CPU, whatever the default device."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        is_new = (
            isinstance(made, Tensor)
            and made.is_meta
            and not any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs)))
        )
        if is_new and made.numel() <= _SMALL and kwargs.get("device") is None:
            return function(*args, **{**kwargs, "device": "cpu"})
        return made


@contextmanager
def without_data() -> Iterator[None]:
    """Make large new tensors on the meta device; see `forget`."""
    with torch.device("meta"), _SmallOnCpu():
        yield


def forget(module: nn.Module) -> nn.Module:
    """Replace the parameters of a module by parameters on the meta device; tied ones stay tied."""
    known: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, own in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            known.setdefault(id(own), nn.Parameter(own.detach().to("meta"), own.requires_grad))
            setattr(part, name, known[id(own)])
    return module
