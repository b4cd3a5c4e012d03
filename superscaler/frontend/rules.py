"""A call -> its indices: by its operator's rule, by what a user registered, or by what torch says of it."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from superscaler.errors import CaptureError
from superscaler.frontend.trace import argument, dtype_of, outputs, reads, shape_of, target_of
from superscaler.ops.call import Site
from superscaler.ops.notation import Signature, frozen, misfit, resolve
from superscaler.ops.row import elementwise
from superscaler.ops.table import row_of
from superscaler.specs.registered import REGISTERED, Registered


def signature(node: Node) -> tuple[Signature, bool]:
    """Return the indices of a call, and whether its operator has a rule.

    Raises CaptureError where the notation that a user registered does not fit the call.
    """
    site, operator = _site(node), node.target
    if site.target in REGISTERED:
        return _registered(node, site, REGISTERED[site.target]), True
    rule = row_of(site.target).notation or (elementwise if torch.Tag.pointwise in operator.tags else None)  # type: ignore[union-attr]
    written = rule(site) if callable(rule) else rule
    notation, sizes = (written, {}) if isinstance(written, str) or written is None else written
    found = resolve(notation, site.ins, site.outs, sizes) if notation is not None else None
    return found or frozen(site.ins, site.outs), rule is not None


def _site(node: Node) -> Site:
    ins = reads(node)
    masks = frozenset(k for k, x in enumerate(ins) if dtype_of(x) == torch.bool)
    shapes = tuple(map(shape_of, ins)), tuple(map(shape_of, outputs(node)))
    return Site(target_of(node), node.args, node.kwargs, *shapes, masks)


def _registered(node: Node, site: Site, rule: Registered) -> Signature:
    given = _given(node)
    found = resolve(rule.notation, site.ins, site.outs, rule.sizes, broadcasts=False, given=given)
    if found is None:
        left, right = rule.notation.split("->")
        kept = ",".join(text for k, text in enumerate(left.split(",")) if k in given)
        raise CaptureError(
            f"{node.meta['source'] or rule.place} calls {site.target}, whose notation is '{rule.notation}' "
            f"({rule.place}), and it does not fit: {misfit(f'{kept}->{right}', site.ins, site.outs)}. "
            "Mend the notation or the call; a dim that broadcasts is expanded before the call."
        )
    return found


def _given(node: Node) -> list[int]:
    """Return which of an operator's tensor operands a call has: optional ones may be None."""
    found: list[int] = []
    number = 0
    for position, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if "Tensor" in str(parameter.type):
            count = sum(isinstance(x, Node) for x in tree_leaves(argument(node, position, parameter.name)))
            found += range(number, number + count)
            number += max(count, 1)
    return found
