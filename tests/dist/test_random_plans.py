"""A share of the random plans, and the main ones of the library, on real gloo processes of one launch each: equal to
training on one device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.helpers import random_meshes
from tests.helpers import random_sprograms
import torch
from tests.helpers.random_graphs import random_model, random_plan, whole_step
from torch import Tensor

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.compiler import Compiled, finish
from superscaler.errors import ScheduleError
from superscaler.frontend.base.oracle import retyped
from superscaler.ir.communication import bytes_moved
from superscaler.launch.launch import launch
from superscaler.plans import resolve
from superscaler.verify.compare import Comparison
from superscaler.verify.eager import Eager
from superscaler.verify.oracles import draw_of, recurrence
from superscaler.verify.results import Result
from tests.helpers.graphs import graph_of
from tests.materialize.test_collectives import narrowing, weights_shared_out, widened
from tests.plans.test_dualpipe import MIXTRAL
from tests.helpers.ran import exact, rewritten

pytestmark = pytest.mark.dist
WORLD, ROOT = 4, Path(__file__).parents[1]
# One plan of each way to communicate; the others of the library run on threads.
LIBRARY = {
    "gpt2:size=tiny": [
        "interlaced:2 x data_parallel:2", "ring_attention",
        "hybrid:pp=2,dp=2+1,tp=1+2,microbatches=2,zero=1",
        f"{ROOT}/materialize/test_buckets.py:zero",
    ],
    MIXTRAL: ["dualpipe:2,microbatches=6 x expert_parallel:2,capacity=2.0"],
    # Its code has loops.
    "mlp:layers=4,batch=32": ["pipeline_1f1b:microbatches=32"],
}  # fmt: skip
# More of them, which run with `-m slow`.
SWEPT = {
    "gpt2:size=tiny,layers=4,batch=16,hidden=16,heads=4,seq=8,vocab=32": [
        "chimera", "interlaced", "dualpipe_v:2 x zero:2", "seq1f1b:2,slices=2 x data_parallel:2",
    ],
    "llama:size=tiny": ["swap:what=both,microbatches=2", "ulysses"],
    "gpt2:size=tiny": ["zero:stage=3", "hybrid:dp=1,tp=2,pp=2,microbatches=2"],
}  # fmt: skip
Values = Mapping[str, Tensor]
# A plan in float64 with what it runs on, and what tells from the steps of all ranks whether they are the model's.
Case = tuple[str, Compiled, Values, Values, Callable[[Sequence[Sequence[Result]]], None]]


def captured_cases(seeds: range, every: int = 1) -> Iterator[Case]:
    """Yield random plans of 2 to 4 devices on captured models: cuts, orders, rewrites, meshes. `every`: second, third."""
    for name in list(random_sprograms.MODELS)[::every]:
        for seed in seeds:
            devices = ss.Cluster.local(2 + seed % 3)
            kind = ("free", "layered")[seed % 2]
            more = [(), ("split", "copies"), ("regather", "copies", "early")][seed // 2 % 3]
            sprogram = random_sprograms.random_sprogram(seed, kind, 0.4 if "split" in more else None, more)
            yield from captured_case(
                f"{name} {seed}", random_sprograms.captured(name), lambda g, _, s=sprogram, d=devices: s(g, d)
            )
    for name in list(random_meshes.MODELS)[::every]:
        for seed in seeds:
            shape = random.Random(seed).choice([(2,), (3,), (4,), (2, 2)])
            sprogram = random_meshes.mesh_plan(seed, WORLD, shape, 0.05)
            yield from captured_case(f"{name} on {shape} {seed}", random_meshes.captured(name), sprogram)


def library_cases(table: Mapping[str, Sequence[str]]) -> Iterator[Case]:
    """Yield plans of the library by model, on 4 devices."""
    for model, plans in table.items():
        graph = graph_of(model, "SGD")
        for plan in plans:
            yield from captured_case(plan, graph, resolve(plan))


def written_cases() -> Iterator[Case]:
    """Yield plans of tests, on 4 devices."""
    yield from captured_case("weights shared out", graph_of("mlp:layers=4,batch=32", "SGD"), weights_shared_out)
    yield from captured_case("slices to one device", widened(), narrowing)


def captured_case(name: str, graph: ss.Graph, sprogram: Callable[..., None]) -> Iterator[Case]:
    """Yield the plan, unless its own random orders make a cycle."""
    try:
        compiled, captured = exact(graph, sprogram, WORLD), graph.captured
    except ScheduleError:
        return
    values = {k: retyped(v, torch.float64) for k, v in initial_values(compiled.graph.model, captured.values).items()}
    batch = {k: retyped(v, torch.float64) for k, v in captured.batch.items()}

    def check(results: Sequence[Sequence[Result]]) -> None:
        module, comparison = Eager(captured, batch), Comparison(compiled, values)
        for number, step in enumerate(zip(*results, strict=True)):
            expected = recurrence(
                lambda known, n: module.step(known, draw_of(n)), compiled.graph.model, comparison.known, number
            )
            comparison.add(step, expected)
        assert comparison.errors.is_equal, (name, comparison.errors)

    yield name, compiled, values, batch, check


def graph_cases(seeds: range) -> Iterator[Case]:
    """Yield random nested cuts of random graphs, which SGD trains."""
    for seed in seeds:
        model, values = random_model(seed, 6)
        compiled = random_plan(model, seed + 1, 2 + seed % 3)
        compiled = finish(compiled.graph, ss.Cluster.local(WORLD))
        batch = {n: values[n] for n in model.inputs}

        def check(results: Sequence[Sequence[Result]], known: Values = values, exact: Compiled = compiled) -> None:
            for step in zip(*results, strict=True):
                loss, gradients = whole_step(exact.graph.model, dict(known))
                known = {n: v - 0.1 * gradients[n] if n in gradients else v for n, v in known.items()}
                for result, device in zip(step, exact.program.devices, strict=True):
                    assert torch.allclose(result.loss, loss, rtol=1e-9, atol=1e-9)
                    for weight in device.weights:
                        whole = known[weight.tensor]
                        want = whole[tuple(slice(lo, hi) for lo, hi in weight.box)]
                        assert torch.allclose(result.weights[str(weight.name)], want, rtol=1e-9, atol=1e-9), weight

        yield f"graph {seed}", compiled, values, batch, check


def run_all(cases: Sequence[Case], folder: Path) -> Iterator[Sequence[Sequence[Result]]]:
    """Run all plans on the ranks of one launch, and yield the steps of all ranks of each."""
    plans = [
        (describe(exact), dict(exact.emitted.files), dict(values), dict(batch)) for _, exact, values, batch, _ in cases
    ]
    torch.save(plans, folder / "plans")
    launch(Path(__file__).with_name("gloo_rank.py"), [str(folder)], WORLD, folder)
    for found in zip(*(torch.load(folder / f"results{rank}") for rank in range(WORLD)), strict=True):
        yield [[Result(*step) for step in steps] for steps in found]


def check_all(cases: Sequence[Case], folder: Path) -> None:
    """Compare each plan with one device, its bytes on links with what it said."""
    for (name, exact, *_, check), results in zip(cases, run_all(cases, folder), strict=True):
        assert sum(steps[0].moved for steps in results) == bytes_moved(exact.program), name
        check(results)


def broken(case: Case) -> Case:
    """Return a case with a wrong operator in its code, whose steps must be found wrong."""
    name, exact, values, batch, check = case
    text = exact.emitted.files["segments.py"]
    files = {**exact.emitted.files, "segments.py": text.replace("torch.tanh(", "torch.sin(").replace(" - ", " + ")}
    assert files != exact.emitted.files

    def fails(results: Sequence[Sequence[Result]]) -> None:
        with pytest.raises(AssertionError):
            check(results)

    return f"{name} broken", rewritten(exact, replace(exact.emitted, files=files)), values, batch, fails


def test_plans_on_processes_equal_one_device(tmp_path: Path) -> None:
    """Random plans, two with a bug, and those of the library."""
    drawn = [*captured_cases(range(1), every=4), *graph_cases(range(1))]
    library = [*library_cases(LIBRARY), *written_cases()]
    assert sum(len({d for g in exact.graph.grids.values() for d in g.used()}) > 1 for _, exact, *_ in drawn) > 3
    assert len(library) == sum(map(len, LIBRARY.values())) + 2
    assert "for m in range(" in library[-3][1].emitted.files["program_0.py"]
    check_all([*drawn, *map(broken, (drawn[0], drawn[-1])), *library], tmp_path)


@pytest.mark.slow
def test_more_plans_of_the_library_on_processes(tmp_path: Path) -> None:
    check_all(list(library_cases(SWEPT)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_more_random_plans_on_processes(block: int, tmp_path: Path) -> None:
    seeds = range(1000 + 10 * block, 1010 + 10 * block)
    check_all([*captured_cases(seeds), *graph_cases(seeds)], tmp_path)
