"""The plans that a search finds, beside brute force over its whole space.

    python benchmarks/search.py [--cases 20] [--seed 0] [--part 60] [--keep FILE]
    python benchmarks/search.py --bounds [--models llama]     # ten models and clusters
    python benchmarks/search.py --time     # the first of these in two precisions, with nothing measured before
    python benchmarks/search.py --paper [--models mbart] [--devices 8,32] [--where "no swap"]      # search_paper.py
    python benchmarks/search.py --measured [--models gpt2] [--devices 2,4] [--beside "zero; fsdp"]

Cases are drawn: a GPT-2 or llama of 2 to 6 blocks, 2 to 8 devices of a preset, a batch, a memory. Each plan of the
space is compiled whole and simulated; `bound` is the search's, in the best step of all. A whole space takes minutes.
With `--part`, constraints are drawn for each case until at most so many plans are left; `broken` counts the plans of
the answer that do not satisfy them. `--keep`: what brute force found is written into a file, a line for a case, and
read again from there. Cases in which no plan fits have no regret.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from search_measured import MODELS
from search_measured import run as run_measured
from search_paper import CAPACITY, CLUSTERS, FAMILIES, SAMPLES, captured, of_batch
from search_paper import MODELS as PAPER
from search_paper import run as run_paper

import superscaler as ss
from superscaler.errors import InputError
from superscaler.launch.second import prepare
from superscaler.models import build
from superscaler.planner import WORK
from superscaler.planner.constraints import left, read
from superscaler.planner.menu import Menu
from superscaler.planner.search import search
from superscaler.planner.space import Choice, choices
from tests.helpers.graphs import graph_of

HEAD = "{:>6} {:>8} {:>8} {:>7} {:>7} {:>7} {:>7} {:>6}  {}"
ROW = "{:6d} {:8.4f} {:8.4f} {:7.3f} {:7.3f} {:7.1f} {:7d} {:6d}  {}"
# The constraints of which parts of the space are drawn.
CLAUSES = (
    *(f"{name} {sign} {n}" for name in ("pp", "tp", "dp", "rows") for sign in ("=", "<=", ">=") for n in (1, 2, 4)),
    *(f"zero = {n}" for n in (0, 1, 3)), *(f"recompute != {x}" for x in ("none", "selective", "full")),
    "no recompute", "no swap, no chunked", "no co_shard", "no ulysses, no ring", "layout = sequence",
    *(f"no {x}" for x in ("interleaved", "zb_h1", "zbv", "interlaced", "chimera")),
    *(f"schedule = {x}" for x in ("1f1b", "zb_h1", "chimera")),
)  # fmt: skip
FEWEST = 8
# Bounds are to be so much of the best step.
NEAR = 0.95
# Models and clusters whose searches are timed, and whose bounds are set beside the best steps, in the precision of the
# cluster; those of the paper are in its own.
BENCHES = (
    ("gpt2:layers=48,hidden=2048,heads=16,seq=1024,batch=256", "a100:4x8"),
    ("gpt2:layers=48,hidden=2048,heads=16,seq=1024,batch=2048", "a100:128x8"),
    ("llama:size=8b,seq=4096,batch=64", "h100:1x8"),
    ("llama:size=8b,seq=4096,batch=128", "h100:2x8"),
    ("llama:size=70b,seq=4096,batch=256", "h100:8x8"),
    ("llama:size=70b,seq=4096,batch=1024", "h100:64x8"),
    ("mixtral:size=8x7b,seq=4096,batch=64", "h100:2x8"),
    *((f"{PAPER[family][8]},batch={SAMPLES}", CLUSTERS[8]) for family in ("gpt3", "swin", "mbart")),
)


@dataclass(frozen=True)
class Case:
    """A model, a cluster, and bytes of a device."""

    model: str
    cluster: str
    memory: int
    where: str = ""

    @classmethod
    def drawn(cls, draw: random.Random) -> Case:
        family, blocks = draw.choice(["gpt2", "llama"]), draw.randint(2, 6)
        hidden, seq = draw.choice([512, 1024, 2048]), draw.choice([256, 512, 1024])
        sizes = f"layers={blocks},hidden={hidden},heads=16,seq={seq},vocab=8192,batch={draw.choice([8, 16, 32])}"
        cluster = f"{draw.choice(['v100', 'a100', 'h100'])}:1x{draw.choice([2, 4, 8])}"
        return cls(f"{family}:{sizes},device=meta", cluster, draw.choice([4, 8, 16, 32]) * 10**9)

    def __str__(self) -> str:
        where = f" where {self.where}" if self.where else ""
        return f"{self.model.removesuffix(',device=meta')} {self.cluster} {self.memory // 10**9} GB{where}"

    def space(self) -> list[Choice]:
        """Return the plans of the case."""
        menu, cluster = Menu(graph_of(self.model), ss.Cluster.parse(self.cluster)), ss.Cluster.parse(self.cluster)
        every = list(choices(cluster, menu.batch, sum(map(len, menu.runs)), layouts=["sequence"]))
        return left(every, read(self.where))

    def part(self, most: int) -> Case:
        """Return the case with drawn constraints that leave at most so many plans."""
        draw, case = random.Random(str(self)), self
        while len(case.space()) > most:
            where = ", ".join(filter(None, [case.where, draw.choice(CLAUSES)]))
            try:
                count = len(Case(case.model, case.cluster, case.memory, where).space())
            except InputError:
                continue
            case = Case(case.model, case.cluster, case.memory, where) if count >= FEWEST else case
        return case


def steps(case: Case) -> Iterator[tuple[float, bool]]:
    """Yield the seconds of the step of each plan of the space, and whether it fits."""
    graph, cluster = graph_of(case.model), ss.Cluster.parse(case.cluster)
    for choice in case.space():
        try:
            p = ss.compile(graph, choice.spec, cluster).simulate(case.memory)
        except ss.PlanError:
            continue
        yield p.step_seconds, p.fits


def brute(case: Case, file: Path | None) -> tuple[int, float]:
    """Return the number of plans that hold, and the least seconds of those that fit; from a file that has them."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    known = {key: (count, best) for key, count, best in map(json.loads, lines)}
    if str(case) not in known:
        found = [*steps(case)]
        known[str(case)] = len(found), min((seconds for seconds, fits in found if fits), default=inf)
        if file is not None:
            with file.open("a") as out:
                out.write(json.dumps([str(case), *known[str(case)]]) + "\n")
    return known[str(case)]


def compare(case: Case, file: Path | None) -> tuple[float, float, int]:
    """Print a row of a case; return the regret, the bound in the best step, and the plans that break a constraint."""
    count, best = brute(case, file)
    start = time.process_time()
    answer = search(graph_of(case.model), case.cluster, case.memory, where=case.where)
    spent = time.process_time() - start
    found = answer.best.prediction.step_seconds if answer.best.prediction.fits else inf
    # The stages of a found plan may have other numbers of blocks than those that brute force tries.
    best = min(best, found)
    regret, bound = (1.0, 1.0) if best == inf else (found / best, answer.bound / best)
    broken = sum(not one.allows(plan.choice, None) for plan in answer.plans for one in read(case.where))
    print(ROW.format(count, best, found, regret, bound, spent, len(answer.plans), broken, case), flush=True)
    return regret, bound, broken


def bench(model: str, cluster: str, is_full: bool = False) -> float:
    """Print the seconds of a search, without the capture (beside which a second process loads its modules), and the
    bound in the best step; return that. `is_full`: in float32, not in the precision of the cluster.
    """
    prepare(WORK)
    is_paper, model_of = cluster == CLUSTERS[8], f"{model},device=meta"
    graph = ss.Graph(of_batch(captured(model_of), 512)) if is_paper else as_trained(model_of, cluster, is_full)
    clock, start = time.monotonic(), time.process_time()
    answer = search(graph, cluster, round(CAPACITY) if is_paper else None)
    spent, own = time.monotonic() - clock, time.process_time() - start
    best, counts = (
        answer.best.prediction.step_seconds,
        f"{len(answer.estimates)} estimates, {len(answer.plans)} whole plans",
    )
    case = f"{model} {cluster}{' in float32' * is_full}"
    print(f"{case}: {spent:.1f} s ({own:.1f} CPU s of this process), {counts}")
    fits = "" if answer.best.prediction.fits else " DOES NOT FIT"
    print(f"  {answer.best.spec}: {best:.3f} s{fits}; the bound is {answer.bound / best:.3f} of it", flush=True)
    return answer.bound / best


def as_trained(model: str, cluster: str, is_full: bool = False) -> ss.Graph:
    """Return the training step of a model, captured in the precision of a cluster, as `superscaler search` has it, or
    in float32.
    """
    built = build(model)
    optimizer = torch.optim.AdamW(built.module.parameters(), fused=True)
    precision = None if is_full else ss.Cluster.parse(cluster).precision
    return ss.capture(built.module, built.args, built.kwargs, optimizer, precision=precision, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, default=10**6)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--models", default="")
    parser.add_argument("--devices", default="")
    parser.add_argument("--where", default="")
    parser.add_argument("--beside", default="")
    options = parser.parse_args()
    if options.paper or options.measured:
        chosen = [int(text) for text in options.devices.split(",") if text]
        if options.paper:
            run_paper([f for f in FAMILIES if options.models in f], chosen or [8, 32], options.where)
        else:
            beside = [text.strip() for text in options.beside.split(";") if text.strip()]
            run_measured([m for m in MODELS if options.models in m], chosen or [2, 4], beside)
        return
    if options.time:
        for is_full in (True, False):
            with TemporaryDirectory() as kept:
                os.environ["XDG_CACHE_HOME"] = kept
                bench(*BENCHES[0], is_full)
        return
    if options.bounds:
        found = [bench(*case) for case in BENCHES if options.models in case[0]]
        print(f"{sum(bound >= NEAR for bound in found)} of {len(found)} bounds are within 5 % of the best step")
        return
    print(HEAD.format("plans", "best", "found", "regret", "bound", "CPU s", "whole", "broken", "case"))
    draw = random.Random(options.seed)
    rows = [compare(Case.drawn(draw).part(options.part), options.keep) for _ in range(options.cases)]
    worst, bound = max(regret for regret, *_ in rows), sum(bound for _, bound, _ in rows) / len(rows)
    near = sum(bound >= NEAR for _, bound, _ in rows)
    print(f"worst regret {worst:.3f}; {sum(broken for *_, broken in rows)} plans break a constraint; bounds are "
          f"{bound:.3f} of the best step in the mean, {near} of {len(rows)} within 5 %")  # fmt: skip


if __name__ == "__main__":
    main()
