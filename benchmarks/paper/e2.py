"""E2: Swin end to end."""

from __future__ import annotations

from families import found_of, gains, shown
from models import GPUS
from points import Rows
from report import POINTS, VERDICTS, point_rows, table


def run(rows: Rows) -> str:
    found = found_of(rows, "swin")
    narrow = found_of(rows, "swin, windows of 24", sizes=GPUS[-1:])
    return "\n".join([
        *shown("e2", "E2. Swin end to end", found, "up to 6.6 x Megatron-LM, 3.5 x DeepSpeed"),
        table(VERDICTS, gains(rows, "swin", found, "co-shard, first 4", {"Megatron-LM": 6.6, "DeepSpeed": 3.5})),
        "On 4 GPUs co-shard is a little slower; in the paper all are about equal up to 8. At 30B Megatron-LM fits in",
        "32-way tensor parallelism alone, which is the paper's, too. Co-shard cuts scores. It does not cut outputs of",
        "the embedding and inputs of layers, each for every microbatch on its way: with the paper's plan (8-way tensor",
        "parallelism, 4 stages, the first 4 layers) the first stage needs more than a GPU has.\n",
        "The same where windows are 24 patches wide, so that scores take a quarter of the memory:\n",
        table(POINTS, (line for gpus, row in narrow.items() for line in point_rows(f"{gpus} GPUs", row))),
    ])  # fmt: skip
