"""Seconds of compiling a GPT under tensor parallelism, by phase, and how they grow.

    python benchmarks/compile_time.py [--layers 12,24,48] [--devices 2,8,32] [--repeat 3]

The model is Hugging Face's GPT-2 (hidden 1024, 32 heads, sequence 1024) on meta tensors: no weight is allocated.
`export` is `torch.export.export` plus `run_decompositions`, torch's own time, and not part of `ours`, which is the
capture's seconds plus the CPU seconds of everything else (one process, one thread; median of `--repeat`). nnScaler's
column is its whole compile of a GPT of as many layers under its Megatron policy, measured once on 2 CPU cores; its
tracing is in it.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time

NNSCALER = {(12, 32): 20.4, (24, 8): 10.4, (24, 32): 53.6, (48, 2): 11.6, (48, 8): 25.7, (48, 32): 168.5}
PHASES = ("capture", "plan", "schedule", "materialize", "emit")


def main() -> None:
    import superscaler as ss
    from superscaler.models import build
    from superscaler.plans import resolve

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="12,24,48")
    parser.add_argument("--devices", default="2,8,32")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    layers, devices = ([int(n) for n in text.split(",")] for text in (options.layers, options.devices))
    print(f"{'layers x devices':18} {'export':>7} " + " ".join(f"{p:>11}" for p in PHASES), end="")
    print(f" {'ours':>7} {'nnScaler':>9} {'parts':>8} {'bytes':>8}")
    ours: dict[tuple[int, int], float] = {}
    for count in layers:
        model = build(f"gpt2:layers={count},hidden=1024,heads=32,seq=1024,vocab=51200,batch=8,dropout=0,device=meta")
        graph = ss.capture(model.module, model.args, model.kwargs)
        captured = graph.captured.seconds["capture"]
        for world in devices:
            runs = []
            for _ in range(options.repeat):
                gc.collect()
                start = time.process_time()
                plan = ss.compile(graph, resolve("tensor_parallel"), ss.Cluster.local(world))
                runs.append((time.process_time() - start, plan))
            seconds, plan = statistics.median(r[0] for r in runs) + captured, runs[-1][1]
            ours[count, world] = seconds
            phases = " ".join(f"{plan.seconds[p]:11.2f}" for p in PHASES)
            peer = f"{NNSCALER[count, world]:.1f}" if (count, world) in NNSCALER else "-"
            print(f"{f'{count} x {world}':18} {plan.seconds['export']:7.1f} {phases} {seconds:7.2f} {peer:>9}", end="")
            print(f" {plan.counts['parts']:8} {plan.counts['emitted_bytes']:8}", flush=True)
    for name, a, b, n in (
        ("devices", (layers[-1], devices[0]), (layers[-1], devices[-1]), devices[-1] / devices[0]),
        ("layers", (layers[0], devices[-1]), (layers[-1], devices[-1]), layers[-1] / layers[0]),
    ):
        if n > 1:
            print(f"growth exponent in {name}: {math.log(ours[b] / ours[a]) / math.log(n):.2f}")


if __name__ == "__main__":
    main()
