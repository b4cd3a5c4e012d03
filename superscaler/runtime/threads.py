"""The communicator inside one process: a thread a rank, mailboxes for messages. Sums are added in group order.

Stricter than `torch.distributed`: tags, shapes and operations that do not match on both sides are errors, and a set
of ranks that all wait for each other is reported at once instead of hanging.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor

from superscaler.errors import PlanError, RuntimeFailure
from superscaler.runtime.communicator import (
    Counted,
    Done,
    Group,
    PeerLost,
    Work,
    given,
    join,
    once,
    position,
    split,
    sum_in_order,
)

T = TypeVar("T")


def run_ranks(world: int, function: Callable[[ThreadCommunicator], T], timeout: float = 60.0) -> list[T]:
    """Call the function once a rank, each in a thread, and return their results by rank.

    If a rank raises, the others are woken and end, and its error is raised again: a PlanError as its own class, any
    other as RuntimeFailure, both naming the rank. `timeout` is what a rank may wait for one message, in seconds.
    """
    hub = _Hub(world, timeout)
    results: dict[int, T] = {}

    def body(rank: int) -> None:
        with _Running(hub, rank):
            results[rank] = function(ThreadCommunicator(hub, rank))

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    hub.wait_for_end()
    if hub.failure is not None:
        _raise(*hub.failure)
    return [results[rank] for rank in range(world)]


def _raise(rank: int, error: BaseException) -> None:
    if isinstance(error, PlanError):
        raise type(error)(f"rank {rank}: {error}") from error
    if not isinstance(error, Exception):
        raise error
    raise RuntimeFailure(f"rank {rank} failed: {type(error).__name__}: {error}") from error


@dataclass(slots=True)
class _Waiting:
    is_ready: Callable[[], bool]
    what: str


@dataclass(slots=True)
class _Meeting:
    """One collective: what each rank brought, and how many have read it."""

    what: str
    brought: dict[int, Any] = field(default_factory=dict)
    readers: int = 0


class _Hub:
    """What the ranks share, all under one condition."""

    def __init__(self, world: int, timeout: float) -> None:
        self.world = world
        self.timeout = timeout
        self.changed = threading.Condition()
        self.failure: tuple[int, BaseException] | None = None
        self.running = set(range(world))
        self.waiting: dict[int, _Waiting] = {}
        self.letters: dict[tuple[int, int, int], tuple[int, Tensor]] = {}
        self.meetings: dict[tuple[Group, int], _Meeting] = {}

    def end(self, rank: int, error: BaseException | None) -> None:
        with self.changed:
            self.running.discard(rank)
            if error is not None and self.failure is None:
                self.failure = rank, error
            self.changed.notify_all()

    def wait_for_end(self) -> None:
        """Wait until all ranks ended, after a failure at most `timeout` more: a rank may be busy without end."""
        with self.changed:
            self.changed.wait_for(lambda: not self.running or self.failure is not None)
            self.changed.wait_for(lambda: not self.running, self.timeout if self.failure is not None else None)

    def wait(self, rank: int, is_ready: Callable[[], bool], what: str) -> None:
        """Wait, with the condition held, until `is_ready`. Raises RuntimeFailure when that cannot come."""
        deadline = monotonic() + self.timeout
        self.waiting[rank] = _Waiting(is_ready, what)
        try:
            while not is_ready():
                if self.failure is not None:
                    raise PeerLost(f"{what} was given up, because rank {self.failure[0]} failed.")
                self._check_progress(deadline)
                self.changed.wait(max(0.0, deadline - monotonic()))
        finally:
            del self.waiting[rank]

    def _check_progress(self, deadline: float) -> None:
        is_stuck = all(r in self.waiting and not self.waiting[r].is_ready() for r in self.running)
        if not is_stuck and monotonic() < deadline:
            return
        reason = "no rank can go on" if is_stuck else f"a message did not come within {self.timeout:g} s"
        state = {r: f"waits for {self.waiting[r].what}" if r in self.waiting else "computes" for r in self.running}
        lines = [f"  rank {r} {state.get(r, 'has ended')}" for r in range(self.world)]
        raise RuntimeFailure(
            "\n".join([f"{reason}:", *lines, "Both sides must call the same operations in one order."])
        )


class _Running:
    """Tells the hub how a rank's thread ended. An error goes no further here: the calling thread raises it again."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self._hub.end(self._rank, error)
        return True


class _Pending:
    def __init__(self, get: Callable[[], Tensor]) -> None:
        self._get = once(get)

    def wait(self) -> Tensor:
        return self._get()


class ThreadCommunicator(Counted):
    """A rank of `run_ranks`. Everything sent is copied, so that ranks share no memory."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self.rank = rank
        self.world = hub.world
        self.device = torch.device("cpu")
        self._hub = hub
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._entered: Counter[Group] = Counter()

    def prepare(self, groups: Sequence[Group]) -> None:
        """Nothing has to be made, but all ranks must name the same groups."""
        named = sorted({tuple(group) for group in groups})
        self._exchange(f"prepare of {named}", self._everyone(), None)()

    def all_reduce(self, x: Tensor, group: Group, *, owned: bool = False, planned: bool = True) -> Work:
        if len(group) == 1:
            return Done(x if owned else x.detach().clone())
        parts = self._exchange(f"all_reduce of {_describe(x)}", group, _copy(x))
        self.count("all_reduce", x.nbytes, group, planned=planned)
        return _Pending(lambda: sum_in_order(parts()))

    def all_gather(self, x: Tensor, group: Group, dim: int) -> Work:
        if len(group) == 1:
            return Done(x)
        parts = self._exchange(f"all_gather of {_describe(x)}", group, _copy(x))
        self.count("all_gather", x.nbytes, group)
        return _Pending(lambda: join(parts(), dim))

    def reduce_scatter(self, x: Tensor, group: Group, dim: int) -> Work:
        if len(group) == 1:
            return Done(x)
        mine = position(self.rank, group, "reduce_scatter")
        chunks = split(_copy(x), len(group), dim, f"reduce_scatter over ranks {group}")
        parts = self._exchange(f"reduce_scatter of {_describe(x)}", group, chunks)
        self.count("reduce_scatter", x.nbytes, group)
        return _Pending(lambda: sum_in_order([chunks[mine] for chunks in parts()]))

    def all_to_all(self, x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Work:
        if len(group) == 1:
            return Done(x)
        mine = position(self.rank, group, "all_to_all")
        chunks = split(_copy(x), len(group), split_dim, f"all_to_all over ranks {group}")
        parts = self._exchange(f"all_to_all of {_describe(x)}", group, chunks)
        self.count("all_to_all", x.nbytes, group)
        return _Pending(lambda: join([chunks[mine] for chunks in parts()], concat_dim))

    def broadcast(self, x: Tensor | None, source: int, group: Group, shape: Sequence[int], dtype: torch.dtype) -> Work:
        mine = given(x, self.rank, source, group, shape, dtype)
        if mine is not None and len(group) == 1:
            return Done(mine)
        value = None if mine is None else _copy(mine)
        parts = self._exchange(f"broadcast of {tuple(shape)} {dtype} from rank {source}", group, value)
        self.count("broadcast", prod(shape) * dtype.itemsize, group)
        return _Pending(lambda: _copy(_present(parts()[group.index(source)])))

    def send(self, x: Tensor, peer: int, tag: int, *, owned: bool = False) -> None:
        self._check_peer(peer, "send")
        self.count("send", x.nbytes, (self.rank, peer))
        number = self._sent[peer]
        self._sent[peer] += 1
        with self._hub.changed:
            self._hub.letters[self.rank, peer, number] = tag, _copy(x)
            self._hub.changed.notify_all()

    def recv(self, shape: Sequence[int], dtype: torch.dtype, peer: int, tag: int) -> Work:
        self._check_peer(peer, "recv")
        key = peer, self.rank, self._received[peer]
        self._received[peer] += 1
        return _Pending(lambda: self._open(key, tuple(shape), dtype, tag))

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def barrier(self) -> None:
        self._exchange("barrier", self._everyone(), None)()

    def flush(self) -> None:
        """Sends are done when they are started."""

    def close(self) -> None:
        """Nothing is held."""

    def _everyone(self) -> Group:
        return tuple(range(self.world))

    def _check_peer(self, peer: int, operation: str) -> None:
        if peer == self.rank or not 0 <= peer < self.world:
            raise RuntimeFailure(f"{operation}: peer {peer} must be another of the {self.world} ranks.")

    def _open(self, key: tuple[int, int, int], shape: tuple[int, ...], dtype: torch.dtype, tag: int) -> Tensor:
        what = f"recv from rank {key[0]}, message {key[2]}, tag {tag}"
        with self._hub.changed:
            self._hub.wait(self.rank, lambda: key in self._hub.letters, what)
            sent_tag, x = self._hub.letters.pop(key)
        if sent_tag != tag or tuple(x.shape) != shape or x.dtype != dtype:
            raise RuntimeFailure(f"{what}: expected {shape} {dtype}, but {_describe(x)} with tag {sent_tag} came.")
        return x

    def _exchange(self, operation: str, group: Group, value: T) -> Callable[[], list[T]]:
        """Bring a value to the group's next meeting; return what waits for those of all, in group order."""
        position(self.rank, group, operation)
        key = group, self._entered[group]
        self._entered[group] += 1
        what = f"{operation} over ranks {group}"
        with self._hub.changed:
            meeting = self._hub.meetings.setdefault(key, _Meeting(what))
            if meeting.what != what:
                raise RuntimeFailure(f"{what} meets {meeting.what} of another rank.")
            meeting.brought[self.rank] = value
            self._hub.changed.notify_all()
        return lambda: self._collect(key, meeting)

    def _collect(self, key: tuple[Group, int], meeting: _Meeting) -> list[Any]:
        group = key[0]
        with self._hub.changed:
            self._hub.wait(self.rank, lambda: len(meeting.brought) == len(group), meeting.what)
            meeting.readers += 1
            if meeting.readers == len(group):
                del self._hub.meetings[key]
        return [meeting.brought[rank] for rank in group]


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"


def _present(x: T | None) -> T:
    assert x is not None
    return x
