"""Seconds of compiling a GPT, by phase, from 8 to 10,240 devices, and how they grow.

    python benchmarks/compile_time.py [--only NAME,NAME] [--repeat 3]

The model is Hugging Face's GPT-2 (hidden 1024, 32 heads, sequence 1024, or 4096 for the ring) on meta tensors: no
weight is allocated. `export` is torch.export and what makes its program functional, and not part of
`ours`, which is the capture's seconds plus the CPU seconds of everything else (one process, one thread; median of
`--repeat`). nnScaler's column is its whole compile of a GPT of as many layers under its Megatron policy, measured once
on 2 CPU cores; its tracing is in it. `validate` is the certificate of the whole program and the check for deadlocks,
and is not in `ours`; but a plan with loops over microbatches is certified when it is compiled. Compare their sums.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import statistics
import time
from dataclasses import dataclass

PHASES = ("capture", "plan", "schedule", "materialize", "emit", "translation")


@dataclass(frozen=True)
class Case:
    name: str
    layers: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 0
    vocabulary: bool = True
    limit: float | None = None
    nnscaler: float | None = None
    product: str = ""
    seq: int = 1024

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def plan(self) -> str:
        if self.product or not self.microbatches:
            return self.product or "tensor_parallel"
        own = f"dp={self.dp},tp={self.tp},pp={self.pp},microbatches={self.microbatches}"
        return f"hybrid:{own}{'' if self.vocabulary else ',vocabulary=false'}"


CASES = (
    Case("12x32", 12, tp=32, nnscaler=20.4),
    Case("24x32", 24, tp=32, nnscaler=53.6),
    Case("48x2", 48, tp=2, nnscaler=11.6),
    Case("48x8", 48, tp=8, limit=2, nnscaler=25.7),
    Case("48x32", 48, tp=32, limit=4, nnscaler=168.5),
    Case("hybrid", 24, 2, 4, 4, 16, limit=4),
    Case("1024/16", 48, 16, 8, 8, 16),
    Case("128", 48, 2, 8, 8, 64),
    Case("1024", 48, 16, 8, 8, 64, limit=60),
    Case("1024/all", 48, 16, 8, 8, 64, vocabulary=False),
    Case("1024/256", 48, 16, 8, 8, 256),
    Case("10240", 48, 160, 8, 8, 64),
    Case("co_shard", 24, 8, 8, 8, 16, limit=10, product="co_shard:8,parts=4 x tensor_parallel:8 x pipeline_1f1b:8"),
    Case("ring", 4, 16, 32, limit=10, product="data_parallel:16 x ring_attention:32", seq=4096),
    Case("interlaced", 64, pp=64, microbatches=256, limit=30, product="interlaced:64,microbatches=256"),
)
GROWTH = (
    ("layers, 12 to 48 on 32 devices", "12x32", "48x32", 4),
    ("devices, 2 to 32", "48x2", "48x32", 16),
    ("devices, 128 to 1,024", "128", "1024", 8),
    ("devices, 1,024 to 10,240", "1024", "10240", 10),
    ("microbatches, 16 to 64", "1024/16", "1024", 4),
    ("microbatches, 64 to 256", "1024", "1024/256", 4),
)


def main() -> None:
    import torch

    import superscaler as ss
    from superscaler.models import build
    from superscaler.plans import resolve

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(case.name for case in CASES))
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    chosen = [case for case in CASES if case.name in options.only.split(",")]
    print(f"{'case':10} {'layers':>6} {'dp x tp x pp':>13} {'micro':>5} {'parts':>11} {'export':>7}", end=" ")
    print(" ".join(f"{p:>11}" for p in PHASES), f"{'ours':>7} {'limit':>5} {'nnScaler':>8} {'validate':>8}", end="")
    print(f" {'programs':>8} {'bytes':>9} {'peak GB':>7}")
    ours: dict[str, float] = {}
    for case in chosen:
        batch = case.dp * max(case.microbatches, 1) * (1 if case.microbatches else 8)
        sizes = f"layers={case.layers},hidden=1024,heads=32,seq={case.seq},vocab=51200,batch={batch}"
        model = build(f"gpt2:{sizes},dropout=0,device=meta")
        graph = ss.capture(
            model.module, model.args, model.kwargs, optimizer=torch.optim.SGD(model.module.parameters(), lr=1e-2)
        )
        runs = []
        for _ in range(options.repeat):
            plan = None
            gc.collect()
            start = time.process_time()
            plan = ss.compile(graph, resolve(case.plan), ss.Cluster.local(case.devices))
            assert plan.compiled.emitted
            runs.append((time.process_time() - start, plan.seconds))
        seconds, phases = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
        ours[case.name] = seconds = statistics.median(run[0] for run in runs) + graph.captured.seconds["capture"]
        start = time.process_time()
        plan.validate()
        checked = time.process_time() - start
        shape = f"{case.dp} x {case.tp} x {case.pp}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{case.name:10} {case.layers:6} {shape:>13} {case.microbatches:5}", end=" ")
        print(f"{plan.counts['parts']:11} {plan.seconds['export']:7.1f}", end=" ")
        print(" ".join(f"{phases[p]:11.2f}" for p in PHASES), f"{seconds:7.2f}", end=" ")
        print(f"{case.limit or '-':>5} {case.nnscaler or '-':>8} {checked:8.2f}", end=" ")
        print(f"{plan.counts['distinct_programs']:8} {plan.counts['emitted_bytes']:9} {peak:7.2f}", flush=True)
        del plan, graph
    for name, a, b, n in GROWTH:
        if a in ours and b in ours:
            print(f"growth exponent in {name}: {math.log(ours[b] / ours[a]) / math.log(n):.2f}")
    if {"1024", "10240"} <= ours.keys():
        print(f"10,240 devices over 1,024: {100 * (ours['10240'] / ours['1024'] - 1):+.0f} %")


if __name__ == "__main__":
    main()
