"""E2: Swin end to end."""

from __future__ import annotations

from families import found_of, gains, shown
from points import Rows
from report import POINTS, VERDICTS, point_rows, table


def run(rows: Rows) -> str:
    found = found_of(rows, "swin")
    narrow = found_of(Rows(keep=True), "swin, windows of 24")
    known = {gpus: row for gpus, row in narrow.items() if any(row.values())}
    return "\n".join([
        *shown("e2", "E2. Swin end to end", found, "up to 6.6 x Megatron-LM, 3.5 x DeepSpeed"),
        table(VERDICTS, gains(rows, "swin", found, "co-shard, first 4", {"Megatron-LM": 6.6, "DeepSpeed": 3.5})),
        "TEXT\n",
        "The same where windows are 24 patches wide, so that scores take a quarter of the memory:\n",
        table(POINTS, (line for gpus, row in known.items() for line in point_rows(f"{gpus} GPUs", row))),
    ])  # fmt: skip
