"""E4: mBART end to end, with 500,000 words."""

from __future__ import annotations

from families import found_of, most, shown
from points import Rows
from report import VERDICTS, table, verdict


def run(rows: Rows, quick: bool) -> str:
    found = found_of(rows, "mbart", quick)
    few = {gpus: row for gpus, row in found.items() if gpus <= 8}
    return "\n".join([
        *shown("e4", "E4. mBART end to end", found),
        "Of the interlaced plan the look-up of the decoder lies between blocks, so that its stage has the whole",
        "embedding (`plans/interlaced.py` cuts what is before the first block and after the last): out of memory.\n",
        table(VERDICTS, [
            verdict("over Megatron-LM at 4 and 8 GPUs", 1.0, most(few, "interlaced", "Megatron-LM")),
            verdict("most over Megatron-LM", 2.8, most(found, "interlaced", "Megatron-LM")),
            verdict("most over DeepSpeed", 4.9, most(found, "interlaced", "DeepSpeed")),
        ]),
    ])  # fmt: skip
