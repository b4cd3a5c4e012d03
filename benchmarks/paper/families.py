"""E2 to E5: the four families end to end, in weak scaling on 4, 8, 16 and 32 GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from models import GPUS
from points import Row, Rows
from report import POINTS, bars, point_rows, ratio, table
from systems import spaces

# gpus -> system -> its best row.
Found = Mapping[int, Mapping[str, Row | None]]


def found_of(rows: Rows, family: str, quick: bool) -> Found:
    return {
        gpus: {system: rows.best(ladders) for system, ladders in spaces(family, gpus).items()}
        for gpus in (GPUS[:1] if quick else GPUS)
    }


def shown(name: str, title: str, found: Found) -> list[str]:
    """Return the table and the figure of a family."""
    return [
        f"### {title}\n",
        table(POINTS, (line for gpus, row in found.items() for line in point_rows(f"{gpus} GPUs", row))),
        bars(name, f"{title}, TFLOPS of all GPUs", {
            f"{gpus}": {s: p["tflops"] if p and p.get("fits") else None for s, p in row.items()}
            for gpus, row in found.items()
        }, "TFLOPS"),
    ]  # fmt: skip


def most(found: Found, ours: str, other: str) -> float | None:
    """Return by how much ours is faster at most."""
    gains = [gain for row in found.values() if (gain := ratio(row.get(ours), row.get(other)))]
    return max(gains, default=None)
