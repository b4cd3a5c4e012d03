"""A module and its example arguments -> an exported program whose only output is the loss."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from superscaler.errors import CaptureError
from superscaler.frontend.trace import source_of
from superscaler.garbage import without_garbage_collection

# What the code of a model raises when it is wrong, or when torch.export cannot follow it.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)


def export(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportedProgram:
    """Return the functional, semantic-level ATen graph of the module's loss; what ran without gradients is detached.

    Raises CaptureError where the module does not return a loss, or torch cannot export it (with the line).
    """
    with _only_loss(module), warnings.catch_warnings(), without_garbage_collection():
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(module, args, dict(kwargs), strict=False)
            _inline_no_grad(exported.graph_module)
            return exported.run_decompositions({})
        except _FAILURES as error:
            raise _explain(module, error) from error


def examples(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments to export with: a tensor passed twice is cloned, and on meta where the module is.

    Export deduplicates tensor objects, and would wire `labels` into `input_ids`.
    """
    is_meta = any(p.is_meta for p in module.parameters())
    seen: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.numel():
            raise CaptureError(f"an example input has shape {tuple(value.shape)}: give at least one element per dim.")
        if is_meta:
            return value.detach().to("meta").clone()
        copy = value.clone() if id(value) in seen else value
        seen.add(id(value))
        return copy

    return tuple(pytree.tree_map(own, tuple(args))), pytree.tree_map(own, dict(kwargs))


@contextmanager
def _only_loss(module: nn.Module) -> Iterator[None]:
    """Make the module return its loss alone. Its own `forward` is wrapped, so that all names stay what they are."""
    forward = module.forward
    own = module.__dict__.get("forward")

    @wraps(forward)
    def only_loss(*args: Any, **kwargs: Any) -> Tensor:
        return loss_of(forward(*args, **kwargs), type(module).__name__)

    module.forward = only_loss  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own  # type: ignore[method-assign]


def loss_of(output: Any, name: str) -> Tensor:
    """Return the scalar loss that a module's output is or holds. Raises CaptureError where there is none."""
    loss = output
    if not isinstance(output, Tensor):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"{name} returns {type(output).__name__} without a loss; its forward must return a scalar loss, or an "
            "object or dict with .loss (a Hugging Face model returns one when it is given labels)."
        )
    if loss.dim() or not loss.dtype.is_floating_point:
        raise CaptureError(
            f"{name} returns a loss of shape {tuple(loss.shape)} and dtype {str(loss.dtype).removeprefix('torch.')}; "
            "it must be a floating-point scalar of shape (): reduce it, for example with .mean()."
        )
    return loss


def _inline_no_grad(graph_module: GraphModule) -> None:
    """Inline the `torch.no_grad` regions, results detached; decomposition would lose that, and their module paths."""
    for child in list(graph_module.children()):
        if isinstance(child, GraphModule):
            _inline_no_grad(child)
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or "wrap_with_set_grad_enabled" not in str(node.target):
            continue
        is_enabled, submodule, *operands = cast(Any, node.args)
        name = str(submodule.target)
        region = cast(GraphModule, graph_module.get_submodule(name))
        if not is_enabled:
            _detach_results(region)
        for inner in region.graph.find_nodes(op="get_attr"):
            setattr(graph_module, f"{name}_{inner.target}", region.get_submodule(str(inner.target)))
            inner.target = f"{name}_{inner.target}"
        own = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(region.graph, own)
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    graph_module.recompile()


def _detach_results(region: GraphModule) -> None:
    output = region.graph.output_node()

    def detach(result: Node) -> Node:
        value = result.meta.get("val")
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
            return result
        with region.graph.inserting_before(output):
            node: Node = region.graph.call_function(torch.ops.aten.detach.default, (result,))
        node.meta = dict(result.meta)
        return node

    output.args = torch.fx.map_arg(output.args, detach)


def _explain(module: nn.Module, error: BaseException) -> CaptureError:
    """Return one sentence about a failed export, with the model's own line where the exception shows it."""
    frames = "".join(traceback.format_exception(error))
    where = source_of(frames)
    text = str(error).strip()
    message = text.splitlines()[0] if text else type(error).__name__
    at = f" at {where}" if where else ""
    return CaptureError(
        f"torch.export cannot capture {type(module).__name__}{at}: {type(error).__name__}: {message} "
        "Run the module once on these arguments; where that works, the line branches on data or mutates state."
    )
