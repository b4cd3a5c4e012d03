"""ZeRO's stages against `torch.distributed.fsdp.fully_shard`, interleaved in one run: median of the ratios ours / peer.

    python benchmarks/fsdp.py [--steps 12] [--only stage3]

The GPT-2 of step_time.py on 2 processes of one thread, gloo, float32, AdamW; a group of parameters a block.

stage3     `zero:stage=3`, and fully_shard with its blocks in activation checkpoints: both gather weights twice and
           compute blocks twice
stage3_keep  the same against fully_shard without checkpoints, which keeps the activations and gathers weights twice
stage1     `zero`, and fully_shard(reshard_after_forward=False): weights are gathered once
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from step_time import batch_at, gpt2, local_step, optimizer_of, row

# Plan, whether the peer's blocks are in checkpoints, whether it frees weights after the forward.
ROWS = {
    "stage3": ("zero:stage=3", True, True),
    "stage3_keep": ("zero:stage=3,keep=1000", False, True),
    "stage1": ("zero", False, False),
}


def peer(is_again: bool, is_freed: bool) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, mesh = gpt2(), init_device_mesh("cpu", (2,))
    blocks: Any = module.transformer.h
    for number, block in enumerate(blocks):
        blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False) if is_again else block
        fully_shard(blocks[number], mesh=mesh, reshard_after_forward=is_freed)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    rank = torch.distributed.get_rank()
    return local_step(module, lambda x: x.chunk(2)[rank])


def worker(name: str, directory: str, steps: int) -> None:
    """Time ours and the peer's steps in turn on one rank; rank 0 writes the pairs of seconds."""
    import torch.distributed as dist

    import superscaler as ss

    torch.set_num_threads(1)
    ours, pairs = ss.load(directory), []
    other = peer(*ROWS[name][1:])
    for number in range(steps + 2):
        batch, seconds = batch_at(number), []
        for step in (ours, other) if number % 2 else (other, ours):
            dist.barrier()
            start = time.perf_counter()
            step(batch)
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        pairs.append(seconds if number % 2 else seconds[::-1])
    if ours.rank == 0:
        Path(directory, "pairs.txt").write_text("\n".join(f"{a} {b}" for a, b in pairs[2:]))
    ours.close()


def measure(name: str, steps: int) -> list[tuple[float, float]]:
    import superscaler as ss
    from superscaler.plans import resolve
    from superscaler.runtime.launch import launch

    module = gpt2()
    graph = ss.capture(module, kwargs=batch_at(0), optimizer=optimizer_of(module))
    plan = ss.compile(graph, resolve(ROWS[name][0]), ss.Cluster.local(2))
    with tempfile.TemporaryDirectory() as folder:
        plan.save(folder)
        launch(Path(__file__), ["--worker", name, "--plan", folder, "--steps", str(steps)], 2)
        lines = Path(folder, "pairs.txt").read_text().splitlines()
    return [(float(a), float(b)) for a, b in (line.split() for line in lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--worker")
    parser.add_argument("--plan")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.plan, options.steps)
        return
    print(f"torch {torch.__version__}; seconds a step (median of {options.steps}), and the median of the ratios")
    print(f"{'':12} {'ours':>8} {'peer':>8} {'ours/peer':>10} {'range':>15}")
    for name in options.only.split(","):
        pairs = measure(name, options.steps)
        print(row(f"{name:12}", pairs), flush=True)


if __name__ == "__main__":
    main()
