"""Predicted and measured steps of plans on this machine: 2 processes on gloo, one thread each.

    python benchmarks/simulate_steps.py [--steps 5] [--only gpt2:single,llama:zero] [--cluster machine.yaml]

Every plan is measured three times, in turns with the others and with `superscaler doctor --measure`, since the speed of
the machine moves by several percent within minutes. `--cluster`: of an earlier measurement. A turn's time is the median
of its steps; `error` compares the mean of the predictions with the median of the turns, `best` the shortest of each:
others slow the machine, they do not make it faster. `spread`: the slowest turn over the fastest; `doctor`: the same of
the predictions. Wants an idle machine. `ranks` compares the orders of the plans, predicted and measured.

`work`: the error of the predicted work of rank 0, beside the least seconds of CPU that its thread took for a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import torch

from superscaler.cluster import Cluster
from superscaler.simulate.predict import predict
from superscaler.simulate.prediction import Prediction

SIZES = "layers=4,hidden=384,heads=8,seq=256,batch=8"
MODELS = {
    "gpt2": f"gpt2:{SIZES},vocab=4096,dropout=0",
    "llama": f"llama:{SIZES},kv_heads=8,mlp=1024,vocab=4096,tied=False",
    # Steps in which starts of communication and waits are a larger part.
    "tiny": "gpt2:size=tiny,layers=4,hidden=256,heads=8,seq=128,batch=8,dropout=0",
}
PLANS = {
    "single": "single", "data_parallel": "data_parallel", "tensor_parallel": "tensor_parallel",
    "pipeline_1f1b": "pipeline_1f1b:microbatches=4", "zero": "zero:stage=3", "recompute": "recompute",
    "co_shard": "co_shard",
}  # fmt: skip
# These plans run on one device.
ALONE = ("single", "recompute", "co_shard")
TURNS, WARM = 3, 2


def worker(folders: list[str], steps: int, model: str) -> None:
    """Time the steps of the plans of one rank, and write the median of each."""
    import torch.distributed as dist

    import superscaler as ss
    from superscaler.models import build

    torch.set_num_threads(1)
    make_batch = build(model).make_batch
    assert make_batch is not None
    for folder in folders:
        step, seconds, work = ss.load(folder), [], []
        for number in range(WARM + steps):
            batch = make_batch(number)
            if step.world > 1:
                dist.barrier()
            start, own = time.perf_counter(), time.thread_time()
            step(batch)
            work.append(time.thread_time() - own)
            if step.world > 1:
                dist.barrier()
            seconds.append(time.perf_counter() - start)
        if step.rank == 0:
            Path(folder, "times.json").write_text(json.dumps([statistics.median(seconds[WARM:]), min(work[WARM:])]))
        step.close()


def measured() -> Cluster:
    """Return this machine with 2 devices, as `superscaler doctor` measures it now."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/machine.yaml"
        options = ["doctor", "--measure", "--cluster", "local:2", "--out", file]
        subprocess.run([sys.executable, "-m", "superscaler", *options], check=True, stdout=subprocess.DEVNULL)
        return Cluster.parse(file)


def of(cluster: Cluster, world: int) -> Cluster:
    """Return so many devices of a measured machine."""
    return Cluster.of(cluster.name, cluster.kind, 1, world, cluster.links, cluster.device_kind)


def work_of(predicted: Prediction) -> float:
    """Return the predicted seconds in which rank 0 works."""
    first = next(d for d in predicted.devices if 0 in d.devices)
    return first.compute + first.optimizer + first.launch


@dataclass
class Found:
    """The predictions, the seconds of a step in each turn, and those of rank 0's thread, of one plan."""

    predicted: list[Prediction] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    works: list[float] = field(default_factory=list)

    def seconds(self, usual: bool) -> tuple[float, float]:
        """Return the predicted and the measured step: the `usual` one, or the shortest."""
        own = [p.step_seconds for p in self.predicted]
        return (statistics.mean(own), statistics.median(self.times)) if usual else (min(own), min(self.times))

    def line(self, plan: str) -> str:
        """Return the row of the table."""
        (own, real), (least, best) = self.seconds(usual=True), self.seconds(usual=False)
        spread, doctor = max(self.times) / best - 1, max(p.step_seconds for p in self.predicted) / least - 1
        work = statistics.mean(map(work_of, self.predicted)) / min(self.works) - 1
        errors = f"{own / real - 1:+7.1%} {least / best - 1:+7.1%} {spread:7.1%} {doctor:7.1%} {work:+7.1%}"
        return f"{plan:16} {own * 1e3:13.1f} {real * 1e3:12.1f} {errors}"


def compare(spec: str, chosen: list[str], steps: int, file: str | None) -> dict[str, Found]:
    """Return the predicted and the measured steps of plans of a model, in turns."""
    import superscaler as ss
    from superscaler.launch.launch import launch
    from superscaler.models import build

    model = build(spec)
    graph = ss.capture(model.module, model.args, model.kwargs, torch.optim.AdamW(model.module.parameters()))
    worlds = {plan: 1 if plan in ALONE else 2 for plan in chosen}
    plans = {plan: ss.compile(graph, PLANS[plan], Cluster.parse(f"local:{world}")) for plan, world in worlds.items()}
    found = {plan: Found() for plan in chosen}

    def foretell() -> None:
        cluster = Cluster.parse(file) if file else measured()
        for plan, world in worlds.items():
            found[plan].predicted.append(predict(plans[plan].compiled.program, of(cluster, world)))

    with tempfile.TemporaryDirectory() as parent:
        folders = {plan: str(Path(parent, plan)) for plan in chosen}
        for plan, folder in folders.items():
            plans[plan].save(folder)
        for _ in range(TURNS):
            foretell()
            for world in set(worlds.values()):
                some = [folders[plan] for plan in chosen if worlds[plan] == world]
                launch(Path(__file__), ["--worker", *some, "--steps", str(steps), "--model", spec], world)
            for plan, folder in folders.items():
                seconds, work = json.loads(Path(folder, "times.json").read_text())
                found[plan].times.append(seconds)
                found[plan].works.append(work)
    foretell()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--worker", nargs="*")
    parser.add_argument("--model")
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.steps, given.model)
        return
    only = given.only.split(",") if given.only else [f"{m}:{p}" for m in MODELS for p in PLANS]
    columns = ("error", "best", "spread", "doctor", "work")
    for name, spec in MODELS.items():
        chosen = [plan for plan in PLANS if f"{name}:{plan}" in only]
        if not chosen:
            continue
        found = compare(spec, chosen, given.steps, given.cluster)
        print(f"{spec}\n{'plan':16} {'predicted ms':>13} {'measured ms':>12}", *(f"{c:>7}" for c in columns))
        for plan in chosen:
            print(found[plan].line(plan))
        for title, usual in (("", True), (" (best)", False)):
            pairs = combinations([f.seconds(usual) for f in found.values()], 2)
            signs = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs]
            print(f"ranks{title}: {sum(signs)} of {len(signs)} pairs of plans in the measured order")
        print(flush=True)


if __name__ == "__main__":
    main()
