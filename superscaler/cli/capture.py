"""`superscaler capture`: what is in a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from superscaler.cli.common import ModelRequest, Printer, command

if TYPE_CHECKING:
    from rich.table import Table

# Places and factors that a cell of the tables names; --json has all.
_PLACES = 4


@command
def capture(printer: Printer, request: ModelRequest) -> None:
    """Capture MODEL and list its operators, its factors (what a plan can split) and what cannot be cut, and why."""
    graph, built = request.capture()
    from superscaler.report.model import describe

    found = describe(graph.model)
    printer.show(_op_table(found), _factor_table(found), _summary(built.name, found), *_frozen(found))
    printer.result = {"model": built.name, **found, "seconds": dict(graph.captured.seconds)}


def _op_table(found: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("operator", "count", "one of them", "frozen on", title="Forward operators")
    table.columns[1].justify = "right"
    for row in found["operators"]:
        notation = " ".join(map(_collapse_word, row["notation"].partition(": ")[2].split()))
        frozen = [f"{factor} ({count})" for factor, count in row["frozen"].items()]
        table.add_row(row["operator"], str(row["count"]), notation, _some(frozen))
    return table


def _collapse_word(word: str) -> str:
    from superscaler.report.model import collapse

    name = word.rstrip("+^,")
    return collapse(name) + word[len(name) :]


def _factor_table(found: dict[str, Any]) -> Table:
    """Return the table of factors; those of one size that differ only in the numbers of their blocks share a row."""
    from rich.table import Table

    from superscaler.report.model import collapse

    table = Table("factor", "size", "count", "spatial", "summed", "frozen", "where", title="Factors")
    for column in table.columns[1:6]:
        column.justify = "right"
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for factor in found["factors"]:
        groups.setdefault((collapse(factor["name"]), factor["size"]), []).append(factor)
    for (name, size), rows in groups.items():
        counts = [str(sum(row[mark] for row in rows)) for mark in ("spatial", "summed", "frozen")]
        where = dict.fromkeys(collapse(place) for row in rows for place in row["where"])
        table.add_row(name, str(size), str(len(rows)), *counts, _some(where))
    return table


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _PLACES} more" if len(names) > _PLACES else ""
    return ", ".join(names[:_PLACES]) + more


def _summary(name: str, found: dict[str, Any]) -> str:
    return (
        f"{name}: {found['parameters']:,} parameters ({_bytes(found['parameter_bytes'])}), "
        f"{found['trained_parameters']:,} of them trained; {found['buffers']:,} elements of buffers "
        f"({_bytes(found['buffer_bytes'])})\n"
        f"{sum(found['ops'].values())} forward ops, {found['mirrors']} mirrors, {found['updates']} updates; in the "
        f"forward of a step {found['flops']:.4g} FLOPs, and {_bytes(found['activation_bytes'])} of activations that "
        "mirrors read"
    )


def _frozen(found: dict[str, Any]) -> list[str]:
    """Return one list of operators without a rule, and one line per operator and reason that freezes an index."""
    lines = []
    if found["unsupported"]:
        named = ", ".join(f"{target} ({count})" for target, count in found["unsupported"].items())
        lines.append(f"operators without a rule, which can be replicated and placed but not cut: {named}")
    rows = [row for row in found["frozen"] if row["reason"] != "no rule"]
    if rows:
        lines.append("frozen indices, which their ops read or make whole on every device:")
    lines += [f"  {r['operator']} ({r['count']}) {r['reason']}: {_some(r['factors'])}" for r in rows]
    return lines


def _bytes(count: int) -> str:
    """Return a number of bytes for people.

    >>> _bytes(1500), _bytes(2_500_000_000)
    ('1.5 kB', '2.5 GB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
