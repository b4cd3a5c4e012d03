"""E2: Swin end to end."""

from __future__ import annotations

from families import Found, found_of, gains, most, shown
from points import Rows
from report import POINTS, VERDICTS, point_rows, table

PAPER = {"Megatron-LM": 6.6, "DeepSpeed": 3.5}
ZERO = "co-shard in ZeRO-3"


def beside(found: Found, line: list[str]) -> list[str]:
    """Return a verdict that is no hit with the gain of co-shard under ZeRO-3 among its causes."""
    gain = most(found, ZERO, line[0].removeprefix("most over "))
    if line[3] == "hit" or not gain:
        return line
    return [*line[:4], "; ".join(filter(None, (line[4], f"{ZERO}: {gain:.2g}")))]


def run(rows: Rows) -> str:
    found = found_of(rows, "swin")
    narrow = found_of(Rows(keep=True), "swin, windows of 24")
    known = {gpus: row for gpus, row in narrow.items() if any(row.values())}
    return "\n".join([
        *shown("e2", "E2. Swin end to end", found, "up to 6.6 x Megatron-LM, 3.5 x DeepSpeed"),
        table(VERDICTS, (beside(found, line) for line in gains(rows, "swin", found, "co-shard, first 4", PAPER))),
        "Up to 8 GPUs all are about equal, as in the paper. At 30B Megatron-LM fits in 32-way tensor parallelism",
        "alone, which is the paper's, too. Co-shard cuts scores. It does not cut outputs of the embedding and inputs",
        "of layers, each for every microbatch on its way: with the paper's plan (8-way tensor parallelism, 4 stages,",
        "the first 4 layers) the first stage needs more than a GPU has. Under ZeRO-3 there is one microbatch.\n",
        "The same where windows are 24 patches wide, so that scores take a quarter of the memory:\n",
        table(POINTS, (line for gpus, row in known.items() for line in point_rows(f"{gpus} GPUs", row))),
    ])  # fmt: skip
