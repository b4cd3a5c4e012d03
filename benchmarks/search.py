"""Searches beside loops over the whole space, and their time.

    python benchmarks/search.py [--cases 20] [--seed 0]        # regret: the found step in that of the best of all plans
    python benchmarks/search.py --time                         # 48 blocks on 32 and on 1,024 devices

Cases are drawn: a GPT-2 or llama of 2 to 6 blocks, 2 to 8 devices of a preset, a batch, a memory. Each plan of the
space is compiled whole and simulated; `bound` is the search's, in the best step of all.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from math import inf

import superscaler as ss
from superscaler.planner.menu import Menu
from superscaler.planner.search import search
from superscaler.planner.space import choices
from tests.helpers.graphs import graph_of

HEAD = "{:58} {:>6} {:>8} {:>8} {:>7} {:>7} {:>7}"
ROW = "{:58} {:6d} {:8.4f} {:8.4f} {:7.3f} {:7.3f} {:7.1f}"


@dataclass(frozen=True)
class Case:
    """A model, a cluster, and bytes of a device."""

    model: str
    cluster: str
    memory: int

    @classmethod
    def drawn(cls, draw: random.Random) -> Case:
        family, blocks = draw.choice(["gpt2", "llama"]), draw.randint(2, 6)
        hidden, seq = draw.choice([512, 1024, 2048]), draw.choice([256, 512, 1024])
        sizes = f"layers={blocks},hidden={hidden},heads=16,seq={seq},vocab=8192,batch={draw.choice([8, 16, 32])}"
        cluster = f"{draw.choice(['v100', 'a100', 'h100'])}:1x{draw.choice([2, 4, 8])}"
        return cls(f"{family}:{sizes},device=meta", cluster, draw.choice([4, 8, 16, 32]) * 10**9)


def compare(case: Case) -> tuple[float, float]:
    """Print a row of a case; return the regret and the bound in the best step."""
    graph, cluster = graph_of(case.model), ss.Cluster.parse(case.cluster)
    menu = Menu(graph, cluster)
    best, count = inf, 0
    for choice in choices(cluster, menu.batch, sum(map(len, menu.runs)), layouts=["sequence"]):
        try:
            p = ss.compile(graph, choice.spec, cluster).simulate(case.memory)
        except ss.PlanError:
            continue
        count += 1
        best = min(best, p.step_seconds) if p.fits else best
    start = time.process_time()
    answer = search(graph, cluster, case.memory)
    found = answer.best.prediction.step_seconds if answer.best.prediction.fits else inf
    regret = 1.0 if found == best else found / best
    text = f"{case.model.removesuffix(',device=meta')} {case.cluster} {case.memory // 10**9} GB"
    print(ROW.format(text, count, best, found, regret, answer.bound / best, time.process_time() - start), flush=True)
    return regret, answer.bound / best


def measure(cluster: str, batch: int) -> None:
    """Print the CPU seconds of a search for 48 blocks, without the capture."""
    graph = graph_of(f"gpt2:layers=48,hidden=2048,heads=16,seq=1024,batch={batch},device=meta")
    start = time.process_time()
    answer = search(graph, cluster)
    best, spent = answer.best.prediction.step_seconds, time.process_time() - start
    print(f"{cluster}: {spent:.1f} CPU s, {len(answer.estimates)} estimates, {len(answer.plans)} whole plans")
    print(f"  {answer.best.spec}: {best:.3f} s; the bound is {answer.bound / best:.3f} of it", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    if options.time:
        measure("a100:4x8", 256)
        measure("a100:128x8", 2048)
        return
    print(HEAD.format("case", "plans", "best", "found", "regret", "bound", "CPU s"))
    draw = random.Random(options.seed)
    rows = [compare(Case.drawn(draw)) for _ in range(options.cases)]
    worst, bound = max(regret for regret, _ in rows), sum(bound for _, bound in rows) / len(rows)
    print(f"worst regret {worst:.3f}; bounds are {bound:.3f} of the best step in the mean")


if __name__ == "__main__":
    main()
