"""How long the steps of a transfer take by the formulas of a cluster: by this one way of doing it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

from superscaler.ir.mask import extents
from superscaler.materialize.buckets import KINDS
from superscaler.materialize.context import Context
from superscaler.materialize.rvd.route import priced
from superscaler.materialize.steps import Collective, Cut, Join, Lowered, Message, Step

# How much longer than the cheapest one a form may take that is preferred to it.
NEARLY = 1.01
Groups = dict[tuple[int, ...], int]


def cheapest(forms: Sequence[Lowered], context: Context, itemsize: int) -> Lowered:
    """Return the form of a transfer that takes the least seconds; of those that take nearly as long, the last."""
    prices = [seconds(form, context, itemsize) for form in forms] if len(forms) > 1 else [0.0]
    return [form for form, price in zip(forms, prices, strict=True) if price <= min(prices) * NEARLY][-1]


def seconds(lowered: Lowered, context: Context, itemsize: int) -> float:
    """Return the seconds of all rounds, one after the other; what is of one kind in a round goes at once. Collectives
    that share buckets share latencies, which are left out.
    """
    costs, total = priced(context.costs), 0.0
    everything = [step for steps in lowered.rounds for step in steps if not isinstance(step, Cut | Join)]
    is_shared = all(isinstance(step, Collective) and step.how.kind in KINDS for step in everything)
    for steps in lowered.rounds:
        for kind, groups in _started(steps, context).items():
            each = partial(costs.seconds, kind, list(groups))
            total += each(max(groups.values()) * itemsize) - (each(0) if is_shared else 0.0)
    return total


def _started(steps: tuple[Step, ...], context: Context) -> dict[str, Groups]:
    """Return per kind the groups, on all devices of a fold, each with the elements of its largest source."""
    found: dict[str, Groups] = {}
    for step in steps:
        if isinstance(step, Collective):
            kind, group, boxes = step.how.kind, step.how.group, [source.box for source in step.sources]
        elif isinstance(step, Message):
            kind, group, boxes = "messages", (step.source.device, step.out.device), [step.out.box]
        else:
            continue
        everywhere = [group] if context.fold is None else context.fold.everywhere(group)
        found.setdefault(kind, {}).update(dict.fromkeys(everywhere, max(prod(extents(box)) for box in boxes)))
    return found
