"""E2: Swin end to end."""

from __future__ import annotations

from families import found_of, most, shown, varied
from points import Rows
from report import VERDICTS, table, verdict


def run(rows: Rows) -> str:
    found = found_of(rows, "swin")
    ours = "co-shard, first 4"
    return "\n".join([
        *shown("e2", "E2. Swin end to end", found),
        table(VERDICTS, [
            verdict(f"most over {name}", paper, most(found, ours, name), varied(rows, "swin", ours, name))
            for name, paper in (("Megatron-LM", 6.6), ("DeepSpeed", 3.5))
        ]),
    ])  # fmt: skip
