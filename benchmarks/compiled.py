"""Compiled steps of our plans beside compiled peers, in turns in one run: medians of the ratios ours / peer.

    python benchmarks/compiled.py [--steps 20] [--only single,data_parallel] [--cases host,middle,llama]

GPT-2 (Hugging Face) with 4 layers, and a llama, float32, fused AdamW, 1 thread a process, gloo. `host`: so small that
starting operators is most of a step; `middle`: hidden 256, sequence 128, vocabulary 2048. Ours is `torch_compile=True`.
Peers:

single           torch.compile of the module
recompute        the same, its blocks in activation checkpoints
co_shard         torch.compile of the module (it has no such plan)
data_parallel    torch DDP of it
zero3            torch's fully_shard, of compiled blocks in activation checkpoints: both gather weights twice
pipeline_1f1b    torch.distributed.pipelining with 4 microbatches, of compiled stages

Columns: seconds a step of ours and of the peer (wall), the median of the ratios, that of CPU seconds of the process
(threads of gloo included), kernels that Inductor makes on rank 0, the ratio of the first steps, which compile, and the
most megabytes of tensors that rank 0 holds in a step, ours and the peer's, with their ratio. These are counted by
`held.py`, each side in a process of its own: weights, optimizer and what is kept between steps (DDP's buckets) too.
Both start with an empty cache of compiled code.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import held
import step_time
import torch
from torch import Tensor, nn

CASES: dict[str, dict[str, Any]] = {
    "host": {"HIDDEN": 64, "HEADS": 4, "SEQUENCE": 16, "BATCH": 8, "VOCABULARY": 512, "MICROBATCHES": 4},
    "middle": {"HIDDEN": 256, "HEADS": 4, "SEQUENCE": 128, "BATCH": 8, "VOCABULARY": 2048, "MICROBATCHES": 4},
}
CASES["llama"] = CASES["middle"]
# Ours and the number of devices.
PLANS = {
    "single": (1, "single"),
    "recompute": (1, "recompute"),
    "co_shard": (1, "co_shard:parts=4"),
    "data_parallel": (2, "data_parallel"),
    "zero3": (2, "zero:stage=3"),
    "pipeline_1f1b": (2, "pipeline_1f1b:microbatches=4"),
}
# Of a llama: the peers for one device and DDP are written for any module.
OF_LLAMA = ("single", "co_shard", "data_parallel")
Step = Callable[[dict[str, Tensor]], Any]


def use(case: str) -> None:
    """Set the sizes and the model of a case in `step_time`, whose models and peers run."""
    vars(step_time).update(CASES[case])
    if case == "llama":
        step_time.gpt2 = lambda tied=True: step_time.llama()  # type: ignore[assignment]


def peer_of(name: str, rank: int, cuts: step_time.Cuts) -> Step:
    """Return the peer's step: that of `step_time`, of modules that are compiled."""
    make, plain = step_time.gpt2, step_time.Stage
    if name == "pipeline_1f1b":
        step_time.Stage = lambda *given: compiled(plain(*given))  # type: ignore[assignment,misc]
        return step_time.peer_pipeline(name, rank, cuts)
    if name == "zero3":
        step_time.gpt2 = lambda tied=True: compiled_blocks(make(tied))  # type: ignore[assignment]
        return step_time.peer_sharded(name, rank, cuts)
    step_time.gpt2 = lambda tied=True: compiled(make(tied))  # type: ignore[assignment]
    return {
        "recompute": step_time.peer_recompute,
        "data_parallel": step_time.peer_data_parallel,
    }.get(name, step_time.peer_single)(rank, cuts)


def compiled(module: nn.Module) -> nn.Module:
    module.compile()
    return module


def compiled_blocks(module: Any) -> nn.Module:
    for block in module.transformer.h:
        block.compile()
    return module


def worker(name: str, directory: str, steps: int, cuts: step_time.Cuts) -> None:
    """Time ours and the peer's steps in turn on one rank, and write what was found."""
    import torch.distributed as dist
    from torch._inductor import metrics

    import superscaler as ss

    torch.set_num_threads(1)
    ours = ss.load(directory, torch_compile=True)
    sides = {"ours": ours, "peer": peer_of(name, ours.rank, cuts)}
    found: dict[str, dict[str, Any]] = {side: {"wall": [], "cpu": [], "kernels": 0} for side in sides}
    for number in range(steps + 3):
        batch = step_time.batch_at(number)
        for side in sides if number % 2 else reversed(sides):
            if ours.world > 1:
                dist.barrier()
            before, start, cpu = metrics.generated_kernel_count, time.perf_counter(), time.process_time()
            sides[side](batch)
            if ours.world > 1:
                dist.barrier()
            found[side]["wall"].append(time.perf_counter() - start)
            found[side]["cpu"].append(time.process_time() - cpu)
            found[side]["kernels"] += metrics.generated_kernel_count - before
    Path(directory, f"found{ours.rank}.json").write_text(json.dumps(found))
    ours.close()


def counter(side: str, name: str, directory: str, cuts: step_time.Cuts) -> None:
    """Count the most bytes that a side holds in a step, and write it."""
    import superscaler as ss
    from superscaler.comm.distributed import connect

    torch.set_num_threads(1)
    before = held.now()
    made: Any = ss.load(directory, torch_compile=True) if side == "ours" else connect()
    step: Step = made if side == "ours" else peer_of(name, made.rank, cuts)
    for number in range(4):
        step(step_time.batch_at(number))
    gc.collect()
    held.restart()
    step(step_time.batch_at(4))
    Path(directory, f"held_{side}{made.rank}.txt").write_text(str(held.most() - before))
    made.close()


def measure(case: str, name: str, steps: int) -> Mapping[str, Mapping[str, Any]]:
    """Return what rank 0 found of a plan and its peer."""
    import superscaler as ss
    from superscaler.launch.launch import launch
    from superscaler.plans import resolve

    world, spec = PLANS[name]
    module = step_time.gpt2(tied=name != "pipeline_1f1b")
    graph = ss.capture(module, kwargs=step_time.batch_at(0), optimizer=step_time.optimizer_of(module), check=False)
    plan = ss.compile(graph, resolve(spec), ss.Cluster.local(world))
    cuts = list(step_time.cuts_of(graph, world)) if name == "pipeline_1f1b" else []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        plan.save(folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        options = ["--worker", name, "--plan", folder, "--cuts", json.dumps(cuts), "--cases", case]
        launch(Path(__file__), [*options, "--steps", str(steps)], world)
        found: dict[str, dict[str, Any]] = json.loads(Path(folder, "found0.json").read_text())
        os.environ |= held.environment()
        try:
            for side in found:
                launch(Path(__file__), [*options, "--held", side], world)
                found[side]["memory"] = int(Path(folder, f"held_{side}0.txt").read_text()) / 1e6
        finally:
            del os.environ["LD_PRELOAD"]
    return found


def row(case: str, name: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    ours, peer = found["ours"], found["peer"]
    # The first steps compile, in the turn of the second, too.
    walls, cpus = (ratios(ours[kind][3:], peer[kind][3:]) for kind in ("wall", "cpu"))
    seconds = [statistics.median(side["wall"][3:]) for side in (ours, peer)]
    first = sum(ours["wall"][:2]) / sum(peer["wall"][:2])
    return (
        f"{case:7} {name:14} {seconds[0]:8.4f} {seconds[1]:8.4f} {statistics.median(walls):6.3f} "
        f"{walls[0]:5.2f} -{walls[-1]:5.2f} {statistics.median(cpus):6.3f} {ours['kernels']:5} {peer['kernels']:5} "
        f"{first:6.2f} {ours['memory']:6.1f} {peer['memory']:6.1f} {ours['memory'] / peer['memory']:5.2f}"
    )


def ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    return sorted(a / b for a, b in zip(ours, peer, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default=",".join(PLANS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--worker")
    parser.add_argument("--held")
    parser.add_argument("--plan")
    parser.add_argument("--cuts", default="[]")
    options = parser.parse_args()
    if options.worker:
        use(options.cases)
        cuts = json.loads(options.cuts)
        if options.held:
            counter(options.held, options.worker, options.plan, cuts)
        else:
            worker(options.worker, options.plan, options.steps, cuts)
        return
    print(f"torch {torch.__version__}; medians of {options.steps} steps")
    print("case    plan               ours     peer  ratio        range    cpu  ours  peer  first     MB   peer ratio")
    for case in options.cases.split(","):
        use(case)
        for name in options.only.split(","):
            if case != "llama" or name in OF_LLAMA:
                print(row(case, name, measure(case, name, options.steps)), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
