"""E7: GPT-3 1.3B on one GPU, memory and seconds over the sequence."""

from __future__ import annotations

from models import SEQUENCES, long
from points import Row, Rows
from report import POINTS, VERDICTS, bars, point_rows, table, verdict
from systems import SINGLE, single

PARTS = 8
CAPACITY = 32e9
# What the paper does not say: the dtype of the softmax, and whether gradients are added up in 16 bits.
ASSUMPTIONS = {
    "softmax and gradients as here": ("float16", 0),
    "gradients in 16 bits": ("float16", 0.5),
    "softmax in float32": ("float32", 0),
    "softmax in float32, gradients in 16 bits": ("float32", 0.5),
}
Found = dict[int, dict[str, Row | None]]


def found_of(rows: Rows, softmax: str) -> Found:
    """Return the rows by sequence and system; those of another softmax only where they are known."""
    get = rows.get if softmax == "float16" else lambda point: rows.known.get(point.key)
    return {s: {name: get(single(long(s, softmax), name, PARTS)) for name in SINGLE} for s in SEQUENCES}


def longest(found: Found, system: str, less: float) -> int | None:
    """Return the longest sequence that fits, if it is known to; `less`: a share of the gradients that is not there."""
    known = {s: row for s, systems in found.items() if (row := systems[system])}
    fitting = [s for s, row in known.items() if row["peak"] - less * row["memory"].get("gradients", 0) <= CAPACITY]
    return max(fitting, default=None)


def run(rows: Rows) -> str:
    by_softmax = {softmax: found_of(rows, softmax) for softmax in ("float16", "float32")}
    found = by_softmax["float16"]
    reached = {
        name: {system: longest(by_softmax[softmax], system, less) for system in SINGLE}
        for name, (softmax, less) in ASSUMPTIONS.items()
    }
    first = reached["softmax and gradients as here"]
    mine, again, offload = (first[system] for system in ("co-shard", "recompute", "ZeRO-3 offload"))
    cause = "bytes of a parameter and the softmax: the table below"
    return "\n".join([
        "### E7. GPT-3 1.3B on one GPU, over the sequence\n",
        "Microbatches of one sequence; every layer is recomputed.\n",
        table(POINTS, (line for s, row in found.items() for line in point_rows(str(s), row))),
        bars("e7", "E7: GB of one GPU (capacity 32)", {
            str(s): {name: p["peak"] / 1e9 if p else None for name, p in row.items()} for s, row in found.items()
        }, "GB"),
        table(VERDICTS, [
            verdict("longest sequence of co-shard over that of recompute", 1.7, mine and again and mine / again, cause),
            verdict("over that of ZeRO-3 offload", 1.2, mine and offload and mine / offload, cause),
            verdict("longest sequence of co-shard", 10240, mine, cause),
        ]),
        "The longest of the sequences that fits, by what the paper does not say (its numbers: 6144, 8192, 10240):\n",
        table(("assumption", *SINGLE), 
              ([name, *(str(size or "?") for size in row.values())] for name, row in reached.items())),
    ])  # fmt: skip
