"""A saved plan in words, and the comparison of two plans: from plan.json and explain.json, without torch."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from superscaler.errors import some
from superscaler.groups import group_by
from superscaler.report.places import Groups, Places
from superscaler.report.schema import Account, Axis, Block, Order, Sent, Split, Weights, objects
from superscaler.specs.sizes import duration, size
from superscaler.store.plan import read_plan
from superscaler.store.plan_head import EXPLAIN_FILE

_NUMBER = re.compile(r"^(.*?)(\d+)$")
# A communication that takes more than so many times its seconds at full bandwidth is as long with fewer bytes.
_LATENCY = 1000
# Keys of the manifest of plan.json.
_HASHES = ("model", "plan", "cluster", "operators", "weights", "sources", "code", "data")
_VERSIONS = ("superscaler", "torch", "python")


def read(directory: Path) -> dict[str, Any]:
    """Return explain.json with manifest and seed. Raises InputError for a damaged or edited directory."""
    plan = read_plan(directory)
    plan.check()
    found, kept = plan.json(EXPLAIN_FILE, Account), plan.head["manifest"]
    return {"manifest": {key: kept[key] for key in (*_HASHES, *_VERSIONS)}, "seed": plan.head["seed"], **found}


def words(found: Mapping[str, Any]) -> str:
    """Return a plan in words: splits, weights and communication by block; the order; the totals of a step."""
    model = found["model"]
    copies = f" on float32 copies of {model['precision']} weights" if model.get("precision") else ""
    lines = [
        f"{model['ops']} forward ops, {model['parameters']:,} parameters ({size(model['parameter_bytes'])}), "
        f"{model['optimizer']}{copies}, on {found['world']} devices of {found['cluster']}"
    ]
    for block in objects(Block, found["blocks"]):
        lines += ["", _title(block), *(f"  {line}" for line in _block(block))]
    lines += ["", "order", *(f"  {line}" for line in _schedule(found))]
    lines += ["", "in total per step", *(f"  {line}" for line in _totals(found))]
    return "\n".join(lines)


def heading(names: Sequence[str]) -> str:
    """Return names with runs of numbers joined.

    >>> heading(["h.0", "h.1", "h.2", "h.5", "ln_f"])
    'h.0 to h.2, h.5, ln_f'
    """
    runs: list[list[str]] = []
    for name in names:
        runs.append([*runs.pop(), name] if runs and _follows(runs[-1][-1], name) else [name])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _follows(before: str, name: str) -> bool:
    a, b = _NUMBER.match(before), _NUMBER.match(name)
    return a is not None and b is not None and a[1] == b[1] and int(a[2]) + 1 == int(b[2])


def _block(block: Block) -> Iterator[str]:
    yield from _held(block)
    for (direction, kind, groups, reason), rows in _communication(block, "reason").items():
        yield f"{direction}: {kind} over {groups}, {_links(rows)}: {reason}"
        what = "gradients" if direction == "backward" else "values"
        for layouts in dict.fromkeys(row.layouts for row in rows):
            tensors = ", ".join(f"{row.tensor} {_weight(row)}" for row in rows if row.layouts == layouts)
            yield f"  {layouts}: {what} of {tensors}"
    local = [(row.direction, row.reason) for row in block.moves if row.way == "local"]
    yield from (f"{direction}, nothing to send: {reason}" for direction, reason in local)


def _held(block: Block) -> Iterator[str]:
    """Yield lines of text: how the ops of a block are cut and on which devices, and where its weights rest."""
    for devices, rows in group_by(block.splits, lambda row: row.devices).items():
        if len(rows) == 1:
            yield f"{_on(devices)}: {axes_text(rows[0].axes, 'whole')}: {_ops(rows[0])}"
            continue
        # Axes that all rows have in common are printed once.
        levels = takewhile(lambda axes: len(set(axes)) == 1, zip(*(row.axes for row in rows), strict=False))
        shared = len(list(levels))
        yield f"{_on(devices)}: {axes_text(rows[0].axes[:shared], 'cut in several ways')}"
        yield from (f"  {axes_text(row.axes[shared:], 'not cut further')}: {_ops(row)}" for row in rows)
    if block.again:
        yield f"{block.again} op{'s' * (block.again > 1)} recomputed in the backward"
    if block.split:
        yield f"backward of {block.split} op{'s' * (block.split > 1)} split into I and W"
    if block.unsplit:
        kinds = "gradients of activations only, or of weights only"
        yield f"backward of {block.unsplit} op{'s' * (block.unsplit > 1)} not split, as it gives {kinds}"
    yield from map(_weights, block.weights)


def axes_text(axes: Sequence[Axis], none: str = "whole") -> str:
    """Return the cuts of ops in words."""
    return ", ".join(map(_axis, axes)) or none


def _groups(groups: Groups) -> str:
    return _first(groups.words())


def _first(groups: Sequence[str]) -> str:
    return " | ".join(groups if len(groups) <= 4 else (*groups[:2], "...", groups[-1]))


def _communication(block: Block, *more: str) -> dict[tuple[str, ...], list[Sent]]:
    """Return the communication of a block by direction, kind, groups, and the columns `more`."""
    rows = (row for row in block.moves if row.way != "local")
    return group_by(rows, lambda row: (row.direction, row.kind, _groups(row.groups), *(getattr(row, m) for m in more)))


def _links(rows: Sequence[Sent]) -> str:
    seconds, bound = (sum(getattr(row, what) for row in rows) for what in ("seconds", "bound"))
    return f"{size(sum(row.moved for row in rows))} on links, about {duration(seconds)}{_beside(seconds, bound)}"


def _beside(seconds: float, bound: float) -> str:
    """Return in words the seconds of a communication beside those at full bandwidth, or that all of it is latency.

    >>> _beside(0.003, 0.001), _beside(0.0003, 1.33e-9), _beside(0.0, 0.0)
    (' (3.00 x 1 ms at full bandwidth)', ' (all of it latency)', '')
    """
    if not bound:
        return ""
    if seconds > _LATENCY * bound:
        return " (all of it latency)"
    return f" ({seconds / bound:.{0 if seconds > 10 * bound else 2}f} x {duration(bound)} at full bandwidth)"


def _title(block: Block) -> str:
    """Return a heading of equal blocks: their names, and the bytes on links of one block and of all."""
    moved, count = bytes_moved(block), len(block.names)
    each = f" each, {size(moved * count)} together" if count > 1 else ""
    return heading(block.names) + (f": {size(moved)} on links{each}" if moved else ": nothing on links")


def bytes_moved(block: Block) -> int:
    return sum(row.moved for row in block.moves)


def _axis(axis: Axis) -> str:
    if axis.how == "nested":
        return f"{axis.parts} of these cut further ({' / '.join(map(axes_text, axis.axes))})"
    what = {"value": f"the value into {axis.parts} addends", "copies": f"{axis.parts} copies"}
    sizes = " of sizes " + ", ".join(map(str, axis.sizes)) if axis.sizes else ""
    if axis.how == "microbatches":
        what["microbatches"] = f"{axis.parts} microbatches" + (f" of {axis.factor}" if axis.factor else "")
    text = what.get(axis.how) or f"{axis.factor} into {axis.parts}{sizes}"
    return text + (f" ({_groups(axis.devices)})" if axis.devices else "")


def _ops(row: Split) -> str:
    return f"{row.ops} op{'s' if row.ops > 1 else ''}: {some(row.of)}"


def _on(places: Places) -> str:
    devices = str(places)
    return f"device {devices}" if devices.isdigit() else f"devices {devices}"


def _weights(row: Weights) -> str:
    kind = row.kind if row.is_trained or row.kind != "parameter" else "frozen parameter"
    names = f"{len(row.of)} {kind}{'s' if len(row.of) > 1 else ''} ({some(row.of, 3)})"
    pieces = f"in {row.pieces} pieces" if row.pieces > 1 else "whole"
    places = row.devices.words()
    if row.percent:
        places = tuple(f"{percent}% on {devices}" for percent, devices in zip(row.percent, places, strict=True))
    return (
        f"{names} of {size(row.bytes)} {pieces}{':' if row.percent else ' on'} {_first(places)}; "
        f"all devices hold {size(row.held_bytes)}"
    )


def _weight(row: Sent) -> str:
    return f"{row.count} x {size(row.bytes // row.count)}" if row.count > 1 else size(row.bytes)


def _schedule(found: Mapping[str, Any]) -> Iterator[str]:
    usual = "forward" if found["model"]["optimizer"] == "inference" else "forward, backward, update"
    for row in objects(Order, found["schedule"]):
        yield f"{_on(row.devices)} ({heading(row.blocks) or 'nothing'}): {row.order or usual}"
    for row in found.get("relaxations", ()):
        yield f"because of a cycle, {row['name']}: {some(row['ops'])}"


def _totals(found: Mapping[str, Any]) -> Iterator[str]:
    for row in found["totals"]:
        if row["way"] == "local":
            yield f"{row['direction']}: {row['count']} transfers within a device"
        else:
            weight = f"{size(row['bytes'])}, {size(row['moved'])} on links"
            yield f"{row['direction']}: {row['count']} {row['kind']} of {weight}"
    yield f"{found['bytes_moved']:,} bytes on links"


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the differences between two plans, a line each; nothing if they are equal.

    Versions of torch and superscaler are listed only beside other differences: they do not make plans differ.
    """
    lines = [*_heads(a, b), *_blocks(a, b), *_changes("op_order", a["orders"], b["orders"])]
    lines += _changes("order", list(_schedule(a)), list(_schedule(b)))
    lines += _changes("in total per step", list(_totals(a)), list(_totals(b)))
    differs = any(lines)
    if a["manifest"]["plan"] != b["manifest"]["plan"] and not differs:
        lines.append("plan: the same words, but other parts, devices or orders in them")
    if a["manifest"].get("code") != b["manifest"].get("code") and not lines:
        lines.append("code: equal plans, but other emitted code")
    versions = [v for v in _VERSIONS if a["manifest"][v] != b["manifest"][v]]
    return lines + [f"{v}: {a['manifest'][v]} -> {b['manifest'][v]}" for v in versions if lines]


def _heads(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield differences of the whole plans: model, cluster, seed."""
    if a["manifest"]["model"] != b["manifest"]["model"]:
        first, second = (_numbers(x["model"]) for x in (a, b))
        keys = [k for k in {**first, **second} if first.get(k) != second.get(k)]
        changes = [f"{k} {first.get(k, 'none')} -> {second.get(k, 'none')}" for k in keys]
        yield "model: " + (", ".join(changes) or "another graph of the same size")
    elif a["manifest"]["weights"] != b["manifest"]["weights"]:
        yield "weights: the same model with other initial values"
    for key in ("cluster", "seed"):
        if a[key] != b[key]:
            yield f"{key}: {a[key]} -> {b[key]}"
    if a["manifest"]["operators"] != b["manifest"]["operators"]:
        yield "operators: other files of the user's register them"
    if a["cluster"] == b["cluster"] and a["manifest"]["cluster"] != b["manifest"]["cluster"]:
        yield "cluster: the same name, but other devices"


def _numbers(model: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of a model and its optimizer, by name."""
    found = {k.replace("_", " "): f"{v:,}" if isinstance(v, int) else v for k, v in model.items() if k != "options"}
    options = ((n, k, v) for n, group in enumerate(model["options"]) for k, v in group.items())
    return found | {k + (f" of group {n}" if n else ""): json.dumps(v) for n, k, v in options}


def _blocks(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield the blocks that differ, those with equal differences together."""
    sides = [{name: block for block in objects(Block, x["blocks"]) for name in block.names} for x in (a, b)]
    changes = {n: tuple(_block_changes(*(side.get(n) for side in sides))) for n in (*sides[0], *sides[1])}
    yield from (
        "\n".join([heading(names), *lines]) for lines, names in group_by(changes, changes.__getitem__).items() if lines
    )


def _block_changes(a: Block | None, b: Block | None) -> Iterator[str]:
    if a is None or b is None:
        yield f"  only in the {'second' if a is None else 'first'} plan"
        return
    yield from _lines(*([f"{what}, {n} times" for what, n in block.asked.items()] for block in (a, b)))
    yield from _lines(_held(a), _held(b))
    yield from _lines(_sent(a), _sent(b))
    moved = [bytes_moved(block) for block in (a, b)]
    if moved[0] != moved[1]:
        yield f"  on links: {moved[0]:,} -> {moved[1]:,} bytes"


def _sent(block: Block) -> Iterator[str]:
    for (direction, kind, groups), rows in _communication(block).items():
        yield f"{direction}: {kind} of {len(rows)} tensor{'s' if len(rows) > 1 else ''} over {groups}, {_links(rows)}"


def _lines(a: Iterable[str], b: Iterable[str]) -> Iterator[str]:
    """Yield the lines that only one of two lists has."""
    first, second = list(a), list(b)
    yield from (f"  - {line}" for line in first if line not in second)
    yield from (f"  + {line}" for line in second if line not in first)


def _changes(title: str, a: Sequence[str], b: Sequence[str]) -> Iterator[str]:
    lines = list(_lines(a, b)) or (["  the same lines in another order"] if a != b else [])
    if lines:
        yield "\n".join([title, *lines])
