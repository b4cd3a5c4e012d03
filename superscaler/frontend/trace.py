"""An exported program as a list of calls on named tensors: what the later steps of capture rewrite."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from superscaler.errors import CaptureError
from superscaler.ir.graph import TensorKind
from superscaler.ir.text import unique

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Var:
    """Stands for a tensor in the arguments of a call."""

    name: str


@dataclass(frozen=True, slots=True)
class Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call. `function` is None for the operators that torch does not have."""

    name: str
    target: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[str, ...]
    module: str
    source: str

    def reads(self) -> list[str]:
        """Return the tensors among the arguments, in order, repeated ones repeated."""
        return [v.name for v in variables((self.args, self.kwargs))]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def becomes(self, target: str, /, *args: Any, **kwargs: Any) -> Call:
        """Return the call of another operator that makes the same results."""
        return replace(self, target=target, function=None, args=args, kwargs=kwargs)


@dataclass(slots=True)
class Trace:
    """Calls in execution order, the shape of every tensor, the kind of those that no call makes, and known values.

    `writes` has for each buffer that the model changes the tensor that it is set to at the end of the step.
    `masks` has the kind of each constant that attention reads as a mask.
    """

    calls: list[Call]
    specs: dict[str, Spec]
    kinds: dict[str, TensorKind]
    values: dict[str, Tensor]
    loss: str
    taken: set[str] = field(default_factory=set)
    masks: dict[str, str] = field(default_factory=dict)
    writes: dict[str, str] = field(default_factory=dict)

    @property
    def results(self) -> set[str]:
        """Return the tensors that leave the step: the loss, and what buffers are set to."""
        return {self.loss, *self.writes.values()}

    def rename_results(self, same: dict[str, str]) -> None:
        self.loss = same.get(self.loss, self.loss)
        self.writes = {buffer: same.get(name, name) for buffer, name in self.writes.items()}

    def derive(self, name: str, word: str) -> str:
        """Return a new name made of a call's name and a word: `addmm_3`, `product` -> `addmm_product_3`."""
        stem, number = re.fullmatch(r"(.*?)(_\d+)?", name).groups(default="")  # type: ignore[union-attr]
        return self.fresh(f"{stem}_{word}{number}")

    def fresh(self, name: str) -> str:
        return unique(name, self.taken)


def variables(value: Any) -> Iterator[Var]:
    """Yield the tensors in nested arguments, in order."""
    if isinstance(value, Var):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from variables(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from variables(item)


def substitute(value: Any, swap: Callable[[Any], Any], kind: type = Var) -> Any:
    """Return nested arguments with every tensor (or what is of this kind) replaced; lists become tuples."""
    if isinstance(value, kind):
        return swap(value)
    if isinstance(value, dict):
        return {k: substitute(v, swap, kind) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return tuple(substitute(v, swap, kind) for v in value)
    return value


def aten(value: T, names: str) -> dict[str, T]:
    """Return a table that has this value for these operators; one without an overload means `.default`."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": value for name in names.split()}


def overload(target: str) -> Any:
    """Return the operator of torch that a target names."""
    namespace, name, kind = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), kind)


def without_data(value: Any, specs: dict[str, Spec]) -> Any:
    """Return nested arguments with a tensor on meta in the place of each tensor."""
    return substitute(value, lambda v: torch.empty(specs[v.name].shape, dtype=specs[v.name].dtype, device="meta"))


def read(exported: ExportedProgram, canonical: dict[str, str]) -> Trace:
    """Return the calls of an exported program. `canonical` maps all parameter names to the one that is kept."""
    reader = _Reader(exported, canonical)
    for node in exported.graph.nodes:
        if node.op == "call_function":
            reader.call(node)
    results = exported.graph.output_node().args[0]
    reader.trace.loss = reader.names[results[-1]]
    for spec, node in zip(exported.graph_signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            reader.trace.writes[spec.target] = reader.names[node]
    return reader.trace


class _Reader:
    def __init__(self, exported: ExportedProgram, canonical: dict[str, str]) -> None:
        self.names: dict[Node, str] = {}
        self.parts: dict[Node, list[str]] = {}
        self.trace = Trace([], {}, {}, {}, "")
        nodes = {node.name: node for node in exported.graph.nodes}
        _refuse_mutation(exported)
        for spec in exported.graph_signature.input_specs:
            node = nodes.get(getattr(spec.arg, "name", ""))
            if node is None or not isinstance(node.meta.get("val"), Tensor):
                continue
            self._leaf(exported, spec.kind, spec.target, node, canonical)

    def _leaf(
        self, exported: ExportedProgram, kind: InputKind, target: str | None, node: Node, canonical: dict[str, str]
    ) -> None:
        trace = self.trace
        name = canonical.get(target or node.name, target or node.name)
        self.names[node] = name
        if name in trace.specs and kind is InputKind.USER_INPUT:
            raise CaptureError(
                f"the input {name} has the name of a {trace.kinds[name]} of the model; rename one of them."
            )
        if name in trace.specs:
            return
        trace.taken.add(name)
        trace.specs[name] = _spec(node.meta["val"])
        trace.kinds[name] = _KINDS[kind]
        stored = exported.state_dict.get(target or "", exported.constants.get(target or ""))
        if kind is not InputKind.USER_INPUT and isinstance(stored, Tensor) and not stored.is_meta:
            trace.values[name] = stored.detach()

    def call(self, node: Node) -> None:
        if node.target is operator.getitem:
            source, k = node.args
            self.names[node] = self.parts[source][k]  # type: ignore[index]
            return
        self._refuse_unknown(node)
        value = node.meta.get("val")
        if "_assert" in str(node.target) or value is None:
            return
        name = self.trace.fresh(node.name)
        outputs: tuple[str, ...] = (name,)
        if isinstance(value, Tensor):
            self.names[node] = name
        else:
            outputs = tuple(self.trace.derive(name, f"part{k}") for k in range(len(value)))
            self.parts[node] = list(outputs)
        for output, v in zip(outputs, [value] if isinstance(value, Tensor) else value, strict=True):
            self.trace.specs[output] = _spec(v)
        args, kwargs = substitute((node.args, node.kwargs), lambda n: Var(self.names[n]), Node)
        module, source = _module(node), source_of(node.meta.get("stack_trace") or "")
        self.trace.calls.append(Call(name, str(node.target), node.target, args, kwargs, outputs, module, source))

    def _refuse_unknown(self, node: Node) -> None:
        value = node.meta.get("val")
        values = [v for v in (value if isinstance(value, list | tuple) else [value]) if v is not None]
        where, runs = source_of(node.meta.get("stack_trace") or "") or "the model", f"runs {node.target}"
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(
                f"{where} {runs}, which chooses at run time what is computed; compute both branches and select with "
                "torch.where, and write loops in Python."
            )
        if not all(isinstance(v, Tensor) for v in values):
            raise CaptureError(
                f"{where} {runs}, which takes a Python number out of a tensor; keep it a tensor (without .item(), "
                ".tolist() or float()), or take it out of the model."
            )
        if any(isinstance(size, torch.SymInt) for v in values for size in v.shape):
            raise CaptureError(
                f"{where} {runs}, whose result has as many elements as the data says; keep a fixed shape: weigh by a "
                "mask, or use torch.where, instead of picking elements."
            )
        if any(v.layout is not torch.strided for v in values):
            raise CaptureError(f"{where} {runs}, whose result is sparse; use dense tensors.")


_KINDS: dict[InputKind, TensorKind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def _spec(value: Tensor) -> Spec:
    return Spec(tuple(int(s) for s in value.shape), value.dtype)


def _refuse_mutation(exported: ExportedProgram) -> None:
    signature = exported.graph_signature
    changed = {**signature.user_inputs_to_mutate, **getattr(signature, "parameters_to_mutate", {})}
    if changed:
        node = next(node for node in exported.graph.nodes if node.name in changed)
        lines = (source_of(n.meta.get("stack_trace") or "") for n in (node, *node.all_input_nodes))
        where = next(filter(None, lines), "the model")
        raise CaptureError(
            f"{where} changes {len(changed)} parameters or inputs in place: {', '.join(changed.values())}; "
            "compute new tensors (of an input, a clone)."
        )


def _module(node: Node) -> str:
    """Return the path of the innermost module; a repeated call of a module has the suffix `@n`, which goes."""
    stack = node.meta.get("nn_module_stack") or {}
    path: str = next(reversed(stack.values()))[0] if stack else ""
    return path.split("@")[0]


FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_MODEL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


def source_of(stack: str) -> str:
    """Return `file:line` of the innermost frame of a stack trace that is neither torch's nor ours, or ''."""
    frames = [(f, line) for f, line in FRAME.findall(stack) if not f.startswith((*_NOT_MODEL, "<"))]
    if not frames:
        return ""
    path, line = frames[-1]
    return f"{shorten(path)}:{line}"


def shorten(path: str) -> str:
    """Leave out what differs between machines: up to site-packages, or the working directory."""
    for root in ("site-packages" + os.sep, os.getcwd() + os.sep):
        if root in path:
            return path.split(root, 1)[1]
    return path
