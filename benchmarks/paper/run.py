"""The paper's evaluation on the modelled cluster: simulates what is missing, and writes docs/evaluation.md.

    python benchmarks/paper/run.py [--only E6] [--gpus 4,32] [--known] [--keep]
    python benchmarks/paper/run.py --quick

Points are rows of benchmarks/results/paper/rows.jsonl, so that a run that was ended goes on. --gpus: only points on so
many GPUs are simulated. --known: nothing is simulated, the report has what is known. --keep: rows of an older simulator
count. --quick: quick.py, a check in a minute; no file is written. Figures need `pip install -e '.[paper]'`.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

# In the order of their cost.
EXPERIMENTS = ("e10", "e7", "e3", "e4", "e8", "e9", "e6", "e2", "e5", "e13", "e12")


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
    parser.add_argument("--only", type=str.lower, choices=EXPERIMENTS)
    parser.add_argument("--gpus", type=lambda text: [int(n) for n in text.split(",")])
    options = parser.parse_args()
    os.chdir(ROOT)
    if options.quick:
        failed = quick.run()
        sys.exit("\n".join(["failed:", *failed]) if failed else None)
    gpus = [] if options.known else options.gpus or CLUSTERS
    rows = Rows(options.keep, [CLUSTERS[n] for n in gpus])
    figures.FOLDER = None if options.only else figures.FOLDER
    parts = {}
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
