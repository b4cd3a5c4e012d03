"""Inference of indices: unify them along every edge of the graph, then read off each op's indices and slots."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from superscaler.errors import CaptureError, InputError
from superscaler.frontend.base.trace import Trace, argument, dtype_of, outputs, reads, shape_of, target_of
from superscaler.ir.op import Mark
from superscaler.ops.call import Site
from superscaler.ops.notation import Dim, Signature, frozen, misfit, resolve
from superscaler.ops.row import elementwise
from superscaler.ops.spans import Span, leaves, unify
from superscaler.ops.table import row_of
from superscaler.specs.registered import REGISTERED, Registered

Slots = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Indexed:
    """A call with its indices: the class and mark of each, the index that bounds its end, if any; slots as in `ir`."""

    call: Node
    classes: tuple[Span, ...]
    marks: tuple[Mark, ...]
    until: tuple[int | None, ...]
    inputs: tuple[Slots, ...]
    outputs: tuple[Slots, ...]


@dataclass(slots=True)
class Inference:
    """The dims of every tensor as spans, the indexed calls, and the count of each operator without a rule."""

    dims: dict[Node, list[list[Span]]] = field(default_factory=dict)
    calls: list[Indexed] = field(default_factory=list)
    unsupported: Counter[str] = field(default_factory=Counter)

    def classes(self, tensor: Node) -> list[list[Span]]:
        """Return, for each dim of a tensor, the classes of its slots."""
        return [leaves(dim) for dim in self.dims[tensor]]


def infer(trace: Trace) -> Inference:
    """Return the indices of all calls of a trace. A misfit is frozen at its operand, and only there."""
    found = Inference()
    for leaf in trace.leaves():
        found.dims[leaf] = [[Span(size)] if size > 1 else [] for size in shape_of(leaf)]
    instances = [_instantiate(found, call) for call in trace.calls()]
    for buffer, new in trace.written():
        for have, want in zip(found.dims[buffer], found.dims[new], strict=True):
            unify(have, want)
    found.calls = [_read_off(found, *instance) for instance in instances]
    return found


def _instantiate(found: Inference, call: Node) -> tuple[Node, Signature, dict[str, Span]]:
    """Give a call fresh indices, and unify them with those of its operands."""
    rule, is_known = signature(call)
    if not is_known:
        found.unsupported[target_of(call)] += 1
    spans = {letter: Span(rule.sizes[letter]) for letter in rule.marks}
    for letter, other in rule.until.items():
        unify([spans[letter]], [spans[other]])
    for tensor, dims in zip(reads(call), rule.inputs, strict=True):
        for have, want in zip(found.dims[tensor], dims, strict=True):
            if want is not None:
                unify(have, [spans[letter] for letter in want])
    for tensor, dims in zip(outputs(call), rule.outputs, strict=True):
        found.dims[tensor] = [[spans[letter] for letter in dim or ()] for dim in dims]
    return call, rule, spans


def _read_off(found: Inference, call: Node, rule: Signature, spans: dict[str, Span]) -> Indexed:
    """Expand each index into its classes; if an operand's slots and its indices disagree, freeze both."""
    classes: list[Span] = []
    marks: list[Mark] = []
    numbers: dict[str, range] = {}
    misfits: set[int] = set()
    for letter, mark in rule.marks.items():
        own = leaves([spans[letter]])
        numbers[letter] = range(len(classes), len(classes) + len(own))
        classes += own
        marks += [mark] * len(own)

    def slots(tensor: Node, dims: Sequence[Dim]) -> Slots:
        result: list[int | None] = []
        for have, want in zip(found.classes(tensor), dims, strict=True):
            indices = [] if want is None else [i for letter in want for i in numbers[letter]]
            matched, left = _match(have, indices, classes)
            result += matched
            misfits.update(left)
            for i in left:
                marks[i] = "frozen"
        return tuple(result)

    read = tuple(map(slots, reads(call), rule.inputs))
    made = tuple(map(slots, outputs(call), rule.outputs))
    # In an index of several classes this one is the major one.
    pairs = {numbers[letter][0]: numbers[other][0] for letter, other in rule.until.items()}
    until = tuple(None if misfits & {i, pairs.get(i)} else pairs.get(i) for i in range(len(classes)))
    return Indexed(call, tuple(classes), tuple(marks), until, read, made)


def _match(have: list[Span], indices: list[int], classes: list[Span]) -> tuple[list[int | None], list[int]]:
    """Return the index of each slot of a dim, matched from both ends, and the indices that match no slot."""
    result: list[int | None] = [None] * len(have)
    first, last = 0, 0
    while first < min(len(have), len(indices)) and have[first] is classes[indices[first]]:
        result[first] = indices[first]
        first += 1
    while last < min(len(have), len(indices)) - first and have[-1 - last] is classes[indices[-1 - last]]:
        result[-1 - last] = indices[-1 - last]
        last += 1
    return result, indices[first : len(indices) - last]


def signature(node: Node) -> tuple[Signature, bool]:
    """Return the indices of a call, and whether it has a rule. Raises CaptureError if a user's notation misfits."""
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
    _check_call(node, rule, found.sizes)
    return found


def _check_call(node: Node, rule: Registered, sizes: Mapping[str, int]) -> None:
    """Raise CaptureError if the notation is wrong for the plain values, or the sizes, of a call."""
    parameters = enumerate(node.target._schema.arguments)  # type: ignore[union-attr]
    plain = [(k, p.name) for k, p in parameters if "Tensor" not in str(p.type)]
    missing = object()
    found = {name: argument(node, k, name, missing) for k, name in plain}
    values = {name: value for name, value in found.items() if value is not missing}
    key = repr((sorted(values.items()), sorted(sizes.items())))
    if rule.check is None or key in rule.checked:
        return
    # The check calls the operator, too.
    rule.checked.add(key)
    try:
        rule.check(values, {letter: size for letter, size in sizes.items() if letter != "1"})
    except InputError as error:
        rule.checked.remove(key)
        where, how = node.meta["source"] or rule.place, f"{values or 'other sizes'}"
        raise CaptureError(f"{where} calls it with {how}: {error}") from error


def _given(node: Node) -> list[int]:
    """Return the numbers of the operator's tensor operands that a call has; optional ones may be None."""
    found: list[int] = []
    number = 0
    for position, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if "Tensor" in str(parameter.type):
            count = sum(isinstance(x, Node) for x in tree_leaves(argument(node, position, parameter.name)))
            found += range(number, number + count)
            number += max(count, 1)
    return found
