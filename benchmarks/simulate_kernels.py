"""Predicted seconds of segments and of their kernels, beside measured ones, on one core of this machine.

    python benchmarks/simulate_kernels.py [--cluster cluster.yaml] [MODEL ...]

The cluster file is one of `superscaler doctor --measure --out cluster.yaml`; without it, kernels are measured first.
Seconds are those of the thread, so that other processes do not count. Each segment runs as the executor runs it, its
forward and its backward by themselves; then again with a clock around each kernel, for the table by operator.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

import superscaler as ss
from superscaler.cluster import Cluster, DeviceKind
from superscaler.compiler import compile_graph
from superscaler.ir.program import Backward, Forward, Program
from superscaler.launch.launch import call
from superscaler.measure import profile
from superscaler.models import build
from superscaler.plans import resolve
from superscaler.runtime.executor import Rank
from superscaler.simulate.kernels import Segments, input_metas
from superscaler.simulate.rates import name_of, seconds
from superscaler.simulate.recording import callables
from superscaler.simulate.works import Kernel, Meta

GPT2 = "gpt2:layers=2,hidden={},heads={},seq={},batch={},vocab=2048,dropout=0"
LLAMA = "llama:layers=2,hidden={},heads={},kv_heads=4,mlp={},seq={},batch={},vocab=2048,tied=False"
MODELS = [
    GPT2.format(256, 4, 128, 8), GPT2.format(512, 8, 256, 4), GPT2.format(768, 12, 512, 2), GPT2.format(512, 8, 256, 8),
    LLAMA.format(256, 8, 768, 256, 4), LLAMA.format(512, 8, 1408, 256, 4), LLAMA.format(768, 12, 2048, 512, 2),
]  # fmt: skip
TASK, WARM, REPEATS = "s", 2, 7


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster")
    parser.add_argument("--plan", default="single")
    parser.add_argument("--autocast")
    parser.add_argument("models", nargs="*", default=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind = Cluster.parse(options.cluster).device_kind if options.cluster else measured()
    assert kind is not None
    totals: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    print(f"{'segment':84s} {'kernels':>8} {'predicted ms':>12} {'measured ms':>12}  error")
    for spec in options.models:
        for label, kernels, spent, samples in segments(spec, options.plan, options.autocast):
            told = sum(seconds(k, kind) for k in kernels)
            print(f"{label:84s} {len(kernels):8d} {told * 1e3:12.2f} {spent * 1e3:12.2f}  {told / spent - 1:+.1%}")
            for kernel, took in samples:
                totals[name_of(kernel)][0] += seconds(kernel, kind)
                totals[name_of(kernel)][1] += took
    print(f"\n{'operator':60s} {'predicted ms':>12} {'measured ms':>12}  error")
    for name, (told, took) in sorted(totals.items(), key=lambda pair: -pair[1][1]):
        if took > 1e-3:
            print(f"{name:60s} {told * 1e3:12.2f} {took * 1e3:12.2f}  {told / took - 1:+.1%}")


def measured() -> DeviceKind:
    found = call(profile.measure, 2)[0]
    samples = map(profile.Sample.read, found["samples"])
    return DeviceKind("local", 10**9, {}, profile.speeds(samples, found["floor"], found["fresh"]))


def segments(spec: str, plan: str, autocast: str | None) -> Iterable[tuple[str, Sequence[Kernel], float, Any]]:
    """Yield the distinct works of a model under a plan: label, kernels, measured seconds, measured kernels."""
    program = compiled(spec, plan, autocast)
    recorded, run, seen = Segments(program), callables(program), set[int]()
    code = [i for device, _ in program.distinct for i in device.instructions]
    backwards = {i.task: i for i in reversed(code) if isinstance(i, Backward)}
    for i in code:
        if isinstance(i, Forward):
            backward = backwards.get(i.task)
            segment = recorded.of(i, backward)
            if id(segment) in seen or len(segment.backward) > 1:
                continue
            seen.add(id(segment))
            metas = list(input_metas(program.model, program.functions[i.function]))
            times, noted = timed(run[i.function], metas, bool(segment.backward))
            for work, name, took, samples in zip(
                (segment.forward, *segment.backward), ("forward", "backward"), times, noted, strict=False
            ):
                if took > 1e-3:
                    yield f"{spec} {name}", work.kernels, took, samples


def compiled(spec: str, plan: str, autocast: str | None) -> Program:
    built = build(spec)
    optimizer = torch.optim.AdamW(built.module.parameters())
    graph = ss.capture(built.module, built.args, built.kwargs, optimizer=optimizer, autocast=autocast, check=False)
    cluster = Cluster.parse("local:1" if plan == "single" else "local:2")
    return compile_graph(graph, resolve(plan), cluster).program


def timed(
    run: Callable[..., tuple[torch.Tensor, ...]], metas: Sequence[Meta], tape: bool
) -> tuple[list[float], list[list[tuple[Kernel, float]]]]:
    """Return the median seconds of forward and backward, and those of their kernels."""
    rank = Rank(cast(Any, SimpleNamespace(device=torch.device("cpu"))), {"weights": []}, {}, ("SGD", ()), torch.float32)
    inputs = [drawn(meta) for meta in metas]
    again = [inputs[n] for n in run.__dict__.get("again", ())]
    saved = run.__dict__.get("saved")

    def once(works: list[Any], clock: Callable[[Callable[[], Any]], Any]) -> None:
        outputs = works[0](clock)
        ends = outputs if saved is None else [outputs[k] for k in saved]
        given = [torch.full_like(x, 1e-3) for x in ends]
        del outputs, ends
        if tape:
            works[1](clock, given)

    works = [
        lambda clock: clock(lambda: rank.forward(TASK, run, inputs, tape)),
        lambda clock, given: clock(lambda: rank.backward(TASK, given, again)),
    ]
    times: list[float] = []

    def stopwatch(work: Callable[[], Any]) -> Any:
        start = time.thread_time()
        made = work()
        times.append(time.thread_time() - start)
        return made

    noted: list[list[Any]] = []

    def record(work: Callable[[], Any]) -> Any:
        with profile.Timer() as timer:
            made = work()
        noted.append([(s.kernel, s.seconds) for s in timer.found])
        return made

    for _ in range(WARM + REPEATS):
        once(works, stopwatch)
    once(works, record)
    count = 1 + tape
    return [statistics.median(times[WARM * count + k :: count]) for k in range(count)], noted


def drawn(meta: Meta) -> torch.Tensor:
    shape, dtype = meta
    if dtype == "int64":
        # Positions of a sequence, or tokens.
        return torch.arange(shape[-1])[None] if shape[0] == 1 else torch.randint(512, shape)
    return torch.randn(shape).mul_(0.02).to(getattr(torch, dtype))


if __name__ == "__main__":
    main()
