"""`superscaler validate`: whether a plan can run, without running it."""

from __future__ import annotations

from superscaler.cli.common import PlanRequest, Printer, command


@command
def validate(printer: Printer, request: PlanRequest) -> None:
    """Check that the plan covers the model and cannot deadlock. Exit code 1 and the reason when it does not hold."""
    compiled, _ = request.compile()
    printer.result = compiled.validate()
    printer.show(compiled.summary(), "the plan holds: every part is covered, and no device waits forever")
