"""Beyond the paper: its plans beside those of later years, on its 32 V100 and on 32 H100 of 4 servers."""

from __future__ import annotations

import json
from collections.abc import Iterator

from models import GPUS
from points import Row, Rows
from report import share, table
from systems import BEYOND, beyond, spaces

CLUSTERS = {"V100": "v100:4x8", "H100": "h100:4x8"}
NAMES = ("family", "plan", "", *(f"{kind} {what}" for kind in CLUSTERS for what in ("TFLOPS", "GB", "waits")))
# kind of GPU -> its row.
Kinds = dict[str, Row | None]


def run(rows: Rows) -> str:
    lines = [*_of_the_paper(rows), *_later(rows)]
    return "\n".join([
        "### E13. Beyond the paper: 32 V100, and 32 H100\n",
        "The largest models. `no scores`: attention in one kernel, which keeps no scores (memory-efficient on V100,",
        "FlashAttention on H100). `waits`: bubble and communication. Plans are compiled for the V100 cluster; their",
        "programs are simulated on both. No TFLOPS: it is out of memory. `?`: the microbatches that are simulated take",
        "more than twice their period, so that the rest may not go on at that pace; these are not ranked.\n",
        table(NAMES, (_line(*line) for line in lines)),
        *(_best(lines, kind) for kind in CLUSTERS),
        "- **The paper's advice today.** Co-shard is for scores that are written out: once attention is one kernel,",
        "  plain recomputation needs no more memory, and co-shard only computes more. What it was for, 8-way tensor",
        "  parallelism inside servers, stays right. Zero-bubble schedules need the memory of an H100.\n",
    ])  # fmt: skip


def _of_the_paper(rows: Rows) -> Iterator[tuple[str, str, Kinds]]:
    for family in ("swin", "gpt3", "mbart", "alphafold2"):
        by_kind = {kind: spaces(family, GPUS[-1], cluster) for kind, cluster in CLUSTERS.items()}
        for system in by_kind["V100"]:
            found = {kind: rows.best(systems[system]) for kind, systems in by_kind.items()}
            if any(found.values()):
                yield family, system, found


def _later(rows: Rows) -> Iterator[tuple[str, str, Kinds]]:
    for family, words, plan in BEYOND:
        yield family, words, {kind: rows.get(beyond(family, plan, cluster)) for kind, cluster in CLUSTERS.items()}


def _line(family: str, words: str, found: Kinds) -> list[str]:
    plan = next((json.loads(row["key"])[1] for row in found.values() if row), "")
    refused = next((f": {row['error']}" for row in found.values() if row and "error" in row), "")
    line = [family, words, f"`{plan}`{refused}" if plan else "not run"]
    for row in found.values():
        if row is None or "error" in row:
            line += ["", "", ""]
            continue
        speed = f"{row['tflops']:.0f}{'' if _is_steady(row) else '?'}" if row["fits"] else ""
        line += [speed, f"{row['peak'] / 1e9:.0f}", f"{share(row, 'bubble') + share(row, 'communication'):.0%}"]
    return line


def _is_steady(row: Row) -> bool:
    few = min(int(row["microbatches"]), max(3, 2 * int(row["stages"])))
    return bool(row["simulated"] < 2 * few * row["period"])


def _best(lines: list[tuple[str, str, Kinds]], kind: str) -> str:
    """Return the fastest plans of each family on a kind of GPU, in a sentence."""
    parts = []
    for family in dict.fromkeys(family.partition(",")[0] for family, *_ in lines):
        fitting = [
            (row["tflops"], f"{words} ({name})" if "," in name else words)
            for name, words, found in lines
            if name.partition(",")[0] == family and (row := found[kind]) and row.get("fits") and _is_steady(row)
        ]
        if fitting:
            parts.append(f"{family}: {', '.join(f'{words} {speed:.0f}' for speed, words in sorted(fitting)[:-4:-1])}")
    return f"- **{kind}**, the fastest of what fits, TFLOPS: {'; '.join(parts) or 'not run'}.\n"
