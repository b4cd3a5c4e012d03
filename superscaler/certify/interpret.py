"""The interpreter of a Program on any domain: it runs the instructions of all devices and matches each message and
collective at all of its ends.

A domain gives instructions their meaning; the certificate uses masks. One value stands for all devices of a cohort, so
the work grows with the number of distinct programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from superscaler.certify.meanings import MEANINGS
from superscaler.errors import ScheduleError, TransformError
from superscaler.ir import program as p
from superscaler.ir.cohorts import Cohort, cohorts
from superscaler.ir.grid import Ints
from superscaler.ir.running.machine import Domain as Code
from superscaler.ir.running.machine import Lap, Walk, execute
from superscaler.ir.running.meetings import Ends, rows_of
from superscaler.remembered import interned

V = TypeVar("V")


class Refusal(Exception):
    """A domain's refusal of an instruction. `row`: the first device of the cohort that it concerns."""

    def __init__(self, why: str, row: int = 0) -> None:
        super().__init__(why)
        self.why, self.row = why, row


class Domain(Protocol[V]):
    """The meaning of instructions. Every value has one row per device of the cohort that holds it."""

    def run(self, cohort: Cohort, at: int, read: Sequence[V | None]) -> Sequence[V]:
        """Return the values that an instruction writes. `read`: the values of its fields, in order; None is a gap. The
        values of its sums come last, None for one that it makes.
        """

    def start(self, cohort: Cohort, at: int, read: Sequence[V | None]) -> Sequence[V | None]:
        """Return the values given to a communication, as they are at its start. Later changes do not affect them."""

    def take(self, value: V, rows: Ints) -> V:
        """Return some rows of a value."""

    def join(self, how: p.Collective, part: int, members: Sequence[tuple[V, Ints]], position: Ints, group: Ints) -> V:
        """Return the result of a collective for its tensor `part`. Each row has its `group`, and its `position` in
        that.

        `members`: for each place in the group, a value and its row for each group.
        """

    def arrive(self, cohort: Cohort, at: int, recv: p.Instruction, value: V) -> V:
        """Return the value that a Wait makes of an arrived message or collective."""


@dataclass(eq=False)
class Post(Generic[V]):
    """A started communication: a message to or from `peers`, or the `count`-th collective over a group of them."""

    cohort: Cohort
    at: int
    read: Sequence[V | None]
    peers: Ints
    message: Ints
    count: int = 0


@dataclass(eq=False)
class _Group(Generic[V]):
    """The groups of a collective to which the devices of a cohort belong. `ends`, `posts`: for each place in them, the
    cohort of the members with their rows, and their started communication.
    """

    own: Ends
    ends: list[tuple[Run[V], Ints]]
    posts: list[list[Post[V]]]


@dataclass(eq=False)
class Run(Code[int, Any], Generic[V]):
    """The state of a cohort in its code: the values of its names, its started communication, and the posts that it may
    wait for.
    """

    machine: Interpreter[V]
    cohort: Cohort
    at: int = 0
    values: dict[p.Value, V] = field(default_factory=dict)
    gone: dict[p.Value, str] = field(default_factory=dict)
    handles: dict[p.Value, tuple[Post[V], int]] = field(default_factory=dict)
    sent: dict[int, list[Post[V]]] = field(default_factory=dict)
    collectives: dict[bytes, list[Post[V]]] = field(default_factory=dict)
    groups: dict[bytes, _Group[V]] = field(default_factory=dict)

    def step(self, at: int, i: int) -> bool:
        ran = self.machine.step(self)
        self.at += ran
        return ran


class Interpreter(Generic[V]):
    """An interpreter of a program on a domain."""

    def __init__(self, program: p.Program, domain: Domain[V]) -> None:
        self.program, self.domain = program, domain
        self.runs = [self.begin(cohort) for cohort in cohorts(program)]
        self.cohort_of, self.row_of = rows_of([run.cohort.devices for run in self.runs], program.world)

    def run(self) -> None:
        """Run the program. Raises ScheduleError with the device: for the first instruction that the domain refuses, and
        for devices that wait for a message that is never sent.
        """
        walks = [Walk(range(len(run.cohort.code)), run, self.laps(run)) for run in self.runs]
        for waiting in execute(walks, kept=1):
            raise ScheduleError(self._stuck(waiting.domain))
        for run in self.runs:
            for posts in run.sent.values():
                for post in posts:
                    raise ScheduleError(self._where(run, post.at, "no device receives it.", 0))

    def begin(self, cohort: Cohort) -> Run[V]:
        """Return the state of a cohort before its first instruction."""
        return Run(self, cohort)

    def laps(self, run: Run[V]) -> Sequence[Lap[Any]]:
        """Return the loops of a cohort whose repetitions may be left out."""
        return ()

    def step(self, run: Run[V]) -> bool:
        """Run the next instruction of a cohort; return False if it must wait."""
        try:
            return self._step(run, run.cohort.code[run.at])
        except Refusal as refusal:
            raise ScheduleError(self._where(run, run.at, refusal.why, refusal.row)) from None
        except (LookupError, ValueError, TypeError, TransformError) as error:
            # A program that was read from a file may have inconsistent numbers.
            why = f"does not fit what it is given ({error})."
            raise ScheduleError(self._where(run, run.at, why, 0)) from error

    def _step(self, run: Run[V], i: p.Instruction) -> bool:
        match i:
            case p.Free():
                for name in i.names:
                    if name not in run.values and name not in run.handles:
                        raise Refusal(f"frees {name}, {self._missing(run, name)}.")
                    run.values.pop(name, None)
                    run.handles.pop(name, None)
                    run.gone[name] = "which is freed"
                return True
            case p.Wait():
                return self._wait(run, i)
        read = [*self._read(run, i), *self._sums(run, i)]
        if isinstance(i, p.Send | p.Recv | p.Collective | p.Copy):
            self._start(run, i, read)
        else:
            self._write(run, i, self.domain.run(run.cohort, run.at, read))
        return True

    def _read(self, run: Run[V], i: p.Instruction) -> list[V | None]:
        found: list[V | None] = []
        given = (getattr(i, name) for name in p.FIELDS[type(i), p.Role.READ])
        for name in (name for some in given for name in ((some,) if isinstance(some, p.Value) else some)):
            if name is None or name == p.ONE:
                found.append(None)
            elif name in run.values:
                found.append(run.values[name])
            else:
                raise Refusal(f"reads {name}, {self._missing(run, name)}.")
        return found

    def _sums(self, run: Run[V], i: p.Instruction) -> Iterator[V | None]:
        for name in p.names(i, p.Role.SUM):
            if name in run.gone or name in run.handles:
                raise Refusal(f"adds to {name}, {run.gone.get(name, 'a handle')}.")
            yield run.values.get(name)

    def _missing(self, run: Run[V], name: p.Value) -> str:
        later = any(name in p.writes(i) for i in run.cohort.code[run.at :])
        return run.gone.get(name, "which is made later" if later else "which nothing makes")

    def _write(self, run: Run[V], i: p.Instruction, made: Sequence[V]) -> None:
        for name, value in zip(p.writes(i), made, strict=True):
            if name not in (*p.reads(i), *p.names(i, p.Role.SUM)):
                self._check_new(run, name)
            run.values[name] = value

    def _check_new(self, run: Run[V], name: p.Value) -> None:
        if name in run.values or name in run.handles:
            raise Refusal(f"makes {name}, which exists already.")
        if name == p.ONE:
            raise Refusal(f"makes {name}, the name of the gradient of the loss.")

    # Communication.

    def _start(self, run: Run[V], i: p.Instruction, read: Sequence[V | None]) -> None:
        cohort, at = run.cohort, run.at
        read = self.domain.start(cohort, at, read)
        if isinstance(i, p.Collective):
            group = np.ascontiguousarray(cohort.data(at, "group"))
            key = group.tobytes()
            if key not in run.collectives:
                self._check_group(cohort, group)
            posts = run.collectives.setdefault(key, [])
            post = Post(cohort, at, read, group, group[:, 0], len(posts))
            posts.append(post)
        elif isinstance(i, p.Copy):
            post = Post(cohort, at, read, cohort.devices, cohort.devices)
        else:
            assert isinstance(i, p.Send | p.Recv)
            peers = cohort.data(at, "peer")
            self._check_devices(peers)
            if (peers == cohort.devices).any():
                raise Refusal(
                    "sends to its own device or receives from it, which no message does.",
                    int(np.argmax(peers == cohort.devices)),
                )
            post = Post(cohort, at, read, peers, cohort.data(at, "message"))
            if isinstance(i, p.Send):
                run.sent.setdefault(int(self.cohort_of[peers[0]]), []).append(post)
        for part, name in enumerate(p.writes(i)):
            self._check_new(run, name)
            run.handles[name] = post, part

    def _check_devices(self, devices: Ints) -> None:
        wrong = (devices < 0) | (devices >= self.program.world)
        if wrong.any():
            row, *_ = np.argwhere(wrong)[0].tolist()
            raise Refusal(f"names device {devices[wrong][0]} of {self.program.world}.", row)

    def _check_group(self, cohort: Cohort, group: Ints) -> None:
        self._check_devices(group)
        mine = (group == cohort.devices[:, None]).sum(axis=1)
        if (mine != 1).any():
            row = int(np.argmax(mine != 1))
            raise Refusal(f"is over {group[row].tolist()}, which does not include this device.", row)
        ordered = np.sort(group, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        if twice.any():
            row = int(np.argmax(twice))
            raise Refusal(f"is over {group[row].tolist()}, which names a device twice.", row)

    def _wait(self, run: Run[V], i: p.Wait) -> bool:
        if i.work not in run.handles:
            raise Refusal(f"waits for {i.work}, {self._missing(run, i.work)}.")
        post, part = run.handles[i.work]
        started = run.cohort.code[post.at]
        if isinstance(started, p.Copy):
            value = post.read[0]
        else:
            value = self._message(run, post) if isinstance(started, p.Recv) else self._collective(run, post, part)
        if value is None:
            return False
        made = self.domain.arrive(run.cohort, run.at, started, value)
        run.handles.pop(i.work)
        run.gone[i.work] = "which is waited for already"
        self._write(run, i, [made])
        return True

    def _message(self, run: Run[V], post: Post[V]) -> V | None:
        """Return the value that arrived from the peers, or None if it is not sent yet."""
        senders = self.runs[self.cohort_of[post.peers[0]]]
        if (self.cohort_of[post.peers] != senders.cohort.number).any():
            raise Refusal("receives from devices that run other programs.")
        rows, sent_here = self.row_of[post.peers], senders.sent.get(run.cohort.number, [])
        for sent in sent_here:
            if sent.peers[rows[0]] != run.cohort.devices[0]:
                continue
            if ((sent.peers[rows] == run.cohort.devices) & (sent.message[rows] == post.message)).all():
                if len(rows) == len(senders.cohort):
                    sent_here.remove(sent)
                assert sent.read[0] is not None
                return self.domain.take(sent.read[0], rows)
        return None

    def _collective(self, run: Run[V], post: Post[V], part: int) -> V | None:
        """Return the result of a collective, or None if a member has not started it yet."""
        key = post.peers.tobytes()
        if key not in run.groups:
            run.groups[key] = self._group(run, post.peers)
        group, i = run.groups[key], run.cohort.code[post.at]
        assert isinstance(i, p.Collective)
        members = list[tuple[V, Ints]]()
        for k, (other, rows) in enumerate(group.ends):
            posts = group.posts[k] = group.posts[k] or self._posts(other, group.own.groups, rows)
            if len(posts) <= post.count:
                return None
            theirs, device = other.cohort.code[posts[post.count].at], group.own.groups[0, k]
            assert isinstance(theirs, p.Collective)
            if theirs is not i and _meeting(theirs) != _meeting(i):
                raise Refusal(f"meets {theirs.kind} of {theirs.bytes} bytes ({theirs.dtype}) on device {device}.")
            if MEANINGS[i.kind].from_one and k > 0:
                continue
            value = posts[post.count].read[part]
            if value is None:
                raise Refusal(f"is given nothing on device {device}.")
            members.append((value, rows))
        return self.domain.join(i, part, members, group.own.place, group.own.group)

    def _group(self, run: Run[V], peers: Ints) -> _Group[V]:
        own, ends = Ends.of(run.cohort.devices, peers), []
        for devices in own.groups.T:
            ends.append((self.runs[self.cohort_of[devices[0]]], interned(self.row_of[devices])))
            if (self.cohort_of[devices] != self.cohort_of[devices[0]]).any():
                raise Refusal("is over devices that run other programs.")
        return _Group(Ends(own.groups, interned(own.group), interned(own.place)), ends, [[] for _ in ends])

    @staticmethod
    def _posts(other: Run[V], distinct: Ints, rows: Ints) -> list[Post[V]]:
        """Return the communication that devices of a cohort have started over these groups."""
        for posts in other.collectives.values():
            group = posts[0].peers
            if group.shape[1] == distinct.shape[1] and np.array_equal(group[rows], distinct):
                return posts
        return []

    # Messages.

    def _where(self, run: Run[V], at: int, why: str, row: int) -> str:
        shown = self.program.describe(run.cohort.code[at])
        return f"device {run.cohort.devices[row]}, instruction {at}: {shown} {why}"

    def _stuck(self, run: Run[V]) -> str:
        i = run.cohort.code[run.at]
        assert isinstance(i, p.Wait)
        post, _ = run.handles[i.work]
        started = self.program.describe(run.cohort.code[post.at])
        others = ", ".join(map(str, np.atleast_1d(post.peers[0]).tolist()[:8]))
        return self._where(run, run.at, f"never ends: {started} is not met by devices {others}.", 0)


def _meeting(i: p.Collective) -> tuple[object, ...]:
    """Return the properties that all members of a collective must share."""
    return i.kind, len(i.ways), i.dtype, i.bytes, i.root
