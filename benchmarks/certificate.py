"""Single mutations of small plans: what refuses each, and whether what nothing refuses gives other numbers.

    python benchmarks/certificate.py [--plans tensor,hybrid] [--most 100] [--numbers 30] [--show 5]

Every instruction is left out, repeated and exchanged with the next; every number, flag and name of every instruction,
weight and function is another; several are others that look right one by one, as a weight that is loaded again after
its update, or two messages of one number (`tests/helpers/mutants.py`). `certificate` and `deadlock` count what these
checks refuse.
Of what is left `ran` mutants ran two steps in float64: `equal` gave the numbers of the plan, `fails` did not run to the
end, `MISSED` gave others. `--most` bounds the mutants of a class and plan, `--numbers` those that run; both are drawn
at random, always the same ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

COUNTS = (("mutants", 8), ("certificate", 12), ("deadlock", 9), ("left", 7), ("ran", 6), ("equal", 6), ("fails", 6))
HEAD = f"{'mutation':20}" + "".join(f"{name:>{width}}" for name, width in COUNTS) + " MISSED"


def main() -> None:
    from tests.helpers.outcome import SCOPES, Row, added, sweep
    from tests.helpers.small_plans import PLANS

    options = _options(list(PLANS))
    torch.set_num_threads(1)
    every: dict[str, list[Row]] = {}
    for name in options.plans.split(","):
        for scope in SCOPES.get(name, ("one device",)):
            start = time.perf_counter()
            rows = sweep(name, scope, options.most, options.numbers)
            title = f"{name}, {scope}" if name in SCOPES else name
            print(f"\n{title}: {PLANS[name].world} devices, {time.perf_counter() - start:.0f} s\n{HEAD}")
            for kind, row in rows.items():
                print(_line(kind, row))
                for text in [*row.raised, *row.missed, *row.failed][: options.show]:
                    print(f"    {text}")
                every.setdefault(kind, []).append(row)
            print(_line("all", added(rows.values())), flush=True)
    print(f"\nall plans\n{HEAD}")
    for kind, found in every.items():
        print(_line(kind, added(found)))
    print(_line("all", added(row for found in every.values() for row in found)))


def _options(plans: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default=",".join(plans), help="which, separated by commas")
    parser.add_argument("--most", type=int, default=None, help="how many mutants of a class and plan (default: all)")
    parser.add_argument("--numbers", type=int, default=30, help="how many mutants of a class and plan run at most")
    parser.add_argument("--show", type=int, default=5, help="how many missed mutants of a class and plan are told")
    return parser.parse_args()


def _line(kind: str, row: Any) -> str:
    refused = row.caught["certificate"], row.caught["deadlock"]
    counts = (row.mutants, *refused, row.survived, row.ran, row.equal, len(row.failed))
    shown = "".join(f"{count:{width},}" for count, (_, width) in zip(counts, COUNTS, strict=True))
    raised = f"   {len(row.raised)} raised no ScheduleError" if row.raised else ""
    return f"{kind:20}{shown}{len(row.missed):7,}{raised}"


if __name__ == "__main__":
    main()
