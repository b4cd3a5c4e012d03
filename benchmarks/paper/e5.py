"""E5: AlphaFold2 end to end, three forwards and one backward."""

from __future__ import annotations

from families import found_of, most, shown, varied
from points import Rows
from report import VERDICTS, table, verdict


def run(rows: Rows) -> str:
    found = found_of(rows, "alphafold2")
    last = found.get(32, {}).get("DAP + DP")
    fits = {None: "not run", True: "fits", False: "out of memory"}[last and last.get("fits")]
    cause, other = (varied(rows, "alphafold2", "3F1B", name) for name in ("DAP + DP", "DeepSpeed"))
    return "\n".join([
        *shown("e5", "E5. AlphaFold2 end to end", found),
        table(VERDICTS, [
            verdict("most over DAP + DP", 1.5, most(found, "3F1B", "DAP + DP"), cause),
            verdict("over DeepSpeed", 1.4, most(found, "3F1B", "DeepSpeed"), other),
            ["DAP + DP at 3.2B", "out of memory", fits, "", ""],
        ]),
    ])  # fmt: skip
