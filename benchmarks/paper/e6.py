"""E6: Swin on one GPU, memory and seconds over the size of the model."""

from __future__ import annotations

from models import SWIN_SIZES
from points import Rows
from report import POINTS, VERDICTS, bars, point_rows, table, verdict
from systems import SINGLE, single


def run(rows: Rows, quick: bool) -> str:
    sizes = dict(list(SWIN_SIZES.items())[: 1 if quick else None])
    found = {size: {s: rows.get(single(model, s, parts)) for s in SINGLE} for size, (model, parts) in sizes.items()}

    def largest(system: str) -> float | None:
        own = [size for size, row in found.items() if (point := row[system]) and point["fits"]]
        return max(own) if all(row[system] for row in found.values()) and own else None

    mine, others = largest("co-shard"), [largest("recompute"), largest("ZeRO-3 offload")]
    known = [size for size in others if size]
    reached = mine / max(known) if mine and known and len(sizes) == len(SWIN_SIZES) else None
    cause = "the number of heads, which the paper does not give: scores grow with it"
    return "\n".join([
        "### E6. Swin on one GPU, over its size\n",
        "Microbatches of one image of 1536 x 1536; every layer is computed again.\n",
        table(POINTS, (line for size, row in found.items() for line in point_rows(f"{size} M", row))),
        bars("e6", "E6: GB of one GPU (capacity 32)", {
            f"{size} M": {s: p["peak"] / 1e9 if p else None for s, p in row.items()} for size, row in found.items()
        }, "GB"),
        table(VERDICTS, [verdict("model of co-shard over that of recompute and offload", 3.7, reached, cause)]),
    ])  # fmt: skip
