"""CUDA graphs on a CPU: a recorder that notes what a step does, and does it again on the same memory.

It notes operators (with the memory of each tensor), what goes from rank to rank, and what Python reads. So two recorded
steps can be compared, and a replay gives what a CUDA graph would give: all that Python computed has its old value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from superscaler.artifact import describe, initial_values
from superscaler.comm.communicator import Later
from superscaler.comm.threads import ThreadCommunicator, run_ranks
from superscaler.compiler import Compiled
from superscaler.runtime.load import modules
from superscaler.runtime.replayable.reads import is_read
from superscaler.runtime.saved_tensors import storage_of
from superscaler.runtime.step import Step, build_step
from tests.helpers.ran import as_in

T = TypeVar("T")
_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)


@dataclass
class Event:
    """An operator or a message: its name with all that is no tensor, the tensors that it reads and makes, and what does
    it again.
    """

    name: str
    read: list[Tensor]
    made: list[Tensor]
    again: Callable[[], None]
    # Those of `made` that are no views.
    fresh: set[int] = field(default_factory=set)


class Recording(TorchDispatchMode):
    """The events of a step, and the reads of numbers among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch.no_grad():
            # A tensor may get other data later.
            own = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        made = func(*args, **kwargs)
        if func.namespace == "profiler":
            return made
        if func is _aten.lift_fresh.default:
            # A tensor of numbers of Python.
            self.note(f"{func} {made.tolist()}", [], [made.detach()], lambda: None)
            return made
        if is_read(func, args):
            self.reads.append(str(func))
        read = [x for x in pytree.tree_leaves(own) if isinstance(x, Tensor)]
        results = [x.detach() for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]
        given = set(map(storage_of, read))
        fresh = {storage_of(x) for x in results} - given
        text = pytree.tree_map_only(Tensor, lambda x: (str(x.dtype), *x.shape, x.stride()), own)
        forms = [(str(x.dtype), *x.shape) for x in results]

        def again() -> None:
            found = pytree.tree_leaves(func(*own[0], **own[1]))
            for old, new in zip(results, [x for x in found if isinstance(x, Tensor)], strict=True):
                if storage_of(old) in fresh:
                    old.copy_(new)

        does_nothing = func.is_view or func.overloadpacket in _EMPTY
        self.events.append(
            Event(f"{func} {text} -> {forms}", read, results, (lambda: None) if does_nothing else again, fresh)
        )
        return made

    def note(self, name: str, read: Sequence[Tensor], made: Sequence[Tensor], again: Callable[[], None]) -> None:
        """Note a message."""
        self.events.append(Event(name, [*read], [*made], again, set(map(storage_of, made))))


def tensors_of(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def copied(value: T) -> T:
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), value)  # type: ignore[no-any-return]


class Emulator:
    """A recorder for a rank that is a thread. The recorded run is real, so that the first replay has been done."""

    def __init__(self, communicator: ThreadCommunicator) -> None:
        self.now: Recording | None = None
        self.recordings: list[Recording] = []
        self.replays = 0
        self._plain = {n: getattr(communicator, n) for n in ("_exchange", "_send", "_recv", "flush")}
        for name in self._plain:
            setattr(communicator, name, partial(getattr(self, name)))

    def warm(self, run: Callable[[], T]) -> T:
        return run()

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        self.now = made = Recording()
        self.recordings.append(made)
        try:
            with made:
                found = run()
        finally:
            self.now = None
        todo = [[event.again for event in made.events], []]

        def replay() -> None:
            # The recorded run was the first one.
            now = todo.pop() if len(todo) > 1 else todo[0]
            self.replays += bool(now)
            with torch.no_grad():
                for again in now:
                    again()

        return found, replay

    # What ranks exchange.

    def _exchange(self, what: str, group: Any, value: Any, root: int | None = None) -> Callable[[], list[Any]]:
        if (now := self.now) is None:
            return self._plain["_exchange"](what, group, value, root)  # type: ignore[no-any-return]
        gets: list[Any] = []

        def start() -> None:
            # Another rank may read it when this one has gone on.
            gets[:] = [self._plain["_exchange"](what, group, copied(value), root)]

        with _disable_current_modes():
            start()
        now.note(f"start {what} {root}", tensors_of(value), [], start)

        def collect() -> list[Any]:
            with _disable_current_modes():
                arrived = copied(gets[0]())

            def again() -> None:
                for old, new in zip(tensors_of(arrived), tensors_of(gets[0]()), strict=True):
                    old.copy_(new)

            now.note(f"end {what}", [], tensors_of(arrived), again)
            return arrived

        return collect

    def _send(self, what: str, x: Tensor, peer: int, tag: int, owned: bool) -> None:
        if (now := self.now) is None:
            self._plain["_send"](what, x, peer, tag, owned)
            return
        with _disable_current_modes():
            own = x.detach()

            def again() -> None:
                self._plain["_send"](what, own.clone(), peer, tag, True)

            again()
        now.note(f"{what} {tag}", [own], [], again)

    def _recv(self, what: str, shape: Any, dtype: torch.dtype, peer: int, tag: int) -> Any:
        if (now := self.now) is None:
            return self._plain["_recv"](what, shape, dtype, peer, tag)
        handles: list[Any] = []

        def start() -> None:
            handles[:] = [self._plain["_recv"](what, shape, dtype, peer, tag)]

        start()
        now.note(f"start {what} {tag}", [], [], start)

        def get() -> Tensor:
            with _disable_current_modes():
                arrived: Tensor = handles[0].wait().clone()

            def again() -> None:
                arrived.copy_(handles[0].wait())

            now.note(f"end {what} {tag}", [], [arrived], again)
            return arrived

        return Later(get)

    def flush(self) -> None:
        with _disable_current_modes():
            self._plain["flush"]()
        if self.now is not None:
            self.now.note("flush", [], [], self._plain["flush"])


def differences(first: Recording, second: Recording) -> list[str]:
    """Return how two recorded steps differ: in an event, or in memory that was there before and is not the same."""
    if len(first.events) != len(second.events):
        return [f"{len(first.events)} events, then {len(second.events)}"]
    found, numbers = list[str](), (dict[int, int](), dict[int, int]())
    for own, other in zip(first.events, second.events, strict=True):
        if own.name != other.name:
            found.append(f"{own.name}\n  then {other.name}")
        for x, y in zip([*own.read, *own.made], [*other.read, *other.made], strict=True):
            places = [known.get(storage_of(z)) for known, z in zip(numbers, (x, y), strict=True)]
            is_made = storage_of(x) in own.fresh and storage_of(y) in other.fresh
            if places[0] != places[1]:
                found.append(f"{own.name}: other memory of the same step")
            elif places[0] is None and not is_made and storage_of(x) != storage_of(y):
                found.append(f"{own.name}: memory from before the step, which is not the same in both")
            for known, z in zip(numbers, (x, y), strict=True):
                known.setdefault(storage_of(z), len(known))
    return found


def on_recorders(compiled: Compiled, run: Callable[[Step, Emulator | None], T], is_recorded: bool = True) -> list[T]:
    """Return the results of `run` on the step of each rank of a plan, each in a thread, and its recorder."""
    values = as_in(compiled, initial_values(compiled.graph.model, compiled.graph.captured.values))
    plan, code = describe(compiled), modules(compiled.emitted.files)

    def work(communicator: ThreadCommunicator) -> T:
        recorder = Emulator(communicator) if is_recorded else None
        own = {name: value.clone() for name, value in values.items()}
        return run(build_step(plan, code, own, communicator, recorder=recorder), recorder)

    return run_ranks(compiled.program.world, work)
