"""What emitted code gives to a collective after its group, by the names of the communicator's parameters.

Emission writes these arguments by position. Here each is compared by the meaning of its parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from inspect import Signature, signature
from typing import Any

from superscaler.comm.communicator import Communicator
from superscaler.ir import program as p
from superscaler.ir.program import CollectiveArg, Shape
from superscaler.translation.values import Differs


def ways(i: p.Collective) -> tuple[tuple[Shape, int, Shape], ...]:
    """Return, for each tensor of a bucket: its shape in slots, the gathered or scattered slot, the sizes of chunks."""
    return tuple((way.view, _slot(way), way.sizes) for way in i.ways)


def has_slots(way: CollectiveArg) -> bool:
    """Return whether a slot is gathered or scattered, so that the source is given in slots."""
    return _slot(way) >= 0


def _slot(way: CollectiveArg) -> int:
    return way.gather_slot if way.gather_slot >= 0 else way.scatter_slot


# The value that a parameter must have; others must have their defaults.
_MEANINGS: Mapping[str, Callable[[p.Collective, CollectiveArg], Any]] = {
    "root": lambda i, way: i.root,
    "dim": lambda i, way: _slot(way),
    "split_dim": lambda i, way: way.scatter_slot,
    "concat_dim": lambda i, way: way.gather_slot,
    "sizes": lambda i, way: way.sizes,
    "shape": lambda i, way: way.shape,
    "dtype": lambda i, way: i.dtype,
    "largest": lambda i, way: i.largest,
    "rounded": lambda i, way: i.dtype if i.given else "",
}


def given(kind: str, more: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of one tensor after its group, by name. Raises Differs if it cannot have them.

    >>> given("all_to_all", (1, 0), {})
    {'split_dim': 1, 'concat_dim': 0}
    """
    try:
        return _bound(kind, tuple(more), tuple(options.items()))
    except TypeError as error:
        raise Differs(f"the arguments of rt.{kind} are {(*more, options)}: {error}") from None


# Loops call with equal arguments.
@lru_cache(1 << 10)
def _bound(kind: str, more: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    bound = _after_group(kind).bind(*more, **dict(options))
    bound.apply_defaults()
    return bound.arguments


def wanted(i: p.Collective) -> dict[str, Any]:
    """Return the arguments that a collective of one tensor needs after its group, by name."""
    some = _after_group(i.kind).parameters.items()
    return {name: _MEANINGS[name](i, i.ways[0]) if name in _MEANINGS else of.default for name, of in some}


@cache
def _after_group(kind: str) -> Signature:
    some = [*signature(getattr(Communicator, kind)).parameters.values()]
    first = next(n for n, parameter in enumerate(some) if parameter.name == "group") + 1
    return Signature(some[first:])


def bucket(i: p.Collective) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a collective of several tensors after its group, but for its ways."""
    flags = {"largest": i.largest, "wire": i.dtype if i.wide else "", "rounded": i.dtype if i.given else ""}
    return (i.root,) * (i.root >= 0), {name: value for name, value in flags.items() if value}
