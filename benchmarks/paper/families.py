"""E2 to E5: the four families end to end, in weak scaling on 4, 8, 16 and 32 GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from figures import bars
from models import GPUS
from points import CAPACITY, HALF, NIC, OTHERS, SLOW_NIC, Row, Rows, is_steady, simulated
from report import POINTS, point_rows, ratio, table, verdict
from systems import CLUSTERS, spaces

# gpus -> system -> its best row.
Found = Mapping[int, Mapping[str, Row | None]]
# What a row is under another assumption.
As = Callable[[Row], Row]
LEAN = "8 bytes a parameter"


def found_of(rows: Rows, family: str, variant: str = "", as_if: As | None = None, sizes: Sequence[int] = GPUS) -> Found:
    """Return the best row of each system on so many GPUs; of those clusters alone that have this variant, if one is
    given.
    """
    clusters = {gpus: OTHERS.get(CLUSTERS[gpus], {}).get(variant, "") for gpus in sizes}
    return {
        gpus: {system: rows.best(ladders, as_if) for system, ladders in spaces(family, gpus, cluster).items()}
        for gpus, cluster in clusters.items()
        if cluster or not variant
    }


def shown(name: str, title: str, found: Found, paper: str) -> list[str]:
    """Return the table and the figure of a family, with the paper's number on it."""
    return [
        f"### {title}\n",
        table(POINTS, (line for gpus, row in found.items() for line in point_rows(f"{gpus} GPUs", row))),
        bars(name, f"{title} (the paper: {paper})", {
            f"{gpus} GPUs": {s: p["tflops"] if p.get("fits") else None for s, p in row.items() if p}
            for gpus, row in found.items()
        }, "TFLOPS of all GPUs"),
    ]  # fmt: skip


def most(found: Found, ours: str, other: str) -> float | None:
    """Return by how much ours is faster at most."""
    gains = [gain for row in found.values() if (gain := ratio(row.get(ours), row.get(other)))]
    return max(gains, default=None)


def between(found: Found, ours: str, other: str) -> str:
    """Return between which numbers ours is faster at most where its rows have no period: each further microbatch takes
    at least the work of a device, and at most its share of those simulated.
    """
    pairs = [(row.get(ours), row.get(other)) for row in found.values()]
    known = [(a, b) for a, b in pairs if a and b and a.get("fits") and b.get("fits") and is_steady(b)]
    least = [b["seconds"] * simulated(a) / (a["simulated"] * a["microbatches"]) for a, b in known]
    most = [b["seconds"] / a["seconds"] for a, b in known]
    return f"{max(least):.2g} to {max(most):.2g}" if known else "not run"


def leaner(row: Row) -> Row:
    """Return a row as if weights, gradients and the two states of Adam were float16, without a copy: so are those of
    the examples of the paper's authors (nnScaler, examples/vision/swin/train.py).
    """
    states = row["memory"]
    peak = row["peak"] - states.get("gradients", 0) / 2 - states.get("optimizer", 0) * 2 / 3
    return {**row, "peak": peak, "fits": row["fits"] or peak <= CAPACITY}


def varied(rows: Rows, family: str, ours: str, other: str, more: Mapping[str, As] = MappingProxyType({})) -> str:
    """Return by how much ours is faster at most where one assumption is another, as far as that is known.

    `more`: further assumptions, and what rows are under them.
    """
    found = {variant: found_of(rows, family, variant) for variant in OTHERS[CLUSTERS[GPUS[-1]]]}
    found |= {name: found_of(rows, family, as_if=as_if) for name, as_if in {LEAN: leaner, **more}.items()}
    said = [f"{variant}: {gain:.2g}" for variant, one in found.items() if (gain := most(one, ours, other))]
    said += [f"{name}: {words}" for name in more if (words := unfit(found[name][GPUS[-1]]))]
    return "; ".join(said)


def gains(rows: Rows, family: str, found: Found, ours: str, others: Mapping[str, float]) -> list[list[str]]:
    """Return a verdict on the paper's gain over each other system; its cause is what another assumption makes of it."""
    half, lines = found_of(rows, family, HALF), []
    for other, paper in others.items():
        pair = {name: found[GPUS[-1]].get(name) for name in (ours, other)}
        short = _short(pair)
        causes = [*short, varied(rows, family, ours, other)]
        gain, is_large = most(found, ours, other), any(row and not row.get("fits", True) for row in pair.values())
        causes += [bandwidth(found, half, ours, other, paper)] if gain or is_large else []
        absent = "out of memory" if is_large else between(found, ours, other)
        lines.append(verdict(f"most over {other}", paper, gain, "; ".join(filter(None, causes)), absent))
    return lines


def _short(pair: Mapping[str, Row | None]) -> list[str]:
    """Return what each of two systems needs, and how much faster the first were, where one does not fit."""
    a, b = pair.values()
    if not a or not b or "peak" not in a or "peak" not in b or (a["fits"] and b["fits"]):
        return []
    needs = (f"{name} needs {row['peak'] / 1e9:.1f} GB" for name, row in zip(pair, (a, b), strict=True))
    return [*needs, f"{b['seconds'] / a['seconds']:.2g} if both fitted"]


def unfit(systems: Mapping[str, Row | None]) -> str:
    """Return which systems are out of memory."""
    names = [name for name, row in systems.items() if row and not row.get("fits", "error" in row)]
    return f"{', '.join(names)} out of memory" if names else ""


def bandwidth(found: Found, half: Found, ours: str, other: str, paper: float) -> str:
    """Return the bandwidth between servers at which ours were as much faster as in the paper, on 32 GPUs.

    The seconds of a plan are taken as a share that does not depend on the network, and one inverse to its bandwidth:
    those of 12.5 and of 6 GB/s say both.
    """
    whole, slow = found[GPUS[-1]], half.get(GPUS[-1], {})
    pairs = [(whole.get(name), slow.get(name)) for name in (ours, other)]
    if not all(a and b and "peak" in a and "peak" in b and a["plan"] == b["plan"] for a, b in pairs):
        return ""
    parts = []
    for a, b in pairs:
        sent = (b["seconds"] - a["seconds"]) / (1 / SLOW_NIC - 1 / NIC)  # type: ignore[index]
        parts.append((a["seconds"] - sent / NIC, sent))  # type: ignore[index]
    (own, mine), (rest, theirs) = parts
    if (left := paper * own - rest) <= 0 or (sent := theirs - paper * mine) <= 0:
        return "no bandwidth between servers makes it"
    return f"{sent / left:.2g} GB/s between servers would make {paper:g}"
