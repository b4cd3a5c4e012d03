"""Searches for the models of the paper beside the plans of its systems: `python benchmarks/search.py --paper`.

The models, their precision (float16 with float32 copies), clusters and batch are those of the evaluation; the steps of
its systems are in benchmarks/results/paper/rows.jsonl. Nothing of these plans is given to the search. Of AlphaFold2
both sides have 12 layers: the evaluation simulates 8 and 12, and puts deeper models on the line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from superscaler.ir.graph import Graph
from superscaler.planner.search import search

sys.path.insert(0, str(Path(__file__).resolve().parent / "paper"))

from models import ALPHAFOLD2_DEPTHS, MODELS
from points import CAPACITY, OTHERS, SAMPLES, Point, Row, Rows, captured, of_batch
from systems import CLUSTERS, spaces

FAMILIES = "gpt3", "mbart", "swin", "alphafold2"
_DEPTH = ALPHAFOLD2_DEPTHS[1]
HEAD = "{:11} {:>5} {:>9} {:>9} {:>6} {:>6}  {}"
ROW = "{:11} {:5} {:9.1f} {:9.1f} {:6.3f} {:6.0f}  {}"


def shallow(model: str) -> str:
    """Return a model of as many layers as are simulated."""
    if not model.startswith("alphafold2"):
        return model
    return f"{model.replace('3.2b', '2.4b')},layers={_DEPTH}"


def systems(family: str, devices: int) -> Iterator[tuple[str, Point, Row]]:
    """Yield each system of the evaluation whose best plan fits, with that plan and its row."""
    rows = Rows(keep=True)
    for system, ladders in spaces(family, devices).items():
        own: list[list[Point]] = [[replace(p, model=shallow(p.model)) for p in ladder] for ladder in ladders]
        row = rows.best(own)
        if row is not None and row.get("fits"):
            yield system, next(p for ladder in own for p in ladder if p.plan == row["plan"]), row


def simulated(point: Point, model: Any) -> Row:
    """Return the row of a plan by the simulator of today, on this cluster alone: that of the file may be older."""
    rows = Rows(clusters=[point.cluster], file=None)
    OTHERS.clear()
    rows.models = {f"{point.model},batch={SAMPLES},device=meta": model}
    with redirect_stdout(sys.stderr):
        found = rows.get(point)
    assert found is not None
    return found


def progress(line: str) -> None:
    """Print a line of a search as it goes on, with the CPU seconds until then."""
    print(f"  {time.process_time():5.0f} s: {line}", file=sys.stderr, flush=True)


def compare(family: str, devices: int, where: str) -> None:
    """Print the found plan beside that of the best system."""
    model = captured(f"{shallow(MODELS[family][devices])},batch={SAMPLES},device=meta")
    system, point, row = min(systems(family, devices), key=lambda found: float(found[2]["seconds"]))
    start = time.process_time()
    answer = search(Graph(of_batch(model, point.batch)), CLUSTERS[devices], round(CAPACITY), where, note=progress)
    found, spent = answer.best.prediction, time.process_time() - start
    step, peak, best = found.step_seconds, found.fullest.peak_bytes / 1e9, simulated(point, model)
    print(ROW.format(family, devices, step, best["seconds"], step / best["seconds"], spent, answer.best.spec))
    fits = "fits" if found.fits else "DOES NOT FIT"
    words = f"{best['peak'] / 1e9:.1f} GB, {row['seconds']:.1f} s in the evaluation"
    print(f"  {peak:.1f} GB, {fits}; {system}, {words}: {point.spec_of(point.whole)}", flush=True)


def run(families: Sequence[str], devices: Sequence[int], where: str) -> None:
    """Print a row for each family on so many devices. `where`: constraints of the searches."""
    print(HEAD.format("model", "GPUs", "found s", "system s", "ratio", "CPU s", "found plan"))
    for family in families:
        for count in devices:
            compare(family, count, where)
