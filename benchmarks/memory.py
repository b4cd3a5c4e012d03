"""Bytes of tensors on a device under each mechanism, beside what the formulas say.

    python benchmarks/memory.py [--model small|large]

small: GPT-2 of 4 layers, hidden 32, sequence 128; large: 8 layers, hidden 512, sequence 256, vocabulary 8192. Batch 8,
float32, AdamW, dropout 0. A rank is a thread; the storages that its operators make are counted while they live, in the
second step. The numbers are those of rank 0, in MB, measured / by formula (- where there is none):

states     weights at rest and their optimizer state: 12 bytes a parameter, / shard where these are cut
weights    the most of gathered weights at once: all; with recomputed blocks two blocks, and what is outside them
gradients  what the first of two microbatches leaves behind: 4 bytes a parameter; / shard where each microbatch is
           reduced
blocks     what the blocks keep until the backward: with recomputed blocks, the input of each: 4 x batch x sequence
           x hidden bytes
transient  what is computed again before its backward, at the most at once: of co-shard in c parts 1 / c of a block's
peak       the most of all that a step makes: without states

Then what a layer keeps from its forward to its backward (of a model with two more layers what is more): under sequence
parallelism its share, and the gathered inputs of its two products, unless these are gathered again. Then, of weights
that are cut unevenly, what rests on each of two devices, as a share of all. Then the peak of each device of pipelines
with a split backward, over p M and (2 p - 1) M: M is what a microbatch of its stage keeps.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import superscaler as ss
from superscaler.artifact import initial_values
from superscaler.ir.parts import block_of
from superscaler.ir.program import Backward, Collective, Forward, Free, Value, Wait
from superscaler.models import build
from superscaler.plan import Plan
from superscaler.plans import resolve
from superscaler.runtime.step import Step
from superscaler.verify.locate import on_threads
from tests.helpers.live import Live

MODELS = {
    "small": "gpt2:size=tiny,layers=4,seq=128",
    "large": "gpt2:size=tiny,layers=8,hidden=512,heads=8,seq=256,vocab=8192",
}
COLUMNS = ("states", "weights", "gradients", "blocks", "transient", "peak")
SProgram = Callable[[ss.Graph, ss.Cluster], Any]


def uneven(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Cut what tensor parallelism cuts, or experts, into a quarter and the rest."""
    experts = [f for f in graph.factors if f.endswith("experts")]
    names = experts or [f for f in graph.factors if f.endswith((".heads", ".mlp"))]
    for op in graph.forward_ops:
        name = next((f for f in names if op.find(f) is not None), None)
        size = graph.factors[name].size if name else 0
        cut = ss.Split(name, sizes=(size // 4, size - size // 4)) if name else ss.Replicate(2)
        ss.op_assign(graph, ss.op_trans(graph, op, cut), cluster.devices)


# Name: devices, how many of them share the weights, whether each microbatch is reduced, plan.
PLANS: dict[str, tuple[int, int, bool, str | SProgram]] = {
    "single": (1, 1, False, "single"),
    "blocks computed again": (1, 1, False, "recompute"),
    "attention computed again": (1, 1, False, "recompute:what=attention"),
    "runs of sqrt(blocks)": (1, 1, False, "chain_recompute:every=sqrt"),
    "runs, then their blocks": (1, 1, False, "recompute:levels=2"),
    "co-shard in 2": (1, 1, False, "co_shard:parts=2"),
    "co-shard in 4": (1, 1, False, "co_shard:parts=4"),
    "data parallel": (4, 1, False, "data_parallel"),
    "ZeRO-1": (4, 4, False, "zero"),
    "ZeRO-1, accumulation": (4, 4, False, "zero:microbatches=2"),
    "ZeRO-2, accumulation": (4, 4, True, "zero:stage=2,microbatches=2"),
    "ZeRO-3": (4, 4, False, "zero:stage=3"),
    "ZeRO-3, accumulation": (4, 4, True, "zero:stage=3,microbatches=2"),
    "hybrid 2 x 2, stage 3": (4, 2, False, "zero:stage=3,shard=2"),
    "Ulysses": (4, 1, False, "ulysses"),
    "ring attention": (4, 1, False, "ring_attention"),
}
# What a layer keeps from its forward to its backward: so much of what it keeps on one device, and of its input.
LAYERS = {
    "one device": (1, "single", 1.0, 0.0),
    "sequence parallel over 2": (2, "sequence_parallel", 0.5, 1.0),
    "sequence parallel over 4": (4, "sequence_parallel", 0.25, 1.5),
    "so, gathered again, 2": (2, "sequence_parallel:regather=true", 0.5, 0.0),
    "so, gathered again, 4": (4, "sequence_parallel:regather=true", 0.25, 0.0),
    "block computed again": (1, "recompute", 0.0, 1.0),
}


def measure(plan: Plan, rank: int = 0) -> dict[str, float]:
    """Return the bytes of a rank in its second step, those of a column that a plan does not have left out."""
    captured, segments = plan.compiled.graph.captured, plan.compiled.schedule.segments
    blocks = {block.path for block in plan.compiled.graph.blocks}

    def run(step: Step) -> dict[str, float]:
        step(captured.batch)
        seen: list[tuple[str, int, str, int]] = []
        made: dict[str, int] = {}
        last = 0

        def watch(kind: str, tag: str, *_: Any) -> None:
            nonlocal last
            segment = segments[int(tag[1:].split("_")[0])]
            if not segment.region:
                seen.append((kind, "_m1" in tag, segment.module, live.live))
            elif kind == "F":
                made[tag] = live.live - last
            last = live.live

        state = step.state.updates.optimizer.state.values() if step.state.updates.optimizer else ()
        kept = [*step.state.weights.values(), *(x for some in state for x in some.values() if x.ndim)]
        with Live([*kept, *captured.batch.values()]) as live:
            step.state.watch = watch
            step(captured.batch)
        # Where the backward begins, in each microbatch.
        turns = [at for (kind, *_, at), (after, *_) in itertools.pairwise(seen) if (kind, after) == ("F", "B")]
        found: dict[str, float] = {"states": sum(x.nbytes for x in kept), "peak": live.peak, "kept": turns[0]}
        if made and plan.compiled.program.world == 1:
            found["transient"] = max(made.values())
        if turns[1:] and any(second for _, second, *_ in seen):
            found["gradients"] = turns[1] - turns[0]
        inside = [n for n, (kind, _, module, _) in enumerate(seen) if kind == "F" and block_of(module) in blocks]
        if inside and inside[0] and plan.compiled.program.world == 1:
            found["blocks"] = seen[inside[-1]][-1] - seen[inside[0] - 1][-1]
        return found

    values = initial_values(plan.compiled.graph.model, captured.values)
    return on_threads(plan.compiled, dict(values), run, 600.0)[rank] | {"weights": gathered(plan)}


def gathered(plan: Plan) -> int:
    """Return the most bytes of weights that rank 0 has from others at once; a tape has them until its backward."""
    sizes: dict[Value, int] = {}
    tapes: dict[Any, dict[Value, int]] = {}
    most = 0
    program = plan.compiled.program
    for i in program.devices[0].instructions:
        if isinstance(i, Collective) and i.kind == "all_gather":
            sizes |= {work: 4 * prod(way.shape) for work, way in zip(i.works, i.ways, strict=True)}
        elif isinstance(i, Wait) and i.work in sizes:
            sizes[i.out] = sizes.pop(i.work)
        elif isinstance(i, Forward) and program.functions[i.function].grads:
            tapes[i.task] = {value: sizes[value] for value in i.inputs if value in sizes}
        elif isinstance(i, Backward):
            del tapes[i.task]
        elif isinstance(i, Free):
            sizes = {value: size for value, size in sizes.items() if value not in i.names}
        alive = dict(itertools.chain(sizes.items(), *(tape.items() for tape in tapes.values())))
        most = max(most, sum(alive.values()))
    return most


def captured(spec: str) -> ss.Graph:
    built = build(spec)
    return ss.capture(built.module, built.args, built.kwargs, torch.optim.AdamW(built.module.parameters()))


def print_layers(spec: str) -> None:
    less, more = captured(f"{spec},layers=2"), captured(f"{spec},layers=4")
    edge = max(prod(less.model.tensors[o.tensor].shape) for o in less.blocks[1].ops[0].inputs)
    whole = 0.0
    print(f"{spec}: kept by a layer, KB, measured / by formula")
    for name, (devices, plan, share, inputs) in LAYERS.items():
        kept = [measure(ss.compile(graph, plan, f"local:{devices}"))["kept"] for graph in (less, more)]
        found = (kept[1] - kept[0]) / 2
        whole = whole or found
        told = share * whole + inputs * 4 * edge
        print(f"{name:26}{found / 1e3:10.1f} / {told / 1e3:.1f}  {found / told:.3f}", flush=True)


def print_uneven(spec: str) -> None:
    plan = ss.compile(captured(spec), uneven, "local:2")
    psi = sum(prod(t.shape) for t in plan.compiled.graph.model.parameters())
    held = (sum(prod(hi - lo for lo, hi in w.box) for w in d.weights) for d in plan.compiled.program.devices)
    print(f"{spec}: cut 1 : 3, at rest on two devices: " + ", ".join(f"{n / psi:.2f}" for n in held), flush=True)


def print_schedules(spec: str, p: int = 4) -> None:
    graph, m = captured(spec), 2 * p
    plans = [ss.compile(graph, f"{name}:microbatches={m}", f"local:{p}") for name in ("gpipe", "zb_h1", "zb_h2")]
    print(f"{spec}, {m} microbatches: peak of a device beside weights and states, MB, and of that by formula")
    for rank in range(p):
        every, *others = (measure(plan, rank) for plan in plans)
        each = every["kept"] / m
        columns = (
            f"{found['peak'] / 1e6:8.2f} {found['peak'] / (count * each):.2f}"
            for found, count in zip(others, (p, 2 * p - 1), strict=True)
        )
        print(f"device {rank}   zb_h1, zb_h2: {' '.join(columns)}", flush=True)


def formulas(graph: ss.Graph, devices: int, shard: int, is_reduced: bool, name: str) -> dict[str, float]:
    psi = sum(prod(tensor.shape) for tensor in graph.model.parameters())
    inside = sum(prod(tensor.shape) for tensor in graph.model.parameters() if block_of(tensor.name))
    count, again = len(graph.blocks), name.startswith(("blocks", "ZeRO-3", "hybrid"))
    edge = max(prod(graph.model.tensors[o.tensor].shape) for o in graph.blocks[1].ops[0].inputs)
    found = {"states": 12 * psi / shard}
    if shard > 1:
        found["weights"] = 4 * (psi - inside + 2 * inside / count if again else psi)
    if "accumulation" in name:
        found["gradients"] = 4 * psi / (shard if is_reduced else 1)
    if again and devices == 1:
        found["blocks"] = 4 * count * edge
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    torch.set_num_threads(1)
    for model in parser.parse_args().model or MODELS:
        graph, block = captured(MODELS[model]), 0.0
        print(f"{model}: {MODELS[model]}; MB of rank 0, measured / formula")
        print(f"{'':24}" + "".join(f"{column:>18}" for column in COLUMNS))
        for name, (devices, shard, is_reduced, plan) in PLANS.items():
            compiled = ss.compile(graph, resolve(plan) if isinstance(plan, str) else plan, f"local:{devices}")
            found, told = measure(compiled), formulas(graph, devices, shard, is_reduced, name)
            block = found["transient"] if name.startswith("blocks") else block
            if name.startswith("co-shard"):
                told["transient"] = block / int(name.split()[-1])
            cells = (
                " / ".join(f"{some[column] / 1e6:.2f}" if column in some else "-" for some in (found, told))
                for column in COLUMNS
            )
            print(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    print_layers("gpt2:size=tiny,seq=128")
    for spec in ("gpt2:size=tiny", "mixtral:size=tiny"):
        print_uneven(spec)
    print_schedules("gpt2:size=tiny,layers=8,hidden=64,seq=128,batch=16,vocab=64")


if __name__ == "__main__":
    main()
