"""Tables of items by a key, in the order of the first item of each key."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by their key.

    >>> group_by(["as", "is", "one"], len)
    {2: ['as', 'is'], 3: ['one']}
    """
    return collect((key(item), item) for item in items)


def collect(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return the second elements of pairs by their first.

    >>> collect([("w", 1), ("b", 2), ("w", 3)])
    {'w': [1, 3], 'b': [2]}
    """
    found: dict[K, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
