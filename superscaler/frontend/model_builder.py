"""The model of a rewritten trace: its ops, tensors and factors as frozen data."""

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch.fx import Node

from superscaler.errors import CaptureError
from superscaler.frontend.base.trace import Trace, dtype_of, op_name, outputs, reads, shape_of, target_of
from superscaler.frontend.base.training import Training, depends, remove_idle_detaches, with_gradient
from superscaler.frontend.infer import Indexed, Inference, infer
from superscaler.frontend.naming import name_factors
from superscaler.frontend.rewrites.packed_weights import Segments
from superscaler.groups import group_by
from superscaler.ir.model import Factor, Model, Op, Operand, PTensor, TensorKind
from superscaler.ir.names import common_module, unique
from superscaler.ir.op import Asked, Index, Mark, Ref
from superscaler.ops.table import row_of, with_linearity
from superscaler.specs.options import WHOLE


def build(trace: Trace, training: Training, aliases: dict[str, str], segments: Segments) -> Model:
    """Return the model of a trace. Raises CaptureError for a loss that depends on no trained parameter."""
    trained = [leaf for leaf in trace.leaves("parameter") if leaf.name in training.groups]
    remove_idle_detaches(trace, trained)
    needed = with_gradient(trace, trained, trace.loss)
    if trace.loss is not None and trace.loss not in needed:
        raise CaptureError(
            f"the loss depends on none of the {len(training.groups)} parameters that the optimizer trains; "
            "check requires_grad, torch.no_grad, .detach() and reentrant checkpoints in the model."
        )
    found = infer(trace)
    builder = Builder(trace, found, needed)
    forward = builder.forward()
    needing = {leaf.name: leaf for leaf in needed}
    given = {}
    updates = [
        builder.in_place(needing[n], f"update.{n}", f"ss.{training.kind(n)}", group=group)
        for n, group in training.groups.items()
        if n in needing
    ]
    updates += [builder.in_place(buffer, f"write.{buffer.name}", "ss.write", new) for buffer, new in trace.written()]
    for name, new in trace.outputs():
        given[name] = replace(builder.tensor(new), name=name, kind="output", requires_grad=False)
        updates.append(builder.in_place(given[name], name, "ss.output", new))
    kinds: tuple[TensorKind, ...] = ("parameter", "buffer", "input", "constant")
    leaves = [leaf for kind in kinds for leaf in trace.leaves(kind)]
    tensors = {x.name: builder.tensor(x) for x in (*leaves, *(x for node in trace.calls() for x in outputs(node)))}
    tensors |= given
    inputs = tuple(leaf.name for leaf in trace.leaves("input"))
    ops, factors = (*forward, *updates), builder.factors()
    assert len({op.name for op in ops}) == len(ops), "two ops of one name"
    loss, unsupported = "" if trace.loss is None else trace.loss.name, dict(found.unsupported)
    return Model(tensors, ops, factors, inputs, loss, training.optimizer, aliases, unsupported, segments)


class Builder:
    """A writer of the inferred graph as frozen data."""

    def __init__(self, trace: Trace, found: Inference, needed: Set[Node]) -> None:
        self.found = found
        self.needed = needed
        self.names = name_factors(trace, found)
        self.from_weights = depends(trace, "parameter")
        self.from_inputs = depends(trace, "input")
        self.checkpoints = _checkpoints(indexed.call for indexed in found.calls)

    def factors(self) -> dict[str, Factor]:
        spans = [s for name in self.found.dims for dim in self.found.classes(name) for s in dim]
        spans += [s for indexed in self.found.calls for s in indexed.classes]
        return {self.names[id(s)]: Factor(self.names[id(s)], s.size) for s in spans}

    def tensor(self, node: Node) -> PTensor:
        dims = self.found.classes(node)
        slots = tuple(tuple(self.names[id(s)] for s in dim) for dim in dims)
        extents = tuple(s.size for dim in dims for s in dim)
        dtype, kind = str(dtype_of(node)).removeprefix("torch."), node.meta.get("kind", "activation")
        return PTensor(node.name, shape_of(node), dtype, kind, slots, extents, node in self.needed)

    def forward(self) -> list[Op]:
        return with_linearity(self._op(indexed) for indexed in self.found.calls)

    def _op(self, indexed: Indexed) -> Op:
        call = indexed.call
        read, made, numbers = reads(call), outputs(call), count()
        indices = zip(indexed.classes, indexed.marks, indexed.until, strict=True)
        op = Op(
            name=op_name(call),
            target=target_of(call),
            args=_literal(call.args, numbers),
            kwargs=tuple((k, _literal(v, numbers)) for k, v in call.kwargs.items() if k not in _DROPPED),
            inputs=tuple(Operand(x.name, s) for x, s in zip(read, indexed.inputs, strict=True)),
            outputs=tuple(Operand(x.name, s) for x, s in zip(made, indexed.outputs, strict=True)),
            indices=tuple(
                Index(s.size, self.names[id(s)], mark, None if until is None else (until, 0, 0))
                for s, mark, until in indices
            ),
            has_mirror=not self.needed.isdisjoint(made),
            module=call.meta["module"],
            source=call.meta["source"],
            from_data=self.from_weights.isdisjoint(made),
            from_weights=self.from_inputs.isdisjoint(made),
            asked=Asked(checkpoint=self.checkpoints.get(call.meta.get("region"), "")),
        )
        return replace(op, flops=row_of(op.target).flops(op, [*map(shape_of, read)], [*map(shape_of, made)]))

    def in_place(self, what: PTensor | Node, name: str, target: str, *others: Node, group: int = 0) -> Op:
        """Return the op that sets a tensor at the end of the step, from others of its shape: element by element, but
        for the optimizers in WHOLE.
        """
        tensor = self.tensor(what) if isinstance(what, Node) else what
        slots = tuple(range(len(tensor.factors)))
        mark: Mark = "frozen" if target.removeprefix("ss.") in WHOLE else "spatial"
        return Op(
            name=name,
            target=target,
            args=tuple(map(Ref, range(1 + len(others)))),
            kwargs=(),
            inputs=tuple(Operand(name, slots) for name in (tensor.name, *(x.name for x in others))),
            outputs=(Operand(tensor.name, slots),),
            indices=tuple(Index(size, f, mark) for size, f in zip(tensor.extents, tensor.factors, strict=True)),
            kind="optimizer",
            module=tensor.name.rpartition(".")[0] if tensor.kind != "output" else "",
            from_weights=True,
            group=group,
        )


def _checkpoints(calls: Iterable[Node]) -> dict[int | None, str]:
    """Return names of the regions of the model's own checkpoints: the module of each, or its first op."""
    members = group_by(calls, lambda call: call.meta.get("region"))
    members.pop(None, None)
    taken: set[str] = set()
    modules = {number: common_module(call.meta["module"] for call in some) for number, some in members.items()}
    return {number: unique(modules[number] or op_name(some[0]), taken) for number, some in members.items()}


_DROPPED = frozenset({"device", "layout", "memory_format", "pin_memory", "generator", "non_blocking"})


def _literal(value: Any, numbers: Iterator[int]) -> Any:
    """Return an argument as a plain value: tensors as operand numbers, dtypes as text, devices and layouts as None."""
    if isinstance(value, Node):
        return Ref(next(numbers))
    if isinstance(value, list | tuple):
        return tuple(_literal(v, numbers) for v in value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.device | torch.layout | torch.memory_format | torch.Generator):
        return None
    return value
