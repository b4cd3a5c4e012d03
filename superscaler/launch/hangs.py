"""Ranks that wait for one that does something else: which one, since when, at which line; and the stacks of all."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

# Seconds that a rank waits before it says for whom, and the variable with seconds in their place.
WAIT, VARIABLE = 60.0, "SUPERSCALER_WAIT"
# In the folder of the plan.
STACKS = "stacks"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the own thread of a rank is: the steps that it has begun, whether it is in the plan's code, whether it
    waits for other ranks (there or elsewhere), the seconds without a change of these, its line in words, its machine.
    """

    calls: int
    is_inside: bool
    is_waiting: bool
    seconds: float
    line: str
    host: str

    @classmethod
    def of(cls, word: Mapping[str, Any]) -> Place:
        return cls(**{name: word[name] for name in cls.__slots__})


def late(own: int, places: Sequence[Place | None], limit: float) -> list[int]:
    """Return the ranks for which a rank has waited for so many seconds, if it is the first one to say so.

    They have not begun the last step that it has begun, or else, where it waits, neither wait nor run the plan's code.
    `places`: of all ranks, None for one that has ended.
    """
    me = places[own]
    if me is None or me.seconds < limit:
        return []
    there = {rank: place for rank, place in enumerate(places) if place is not None and rank != own}
    found = [rank for rank, place in there.items() if place.calls < me.calls]
    if not found and me.is_waiting:
        found = [rank for rank, place in there.items() if not place.is_waiting and not place.is_inside]
    return found if all(rank in found for rank in there if rank < own) else []


def warning(own: int, ranks: Sequence[int], places: Sequence[Place | None], folder: Path) -> str:
    """Return the warning of a rank, `own`, about the `ranks` for which it waits."""
    me, lines = places[own], list[str]()
    assert me is not None
    for rank in ranks:
        place = places[rank]
        assert place is not None
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - place.seconds))
        what = f"has not begun step {me.calls} of this run" if place.calls < me.calls else "does something else"
        lines.append(
            f"rank {rank} on {place.host} {what}: since {since} ({place.seconds:.0f} s) it has been {place.line}."
        )
    lines.append(
        f"rank {own} has waited for {me.seconds:.0f} s, {me.line}. The Python stacks of all ranks are in {folder}. "
        f"Training goes on when all come there; {VARIABLE}=SECONDS says this later."
    )
    return "\n".join(lines)


def line_of(stack: Iterable[tuple[FrameType, int]]) -> str:
    """Return the first line of a stack that is the user's, or else its first one, in words."""
    frames = list(stack)
    own = (pair for pair in frames if not pair[0].f_code.co_filename.startswith(_libraries()))
    found = next(own, frames[0] if frames else None)
    if found is None:
        return "nowhere"
    code, number = found[0].f_code, found[1]
    line = linecache.getline(code.co_filename, number).strip()[:120]
    return f"at {code.co_filename}:{number} in {code.co_name} ({line})"


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of Python's and installed modules, and of this package."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return (*paths, str(Path(__file__).parents[1]), "<frozen")


def folder_of(plan: str) -> Path:
    """Return the folder for the stacks of ranks: in that of the plan, or in one for temporary files."""
    is_free = os.access(plan, os.W_OK)
    return Path(plan, STACKS) if is_free else Path(tempfile.gettempdir(), f"superscaler-{STACKS}")


def write_stacks(folder: Path, rank: int, own: int) -> None:
    """Write the Python stacks of this process, its own thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda pair: pair[0] != own)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank{rank}.txt").open("w") as file:
        print(f"rank {rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", file=file)
        for number, frame in frames:
            print(f"\nthread {names.get(number, number)}:", *traceback.format_stack(frame), sep="\n", file=file)
