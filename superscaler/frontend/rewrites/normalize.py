"""One form for calls with one meaning: decompositions, fused chains, defaults."""

from collections.abc import Iterator
from functools import cache
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from superscaler.errors import CaptureError
from superscaler.frontend.base.trace import Trace, argument, dtype_of, outputs, place_of, reads, shape_of, target_of
from superscaler.frontend.rewrites import decompositions
from superscaler.frontend.rewrites.simplify import simplify
from superscaler.ir.model import CAST
from superscaler.ops.row import aten

_ATEN = torch.ops.aten


def fuse(trace: Trace) -> None:
    """Replace the written-out tanh approximation of gelu, as in GPT-2, by torch's gelu."""
    for match in _matcher().match(trace.graph):
        node = match.returning_nodes[0]
        # In 16-bit dtypes each step of the chain rounds.
        if dtype_of(node).itemsize > 2:
            trace.rewrite(node, _ATEN.gelu, match.placeholder_nodes[0], approximate="tanh")


def _tanh_gelu(x: Tensor) -> Tensor:
    cube = _ATEN.mul.Tensor(_ATEN.pow.Tensor_Scalar(x, 3.0), 0.044715)
    inner = _ATEN.mul.Tensor(_ATEN.add.Tensor(x, cube), sqrt(2.0 / pi))
    tanh = _ATEN.tanh.default(inner)
    return _ATEN.mul.Tensor(_ATEN.mul.Tensor(x, 0.5), _ATEN.add.Tensor(tanh, 1.0))  # type: ignore[no-any-return]


@cache
def _matcher() -> SubgraphMatcher:
    return SubgraphMatcher(fx.symbolic_trace(_tanh_gelu).graph)


_PRODUCTS = aten(True, "linear mm bmm matmul mv scaled_dot_product_attention")
# These operators are the identity if they change neither shape nor dtype.
_VIEWS = aten(True, "_to_copy view _unsafe_view expand unsqueeze slice.Tensor squeeze squeeze.dim squeeze.dims")


def normalize(trace: Trace) -> None:
    """Apply the rewrites in order, and refuse calls that no plan can run."""
    for step in (remove_dead, simplify, fuse, _decompose, _keep_loss, remove_dead, _refuse):
        step(trace)


def _decompose(trace: Trace) -> None:
    for node in trace.calls():
        target, first = target_of(node), (reads(node) or [node])[0]
        if target in _VIEWS and shape_of(first) == shape_of(node) and dtype_of(first) == dtype_of(node):
            trace.replace(node, first)
        elif target in decompositions.TABLE:
            trace.rewrite(node, decompositions.TABLE[target], *node.args, **node.kwargs)


def _keep_loss(trace: Trace) -> None:
    """Keep a decomposed loss in the dtype of its sum; casts of the model itself stay."""
    loss = trace.loss
    if loss is not None and "op" in loss.meta and target_of(loss) == CAST:
        trace.replace(loss, *reads(loss))


def remove_dead(trace: Trace) -> None:
    """Drop calls, buffers and constants that no result depends on; parameters, inputs and `is_state` buffers stay."""
    for node in reversed(trace.calls()):
        if not any(result.users for result in outputs(node)):
            trace.replace(node)
    for leaf in trace.leaves("constant", "buffer"):
        if not leaf.users and leaf.name not in trace.writes and not leaf.meta.get("is_state"):
            trace.graph.erase_node(leaf)


def _refuse(trace: Trace) -> None:
    """Raise CaptureError for the first leaf or call that no plan can compute as the model does."""
    for node in (*(leaf for leaf in trace.leaves() if leaf.users), *trace.calls()):
        for fault in _faults(node):
            raise CaptureError(f"{place_of(node)} {fault}")


def _faults(node: Node) -> Iterator[str]:
    is_leaf = "kind" in node.meta
    # No gradient is tracked through complex numbers.
    for x in (x for x in ([node] if is_leaf else outputs(node)) if dtype_of(x).is_complex):
        yield (
            f"has {x.name} in complex numbers, which are not supported; compute with real ones (torch.view_as_real "
            "holds both parts in a last dim of 2)."
        )
    if is_leaf:
        return
    if _is_random(node):
        yield (
            f"draws random numbers by {node.target}, and devices would draw different ones; use dropout, rand, "
            "randn, randint or bernoulli, or draw it outside and pass it in."
        )
    # Gradients would be divided by the count of a row in the whole batch, which no part knows.
    if target_of(node) == "aten.embedding.default" and argument(node, 3, "scale_grad_by_freq"):
        yield (
            "looks rows up with scale_grad_by_freq=True, which is not supported; leave it out or count the rows in the "
            "model and scale by that."
        )
    # Steps in float64 would read other bits.
    if target_of(node) == "aten.view.dtype" and any(dtype_of(x).is_floating_point for x in (node, *reads(node))):
        yield "reads the bits of floating-point numbers as another dtype, which is not supported; compute with numbers."
    # The tensors without data of export allow such products.
    dtypes = {str(d).removeprefix("torch.") for d in map(dtype_of, reads(node)) if d.is_floating_point}
    if len(dtypes) > 1 and target_of(node) in _PRODUCTS:
        yield (
            f"multiplies tensors of {' and '.join(sorted(dtypes))} ({node.target}); torch wants one dtype: cast one of "
            "them, or capture with autocast."
        )


def _is_random(node: Node) -> bool:
    """Return whether an operator draws numbers; recurrent layers and their like draw only for dropout in training."""
    operator: Any = node.target
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    given = {a.name: argument(node, k, a.name) for k, a in enumerate(operator._schema.arguments)}
    rates = [value for name, value in given.items() if name in ("dropout", "dropout_p")]
    return not rates or (any(rates) and given.get("train") is not False)
