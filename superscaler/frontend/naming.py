"""Names of factors: batch, sequence, hidden, heads, mlp, vocabulary; else the place of their first occurrence.

A name is the path of the module that holds all weights with the factor, and the role of the factor: h.0.attn.heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile

from torch.fx import Node

from superscaler.frontend.base.trace import Trace, dtype_of, op_name, outputs, reads, shape_of, target_of
from superscaler.frontend.base.training import depends
from superscaler.frontend.infer import Inference
from superscaler.ir.model import TensorKind
from superscaler.ops.spans import Span
from superscaler.ops.table import row_of

Words = list[str]
_BATCH = "batch"
_HEADS = ("heads", "kv_heads", "groups")
# Names of factors that belong to the whole model, not to a module.
_GLOBAL = ("vocabulary", "classes")


def name_factors(trace: Trace, found: Inference) -> dict[int, str]:
    """Return a name for the `id` of every class that a tensor or an op holds: unique, but for `batch`.

    Inputs that no operator ties together (two towers) have a batch each; those of one size are one factor.
    """
    names: dict[int, str] = {}
    taken: dict[str, int] = {}
    for span, name in _candidates(trace, found):
        if id(span) in names:
            continue
        unique, n = name, 1
        while unique in taken and (unique, taken[unique]) != (_BATCH, span.size):
            n += 1
            unique = f"{name}.{n}"
        taken[unique] = span.size
        names[id(span)] = unique
    return names


def _candidates(trace: Trace, found: Inference) -> Iterator[tuple[Span, str]]:
    yield from _inputs(trace, found)
    weights = _Weights(trace, found)
    for span, role in _roles(trace, found, weights):
        yield span, weights.name(span, role)
    kinds: tuple[TensorKind, ...] = ("parameter", "buffer", "constant")
    for kind in kinds:
        for leaf in trace.leaves(kind):
            yield from _dims(found, leaf, ".".join(weights.short(_words(leaf.name))))
    for indexed in found.calls:
        for result in outputs(indexed.call):
            yield from _dims(found, result, result.name)
        for number, span in enumerate(indexed.classes):
            yield span, f"{op_name(indexed.call)}.index.{number}"


def _inputs(trace: Trace, found: Inference) -> Iterator[tuple[Span, str]]:
    """Yield the batch (the first dim of all inputs) and the sequence (the second of the first input with token ids).

    Rows that are taken apart, as two views of each sample in `z.chunk(2)`, are several factors. The batch is the one on
    which most ops can be cut, so that the views of a sample stay together.
    """
    inputs = [leaf for leaf in trace.leaves("input") if shape_of(leaf)]
    cuts = Counter(
        id(span)
        for indexed in found.calls
        for span, mark in zip(indexed.classes, indexed.marks, strict=True)
        if mark != "frozen"
    )
    for leaf in inputs:
        rows = sorted(found.classes(leaf)[0], key=lambda span: -cuts[id(span)])
        yield from ((span, _BATCH) for span in rows)
    tokens = [leaf for leaf in inputs if len(shape_of(leaf)) == 2 and not dtype_of(leaf).is_floating_point]
    yield from ((span, "sequence") for leaf in tokens[:1] for span in found.classes(leaf)[1])
    for leaf in inputs:
        yield from _dims(found, leaf, leaf.name)


def _dims(found: Inference, tensor: Node, stem: str) -> Iterator[tuple[Span, str]]:
    for d, dim in enumerate(found.classes(tensor)):
        for k, span in enumerate(dim):
            yield span, f"{stem}.{d}.{k}" if len(dim) > 1 else f"{stem}.{d}"


def _roles(trace: Trace, found: Inference, weights: _Weights) -> Iterator[tuple[Span, str]]:
    """Yield the roles of factors: by the operators that read them, then by their weights."""
    from_inputs = depends(trace, "input")
    heads: set[int] = set()
    for indexed in found.calls:
        for span, role in _read_by(indexed.call, found, from_inputs):
            if id(span) in weights.holders:
                heads |= {id(span)} if role in _HEADS else set()
                yield span, role
    for dim in weights.dims:
        at = [k for k, span in enumerate(dim) if id(span) in heads]
        yield from ((span, "packed" if k < at[0] else "head_dim") for k, span in enumerate(dim) if at and k not in at)
    of_weights = depends(trace, "parameter") - from_inputs
    products = [indexed for indexed in found.calls if of_weights.intersection(reads(indexed.call))]
    summed = {id(s) for i in products for s, mark in zip(i.classes, i.marks, strict=True) if mark == "summed"}
    once = {id(span): span for dim in weights.dims for span in dim if id(span) in summed}
    yield from ((span, role) for span in once.values() if (role := weights.role(span)))


def _read_by(call: Node, found: Inference, from_inputs: set[Node]) -> Iterator[tuple[Span, str]]:
    operands = reads(call)
    for number, dim, role in row_of(target_of(call)).roles:
        dims = found.classes(operands[number])
        if role == "heads" and len(dims) < 4:
            continue
        if role == "vocabulary" and operands[1] not in from_inputs:
            role = "rows"
        for spans in dims[dim:][:1]:
            # Heads that share keys and values are a product of indices.
            is_shared = role == "heads" and len(operands) > 1 and len(spans) > 1
            yield from ((s, ("groups" if k else "kv_heads") if is_shared else role) for k, s in enumerate(spans))


class _Weights:
    """The parameters that hold each class, and the common prefix of all blocks' paths."""

    def __init__(self, trace: Trace, found: Inference) -> None:
        self.dims: list[list[Span]] = []
        self.holders: dict[int, list[Words]] = {}
        self.matrices: dict[int, list[Words]] = {}
        for leaf in trace.leaves("parameter"):
            dims = found.classes(leaf)
            self.dims += dims
            for span in (s for dim in dims for s in dim):
                self.holders.setdefault(id(span), []).append(_words(leaf.name))
                if len(dims) > 1:
                    self.matrices.setdefault(id(span), []).append(_words(leaf.name))
        paths = [words for rows in self.holders.values() for words in rows]
        self.root = _common(words[: k - 1] for words in paths if (k := _first_number(words)))

    def short(self, words: Words) -> Words:
        """Return a path without the common prefix of all blocks."""
        root = len(self.root)
        return words[root:] if words[:root] == self.root and len(words) > root else words

    def name(self, span: Span, role: str) -> str:
        if role in _GLOBAL:
            return role
        holders = self.holders[id(span)]
        parent = _common(holders)
        if all(len(words) > len(parent) and words[len(parent)].isdigit() for words in holders):
            parent = parent[:-1]
        path = self.short(parent) if len(parent) > len(self.root) else []
        return ".".join(path if path[-1:] == [role] else [*path, role])

    def role(self, span: Span) -> str:
        """Return the role of a factor of two or more matrices: mlp inside one block, hidden across them."""
        matrices = self.matrices.get(id(span), [])
        blocks = {tuple(words[: _last_number(words) + 1]) for words in matrices}
        return "" if len(matrices) < 2 else "mlp" if len(blocks) == 1 and blocks != {()} else "hidden"


def _words(parameter: str) -> Words:
    """Return the path of a parameter's module, or of the parameter if it is no weight or bias itself.

    >>> _words("transformer.h.0.attn.c_attn.weight")
    ['transformer', 'h', '0', 'attn', 'c_attn']
    """
    words = parameter.split(".")
    return words[:-1] if len(words) > 1 and words[-1] in ("weight", "bias") else words


def _first_number(words: Words) -> int:
    return next((k for k, word in enumerate(words) if word.isdigit()), 0)


def _last_number(words: Words) -> int:
    """Return the position of the last number in a path, or -1."""
    return max((k for k, word in enumerate(words) if word.isdigit()), default=-1)


def _common(paths: Iterable[Words]) -> Words:
    """Return the longest path that all of them start with."""
    first, *rest = list(paths) or [[]]
    same = (all(other[k : k + 1] == [word] for other in rest) for k, word in enumerate(first))
    return first[: sum(takewhile(bool, same))]
