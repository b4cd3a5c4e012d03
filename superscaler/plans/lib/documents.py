"""Chunks of a sequence on devices, by the scores of attention inside documents (MagiAttention, 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from superscaler.specs.sizes import read_lengths
from superscaler.verbs import Graph, InputError, Op

# Chunks of a device that are tried, and the largest share of a device beside the mean with which no more are.
_CHUNKS, _EVEN = (1, 2, 4, 8), 1.05
# Operators from the numbers of documents back to positions, and those that keep numbers.
_COUNTING, _KEEPING = ("cumsum", "ne", "diff"), ("view", "unsqueeze", "expand", "_to_copy")


def ring(
    graph: Graph, attentions: Sequence[Op], n: int, zigzag: bool | str, documents: str, chunks: int
) -> tuple[int, ...]:
    """Return the device of each chunk of the sequence: one for each of n devices; with `zigzag` the first and the last
    of those left; with `zigzag=documents` as many as even the scores inside `documents`, by default those of the
    captured batch, or `chunks`.
    """
    if zigzag not in (True, False, "documents"):
        raise InputError(f"ring_attention:zigzag={zigzag}: choose true, false or documents.")
    if zigzag != "documents" and (documents or chunks):
        raise InputError(
            "ring_attention: documents=, the lengths of the documents of a row, and chunks= go with zigzag=documents; "
            "write ring_attention:zigzag=documents,documents=1024+512+512."
        )
    if zigzag == "documents":
        return _even(graph, attentions, n, documents, chunks)
    return (*range(n), *reversed(range(n))) if zigzag else tuple(range(n))


def _even(graph: Graph, attentions: Sequence[Op], n: int, documents: str, chunks: int) -> tuple[int, ...]:
    """Return the device of each chunk, of n devices with `chunks` each; 0: as few as make it even."""
    op = attentions[0]
    if any(o.target != "ss.attention_documents" for o in attentions):
        raise InputError(
            "ring_attention:zigzag=documents needs attention inside documents, but this model has none; capture it "
            "with position_ids that begin again in each document, and without attention_mask and cache."
        )
    size = graph.model.tensors[op.inputs[0].tensor].shape[-2]
    given = [read_lengths("documents of ring_attention", documents)] if documents else _captured(graph, op)
    tried = [c for c in ((chunks,) if chunks else _CHUNKS) if size % (c * n) == 0]
    if not tried:
        raise InputError(
            f"ring_attention:zigzag=documents over {n} devices cuts {size} tokens into {chunks or 1} chunks for "
            f"each, but {n * (chunks or 1)} does not divide {size}; choose other chunks=, or a number of devices."
        )
    is_causal = bool(op.args[5])
    sums = [list(map(sum, zip(*(areas(row, size, c * n, is_causal) for row in given), strict=True))) for c in tried]
    made = [(found, balanced(found, n)) for found in sums]
    shares = [share(*pair, n) for pair in made]
    best = next((k for k, found in enumerate(shares) if found <= _EVEN), shares.index(min(shares)))
    return made[best][1]


def _captured(graph: Graph, attention: Op) -> list[list[int]]:
    """Return the lengths of the documents of each row of the captured batch."""
    name, steps, grows = attention.inputs[3].tensor, list[str](), 0
    while name in graph.model.producers:
        maker, _ = graph.model.producers[name]
        word = maker.target.split(".")[1]
        steps += [word] * (word in _COUNTING)
        grows = int(maker.args[1]) if word == "ne" else grows
        name = maker.inputs[0].tensor if word in (*_COUNTING, *_KEEPING) else ""
    rows = getattr(graph.captured, "batch", {}).get(name)
    if rows is None or rows.is_meta or rows.dim() != 2 or steps not in ([], [*_COUNTING]):
        raise InputError(
            "ring_attention:zigzag=documents does not know the documents of a row: the captured batch has none, or no "
            "data; write their lengths, as zigzag=documents,documents=1024+512+512."
        )
    # A document begins where positions do not grow by one, or where its number is another.
    begun = ([n for n, (a, b) in enumerate(pairwise(row), 1) if b != a + grows] for row in rows.tolist())
    return [[b - a for a, b in pairwise((0, *starts, rows.shape[1]))] for starts in begun]


def areas(lengths: Sequence[int], size: int, chunks: int, is_causal: bool) -> list[int]:
    """Return the scores of each chunk of the queries of a row of documents. A longer row repeats them.

    >>> areas([4, 2], 8, 4, True), areas([4, 2], 8, 4, False)
    ([3, 7, 3, 3], [8, 8, 4, 4])
    """
    ends, found, each = [0], [0] * chunks, size // chunks
    while ends[-1] < size:
        ends.append(min(size, ends[-1] + lengths[(len(ends) - 1) % len(lengths)]))
    for first, end in pairwise(ends):
        for n in range(first // each, -(-end // each)):
            low, high = max(first, n * each) - first, min(end, (n + 1) * each) - first
            found[n] += (high * (high + 1) - low * (low + 1)) // 2 if is_causal else (high - low) * (end - first)
    return found


def balanced(found: Sequence[int], n: int) -> tuple[int, ...]:
    """Return a device for each chunk, as many for each: the largest first, on the device with the least; then chunks
    are exchanged while that makes the device with the most smaller.

    >>> balanced([3, 7, 1, 1], 2)
    (1, 0, 1, 0)
    """
    places, room = [0] * len(found), [len(found) // n] * n
    sums = [0] * n
    for chunk in sorted(range(len(found)), key=lambda c: -found[c]):
        place = min((d for d in range(n) if room[d]), key=lambda d: sums[d])
        places[chunk] = place
        sums[place] += found[chunk]
        room[place] -= 1
    while pair := _exchange(found, places, sums):
        moved, (most, other) = found[pair[0]] - found[pair[1]], (places[c] for c in pair)
        sums[most] -= moved
        sums[other] += moved
        places[pair[0]], places[pair[1]] = other, most
    return tuple(places)


def _exchange(found: Sequence[int], places: Sequence[int], sums: Sequence[int]) -> tuple[int, int] | None:
    """Return the chunk of the device with the most, and one of another, whose exchange evens both best."""
    most = max(range(len(sums)), key=lambda d: sums[d])
    pairs = {
        (a, b): (found[a] - found[b], sums[most] - sums[places[b]])
        for a, place in enumerate(places)
        for b, other in enumerate(places)
        if place == most != other and 0 < found[a] - found[b] < sums[most] - sums[other]
    }
    return min(pairs, key=lambda pair: abs(pairs[pair][1] - 2 * pairs[pair][0]), default=None)


def share(found: Sequence[int], places: Sequence[int], n: int) -> float:
    """Return the scores of the device with the most, beside the mean."""
    sums = [sum(area for area, place in zip(found, places, strict=True) if place == d) for d in range(n)]
    return max(sums) * n / sum(sums)
