"""Predicted and measured steps of plans on this machine: 2 processes on gloo, one thread each.

    python benchmarks/simulate_steps.py [--steps 5] [--only gpt2:single,llama:zero] [--cluster machine.yaml]

The machine is measured by `superscaler doctor --measure` before and after the steps of each model, since its speed
moves by several percent within minutes; predictions are the means of both. `--cluster`: of an earlier measurement.
Every plan is measured three times, in turns with the others; a time is the median of its steps. `spread`: the slowest
turn over the fastest. Wants an idle machine: `ranks` compares the orders of the plans, predicted and measured.

`work`: the error of the predicted work of rank 0, beside the least seconds of CPU that its thread took for a step. They
hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
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
    """Time the steps of the plans of one rank, in turns, and write the median of each turn."""
    import torch.distributed as dist

    import superscaler as ss
    from superscaler.models import build

    torch.set_num_threads(1)
    make_batch = build(model).make_batch
    assert make_batch is not None
    found: dict[str, list[float]] = {folder: [] for folder in folders}
    work = dict.fromkeys(folders, math.inf)
    for _ in range(TURNS):
        for folder in folders:
            step, seconds = ss.load(folder), []
            for number in range(WARM + steps):
                batch = make_batch(number)
                if step.world > 1:
                    dist.barrier()
                start, own = time.perf_counter(), time.thread_time()
                step(batch)
                own = time.thread_time() - own
                work[folder] = min(work[folder], own if number >= WARM else math.inf)
                if step.world > 1:
                    dist.barrier()
                seconds.append(time.perf_counter() - start)
            found[folder].append(statistics.median(seconds[WARM:]))
            rank = step.rank
            step.close()
    if rank == 0:
        Path(folders[0], "times.json").write_text(json.dumps([found, work]))


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
    import superscaler as ss
    from superscaler.launch.launch import launch
    from superscaler.models import build

    cluster = ss.Cluster.parse(given.cluster) if given.cluster else measured()
    only = given.only.split(",") if given.only else [f"{m}:{p}" for m in MODELS for p in PLANS]
    for name, spec in MODELS.items():
        chosen = [plan for plan in PLANS if f"{name}:{plan}" in only]
        if not chosen:
            continue
        model = build(spec)
        graph = ss.capture(model.module, model.args, model.kwargs, torch.optim.AdamW(model.module.parameters()))
        plans, times, works = {}, {}, {}
        with tempfile.TemporaryDirectory() as parent:
            for world in (1, 2):
                folders = {plan: str(Path(parent, plan)) for plan in chosen if (plan in ALONE) == (world == 1)}
                for plan, folder in folders.items():
                    plans[plan] = ss.compile(graph, PLANS[plan], of(cluster, world))
                    plans[plan].save(folder)
                if folders:
                    options = ["--worker", *folders.values(), "--steps", str(given.steps), "--model", spec]
                    launch(Path(__file__), options, world)
                    found, work = json.loads(Path(next(iter(folders.values())), "times.json").read_text())
                    times |= {plan: found[folder] for plan, folder in folders.items()}
                    works |= {plan: work[folder] for plan, folder in folders.items()}
        around = (cluster, cluster if given.cluster else measured())
        predicted = {
            name: [predict(plan.compiled.program, of(c, len(plan.compiled.cluster.devices))) for c in around]
            for name, plan in plans.items()
        }
        cluster = around[1]
        own = {name: statistics.mean(p.step_seconds for p in found) for name, found in predicted.items()}
        print(f"{spec}\n{'plan':16} {'predicted ms':>13} {'measured ms':>12} {'error':>7} {'spread':>7} {'work':>7}")
        for plan in chosen:
            ours, real = own[plan], statistics.median(times[plan])
            spread = max(times[plan]) / min(times[plan]) - 1
            work = statistics.mean(map(work_of, predicted[plan])) / works[plan] - 1
            print(f"{plan:16} {ours * 1e3:13.1f} {real * 1e3:12.1f} {ours / real - 1:+7.1%} {spread:7.1%} {work:+7.1%}")
        pairs = [(own[plan], statistics.median(times[plan])) for plan in chosen]
        signs = [(a - c) * (b - d) > 0 for (a, b), (c, d) in combinations(pairs, 2)]
        print(f"ranks: {sum(signs)} of {len(signs)} pairs of plans in the measured order\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
