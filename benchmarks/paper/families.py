"""E2 to E5: the four families end to end, in weak scaling on 4, 8, 16 and 32 GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from models import GPUS
from points import OTHERS, Row, Rows
from report import POINTS, bars, point_rows, ratio, table
from systems import CLUSTERS, spaces

# gpus -> system -> its best row.
Found = Mapping[int, Mapping[str, Row | None]]


def found_of(rows: Rows, family: str, variant: str = "", lean: bool = False) -> Found:
    """Return the best row of each system; of those clusters alone that have this variant, if one is given."""
    clusters = {gpus: OTHERS.get(CLUSTERS[gpus], {}).get(variant, "") for gpus in GPUS}
    return {
        gpus: {system: rows.best(ladders, lean) for system, ladders in spaces(family, gpus, clusters[gpus]).items()}
        for gpus in GPUS
        if clusters[gpus] or not variant
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


def varied(rows: Rows, family: str, ours: str, other: str) -> str:
    """Return by how much ours is faster at most where one assumption is another, as far as that is known."""
    found = {variant: found_of(rows, family, variant) for variant in OTHERS[CLUSTERS[GPUS[-1]]]}
    found["12 bytes a parameter"] = found_of(rows, family, lean=True)
    gains = ((variant, most(rows, ours, other)) for variant, rows in found.items())
    return "; ".join(f"{variant}: {gain:.2g}" for variant, gain in gains if gain)
