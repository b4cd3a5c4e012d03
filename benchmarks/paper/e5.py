"""E5: AlphaFold2 end to end, three forwards and one backward."""

from __future__ import annotations

import re

from families import between, found_of, most, shown, varied
from points import CAPACITY, Row, Rows
from report import VERDICTS, table, verdict

# Bytes of the float16 scores of triangle attention between 256 residues: 32 heads, of 256 x 256 for each residue.
SCORES = 2 * 32 * 256**3


def written_out(row: Row) -> Row:
    """Return a row as if attention were no single kernel, as before FlashAttention: in the backward of its softmax the
    probabilities, their gradient and that of the scores are there, a slice of each where attention is axial.
    """
    axial = re.search(r"dap:(\d+)", row["plan"])
    peak = row["peak"] + 3 * SCORES / int(axial[1] if axial else 1)
    return {**row, "peak": peak, "fits": peak <= CAPACITY}


def run(rows: Rows) -> str:
    found = found_of(rows, "alphafold2")
    last = found.get(32, {}).get("DAP + DP")
    fits = {None: "not run", True: "fits", False: "out of memory"}[last and last.get("fits")]
    pair = "3F1B", "DeepSpeed"
    more = {"attention written out": written_out}
    cause, other = (varied(rows, "alphafold2", "3F1B", name, more) for name in ("DAP + DP", "DeepSpeed"))
    return "\n".join([
        *shown("e5", "E5. AlphaFold2 end to end", found, "up to 1.5 x DAP + DP, 1.4 x DeepSpeed"),
        table(VERDICTS, [
            verdict("most over DAP + DP", 1.5, most(found, "3F1B", "DAP + DP"), cause),
            verdict("over DeepSpeed", 1.4, most(found, *pair), other, between(found, *pair)),
            ["DAP + DP at 3.2B", "out of memory", fits, {"out of memory": "hit", "fits": "miss"}.get(fits, ""), ""],
        ]),
    ])  # fmt: skip
