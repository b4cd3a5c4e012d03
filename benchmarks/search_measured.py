"""The found plan beside all plans of the library, trained on this machine: `python benchmarks/search.py --measured`.

For each number of processes the machine is measured (`doctor --measure`), and a plan is searched as by `search
--measure 4`. Then it takes a turn, and each plan of the library that the model allows on so many processes: alone, with
microbatches, and in products of two. Those that are near the shortest step take three more turns with it. PipeDream
trains on old weights, which is another step; it is left out. `--beside "data_parallel; chimera"` takes these plans in
the place of all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import superscaler as ss
from superscaler.models import build
from superscaler.planner.measured import measured
from superscaler.planner.search import search
from superscaler.plans import keys_of, names

SIZES = "layers=4,hidden=256,heads=8,seq=128,vocab=2048,batch=16"
MODELS = f"gpt2:{SIZES}", f"llama:{SIZES},mlp=1024,kv_heads=8"
# Plans that train on old weights.
_OTHER = "pipedream", "pipedream_2bw"
_FINALISTS = 4
# Plans whose first turn took less than so many times the shortest step take turns again.
_NEAR = 1.25


def machine(processes: int, folder: str) -> ss.Cluster:
    """Return this machine with so many processes, measured."""
    file = f"{folder}/machine{processes}.yaml"
    command = (sys.executable, "-m", "superscaler", "doctor", "--measure", "--cluster", f"local:{processes}")
    subprocess.run([*command, "--out", file], check=True, stdout=subprocess.DEVNULL)
    return ss.Cluster.parse(file)


def specs(processes: int) -> Iterator[str]:
    """Yield texts of plans of the library for so many processes; a model may not allow some."""
    own = [name for name in names() if name not in _OTHER]
    cut = [name for name in own if "microbatches" in keys_of(name)]
    yield from own
    yield from (f"{name}:microbatches={count}" for name in cut for count in (2, 4))
    if processes == 4:
        outer = "data_parallel:2", "zero:2,stage=1", "fsdp:2", "pipeline_1f1b:2,microbatches=4"
        inner = "data_parallel:2", "tensor_parallel:2", "sequence_parallel:2", "ulysses:2", "zero:2,stage=1"
        yield from (f"{a} x {b}" for a, b in product(outer, inner))


def plans(graph: ss.Graph, cluster: ss.Cluster, beside: Sequence[str]) -> Iterator[str]:
    """Yield those of some plans, or of all of the library, that compile, and whose step is of one batch."""
    for spec in beside or specs(len(cluster.devices)):
        with suppress(ss.PlanError):
            if ss.compile(graph, spec, cluster).compiled.graph.model.iterations == 1:
                yield spec


def compare(model: str, cluster: ss.Cluster, beside: Sequence[str]) -> float:
    """Print the plans, the shortest step first; return the step of the found plan in the shortest of the library's."""
    built = build(model)
    optimizer = torch.optim.AdamW(built.module.parameters())
    graph = ss.capture(built.module, built.args, built.kwargs, optimizer)

    def save(spec: str, folder: Path) -> None:
        ss.compile(graph, spec, cluster).save(folder, evaluation=False)

    def steps(some: Sequence[str], turns: int = 3) -> dict[str, float]:
        return measured(some, save, len(cluster.devices), turns=turns)

    answer = search(graph, cluster, measured=_FINALISTS)
    finalists = [found.spec for found in answer.finalists(_FINALISTS)]
    first = steps(finalists)
    best = min(first, key=lambda spec: first[spec])
    others = [spec for spec in dict.fromkeys(plans(graph, cluster, beside)) if spec != best]
    found = steps([best, *others], turns=1)
    again = steps([spec for spec in found if spec == best or found[spec] < _NEAR * min(found.values())])
    found |= {spec: min(found[spec], again[spec]) for spec in again}
    ratio = found[best] / min(found[spec] for spec in others)
    print(f"{model}, {len(cluster.devices)} processes: {best}, of {', '.join(finalists)}")
    print(f"  {ratio:.3f} of the shortest step of {len(others)} plans{'' if beside else ' of the library'}")
    for spec in sorted(found, key=lambda spec: found[spec]):
        print(f"  {found[spec] * 1e3:8.1f} ms  {found[spec] / found[best]:6.3f}  {spec}", flush=True)
    return ratio


def run(models: Sequence[str], processes: Sequence[int], beside: Sequence[str]) -> None:
    """Compare on so many processes, with all plans of the library, or with those of the user."""
    with TemporaryDirectory() as folder:
        for count in processes:
            cluster = machine(count, folder)
            for model in models:
                compare(model, cluster, beside)
