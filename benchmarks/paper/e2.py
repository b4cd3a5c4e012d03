"""E2: Swin end to end."""

from __future__ import annotations

from families import found_of, gains, shown
from points import Rows
from report import VERDICTS, table


def run(rows: Rows) -> str:
    found = found_of(rows, "swin")
    return "\n".join([
        *shown("e2", "E2. Swin end to end", found),
        table(VERDICTS, gains(rows, "swin", found, "co-shard, first 4", {"Megatron-LM": 6.6, "DeepSpeed": 3.5})),
    ])  # fmt: skip
