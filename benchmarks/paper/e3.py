"""E3: GPT-3 end to end."""

from __future__ import annotations

from families import found_of, gains, shown
from models import GPUS
from points import Rows
from report import POINTS, VERDICTS, point_rows, table


def run(rows: Rows) -> str:
    found = found_of(rows, "gpt3")
    other = found_of(rows, "gpt3, softmax in float16", sizes=GPUS[:1])
    return "\n".join([
        *shown("e3", "E3. GPT-3 end to end", found, "up to 3.3 x Megatron-LM, 1.5 x DeepSpeed"),
        table(VERDICTS, gains(rows, "gpt3", found, "co-shard", {"Megatron-LM, Alpa": 3.3, "DeepSpeed": 1.5})),
        "With the softmax in float32 Megatron-LM's 8-way tensor parallelism does not fit 15B, as the paper says.\n",
        "The same where the softmax is in float16, so that scores take half of the memory:\n",
        table(POINTS, (line for gpus, row in other.items() for line in point_rows(f"{gpus} GPUs", row))),
    ])  # fmt: skip
