"""Several losses in one step, each with an optimizer of its own (a GAN), as one loss with the same gradients.

The step trains by the sum of the losses. A reader for one loss gets a tensor detached if it carries no gradient from
that loss to its parameters. An op that carries the gradients of several losses has a copy for each. So the gradient of
the sum is, for each parameter, the gradient of its own loss, and all are taken at the same weights.
"""

from collections.abc import Mapping, Sequence, Set
from functools import reduce

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from superscaler.errors import CaptureError
from superscaler.frontend.base.results import RESULT
from superscaler.frontend.base.trace import Trace, outputs, place_of, target_of
from superscaler.frontend.base.training import with_gradient
from superscaler.ops.table import RANDOM, row_of


def separate(trace: Trace, loss_of: Mapping[str, str]) -> None:
    """Let the gradient of each loss reach its own parameters alone. `loss_of`: for each parameter, by name, the output
    that is its loss.

    Raises CaptureError for a loss that depends on none of its parameters, and for a dropout between several losses and
    the parameters of each.
    """
    names = tuple(dict.fromkeys(loss_of.values()))
    ends, leaves = dict(trace.outputs()), trace.leaves("parameter")
    wanted = []
    for name in names:
        own = [leaf for leaf in leaves if loss_of.get(leaf.name) == name]
        wanted.append(with_gradient(trace, own, ends[name]))
        if ends[name] not in wanted[-1]:
            raise CaptureError(
                f"the loss '{name.removeprefix(RESULT)[1:]}' depends on none of the {len(own)} parameters that its "
                "optimizer trains; check the keys of optimizer={...}, requires_grad, torch.no_grad and .detach()."
            )
    versions = _Versions(trace, names, wanted)
    for call in trace.calls():
        if not row_of(target_of(call)).stops:
            versions.make(call)
    assert trace.loss is not None
    losses = [versions.of(ends[name], k) for k, name in enumerate(names)]
    trace.rewrite(trace.loss, lambda *some: reduce(torch.add, some), *losses)


class _Versions:
    """The copies of calls. `wanted`: for each loss, the tensors on a path from its parameters to it."""

    def __init__(self, trace: Trace, names: Sequence[str], wanted: Sequence[Set[Node]]) -> None:
        self.trace, self.words, self.wanted = trace, [n.rpartition(".")[2] for n in names], wanted
        self.copies: dict[tuple[Node, int], Node] = {}

    def of(self, node: Node, loss: int) -> Node:
        """Return the tensor that carries the gradient of a loss, with the value of a node."""
        return self.copies.get((node, loss), node)

    def make(self, call: Node) -> None:
        """Let a call carry the gradient of one loss at most; copies carry those of the others."""
        carried = [k for k, some in enumerate(self.wanted) if not some.isdisjoint(outputs(call))]
        for loss in carried[1:]:
            if target_of(call) in RANDOM:
                raise CaptureError(
                    f"{place_of(call)} drops or draws at random on the way to two losses, which would need the same "
                    "numbers twice; detach what one of them reads, or call the module once for each loss."
                )
            self._read(self._copy(call, loss), loss)
        self._read(call, carried[0] if carried else None)

    def _copy(self, call: Node, loss: int) -> Node:
        with self.trace.graph.inserting_before(call):
            copy = self.trace.graph.node_copy(call)
        meta = {key: call.meta.get(key) for key in ("module", "source", "region")}
        made = self.trace.name_call(copy, self.trace.derive(call.name, self.words[loss]), meta, call.meta["val"])
        self.copies |= {(x, loss): y for x, y in zip(outputs(call), made, strict=True)}
        return copy

    def _read(self, call: Node, loss: int | None) -> None:
        """Let a call read the tensors that carry the gradient of a loss, and all other tensors detached."""

        def given(x: Node) -> Node:
            if loss is not None and x in self.wanted[loss]:
                return self.of(x, loss)
            return self._detached(x, call) if any(x in some for some in self.wanted) else x

        call.args, call.kwargs = map_arg((call.args, call.kwargs), given)

    def _detached(self, node: Node, reader: Node) -> Node:
        with self.trace.graph.inserting_before(reader):
            call = self.trace.graph.call_function(torch.ops.aten.detach.default, (node,))
        meta = {key: reader.meta.get(key) for key in ("module", "source", "region")}
        (made,) = self.trace.name_call(call, self.trace.derive(reader.name, "detach"), meta, node.meta["val"])
        return made
