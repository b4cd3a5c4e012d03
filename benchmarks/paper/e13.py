"""Beyond the paper: its plans beside those of later years, on its 32 V100 and on 32 H100 of 4 servers."""

from __future__ import annotations

import json
from collections.abc import Iterator

from models import GPUS
from points import Row, Rows, is_steady
from report import ratio, share, table
from systems import BEYOND, beyond, spaces

CLUSTERS = {"V100": "v100:4x8", "H100": "h100:4x8"}
NAMES = ("family", "plan", "", *(f"{kind} {what}" for kind in CLUSTERS for what in ("TFLOPS", "GB", "waits")))
# kind of GPU -> its row.
Kinds = dict[str, Row | None]


_GPT3, _ONE = "gpt3", "gpt3, no scores"
# What is advised, by whom; the plan, and the one it is compared with.
ADVICE = (
    ("co-shard, for Swin", "paper", ("swin", "co-shard, first 4"), ("swin", "Megatron-LM")),
    ("co-shard, for GPT-3 with scores written out", "paper", (_GPT3, "co-shard"), (_GPT3, "Megatron-LM, Alpa")),
    ("co-shard, for GPT-3 with attention in one kernel", "paper", (_ONE, "co-shard"), (_ONE, "1F1B, all again")),
    ("interlaced pipeline, for 500,000 words", "paper", ("mbart", "interlaced"), ("mbart", "Megatron-LM")),
    ("3F1B, for AlphaFold2", "paper", ("alphafold2", "3F1B"), ("alphafold2", "DeepSpeed")),
    ("sequence parallelism in place of recomputation", "2022", (_ONE, "sequence parallel"), (_ONE, "1F1B, all again")),
    ("Seq1F1B in place of recomputation", "2024", (_ONE, "Seq1F1B"), (_ONE, "1F1B, all again")),
    ("ring attention beside sequence parallelism", "2023", (_ONE, "ring attention"), (_ONE, "sequence parallel")),
    ("ZB-H1", "2023", (_ONE, "sequence parallel, ZB-H1"), (_ONE, "sequence parallel")),
    ("ZBV", "2024", (_ONE, "sequence parallel, ZBV"), (_ONE, "sequence parallel")),
    ("DualPipe", "2025", (_ONE, "sequence parallel, DualPipe"), (_ONE, "sequence parallel")),
)


def advice(rows: Rows) -> str:
    """Return the table of what pays on V100 and on H100."""
    found = {(family, words): kinds for family, words, kinds in (*_of_the_paper(rows), *_later(rows))}
    lines = []
    for what, year, ours, other in ADVICE:
        gains = [_gain(found.get(ours, {}).get(kind), found.get(other, {}).get(kind)) for kind in CLUSTERS]
        today = _today(found.get(ours, {}).get("H100"), found.get(other, {}).get("H100"))
        lines.append([what, year, f"{other[1]}{' (one kernel)' if other[0] == _ONE else ''}", *gains, today])
    return "\n".join([
        "**Is the advice still right?** Times faster than what it is compared with, on 32 GPUs of 4 servers (E13).\n",
        table(("advice", "of", "compared with", *(f"on {kind}" for kind in CLUSTERS), "pays today"), lines),
    ])  # fmt: skip


def _gain(ours: Row | None, other: Row | None) -> str:
    if not ours or not other or "error" in ours or "error" in other:
        return "not run"
    if not is_steady(ours) or not is_steady(other):
        return "no period"
    if not ours["fits"]:
        return "out of memory"
    return f"{other['seconds'] / ours['seconds']:.2f}" if other["fits"] else "the other is out of memory"


def _today(ours: Row | None, other: Row | None) -> str:
    """Return whether advice pays on H100: 5 % and more."""
    gain = ratio(ours, other)
    return "" if gain is None else "yes" if gain >= 1.05 else "no" if gain <= 0.95 else "makes no difference"


def run(rows: Rows) -> str:
    lines = [*_of_the_paper(rows), *_later(rows)]
    return "\n".join([
        "### E13. Beyond the paper: 32 V100, and 32 H100\n",
        "The largest models. `no scores`: attention in one kernel, which keeps no scores (memory-efficient on V100,",
        "FlashAttention on H100). `waits`: bubble and communication. Plans are compiled for the V100 cluster; their",
        "programs are simulated on both. No TFLOPS: it is out of memory. `?`: not ranked, see above.\n",
        table(NAMES, (_line(*line) for line in lines)),
        *(_best(lines, kind) for kind in CLUSTERS),
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
    plans = [f"`{json.loads(row['key'])[1]}`" for row in found.values() if row]
    plan = " and ".join(dict.fromkeys(plans))
    refused = next((f": {row['error']}" for row in found.values() if row and "error" in row), "")
    line = [family, words, f"{plan}{refused}" if plan else "not run"]
    for row in found.values():
        if row is None or "error" in row:
            line += ["", "", ""]
            continue
        speed = f"{row['tflops']:.0f}{'' if is_steady(row) else '?'}" if row["fits"] else ""
        line += [speed, f"{row['peak'] / 1e9:.0f}", f"{share(row, 'bubble') + share(row, 'communication'):.0%}"]
    return line


def _best(lines: list[tuple[str, str, Kinds]], kind: str) -> str:
    """Return the fastest plans of each family on a kind of GPU, in a sentence."""
    parts = []
    for family in dict.fromkeys(family.partition(",")[0] for family, *_ in lines):
        fitting = [
            (row["tflops"], f"{words} ({name})" if "," in name else words)
            for name, words, found in lines
            if name.partition(",")[0] == family and (row := found[kind]) and row.get("fits") and is_steady(row)
        ]
        if fitting:
            parts.append(f"{family}: {', '.join(f'{words} {speed:.0f}' for speed, words in sorted(fitting)[:-4:-1])}")
    return f"- **{kind}**, the fastest of what fits, TFLOPS: {'; '.join(parts) or 'not run'}.\n"
