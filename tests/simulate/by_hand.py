"""Programs for the clock: by hand, work of so many seconds and communication of so many bytes; and chains of layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.cluster.links import Link, Links
from superscaler.ir import program as p
from superscaler.ir.cohorts import Cohort
from superscaler.ir.loops import Rolled
from superscaler.ir.model import Model
from superscaler.ir.program import CollectiveArg, Device, Instruction, Program, Value
from superscaler.simulate.clock import Behavior, clock
from superscaler.simulate.timetable import Timetable
from tests.helpers.ran import Around, captured

KINDS = ("compute", "optimizer", "launch", "exposed", "copies", "bubble")
MODEL = Model({}, (), {}, (), "", None, {}, {})  # type: ignore[arg-type]
# Updates take this long.
UPDATE = 2.0


def run(seconds: float) -> Instruction:
    return p.Load(Value("work"), str(seconds), ())


def _handle(name: str) -> Value:
    return Value(name, is_handle=True)


def reduced(name: str, group: Sequence[int], size: int) -> Instruction:
    way = CollectiveArg((size,), -1, -1, (size,), (size,))
    return p.Collective("all_reduce", (_handle(name),), (Value("x"),), tuple(group), (way,), "bool", size)


def sent(peer: int, message: int, size: int, point: int = -1) -> Instruction:
    return p.Send(Value("x"), peer, message, size, message if point < 0 else point)


def received(name: str, peer: int, message: int, size: int, point: int = -1) -> Instruction:
    return p.Recv(_handle(name), peer, message, (size,), "bool", message if point < 0 else point)


def copied(name: str, size: int, to_host: bool = True) -> Instruction:
    return p.Copy(_handle(name), Value("x"), to_host, size)


def wait(name: str) -> Instruction:
    return p.Wait(Value(name), _handle(name), ())


UPDATES = p.Update((Value("w"),), (Value("g"),))
END = p.Loss((), ())


def made_of(*codes: Sequence[Instruction]) -> Program:
    return Program(
        MODEL,
        (),
        tuple(Device(rank, (), code if isinstance(code, Rolled) else tuple(code)) for rank, code in enumerate(codes)),
    )


def work(cohort: Cohort, at: int) -> float:
    i = cohort.code[at]
    if isinstance(i, p.Load):
        return float(i.tensor)
    return UPDATE if isinstance(i, p.Update) else 0.0


def cluster(servers: int, per_server: int, alpha: float = 0.0, bandwidth: float = 1.0) -> ss.Cluster:
    """Return servers with one NIC each. Every link moves `bandwidth` bytes a second."""
    link = Link(alpha, bandwidth)
    return ss.Cluster.of("made", "a100", servers, per_server, Links(link, link, link, link, 1, link))


def timed(where: ss.Cluster, *codes: Sequence[Instruction], **options: Any) -> Timetable:
    """Return the times of codes, by which each device spends all of its time on something."""
    found = clock(made_of(*codes), where, work, Behavior(**options))
    check_sums(found)
    return found


def check_sums(found: Timetable) -> None:
    """Check that the time of each device, and the critical path, sum up to that of the step."""
    total = sum(getattr(found, kind) for kind in KINDS)
    assert abs(total - found.seconds).max() <= 1e-9 * found.seconds
    assert min(getattr(found, kind).min() for kind in KINDS) >= 0
    assert abs(sum(link.seconds for link in found.path) - found.seconds) <= 1e-9 * found.seconds
    for lane in found.lanes:
        assert (lane.start <= lane.end).all()
        for stream in range(len(lane.streams)):
            start, end = lane.start[lane.stream == stream], lane.end[lane.stream == stream]
            # What is on one stream comes one after the other.
            assert (end[:-1] <= start[1:] + 1e-9).all()


def in_turn(m: Around, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x)
    return x.sum()


def linear(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(2, 2) for _ in range(count))


@cache
def chain(count: int, microbatches: int) -> ss.Graph:
    return captured(lambda: (Around(in_turn, layers=linear(count)), torch.randn(microbatches, 2)))
