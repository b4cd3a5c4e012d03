"""E12: CPU seconds of compiling each plan that was simulated."""

from __future__ import annotations

from points import Rows
from report import table


def run(rows: Rows) -> str:
    lines = [
        [row["model"].split(",")[0], f"`{row['plan']}`", row["cluster"], str(row["ops"]),
         *(f"{row['cpu'][name]:.1f}" for name in ("compile", "certificate", "simulate"))]
        for row in sorted(rows.known.values(), key=lambda row: row.get("cpu", {}).get("compile", 0))
        if "error" not in row
    ]  # fmt: skip
    return "\n".join([
        "### E12. Compile time\n",
        "CPU seconds on one core, without the capture of the model; the paper says 'a few seconds'. Of the",
        "microbatches those that were simulated. Operators are those of the model.\n",
        table(("model", "plan", "cluster", "operators", "compile s", "certificate s", "simulate s"), lines),
    ])  # fmt: skip
