"""What plans emit, as hashes, one line a plan: what is not to change any plan must not change one of them.

After a wanted change: pytest tests/golden --update-golden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from superscaler.models import names
from superscaler.plan import Plan, compile
from superscaler.verbs import Cluster, Graph
from tests.helpers.graphs import graph_of
from tests.helpers.random_meshes import captured, mesh_plan
from tests.helpers.random_sprograms import captured as captured_small
from tests.helpers.random_sprograms import random_sprogram
from tests.helpers.sweeps import slow
from tests.integration.test_experts import split
from tests.integration.test_routes import plan_of
from tests.property.test_spmd import LINE, MESH, lay_out

FILE = Path(__file__).parent / "replay.txt.golden"
# Other versions may export other graphs.
VERSIONS = ", ".join(f"{m.__name__} {'.'.join(m.__version__.split('.')[:2])}" for m in (torch, transformers))
PIPELINE, HYBRID = "pipeline_1f1b:microbatches=2", "hybrid:dp=2,tp=2,pp=2,microbatches=2"
PLANS = [
    ("single", "local:1"),
    ("data_parallel", "local:4"),
    ("tensor_parallel", "local:4"),
    (PIPELINE, "local:4"),
    (HYBRID, "local:8"),
    ("hybrid:dp=4,tp=4,pp=2", "v100:4x8"),
]
# Models whose operators other models have, too; the last takes half a minute.
SWEPT = ("mbart", "vit", "gpt3", "bert", "llama", "t5", "swin", "alphafold2")
# The one has fewer than four blocks that train; the loss of the other's router is of all microbatches.
REFUSED = {("alphafold2", PIPELINE), ("mixtral", PIPELINE), ("mixtral", HYBRID)}
# Cut parts of values, routed and copied replicas, uneven cuts, microbatches, updates apart; tied weights, batch norms.
ON_MESHES = [("tied", 2), ("tied", 4), ("tied", 9), ("attention", 0), ("attention", 4), ("attention", 5),
             ("neighbours", 4), ("neighbours", 9)]  # fmt: skip
ANYWHERE = [("tied", "free", 0), ("tied", "layered", 0), ("convolutions", "layered", 2), ("towers", "free", 0),
            ("auxiliary", "layered", 2), ("attention", "layered", 3),
            # Loops beside code of the same microbatches: sums before, in and behind them, and slices of constants.
            ("auxiliary", "layered", 0), ("towers", "layered", 0), ("attention", "layered", 12),
            ("towers", "layered", 63)]  # fmt: skip
LAID_OUT: dict[str, dict[str, Any]] = {
    "updates split": {"mesh": MESH[0], "zero": True},
    "two stages": {"mesh": MESH[0], "tail": MESH[1], "microbatches": (2, False), "vocabulary": True},
    "sizes differ": {"mesh": LINE, "sizes": (3, 4, 3, 2)},
}


def library(name: str) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield every plan of the library on a named model."""
    spec = {"mlp": "mlp", "alphafold2": "alphafold2:size=tiny,layers=1,passes=2"}.get(name, f"{name}:size=tiny")
    graph = graph_of(spec)
    for plan, cluster in PLANS:
        if (name, plan) not in REFUSED:
            yield f"{spec} {plan} {cluster}", partial(compile, graph, plan, cluster)
    if name == "mixtral":
        experts: Any = split({"experts.gate_up_proj": 0})
        yield f"{spec} experts local:4", partial(compile, graph, experts, "local:4")


def written() -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield plans as users write them, on small models."""

    def plan(graph: Graph, sprogram: Callable[[Graph, Cluster], Any], world: int) -> Callable[[], Plan]:
        return partial(compile, graph, sprogram, f"local:{world}")

    for name, seed in ON_MESHES:
        yield f"small:{name} mesh_{seed} local:12", plan(captured(name), mesh_plan(seed, 12, (2, 3, 2), 0.2), 12)
    for name, kind, number in ANYWHERE:
        yield f"small:{name} {kind}_{number} local:3", plan(captured_small(name), random_sprogram(number, kind), 3)
    for name, options in LAID_OUT.items():
        yield f"small:tied {name.replace(' ', '_')} local:12", plan(captured("tied"), laid_out(options), 12)
    for made, read in (("inner", "copies"), ("batch", "outer"), ("copies", "batch")):
        yield f"small:two {made}_to_{read} v100:2x4", partial(plan_of, made, read, [0, 1, 2, 3], [4, 6, 5, 7])


def laid_out(options: dict[str, Any]) -> Callable[[Graph, Cluster], None]:
    return lambda graph, _: lay_out(graph, **options)


def hashes(plan: Plan) -> dict[str, str]:
    """Return a short hash of each file of a plan, of which device runs which, and of the tables of all devices."""
    emitted = plan.compiled.emitted
    assert all(len(line) <= 120 for text in emitted.files.values() for line in text.splitlines())
    tables = [asdict(emitted.tables[rank]) for rank in range(len(emitted.programs))]
    texts = {**emitted.files, "devices": str(emitted.programs), "tables": json.dumps(tables, default=np.ndarray.item)}
    return {name: sha256(text.encode()).hexdigest()[:10] for name, text in texts.items()}


@pytest.mark.parametrize("model", [*(slow(n)[0] if n in SWEPT else n for n in names()), "some", *slow("small")])
def test_plans_are_emitted_as_before(model: str, request: pytest.FixtureRequest) -> None:
    is_update = request.config.getoption("--update-golden")
    first, *lines = FILE.read_text().splitlines() if FILE.exists() else [""]
    # Those of the sweep are all small ones, these every third.
    plans = [*written()][:: 3 if model == "some" else 1] if model in ("some", "small") else library(model)
    made = {name: hashes(compiled()) for name, compiled in plans}
    mine = [line for line in lines if line.split(":")[0].split(" ")[0] == model or line.rpartition(": ")[0] in made]
    if is_update:
        shown = [f"{name}: {' '.join(f'{file}={value}' for file, value in h.items())}" for name, h in made.items()]
        others = [line for line in lines if line not in mine and first == VERSIONS]
        FILE.write_text("\n".join([VERSIONS, *sorted([*others, *shown]), ""]))
        return
    kept = {name: dict(f.split("=") for f in rest.split()) for name, rest in (line.rsplit(": ", 1) for line in mine)}
    files = {name: kept.get(name, {}).items() ^ made.get(name, {}).items() for name in {**kept, **made}}
    differ = [f"{name}: {', '.join(sorted({file for file, _ in some}))}" for name, some in files.items() if some]
    if differ and first != VERSIONS:
        pytest.skip(f"the hashes are of {first}, and this is {VERSIONS}, where other code is emitted")
    assert not differ, "\n".join(["other code is emitted:", *differ])
