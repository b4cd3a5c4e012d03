"""The loss among the results of a module."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def find_loss(output: Any) -> Any:
    """Return the loss in the output of a module: a tensor itself, `loss` of a dict or an object, or the only
    floating-point scalar of a tuple; None if there is none.
    """
    if isinstance(output, Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, tuple | list):
        scalars = [x for x in output if isinstance(x, Tensor) and not x.dim() and x.dtype.is_floating_point]
        return scalars[0] if len(scalars) == 1 else None
    return found
