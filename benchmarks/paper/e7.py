"""E7: GPT-3 1.3B on one GPU, memory and seconds over the sequence."""

from __future__ import annotations

import re

from families import LEAN, As, leaner
from figures import bars
from models import SEQUENCES, long
from points import CAPACITY, Row, Rows
from report import POINTS, VERDICTS, over, point_rows, table, verdict
from systems import SINGLE, single

PARTS = 8
HEADS = 32
# What the paper does not say: the dtype of the softmax, the bytes of a parameter, and dropout of attention.
ASSUMPTIONS: dict[str, tuple[str, As]] = {
    "softmax in float16": ("float16", dict),
    "softmax in float32": ("float32", dict),
    f"softmax in float16, {LEAN}": ("float16", leaner),
    f"softmax in float32, {LEAN}": ("float32", leaner),
    f"softmax in float16, {LEAN}, dropout of attention": ("float16", lambda row: leaner(dropped_out(row))),
}
Found = dict[int, dict[str, Row | None]]


def found_of(rows: Rows, softmax: str) -> Found:
    """Return the rows by sequence and system."""
    return {s: {name: rows.get(single(long(s, softmax), name, PARTS)) for name in SINGLE} for s in SEQUENCES}


def dropped_out(row: Row) -> Row:
    """Return a row as if attention had dropout, as in the examples of the paper's authors (nnScaler,
    examples/nlp/gpt/model.py): its result and a mask are kept for the backward of a layer, or of a part of it.
    """
    sequence = int(re.search(r"seq=(\d+)", row["model"])[1])  # type: ignore[index]
    parts = PARTS if "co_shard" in row["plan"] else 1
    peak = row["peak"] + (2 + 1) * HEADS * sequence**2 / parts
    return {**row, "peak": peak, "fits": peak <= CAPACITY}


def longest(found: Found, system: str, as_if: As) -> int | None:
    """Return the longest sequence that fits, if it is known to."""
    fitting = [s for s, systems in found.items() if (row := systems[system]) and as_if(row)["fits"]]
    return max(fitting, default=None)


def run(rows: Rows) -> str:
    by_softmax = {softmax: found_of(rows, softmax) for softmax in ("float16", "float32")}
    found = by_softmax["float16"]
    reached = {
        name: {system: longest(by_softmax[softmax], system, as_if) for system in SINGLE}
        for name, (softmax, as_if) in ASSUMPTIONS.items()
    }
    again, offload, mine = next(iter(reached.values())).values()
    cause = "bytes of a parameter and dropout: the table below"
    return "\n".join([
        "### E7. GPT-3 1.3B on one GPU, over the sequence\n",
        "Microbatches of one sequence; every layer is recomputed.\n",
        table(POINTS, (line for s, row in found.items() for line in point_rows(str(s), row))),
        bars("e7", "E7: peak memory of one GPU", {
            str(s): {name: p["peak"] / 1e9 for name, p in row.items() if p} for s, row in found.items()
        }, "GB", (CAPACITY / 1e9, "capacity of a V100")),
        table(VERDICTS, [
            verdict("longest sequence of co-shard over that of recompute", 1.7, over(mine, again), cause),
            verdict("over that of ZeRO-3 offload", 1.2, over(mine, offload), cause),
            verdict("longest sequence of co-shard", 10240, mine, cause),
        ]),
        "On an H200 whose process was limited to 32 GB the longest that ran were 4096 (recompute), 8192 (offload) and",
        "10240 (co-shard); recompute of 6144, offload of 10240 and co-shard of 12288 were out of memory",
        "([all runs](../benchmarks/results/gpu_plans.txt)).\n",
        "The longest of the sequences that fits, by what the paper does not say (its numbers: 6144, 8192, 10240):\n",
        table(("assumption", *SINGLE),
              ([name, *(str(size or "?") for size in row.values())] for name, row in reached.items())),
    ])  # fmt: skip
