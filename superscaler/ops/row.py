"""Rows of operators, the facts that torch does not state: `row("mm", "m k+, k n -> m n", ...)`."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from superscaler.ir.mask import Box, extents
from superscaler.ir.model import Op, PTensor
from superscaler.ir.op import Ref
from superscaler.ops.call import Local, Site, ranges
from superscaler.ops.notation import Shape

T = TypeVar("T")
Groups = tuple[tuple[int, ...], ...]
Sized = tuple[str, Mapping[str, int]]
Recipe = Callable[[Site], str | Sized | None]
Drawn = tuple[Box, Shape, Shape]
Dims = Sequence[tuple[int, int]]
Places = Callable[[Op, Mapping[str, PTensor]], Dims]


def plain(x: Local) -> str:
    return f"torch.ops.{x.op.target}({x.arguments})"


@dataclass(frozen=True, slots=True)
class Row:
    """The facts of an operator. A default states that nothing special holds.

    notation  the index of each dim (see notation.py), or a recipe: a call -> its notation, with the sizes of letters
              that occur in products only, or None if no index can be cut. Without one, torch's tag decides:
              pointwise, or frozen.
    text      an op on one part -> its source, with the sizes in arguments adapted to the part
    linear    an op -> the sets of inputs in which it is linear (not affine), as `Op.linear` has them
    placed    the dims on which the result depends on the start of a part, not only on its size: the op gets its range
              there as data (`Local.part`); dims of operands, and of results behind them
    random    an op on one part -> its random numbers: box, sizes of the whole, shape
    rate      the position of the argument that is the rate of a dropout
    flops     an op, shapes of operands, shapes of results -> floating-point operations of the forward
    roles     (operand, dim, role): names for the factors of a dim, see frontend/naming.py
    biased    the source of the op and the addition of a bias in one call, of operands 0, 1 and the bias
    is_view   the results lie in the memory of the first operand if no copy is needed; all others in their own
    stops     no gradient passes
    """

    notation: str | Recipe | None = None
    text: Callable[[Local], str] = plain
    linear: Callable[[Op], Groups] = lambda op: ()
    placed: Places = lambda op, tensors: ()
    random: Callable[[Op, Box, Mapping[str, PTensor]], Drawn] | None = None
    rate: int | None = None
    flops: Callable[[Op, Sequence[Shape], Sequence[Shape]], int] = lambda op, ins, outs: 0
    roles: tuple[tuple[int, int, str], ...] = ()
    biased: str = ""
    is_view: bool = False
    stops: bool = False


def row(names: str, notation: str | Recipe | None = None, **facts: Any) -> dict[str, Row]:
    """Return the row of each of these operators; see `aten`."""
    return aten(Row(notation, **facts), names)


def aten(value: T, names: str) -> dict[str, T]:
    """Return a table with this value for each operator: torch's, `.default` without an overload, or `ss.` ones."""
    words = names.split()
    return {w if w.startswith("ss.") else f"aten.{w}{'' if '.' in w else '.default'}": value for w in words}


def whole(names: Sequence[str], dims: Iterable[int]) -> str:
    """Return the dims of an operand, with `dims` read whole or made whole."""
    chosen = set(dims)
    return " ".join("_" if d in chosen else name for d, name in enumerate(names))


def marked(names: Sequence[str], dims: Collection[int], mark: str) -> str:
    return " ".join(name + mark * (d in dims) for d, name in enumerate(names))


def elementwise(site: Site) -> str:
    return site.alike("d..")


def along(position: int, name: str = "dim", default: Any = None) -> Recipe:
    """Return the recipe of operators that need some dims whole, and the dims whose size differs between operands."""

    def recipe(site: Site) -> str | None:
        names = site.letters
        if any(len(shape) != len(names) for shape in (*site.ins, *site.outs)):
            return None
        uneven = [d for d, sizes in enumerate(zip(*site.ins, *site.outs, strict=True)) if len(set(sizes)) > 1]
        return site.alike(whole(names, [*site.dims(position, name, default), *uneven]))

    return recipe


def on(number: int, dim: int) -> Places:
    return lambda op, tensors: ((number, dim),)


def call(function: str) -> Callable[[Local], str]:
    return lambda x: f"{function}({x.arguments})"


def method(name: str) -> Callable[[Local], str]:
    return lambda x: f"{x.names[0]}.{name}({', '.join(x.literal(a) for a in x.op.args[1:])})"


def sizes(shape: Shape) -> str:
    return ", ".join(map(str, shape)) if shape else "()"


def to_shape(name: str) -> Callable[[Local], str]:
    """Return the text of a method that takes the shape of its result."""
    return lambda x: f"{x.names[0]}.{name}({sizes(x.results[0])})"


def first(op: Op) -> Groups:
    """Return the first operand as the only linear one."""
    return ((0,),) if op.args and op.args[0] == Ref(0) else ()


def each(op: Op) -> Groups:
    """Return every operand as linear, one at a time."""
    return tuple((k,) for k in range(len(op.inputs)))


def together(terms: int) -> Callable[[Op], Groups]:
    """Return all operands as linear together; a number but zero among the first `terms` arguments makes the op affine.

    Losses are often added up from zero on.
    """
    return lambda op: (
        (tuple(range(len(op.inputs))),) * all(isinstance(a, Ref | tuple) or a == 0 for a in op.args[:terms])
    )


def of_result(op: Op, box: Box, tensors: Mapping[str, PTensor]) -> Drawn:
    """Draw a random number for each element of the result."""
    tensor = tensors[op.outputs[0].tensor]
    slots = ranges(op.outputs[0], tensor, box)
    return slots, tensor.extents, tensor.local_shape(extents(slots))
