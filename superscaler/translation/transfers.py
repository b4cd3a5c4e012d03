"""The communication and the copies of emitted code on symbols, beside those of its program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from superscaler.collectives import KINDS
from superscaler.ir import program as p
from superscaler.ir.program import Device, Instruction, Program, Role
from superscaler.translation import collectives
from superscaler.translation.beside import Beside
from superscaler.translation.data import Data, Spot
from superscaler.translation.values import Differs, Held, View


class Transfers(Beside):
    """The calls of `rt` that start transfers or wait for them. `data`: of each device whose data are compared."""

    def __init__(self, program: Program, device: Device, data: Sequence[Data]) -> None:
        super().__init__(program, device)
        self.data = data

    def __getattr__(self, name: str) -> Any:
        kind = name.removesuffix("_bucket")
        if kind in KINDS:
            return partial(self._collective, kind, kind != name)
        raise Differs(f"rt.{name} is no call of emitted code")

    def _collective(self, kind: str, is_bucket: bool, given: Any, group: int, *more: Any, **options: Any) -> Any:
        i, spot = self.take(p.Collective, f"rt.{kind}")
        self._same("the collective", (kind, is_bucket), (i.kind, len(i.works) > 1 or bool(i.wide)))
        self._entry(spot, "groups", group, Role.GROUP, lambda j: j.group)
        self._given(i, given if is_bucket else [given])
        if is_bucket and collectives.has_slots(i.ways[0]):
            self._entry(spot, "ways", options.pop("ways", None), Role.NOTE, collectives.ways)
        found = (more, options) if is_bucket else collectives.given(kind, more, options)
        self._same(f"the arguments of rt.{kind}", found, (collectives.bucket if is_bucket else collectives.wanted)(i))
        made = [None if name is None else self._bind(name) for name in i.works]
        return made if is_bucket else made[0]

    def _given(self, i: p.Collective, given: Any) -> None:
        """Compare the sources of a collective; alone, those that are cut are in slots."""
        is_alone = len(i.works) == 1 and not i.wide
        plain = [x.of if isinstance(x, View) else x for x in given]
        self._reads(f"rt.{i.kind}", plain, i.sources)
        for x, way in zip(given, i.ways, strict=True):
            is_cut = is_alone and x is not None and way.view != way.local and collectives.has_slots(way)
            self._same("the shape of a source", x.shape if isinstance(x, View) else None, way.view if is_cut else None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the messages inside start together."""
        if self._inside:
            raise Differs("messages that start together are inside of others")
        self._inside = True
        yield
        self._inside = self._joined = False

    def _message(self, i: p.Send | p.Recv, spot: Spot, number: int) -> None:
        """Compare a message. It starts with the one before if both have one point."""
        if self._joined if i.point != self._point else not (self._inside and self._joined):
            raise Differs(f"the message of {(p.writes(i) or p.reads(i))[0]} starts with others than in the program")
        self._point, self._joined = i.point, self._inside
        self._entry(spot, "messages", number, Role.PEER, lambda j: (j.peer, j.message))

    def send(self, x: object, message: int) -> None:
        i, spot = self.take(p.Send, "rt.send")
        self._reads("rt.send", x, (i.source,))
        self._message(i, spot, message)

    def recv(self, message: int, shape: Sequence[int], dtype: str) -> Held:
        i, spot = self.take(p.Recv, "rt.recv")
        self._same("rt.recv", (shape, dtype), (i.shape, i.dtype))
        self._message(i, spot, message)
        return self._bind(i.work)

    def to_host(self, x: object) -> Held:
        return self._copy(x, is_to_host=True)

    def to_device(self, x: object) -> Held:
        return self._copy(x, is_to_host=False)

    def _copy(self, x: object, is_to_host: bool) -> Held:
        i, _ = self.take(p.Copy, "a copy")
        self._reads("a copy", x, (i.source,))
        self._same("whether it goes to the host", is_to_host, i.to_host)
        return self._bind(i.work)

    def arrive(self, work: Held, shape: Sequence[int]) -> Held:
        """Wait for something started. Waits with nothing between them are in any order."""
        if not self._waits:
            i, _ = self.take(p.Wait, "wait")
            self._waits[id(self._env[i.work])] = i
            while self._next is not None and self._is_among_waits(self._next[0]):
                self._next = next(self._code, None)
        if id(work) not in self._waits:
            raise Differs("what is waited for is not what the program waits for")
        i = self._waits.pop(id(work))
        self._same(f"the shape of {i.out}", shape, i.shape)
        self._end([i.work])
        return self._bind(i.out)

    def _is_among_waits(self, i: Instruction) -> bool:
        """Return whether an instruction is one more wait, which is noted, or one of weights at rest, which is done."""
        if isinstance(i, p.Wait):
            self._waits[id(self._env[i.work])] = i
        elif isinstance(i, p.Free) and all(self._env.get(name) in self._rest for name in i.names):
            self._end(i.names)
        else:
            return isinstance(i, p.Load) and self._is_silent(i)
        return True

    def wait_all(self, works: Sequence[Held], shapes: int) -> list[Held]:
        found = self._of_all("shapes", shapes)
        return [self.arrive(work, tuple(shape)) for work, shape in zip(works, found, strict=True)]

    def _of_all(self, table: str, number: int) -> Any:
        """Return an entry of a table that is equal on all devices."""
        first, *others = [data.tables[table][number] for data in self.data]
        for other in others:
            self._same(f"entry {number} of {table}", other, first)
        return first
