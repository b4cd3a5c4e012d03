"""The model's own `torch.utils.checkpoint` regions: run once, as written, and marked in the exported program."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils.checkpoint import CheckpointFunction

from superscaler.replaced import replaced

_MARK = "checkpoint"


def mark_of(node: Node) -> int | None:
    """Return the number of the outermost region of a node, None outside of all."""
    found: int | None = (node.meta.get("custom") or {}).get(_MARK)
    return found


@contextmanager
def marked() -> Iterator[None]:
    """Mark the nodes of checkpointed regions, by a number for each, and recompute nothing."""
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__
    numbers, opened, mark = count(), list[Any](), ExitStack()

    def begin(region: Any) -> None:
        # A non-reentrant checkpoint uses torch's own hooks, which drop saved tensors; hooks of others stay.
        if isinstance(region, saved_tensors_hooks) and type(region).__module__ != CheckpointFunction.__module__:
            return enter(region)
        if not opened:
            mark.enter_context(preserve_node_meta())
            mark.enter_context(annotate({_MARK: next(numbers)}))
        return opened.append(region)

    def end(region: Any, *error: Any) -> None:
        if region not in opened:
            return leave(region, *error)
        opened.remove(region)
        return None if opened else mark.close()

    def apply(cls: Any, function: Any, preserve: bool, *args: Any) -> Any:
        # A reentrant checkpoint has gradients only if one of its own arguments requires them.
        has_gradient = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        begin(region := object())
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and has_gradient):
                return function(*args)
        finally:
            end(region)

    hooks = (saved_tensors_hooks, "__enter__", begin), (saved_tensors_hooks, "__exit__", end)
    with replaced(*hooks, (CheckpointFunction, "apply", classmethod(apply))), mark:
        yield
