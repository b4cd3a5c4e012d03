"""E9: GPT-3 1.3B in tensor parallelism over more devices, its sums by messages, by collectives, and by searched paths.

Programs have collectives wherever one fits. What the same sums cost as messages follows from the price of both: the
exposed communication is longer by as much as messages are slower. Between stages of four devices each, on two servers,
the exchange of a microbatch is priced as messages and as the searched path.
"""

from __future__ import annotations

from e10 import ITEM
from models import GPUS, MODELS
from points import Point, Rows
from report import VERDICTS, share, table, verdict
from rvd import layout, p2p
from systems import CLUSTERS

from superscaler.cluster import Cluster
from superscaler.materialize.rvd.route import priced
from superscaler.materialize.rvd.search import find_path

# A microbatch between two layers.
SIZE = 16384 * 2048


def slower(gpus: int) -> float:
    """Return the seconds of a sum over devices as messages, over those of the collective."""
    costs, devices = priced(Cluster.parse(CLUSTERS[gpus])), range(gpus)
    source, goal = layout("V", devices), layout("R", devices)
    return p2p(source, goal, SIZE, ITEM, costs).seconds / find_path(source, goal, (SIZE,), ITEM, costs).seconds


def between_stages() -> float:
    costs = priced(Cluster.parse("v100:2x8"))
    source, goal = layout("R", range(4, 8)), layout("R", range(8, 12))
    return p2p(source, goal, SIZE, ITEM, costs).seconds / find_path(source, goal, (SIZE,), ITEM, costs).seconds


def run(rows: Rows) -> str:
    lines, gains = [], dict[int, float]()
    for gpus in GPUS:
        plan = f"hybrid:tp={gpus},microbatches={{m}},recompute=full"
        row = rows.get(Point(MODELS["gpt3, softmax in float16"][4], plan, CLUSTERS[gpus], 512))
        factor = slower(gpus)
        if row and "error" not in row:
            waits = share(row, "communication")
            gains[gpus] = 1 - waits + waits * factor
            lines.append([str(gpus), f"{row['seconds']:.0f}", f"{waits:.0%}", f"{factor:.1f}", f"{gains[gpus]:.1f}"])
        else:
            lines.append([str(gpus), "not run", "", f"{factor:.1f}", ""])
    needed = (32 - 1) / (slower(32) - 1)
    cause = f"the share of collectives in the step: {needed:.0%} would make 32; the paper does not give its sequence"
    return "\n".join([
        "### E9. GPT-3 1.3B: messages, collectives, searched paths\n",
        table(("GPUs", "step s", "communication", "messages over collective", "step over step"), lines),
        table(VERDICTS, [
            verdict("collectives over messages at 32 GPUs", 32, gains.get(32), cause),
            ["exchange between stages of 4, searched over messages (the paper: end to end)", "1.6",
             f"{between_stages():.1f}", "", "the whole step gains less: exchanges are hidden behind microbatches"],
        ]),
    ])  # fmt: skip
