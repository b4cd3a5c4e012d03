"""What a model wraps in `torch.utils.checkpoint`: run once, as it is written, and marked in what is exported."""

from __future__ import annotations

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

_MARK = "checkpoint"


def mark_of(node: Node) -> int | None:
    """Return the number of the outermost region in which export made a node, None outside of all."""
    found: int | None = (node.meta.get("custom") or {}).get(_MARK)
    return found


@contextmanager
def marked() -> Iterator[None]:
    """Mark what is made in checkpointed regions, by a number for each, and compute nothing again."""
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__
    regions = _Regions()

    # A region that is not reentrant has hooks of torch's, which drop what is saved; anybody else's stay.
    def begin(hooks: Any) -> None:
        regions.begin() if type(hooks).__module__ == CheckpointFunction.__module__ else enter(hooks)

    def end(hooks: Any, *error: Any) -> None:
        regions.end() if type(hooks).__module__ == CheckpointFunction.__module__ else leave(hooks, *error)

    def apply(cls: Any, function: Any, preserve: bool, *args: Any) -> Any:
        # A reentrant one has gradients if one of its own arguments has.
        has_gradient = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        regions.begin()
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and has_gradient):
                return function(*args)
        finally:
            regions.end()

    saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = begin, end  # type: ignore[method-assign]
    CheckpointFunction.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = enter, leave  # type: ignore[method-assign]
        del CheckpointFunction.apply
        regions.mark.close()


class _Regions:
    """Counts regions, and how deep in them export is: of nested ones the outermost is marked."""

    def __init__(self) -> None:
        self.numbers, self.depth, self.mark = count(), 0, ExitStack()

    def begin(self) -> None:
        if not self.depth:
            self.mark.enter_context(preserve_node_meta())
            self.mark.enter_context(annotate({_MARK: next(self.numbers)}))
        self.depth += 1

    def end(self) -> None:
        self.depth -= 1
        if not self.depth:
            self.mark.close()
