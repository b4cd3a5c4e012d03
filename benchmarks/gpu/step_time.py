"""GPT-2 small on one GPU: our emitted code (`single`, nccl group of one) against the eager module and `torch.compile`.

    python benchmarks/gpu/step_time.py [--steps 20]

bf16 weights, batch 8, sequence 1024, dropout 0, AdamW. Prints the median ratios of interleaved steps and the peak
memory of each. Skips with a message where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SEQUENCE, BATCH, VOCABULARY = 1024, 8, 50257


def build() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).train().to(torch.bfloat16)


def batch_at(step: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = {n: torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator) for n in ("input_ids", "labels")}
    return {n: x.to(device) for n, x in ids.items()}


def module_step(module: Any, call: Callable[..., Any]) -> Callable[[dict[str, Tensor]], None]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step(batch: dict[str, Tensor]) -> None:
        call(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours() -> Callable[[dict[str, Tensor]], Any]:
    import superscaler as ss
    from superscaler.plans import resolve

    module = build()
    graph = ss.capture(module, kwargs=batch_at(0, "cpu"), optimizer=torch.optim.AdamW(module.parameters(), lr=1e-4))
    plan = ss.compile(graph, resolve("single"), ss.Cluster.local(1))
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
    }
    with tempfile.TemporaryDirectory() as folder:
        plan.save(folder)
        return ss.load(folder)


def seconds(step: Callable[[dict[str, Tensor]], Any], batch: dict[str, Tensor]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step(batch)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device on this machine")
        return
    eager, compiled = build().cuda(), build().cuda()
    sides = {"ours": ours(), "eager": module_step(eager, eager)}
    sides["torch.compile"] = module_step(compiled, torch.compile(compiled))
    times: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, float] = {}
    for number in range(options.steps + 5):
        batch = batch_at(number, "cuda")
        for name, step in sides.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            times[name].append(seconds(step, batch))
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, GPT-2 small, bf16, batch 8, sequence 1024")
    print(f"{'':14} {'seconds':>9} {'ours/this':>10} {'peak of a step GiB':>19}")
    for name in sides:
        kept = times[name][5:]
        ratio = statistics.median(a / b for a, b in zip(times["ours"][5:], kept, strict=True))
        print(f"{name:14} {statistics.median(kept):9.4f} {ratio:10.3f} {peaks[name]:19.2f}")


if __name__ == "__main__":
    main()
