"""E7: GPT-3 1.3B on one GPU, memory and seconds over the sequence."""

from __future__ import annotations

from models import SEQUENCES, long
from points import Rows
from report import POINTS, VERDICTS, bars, point_rows, table, verdict
from systems import SINGLE, single

PARTS = 8


def run(rows: Rows, quick: bool) -> str:
    sequences = SEQUENCES[:2] if quick else SEQUENCES
    found = {s: {name: rows.get(single(long(s), name, PARTS)) for name in SINGLE} for s in sequences}

    def longest(system: str) -> float | None:
        own = [s for s, row in found.items() if (point := row[system]) and point["fits"]]
        return max(own) if own and not quick and all(row[system] for row in found.values()) else None

    mine, again, offload = (longest(name) for name in ("co-shard", "recompute", "ZeRO-3 offload"))
    return "\n".join([
        "### E7. GPT-3 1.3B on one GPU, over the sequence\n",
        "Microbatches of one sequence; every layer is computed again.\n",
        table(POINTS, (line for s, row in found.items() for line in point_rows(str(s), row))),
        bars("e7", "E7: GB of one GPU (capacity 32)", {
            str(s): {name: p["peak"] / 1e9 if p else None for name, p in row.items()} for s, row in found.items()
        }, "GB"),
        table(VERDICTS, [
            verdict("longest sequence of co-shard over that of recompute", 1.7, mine and again and mine / again),
            verdict("over that of ZeRO-3 offload", 1.2, mine and offload and mine / offload),
            verdict("longest sequence of co-shard", 10240, mine),
        ]),
    ])  # fmt: skip
