"""E8: where the time of mBART goes, from the points of E4."""

from __future__ import annotations

from families import found_of, most
from points import Rows
from report import VERDICTS, share, table, verdict

LATE = "interlaced, recompute late"
PARTS = ("compute", "communication", "bubble", "optimizer")


def run(rows: Rows) -> str:
    found = {gpus: row for gpus, row in found_of(rows, "mbart").items() if gpus > 8}
    lines = [
        [str(gpus), system, *(f"{row['seconds'] * share(row, part):.0f}" for part in PARTS), f"{row['seconds']:.0f}"]
        for gpus, systems in found.items()
        for system, row in systems.items()
        if row and "error" not in row and system != "DeepSpeed"
    ]
    shares = {gpus: row["Megatron-LM"] for gpus, row in found.items()}
    waits = {gpus: share(row, "communication") for gpus, row in shares.items() if row and "error" not in row}
    slower = found_of(rows, "mbart", "half of the NIC")
    causes = {
        gpus: f"half of the NIC: {share(row, 'communication'):.2f}"
        for gpus, systems in slower.items()
        if (row := systems["Megatron-LM"]) and "error" not in row
    }
    return "\n".join([
        "### E8. Where the time of mBART goes\n",
        "Seconds of a step, in the mean over the devices, by the shares of the microbatches simulated.\n",
        table(("GPUs", "system", *PARTS, "step"), lines),
        table(VERDICTS, [
            verdict("communication of Megatron-LM at 16 GPUs", 0.6, waits.get(16), causes.get(16, "")),
            verdict("communication of Megatron-LM at 32 GPUs", 0.5, waits.get(32), causes.get(32, "")),
            verdict("interlaced with late recomputation over Megatron-LM", 1.9, most(found, LATE, "Megatron-LM")),
            verdict("early recomputation over late", 1.5, most(found, "interlaced", LATE)),
        ]),
    ])  # fmt: skip
