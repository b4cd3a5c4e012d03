"""The journal of a plan as rows, and as the text of `journal.txt`, which reads back."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from superscaler.groups import collect
from superscaler.ir.journal import Entry

# An effect, and the ops that it has at the end, whose names have no blanks.
_EFFECT = re.compile(r"(?P<effect>\w+.*?)(?: of (?P<ops>[\w.]+(?:, [\w.]+)*))?(?:; (?=\w+ )|$)")


class Row(NamedTuple):
    """A verb with its arguments, `where` the plan calls it, and its ops; no ops for an effect on the whole plan."""

    where: str
    effect: str
    ops: tuple[str, ...]


def rows(journal: Sequence[Entry]) -> list[Row]:
    """Return the effects of the lines of a plan. Places are relative to the package or the current folder."""
    found = []
    for where, entries in groupby(journal, lambda entry: entry.where):
        ops = collect((f"{entry.verb} {entry.detail}".rstrip(), entry.op) for entry in entries)
        found += [Row(_short(where), effect, tuple(names) if names[0] else ()) for effect, names in ops.items()]
    return found


def text(found: Sequence[Row]) -> str:
    """Return rows as lines, one for each line of the plan: `plan.py:3: op_trans Split('batch', parts=2) of a, b`."""
    lines = []
    for where, some in groupby(found, lambda row: row.where):
        effects = (row.effect + (f" of {', '.join(row.ops)}" if row.ops else "") for row in some)
        lines.append(f"{where}: {'; '.join(effects)}\n")
    return "".join(lines)


def parse(journal: str) -> list[Row]:
    """Return the rows of a text; `parse(text(rows)) == rows`."""
    return [row for line in journal.splitlines() for row in _row(line)]


def _row(line: str) -> Iterator[Row]:
    where, _, effects = line.partition(": ")
    for found in _EFFECT.finditer(effects):
        yield Row(where, found["effect"], tuple(found["ops"].split(", ")) if found["ops"] else ())


def _short(where: str) -> str:
    for folder in (Path(__file__).parents[2], Path.cwd()):
        if where.startswith(f"{folder}{os.sep}"):
            return where[len(str(folder)) + 1 :]
    return where.rpartition(os.sep)[2]
