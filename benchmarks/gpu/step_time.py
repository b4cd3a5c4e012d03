"""GPT-2 on one GPU: our emitted code against the eager module and `torch.compile`, in one run.

    python benchmarks/gpu/step_time.py [--steps 20] [--no-compile] [--cases NAME ...]

bf16 weights, dropout 0, fused AdamW. GPT-2 small (batch 8, sequence 1024), where the GPU is busy, and GPT-2 small of 64
channels (batch 1, sequence 64), where the host is: its seconds by kernel are those of starting one. Prints median
seconds and peak memory of interleaved steps, and the median ratio to the peer of a plan: the eager module for single,
the module with checkpoints for plans that compute again; then the ten longest kernels of the compiled `single` and of
torch.compile, and their seconds of kernels. Skips with a message where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import superscaler as ss

VOCABULARY = 50257
# Channels, heads, batch, sequence.
CASES = {"GPT-2 small": (768, 12, 8, 1024), "GPT-2 small of 64 channels": (64, 4, 1, 64)}
# Plans, and the peer of each.
PLANS = {
    "single": "eager",
    "recompute": "eager, checkpoints",
    "co_shard:parts=4": "eager, checkpoints",
    "chunked_loss:parts=8": "eager",
}
Step = Callable[[dict[str, Tensor]], Any]


def build(channels: int, heads: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    options: dict[str, Any] = {"n_embd": channels, "n_head": heads, "use_cache": False}
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).train().to(torch.bfloat16)


def batch_at(step: int, rows: int, sequence: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randint(0, VOCABULARY, (rows, sequence), generator=generator) for n in ("input_ids", "labels")}


def peer(module: Any, call: Callable[..., Any]) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, Tensor]) -> None:
        call(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(module: Any, batch: dict[str, Tensor], is_compiled: bool) -> dict[str, Step]:
    """Return the steps of all plans, and with their segments compiled."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    graph, steps = ss.capture(module, kwargs=batch, optimizer=optimizer, check=False), dict[str, Step]()
    for plan in PLANS:
        with tempfile.TemporaryDirectory() as folder:
            ss.compile(graph, plan, "local:1").save(folder)
            steps[plan] = ss.load(folder)
            if is_compiled:
                steps[f"{plan}, compiled"] = ss.load(folder, torch_compile=True)
    return steps


def seconds(step: Step, batch: dict[str, Tensor]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step(batch)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def kernels(step: Step, batch: dict[str, Tensor]) -> list[tuple[float, int, str]]:
    """Return the microseconds, the number and the name of each kernel that a step starts, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step(batch)
        torch.cuda.synchronize()
    events = (event for event in found.key_averages() if event.self_device_time_total)
    return sorted(((e.self_device_time_total, e.count, e.key) for e in events), reverse=True)


def show_longest(side: str, step: Step, batch: dict[str, Tensor]) -> None:
    """Print the ten longest kernels of a step, and the seconds of all."""
    found = kernels(step, batch)
    print(f"\n{side}: {sum(time for time, *_ in found) / 1e3:.2f} ms of kernels")
    for time_of, count, name in found[:10]:
        print(f"{time_of / 1e3:9.2f} ms {count:5d} x {name[:90]}")


def measure(name: str, steps: int, is_compiled: bool) -> None:
    channels, heads, rows, sequence = CASES[name]
    example = batch_at(0, rows, sequence)
    sides = ours(build(channels, heads), example, is_compiled)
    eager, again = build(channels, heads).cuda(), build(channels, heads).cuda()
    again.gradient_checkpointing_enable()
    sides |= {"eager": peer(eager, eager), "eager, checkpoints": peer(again, again)}
    if is_compiled:
        module = build(channels, heads).cuda()
        sides["torch.compile"] = peer(module, torch.compile(module))
    times: dict[str, list[float]] = {side: [] for side in sides}
    peaks: dict[str, float] = {}
    for number in range(steps + 5):
        batch = {n: x.cuda() for n, x in batch_at(number, rows, sequence).items()}
        for side, step in sides.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            times[side].append(seconds(step, batch))
            peaks[side] = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"\n{name}, {torch.cuda.get_device_name()}, torch {torch.__version__}, batch {rows}, sequence {sequence}")
    print(f"{'':30} {'ms':>8} {'to its peer':>12} {'to compile':>11} {'GiB more':>9} {'kernels':>8}")
    for side in sides:
        mine = times[side][5:]

        def ratio(other: str, mine: list[float] = mine) -> str:
            if other not in times:
                return ""
            return f"{statistics.median(a / b for a, b in zip(mine, times[other][5:], strict=True)):.3f}"

        its_peer = PLANS.get(side.removesuffix(", compiled"), "")
        print(
            f"{side:30} {statistics.median(mine) * 1e3:8.2f} {ratio(its_peer):>12} "
            f"{ratio('torch.compile'):>11} {peaks[side]:9.2f} {sum(n for _, n, _ in kernels(sides[side], batch)):8d}",
            flush=True,
        )
    for side in {"single, compiled", "torch.compile"}.intersection(sides):
        show_longest(side, sides[side], batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device on this machine")
        return
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533",
    }  # fmt: skip
    for name in options.cases:
        measure(name, options.steps, not options.no_compile)


if __name__ == "__main__":
    main()
