"""`superscaler capture`: the contents of a model."""

from collections.abc import Iterator, Sequence
from typing import Any

from superscaler.cli.common import ModelRequest
from superscaler.cli.options.command import command
from superscaler.cli.printing import Printer, table
from superscaler.errors import some
from superscaler.groups import group_by
from superscaler.report.model import collapse, describe
from superscaler.specs.sizes import scaled

# Places and factors that a cell of the tables names; --json has all.
_PLACES = 4
_MARKS = ("spatial", "summed", "frozen")


@command
def capture(printer: Printer, request: ModelRequest) -> None:
    """Capture MODEL and list its operators, its factors (which plans can split), and its uncuttable indices."""
    graph, built = request.capture()
    found = describe(graph.model)
    ops = table(("operator", "count", "one of them", "frozen on"), _ops(found), ("count",), "Forward operators")
    numbers = ("size", "count", *_MARKS)
    factors = table(("factor", *numbers, "where"), _factors(found), numbers, "Factors")
    checked = graph.captured.checked
    printer.show(ops, factors, _summary(built.name, found), *_frozen(found), *filter(None, [checked]))
    printer.result = {"model": built.name, **found, "checked": checked, "seconds": dict(graph.captured.seconds)}


def _ops(found: dict[str, Any]) -> Iterator[Sequence[str]]:
    for row in found["operators"]:
        notation = " ".join(map(_collapse_word, row["notation"].partition(": ")[2].split()))
        frozen = [f"{factor} ({count})" for factor, count in row["frozen"].items()]
        yield row["operator"], str(row["count"]), notation, some(frozen, _PLACES)


def _collapse_word(word: str) -> str:
    name = word.rstrip("+^,")
    return collapse(name) + word[len(name) :]


def _factors(found: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Yield the rows of factors; those of one size that differ only in the numbers of their blocks share a row."""
    for (name, size), rows in group_by(found["factors"], lambda f: (collapse(f["name"]), f["size"])).items():
        counts = [str(sum(row[mark] for row in rows)) for mark in _MARKS]
        where = list(dict.fromkeys(collapse(place) for row in rows for place in row["where"]))
        yield name, str(size), str(len(rows)), *counts, some(where, _PLACES)


def _summary(name: str, found: dict[str, Any]) -> str:
    regions = ", ".join(f"{module} ({count})" for module, count in found["checkpoints"].items())
    return (
        f"{name}: {found['parameters']:,} parameters ({_bytes(found['parameter_bytes'])}), "
        f"{found['trained_parameters']:,} of them trained; {found['buffers']:,} elements of buffers "
        f"({_bytes(found['buffer_bytes'])})\n"
        f"{sum(found['ops'].values())} forward ops, {found['mirrors']} mirrors, {found['updates']} updates; in the "
        f"forward of a step {found['flops']:.4g} FLOPs, and {_bytes(found['activation_bytes'])} of activations that "
        "mirrors read"
        + _outputs(found)
        + (f"\nregions that the model checkpoints, recomputed unless a plan saves them: {regions}" if regions else "")
    )


def _outputs(found: dict[str, Any]) -> str:
    """Return the outputs of a step in words, if it has more than a loss."""
    shown = [f"{name} {tuple(shape)} {dtype}" for name, (shape, dtype) in found["outputs"].items()]
    means = "" if found["trains"] else "inference: no gradient is computed, nothing is updated; "
    return f"\n{means}a step returns {some(shown, _PLACES)}" if shown else ""


def _frozen(found: dict[str, Any]) -> list[str]:
    """Return one list of operators without a rule, and one line per operator and reason that freezes an index."""
    lines = []
    if found["unsupported"]:
        named = ", ".join(f"{target} ({count})" for target, count in found["unsupported"].items())
        lines.append(f"operators without a rule, which can be replicated and placed but not cut: {named}")
    rows = [row for row in found["frozen"] if row["reason"] != "no rule"]
    if rows:
        lines.append("frozen indices, which their ops read or make whole on every device:")
    lines += [f"  {r['operator']} ({r['count']}) {r['reason']}: {some(r['factors'], _PLACES)}" for r in rows]
    return lines


def _bytes(count: int) -> str:
    """Return a number of bytes in words.

    >>> _bytes(1500), _bytes(2_500_000_000)
    ('1.5 kB', '2.5 GB')
    """
    return scaled(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")), ".4g") or f"{count} B"
