"""The communicator inside one process: a thread a rank, mailboxes for messages. Sums are added in group order.

It is stricter than `torch.distributed`: tags, shapes and operations that do not match on both sides are errors, and
a deadlock of all ranks is reported immediately instead of hanging.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor

from superscaler.comm import communicator as c
from superscaler.comm.communicator import Group, Handle, PeerLost
from superscaler.errors import PlanError, RuntimeFailure

T = TypeVar("T")
# The sender, the receiver, and the number of a message.
Letter = tuple[int, int, int]


def run_ranks(
    world: int, function: Callable[[ThreadCommunicator], T], timeout: float = 60.0, device: str = "cpu"
) -> list[T]:
    """Call the function once a rank, each in a thread, and return their results by rank.

    If a rank raises, the others are woken and end, and its error is raised again: a PlanError as its own class, any
    other as RuntimeFailure, both naming the rank. `timeout`: seconds that a rank may wait for one message. `device`:
    that of the tensors of all ranks.
    """
    hub = _Hub(world, timeout)
    results: dict[int, T] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(hub, rank, torch.device(device)))
            hub.end(rank, None)
        except BaseException as error:
            # It ends in this thread: the calling thread raises it.
            hub.end(rank, error)

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
    """One collective: the values of the ranks, and how many ranks have read it, or never will."""

    what: str
    brought: dict[int, Any] = field(default_factory=dict)
    readers: int = 0


class _Hub:
    """The state that ranks share, under one condition."""

    def __init__(self, world: int, timeout: float) -> None:
        self.world = world
        self.timeout = timeout
        self.changed = threading.Condition()
        self.failure: tuple[int, BaseException] | None = None
        self.running = set(range(world))
        self.waiting: dict[int, _Waiting] = {}
        self.letters: dict[Letter, tuple[int, Tensor]] = {}
        self.awaited: set[Letter] = set()
        self.meetings: dict[tuple[Group, int], _Meeting] = {}

    def end(self, rank: int, error: BaseException | None) -> None:
        with self.changed:
            self.running.discard(rank)
            if error is not None and self.failure is None:
                self.failure = rank, error
            self.changed.notify_all()

    def wait_for_end(self) -> None:
        """Wait until all ranks ended, after a failure at most `timeout` longer: a rank may be busy without end."""
        with self.changed:
            self.changed.wait_for(lambda: not self.running or self.failure is not None)
            self.changed.wait_for(lambda: not self.running, self.timeout if self.failure is not None else None)

    def wait(self, rank: int, is_ready: Callable[[], bool], what: str) -> None:
        """Wait, with the condition held, until `is_ready`. Raises RuntimeFailure when that is impossible."""
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


class ThreadCommunicator(c.Communicator):
    """A rank of `run_ranks`. Sent tensors are copied, so that ranks share no memory: immediately, or (if `owned`) on
    receipt, the latest moment at which a network may read them.
    """

    def __init__(self, hub: _Hub, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.world = hub.world
        self.device = device
        self._hub = hub
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._entered: Counter[Group] = Counter()

    def prepare(self, groups: Sequence[Group]) -> None:
        """Check that all ranks name the same groups."""
        named = sorted({tuple(group) for group in groups})
        self._exchange(f"prepare of {named} over ranks {self._everyone()}", self._everyone(), None)()

    def _reduce(
        self, what: str, group: Group, x: Tensor, owned: bool, largest: bool = False, root: int | None = None
    ) -> Handle:
        parts = self._exchange(f"{what}, the largest" if largest else what, group, _copy(x), root)
        return c.Later(lambda: reduce(torch.maximum, parts()) if largest else c.sum_in_order(parts()))

    def _gather(self, what: str, group: Group, x: Tensor, dim: int, root: int | None = None) -> Handle:
        parts = self._exchange(what, group, _copy(x), root)
        return c.Later(lambda: c.join(parts(), dim))

    def _swap(self, what: str, group: Group, chunks: Sequence[Tensor], finish: c.Finish) -> Handle:
        parts, mine = self._exchange(what, group, list(map(_copy, chunks))), group.index(self.rank)
        return c.Later(lambda: finish([chunks[mine] for chunks in parts()]))

    def _spread(self, what: str, group: Group, buffer: Tensor, source: int) -> Handle:
        parts = self._exchange(f"{what} from rank {source}", group, _copy(buffer))
        return c.Later(lambda: _copy(parts()[group.index(source)]))

    def _send(self, what: str, x: Tensor, peer: int, tag: int, owned: bool) -> None:
        number = self._sent[peer]
        self._sent[peer] += 1
        with self._hub.changed:
            self._hub.letters[self.rank, peer, number] = tag, x.detach() if owned else _copy(x)
            self._hub.changed.notify_all()

    def _recv(self, what: str, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int) -> Handle:
        key = peer, self.rank, self._received[peer]
        self._received[peer] += 1
        with self._hub.changed:
            self._hub.awaited.add(key)
            self._hub.changed.notify_all()
        return c.Later(lambda: self._open(f"{what}, message {key[2]}, tag {tag}", key, shape, dtype, tag))

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None:
        """Do nothing: tensors are handed on as they are."""

    def barrier(self) -> None:
        self._exchange(f"barrier over ranks {self._everyone()}", self._everyone(), None)()

    def flush(self) -> None:
        """Wait until all messages of this rank are received."""
        letters, awaited = self._hub.letters, self._hub.awaited

        def left() -> list[Letter]:
            return [key for key in letters if key[0] == self.rank]

        with self._hub.changed:
            self._hub.wait(self.rank, lambda: awaited.issuperset(left()), f"{self.prefix}its sends")
            letters.update({key: (letters[key][0], _copy(letters[key][1])) for key in left()})

    def close(self) -> None:
        """Do nothing: this communicator holds nothing."""

    def _everyone(self) -> Group:
        return tuple(range(self.world))

    def _open(self, what: str, key: Letter, shape: tuple[int, ...], dtype: torch.dtype, tag: int) -> Tensor:
        with self._hub.changed:
            self._hub.wait(self.rank, lambda: key in self._hub.letters, what)
            sent_tag, x = self._hub.letters.pop(key)
            self._hub.awaited.discard(key)
            x = _copy(x)
            self._hub.changed.notify_all()
        if sent_tag != tag or tuple(x.shape) != shape or x.dtype != dtype:
            came = f"{tuple(x.shape)} {x.dtype} with tag {sent_tag}"
            raise RuntimeFailure(f"{what}: expected {shape} {dtype}, but {came} came.")
        return x

    def _exchange(self, what: str, group: Group, value: T, root: int | None = None) -> Callable[[], list[T]]:
        """Bring a value to the group's next meeting; return a wait for all, to be called only by the `root`, if any."""
        key, absent = (group, self._entered[group]), 0
        if root is not None:
            what, absent = f"{what} to rank {group[root]}", len(group) - 1
        self._entered[group] += 1
        with self._hub.changed:
            meeting = self._hub.meetings.setdefault(key, _Meeting(what, {}, absent))
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
