"""Readable names of factors: from the inputs, else from the first weight in which they occur, else from an op."""

from __future__ import annotations

from collections.abc import Iterator

from superscaler.frontend.infer import Inference
from superscaler.frontend.spans import Span
from superscaler.frontend.trace import Trace


def name_factors(trace: Trace, found: Inference) -> dict[int, str]:
    """Return a unique name for the `id` of every class that a tensor or an op holds."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for span, name in _candidates(trace, found):
        if id(span) in names:
            continue
        unique, n = name, 1
        while unique in taken:
            n += 1
            unique = f"{name}.{n}"
        taken.add(unique)
        names[id(span)] = unique
    return names


def _candidates(trace: Trace, found: Inference) -> Iterator[tuple[Span, str]]:
    inputs = [name for name, kind in trace.kinds.items() if kind == "input" and trace.specs[name].shape]
    for name in inputs:
        yield from ((span, "batch") for span in found.classes(name)[0])
    for name in inputs:
        yield from _dims(found, name, name)
    for kind in ("parameter", "buffer", "constant"):
        for name in (n for n, k in trace.kinds.items() if k == kind):
            yield from _dims(found, name, _short(name))
    for indexed in found.calls:
        for name in indexed.call.outputs:
            yield from _dims(found, name, name)
        for number, span in enumerate(indexed.classes):
            yield span, f"{indexed.call.name}.index.{number}"


def _dims(found: Inference, tensor: str, stem: str) -> Iterator[tuple[Span, str]]:
    for d, dim in enumerate(found.classes(tensor)):
        for k, span in enumerate(dim):
            yield span, f"{stem}.{d}.{k}" if len(dim) > 1 else f"{stem}.{d}"


def _short(name: str) -> str:
    """Return a parameter's path from its block on, without `.weight`.

    >>> _short("transformer.h.0.attn.c_attn.weight")
    'h.0.attn.c_attn'
    """
    words = name.removesuffix(".weight").split(".")
    at = next((k for k, word in enumerate(words) if word.isdigit()), None)
    return ".".join(words[max(at - 1, 0) :] if at is not None else words[-2:])
