"""E6: Swin on one GPU, memory and seconds over the size of the model."""

from __future__ import annotations

from families import LEAN, As, leaner
from figures import bars
from models import SWIN_SIZES, small_swin
from points import CAPACITY, Row, Rows
from report import POINTS, VERDICTS, point_rows, table, verdict
from systems import SINGLE, single

# What the paper does not say: the window of Swin, and what else than it takes memory.
ASSUMPTIONS: dict[str, tuple[int, As]] = {
    "windows of 48": (48, dict),
    f"windows of 48, {LEAN}": (48, leaner),
    "windows of 24": (24, dict),
    f"windows of 24, {LEAN}": (24, leaner),
}
Found = dict[int, dict[str, Row | None]]


def found_of(rows: Rows, window: int) -> Found:
    """Return the rows by size and system; those of another window only where they are known."""
    get = rows.get if window == 48 else lambda point: rows.known.get(point.key)
    return {
        size: {s: get(single(small_swin(size, window), s, parts)) for s in SINGLE}
        for size, (_, parts) in SWIN_SIZES.items()
    }


def largest(found: Found, system: str, as_if: As) -> int | None:
    """Return the largest size that fits, if one is known to."""
    fitting = [size for size, systems in found.items() if (row := systems[system]) and as_if(row)["fits"]]
    return max(fitting, default=None)


def run(rows: Rows) -> str:
    by_window = {window: found_of(rows, window) for window in (48, 24)}
    found = by_window[48]
    reached = {
        name: {s: largest(by_window[window], s, as_if) for s in SINGLE} for name, (window, as_if) in ASSUMPTIONS.items()
    }
    again, offload, mine = next(iter(reached.values())).values()
    return "\n".join([
        "### E6. Swin on one GPU, over its size\n",
        "Microbatches of one image of 1536 x 1536; every layer is recomputed.\n",
        table(POINTS, (line for size, row in found.items() for line in point_rows(f"{size} M", row))),
        bars("e6", "E6: peak memory of one GPU", {
            f"{size} M": {s: p["peak"] / 1e9 for s, p in row.items() if p} for size, row in found.items()
        }, "GB", (CAPACITY / 1e9, "its capacity")),
        table(VERDICTS, [
            verdict("largest model of co-shard, millions of parameters", 1300, mine),
            verdict("over that of recompute", 3.7, mine and again and mine / again, "the table below"),
            verdict("over that of ZeRO-3 offload", 3.7, mine and offload and mine / offload, "the table below"),
        ]),
        "The largest that fits, in millions, by what the paper does not say (its numbers: 351, 351, 1300):\n",
        table(("assumption", *SINGLE),
              ([name, *(str(size or "?") for size in row.values())] for name, row in reached.items())),
    ])  # fmt: skip
