"""E6: Swin on one GPU, memory and seconds over the size of the model."""

from __future__ import annotations

from families import LEAN, As, leaner
from figures import bars
from models import NARROW_SIZES, SWIN_SIZES, small_swin
from points import CAPACITY, Row, Rows
from report import POINTS, VERDICTS, over, point_rows, table, verdict
from systems import SINGLE, single

# What the paper does not say: the window of Swin, and the bytes of a parameter.
ASSUMPTIONS: dict[str, tuple[int, As]] = {
    "windows of 48": (48, dict),
    f"windows of 48, {LEAN}": (48, leaner),
    "windows of 24": (24, dict),
    f"windows of 24, {LEAN}": (24, leaner),
}
Found = dict[int, dict[str, Row | None]]


def found_of(rows: Rows, window: int) -> Found:
    """Return the rows by size and system."""
    sizes = NARROW_SIZES if window == 24 else SWIN_SIZES

    def row(size: int, options: str, parts: int, system: str) -> Row | None:
        known = too_large(size, system) if window == 48 else None
        return known or rows.get(single(small_swin(options, window), system, parts))

    return {size: {s: row(size, *found, s) for s in SINGLE} for size, found in sizes.items()}


def scores(millions: int) -> float:
    """Return the bytes of the scores of the first stage in float16: heads x patches x patches of a window."""
    heads = int(SWIN_SIZES[millions][0].partition("heads=")[2].partition(",")[0])
    return 2 * heads * (1536 // 4) ** 2 * 48**2


def too_large(millions: int, system: str) -> Row | None:
    """Return the row of a point that needs no compiling: without co-shard, the backward of an attention holds its
    scores and probabilities, and a gradient of each.
    """
    least = 4 * scores(millions)
    if system == "co-shard" or least <= CAPACITY:
        return None
    return {
        "key": single(small_swin(SWIN_SIZES[millions][0], 48), system, 0).key,
        "error": f"at least {least / 1e9:.1f} GB: four tensors of scores in the backward of one attention",
        "fits": False,
    }


def largest(found: Found, system: str, as_if: As) -> int | None:
    """Return the largest size that fits, 0 where none does; None where that of a larger one is unknown."""
    known = {size: systems[system] for size, systems in found.items()}
    fitting = [size for size, row in known.items() if row and (row if "error" in row else as_if(row))["fits"]]
    best = max(fitting, default=0)
    return best if all(row for size, row in known.items() if size > best) else None


def said(size: int | None) -> str:
    return "?" if size is None else str(size) if size else "none"


def run(rows: Rows) -> str:
    by_window = {window: found_of(rows, window) for window in (48, 24)}
    found = by_window[48]
    reached = {
        name: {s: largest(by_window[window], s, as_if) for s in SINGLE} for name, (window, as_if) in ASSUMPTIONS.items()
    }
    again, offload, mine = next(iter(reached.values())).values()
    lean, first = reached[f"windows of 48, {LEAN}"], found[min(found)]["recompute"]
    needs = [f"recompute of {min(found)} M needs {first['peak'] / 1e9:.1f} GB"] if first else []
    other, most = found[min(found)]["ZeRO-3 offload"], found[max(found)]["co-shard"]
    spilled = f"ZeRO-3 offload of {min(found)} M needs {other['peak'] / 1e9:.1f} GB" if other else ""
    lacks = f"co-shard of {max(found)} M needs {most['peak'] / 1e9:.1f} GB" if most else ""
    leaned = over(lean["co-shard"], lean["recompute"])
    cause = "; ".join(needs + ([f"{LEAN}: {leaned:.2g}"] if leaned else []))
    return "\n".join([
        "### E6. Swin on one GPU, over its size\n",
        "Microbatches of one image of 1536 x 1536; every layer is recomputed.\n",
        table(POINTS, (line for size, row in found.items() for line in point_rows(f"{size} M", row))),
        bars("e6", "E6: peak memory of one GPU", {
            f"{size} M": {s: p["peak"] / 1e9 if "peak" in p else None for s, p in row.items() if p}
            for size, row in found.items()
        }, "GB", (CAPACITY / 1e9, "capacity of a V100")),
        table(VERDICTS, [
            verdict("largest model of co-shard, millions of parameters", 1300, mine, lacks),
            verdict("over that of recompute", 3.7, over(mine, again), cause, "out of memory"),
            verdict("over that of ZeRO-3 offload", 3.7, over(mine, offload), spilled, "out of memory"),
        ]),
        "The largest that fits, in millions, by what the paper does not say (its numbers: 351, 351, 1300):\n",
        table(("assumption", *SINGLE), ([name, *map(said, row.values())] for name, row in reached.items())),
    ])  # fmt: skip
