"""Whole gradients of a plan's step in the user's module, for the hooks of a loop between backward and update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from superscaler.errors import InputError
from superscaler.integrations.state import located_in, part, write
from superscaler.runtime.shapes.forms import paired
from superscaler.runtime.step import Step

# By the bytes of an element.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Updating(Protocol):
    """An object that updates weights by the gradients in the user's module, if its last step left that open."""

    @property
    def is_open(self) -> bool: ...

    def update(self) -> list[tuple[Tensor, Tensor | None]]: ...


def differentiate(step: Step, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], set[str]]:
    """Run a step without its update. Return the loss, the gradients of this rank by weight, and the buffers set."""
    updates = step.state.updates
    loss, held = updates.holding(lambda: step(batch))
    gradients = [pair for change, pairs in held if change == updates.apply for pair in pairs]
    for name, count in Counter(name for name, _ in gradients).items():
        if count > 1:
            raise InputError(
                f"weight {name} is updated {count} times in a step of this plan, so no hook can have its gradient; "
                "take a plan with one update, or leave the hooks out."
            )
    written: set[str] = set()
    for change, pairs in held:
        if change == updates.set:
            change(pairs)
            written |= {name for name, _ in pairs}
    return loss, dict(gradients), written


def gathered(step: Step, found: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole gradients on each rank, by the names of the user's weights; all ranks call this.

    `found`: those of this rank, by the names of its slices.
    """
    whole: dict[str, Tensor] = {}
    for source, device in enumerate(step.plan["devices"]):
        # A program of another shape may read less weights.
        read = set(paired(step.plan, step.form.plan, source).pairs.values())
        counted = (e for e in device["weights"] if e["trained"] and e["counted"] and e["name"] in read)
        entries = [(e, *located_in(step, e)) for e in counted]
        for dtype in dict.fromkeys(weights[name].dtype for _, name, _ in entries):
            some = [one for one in entries if weights[one[1]].dtype == dtype]
            pieces = _spread(step, found, source, [entry for entry, _, _ in some], dtype)
            for (_, name, ranges), piece in zip(some, pieces, strict=True):
                write(whole.setdefault(name, torch.zeros_like(weights[name])), ranges, piece)
    return whole


def _spread(
    step: Step, found: Mapping[str, Tensor], source: int, entries: Sequence[Mapping[str, Any]], dtype: torch.dtype
) -> Sequence[Tensor]:
    """Return the gradients of some weights of a rank, flat, on all ranks."""
    communicator = step.state.communicator
    counts = [math.prod(high - low for low, high in entry["box"]) for entry in entries]
    own = [found[entry["name"]].reshape(-1) for entry in entries] if source == step.rank else []
    given = torch.cat([x.to(communicator.device, dtype) for x in own]) if own else None
    ranks = tuple(range(step.world))
    return communicator.broadcast(given, source, ranks, (sum(counts),), dtype).wait().split(counts)


def with_gradients(loss: Tensor, whole: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
    """Return a loss whose backward gives whole gradients to the user's weights."""
    given: Tensor = _Loss.apply(loss, [*whole.values()], *(weights[name] for name in whole))  # type: ignore[no-untyped-call]
    return given


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients, ctx.weights, ctx.sums = gradients, weights, checksums(weights)
        return loss.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        if checksums(ctx.weights) != ctx.sums:
            raise InputError(
                "a hook has changed weights between the loss and its backward, and the gradients are of the weights "
                "before; change them after the update, as in on_train_batch_end."
            )
        return None, None, *(x * given.to(x) for x in ctx.gradients)


def update(step: Step, weights: Mapping[str, Tensor]) -> None:
    """Update the weights of this rank by the gradients of the user's; a weight without one stays, as in torch."""
    pairs = []
    for entry in (e for e in step.state.tables["weights"] if e["trained"]):
        name, ranges = located_in(step, entry)
        if (gradient := weights[name].grad) is not None:
            pairs.append((entry["name"], part(gradient, ranges).to(step.state.weights[entry["name"]].device)))
    # The loop has clipped.
    step.state.updates.clip = None
    step.state.updates.apply(pairs)


def taken(step: Step, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Remove the gradients of the user's weights that a plan trains. Return these weights, each with its gradient."""
    entries = (e for device in step.plan["devices"] for e in device["weights"] if e["trained"])
    found = [weights[name] for name in {located_in(step, e)[0]: None for e in entries}]
    kept = [(weight, weight.grad) for weight in found]
    for weight in found:
        weight.grad = None
    return kept


def checksums(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Return the sums of the bits of tensors, which do not depend on an order of additions."""
    kinds = [_BITS.get(x.element_size(), torch.uint8) for x in tensors if x is not None]
    given = [x.detach().contiguous().reshape(-1) for x in tensors if x is not None]
    bits = [x.view(kind) for x, kind in zip(given, kinds, strict=True)]
    sums = torch.stack([x.sum(dtype=torch.int64) for x in bits]).tolist() if bits else []
    found: Iterator[int] = iter(sums)
    return [None if x is None else next(found) for x in tensors]


class _Around:
    """Hooks around an optimizer's step: the plan updates its weights, and the optimizer finds no gradients of them."""

    def __init__(self, planned: Callable[[], Updating | None]) -> None:
        self._planned = planned
        self._kept: list[tuple[Tensor, Tensor | None]] = []

    def before(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Torch gives the optimizer itself first.
        own, *given = args
        closure = kwargs.get("closure") or (given[0] if given else None)
        if closure is None:
            self._update()
            return None

        def run() -> Any:
            result = closure()
            self._update()
            return result

        return (own,), {**kwargs, "closure": run}

    def _update(self) -> None:
        planned = self._planned()
        if planned is not None and planned.is_open:
            self._kept = planned.update()

    def after(self, *_: Any) -> None:
        """Leave the gradients to hooks after the update."""
        for weight, gradient in self._kept:
            weight.grad = gradient
        self._kept = []


def follow(optimizer: torch.optim.Optimizer, planned: Callable[[], Updating | None]) -> None:
    """Let the steps of a loop's optimizer be updates of the plan."""
    for hooks in _tables(optimizer):
        _remove_ours(hooks)
    around = _Around(planned)
    optimizer.register_step_pre_hook(around.before)
    optimizer.register_step_post_hook(around.after)


@contextmanager
def unfollowed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Leave the hooks of `follow` out in the block."""
    with ExitStack() as stack:
        for hooks in _tables(optimizer):
            stack.enter_context(patch.dict(hooks))
            _remove_ours(hooks)
        yield


def _tables(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def _remove_ours(hooks: dict[int, Any]) -> None:
    for number in [n for n, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _Around)]:
        del hooks[number]
