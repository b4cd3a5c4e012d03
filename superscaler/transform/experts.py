"""Mixtures of experts in steps. Between these, a token is sent only to its experts."""

from dataclasses import dataclass, replace
from math import ceil, inf, prod
from numbers import Real

from superscaler.errors import TransformError
from superscaler.ir.model import Factor, Model, Op
from superscaler.ir.op import Index
from superscaler.specs.arguments import checked_class
from superscaler.transform.decompose import Slot, Steps, in_place


@checked_class
@dataclass(frozen=True, slots=True)
class Dispatch:
    """Let experts read rows of their own: tokens are written to them, and results are collected from them.

    y = experts(x, ids, weights)  ->  r, n = dispatch(x, ids); z = expert_rows(r, n); y = collect(z, ids, weights)

    r is [experts, groups, capacity, hidden]. A group is one of the outer slot of the tokens: a sequence of the batch.
    An expert has `capacity` times its even share of the group's choices as rows; the default is one row for each token
    of the group, which is exact. Choices without a free row are dropped: they give zero. With dispatch cut on the batch
    and rows cut on the experts, an all_to_all goes between.
    """

    capacity: float | None = None

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model:
        if self.capacity is not None and not (isinstance(self.capacity, Real) and 0 < self.capacity < inf):
            raise TransformError(f"Dispatch({self.capacity!r}): give a positive multiple of the even share, or None.")
        steps = [_Experts(model, op, self.capacity) for op in ops]
        factors = {some.indices[-1].factor: Factor(some.indices[-1].factor, some.indices[-1].size) for some in steps}
        return replace(in_place(model, steps), factors={**model.factors, **factors})


class _Experts(Steps):
    """The steps of one op."""

    def __init__(self, model: Model, op: Op, capacity: float | None) -> None:
        super().__init__(model, op)
        if op.target != "ss.experts":
            raise TransformError(f"Dispatch of {op.name} ({op.target}): the op is no mixture of experts; leave it out.")
        x, ids, weights, gate_up, down = op.inputs
        (tokens, hidden), (experts, outputs, _) = self.dims(x), self.dims(down)
        count, chosen, size = (prod(s.size for s in dim) for dim in (experts, self.dims(ids)[1], tokens[1:]))
        share = size if capacity is None else min(size, ceil(capacity * chosen * size / count))
        rows = [Slot(len(self.indices), f"{op.name}.capacity", share)]
        self.indices.append(Index(share, rows[0].factor, "frozen"))
        wants, dtype = [model.tensors[o.tensor].requires_grad for o in op.inputs], model.tensors[x.tensor].dtype
        is_made = op.has_mirror and (wants[0] or wants[3] or wants[4])
        given = self.tensor("rows", [experts, tokens[:1], rows, hidden], dtype, op.has_mirror and wants[0])
        wanted = self.tensor("wanted", [experts, tokens[:1]], "int64", False)
        made = self.tensor("results", [experts, tokens[:1], rows, outputs], dtype, is_made)
        whole = [s.number for dim in (tokens[1:], self.dims(ids)[1], experts, rows) for s in dim]
        inner = [s.number for dim in (rows, hidden, self.dims(gate_up)[2]) for s in dim]
        inner += [i for i, index in enumerate(op.indices) if index.mark == "frozen"]
        self.add("ss.dispatch", [x, ids], [given, wanted], op.has_mirror and wants[0], whole)
        self.add("ss.expert_rows", [given, wanted, gate_up, down], [made], is_made, inner, activation=op.args[5])
        self.ops[-1] = replace(self.ops[-1], flops=op.flops)
        self.add("ss.collect", [made, ids, weights], op.outputs, op.has_mirror, whole)
