"""E4: mBART end to end, with 500,000 words."""

from __future__ import annotations

from families import between, found_of, gains, most, shown
from points import Row, Rows
from report import VERDICTS, ratio, share, table, verdict


def computing(row: Row | None) -> str:
    return f"{row['seconds'] * share(row, 'compute'):.0f}" if row else ""


def run(rows: Rows) -> str:
    found = found_of(rows, "mbart")
    ours = "interlaced"
    pair = ours, "Megatron-LM"
    few = {gpus: row for gpus, row in found.items() if gpus <= 8}
    work = (
        f"{gpus} GPUs compute for {computing(row['Megatron-LM'])} and {computing(row[ours])} s: products are narrower"
        for gpus, row in few.items()
        if ratio(row[ours], row["Megatron-LM"])
    )
    return "\n".join([
        *shown("e4", "E4. mBART end to end", found, "up to 2.8 x Megatron-LM, 4.9 x DeepSpeed"),
        table(VERDICTS, [
            verdict("over Megatron-LM at 4 and 8 GPUs", 1.0, most(few, *pair), "; ".join(work), between(few, *pair)),
            *gains(rows, "mbart", found, ours, {"Megatron-LM": 2.8, "DeepSpeed": 4.9}),
        ]),
    ])  # fmt: skip
