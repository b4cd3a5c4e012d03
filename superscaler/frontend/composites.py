"""Composite operators of an exported program are replaced one by one, without a second trace of the program.

`ExportedProgram.run_decompositions` traces the whole program again, which takes twice as long as the first trace of a
small one. Where nothing is changed in place, only those operators differ that may return their input itself (`reshape`,
`to`, `contiguous`): each is run alone, on the stand-ins of its operands.
"""

import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COMPOSITE = "CompositeImplicitAutograd"
# They change running statistics, although their schemas do not say so.
_CHANGING = ("batch_norm", "instance_norm")


def decomposed(exported: ExportedProgram, table: Mapping[Any, Any]) -> ExportedProgram:
    """Return the program of `run_decompositions(table)`, but for assertions, and the order of constants and buffers."""
    if _is_plain(exported):
        writer = _Writer(table)
        # An operator that cannot be run alone is traced with the whole program.
        with suppress(LookupError, RuntimeError, AssertionError):
            for node in exported.graph.nodes:
                writer.write(node)
            if writer.is_pure:
                # A random number that nobody reads is dead, too.
                writer.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
                return _with_graph(exported, writer.graph)
    return exported.run_decompositions(dict(table))


def _is_plain(exported: ExportedProgram) -> bool:
    """Return whether all calls of a program are operators that change nothing in place, on shapes that are known."""
    calls = [node for node in exported.graph.nodes if node.op not in ("placeholder", "output")]
    if not all(
        n.target is operator.getitem or (isinstance(n.target, OpOverload) and _is_pure(n.target)) for n in calls
    ):
        return False
    values = tree_leaves([node.meta.get("val") for node in calls])
    return not any(isinstance(size, torch.SymInt) for x in values for size in getattr(x, "shape", (x,)))


@cache
def _is_pure(target: OpOverload) -> bool:
    return not target._schema.is_mutable and not any(word in target.name() for word in _CHANGING)


@cache
def _is_replaced(target: OpOverload) -> bool:
    """Return whether torch.export cannot preserve a composite operator, since its result may share memory."""
    name = target.name()
    # Reads of a tensor's device and the like are no operators.
    has_kernel = torch._C._dispatch_has_kernel(name)
    if not (has_kernel and torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE)):
        return False
    shares = any(argument.alias_info is not None for argument in target._schema.arguments)
    return shares or torch.Tag.maybe_aliasing_or_mutating in target.tags


class _Writer(TorchDispatchMode):
    """A writer of a new graph, which records the calls of a composite operator on the stand-ins of its operands."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        super().__init__()
        self.graph, self.table = Graph(), table
        # Whether no call changes a tensor in place, as some composite operators do inside.
        self.is_pure = True
        # The result in the new graph of each node of the old one: a node, or a list of nodes.
        self.new: dict[Node, Any] = {}
        # The composite call that is run, and the nodes of the stand-ins by identity.
        self.call: Node
        self.known: dict[int, tuple[Tensor, Node]] = {}

    def write(self, node: Node) -> None:
        """Write a node of the old graph, or the calls that it decomposes into. Calls are named by operator."""
        target: Any = node.target
        if node.op != "call_function":
            self.new[node] = copy = self.graph.node_copy(node, self.new.__getitem__)
            # A graph renames nodes that have the name of a Python builtin, as `input`.
            copy.name = node.name
        elif target is operator.getitem:
            results, k = cast(tuple[Any, int], map_arg(node.args, self.new.__getitem__))
            self.new[node] = results[k]
        elif (decompose := self._decomposition(target)) is None:
            self.new[node] = self._written(target, *map_arg((node.args, node.kwargs), self.new.__getitem__), node)
        else:
            self.call, self.known = node, {}
            args, kwargs = map_arg((node.args, node.kwargs), self._stand_in)
            with torch.no_grad(), self:
                result = decompose(*args, **kwargs)
            self.new[node] = map_aggregate(result, self._node)

    def _decomposition(self, target: OpOverload) -> Callable[..., Any] | None:
        return self.table.get(target, target.decompose if _is_replaced(target) else None)

    def _written(self, target: OpOverload, args: Any, kwargs: Any, of: Node, value: Any = None) -> Any:
        """Write a call; return its node, or those of its several results."""
        self.is_pure &= _is_pure(target)
        name = self.graph._target_to_str(target.overloadpacket.__name__)
        call = self.graph.create_node("call_function", target, args, kwargs, name)
        value = of.meta.get("val") if value is None else value
        call.meta = {**of.meta, "val": value}
        if not isinstance(value, list | tuple):
            return call
        parts = [self.graph.call_function(operator.getitem, (call, k)) for k in range(len(value))]
        for part, one in zip(parts, value, strict=True):
            part.meta = {**of.meta, "val": one}
        return parts

    def _stand_in(self, node: Node) -> Any:
        value = node.meta["val"].detach()
        self._know(value, self.new[node])
        return value

    def _know(self, value: Any, nodes: Any) -> None:
        for x, node in zip(*map(tree_leaves, (value, nodes)), strict=True):
            self.known[id(x)] = x, node

    def _node(self, value: Any) -> Any:
        return self.known[id(value)][1] if isinstance(value, Tensor) else value

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (decompose := self._decomposition(function)) is not None:
            with self:
                return decompose(*args, **kwargs)
        value = function(*args, **kwargs)
        # Neither reads of a device nor assertions return a tensor.
        if isinstance(value, Tensor | list | tuple):
            self._know(value, self._written(function, *map_aggregate((args, kwargs), self._node), self.call, value))
        return value


def _with_graph(exported: ExportedProgram, graph: Graph) -> ExportedProgram:
    signature = exported.graph_signature
    outs: Any = graph.output_node().args[0]
    specs = [
        replace(spec, arg=replace(spec.arg, name=out.name)) if isinstance(out, Node) else spec
        for spec, out in zip(signature.output_specs, outs, strict=True)
    ]
    return ExportedProgram(
        root=exported.graph_module,
        graph=graph,
        graph_signature=replace(signature, output_specs=specs),
        state_dict=exported.state_dict,
        range_constraints=exported.range_constraints,
        module_call_graph=exported.module_call_graph,
        example_inputs=exported.example_inputs,
        constants=exported.constants,
    )
