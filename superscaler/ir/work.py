"""Schedules of pipelines as text: `2F0` is stage 2's forward of microbatch 0, as in torch.distributed.pipelining."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from superscaler.errors import InputError

_TEXT = re.compile(r"^(\d+)([FRBIW])(\d+)$")


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work of a stage: kind F, R (computed again), B, I or W of a microbatch.

    >>> str(Work.parse("2F0"))
    '2F0'
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def matches(text: str) -> bool:
        return _TEXT.match(text) is not None

    @staticmethod
    def parse(text: str) -> Work:
        found = _TEXT.match(text)
        if found is None:
            raise InputError(f"'{text}' is no piece of work; write stage, kind (F, R, B, I or W), microbatch, as 2F0.")
        return Work(int(found[1]), found[2], int(found[3]))


def print_schedule(rows: Sequence[Sequence[Work]]) -> str:
    """Return one line a stage."""
    return "\n".join(" ".join(map(str, row)) for row in rows)


def parse_schedule(text: str) -> list[list[Work]]:
    return [[Work.parse(word) for word in line.split()] for line in text.splitlines()]
