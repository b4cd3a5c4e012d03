"""E6: Swin on one GPU, memory and seconds over the size of the model."""

from __future__ import annotations

from models import SWIN_SIZES
from points import Rows
from report import POINTS, VERDICTS, bars, point_rows, table, verdict
from systems import SINGLE, single


def run(rows: Rows) -> str:
    found = {
        size: {s: rows.get(single(model, s, parts)) for s in SINGLE} for size, (model, parts) in SWIN_SIZES.items()
    }

    def largest(system: str) -> float | None:
        """Return the largest model that fits; None unless the largest of all is known."""
        known = {size: row[system] for size, row in found.items() if row[system]}
        fitting = [size for size, point in known.items() if point and point["fits"]]
        return max(fitting, default=None) if max(found) in known else None

    mine, again, offload = (largest(system) for system in ("co-shard", "recompute", "ZeRO-3 offload"))
    cause = (
        "not found. Activations: in the paper recompute and offload are out of memory at 907 M, so that theirs take at "
        "least twice ours, which are float16 throughout"
    )
    return "\n".join([
        "### E6. Swin on one GPU, over its size\n",
        "Microbatches of one image of 1536 x 1536; every layer is recomputed.\n",
        table(POINTS, (line for size, row in found.items() for line in point_rows(f"{size} M", row))),
        bars("e6", "E6: GB of one GPU (capacity 32)", {
            f"{size} M": {s: p["peak"] / 1e9 if p else None for s, p in row.items()} for size, row in found.items()
        }, "GB"),
        table(VERDICTS, [
            verdict("largest model of co-shard, millions of parameters", 1300, mine),
            verdict("over that of recompute", 3.7, mine and again and mine / again, cause),
            verdict("over that of ZeRO-3 offload", 3.7, mine and offload and mine / offload, cause),
        ]),
    ])  # fmt: skip
