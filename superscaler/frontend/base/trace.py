"""The trace: an exported program as a torch.fx graph to be rewritten, and the values of its leaves."""

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from superscaler.errors import CaptureError
from superscaler.ir.model import TensorKind
from superscaler.ir.names import unique
from superscaler.ops.table import RANDOM, row_of


@dataclass(slots=True)
class Trace:
    """A graph in execution order, and the known values of its leaves by name.

    The metadata of a node are its value without data (`val`), its `module` and `source`, and the number of its
    checkpointed `region`, if any. A leaf has its `kind` and, if known, its `value`. A node that is not the result of
    its `op` has that op's name. A buffer has `is_state` if the model saves it and no call reads it. All results of a
    call with several are nodes behind it. The graph returns the new value of each of the buffers in `writes`, then each
    of the outputs in `kept`, and last the loss, if it trains.
    """

    graph: Graph
    writes: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    kept: list[str] = field(default_factory=list)

    def calls(self) -> list[Node]:
        """Return the operator calls, without the nodes for single results of several."""
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]

    def leaves(self, *kinds: TensorKind) -> list[Node]:
        """Return the tensors of these kinds, or of all, that no call makes."""
        found = (n for n in self.graph.find_nodes(op="placeholder") if "kind" in n.meta)
        return [n for n in found if n.meta["kind"] in kinds or not kinds]

    @property
    def results(self) -> tuple[Node, ...]:
        """Return the tensors that leave the step: new values of buffers, outputs, and the loss."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def loss(self) -> Node | None:
        return self.results[-1] if len(self.results) > len(self.writes) + len(self.kept) else None

    def outputs(self) -> list[tuple[str, Node]]:
        """Return the name and the node of each output."""
        return list(zip(self.kept, self.results[len(self.writes) :], strict=False))

    def written(self) -> list[tuple[Node, Node]]:
        """Return each buffer that the model changes, with its value at the end of the step."""
        buffers = {leaf.name: leaf for leaf in self.leaves("buffer")}
        pairs = ((buffers[name], new) for name, new in zip(self.writes, self.results, strict=False))
        return [(buffer, new) for buffer, new in pairs if new is not buffer]

    def constant(self, node: Any) -> Tensor | None:
        """Return the value of a constant argument, if it is known."""
        is_constant = isinstance(node, Node) and node.meta.get("kind") == "constant"
        return node.meta.get("value") if is_constant else None

    def leaf(self, name: str, kind: TensorKind, like: Tensor, value: Tensor | None = None) -> Node:
        """Add a leaf behind the others, of the shape and dtype of a tensor."""
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            return filled(self.graph.placeholder("leaf"), name, {"kind": kind, "value": value}, like)

    def replace(self, node: Node, *results: Node | None) -> None:
        """Replace a call's results by these in all readers, and drop the call."""
        made = outputs(node)
        for old, new in zip(made, results, strict=False):
            if new is not None:
                old.replace_all_uses_with(new)
        for old in dict.fromkeys([*made, node]):
            self.graph.erase_node(old)

    def rewrite(self, node: Node, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Replace a call by the calls of a torch function on these arguments, without data.

        The function may return the first ones of several results, None for results without readers, and NotImplemented
        if the call stays. The results, and random draws, keep the names of the call.
        """
        writer = _Writer(self, node)
        given = map_arg((args, kwargs), writer.give)
        # Above autograd, torch would decompose composite operators.
        with torch._C._AutoDispatchBelowAutograd(), writer:
            found = function(*given[0], **given[1])
        if found is NotImplemented:
            return
        results: list[Any] = [writer.known.get(id(x)) for x in (found if isinstance(found, tuple) else (found,))]
        olds = outputs(node)
        for number, (old, new) in enumerate(zip_longest(olds, results[: len(olds)])):
            if new is None and old.users:
                raise CaptureError(
                    f"{place_of(node)} reads result {number} of {node.target}, which is not captured; for a mask, "
                    "apply dropout to a tensor of ones."
                )
            if new in writer.made:
                new.name = old.name
        drawn = next((x for x in writer.made if target_of(x) in RANDOM), results[0])
        if results[0] in writer.made:
            results[0].meta["op"], drawn.meta["op"] = drawn.name, op_name(node)
        self.replace(node, *results)

    def name_call(self, node: Node, name: str, meta: Mapping[str, Any], value: Any) -> list[Node]:
        """Give a new call a unique name and its metadata. Return its results; several results are new nodes."""
        name = unique(name, self.taken)
        if isinstance(value, Tensor):
            return [filled(node, name, meta, value)]
        node.name, node.meta = name, {**meta, "val": value}
        with self.graph.inserting_before(node.next):
            parts = [self.graph.call_function(operator.getitem, (node, k)) for k in range(len(value))]
        return [filled(part, self.derive(name, f"part{part.args[1]}"), meta, value[part.args[1]]) for part in parts]

    def derive(self, name: str, word: str) -> str:
        """Return a new name made of a call's name and a word: `addmm_3`, `product` -> `addmm_product_3`."""
        stem, number = re.fullmatch(r"(.*?)(_\d+)?", name).groups(default="")  # type: ignore[union-attr]
        return unique(f"{stem}_{word}{number}", self.taken)


class _Writer(TorchDispatchMode):
    """A writer of the calls that a function makes, before a call: named after it, of its module and line."""

    def __init__(self, trace: Trace, node: Node) -> None:
        super().__init__()
        self.trace, self.node = trace, node
        self.known: dict[int, Node] = {}
        self.made: list[Node] = []

    def give(self, node: Node) -> Tensor:
        """Return the stand-in of an operand for the function."""
        self.known[id(node.meta["val"])] = node
        return node.meta["val"]  # type: ignore[no-any-return]

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        value = function(*args, **(kwargs or {}))
        if not isinstance(value, Tensor):
            # Operators also return dtypes.
            return value
        read: Any = map_aggregate((args, kwargs or {}), lambda x: self.known[id(x)] if isinstance(x, Tensor) else x)
        with self.trace.graph.inserting_before(self.node):
            node = self.trace.graph.call_function(function, *read)
        word = function.overloadpacket.__name__.strip("_")
        name = self.trace.derive(self.node.name, _WORDS.get(word, word))
        meta = {key: self.node.meta.get(key) for key in ("module", "source", "region")}
        self.made.append(filled(node, name, meta, value))
        self.known[id(node.meta["val"])] = node
        return node.meta["val"]


_WORDS = {**dict.fromkeys(("linear", "mm", "bmm", "mv", "outer"), "product"), "count_labels": "count"}


def filled(node: Node, name: str, meta: Mapping[str, Any], value: Tensor) -> Node:
    node.name = name
    node.meta = {**meta, "val": torch.empty(value.shape, dtype=value.dtype, device="meta")}
    return node


def reads(node: Node) -> list[Node]:
    """Return the tensors among the arguments of a call, in order, repeated ones repeated."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def outputs(node: Node) -> list[Node]:
    """Return the results of a call."""
    if isinstance(node.meta["val"], Tensor):
        return [node]
    return sorted(node.users, key=lambda part: part.args[1])  # type: ignore[arg-type, return-value]


def base_of(node: Node) -> Node:
    """Return the base tensor of a chain of views."""
    while "kind" not in node.meta:
        call = node.args[0] if node.target is operator.getitem else node
        assert isinstance(call, Node)
        if not row_of(target_of(call)).is_view:
            break
        node = reads(call)[0]
    return node


def shape_of(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def dtype_of(node: Node) -> torch.dtype:
    return node.meta["val"].dtype  # type: ignore[no-any-return]


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def target_of(node: Node) -> str:
    """Return the name of an operator, with its overload if torch has it."""
    return _target(node.target)


@cache
def _target(operator: Any) -> str:
    name = str(operator)
    return name.removesuffix(".default") if name.startswith("ss.") else name


def op_name(node: Node) -> str:
    return str(node.meta.get("op", node.name))


def place_of(node: Node) -> str:
    """Return the line or the module of a call, for messages."""
    return str(node.meta.get("source") or node.meta.get("module") or "the model")


FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_MODEL = (os.path.dirname(torch.__file__) + os.sep, f"{Path(__file__).parents[2]}{os.sep}")


def source_of(node: Node) -> str:
    """Return `file:line` of the innermost frame of an exported node that is neither torch's nor ours, or ''."""
    return innermost(FRAME.findall(node.meta.get("stack_trace") or ""))


def innermost(frames: Sequence[tuple[str, Any]]) -> str:
    """Return `file:line` of the last of these files and lines that is neither torch's nor ours, or ''."""
    found = [f"{shorten(file)}:{line}" for file, line in frames if not file.startswith((*_NOT_MODEL, "<"))]
    return found[-1] if found else ""


def shorten(path: str) -> str:
    """Return a path without the part that differs between machines: up to site-packages, or the working directory."""
    for root in ("site-packages" + os.sep, os.getcwd() + os.sep):
        path = path.split(root, 1)[-1]
    return path
