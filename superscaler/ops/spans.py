"""Union-find with splitting: the index along a dim, refined until both sides of every edge agree.

A `Span` is an index before its factors are known. Its leaves, major to minor, are its factors: when 384 meets (3, 4,
32), it becomes three leaves in all tensors that carry it.
"""

from collections.abc import Iterable


class Span:
    """An index of `size` > 1 that may be found equal to another span, or to an ordered product of spans."""

    __slots__ = ("parent", "parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parent: Span | None = None
        self.parts: tuple[Span, ...] = ()


def root(span: Span) -> Span:
    """Return the representative of a span's class."""
    top = span
    while top.parent is not None:
        top = top.parent
    while span.parent is not None:
        span.parent, span = top, span.parent
    return top


def leaves(spans: Iterable[Span]) -> list[Span]:
    """Return the classes that a product of spans consists of now, major to minor."""
    found: list[Span] = []
    for span in spans:
        top = root(span)
        found += leaves(top.parts) if top.parts else [top]
    return found


def unify(first: Iterable[Span], second: Iterable[Span]) -> bool:
    """Make two products over the same elements equal, from both ends; return whether nothing is left in between.

    Equal sizes become one class, and a larger size that is divisible splits. A part that does not fit stays unchanged.
    """
    a, b = leaves(first), leaves(second)
    for end in (-1, 0):
        while a and b and _match(a, b, end):
            pass
    return not a and not b


def _match(a: list[Span], b: list[Span], end: int) -> bool:
    """Take one class off this end of both lists, or return False and leave both."""
    x, y = _expand(a, end), _expand(b, end)
    if x.size < y.size:
        a, b, x, y = b, a, y, x
    if x.size % y.size:
        return False
    if x.size == y.size:
        a.pop(end)
        b.pop(end)
        if x is not y:
            y.parent = x
        return True
    rest = Span(x.size // y.size)
    x.parts = (rest, y) if end else (y, rest)
    return True


def _expand(spans: list[Span], end: int) -> Span:
    """Return the class at this end of the list, after splits made since the list was written."""
    found = leaves([spans[end]])
    at = len(spans) - 1 if end else 0
    spans[at : at + 1] = found
    return spans[end]
