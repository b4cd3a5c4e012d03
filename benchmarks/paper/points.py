"""Simulated points of the evaluation: a model under a plan on a cluster, each a row of a file, so that a run goes on.

A step of 512 samples is many microbatches, all of them alike. A few are compiled and simulated, and the step is theirs
and a `period` for each of the others: the seconds between the ends of two microbatches on the device where these are
furthest apart, the last microbatch left out (it sums gradients). Where backwards are bunched, as in an interlaced
pipeline or 3F1B, that is less than the work of a device; the period is then what the second half of the microbatches
adds to a program with the first half alone. The peak of memory is that of the few: from twice as many microbatches as
stages on it does not grow.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from models import shallow

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "benchmarks/results/paper/rows.jsonl"
# What a row depends on beside its own key.
SIMULATOR = ("superscaler/simulate", "superscaler/cluster")
# The batch that a model is captured with; points resize it.
SAMPLES = 8
CAPACITY, CAPACITY_H100 = 32e9, 80e9
# The smallest that CUDA, NCCL and the allocator take beside tensors: see superscaler/simulate/memory.py.
BESIDE = 1.6e9
# Weights and gradients, and the copy and the two states of Adam.
BYTES = 2 + 4 + 12
# Programs of a cluster are simulated on these, too: half of the NIC (a V100 server without GPUDirect) where they fit,
# and H100s for E13.
HALF = "half of the NIC"
NIC, SLOW_NIC = 12.5, 6.0
_SLOW = "{{name: half, preset: v100, servers: {}, devices_per_server: 8, links: {{network: {{bandwidth: 6.0e9}}}}}}"
OTHERS: dict[str, dict[str, str]] = {f"v100:{n}x8": {HALF: _SLOW.format(n)} for n in (2, 4)}
OTHERS["v100:4x8"]["H100"] = "h100:4x8"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """`plan` has {m} in the place of its number of microbatches, of `size` samples on each of `dp` devices.

    `batch`: the samples of a step. `stages` of the pipeline. `spread`: the devices over which weights and their states
    are cut; `cut`: the parts into which one layer's tensors are cut. The bound needs both; 0 where it is not asked.
    """

    model: str
    plan: str
    cluster: str
    batch: int
    stages: int = 1
    dp: int = 1
    size: int = 1
    spread: int = 0
    cut: int = 0

    @property
    def whole(self) -> int:
        """Return the number of microbatches of a step."""
        return self.batch // (self.dp * self.size)

    @property
    def few(self) -> int:
        """Return the number of them that are simulated."""
        return few_of(self.whole, self.stages)

    @property
    def spec(self) -> str:
        return self.spec_of(self.few)

    def spec_of(self, microbatches: int) -> str:
        return self.plan.replace("{m}", str(microbatches))

    @property
    def key(self) -> str:
        return json.dumps([self.model, self.spec, self.cluster, self.batch, self.size])


def simulator() -> str:
    """Return the hash of the folders of the simulator, as committed."""
    shown = [subprocess.check_output(["git", "rev-parse", f"HEAD:{p}"], cwd=ROOT, text=True)[:10] for p in SIMULATOR]
    return "-".join(shown)


class Rows:
    """The rows of a file, none without one. With `keep`, rows of another simulator count too; of those that miss,
    points on `clusters` are simulated.
    """

    def __init__(
        self, keep: bool = False, clusters: Collection[str] = (), file: Path | None = ROWS, models: str = ""
    ) -> None:
        """Read the rows. `models`: a folder in which the processes of a run share captured models."""
        self.simulator, self.clusters, self.file, self.folder = simulator(), clusters, file, models
        lines = file.read_text().splitlines() if file and file.exists() else []
        found = (json.loads(line) for line in lines)
        self.known = {row["key"]: row for row in found if keep or row["simulator"] == self.simulator}
        self.models: dict[str, Any] = {}
        # The experiment that is on, and the first that asked for each row.
        self.experiment, self.asked = "", dict[str, str]()

    def get(self, point: Point) -> Row | None:
        """Return the row of a point, simulated now if it is not known; None where it was to be known."""
        layers, models = shallow(point.model, point.stages)
        if point.key not in self.known and models:
            rows = {n: row for n, model in models.items() if (row := self.get(replace(point, model=model)))}
            return on_line(layers, rows) if len(rows) == len(models) else None
        if point.key not in self.known and point.cluster in self.clusters:
            for row in self._simulated(point):
                self.known[row["key"]] = row
                self._write(row)
        if point.key in self.known:
            self.asked.setdefault(point.key, self.experiment)
        return self.known.get(point.key)

    def _write(self, row: Row) -> None:
        if self.file:
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(said(row), flush=True)

    def best(self, ladders: Iterable[Iterable[Point]], as_if: Callable[[Row], Row] | None = None) -> Row | None:
        """Return the row of the fastest plan that fits, of each ladder the first; else of the one that needs least.

        `as_if`: what rows are under another assumption.
        """
        found: list[Row] = []
        for ladder in ladders:
            for point in ladder:
                row = self.get(point)
                if row:
                    found.append(as_if(row) if as_if and "error" not in row else row)
                    if found[-1].get("fits"):
                        break
        fitting = [row for row in found if row.get("fits")]
        needs = [row for row in found if "peak" in row]
        if fitting or needs:
            return min(fitting or needs, key=lambda row: row["seconds" if fitting else "peak"])
        # Without any peak: the last of a ladder is cut furthest.
        return found[-1] if found else None

    def _simulated(self, point: Point) -> Iterator[Row]:
        """Yield the row of a point, and of the same program on OTHERS of its cluster."""
        from superscaler.errors import PlanError

        seconds: dict[str, float] = {}
        others = OTHERS.get(point.cluster, {})
        try:
            plan = self._compiled(point, seconds, CAPACITY_H100 if "H100" in others else CAPACITY)
        except PlanError as error:
            yield self._row(point, {"error": str(error).splitlines()[0]})
            return
        except TooLarge as error:
            yield self._row(point, {"error": str(error), "fits": False, "cpu": seconds})
            return
        own = self._predicted(plan, point.cluster, point, seconds)
        half = None
        if not is_steady(own):
            half = self._compiled(point, seconds, CAPACITY_H100, point.few // 2)
            own = self._predicted(plan, point.cluster, point, seconds, half)
        yield own
        for variant, cluster in others.items():
            if variant != HALF or own["fits"]:
                yield self._predicted(plan, cluster, point, seconds, half)

    def _predicted(self, plan: Any, cluster: str, point: Point, seconds: dict[str, float], half: Any = None) -> Row:
        started = time.process_time()
        found = predicted(plan, cluster, point, half)
        found["cpu"] = {**seconds, "simulate": round(time.process_time() - started, 2)}
        return self._row(replace(point, cluster=cluster), found)

    def _row(self, point: Point, found: Row) -> Row:
        return {"key": point.key, "simulator": self.simulator, **asdict(point), **found}

    def _compiled(self, point: Point, seconds: dict[str, float], capacity: float, few: int = 0) -> Any:
        """Return the plan with `few` microbatches, the point's by default, and add the seconds that it takes."""
        import superscaler as ss
        from superscaler.ir.graph import Graph

        few, last = few or point.few, time.process_time()

        def lap(name: str) -> None:
            nonlocal last
            seconds[name] = round(seconds.get(name, 0) + time.process_time() - last, 2)
            last = time.process_time()

        model = of_batch(self._model(f"{point.model},batch={SAMPLES},device=meta"), few * point.dp * point.size)
        lap("capture")
        check_bound(model, point, capacity)
        plan = ss.compile(Graph(model), point.spec_of(few), point.cluster)
        lap("compile")
        plan.validate()
        lap("certificate")
        return plan

    def _model(self, spec: str) -> Any:
        if spec not in self.models:
            kept = list(self.models.items())[-1:]
            file = Path(self.folder) / sha256(spec.encode()).hexdigest() if self.folder else None
            found = pickle.loads(file.read_bytes()) if file and file.exists() else captured(spec)
            if file and not file.exists():
                written = file.with_suffix(f".{os.getpid()}")
                written.write_bytes(pickle.dumps(found))
                written.replace(file)
            self.models = {**dict(kept), spec: found}
        return self.models[spec]


class TooLarge(Exception):
    """A plan that does not fit, whatever the order of its work."""


def check_bound(model: Any, point: Point, capacity: float) -> None:
    """Raise TooLarge if what the fullest device has to hold at some time takes more than `capacity`."""
    states, scores = least(model, point)
    if point.spread and states + scores + BESIDE > capacity:
        raise TooLarge(
            f"at least {(states + scores + BESIDE) / 1e9:.1f} GB: {states / 1e9:.1f} of states, {scores / 1e9:.1f} of "
            f"the backward of one softmax, {BESIDE / 1e9:.1f} beside tensors"
        )


def least(model: Any, point: Point) -> tuple[float, float]:
    """Return the bytes of the states of weights on a device, in the mean, and of the largest softmax in its backward:
    probabilities, their gradient, and that of the scores.
    """
    softmax = (model.tensors[op.outputs[0].tensor].nbytes for op in model.ops if "softmax" in op.target)
    scores = 3 * max(softmax, default=0) / (point.few * point.dp * max(1, point.cut))
    states = sum(prod(tensor.shape) for tensor in model.parameters()) * BYTES / max(1, point.spread)
    return states, scores


def on_line(layers: int, rows: Mapping[int, Row]) -> Row:
    """Return the row of a model of so many layers, from two of few layers."""
    (one, first), (two, second) = rows.items()
    for row in (first, second):
        if "error" in row:
            return row
    share = (layers - one) / (two - one)

    def line(a: Any, b: Any) -> Any:
        if isinstance(b, dict):
            return {key: line(a.get(key, 0), value) for key, value in b.items()}
        return a + (b - a) * share if isinstance(b, float) else b

    made = {key: line(first.get(key), value) for key, value in second.items()}
    peak = line(float(first["peak"]), float(second["peak"]))
    memory = line({k: float(v) for k, v in first["memory"].items()}, {k: float(v) for k, v in second["memory"].items()})
    work = line(*(row["tflops"] * row["seconds"] for row in (first, second)))
    fits = peak <= (CAPACITY_H100 if second["cluster"].startswith("h100") else CAPACITY)
    return {
        **made,
        "peak": peak,
        "memory": memory,
        "fits": fits,
        "tflops": work / made["seconds"],
        "depths": [one, two],
    }


def captured(spec: str) -> Any:
    """Return a model with float16 weights and float32 copies of them in Adam, as the paper trained."""
    import torch

    import superscaler as ss
    from superscaler.models import build

    built = build(spec)
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    # Not in the cache of captures: masks of Swin are gigabytes. Plans that are not run do without them.
    model = ss.capture(
        built.module, built.args, built.kwargs, optimizer, precision="fp16", scaler=scaler, check=False
    ).model
    # Cycles of the exported program hold the masks.
    gc.collect()
    return model


def of_batch(model: Any, samples: int) -> Any:
    """Return a model for another number of samples: the sizes of one factor, and the operations."""
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
    return replace(model, tensors=tensors, ops=tuple(ops), factors=factors)


def few_of(microbatches: int, stages: int) -> int:
    """Return the number of microbatches that are simulated, of all of a step."""
    return min(microbatches, max(3, 2 * stages))


def simulated(row: Row) -> int:
    return few_of(int(row["microbatches"]), int(row["stages"]))


def is_steady(row: Row) -> bool:
    """Return whether the period of a row was found: by two programs, or it is more than the work of a device, and not
    half of the pace.
    """
    if "error" in row:
        return False
    if row.get("programs") == 2:
        return True
    few = simulated(row)
    return bool(row["period"] > 1.0001 * row["compute"] / few and row["simulated"] < 2 * few * row["period"])


def predicted(plan: Any, cluster: str, point: Point, half: Any = None) -> Row:
    """Return the prediction of a plan, which was compiled for this cluster or for one of equal shape. `half`: the same
    with half of the microbatches, where the period is to come from both.
    """
    from superscaler.cluster import Cluster
    from superscaler.simulate.predict import simulate

    simulation = simulate(plan.compiled.program, Cluster.parse(cluster))
    found = simulation.prediction
    # No steady state is shorter than the work of a device.
    each = max(period(simulation.table, point.few), found.mean("compute") / point.few)
    if half:
        first = simulate(half.compiled.program, Cluster.parse(cluster)).prediction.step_seconds
        each = (found.step_seconds - first) / (point.few - point.few // 2)
    whole = found.step_seconds + (point.whole - point.few) * each
    full, parts = found.fullest, ("compute", "communication", "bubble", "copies", "optimizer", "launch")
    return {
        "seconds": whole, "simulated": found.step_seconds, "period": each, "microbatches": point.whole,
        "tflops": found.model_flops * point.whole / point.few / whole / 1e12, "fits": found.fits,
        "peak": full.peak_bytes, "memory": {k: v for k, v in full.memory.items() if v > 10**7},
        "largest": list(full.largest), "peak_at": full.peak_at, **{part: found.mean(part) for part in parts},
        "links": dict(found.links), "ops": len(plan.compiled.graph.ops), "programs": 2 if half else 1,
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
