"""The largest model, and the longest sequence, that one GPU of 32 GB trains: the paper's two experiments on one GPU.

    python benchmarks/gpu/memory.py [--experiment model|sequence] [--gigabytes 32] [--steps 3] [--toy]

model     Swin Transformer v2 of growing width, images of 1536 x 1536, one at a time
sequence  GPT-3 1.3B over growing sequences, one at a time

Under `recompute` (each block computed again), offload (so, with weights and optimizer state on the host, as ZeRO-3 does
on one device) and co-shard (heads and MLP in 4 parts, one after the other). bf16 autocast, float32 weights, AdamW.
Prints for each size the peak memory and the median seconds of a step, and at the end the largest that fits, beside the
ratios of the paper: co-shard trains a model 3.7 times as large, and a sequence 1.7 times as long as with recompute, 1.2
times as long as with offload. A plan that is out of memory is not tried on larger sizes. Each run is a process of its
own. `--toy` is a check of this file without a GPU: tiny models, bytes of tensors counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch

import superscaler as ss
from superscaler.models import build
from superscaler.plans import resolve

sys.path.insert(0, str(Path(__file__).parents[1]))
from live import Live

SWIN, GPT = "swin:batch=1,heads=16,device=meta,hidden=", "gpt3:size=1.3b,batch=1,device=meta,seq="
# What is tried, in growing order, and the toys.
SIZES = {
    "model": ([f"{SWIN}{n}" for n in (128, 192, 224, 256, 320, 384, 432, 512)], ["swin:size=tiny"]),
    "sequence": (
        [f"{GPT}{n}" for n in (2048, 4096, 6144, 8192, 10240, 12288, 16384)],
        [f"gpt3:size=tiny,batch=1,seq={n}" for n in (16, 32)],
    ),
}
# Of co-shard's largest size to that of other plans, in the paper.
EXPECTED = {"model": {"recompute": 3.7, "offload": 3.7}, "sequence": {"recompute": 1.7, "offload": 1.2}}


@ss.sprogram
def offload(graph: ss.Graph, cluster: ss.Cluster) -> None:
    resolve("recompute")(graph, cluster)
    ss.op_assign(graph, list(graph.updates.values()), "host")


PLANS: dict[str, Callable[..., Any]] = {
    "recompute": resolve("recompute"),
    "offload": offload,
    "co-shard": resolve("co_shard:parts=4"),
}


def run(spec: str, plan: str, steps: int, gigabytes: float) -> dict[str, float]:
    """Return the size, the peak bytes and the median seconds of a step of one plan, in this process."""
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / torch.cuda.mem_get_info()[1])
    built = build(spec)
    assert built.make_batch is not None
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-4)
    graph = ss.capture(built.module, built.args, built.kwargs, optimizer, autocast="bf16")
    compiled = ss.compile(graph, PLANS[plan], "local:1")
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29534",
    }
    size = sum(prod(t.shape) for t in graph.model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        compiled.save(folder)
        step = ss.load(folder)
        seconds, counted = list[float](), Live()
        with counted if not is_cuda else torch.cuda.device(0):
            for number in range(steps + 1):
                batch = {n: x.cuda() if is_cuda else x for n, x in built.make_batch(number).items()}
                start = time.perf_counter()
                float(step(batch))
                seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() if is_cuda else counted.peak
    torch.distributed.destroy_process_group()
    return {"size": size, "peak": peak, "seconds": statistics.median(seconds[1:])}


def tried(spec: str, plan: str, options: argparse.Namespace) -> dict[str, float] | None:
    """Run one plan in a process of its own. Returns None where it is out of memory."""
    given = "--case", spec, plan, "--steps", str(options.steps), "--gigabytes", str(options.gigabytes)
    done = subprocess.run([sys.executable, __file__, *given], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    if "out of memory" not in done.stderr:
        sys.exit(f"{plan} on {spec} failed:\n{done.stderr[-2000:]}")
    return None


def experiment(name: str, options: argparse.Namespace) -> None:
    largest: dict[str, float] = dict.fromkeys(PLANS, 0.0)
    left = list(PLANS)
    for spec in SIZES[name][options.toy]:
        for plan in list(left):
            found = tried(spec, plan, options)
            if found is None:
                left.remove(plan)
                print(f"{spec:55} {plan:10} out of memory", flush=True)
                continue
            largest[plan] = found["size"] if name == "model" else float(spec.rpartition("=")[2])
            told = f"{found['size'] / 1e9:6.3f} G parameters {found['peak'] / 1e9:8.3f} GB {found['seconds']:8.3f} s"
            print(f"{spec:55} {plan:10} {told}", flush=True)
    for plan, ratio in EXPECTED[name].items():
        found_ratio = largest["co-shard"] / largest[plan] if largest[plan] else float("inf")
        print(f"{name}: co-shard's largest to {plan}'s: {found_ratio:.2f}, in the paper {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", choices=SIZES, action="append")
    parser.add_argument("--gigabytes", type=float, default=32.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "PLAN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run(*options.case, options.steps, options.gigabytes)))
    elif not torch.cuda.is_available() and not options.toy:
        print("skipped: no CUDA device on this machine; --toy tries tiny models on the CPU")
    else:
        for name in options.experiment or SIZES:
            experiment(name, options)


if __name__ == "__main__":
    main()
