"""Simulated points of the evaluation: a model under a plan on a cluster, each a row of a file, so that a run goes on.

A step of 512 samples is many microbatches, all of them alike. A few are compiled and simulated, and the step is theirs
and a `period` for each of the others: the seconds between the ends of two microbatches on the device where these are
furthest apart, the last microbatch left out (it sums gradients). The peak of memory is that of the few: from twice as
many microbatches as stages on it does not grow.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "benchmarks/results/paper/rows.jsonl"
# What a row depends on beside its own key.
SIMULATOR = ("superscaler/simulate", "superscaler/cluster")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """`plan` has {m} in the place of its number of microbatches, of `size` samples on each of `dp` devices.

    `batch`: the samples of a step. `stages` of the pipeline.
    """

    model: str
    plan: str
    cluster: str
    batch: int
    stages: int = 1
    dp: int = 1
    size: int = 1

    @property
    def whole(self) -> int:
        """Return the number of microbatches of a step."""
        return self.batch // (self.dp * self.size)

    @property
    def few(self) -> int:
        """Return the number of them that are simulated."""
        return min(self.whole, max(3, 2 * self.stages))

    @property
    def spec(self) -> str:
        return self.plan.replace("{m}", str(self.few))

    @property
    def key(self) -> str:
        return json.dumps([self.model, self.spec, self.cluster, self.batch, self.size])


def simulator() -> str:
    """Return the hash of the folders of the simulator, as committed."""
    shown = [subprocess.check_output(["git", "rev-parse", f"HEAD:{p}"], cwd=ROOT, text=True)[:10] for p in SIMULATOR]
    return "-".join(shown)


class Rows:
    """The rows on disk. With `keep`, rows of another simulator count too; with `only_known`, nothing is simulated."""

    def __init__(self, keep: bool = False, only_known: bool = False) -> None:
        self.simulator, self.only_known = simulator(), only_known
        lines = ROWS.read_text().splitlines() if ROWS.exists() else []
        found = (json.loads(line) for line in lines)
        self.known = {row["key"]: row for row in found if keep or row["simulator"] == self.simulator}
        self.graphs: dict[str, Any] = {}

    def get(self, point: Point) -> Row | None:
        """Return the row of a point, simulated now if it is not known; None where it was to be known."""
        if point.key not in self.known and not self.only_known:
            row = {"key": point.key, "simulator": self.simulator, **asdict(point), **self._simulated(point)}
            self.known[point.key] = row
            ROWS.parent.mkdir(parents=True, exist_ok=True)
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(said(row), flush=True)
        return self.known.get(point.key)

    def best(self, ladders: Iterable[Iterable[Point]]) -> Row | None:
        """Return the row of the fastest plan that fits, of each ladder the first; else of the one that needs least."""
        found: list[Row] = []
        for ladder in ladders:
            for point in ladder:
                row = self.get(point)
                if row and "error" not in row:
                    found.append(row)
                    if row["fits"]:
                        break
        fitting = [row for row in found if row["fits"]]
        return min(fitting or found, key=lambda row: row["seconds"] if fitting else row["peak"], default=None)

    def _simulated(self, point: Point) -> Row:
        from superscaler.errors import PlanError

        try:
            return self._predicted(point)
        except PlanError as error:
            return {"error": str(error).splitlines()[0]}

    def _predicted(self, point: Point) -> Row:
        import superscaler as ss

        spec = f"{point.model},batch={point.few * point.dp * point.size},device=meta"
        seconds, started = {}, time.process_time()

        def lap(name: str) -> None:
            seconds[name] = round(time.process_time() - started - sum(seconds.values()), 2)

        if spec not in self.graphs:
            self.graphs = {spec: captured(spec)}
        lap("capture")
        plan = ss.compile(self.graphs[spec], point.spec, point.cluster)
        lap("compile")
        plan.validate()
        lap("certificate")
        found, period = predicted(plan, point.few)
        lap("simulate")
        more = point.whole - point.few
        whole = found.step_seconds + more * period
        full, parts = found.fullest, ("compute", "communication", "bubble", "copies", "optimizer", "launch")
        return {
            "seconds": whole, "simulated": found.step_seconds, "period": period, "microbatches": point.whole,
            "tflops": found.model_flops * point.whole / point.few / whole / 1e12, "fits": found.fits,
            "peak": full.peak_bytes, "memory": {k: v for k, v in full.memory.items() if v > 10**7},
            "largest": list(full.largest), "peak_at": full.peak_at, **{part: found.mean(part) for part in parts},
            "links": dict(found.links), "ops": len(plan.compiled.graph.ops), "cpu": seconds,
        }  # fmt: skip


def captured(spec: str) -> Any:
    """Return the graph of a model with float16 weights and float32 copies of them in Adam, as the paper trained."""
    import torch

    import superscaler as ss
    from superscaler.models import build

    built = build(spec)
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    return ss.capture(
        built.module, built.args, built.kwargs, optimizer, precision="fp16", scaler=scaler, cache=built.cache,
        check=False,
    )  # fmt: skip


def predicted(plan: Any, microbatches: int) -> tuple[Any, float]:
    """Return the prediction of a plan, and the seconds between two of its microbatches."""
    from superscaler.simulate import predict

    tables, clock = list[Any](), predict.clock

    def noted(*args: Any, **kwargs: Any) -> Any:
        tables.append(clock(*args, **kwargs))
        return tables[-1]

    predict.clock = noted
    try:
        found = plan.simulate()
    finally:
        predict.clock = clock
    return found, period(tables[0], microbatches)


def period(table: Any, microbatches: int) -> float:
    """Return the seconds between the ends of the backwards of two microbatches, in the second half without the last."""
    from superscaler.ir.program import Backward

    first, last = (microbatches - 1) // 2, microbatches - 2
    if last <= first:
        first, last = 0, microbatches - 1
    found = 0.0
    for lane in table.lanes:
        ends: dict[int, Any] = {}
        for n, at in enumerate(lane.instruction.tolist()):
            i = lane.code[at]
            if isinstance(i, Backward) and lane.streams[lane.stream[n]] == lane.streams[0]:
                ends[i.task.microbatch] = lane.end[n]
        if {first, last} <= ends.keys() and last > first:
            found = max(found, float(((ends[last] - ends[first]) / (last - first)).max()))
    return found


def said(row: Row) -> str:
    """Return a row as a line of text."""
    what = f"{row['model']} | {row['plan']} | {row['cluster']}"
    if "error" in row:
        return f"{what}: {row['error'][:150]}"
    verdict = "fits" if row["fits"] else "out of memory"
    speed = f"{row['seconds']:.1f} s, {row['tflops']:.0f} TFLOPS"
    return f"{what}: {speed}, {row['peak'] / 1e9:.1f} GB, {verdict}; CPU seconds {row['cpu']}"
