"""GPT-2 on one GPU: our emitted code against the eager module and `torch.compile`, in one run.

    python benchmarks/gpu/step_time.py [--steps 20] [--minutes 9] [--no-compile] [--cases NAME ...] [--dry]

bf16 weights, dropout 0, fused AdamW. GPT-2 small (batch 8, sequence 1024), where the GPU is busy, and GPT-2 small of 64
channels (batch 1, sequence 64), where the host is: its seconds by kernel are those of starting one. Each plan runs as
it is, compiled, and compiled as a CUDA graph; `single` as a graph of plain kernels, too. Prints median seconds of
interleaved steps, the seconds of their kernels, peak memory, and the median ratios to the peer of a plan (the eager
module, or the module with checkpoints for plans that compute again) and to torch.compile; then the ten longest kernels
of sides beside those of torch.compile. Sides that would start after `--minutes` are left out, with a line. Skips with a
message where there is no GPU; `--dry` runs tiny sizes on a CPU, where a replay does nothing, to test this program.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import superscaler as ss
from superscaler.runtime import load as loading

T = TypeVar("T")
VOCABULARY = 50257
# Channels, heads, batch, sequence, layers.
CASES = {"GPT-2 small": (768, 12, 8, 1024, 12), "GPT-2 small of 64 channels": (64, 4, 1, 64, 12)}
DRY = {"dry": (16, 4, 4, 8, 1)}
# Plans, and the peer of each.
PLANS = {
    "single": "eager",
    "recompute": "eager, checkpoints",
    "co_shard:parts=4": "eager, checkpoints",
    "chunked_loss:parts=8": "eager",
}
# Steps that compile, connect and capture.
WARM = 4
# Sides whose longest kernels are shown.
SHOWN = ("torch.compile", "single, compiled", "single, compiled, graph", "chunked_loss:parts=8, compiled")
Step = Callable[[dict[str, Tensor]], Any]


class Nothing:
    """A recorder whose replays do nothing, for `--dry`."""

    def __init__(self, _: torch.device) -> None:
        pass

    def warm(self, run: Callable[[], T]) -> T:
        return run()

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        return run(), lambda: None


@dataclass
class Side:
    """What is measured: its step, the seconds of steps, and bytes that a step takes beside what is there before."""

    step: Step
    times: list[float] = field(default_factory=list)
    peak: int = 0


@dataclass
class Bench:
    """A case on a device, until a deadline."""

    shape: tuple[int, ...]
    device: str
    deadline: float
    sides: dict[str, Side] = field(default_factory=dict)

    def build(self) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        channels, heads, _, sequence, layers = self.shape
        options: dict[str, Any] = {"n_embd": channels, "n_head": heads, "n_layer": layers, "use_cache": False}
        vocabulary = VOCABULARY if self.device == "cuda" else 64
        options |= {"vocab_size": vocabulary, "n_positions": max(sequence, 64)}
        config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options)
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).train().to(torch.bfloat16)

    def batch(self, step: int) -> dict[str, Tensor]:
        _, _, rows, sequence, _ = self.shape
        generator = torch.Generator().manual_seed(step)
        last = VOCABULARY if self.device == "cuda" else 64
        return {n: torch.randint(0, last, (rows, sequence), generator=generator) for n in ("input_ids", "labels")}

    def peer(self, checkpoints: bool = False, is_compiled: bool = False) -> Step:
        module = self.build().to(self.device)
        if checkpoints:
            module.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
        run = torch.compile(module) if is_compiled else module

        def step(batch: dict[str, Tensor]) -> None:
            run(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def makers(self, is_compiled: bool, folder: Path) -> Iterator[tuple[str, Callable[[], Step]]]:
        """Yield how each side is made."""
        yield "eager", self.peer
        yield "eager, checkpoints", partial(self.peer, checkpoints=True)
        module = self.build()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
        graph = ss.capture(module, kwargs=self.batch(0), optimizer=optimizer, check=False)
        for number, plan in enumerate(PLANS):
            ss.compile(graph, plan, "local:1").save(folder / str(number))
            yield plan, partial(ss.load, folder / str(number))
        yield "single, graph", partial(ss.load, folder / "0", cuda_graph=True)
        if is_compiled:
            # These take long.
            yield "torch.compile", partial(self.peer, is_compiled=True)
            for number, plan in enumerate(PLANS):
                for name, is_graph in (("compiled", False), ("compiled, graph", True)):
                    options = {"torch_compile": True, "cuda_graph": is_graph}
                    yield f"{plan}, {name}", partial(ss.load, folder / str(number), **options)

    def add(self, name: str, make: Callable[[], Step]) -> None:
        """Make a side, and run the steps that it needs before it is measured."""
        start = time.perf_counter()
        if start > self.deadline:
            print(f"{name}: left out, the time is over", flush=True)
            return
        try:
            self.sides[name] = side = Side(make())
            for number in range(WARM):
                self.run(side, number)
        except Exception as error:
            # The other sides are worth the device's time.
            self.sides.pop(name, None)
            print(f"{name}: failed, {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            return
        side.times.clear()
        print(f"{name}: first {WARM} steps in {time.perf_counter() - start:.1f} s", flush=True)

    def run(self, side: Side, number: int) -> None:
        batch = {name: x.to(self.device) for name, x in self.batch(number).items()}
        before = 0
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        side.step(batch)
        if self.device == "cuda":
            torch.cuda.synchronize()
            # The first two steps compile; of a graph, the captured step allocates.
            side.peak = max(side.peak, (number > 1) * (torch.cuda.max_memory_allocated() - before))
        side.times.append(time.perf_counter() - start)

    def kernels(self, side: Side) -> list[tuple[float, int, str]]:
        """Return the microseconds, the number and the name of each kernel that a step starts, the longest first."""
        kinds = torch.profiler.ProfilerActivity
        is_gpu = self.device == "cuda"
        batch = {name: x.to(self.device) for name, x in self.batch(0).items()}
        with torch.profiler.profile(activities=[kinds.CUDA if is_gpu else kinds.CPU]) as found:
            side.step(batch)
            if is_gpu:
                torch.cuda.synchronize()
        pairs = ((e.self_device_time_total if is_gpu else e.self_cpu_time_total, e) for e in found.key_averages())
        return sorted(((t, e.count, e.key) for t, e in pairs if t), reverse=True)


def measure(name: str, bench: Bench, steps: int, is_compiled: bool) -> None:
    print(f"\n{name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for label, make in bench.makers(is_compiled, Path(folder)):
            bench.add(label, make)
        for number in range(WARM, WARM + steps):
            for side in bench.sides.values():
                bench.run(side, number)
        show(name, bench)


def show(name: str, bench: Bench) -> None:
    """Print the table of a case, and the longest kernels."""
    where = torch.cuda.get_device_name() if bench.device == "cuda" else "CPU"
    _, _, rows, sequence, _ = bench.shape
    print(f"\n{name}, {where}, torch {torch.__version__}, batch {rows}, sequence {sequence}")
    columns = ("ms", "kernels ms", "to its peer", "to compile", "GiB more", "kernels")
    print(f"{'':38}" + "".join(f" {column:>11}" for column in columns))
    found = {label: bench.kernels(side) for label, side in bench.sides.items()}

    def ratio(mine: Side, other: str) -> str:
        theirs = bench.sides.get(other)
        if theirs is None:
            return ""
        return f"{statistics.median(a / b for a, b in zip(mine.times, theirs.times, strict=True)):.3f}"

    for label, side in bench.sides.items():
        ms, busy = statistics.median(side.times) * 1e3, sum(t for t, *_ in found[label]) / 1e3
        its_peer, count = PLANS.get(label.partition(",")[0], ""), sum(n for _, n, _ in found[label])
        cells = (f"{ms:.2f}", f"{busy:.2f}", ratio(side, its_peer), ratio(side, "torch.compile"))
        cells = (*cells, f"{side.peak / 2**30:.2f}", f"{count}")
        print(f"{label:38}" + "".join(f" {cell:>11}" for cell in cells), flush=True)
    for label in (label for label in SHOWN if label in found):
        print(f"\n{label}: {sum(t for t, *_ in found[label]) / 1e3:.2f} ms of kernels; the ten longest")
        for time_of, count, kernel in found[label][:10]:
            print(f"{time_of / 1e3:9.3f} ms {count:5d} x {kernel[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=9.0, help="sides that would start later are left out")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.dry:
        print("skipped: no CUDA device on this machine")
        return
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533",
    }  # fmt: skip
    if options.dry:
        vars(loading).update(CudaGraphs=Nothing, check_device=lambda _: None)
    shapes = DRY if options.dry else {name: CASES[name] for name in options.cases}
    start, span = time.perf_counter(), 60 * options.minutes
    for number, (name, shape) in enumerate(shapes.items(), 1):
        # Each case has its share of the time.
        deadline = start + span * number / len(shapes)
        measure(name, Bench(shape, "cpu" if options.dry else "cuda", deadline), options.steps, not options.no_compile)
    print(f"\nall in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
