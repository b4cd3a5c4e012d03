"""Predicted seconds and bytes of plans on one GPU, beside measured ones.

    python benchmarks/gpu/plans.py compile FOLDER [--groups NAME ...]     without a GPU: compile, predict; a file a case
                                          [--cluster measured.yaml]       predict for what doctor --measure wrote, too
    python benchmarks/gpu/plans.py run FOLDER [--steps 3] [--names PART]  on a GPU: run the cases, print the table

plans   three models under single, recompute, co-shard and swap, in bf16 autocast
long    GPT-3 1.3B with attention in one kernel, over its sequence
e6, e7  the paper's experiments on one GPU of 32 GB: Swin over its size, GPT-3 1.3B with written-out scores over its
        sequence, under recompute, ZeRO-3 offload and co-shard; float16 with a loss scale

Predictions are those of `superscaler simulate` for an h100 and an h200, written before anything runs. Weights are drawn
on the GPU, so that no file of weights is needed. Columns: the `peak` of tensors (`torch.cuda.max_memory_allocated`),
`held` by the allocator, `used` of the card beside the predicted `total`; `spread`: the slowest step to the fastest.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "paper"))
from models import SEQUENCES, SWIN_SIZES, long, small_swin
from systems import SINGLE

CLUSTERS = {"H100": "h100:1x1", "H200": "h200:1x1"}
MODELS = {
    "gpt3 1.3b": "gpt3:size=1.3b,batch=4,seq=2048,dropout=0.0",
    "llama 1b": "llama:size=1b,batch=4,seq=2048",
    "gpt2 medium": "gpt2:size=medium,batch=16,seq=1024,dropout=0.0",
}
PLANS = {"single": "single", "recompute": "recompute", "co-shard": "co_shard:parts=4", "swap": "swap"}
LONG = (8192, 16384, 32768)
# Microbatches of E6 and E7, of one sample each: gradients are added, as in the paper's steps of 512 samples.
FEW = 2
PAPER_BYTES = 32e9


@dataclass(frozen=True)
class Case:
    """A model under a plan. `half`: float16 with a loss scale; else bf16 autocast. `limit`: bytes of the GPU."""

    group: str
    name: str
    model: str
    plan: str
    half: bool = False
    limit: float = float("inf")

    @property
    def file(self) -> str:
        return f"{self.group} {self.name}.pickle"


def cases() -> Iterator[Case]:
    for name, model in MODELS.items():
        for plan, spec in PLANS.items():
            yield Case("plans", f"{name}, {plan}", model, spec)
    for sequence in LONG:
        for plan in ("recompute", "co-shard"):
            model = f"gpt3:size=1.3b,batch=1,seq={sequence},dropout=0.0"
            yield Case("long", f"gpt3 1.3b, {sequence} tokens, {plan}", model, PLANS[plan])
    for sequence in SEQUENCES:
        yield from _paper("e7", f"gpt3 1.3b, {sequence} tokens", long(sequence), 8)
    for size, (options, parts) in SWIN_SIZES.items():
        yield from _paper("e6", f"swin {size} M", small_swin(options, 48), parts)


def _paper(group: str, name: str, model: str, parts: int) -> Iterator[Case]:
    for system, spec in SINGLE.items():
        plan = spec.replace("{m}", str(FEW)).replace("PARTS", str(parts))
        yield Case(group, f"{name}, {system}", f"{model},batch={FEW}", plan, True, PAPER_BYTES)


def compile_all(folder: Path, groups: list[str], part: str, measured: str | None) -> None:
    import superscaler as ss
    from superscaler.artifact import describe
    from superscaler.cluster import Cluster
    from superscaler.models import build
    from superscaler.simulate.predict import simulate

    folder.mkdir(parents=True, exist_ok=True)
    last, graph = None, None
    for case in cases():
        file = folder / case.file
        if case.group not in groups or part not in case.name or file.exists():
            continue
        if case.model != last:
            built = build(f"{case.model},device=meta")
            optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-4)
            how: dict[str, Any] = {"autocast": "bf16"}
            if case.half:
                how = {"precision": "fp16", "scaler": torch.amp.GradScaler("cpu", init_scale=256.0)}
            graph = ss.capture(built.module, built.args, built.kwargs, optimizer, check=False, **how)
            last = case.model
            graph.captured.values.clear()
        plan = ss.compile(graph, case.plan, "h100:1x1")
        plan.validate()
        predicted = {}
        for card, cluster in (CLUSTERS | ({"measured": measured} if measured else {})).items():
            found = simulate(plan.compiled.program, Cluster.parse(cluster)).prediction
            full = found.fullest
            overhead = full.memory.get("overhead", 0)
            predicted[card] = {
                "seconds": found.step_seconds, "low": found.low, "high": found.high, "total": full.peak_bytes,
                "peak": full.peak_bytes - overhead, "flops": found.model_flops, "memory": dict(full.memory),
            }  # fmt: skip
        model = plan.compiled.graph.model
        rows = {i.tensor: model.tensors[op.inputs[0].tensor].shape[0] for op in model.ops for i in op.inputs[1:]}
        owned = {
            n: (t.shape, t.dtype, t.kind, rows.get(n, 1)) for n, t in model.tensors.items() if t.kind != "activation"
        }
        head, files = describe(plan.compiled), plan.compiled.emitted.files
        made = built.make_batch(0) if built.make_batch else {}
        numbers = {n: x for n, x in made.items() if not x.is_floating_point()}
        # Written by this program, and read by it on the machine with the GPU.
        file.write_bytes(pickle.dumps((head, files, owned, numbers, predicted)))
        print(f"{file.name:50} {_predictions(predicted)}", flush=True)


def _predictions(predicted: Mapping[str, Mapping[str, float]]) -> str:
    parts = (f"{card} {p['seconds']:.3f} s {p['peak'] / 1e9:.2f} GB" for card, p in predicted.items())
    return ", ".join(parts)


class Drawn(Mapping[str, Tensor]):
    """Weights by name, made when they are read: as models start, in the dtypes of the plan. Indices are drawn from the
    rows that they look up: the backward adds up the gradients of equal ones, one after the other.
    """

    def __init__(self, owned: Mapping[str, Any], device: torch.device) -> None:
        self.owned, self.device = owned, device

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype, kind, rows = self.owned[name]
        made = torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)
        if dtype == "int64":
            return made.random_(rows)
        if kind != "parameter" or name.endswith("bias"):
            return made
        return made.fill_(1.0) if len(shape) == 1 else made.normal_(0.0, 0.02)

    def __iter__(self) -> Iterator[str]:
        return iter(self.owned)

    def __len__(self) -> int:
        return len(self.owned)


def profile(step: Any, batch: Mapping[str, Tensor], file: Path) -> None:
    """Write the seconds of each operator on the GPU in a step, by its shapes."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as found:
        step(batch)
        torch.cuda.synchronize()
    rows = [
        (event.key, event.count, event.self_device_time_total / 1e6, str(event.input_shapes))
        for event in found.key_averages(group_by_input_shape=True)
        if event.self_device_time_total
    ]
    file.write_text(json.dumps(rows))


def run(case: Case, file: Path, steps: int, profiled: Path | None = None) -> dict[str, float]:
    """Return the peak bytes of tensors, what the allocator reserved, and the median seconds of a step."""
    from superscaler.comm.distributed import connect
    from superscaler.runtime.load import modules
    from superscaler.runtime.step import build_step

    head, files, owned, batch, _ = pickle.loads(file.read_bytes())
    communicator = connect()
    device = communicator.device
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, case.limit / total))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step = build_step(head, modules(files, f"{file.stem}/"), Drawn(owned, device), communicator)
    generator = torch.Generator().manual_seed(0)
    for name, (shape, dtype) in head["inputs"].items():
        if name not in batch:
            kind = getattr(torch, dtype)
            is_float = kind.is_floating_point
            drawn = torch.randn if is_float else partial(torch.randint, 1000)
            batch[name] = drawn(shape, generator=generator).to(kind)
    seconds, losses = list[float](), list[float]()
    for _ in range(steps + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(float(step(batch)))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()
    if profiled is not None:
        profile(step, batch, profiled)
    return {
        "seconds": statistics.median(seconds[1:]), "first": seconds[0], "loss": losses[-1],
        "spread": max(seconds[1:]) / min(seconds[1:]),
        "peak": peak, "reserved": reserved,
        "used": total - torch.cuda.mem_get_info()[0],
    }  # fmt: skip


def run_all(folder: Path, steps: int, groups: list[str], part: str, profiles: Path | None) -> None:
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29534",
    }  # fmt: skip
    card = "H200" if "H200" in torch.cuda.get_device_name() else "H100"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; predicted for {CLUSTERS[card]}")
    print(
        " " * 45
        + " seconds predicted         peak GB predicted          held   used  total TFLOPS spread  first    loss"
    )
    for case in cases():
        file = folder / case.file
        if case.group not in groups or part not in case.name or not file.exists():
            continue
        *_, predicted = pickle.loads(file.read_bytes())
        told = predicted[card]
        label, found = f"{case.group:5} {case.name}", None
        try:
            profiled = profiles / file.with_suffix(".json").name.replace(" ", "_") if profiles else None
            found = run(case, file, steps, profiled)
        except torch.OutOfMemoryError:
            print(f"{label:44} out of memory; predicted {told['seconds']:.3f} s, {told['peak'] / 1e9:.2f} GB, "
                  f"{told['total'] / 1e9:.2f} in all", flush=True)  # fmt: skip
        except Exception as error:  # The next case is another plan.
            print(f"{label:44} FAILED: {type(error).__name__}: {str(error)[:600]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if found is not None:
            print(f"{label:44} {line(found, told)}", flush=True)


def line(found: Mapping[str, float], told: Mapping[str, float]) -> str:
    """Return measured values beside predicted ones."""
    seconds, peak = (f"{told[key] / found[key] - 1:+6.1%}" for key in ("seconds", "peak"))
    sizes = (f"{x / 1e9:6.2f}" for x in (found["reserved"], found["used"], told["total"]))
    return (
        f"{found['seconds']:8.3f} {told['seconds']:9.3f} {seconds} {found['peak'] / 1e9:8.2f} "
        f"{told['peak'] / 1e9:9.2f} {peak} {' '.join(sizes)} {told['flops'] / found['seconds'] / 1e12:6.0f} "
        f"{found['spread']:6.2f} {found['first']:6.2f} {found['loss']:7.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compile", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--groups", nargs="*", default=["plans", "long", "e6", "e7"])
    parser.add_argument("--names", default="", help="only cases whose name has this")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cluster", help="compile: the file of a measured GPU")
    parser.add_argument("--profiles", type=Path, help="a folder for the seconds of operators, by case")
    options = parser.parse_args()
    if options.what == "compile":
        compile_all(options.folder, options.groups, options.names, options.cluster)
    elif not torch.cuda.is_available():
        print("skipped: no CUDA device on this machine")
    else:
        run_all(options.folder, options.steps, options.groups, options.names, options.profiles)


if __name__ == "__main__":
    main()
