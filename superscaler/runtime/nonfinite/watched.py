"""The origin of numbers that are not finite: a failed step runs again, and each of its calls is watched.

A value that is not finite has its origin in the values that its call read; if these are all finite, the call itself is
the origin. Only the origins of values that reach the loss, a gradient or another rank count, so a mask of -inf is
harmless.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from superscaler.collectives import KINDS as COLLECTIVES
from superscaler.comm.communicator import Handle, PeerLost
from superscaler.errors import RuntimeFailure
from superscaler.ir.model import Op
from superscaler.ir.program import Task, calls
from superscaler.ir.text.model import parse_model
from superscaler.ir.text.program import parse_program
from superscaler.ops.table import ops_of_lines
from superscaler.runtime.emitted_lines import PARSING, op_at
from superscaler.runtime.nonfinite.origins import (
    BACKWARD,
    GIVEN,
    KINDS,
    SUM,
    Bad,
    Line,
    Origin,
    Watch,
    counted,
    tensors_in,
)
from superscaler.runtime.tapes import Sums
from superscaler.store.plan_head import MODEL_FILE, PROGRAM_FILE
from superscaler.store.save import TrainingStep

# Calls that start to move values, to other ranks or to the host, and calls that end a step.
_COPIES = ("to_host", "to_device")
_STARTS = ("send", "recv", *_COPIES, *COLLECTIVES)
_ENDS = ("update", "write", "loss")
_PLAIN = ("slice", "combine", "offload", "fetch")

# Where gradients enter a segment's backward, or leave it; None for a value without a gradient.
Edges = Sequence[GradientEdge | None]


def run(step: TrainingStep, function: FunctionType) -> Tensor:
    """Run an iteration and return its loss.

    Raises RuntimeFailure, with nothing changed, if the loss or a gradient is not finite: on the rank with the origin,
    and as PeerLost on the others. With a loss scale only the loss is checked, because an update by gradients that are
    not finite is skipped.
    """
    rank, communicator = step.state, step.state.communicator
    updates = rank.updates
    loss, held = updates.holding(lambda: function(rank))
    gradients = [] if updates.scaler else [pair for change, pairs in held for pair in pairs if change == updates.apply]
    wrong = "" if loss.isfinite() else f"its loss is {float(loss)}"
    wrong = wrong or communicator.first_text(next((f"the gradient of {_name(step, n)}" for n in _wrong(gradients)), ""))
    if not wrong:
        for change, pairs in held:
            change(pairs)
        return loss
    rank.steps -= 1
    origin = WatchedRank(step, function).origin()
    message = f"step {rank.steps + 1} is not finite ({wrong})"
    for kind in KINDS:
        mine = _text(origin) if origin is not None and origin.kind == kind else ""
        if first := communicator.first_text(mine):
            kind_of_error = RuntimeFailure if first == mine else PeerLost
            raise kind_of_error(f"{message}, which comes from {first}. No weight was changed by it.")
    if not loss.isfinite():
        raise RuntimeFailure(f"{message}: all its parts are finite, and their sum is too large for {loss.dtype}.")
    raise RuntimeFailure(f"{message}, but was finite when it was run again: it does not compute the same twice.")


def _wrong(gradients: Sequence[tuple[str, Tensor]]) -> list[str]:
    found = [g.isfinite().all() for _, g in gradients]
    finite = torch.stack([one.to(found[0].device) for one in found]).tolist() if found else []
    return [name for (name, _), is_finite in zip(gradients, finite, strict=True) if not is_finite]


def _name(step: TrainingStep, weight: str) -> str:
    """Return the user's name of a weight at rest."""
    tensor = next(w["tensor"] for w in step.plan["devices"][step.rank]["weights"] if w["name"] == weight)
    return str(step.plan["tensors"].get(tensor, {"name": tensor})["name"])


def _text(origin: Origin) -> str:
    return origin.text + (f"; {origin.turned}" if origin.turned else "")


class WatchedRank:
    """The `rt` of emitted code in a second run: a rank that watches its calls and updates nothing."""

    def __init__(self, step: TrainingStep, function: FunctionType) -> None:
        self.step, self.rank, self._program = step, step.state, function
        modules = [function.__globals__, function.__globals__["segments"].__dict__]
        folder = function.__code__.co_filename.removesuffix(f"{modules[0]['__name__']}.py")
        sources = {f"{folder}{module['__name__']}.py": module["__source__"].splitlines() for module in modules}
        self.segments, self._text = f"{folder}segments.py", modules[1]["__source__"]
        self.watch = Watch(sources, self._op_at, self._where())
        # The origins of values that left the rank.
        self.left: list[Origin] = []
        # By task: the edges of its saved outputs, those of its inputs that want a gradient, and its watched nodes.
        self._tapes: dict[str, tuple[Edges, Edges, set[Node]]] = {}
        self._tag = ""
        self._functions: dict[str, Sequence[Op]] | None = None

    def origin(self) -> Origin | None:
        """Return the first origin of a value that reached the loss, a gradient or another rank."""
        # Compiled code has no lines to name.
        compiled, self.rank.compiled = self.rank.compiled, None
        try:
            with self.watch:
                self._program(self)
        finally:
            self.rank.compiled = compiled
        return min(self.left, key=lambda origin: (KINDS.index(origin.kind), origin.number), default=None)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.rank, name)
        if name.removesuffix("_bucket") in _STARTS:
            return partial(self._start, method)
        if name in _ENDS:
            # An update or a write is given weights first.
            return lambda *given, **options: self._leave(given if name == "loss" else given[1:])
        return partial(self._plain, method) if name in _PLAIN else method

    def weight(self, name: str) -> Tensor:
        with self.watch.off():
            x: Tensor = self.rank.weight(name)
            self.watch.mark(x, [], "", GIVEN, lambda: self._weight(name, x))
        return x

    def weights_of(self, *paths: str) -> list[Tensor]:
        names = {id(x): name for name, x in self.rank.weights.items()}
        return [self.weight(names[id(x)]) for x in self.rank.weights_of(*paths)]

    def input(self, number: int) -> Tensor:
        with self.watch.off():
            x: Tensor = self.rank.input(number)
            self.watch.mark(x, [], "", GIVEN, lambda: self._input(number, x))
        return x

    def _plain(self, method: Callable[..., Any], *given: Any, **options: Any) -> Any:
        watch = self.watch
        with watch.off():
            read, line = watch.read(tensors_in(given)), watch.line(watch.frame())
            made = method(*given, **options)
            for x in tensors_in(made):
                watch.mark(x, read, line, BACKWARD, partial(watch.made, str(line), x, {}))
        return made

    def _leave(self, given: Any) -> None:
        self.left += [bad.origin for bad in self.watch.read(tensors_in(given))]

    def _start(self, method: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Start a communication or a copy; its results have the origins of its inputs."""
        watch = self.watch
        with watch.off():
            line = watch.line(watch.frame())
            if method.__name__ not in _COPIES:
                self._leave(given)
            sources = given[0] if isinstance(given[0], tuple | list) else (given[0],)
            read = [watch.read(tensors_in(source)) for source in sources]
            works = method(*given, **options)
        if isinstance(works, tuple):
            return tuple(w and _Arrival(self, w, some, line) for w, some in zip(works, read, strict=True))
        return works and _Arrival(self, works, read[0], line)

    # Segments.

    def forward(
        self, tag: str, function: Callable[..., Any], inputs: Sequence[Tensor], tape: bool = True, **options: Any
    ) -> Any:
        watch = self.watch

        @wraps(function)
        def segment(*aliases: Any, **more: Any) -> Any:
            nodes = set[Node]()
            _same(watch, inputs, aliases)
            with watch.on(nodes):
                made.extend(function(*aliases, **more))
            ends = [get_gradient_edge(x) for x in aliases if x.requires_grad]
            numbers = function.__dict__.get("saved")
            saved = made if numbers is None else [made[k] for k in numbers]
            starts = [get_gradient_edge(x) if x.requires_grad else None for x in saved]
            self._tapes[tag] = starts, ends, nodes
            return made

        made: list[Tensor] = []
        with self._within(tag):
            outputs = self.rank.forward(tag, segment, inputs, tape, **options)
            _same(watch, made, outputs)
        return outputs

    def backward(
        self, tag: str, gradients: Sequence[Tensor | None], again: Sequence[Tensor] = (), into: Sums | None = None
    ) -> Any:
        starts, ends, _ = self._tapes.pop(tag)
        run = partial(self.rank.backward, tag, gradients, again, into)
        return self._mirror(tag, starts, gradients, ends, run, into)

    def backward_input(self, tag: str, gradients: Sequence[Tensor | None], first: Sequence[int]) -> Any:
        starts, ends, nodes = self._tapes[tag]
        self._tapes[tag] = starts, [end for n, end in enumerate(ends) if n not in first], nodes
        run = partial(self.rank.backward_input, tag, gradients, first)
        return self._mirror(tag, starts, gradients, [ends[n] for n in first], run)

    def backward_weight(self, tag: str, into: Sums | None = None) -> Any:
        _, ends, _ = self._tapes.pop(tag)
        return self._mirror(tag, [], [], ends, partial(self.rank.backward_weight, tag, into), into)

    def _mirror(
        self, tag: str, starts: Edges, gradients: Sequence[Tensor | None], ends: Edges, run: Callable[[], Any],
        into: Sums | None = None,
    ) -> Any:  # fmt: skip
        """Run a backward; its gradients have the origins that arrive at the segment's inputs."""
        with self._within(tag):
            line = self.watch.line(self.watch.frame())
            self.watch.enter(starts, gradients)
            made, left = run(), dict(enumerate(ends))
            for first, sums in (into or {}).items():
                own, start, stop = sums if isinstance(sums, tuple) else (sums, 0, len(sums))
                for n, x in enumerate(tensors_in(own[start:stop]), first):
                    self.watch.leave(left.pop(n), x, line, self.watch.read([x]))
            for end, x in zip(left.values(), made, strict=True):
                self.watch.leave(end, x, line)
        return made

    @contextmanager
    def _within(self, tag: str) -> Iterator[None]:
        microbatch, before = Task.parse(tag).microbatch, self._where()
        self._tag, self.watch.where = tag, f"{before}, microbatch {microbatch}" if microbatch >= 0 else before
        with self.watch.off():
            yield
        self._tag, self.watch.where = "", before

    def _where(self) -> str:
        return f"on rank {self.step.rank}"

    # Texts.

    def _op_at(self, frame: FrameType) -> str | None:
        """Return the op of a line of a segment and its module, '' if they are not known; None outside of segments."""
        if frame.f_code.co_filename != self.segments:
            return None
        function = self._function(self._tag)
        if function is None:
            return ""
        number = op_at(frame, self._text)
        assert number is not None, frame.f_lineno
        op = function[number]
        return f"{op.name} ({op.module})" if op.module else op.name

    def _function(self, tag: str) -> Sequence[Op] | None:
        """Return the op of each line of a segment by the name of its task; None for a step of no plan directory."""
        if self._functions is None and self.step.directory is not None:
            with PARSING:
                model = parse_model((self.step.directory / MODEL_FILE).read_text())
                # That of compiled steps has the prefix of their segments.
                file = Path(self.segments).name.replace("segments.py", PROGRAM_FILE)
                program = parse_program((self.step.directory / file).read_text(), model)
            code = program.devices[self.step.rank].instructions
            numbers = {str(i.task): i.function for _, i in calls(code)}
            ops = [ops_of_lines(function, model.tensors) for function in program.functions]
            self._functions = {task: ops[number] for task, number in numbers.items()}
        return (self._functions or {}).get(tag)

    def _weight(self, name: str, value: Tensor) -> str:
        text = f"weight {_name(self.step, name)} {self._where()}, which has {counted(value)} before the step"
        return f"{text}: it was loaded so, or an update before made it so"

    def _input(self, number: int, value: Tensor) -> str:
        return f"input {self.rank.tables['inputs'][number][0]} {self._where()}, which has {counted(value)}"


class _Arrival:
    """The handle of a watched communication."""

    def __init__(self, rank: WatchedRank, handle: Handle, read: Sequence[Bad], line: Line) -> None:
        self.rank, self.handle, self.read, self.line = rank, handle, read, line

    def wait(self) -> Tensor:
        watch = self.rank.watch
        with watch.off():
            x = self.handle.wait()
            watch.mark(x, self.read, self.line, SUM, lambda: self._text(x))
        return x

    def _text(self, x: Tensor) -> str:
        where = f"{self.line} {self.rank.watch.where}"
        return f"{where}, which gave {counted(x)}: all that is summed is finite, and the sum too large"


def _same(watch: Watch, values: Iterable[Tensor], copies: Iterable[Tensor]) -> None:
    """Give copies the origins of their values."""
    for x, copy in zip(values, copies, strict=True):
        for bad in watch.read([x]):
            watch.bad[copy] = bad
