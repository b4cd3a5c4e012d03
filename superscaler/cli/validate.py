"""`superscaler validate`: whether a plan can run, without running it."""

from __future__ import annotations

from superscaler.cli.common import (
    AsJson,
    AutocastName,
    ClusterSpec,
    LearningRate,
    Model,
    NoCache,
    OptimizerName,
    PlanSpec,
    Request,
    compile_plan,
    printing,
)


def validate(
    model: Model,
    plan: PlanSpec,
    cluster: ClusterSpec,
    optimizer: OptimizerName = "adamw",
    lr: LearningRate = 1e-3,
    autocast: AutocastName = None,
    no_cache: NoCache = False,
    as_json: AsJson = False,
) -> None:
    """Check that the plan covers the model and cannot deadlock. Exit code 1 and the reason when it does not hold."""
    with printing(as_json) as printer:
        compiled, _ = compile_plan(Request(model, plan, cluster, optimizer, lr, autocast, no_cache))
        found = compiled.validate()
        printer.show(compiled.summary(), "the plan holds: every part is covered, and no device waits forever")
        printer.result = found
