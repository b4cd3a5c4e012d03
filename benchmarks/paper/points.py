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
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from models import DEPTHS, shallow

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "benchmarks/results/paper/rows.jsonl"
# What a row depends on beside its own key.
SIMULATOR = ("superscaler/simulate", "superscaler/cluster")
# The batch that a model is captured with; points resize it.
SAMPLES = 8
CAPACITY = 32e9
# Programs of a cluster are simulated on these, too: half of the NIC (a V100 server without GPUDirect), and H100s.
_SLOW = "{{name: half, preset: v100, servers: {}, devices_per_server: 8, links: {{network: {{bandwidth: 6.0e9}}}}}}"
OTHERS = {f"v100:{n}x8": {"half of the NIC": _SLOW.format(n), "H100": f"h100:{n}x8"} for n in (2, 4)}

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
    """The rows on disk. With `keep`, rows of another simulator count too; of those that miss, points on `clusters`
    are simulated. With `shallow`, models have few layers, and nothing is read or written.
    """

    def __init__(self, keep: bool = False, clusters: Collection[str] = (), shallow: bool = False) -> None:
        self.simulator, self.clusters, self.shallow = simulator(), clusters, shallow
        lines = ROWS.read_text().splitlines() if ROWS.exists() and not shallow else []
        found = (json.loads(line) for line in lines)
        self.known = {row["key"]: row for row in found if keep or row["simulator"] == self.simulator}
        self.graphs: dict[str, Any] = {}

    def get(self, point: Point) -> Row | None:
        """Return the row of a point, simulated now if it is not known; None where it was to be known."""
        if self.shallow:
            depths = {"swin": "depths=1-1-2-1", "mbart": "layers=4"}
            depth = depths.get(point.model.split(":")[0], "layers=2")
            point = replace(point, model=f"{point.model},{depth}")
        layers, models = shallow(point.model)
        if point.key not in self.known and models:
            rows = [self.get(replace(point, model=model)) for model in models]
            return on_line(layers, *rows) if all(rows) else None  # type: ignore[arg-type]
        if point.key not in self.known and point.cluster in self.clusters:
            for row in self._simulated(point):
                self.known[row["key"]] = row
                self._write(row)
        return self.known.get(point.key)

    def _write(self, row: Row) -> None:
        if not self.shallow:
            ROWS.parent.mkdir(parents=True, exist_ok=True)
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(said(row), flush=True)

    def best(self, ladders: Iterable[Iterable[Point]], lean: bool = False) -> Row | None:
        """Return the row of the fastest plan that fits, of each ladder the first; else of the one that needs least.

        `lean`: a parameter takes 12 bytes, see `leaner`.
        """
        found: list[Row] = []
        for ladder in ladders:
            for point in ladder:
                row = self.get(point)
                if row and "error" not in row:
                    found.append(leaner(row) if lean else row)
                    if found[-1]["fits"]:
                        break
        fitting = [row for row in found if row["fits"]]
        return min(fitting or found, key=lambda row: row["seconds"] if fitting else row["peak"], default=None)

    def _simulated(self, point: Point) -> Iterator[Row]:
        """Yield the row of a point, and of the same program on OTHERS of its cluster."""
        from superscaler.errors import PlanError

        seconds: dict[str, float] = {}
        try:
            plan = self._compiled(point, seconds)
        except PlanError as error:
            yield self._row(point, {"error": str(error).splitlines()[0]})
            return
        for cluster in (point.cluster, *OTHERS.get(point.cluster, {}).values()):
            started = time.process_time()
            found = predicted(plan, cluster, point)
            found["cpu"] = {**seconds, "simulate": round(time.process_time() - started, 2)}
            yield self._row(replace(point, cluster=cluster), found)

    def _row(self, point: Point, found: Row) -> Row:
        return {"key": point.key, "simulator": self.simulator, **asdict(point), **found}

    def _compiled(self, point: Point, seconds: dict[str, float]) -> Any:
        import superscaler as ss

        started = time.process_time()

        def lap(name: str) -> None:
            seconds[name] = round(time.process_time() - started - sum(seconds.values()), 2)

        if point.model not in self.graphs:
            kept = list(self.graphs.items())[-1:]
            self.graphs = {**dict(kept), point.model: captured(f"{point.model},batch={SAMPLES},device=meta")}
        graph = of_batch(self.graphs[point.model], point.few * point.dp * point.size)
        lap("capture")
        plan = ss.compile(graph, point.spec, point.cluster)
        lap("compile")
        plan.validate()
        lap("certificate")
        return plan


def on_line(layers: int, first: Row, second: Row) -> Row:
    """Return the row of a model of so many layers, from those of DEPTHS."""
    for row in (first, second):
        if "error" in row:
            return row
    one, two = DEPTHS
    share = (layers - one) / (two - one)

    def line(a: Any, b: Any) -> Any:
        if isinstance(b, dict):
            return {key: line(a.get(key, 0), value) for key, value in b.items()}
        return a + (b - a) * share if isinstance(b, float) else b

    made = {key: line(first.get(key), value) for key, value in second.items()}
    peak = line(float(first["peak"]), float(second["peak"]))
    memory = line({k: float(v) for k, v in first["memory"].items()}, {k: float(v) for k, v in second["memory"].items()})
    work = line(*(row["tflops"] * row["seconds"] for row in (first, second)))
    fits = peak <= (80e9 if second["cluster"].startswith("h100") else CAPACITY)
    return {**made, "peak": peak, "memory": memory, "fits": fits, "tflops": work / made["seconds"], "layers": layers}


def leaner(row: Row) -> Row:
    """Return a row as if weights and gradients were float16, and Adam's two states float32 without a copy: 12 bytes a
    parameter in the place of 18.
    """
    states = row["memory"]
    peak = row["peak"] - states.get("gradients", 0) / 2 - states.get("optimizer", 0) / 3
    return {**row, "peak": peak, "fits": row["fits"] or peak <= CAPACITY}


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


def of_batch(graph: Any, samples: int) -> Any:
    """Return a captured graph for another number of samples: the sizes of one factor, and the operations."""
    from superscaler.ir.graph import Graph

    model = graph.model
    before = model.factors["batch"].size

    def size(factor: str, old: int) -> int:
        return samples if factor == "batch" else old

    tensors = {}
    for name, tensor in model.tensors.items():
        extents = tuple(map(size, tensor.factors, tensor.extents))
        tensors[name] = replace(tensor, extents=extents, shape=tensor.local_shape(extents))
    ops = []
    for op in model.ops:
        indices = tuple(replace(i, size=size(i.factor, i.size)) for i in op.indices)
        scale = samples if indices != op.indices else before
        ops.append(replace(op, indices=indices, flops=op.flops * scale // before))
    factors = {name: replace(f, size=size(name, f.size)) for name, f in model.factors.items()}
    return Graph(replace(model, tensors=tensors, ops=tuple(ops), factors=factors), graph.captured)


def predicted(plan: Any, cluster: str, point: Point) -> Row:
    """Return the prediction of a plan, which was compiled for this cluster or for one of equal shape."""
    from superscaler.cluster import Cluster
    from superscaler.simulate.predict import simulate

    simulation = simulate(plan.compiled.program, Cluster.parse(cluster))
    found = simulation.prediction
    # No steady state is shorter than the work of a device.
    each = max(period(simulation.table, point.few), found.mean("compute") / point.few)
    whole = found.step_seconds + (point.whole - point.few) * each
    full, parts = found.fullest, ("compute", "communication", "bubble", "copies", "optimizer", "launch")
    return {
        "seconds": whole, "simulated": found.step_seconds, "period": each, "microbatches": point.whole,
        "tflops": found.model_flops * point.whole / point.few / whole / 1e12, "fits": found.fits,
        "peak": full.peak_bytes, "memory": {k: v for k, v in full.memory.items() if v > 10**7},
        "largest": list(full.largest), "peak_at": full.peak_at, **{part: found.mean(part) for part in parts},
        "links": dict(found.links), "ops": len(plan.compiled.graph.ops),
    }  # fmt: skip


def period(table: Any, microbatches: int) -> float:
    """Return the seconds between the ends of the backwards of two microbatches, in the second half without the last.

    Slices of microbatches have numbers of their own, so that there are more of them.
    """
    from superscaler.ir.program import Backward

    found, ends = 0.0, list[dict[int, Any]]()
    for lane in table.lanes:
        ends.append({})
        for n, at in enumerate(lane.instruction.tolist()):
            i = lane.code[at]
            if isinstance(i, Backward) and lane.streams[lane.stream[n]] == lane.streams[0]:
                ends[-1][i.task.microbatch] = lane.end[n]
    count = 1 + max(max(own, default=0) for own in ends)
    first, last = (count - 1) // 2, count - 2
    if last <= first:
        first, last = 0, count - 1
    for own in ends:
        if {first, last} <= own.keys() and last > first:
            found = max(found, float(((own[last] - own[first]) / (last - first)).max()))
    return found * count / microbatches


def said(row: Row) -> str:
    """Return a row as a line of text."""
    what = f"{row['model']} | {row['plan']} | {row['cluster']}"
    if "error" in row:
        return f"{what}: {row['error'][:150]}"
    verdict = "fits" if row["fits"] else "out of memory"
    speed = f"{row['seconds']:.1f} s, {row['tflops']:.0f} TFLOPS"
    return f"{what}: {speed}, {row['peak'] / 1e9:.1f} GB, {verdict}; CPU seconds {row['cpu']}"
