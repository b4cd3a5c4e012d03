"""Predicted memory beside an independent count of the storages that the emitted code makes.

    python benchmarks/simulate_memory.py [--model NAME]

For each plan the peaks of its distinct programs, in MB, in the second step: predicted from the instructions, counted
while one rank runs (tests/helpers/counted.py says how), and their quotient. Then the seconds of the prediction, with
those of recording the segments, and what is alive at the peak of the fullest device.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import superscaler as ss
from superscaler.errors import PlanError
from superscaler.models import build
from superscaler.simulate.memory import memories
from tests.helpers.counted import PLANS, counted

MODELS = ("gpt2:size=tiny,layers=4,seq=128", "llama:size=tiny,layers=4,seq=128", "mixtral:size=tiny,seq=64")
MORE = [("expert_parallel", 2), ("seq1f1b", 2), ("fsdp", 2)]


def captured(spec: str) -> ss.Graph:
    built = build(spec)
    return ss.capture(built.module, built.args, built.kwargs, torch.optim.AdamW(built.module.parameters()))


def compared(graph: ss.Graph, plan: str, devices: int) -> str:
    compiled = ss.compile(graph, plan, f"local:{devices}")
    start = time.perf_counter()
    found = memories(compiled.compiled.program)
    seconds = time.perf_counter() - start
    # Devices with other data run the same program: the first of those with one peak.
    shown = {m.peak: m for m in reversed(found)}
    pairs = [(m.peak, counted(compiled, m.rank)) for m in sorted(shown.values(), key=lambda m: m.rank)]
    cells = "  ".join(f"{told / 1e6:.2f} / {count / 1e6:.2f} {told / count:.4f}" for told, count in pairs[:4])
    full = max(found, key=lambda m: m.peak)
    parts = ", ".join(f"{name} {size / full.peak:.0%}" for name, size in full.parts.items() if size > full.peak / 100)
    return f"{seconds:6.2f} s  {cells}  ({parts})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    torch.set_num_threads(1)
    for spec in parser.parse_args().model or MODELS:
        graph = captured(spec)
        print(f"{spec}: MB predicted / counted")
        for plan, devices in [*PLANS, *MORE]:
            try:
                line = compared(graph, plan, devices)
            except PlanError as error:
                line = f"does not apply: {str(error).splitlines()[0][:80]}"
            print(f"  {plan:36}{devices:2} {line}", flush=True)


if __name__ == "__main__":
    main()
