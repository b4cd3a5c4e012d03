"""Tables of the evaluation: Markdown, and the comparison with the paper's numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from points import Row, is_steady

# Within this share of the paper's number, ours is a hit.
HIT = 0.2


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def verdict(what: str, paper: float, ours: float | None, cause: str = "", absent: str = "not run") -> list[str]:
    """Return a row of the table of hits: a claim, the paper's number, ours, hit or miss, the cause of a miss.

    `absent`: what is said where there is no number.
    """
    if ours is None:
        return [what, f"{paper:g}", absent, "", cause]
    is_hit = abs(ours / paper - 1) <= HIT
    said = f"{ours:.0f}" if ours >= 100 else f"{ours:.2g}"
    return [what, f"{paper:g}", said, "hit" if is_hit else "miss", "" if is_hit else cause]


def summary(parts: Mapping[str, str]) -> str:
    """Return the tables of what comes out and of what does not, from the verdicts of all experiments."""
    lines: dict[str, list[list[str]]] = {"hit": [], "miss": [], "": []}
    for name, text in parts.items():
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            if len(cells) == len(VERDICTS) and cells[3] in lines and cells != [*VERDICTS] and "---" not in cells:
                lines[cells[3]].append([name.upper(), *cells[:3], *cells[4:]])
    count = sum(map(len, lines.values()))
    names = "experiment", *VERDICTS[:3]
    return "\n".join([
        f"**What comes out**: {len(lines['hit'])} of {count} numbers within 20 %.\n",
        table(names, (line[:4] for line in lines["hit"])),
        f"**What does not**: {len(lines['miss'])}, and what another assumption makes of each.\n",
        table((*names, VERDICTS[4]), lines["miss"]),
        f"**What has no verdict**: {len(lines[''])}.\n",
        table((*names, "why"), lines[""]),
    ])  # fmt: skip


VERDICTS = ("claim", "paper", "ours", "", "what decides")
POINTS = ("", "system", "plan", "step s", "TFLOPS", "GB", "computation", "communication", "bubble", "largest tensors")


def point_rows(label: str, found: Mapping[str, Row | None]) -> list[list[str]]:
    """Return a row for each system at one place of an experiment."""
    rows = []
    for system, row in found.items():
        if row is None:
            rows.append([label, system, "not run", *[""] * 7])
            continue
        plan = f"`{json.loads(row['key'])[1]}`"
        if "error" in row:
            # Either too large for any order of its work, or refused by the compiler.
            why = f"**out of memory** ({row['error']})" if "fits" in row else f"refused: {row['error']}"
            rows.append([label, system, plan, "", "", why, *[""] * 4])
            continue
        peak = f"{row['peak'] / 1e9:.1f}" + ("" if row["fits"] else " **out of memory**")
        shares = (f"{share(row, part):.0%}" for part in ("compute", "communication", "bubble"))
        held = "; ".join(f"{size / 1e9:.1f} GB {name}" for name, size in row["largest"][:2])
        if "depths" in row:
            plan += " by {} and {} layers".format(*row["depths"])
        mark = "" if is_steady(row) else "?"
        speed = f"{row['seconds']:.1f}{mark}", f"{row['tflops']:.0f}{mark}"
        rows.append([label, system, plan, *speed, peak, *shares, held])
    return rows


def share(row: Row, part: str) -> float:
    """Return the share of a part of the time in the microbatches that were simulated; starts of transfers are waits."""
    more = row["launch"] + row["copies"] if part == "communication" else 0.0
    seconds: float = row[part] + more
    return seconds / row["simulated"]


def ratio(a: Row | None, b: Row | None) -> float | None:
    """Return how many times faster `a` is than `b`; None where one was not run, does not fit or has no period."""
    if not a or not b or not is_steady(a) or not is_steady(b) or not (a["fits"] and b["fits"]):
        return None
    return float(b["seconds"] / a["seconds"])


def over(mine: int | None, other: int | None) -> float | None:
    """Return how many times as large as another number one is; None where one is unknown, or none fits."""
    return mine / other if mine and other else None
