"""E10 and E11: exchanges between the devices of two servers, peer to peer and by the searched path, priced."""

from __future__ import annotations

from itertools import product

from figures import bars
from points import Rows
from report import VERDICTS, table, verdict
from rvd import CASES, layout, p2p

from superscaler.cluster import Cluster
from superscaler.materialize.rvd.route import priced
from superscaler.materialize.rvd.search import Path, find_path

# Elements of float16: 64 MiB.
SIZE, ITEM = 2**25, 2
COUNTS = ((8, 8), (8, 4), (4, 8))


def ratios(cluster: Cluster) -> dict[str, tuple[float, Path]]:
    """Return, of each case, the seconds of peer to peer over those of the searched path, and that path."""
    found = {}
    for (held, read), kinds in product(COUNTS, CASES):
        devices = range(held), range(8, 8 + read)
        source, goal = (layout(kind, some) for kind, some in zip(kinds.split("-"), devices, strict=True))
        costs = priced(cluster)
        path = find_path(source, goal, (SIZE,), ITEM, costs)
        direct = p2p(source, goal, SIZE, ITEM, costs).seconds
        found[f"{kinds[0]}({held}) {kinds[2]}({read})"] = direct / path.seconds, path
    return found


def steps(path: Path) -> str:
    """Return the kinds of the steps of a path, those of equal kind in a row as one."""
    kinds = [step.kind for step in path.steps]
    return ", ".join(kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind)


def run(rows: Rows) -> str:
    found = ratios(Cluster.parse("v100:2x8"))
    better = sum(ratio > 1.05 for ratio, _ in found.values())
    most = max(ratio for ratio, _ in found.values())
    drawn = {"R(4) R(8)": "chunk, rd_scatter, all_gather", "V(4) D(8)": "reduce_scatter, rd_scatter"}
    return "\n".join([
        "### E10, E11. Searched paths between two servers\n",
        f"{SIZE * ITEM // 2**20} MiB, by the link model of `v100:2x8`; measured over a slow link between two network",
        "namespaces with the same paths: `benchmarks/results/rvd.txt` (61.8 where 64 is possible).\n",
        table(("case", "times faster than peer to peer", "path"),
              ([case, f"{ratio:.1f}", steps(path)] for case, (ratio, path) in found.items())),
        bars("e10", "E10: searched paths over peer to peer", {
            case.replace(" ", "\n"): {"searched": ratio} for case, (ratio, _) in found.items() if ratio > 1.05
        }, "times faster", (57, "the paper's largest: 57")),
        table(VERDICTS, [
            verdict("cases of 18 that improve", 12, better),
            verdict("largest gain", 57, most),
            *([f"path of {case}: {wanted}", "as drawn", steps(found[case][1]),
               "hit" if steps(found[case][1]) == wanted else "miss", ""] for case, wanted in drawn.items()),
        ]),
    ])  # fmt: skip
