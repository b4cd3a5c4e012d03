"""The paper's evaluation on the modelled cluster: simulates what is missing, and writes docs/evaluation.md.

    python benchmarks/paper/run.py [--jobs 2] [--only E6] [--gpus 4,32] [--known] [--keep]
    python benchmarks/paper/run.py --quick

Points are rows of benchmarks/results/paper/rows.jsonl, so that a run that was ended goes on. --jobs: processes that
simulate. --gpus: only points on so many GPUs are simulated. --known: nothing is simulated, the page has what is known.
--keep: rows of an older simulator count. --quick: quick.py, a check in a minute; no file is written. Figures need
`pip install -e '.[paper]'`.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

# The largest parts of the work, by experiment and GPUs: each has models of its own. Later ones ask for points of them.
PARTS = (*((e, gpus) for gpus in (32, 16, 8, 4) for e in ("e2", "e4", "e5", "e3")), ("e6", 1), ("e7", 1), ("e13", 32))
# In the order of their cost.
EXPERIMENTS = ("e10", "e7", "e3", "e4", "e8", "e9", "e6", "e2", "e5", "e13", "e12")


def simulate(part: tuple[str, int], keep: bool, models: str) -> None:
    """Simulate the points of an experiment on so many GPUs; they are added to the file of rows."""
    import figures
    from points import Rows
    from systems import CLUSTERS

    figures.FOLDER = None
    name, gpus = part
    import_module(name).run(Rows(keep, [CLUSTERS[gpus]], models=models))


def main() -> None:
    import e12
    import e13
    import figures
    import quick
    import report
    from points import ROOT, Rows
    from systems import CLUSTERS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--quick", "--known", "--keep"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=str.lower, choices=EXPERIMENTS)
    parser.add_argument("--gpus", type=lambda text: [int(n) for n in text.split(",")])
    options = parser.parse_args()
    os.chdir(ROOT)
    if options.quick:
        failed = quick.run()
        sys.exit("\n".join(["failed:", *failed]) if failed else None)
    gpus = [] if options.known else options.gpus or list(CLUSTERS)
    at_once = [p for p in PARTS if p[1] in gpus and options.only in (None, p[0])]
    figures.FOLDER = None if options.only else figures.FOLDER
    parts = {}
    with TemporaryDirectory() as models, ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for done in [pool.submit(simulate, part, options.keep, models) for part in at_once if options.jobs > 1]:
            done.result()
        rows = Rows(options.keep, [CLUSTERS[n] for n in gpus], models=models)
        for rows.experiment in EXPERIMENTS:
            if options.only in (None, rows.experiment):
                parts[rows.experiment] = import_module(rows.experiment).run(rows)
    if options.only:
        print("\n".join(parts.values()))
        return
    head = (HERE / "head.md").read_text().replace("MIXED", e12.mixed(rows))
    ordered = {name: parts[name] for name in sorted(parts, key=lambda name: int(name[1:]))}
    head = head.replace("SUMMARY", f"{report.summary(ordered)}\n{e13.advice(rows)}")
    (ROOT / "docs/evaluation.md").write_text("\n".join([head, *ordered.values()]))


if __name__ == "__main__":
    main()
