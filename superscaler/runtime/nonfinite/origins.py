"""Origins of values that are not finite: the torch calls, or nodes of a backward, that made them from finite ones.

A watch runs emitted code unchanged. It sees each call of torch in it (a `TorchFunctionMode`), and each node of the
backward (a hook), and finds the line in the emitted file in the frames of the interpreter.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

# The kinds of origins; the first found of these is reported. A given value may be infinite on purpose, as a mask is. A
# sum over ranks is the origin only if no rank has another one.
FORWARD, BACKWARD, GIVEN, SUM = KINDS = ("forward", "backward", "given", "sum")


@dataclass(frozen=True, slots=True)
class Origin:
    """The call that made non-finite numbers from finite ones; `turned`: the one that made nan of infinity."""

    kind: str
    number: int
    text: str
    turned: str = ""


class Bad(NamedTuple):
    """The origin of a value that is not finite."""

    origin: Origin
    has_nan: bool


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an emitted file. `text`: its source. `op`: the op of a line of a segment; None outside of segments."""

    file: str
    number: int
    text: str
    op: str | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.number} ({self.text[:160]})"
        return f"{self.op} at {place}" if self.op else place


def is_bad(x: object) -> bool:
    return isinstance(x, Tensor) and not bool(x.isfinite().all())


def counted(x: Tensor) -> str:
    """Return the number of elements that are not finite, in words.

    >>> import torch
    >>> counted(torch.tensor([1.0, float("inf"), float("nan")]))
    '2 of 3 elements not finite (1 nan, 1 inf)'
    """
    kinds = {"nan": x.isnan(), "inf": x.isposinf(), "-inf": x.isneginf()}
    found = {name: int(flags.sum()) for name, flags in kinds.items()}
    counts = ", ".join(f"{number:,} {name}" for name, number in found.items() if number)
    return f"{sum(found.values()):,} of {x.numel():,} elements not finite ({counts})"


def ranges_of(values: Mapping[str, Any]) -> str:
    """Return the least and largest element of the first floating-point values, in words."""
    ranges = [
        f"{name} from {x.min().item():.4g} to {x.max().item():.4g}"
        for name, x in values.items()
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel()
    ]
    return ", ".join(ranges[:3])


def tensors_in(*values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


class Watch(TorchFunctionMode):
    """A mode that records the origin of each non-finite result of a torch call.

    `sources`: the lines of each emitted file. `op_at` returns the op of a frame's line in a segment, None outside of
    segments. `where`: the rank and the microbatch, for messages.
    """

    def __init__(
        self, sources: Mapping[str, Sequence[str]], op_at: Callable[[FrameType], str | None], where: str
    ) -> None:
        super().__init__()
        self.sources, self.op_at, self.where = sources, op_at, where
        self.bad = WeakTensorKeyDictionary()
        # The nodes of the current segment that are watched; the origins of gradients that arrive at a node's input.
        self.nodes = set[Node]()
        self.arriving: dict[tuple[Node, int], list[Bad]] = {}
        self.is_on = True
        self._count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_on:
            return func(*args, **kwargs)
        inputs = tensors_in(args, kwargs)
        read = self.read(inputs)
        made = func(*args, **kwargs)
        # A setter returns nothing: it changes its first argument.
        outputs = inputs[:1] if made is None else tensors_in(made)
        frame = self.frame()
        line = self.line(frame)
        values = _values_of(frame, line.text)
        for x in outputs:
            describe = partial(self.made, str(line) if line.op is None else f"the forward of {line}", x, values)
            self.mark(x, read, line, BACKWARD if line.op is None else FORWARD, describe)
        if line.op is not None:
            self._follow(outputs, line, read, {k: v for k, v in values.items() if any(v is x for x in inputs)})
        return made

    @contextmanager
    def off(self) -> Iterator[None]:
        """Stop recording in the block, which emitted code runs as one call."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    @contextmanager
    def on(self, nodes: set[Node]) -> Iterator[None]:
        """Record calls again inside `off`, and add the nodes of their backwards to `nodes`."""
        self.nodes, self.is_on = nodes, True
        try:
            yield
        finally:
            self.is_on = False

    # Values.

    def read(self, values: Iterable[Tensor]) -> list[Bad]:
        return [bad for x in values if (bad := self.bad.get(x)) is not None]

    def mark(self, x: Tensor, read: Sequence[Bad], where: object, kind: str, describe: Callable[[], str]) -> None:
        """Record the origin of a value made by `where`, if it is not finite; see `judge`."""
        self.bad.pop(x, None)
        if is_bad(x):
            self.bad[x] = self.judge(x, read, where, kind, describe)

    def judge(self, x: Tensor, read: Sequence[Bad], where: object, kind: str, describe: Callable[[], str]) -> Bad:
        """Return the origin of a value that is not finite.

        `read`: the origins of the inputs that are not finite. Without any, the value is an origin of this kind, and
        `describe` returns its text.
        """
        has_nan = bool(x.isnan().any())
        # A nan comes from a nan, if any was read.
        nans = [bad.origin for bad in read if bad.has_nan and has_nan]
        if read:
            found = min(nans or [bad.origin for bad in read], key=lambda origin: (origin.kind == GIVEN, origin.number))
        else:
            self._count += 1
            found = Origin(kind, self._count, describe())
        if read and has_nan and not nans:
            found = replace(found, turned=f"{where} made nan of that")
        return Bad(found, has_nan)

    def made(self, what: str, x: Tensor, inputs: Mapping[str, Any], where: str = "") -> str:
        ranges = ranges_of(inputs)
        return f"{what} {where or self.where}, which made {counted(x)} of finite ones{', ' * bool(ranges)}{ranges}"

    # Lines.

    def frame(self) -> FrameType:
        """Return the innermost frame of emitted code."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in self.sources:
            frame = frame.f_back
        assert frame is not None
        return frame

    def line(self, frame: FrameType) -> Line:
        file, number = frame.f_code.co_filename, frame.f_lineno
        return Line(file.rpartition("/")[2], number, self.sources[file][number - 1].strip(), self.op_at(frame))

    # The backward.

    def enter(self, edges: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]) -> None:
        """Record the gradients that a backward gets at some edges."""
        for edge, gradient in zip(edges, gradients, strict=True):
            if edge is not None and gradient is not None and (bad := self.bad.get(gradient)) is not None:
                self.arriving.setdefault((edge.node, edge.output_nr), []).append(bad)

    def leave(self, edge: GradientEdge | None, gradient: Tensor, line: Line, before: Sequence[Bad] = ()) -> None:
        """Record the gradient of a backward at an edge, or the sum after its addition; `before`: the sum before it."""
        read = self.arriving.get((edge.node, edge.output_nr), []) if edge is not None else []
        self.mark(gradient, [*before, *read], line, BACKWARD, partial(self.made, str(line), gradient, {}))

    def _follow(self, outputs: Iterable[Tensor], line: Line, read: list[Bad], values: Mapping[str, Any]) -> None:
        """Watch the nodes of the backward of a call."""
        opened = [get_gradient_edge(x).node for x in outputs if x.requires_grad and x.grad_fn is not None]
        names = [f"d_{name.strip()}" for name in line.text.partition(" = ")[0].split(",")]
        values = {k: x.detach() for k, x in values.items()}
        while opened:
            node = opened.pop()
            if node not in self.nodes:
                self.nodes.add(node)
                node.register_hook(partial(self._backward, node, line, self.where, read, names, values))
                opened += [after for after, _ in node.next_functions if after is not None and after.next_functions]

    def _backward(
        self, node: Node, line: Line, where: str, read: list[Bad], names: Sequence[str], values: Mapping[str, Any],
        made: Sequence[Tensor | None], given: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        """Record the gradients made by a node, and those of its inputs that are sums of several."""
        found = list(read)
        for k, gradient in enumerate(given):
            if gradient is not None and is_bad(gradient):
                arrived = self.arriving.get((node, k), [])
                total = f"the sum of the gradients of {names[min(k, len(names) - 1)][2:]} at {line}"
                describe = partial(self.made, total, gradient, {}, where)
                found.append(self.judge(gradient, arrived, total, BACKWARD, describe))
        inputs = {**dict(zip(names, given, strict=False)), **values}
        for (after, k), gradient in zip(node.next_functions, made, strict=True):
            if after is not None and gradient is not None and is_bad(gradient):
                what = f"the backward of {line}"
                describe = partial(self.made, what, gradient, inputs, where)
                self.arriving.setdefault((after, k), []).append(self.judge(gradient, found, what, BACKWARD, describe))


def _values_of(frame: FrameType, text: str) -> dict[str, Any]:
    """Return the local variables that the right side of a line names."""
    names = re.findall(r"[^\W\d]\w*", text.partition(" = ")[2])
    return {name: frame.f_locals[name] for name in dict.fromkeys(names) if name in frame.f_locals}
