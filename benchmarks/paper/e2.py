"""E2: Swin end to end."""

from __future__ import annotations

from families import found_of, gains, shown
from points import Rows
from report import VERDICTS, table


def run(rows: Rows) -> str:
    found = found_of(rows, "swin")
    return "\n".join([
        *shown("e2", "E2. Swin end to end", found, "up to 6.6 x Megatron-LM, 3.5 x DeepSpeed"),
        "In the first of four stages the largest activations are outputs of the embedding and inputs of layers, each",
        "for every microbatch on its way. Tensor parallelism and co-shard do not cut them, and recomputation of",
        "layers does not free them. Windows are 24 patches wide here. With 48, as in the authors' example (E6), scores",
        "take four times as much: another 8 GB of each GPU of 8-way tensor parallelism at 30B, so that Megatron-LM and",
        "DeepSpeed would have to cut more, as in the paper. That was not run.\n",
        table(VERDICTS, gains(rows, "swin", found, "co-shard, first 4", {"Megatron-LM": 6.6, "DeepSpeed": 3.5})),
    ])  # fmt: skip
