"""The tape of a segment: its forward under autograd, on aliases of its inputs, and its backward, whole or in halves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from superscaler.runtime import split_backward as halves
from superscaler.runtime.saved_tensors import Copies, MovedTape, RegatheredTensors, kept_by, storage_of

Tensors = tuple[Tensor, ...]
Segment = Callable[..., Tensors]
# Lists of sums, or ranges of them, each by the number of the first gradient that is added there.
List = list[Tensor | None]
Sums = Mapping[int, List | tuple[List, int, int]]


class Tape:
    """The recorded forward of a segment. `aliases`: the leaves that get gradients, `wide` whether these are float32.

    `edges`: those of its saved outputs, where gradients enter. The outputs are not kept: they may be freed before.
    """

    def __init__(
        self, edges: list[GradientEdge | None], aliases: list[Tensor], wide: list[bool], again: RegatheredTensors | None
    ) -> None:
        self.edges, self.aliases, self.wide, self._again = edges, aliases, wide, again
        self._moved: MovedTape | None = None
        # The second half of a backward, and the aliases whose gradients it gives.
        self._rest: tuple[halves.Rest, list[int]] | None = None

    def backward(self, gradients: Sequence[Tensor | None], again: Sequence[Tensor], into: Sums | None) -> Tensors:
        """Return the gradients of all aliases; see `Rank.backward`."""
        if again:
            assert self._again is not None
            self._again.give(again)
            self._again = None
        given, ends = self._given(gradients), list(map(get_gradient_edge, self.aliases))
        # Gradients have no other name here, so that each ends once it is added to its sum.
        return self._filled(halves.grad(given, ends), range(len(ends)), into)

    def first_half(self, gradients: Sequence[Tensor | None], first: Sequence[int]) -> Tensors:
        """Return the gradients of the aliases with these numbers; keep what the second half needs."""
        numbers = range(len(self.aliases))
        found, rest = halves.first_half(self._given(gradients), self.aliases, [n in first for n in numbers])
        self._rest = rest, [n for n in numbers if n not in first]
        return self._filled(found, first)

    def second_half(self, into: Sums | None) -> Tensors:
        """Return the gradients of the other aliases."""
        assert self._rest is not None
        rest, numbers = self._rest
        return self._filled(halves.second_half(rest), numbers, into)

    def offload(self, copies: Copies, alive: Iterable[Tensor]) -> None:
        """Copy the saved tensors to the host, but for those that are `alive`."""
        if self._moved is None:
            nodes = halves.nodes_from(edge.node for edge in self.edges if edge is not None)
            self._moved = MovedTape([kept for _, kept in kept_by(nodes)])
        self._moved.offload(copies, alive)

    def fetch(self, copies: Copies) -> None:
        """Start to copy the saved tensors back from the host."""
        assert self._moved is not None
        self._moved.fetch(copies)

    def _given(self, gradients: Sequence[Tensor | None]) -> halves.Given:
        """Return the edges at which gradients enter, with these. A tape that was on the host has arrived then."""
        if self._moved is not None:
            self._moved.arrive()
            self._moved = None
        return [(e, g) for e, g in zip(self.edges, gradients, strict=True) if g is not None and e is not None]

    def _filled(self, found: Sequence[Tensor | None], numbers: Iterable[int], into: Sums | None = None) -> Tensors:
        """Return the gradients of some aliases: zeros for missing ones, float32 where they are wide. Others are added
        to their sums in place; a first one is copied, because it may share memory.
        """
        whole = [(torch.zeros_like(self.aliases[n]) if (g := found[n]) is None else g, self.wide[n]) for n in numbers]
        del found
        for first, sums in sorted((into or {}).items(), reverse=True):
            own, start, stop = sums if isinstance(sums, tuple) else (sums, 0, len(sums))
            some = {n: whole.pop(first) for n in range(start, stop)}
            if known := {n: total for n, total in enumerate(own[start:stop], start) if total is not None}:
                # In the dtype of the sums.
                torch._foreach_add_(list(known.values()), [some.pop(n)[0] for n in known])
            for n in list(some):
                g, is_wide = some.pop(n)
                own[n] = g.to(torch.float32 if is_wide else g.dtype, copy=True)
                del g
        return tuple(in_dtypes([g for g, _ in whole], [torch.float32 if is_wide else None for _, is_wide in whole]))


def in_dtypes(values: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> list[Tensor]:
    """Return tensors in dtypes, None for the own one. A GPU casts all by few kernels."""
    found = list(values)
    cast = [n for n, kind in enumerate(dtypes) if kind not in (None, found[n].dtype)]
    made = [torch.empty_like(found[n], dtype=dtypes[n]) for n in cast]
    if cast:
        torch._foreach_copy_(made, [found[n] for n in cast])
    for n, x in zip(cast, made, strict=True):
        found[n] = x
    return found


def record(
    function: Segment,
    inputs: Sequence[Tensor],
    options: Mapping[str, Any],
    facts: Mapping[str, Any],
    residents: Mapping[int, object],
) -> tuple[Tensors, Tape]:
    """Run a segment on aliases of its inputs. Return its outputs and its tape.

    `facts` of the segment: the numbers of inputs that are `constant`, `wide` or regathered `again`, and of outputs that
    are `saved`. `residents`: the weights at rest by the identity of their tensors.
    """
    wants = [n not in facts.get("constant", ()) for n in range(len(inputs))]
    leaves = [_leaf(x, id(x) in residents) if wanted else x.detach() for x, wanted in zip(inputs, wants, strict=True)]
    again = [inputs[n] for n in facts.get("again", ())]
    regathered = RegatheredTensors(again) if again else None
    with torch.enable_grad(), regathered.hooks() if regathered else nullcontext():
        outputs = function(*map(_on, leaves, inputs), **options)
    aliases = [leaf for leaf in leaves if leaf.requires_grad]
    wide = [n in facts.get("wide", ()) for n, wanted in enumerate(wants) if wanted]
    saved = [outputs[k] for k in facts["saved"]] if facts.get("saved") is not None else outputs
    edges = [get_gradient_edge(x) if x.requires_grad else None for x in saved]
    return outputs, Tape(edges, aliases, wide, regathered)


def _leaf(x: Tensor, is_resident: bool) -> Tensor:
    """Return an autograd leaf of the input's shape: a dummy without memory, since graphs keep leaves alive. A resident
    weight is its own leaf.
    """
    own = x if is_resident else x.new_empty(()).expand(x.shape)
    return own.detach().requires_grad_()


def _on(leaf: Tensor, x: Tensor) -> Tensor:
    """Return an input whose gradient goes to a leaf."""
    if storage_of(leaf) == storage_of(x):
        return leaf
    alias = leaf.view_as(leaf)
    alias.data = x
    return alias
