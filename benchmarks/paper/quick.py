"""The quick part: plans of three families on 4 GPUs, in a few layers, and what must hold of them.

It fails where a plan does not compile, where its certificate does not hold, or where a ratio leaves its band of 20 %:
around the paper's number for searched paths, and for shallow models, which the paper does not have, around the ratio
of the day when the band was written. AlphaFold2 is left out; test_paper.py compares its plans with the
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from e10 import ratios
from models import MODELS
from points import Point, Row, Rows
from report import HIT
from systems import CLUSTERS, MAKERS

from superscaler.cluster import Cluster

GPUS = 4
# Masks of wide windows take longer than the rest of the model.
_SWIN = "swin, windows of 24"
# family -> what makes it shallow, and a plan of each system.
PLANS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "gpt3": ("layers=2", {"Megatron-LM, Alpa": "1x4x1+", "co-shard": "2x2x1/4"}),
    "mbart": ("layers=4", {"Megatron-LM": "1x4x1", "DeepSpeed": "4x1 offload", "interlaced": "2x2"}),
    _SWIN: ("depths=1-1", {"Megatron-LM": "1x4x1+", "DeepSpeed": "4x1", "co-shard, first 4": "2x2x1/4"}),
}
# What of which family: of a system, over that of another, the ratio.
BANDS = (
    ("gpt3", "peak", "co-shard", "Megatron-LM, Alpa", 0.6),
    ("gpt3", "seconds", "co-shard", "Megatron-LM, Alpa", 1.33),
    ("mbart", "peak", "interlaced", "Megatron-LM", 1.09),
    ("mbart", "seconds", "interlaced", "Megatron-LM", 1.02),
    ("mbart", "seconds", "DeepSpeed", "Megatron-LM", 1.81),
    (_SWIN, "peak", "co-shard, first 4", "Megatron-LM", 0.83),
    (_SWIN, "seconds", "co-shard, first 4", "Megatron-LM", 1.28),
    (_SWIN, "peak", "DeepSpeed", "Megatron-LM", 2.68),
)


def simulated(family: str) -> dict[str, Row]:
    """Return the row of each system; with `error` if its plan was refused."""
    depth, systems = PLANS[family]
    rows = Rows(clusters=[CLUSTERS[GPUS]], file=None)

    def place(plan: str, stages: int = 1, dp: int = 1, **_: int) -> Point:
        return Point(f"{MODELS[family][GPUS]},{depth}", plan, CLUSTERS[GPUS], 512, stages, dp)

    found = {system: rows.get(MAKERS[system](place, config)) for system, config in systems.items()}
    return {system: row for system, row in found.items() if row}


def compared() -> Iterator[tuple[str, float, float | None]]:
    """Yield what is compared, its number, and ours; None where a plan was refused."""
    # Two processes: fork, so that what is imported here is there.
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        found = dict(zip(PLANS, pool.map(simulated, PLANS), strict=True))
    for family, what, one, other, number in BANDS:
        a, b = found[family][one], found[family][other]
        ours = None if "error" in a or "error" in b else a[what] / b[what]
        yield f"{family}, {what}: {one} over {other}", number, ours
    gains = [ratio for ratio, _ in ratios(Cluster.parse("v100:2x8")).values()]
    yield "cases of 18 that searched paths improve", 12, sum(gain > 1.05 for gain in gains)
    yield "largest gain of a searched path", 57, max(gains)


def run() -> list[str]:
    """Print the comparison, and return what failed."""
    failed = []
    for what, number, ours in compared():
        line = f"{what}: {number:g}, now {'refused' if ours is None else f'{ours:.3g}'}"
        print(line)
        if ours is None or abs(ours / number - 1) > HIT:
            failed.append(line)
    return failed
