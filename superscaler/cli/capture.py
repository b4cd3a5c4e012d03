"""`superscaler capture`: what is in a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from typing import TYPE_CHECKING, Any

from superscaler.cli.common import AsJson, AutocastName, LearningRate, Model, OptimizerName, capture_model, printing

if TYPE_CHECKING:
    from rich.table import Table

    from superscaler.ir.graph import Model as GraphModel

# Places of a factor that the table shows, and rows of the table; --json has all.
_PLACES, _ROWS = 3, 40


def capture(
    model: Model,
    optimizer: OptimizerName = "adamw",
    lr: LearningRate = 1e-3,
    autocast: AutocastName = None,
    as_json: AsJson = False,
) -> None:
    """Capture MODEL and list its operators, its factors (what a plan can split) and what no rule supports."""
    with printing(as_json) as printer:
        graph, built = capture_model(model, optimizer, lr, autocast)
        found = describe(graph.model)
        printer.show(_op_table(found), _factor_table(found), _summary(built.name, found))
        printer.result = {"model": built.name, **found, "seconds": dict(graph.captured.seconds)}


def describe(model: GraphModel) -> dict[str, Any]:
    """Return what was captured, in plain data. `flops` counts the forward of one step."""
    forward = [op for op in model.ops if op.is_forward]
    parameters = list(model.parameters())
    return {
        "ops": dict(Counter(op.target for op in forward).most_common()),
        "mirrors": sum(op.has_mirror for op in forward),
        "updates": len(model.ops) - len(forward),
        "factors": _factors(model),
        "parameters": sum(prod(t.shape) for t in parameters),
        "trained_parameters": sum(prod(t.shape) for t in parameters if t.requires_grad),
        "flops": sum(op.flops for op in forward),
        "unsupported": dict(model.unsupported),
    }


def _factors(model: GraphModel) -> list[dict[str, Any]]:
    """Return each factor with its size, how many ops have it free to cut, and the inputs and parameters it is in."""
    places: dict[str, list[str]] = defaultdict(list)
    for tensor in model.tensors.values():
        if tensor.kind in ("input", "parameter"):
            for dim, slots in enumerate(tensor.slots):
                for factor in dict.fromkeys(slots):
                    places[factor].append(f"{tensor.name}.{dim}")
    ops = Counter(f for op in model.ops if op.is_forward for f in {i.factor for i in op.indices if i.mark != "frozen"})
    return [
        {"name": f.name, "size": f.size, "ops": ops[f.name], "where": places[f.name]} for f in model.factors.values()
    ]


def _op_table(found: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("operator", "count", title="Forward operators")
    table.columns[1].justify = "right"
    for target, count in found["ops"].items():
        mark = " (no rule: never cut)" if target in found["unsupported"] else ""
        table.add_row(target + mark, str(count))
    return table


def _factor_table(found: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("factor", "size", "ops", "where", title="Factors", caption=_left_out(len(found["factors"])))
    for column in table.columns[1:3]:
        column.justify = "right"
    for factor in found["factors"][:_ROWS]:
        where = factor["where"]
        more = f" and {len(where) - _PLACES} more" if len(where) > _PLACES else ""
        table.add_row(factor["name"], str(factor["size"]), str(factor["ops"]), ", ".join(where[:_PLACES]) + more)
    return table


def _left_out(count: int) -> str | None:
    return f"and {count - _ROWS} more; --json lists all" if count > _ROWS else None


def _summary(name: str, found: dict[str, Any]) -> str:
    lines = [
        f"{name}: {found['parameters']:,} parameters, {found['trained_parameters']:,} of them trained; "
        f"{sum(found['ops'].values())} forward ops, {found['mirrors']} mirrors, {found['updates']} updates; "
        f"{found['flops']:.4g} FLOPs in the forward of a step",
    ]
    if found["unsupported"]:
        named = ", ".join(f"{target} ({count})" for target, count in found["unsupported"].items())
        lines.append(f"operators without a rule, which can be replicated and placed but not cut: {named}")
    return "\n".join(lines)
