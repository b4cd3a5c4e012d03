"""What emitted code gives to a collective after its group, by kind."""

from collections.abc import Callable
from typing import Any

from superscaler.ir import program as p
from superscaler.ir.program import CollectiveArg, Shape


def ways(i: p.Collective) -> tuple[tuple[Shape, int, Shape], ...]:
    """Return, for each tensor of a bucket: its shape in slots, the gathered or scattered slot, the sizes of chunks."""
    return tuple((way.view, way.take if way.take >= 0 else way.give, way.sizes) for way in i.ways)


# What a collective of one tensor is given after its group: by position, and by name.
Given = tuple[tuple[Any, ...], dict[str, Any]]
FLAT = ("all_reduce", "broadcast", "reduce")
GIVEN: dict[str, Callable[[p.Collective, CollectiveArg], Given]] = {
    "all_reduce": lambda i, way: ((), {"largest": True} if i.largest else {}),
    "reduce": lambda i, way: ((i.root,), {}),
    "rd_gather": lambda i, way: ((i.root, way.take), {}),
    "all_gather": lambda i, way: ((way.take, *_sizes(way)), {"rounded": i.dtype} if i.given else {}),
    "reduce_scatter": lambda i, way: ((way.give, *_sizes(way)), {}),
    "all_to_all": lambda i, way: ((way.give, way.take), {}),
    "broadcast": lambda i, way: ((way.shape, i.dtype), {}),
}


def _sizes(way: CollectiveArg) -> tuple[Shape, ...]:
    return (way.sizes,) if way.sizes else ()


def bucket(i: p.Collective) -> Given:
    """Return the arguments of a collective of several tensors after its group, but for its ways."""
    flags = {"largest": i.largest, "wire": i.dtype if i.wide else "", "rounded": i.dtype if i.given else ""}
    return (i.root,) * (i.root >= 0), {name: value for name, value in flags.items() if value}
