"""Operators of an exported program that share memory or change it are replaced one by one, without a second trace.

`ExportedProgram.run_decompositions` traces the whole program again, which takes twice as long as the first trace of a
small one. Only those operators differ that may return their input itself (`reshape`, `to`, `contiguous`), that change a
tensor in place, that are a view of one that is changed, or whose operands autocast casts: each is run alone, on the
stand-ins of its operands. A stand-in of memory that is changed is a functional tensor of torch: a change makes a new
value, which views made before read, too.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COMPOSITE = "CompositeImplicitAutograd"
_COPY = torch.ops.aten.copy.default
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def decomposed(exported: ExportedProgram, table: Mapping[Any, Any]) -> ExportedProgram:
    """Return the program of `run_decompositions(table)`, but for assertions, and the order of constants and buffers."""
    if _is_plain(exported):
        writer = _Writer(table, _changed(exported.graph))
        # What cannot be written so is traced with the whole program: torch raises RuntimeError for an operator that
        # cannot be run alone, and this module LookupError.
        with suppress(RuntimeError, LookupError):
            writer.write_all(exported.graph)
            if writer.is_pure:
                return _with_graph(exported, writer)
    return exported.run_decompositions(dict(table))


def _is_plain(exported: ExportedProgram) -> bool:
    """Return whether all calls of a program are operators, on shapes that are known."""
    calls = [node for node in exported.graph.nodes if node.op not in ("placeholder", "output")]
    others = (operator.getitem, _enter_autocast, _exit_autocast)
    if not all(node.target in others or isinstance(node.target, OpOverload) for node in calls):
        return False
    values = tree_leaves([node.meta.get("val") for node in calls])
    return not any(isinstance(size, torch.SymInt) for x in values for size in getattr(x, "shape", (x,)))


def _changed(graph: Graph) -> set[int]:
    """Return the memory of the operands of calls that change one in place."""
    calls = [node for node in graph.nodes if isinstance(node.target, OpOverload) and _changes(node.target, node.args)]
    values = [x.meta.get("val") for node in calls for x in node.all_input_nodes]
    return {_memory(value) for value in values if isinstance(value, Tensor)}


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _changes(target: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether a call changes a tensor in place."""
    return target._schema.is_mutable or (_moves_statistics(target) and args[3] is not None)


@cache
def _moves_statistics(target: OpOverload) -> bool:
    """Return whether an operator changes running statistics, its fourth argument, and its schema does not say so."""
    name = target._schema.name
    return name.startswith("aten::") and name.endswith(("batch_norm", "instance_norm"))


@cache
def _shares(target: OpOverload) -> bool:
    return any(argument.alias_info is not None for argument in target._schema.arguments)


@cache
def _is_replaced(target: OpOverload) -> bool:
    """Return whether torch.export cannot preserve a composite operator, since its result may share memory."""
    name = target.name()
    # Reads of a tensor's device and the like are no operators.
    has_kernel = torch._C._dispatch_has_kernel(name)
    if not (has_kernel and torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE)):
        return False
    return _shares(target) or torch.Tag.maybe_aliasing_or_mutating in target.tags


class _Writer(TorchDispatchMode):
    """A writer of a new graph, which records the calls of an operator that is run on the stand-ins of its operands."""

    def __init__(self, table: Mapping[Any, Any], changed: set[int]) -> None:
        super().__init__()
        # Memory of constants is copied as any other.
        self.graph, self.table = Graph(), {torch.ops.aten.lift_fresh_copy.default: torch.clone, **table}
        # Memory that is changed, and what of it has a functional tensor.
        self.changed, self.begun = changed, set[int]()
        # Whether no written call changes a tensor in place, as some composite operators do inside.
        self.is_pure = True
        # The result of each node of the old graph: a node of the new one, a functional tensor, or a list of them.
        self.new: dict[Node, Any] = {}
        # What is known of the call that is written, and the nodes of the stand-ins by identity.
        self.meta: dict[str, Any] = {}
        self.known: dict[int, tuple[Tensor, Node]] = {}
        # The regions of autocast that a call is in.
        self.regions: list[torch.autocast] = []
        # The results of calls that were run again, by the form of their operands.
        self.results: dict[str, Any] = {}

    def write_all(self, graph: Graph) -> None:
        try:
            for node in graph.nodes:
                self.write(node)
        finally:
            while self.regions:
                _exit_autocast(self.regions.pop())

    def write(self, node: Node) -> None:
        """Write a node of the old graph, or the calls that it decomposes into. Calls are named by operator."""
        target: Any = node.target
        self.meta = node.meta
        if node.op != "call_function":
            self.new[node] = copy = self.graph.node_copy(node, self._read)
            # A graph renames nodes that have the name of a Python builtin, as `input`.
            copy.name = node.name
        elif target is operator.getitem:
            results, k = cast(tuple[Any, int], map_arg(node.args, self.new.__getitem__))
            self.new[node] = results[k]
        elif target is _enter_autocast:
            self.regions.append(_enter_autocast(*node.args))
        elif target is _exit_autocast:
            _exit_autocast(self.regions.pop())
        elif (function := self._function(node)) is None:
            args, kwargs = map_arg((node.args, node.kwargs), self._read)
            self.new[node] = self._written(target, args, kwargs, self._value(node, args, kwargs))
        else:
            is_functional = self._is_functional(node) and (function is not target or _shares(target))
            args, kwargs = map_arg((node.args, node.kwargs), partial(self._stand_in, is_functional))
            # Above autograd, a composite operator that is kept would be decomposed after its casts.
            is_kept = function is target and not is_functional
            with self._running(is_functional), torch._C._AutoDispatchBelowAutograd() if is_kept else nullcontext():
                result = function(*args, **kwargs)
            self.new[node] = map_aggregate(result, lambda x: x if _is_functional(x) else self._node(x))
        if node in self.new:
            self._begin(node)

    def _function(self, node: Node) -> Callable[..., Any] | None:
        """Return the function that runs on stand-ins in the place of a call, None for one that is written as it is."""
        target: Any = node.target
        is_run = (_shares(target) and self._is_functional(node)) or self._is_cast(target)
        return self._decomposition(target) or (target if is_run else None)

    def _is_cast(self, target: OpOverload) -> bool:
        """Return whether autocast casts operands of an operator."""
        return bool(self.regions) and torch._C._dispatch_has_kernel_for_dispatch_key(
            target.name(), f"Autocast{self.regions[-1].device.upper()}"
        )

    def _is_functional(self, node: Node) -> bool:
        """Return whether a call reads memory that is changed."""
        return any(isinstance(self.new[operand], Tensor) for operand in node.all_input_nodes)

    @contextmanager
    def _running(self, is_functional: bool) -> Iterator[None]:
        # The dispatcher in Python has torch.export's kernels of batch norm.
        with torch.no_grad(), enable_python_dispatcher(), self:
            if is_functional:
                torch._enable_functionalization(reapply_views=True)
            try:
                yield
            finally:
                if is_functional:
                    torch._disable_functionalization()

    def _begin(self, node: Node) -> None:
        """Make the result of a call a functional tensor if its memory is changed."""
        value, new = node.meta.get("val"), self.new[node]
        if not self.changed or not isinstance(value, Tensor) or not isinstance(new, Node):
            return
        if (memory := _memory(value)) in self.changed:
            if memory in self.begun:
                raise LookupError(f"{node} shares memory, but its operator does not say so")
            self.begun.add(memory)
            plain = new.meta["val"].detach()
            self._know(plain, new)
            self.new[node] = torch._to_functional_tensor(plain)

    def _decomposition(self, target: OpOverload) -> Callable[..., Any] | None:
        return self.table.get(target, target.decompose if _is_replaced(target) else None)

    def _written(self, target: OpOverload, args: Any, kwargs: Any, value: Any) -> Any:
        """Write a call; return its node, or those of its several results."""
        self.is_pure &= not _changes(target, args)
        name = self.graph._target_to_str(target.overloadpacket.__name__)
        call = self.graph.create_node("call_function", target, args, kwargs, name)
        call.meta = {**self.meta, "val": value}
        if not isinstance(value, list | tuple):
            return call
        parts = [self.graph.call_function(operator.getitem, (call, k)) for k in range(len(value))]
        for part, one in zip(parts, value, strict=True):
            part.meta = {**self.meta, "val": one}
        return parts

    def _value(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Return the stand-in of the result of a call that is written as it is: that of the first trace, unless an
        operand lies in memory otherwise, or the call is attention, which has other kernels without gradients.
        """
        is_attention = node.target is _ATTENTION
        if not is_attention and not any(map(self._is_moved, node.all_input_nodes)):
            return node.meta.get("val")
        form = f"{node.target} {map_arg((args, kwargs), lambda x: _form(x.meta['val']))}"
        if form not in self.results:
            args, kwargs = map_arg((args, kwargs), lambda x: x.meta["val"].detach())
            with torch.no_grad():
                self.results[form] = cast(OpOverload, node.target)(*args, **kwargs)
        return self.results[form]

    def _is_moved(self, node: Node) -> bool:
        """Return whether a tensor lies in memory otherwise than in the first trace."""
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.stride() != self._node(self.new[node]).meta["val"].stride()

    def _read(self, node: Node) -> Any:
        """Return the node of the new graph that has the value of a node of the old one now."""
        return map_aggregate(self.new[node], self._now)

    def _now(self, new: Any) -> Any:
        if isinstance(new, Tensor):
            # What makes a view again is of the line that made it first.
            meta, view = self.meta, self._node(new).meta
            self.meta = {**meta, **{key: view[key] for key in ("custom", "stack_trace") if key in view}}
            with self._running(False):
                torch._functionalize_sync(new)
            self.meta = meta
        return self._node(new)

    def _node(self, value: Any) -> Any:
        """Return the node of a stand-in."""
        value = torch._from_functional_tensor(value) if _is_functional(value) else value
        return self.known[id(value)][1] if isinstance(value, Tensor) else value

    def _stand_in(self, is_functional: bool, node: Node) -> Any:
        new = self._read(node)
        if is_functional and isinstance(self.new[node], Tensor):
            return self.new[node]
        value = new.meta["val"].detach()
        self._know(value, new)
        return value

    def _know(self, value: Any, nodes: Any) -> None:
        for x, node in zip(*map(tree_leaves, (value, nodes)), strict=True):
            self.known[id(x)] = x, node

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (decompose := self._decomposition(function)) is not None:
            with self:
                return decompose(*args, **kwargs)
        value = function(*args, **kwargs)
        # Neither reads of a device nor assertions return a tensor.
        if isinstance(value, Tensor | list | tuple):
            self._know(value, self._written(function, *map_aggregate((args, kwargs), self._node), value))
        return value


def _is_functional(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._is_functional_tensor(value)


def _form(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.stride()


def _with_graph(exported: ExportedProgram, writer: _Writer) -> ExportedProgram:
    signature = _returning(writer, exported.graph_signature)
    # A random number that nobody reads is dead, too.
    writer.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    return ExportedProgram(
        root=exported.graph_module,
        graph=writer.graph,
        graph_signature=signature,
        state_dict=exported.state_dict,
        range_constraints=exported.range_constraints,
        module_call_graph=exported.module_call_graph,
        example_inputs=exported.example_inputs,
        constants=exported.constants,
    )


def _returning(writer: _Writer, old: ExportGraphSignature) -> ExportGraphSignature:
    """Have the new graph return the new values of buffers before its results, and return its signature."""
    leaves = zip(old.input_specs, (node for node in writer.new if node.op == "placeholder"), strict=True)
    functional = [(spec, node, writer.new[node]) for spec, node in leaves if isinstance(writer.new[node], Tensor)]
    changed = [(spec, new) for spec, node, x in functional if (new := writer._read(node)).op != "placeholder"]
    if others := [spec.target for spec, _ in changed if spec.kind != InputKind.BUFFER]:
        raise LookupError(f"{others[0] or 'an input'} is changed, but it is no buffer")
    if any(_form(x) != _form(node.meta["val"]) for _, node, x in functional):
        raise LookupError("the shape of a buffer is changed")
    end: Any = writer.graph.output_node()
    end.args = ((*(new for _, new in changed), *end.args[0]),)
    for _, new in changed:
        # As in torch.export, whose program lacks those of another shape or dtype, too, which give other values.
        if new.target is _COPY and _form(new.meta["val"])[:2] == _form(new.args[1].meta["val"])[:2]:
            new.replace_all_uses_with(new.args[1])
            writer.graph.erase_node(new)
    specs = [OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(""), spec.target) for spec, _ in changed]
    pairs = zip([*specs, *old.output_specs], end.args[0], strict=True)
    named = [
        replace(spec, arg=replace(spec.arg, name=out.name)) if isinstance(out, Node) else spec for spec, out in pairs
    ]
    return replace(old, output_specs=named)
