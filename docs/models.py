"""Writes docs/models.md: every named model under two plans on four devices, with what `verify` finds; and families.

python docs/models.py

The section of families is what `benchmarks/families.py` wrote into benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

import superscaler as ss
from superscaler.models import build, names
from superscaler.plans import resolve

PLANS = ("data_parallel", "tensor_parallel")
HEAD = """# Models

Written by `python docs/models.py`: one training step of each model, unmodified, on four devices (`local:4`) in float64
against the module itself on one. The error is the largest of the loss, all gradients, weights and optimizer state. An
operator without a rule is replicated and placed, but never cut. Regions that a model itself wraps in
`torch.utils.checkpoint` (after `model.gradient_checkpointing_enable()` of transformers) are
[recomputed](tour.md#computing-again-instead-of-keeping) under every plan.

| model | plan | operators | without a rule | factors | equal | largest error |
|---|---|---|---|---|---|---|
"""
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "families.txt"
FAMILIES = """
## Families of transformers

Written by `python benchmarks/families.py`: families of the library, unmodified, tiny, random weights, AdamW.
Two steps in float64 of each plan (on two devices, `single` on one; `1F1B` with two microbatches) are compared with two
steps of the module itself, run eagerly by torch. A number is the largest error of losses, gradients, weights, buffers
and optimizer state. Below, each refusal has its reason, with the line of the library that is the cause.

"""
TRAINED = """
Written by `python benchmarks/eager_steps.py`: three steps of AdamW in float32 and float64, dropout off. A number is
the distance of the weights of a plan (or of its loss) from those of torch's own eager training, relative to the
distance that training moved them. `order` is the same number for eager training with the rows of each batch in another
order; `inside` is the narrowest dtype that a module computes in.

"""


def main() -> None:
    specs = [name if name == "mlp" else f"{name}:size=tiny" for name in names()]
    rows = [row for spec in specs for row in rows_of(spec)]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    Path(__file__).with_suffix(".md").write_text(HEAD + table + families())


def families() -> str:
    """Return the section of families: the tables as they were printed, and a list of reasons."""
    table, count, reasons, steps = RESULTS.read_text().strip().split("\n\n")
    told = "".join(f"- {line}\n" for line in reasons.splitlines())
    return f"{FAMILIES}```\n{table}\n```\n\n{count}.\n\n{told}{TRAINED}```\n{steps}\n```\n"


def rows_of(spec: str) -> Iterator[tuple[str, ...]]:
    built = build(spec)
    try:
        optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-3)
        graph = ss.capture(built.module, built.args, built.kwargs, optimizer)
    except ss.PlanError as error:
        yield f"`{spec}`", "-", "-", "-", "-", "-", f"not captured: {str(error).split(';')[0]}"
        return
    model = graph.model
    without = ", ".join(f"{target} ({count})" for target, count in model.unsupported.items()) or "0"
    counts = (str(len(graph.forward_ops)), without, str(len(model.factors)))
    for plan in PLANS:
        result = ss.compile(graph, resolve(plan), ss.Cluster.local(4)).verify()
        error = max(result["loss_error"], result["gradient_error"], result["parameter_error"])
        yield f"`{spec}`", f"`{plan}`", *counts, "yes" if result["equal"] else "NO", f"{error:.0e}"


if __name__ == "__main__":
    main()
