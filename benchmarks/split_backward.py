"""What splitting the backward costs: CPU seconds and live bytes of I + W against B, interleaved on one device.

    python benchmarks/split_backward.py [--steps 20] [--hidden 512]

GPT-2 (Hugging Face) with 4 layers, sequence 128, vocabulary 4096, batch 8, dropout 0; float32, SGD, 1 thread. B: the
plan `single`. W after I: each block split. W last: the W of all blocks after the I of the first one. Embedding, head
and loss are not split. Prints the median of the ratios to B's seconds in the same round, of the backward and of the
step; the most bytes of tensors alive in a step beyond weights, and how many there are when the last I is done.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import superscaler as ss
from superscaler.plans import resolve
from tests.helpers.live import Live

BACKWARDS = ("backward", "backward_input", "backward_weight")


def captured(hidden: int) -> ss.Graph:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=hidden, n_head=8, n_positions=128, vocab_size=4096, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    module = GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 4096, (8, 128))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    return ss.capture(module, kwargs={"input_ids": ids, "labels": ids}, optimizer=optimizer)


def split(graph: ss.Graph, cluster: ss.Cluster) -> None:
    resolve("single")(graph, cluster)
    for block in graph.blocks:
        ss.op_trans(graph, block.ops, ss.SplitBackward())


def last(graph: ss.Graph, cluster: ss.Cluster) -> None:
    split(graph, cluster)
    ss.op_order(graph, graph.select(kind="I"), graph.select(kind="W"))


def around(step: Any, names: tuple[str, ...], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    for name in names:
        setattr(step.state, name, wrap(getattr(step.state, name)))


def memory(step: Any, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Return the most bytes that are alive in a step, and those alive when its last I is done."""
    kept = [0]

    def seen(run: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **named: Any) -> Any:
            made = run(*args, **named)
            kept[0] = live.live
            return made

        return inner

    with Live() as live:
        around(step, ("backward_input",), seen)
        step(batch)
    del step.state.backward_input
    return live.peak, kept[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    graph = captured(options.hidden)
    batch, steps, spent = graph.captured.batch, {}, dict[str, float]()

    def timed(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
            def inner(*args: Any, **named: Any) -> Any:
                start = time.process_time()
                made = run(*args, **named)
                spent[name] += time.process_time() - start
                return made

            return inner

        return wrap

    with tempfile.TemporaryDirectory() as folder:
        for name, plan in (("B", resolve("single")), ("W after I", split), ("W last", last)):
            ss.compile(graph, plan, "local:1").save(f"{folder}/{name}")
            steps[name] = ss.load(f"{folder}/{name}")
    peaks = {name: memory(step, batch) for name, step in steps.items()}
    for name, step in steps.items():
        around(step, BACKWARDS, timed(name))
    rounds = []
    for number in range(options.steps + 2):
        row = {}
        for name in sorted(steps, reverse=number % 2 > 0):
            spent[name], start = 0.0, time.process_time()
            steps[name](batch)
            row[name] = spent[name], time.process_time() - start
        rounds.append(row)
    print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}, hidden {options.hidden}, {options.steps} rounds")
    print(f"{'':10} {'backward s':>10} {'of B':>6} {'step s':>8} {'of B':>6} {'peak MB':>8} {'after I MB':>10}")
    for name, (peak, kept) in peaks.items():
        columns = []
        for k in range(2):
            columns += [statistics.median(row[name][k] for row in rounds[2:])]
            columns += [statistics.median(row[name][k] / row["B"][k] for row in rounds[2:])]
        print("{:10} {:10.4f} {:6.3f} {:8.4f} {:6.3f}".format(name, *columns), f"{peak / 1e6:8.1f} {kept / 1e6:10.1f}")


if __name__ == "__main__":
    main()
