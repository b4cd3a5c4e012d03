"""E12: CPU seconds of compiling each plan that was simulated, and what the whole evaluation takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from points import OTHERS, Row, Rows
from report import table
from systems import CLUSTERS

COMPILED = ("capture", "compile", "certificate")


def run(rows: Rows) -> str:
    lines = [
        [row["model"].split(",")[0], f"`{row['plan']}`", row["cluster"], str(row["ops"]),
         *(f"{row['cpu'][name]:.1f}" for name in (*COMPILED[1:], "simulate"))]
        for _, row in sorted(programs(rows), key=lambda program: program[1].get("cpu", {}).get("compile", 0))
        if "error" not in row
    ]  # fmt: skip
    return "\n".join([
        "### E12. Compile time\n",
        "CPU seconds on one core, without the capture of the model; the paper says 'a few seconds'. Of the",
        "microbatches those that were simulated. Operators are those of the model.\n",
        table(("model", "plan", "cluster", "operators", "compile s", "certificate s", "simulate s"), lines),
        "CPU minutes of each experiment, without the points that one before it had:\n",
        table(("experiment", *COMPILED, "simulate", "all"), spent(rows)),
        "Of these, {:.0f} are of points on 32 GPUs and {:.0f} of all others.\n".format(
            *halves(rows)
        ),
    ])  # fmt: skip


def programs(rows: Rows) -> Iterator[tuple[str, Row]]:
    """Yield each program that was compiled, and the experiment that it was for; a program of several clusters once."""
    seen = set()
    for key, experiment in rows.asked.items():
        row = rows.known[key]
        program = row["model"], row["plan"], row["cluster"]
        if program not in seen and row["cluster"] in CLUSTERS.values():
            seen.add(program)
            yield experiment, row


def used(rows: Rows) -> Iterator[tuple[str, str, str, float]]:
    """Yield the CPU seconds of each part of each point, after its experiment, its cluster and the part."""
    own = {other: cluster for cluster, others in OTHERS.items() for other in others.values()}
    for experiment, row in programs(rows):
        for part in COMPILED:
            yield experiment, row["cluster"], part, row.get("cpu", {}).get(part, 0)
    for key, experiment in rows.asked.items():
        row = rows.known[key]
        cluster = own.get(row["cluster"], row["cluster"])
        yield experiment, cluster, "simulate", row.get("cpu", {}).get("simulate", 0)


def halves(rows: Rows) -> tuple[float, float]:
    """Return the CPU minutes of points on 32 GPUs, and of all others."""
    seconds = [0.0, 0.0]
    for _, cluster, _, some in used(rows):
        seconds[cluster != CLUSTERS[32]] += some
    return seconds[0] / 60, seconds[1] / 60


def spent(rows: Rows) -> list[list[str]]:
    """Return the CPU minutes of each experiment, by what they were for, and of all."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for experiment, _, part, some in used(rows):
        for name in (experiment, "all"):
            seconds[name][part] += some
    return [
        [name.upper() if name != "all" else name,
         *(f"{found[part] / 60:.1f}" for part in (*COMPILED, "simulate")), f"{sum(found.values()) / 60:.1f}"]
        for name, found in sorted(seconds.items(), key=lambda one: one[0] == "all")
    ]  # fmt: skip


def mixed(rows: Rows) -> str:
    """Return how many rows of each experiment are of which simulator."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for key, experiment in rows.asked.items():
        counts[experiment][rows.known[key]["simulator"][:6]] += 1
    return "; ".join(
        f"{experiment.upper()} {', '.join(f'{n} of {name}' for name, n in found.most_common())}"
        for experiment, found in sorted(counts.items())
    )
