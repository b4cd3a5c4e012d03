"""Random plans: how many the certificate or the deadlock check refuses, and whether their numbers are the model's.

    python benchmarks/random_plans.py [--graphs 700] [--sprograms 200] [--numbers 0.1] [--first 50000] [--minutes 60]

Of each kind so many plans, from seeds that follow `--first`. `regular` and `nested` are random graphs under random
grids and trees of parts (tests/helpers/random_graphs.py); `free`, `layered`, `rewritten` and `unrolled` are random
sPrograms on small models (tests/helpers/random_sprograms.py). `rewritten` ones have recomputation, split backwards,
attention in blocks, copies, tapes on hosts, stale weights and early updates; `unrolled` ones have two iterations in the
place of stale weights. `refused`: their own orders cannot hold, or a copy changes nothing, so that there is no plan.
`alarm`: a check refuses a plan. Of a share `--numbers` of the plans, and of all alarms, a step is compared
with the model's: `equal`, `WRONG`. An alarm whose numbers are equal is a false one. `CPU ms` is that of both checks,
for a plan.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

import superscaler as ss
from superscaler.certify.certificate import CHECKS
from superscaler.errors import ScheduleError
from superscaler.ir.program import Program

sys.path.insert(0, str(Path(__file__).parents[1]))

# How many plans of a kind follow each other.
BLOCK = 10
COUNTS = ("plans", "refused", "alarm", "compared", "equal", "WRONG")
REWRITES = ("split", "blocks", "copies", "tapes", "early")
MORE = {"rewritten": (*REWRITES, "stale"), "unrolled": (*REWRITES, "unroll")}
# A program, and what tells whether its numbers are the model's.
Drawn = tuple[Program, Callable[[], bool]] | None


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    kinds = {"regular": options.graphs, "nested": options.graphs}
    kinds |= dict.fromkeys(("free", "layered", *MORE), options.sprograms)
    found, seconds = {kind: Counter[str]() for kind in kinds}, Counter[str]()
    end = time.monotonic() + 60 * options.minutes
    for block in range(0, max(kinds.values()), BLOCK):
        for kind, count in kinds.items():
            if time.monotonic() < end:
                seeds = range(options.first + block, options.first + min(block + BLOCK, count))
                seconds[kind] += _sweep(kind, seeds, options.numbers, found[kind])
    print(f"{'kind':10}" + "".join(f"{name:>10}" for name in COUNTS) + f"{'CPU ms':>10}")
    for kind in kinds:
        _show(kind, found[kind], seconds[kind])
    total = sum(found.values(), Counter[str]())
    _show("all", total, seconds.total())
    return int(bool(total["false alarm"] or total["WRONG"]))


def _show(kind: str, found: Counter[str], seconds: float) -> None:
    each = 1000 * seconds / max(found["plans"], 1)
    print(f"{kind:10}" + "".join(f"{found[name]:10,}" for name in COUNTS) + f"{each:10.1f}", flush=True)


def _sweep(kind: str, seeds: range, share: float, found: Counter[str]) -> float:
    """Count what becomes of the plans of some seeds; return the CPU seconds of the checks."""
    spent = 0.0
    drawing = _graphs if kind in ("regular", "nested") else _sprograms
    for seed, drawn in zip(seeds, drawing(kind, seeds), strict=True):
        found["plans" if drawn else "refused"] += 1
        if drawn is None:
            continue
        program, is_equal = drawn
        start = time.process_time()
        alarm = _alarm(program)
        spent += time.process_time() - start
        if alarm or (seed * share) % 1 < share:
            equal = is_equal()
            found.update(["compared", "equal" if equal else "WRONG"] + ["false alarm"] * bool(alarm and equal))
        if alarm:
            found["alarm"] += 1
            print(f"{kind}, seed {seed}: {alarm}", flush=True)
    return spent


def _alarm(program: Program) -> str:
    try:
        for check in CHECKS.values():
            check(program)
    except ScheduleError as error:
        return str(error)
    return ""


def _graphs(kind: str, seeds: range) -> Iterator[Drawn]:
    from tests.helpers.random_graphs import largest_error, random_model, random_plan

    for seed in seeds:
        model, values = random_model(seed, 6)
        compiled = random_plan(model, seed + 1, 1 + seed % 4, kind == "nested")
        yield compiled.program, lambda c=compiled, v=values: largest_error(c, v)[0] < 1e-9


@cache
def _captured(models: tuple[str, ...]) -> list[ss.Graph]:
    from tests.helpers.random_sprograms import captured

    return list(map(captured, models))


def _sprograms(kind: str, seeds: range) -> Iterator[Drawn]:
    from tests.helpers.random_sprograms import MODELS, random_sprogram

    graphs = _captured(tuple(MODELS))
    for seed in seeds:
        given: dict[str, Any] = {"kind": kind}
        if kind in MORE:
            given = {"kind": ("free", "layered")[seed // 2 % 2], "apart": 0.4, "more": MORE[kind]}
        try:
            plan = ss.compile(
                graphs[seed % len(graphs)], random_sprogram(seed, **given), ss.Cluster.local(1 + seed % 4)
            )
        except ScheduleError as error:
            if not any(text in str(error) for text in ("cycle", "Use 1 microbatch", "changes nothing")):
                raise
            yield None
            continue
        yield plan.compiled.program, lambda p=plan: bool(p.verify()["equal"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=700, help="how many plans of random graphs, of each kind")
    parser.add_argument("--sprograms", type=int, default=200, help="how many random sPrograms of each kind")
    parser.add_argument("--numbers", type=float, default=0.1, help="the share of plans whose numbers are compared")
    parser.add_argument("--first", type=int, default=50_000, help="the first seed")
    parser.add_argument("--minutes", type=float, default=60, help="no plan is drawn after these")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
