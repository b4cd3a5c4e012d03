"""The algorithms that cut ops into parts. `op_trans` applies them by `cut`."""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import pairwise
from math import prod
from numbers import Integral, Real
from typing import Protocol, runtime_checkable

from superscaler.errors import TransformError, divisors, unknown
from superscaler.ir.grid import Axis, Mirror
from superscaler.ir.model import Op
from superscaler.ir.op import Index, is_named
from superscaler.specs.arguments import checked_class
from superscaler.transform.losses import Decompose


@runtime_checkable
class Algorithm(Protocol):
    """An algorithm of `op_trans` that cuts parts. `cut` returns the axis that it adds to a part; `sizes` are those of
    the part, in elements, for each of `op.indices`. It raises TransformError if it does not apply.
    """

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis: ...


class ShortRepr:
    """A mixin: the text of an object is its constructor call, without default arguments."""

    __slots__ = ()

    def __str__(self) -> str:
        given = [(f, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        options = (repr(v) if f.default is MISSING else f"{f.name}={v!r}" for f, v in given if v != f.default)
        return f"{type(self).__name__}({', '.join(options)})"


# The most parts of one op: more than any cluster has devices or any step microbatches.
MOST_PARTS = 2**24


@checked_class
@dataclass(frozen=True, slots=True)
class Replicate(ShortRepr):
    """Make `parts` equal copies.

    `mirror`: the backward ops `copy` (each reads the whole gradient) or `route` (each reads the gradients of its own
    readers); the default is route for ops that depend on weights only. `axis`: the mesh axis along which `op_assign`
    places the copies, in order or at the places `at`.
    """

    parts: int
    mirror: Mirror | None = None
    axis: str = field(default="", repr=False)
    at: Sequence[int] = field(default=(), repr=False)

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        check_parts(self.parts, op)
        if self.mirror not in (None, "copy", "route"):
            raise TransformError(f"Replicate of {op.name}: {unknown('mirror', str(self.mirror), ['copy', 'route'])}")
        if self.mirror and not op.is_forward:
            raise TransformError(
                f"Replicate of {op.name}: an update has no backward; leave mirror={self.mirror!r} out."
            )
        mirror = self.mirror or ("route" if op.from_weights else "copy")
        return Axis(None, (1,) * self.parts, mirror, name=self.axis, at=tuple(self.at))


@checked_class
@dataclass(frozen=True, slots=True)
class Split(ShortRepr):
    """Cut one index of a factor into `parts` equal parts, or into parts of the given `sizes`.

    Of several factors, the first one is cut that the op has and `parts` divides. `h.*.mlp` is any factor that fits
    (that of each block); `sequence@1` the second of `op.indices` with that factor, `hidden@summed` the first summed
    one; the default is the first of the op's output.

    An op without the factor, or with an uncuttable one, is replicated; with `required` this is an error. A scalar op
    that is linear in a sum over the factor (a scaled loss) splits that value. `axis`: the mesh axis along which
    `op_assign` places the parts, in order or at the places `at`.
    """

    factor: str | Sequence[str]
    parts: int = 0
    sizes: Sequence[int] = ()
    required: bool = False
    axis: str = field(default="", repr=False)
    at: Sequence[int] = field(default=(), repr=False)

    @property
    def factors(self) -> tuple[str, ...]:
        return (self.factor,) if isinstance(self.factor, str) else tuple(self.factor)

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        count = self.parts or len(self.sizes)
        check_parts(count, op)
        if self.sizes and count != len(self.sizes):
            raise TransformError(
                f"{self._call} of {op.name} asks for {count} parts, but gives {len(self.sizes)} sizes; "
                "give the number of parts, or the sizes."
            )
        index = self.index_of(op, sizes)
        if index is not None:
            own = self._sizes(op, sizes[index], op.indices[index])
            return Axis(index, own, name=self.axis, at=tuple(self.at))
        passed = (group for factor in self.factors for f, group in op.passes if is_named(f, factor))
        if (value := next(passed, None)) is not None:
            return Axis(None, (1,) * count, partial_inputs=value, name=self.axis, at=tuple(self.at))
        if self.required:
            why = why_whole(op, self.factors)
            raise TransformError(f"{self._call} is required, but {op.name} ({op.target}) {why}.")
        return Replicate(count, axis=self.axis).cut(op, sizes)

    def index_of(self, op: Op, sizes: tuple[int, ...]) -> int | None:
        """Return the index of an op to cut, one that the number of parts divides if there is one."""
        count = self.parts or len(self.sizes)
        found = [index for factor in self.factors if (index := op.find(factor)) is not None]
        return next((i for i in found if sizes[i] % count == 0), next(iter(found), None))

    @property
    def _call(self) -> str:
        return f"Split({self.factor!r}{f', {self.parts}' if self.parts else ''})"

    def _sizes(self, op: Op, extent: int, index: Index) -> tuple[int, ...]:
        where = f"{op.name} ({op.module or op.target})"
        if self.sizes:
            whole = all(isinstance(size, Integral) and size >= 1 for size in self.sizes)
            if not whole or sum(self.sizes) != extent:
                covers = sum(self.sizes) if all(isinstance(size, Real) for size in self.sizes) else "no"
                raise TransformError(
                    f"Split({self.factor!r}, sizes={self.sizes}) covers {covers} elements, but {where} has "
                    f"{extent} there; every size must be an integer of at least 1 and their sum {extent}."
                )
            return tuple(int(size) for size in self.sizes)
        if extent % self.parts:
            count = extent if extent == index.size else f"{extent} of {index.size}"
            raise TransformError(
                f"{self._call} does not divide: {where} has {count} elements of {index.factor} there, and "
                f"{self.parts} does not divide {extent}. Choose {divisors(extent)} parts, give sizes=(...), or "
                f"change the size of {index.factor} in the model or its inputs."
            )
        return (extent // self.parts,) * self.parts


# Of a tensor with fewer elements, an index that the parts do not divide is cut into parts of so many at least: uneven
# ones make each device run a program of its own, which costs more than copies of a bias.
_SMALL, _EVEN = 1 << 16, 8


@checked_class
@dataclass(frozen=True, slots=True)
class Shard(ShortRepr):
    """Cut the largest index that `parts` divides, or else the largest one unevenly. Smaller tensors are replicated, and
    so are small ones with parts of 1 or 2, 2 or 3, .. 7 or 8 of that index: a bias of 128 channels over 48 devices.

    Shard(4) of [768, 3]: 4 x [192, 3]    of [34, 3]: [8, 3], [9, 3], [8, 3], [9, 3]    of [10, 3]: 4 copies
    """

    parts: int
    axis: str = field(default="", repr=False)

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        check_parts(self.parts, op)
        free = [(size % self.parts == 0, size, -at) for at, size in enumerate(sizes) if op.indices[at].mark != "frozen"]
        _, size, at = max(free, default=(False, 0, 0))
        is_rough = size % self.parts > 0 and size < _EVEN * self.parts and prod(sizes) < _SMALL
        if size < self.parts or is_rough:
            return Replicate(self.parts, axis=self.axis).cut(op, sizes)
        bounds = [k * size // self.parts for k in range(self.parts + 1)]
        return Axis(-at, tuple(hi - lo for lo, hi in pairwise(bounds)), name=self.axis)


@checked_class
@dataclass(frozen=True, slots=True)
class ValueSplit(ShortRepr):
    """Make `parts` parts whose results add up: each reads some addends of input `operand` (and of tensors added to it).

    y = a x1 + a x2  ->  y1 = a x1; y2 = a x2.  For ops that are linear in an input with a value in parts.
    """

    parts: int
    operand: int = 0
    axis: str = field(default="", repr=False)

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        check_parts(self.parts, op)
        group = next((g for g in op.linear if self.operand in g), None)
        if group is None:
            raise TransformError(
                f"ValueSplit({self.parts}, operand={self.operand}): {op.name} ({op.target}) is not linear in that "
                f"input; it is in {', '.join(map(str, op.linear)) or 'none'}."
            )
        return Axis(None, (1,) * self.parts, partial_inputs=group, name=self.axis)


@checked_class
@dataclass(frozen=True, slots=True)
class Microbatch(ShortRepr):
    """Split the batch into `parts` microbatches, and number the parts.

    Microbatch(4) of a batch of 8: 2 2 2 2    of 10: 3 3 2 2

    Microbatches can be split further: `Microbatch(2, "sequence")` of microbatch 1 makes microbatches 2 and 3. Of
    several factors, the same one is cut as by `Split`. An update runs once: it keeps its parts, but its gradient is
    reduced in each microbatch, not once at the end.
    """

    parts: int
    factor: str | Sequence[str] = "batch"

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        check_parts(self.parts, op)
        split = Split(self.factor, self.parts)
        at = split.index_of(op, sizes)
        if at is not None:
            if sizes[at] < self.parts:
                factor, of = op.indices[at].factor, "" if self.factor == "batch" else f", {self.factor!r}"
                raise TransformError(
                    f"Microbatch({self.parts}{of}) makes more parts than {op.name} ({op.module or op.target}) has "
                    f"elements of {factor} there: {sizes[at]}. Choose 1 to {sizes[at]} parts, or make {factor} larger "
                    "in the model or its inputs."
                )
            own = tuple(-(-(sizes[at] - k) // self.parts) for k in range(self.parts))
            split = replace(split, sizes=own)
        return replace(split.cut(op, sizes), is_microbatch=True)


@checked_class
@dataclass(frozen=True, slots=True)
class Stage(ShortRepr):
    """Leave parts whole, at place `number` (from 0) along an axis of a mesh: one stage of a pipeline.

    Stage(1, axis="pp"), placed on mesh(pp=2, dp=2): the part is on devices 2 and 3
    """

    number: int
    axis: str

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        if self.number < 0:
            raise TransformError(f"{op.name} cannot be at stage {self.number!r} of {self.axis}; give 0, 1, 2, ...")
        return Axis(None, (1,), name=self.axis, at=(int(self.number),))


def why_whole(op: Op, factors: Iterable[str]) -> str:
    """Return the reason why no index of an op can be cut on any of these factors."""
    names = [factor.partition("@")[0] for factor in factors]
    held = [i.factor for i in op.indices if any(is_named(i.factor, name) for name in names)]
    if any(Decompose.has_steps(op, factor) for factor in held):
        return "needs that factor whole; op_trans it with ss.Decompose() first, for steps that can be cut"
    return "cannot be cut on that factor (no rule allows it)" if held else "has no such factor"


def check_parts(parts: int, op: Op) -> None:
    if not isinstance(parts, Integral) or parts < 1:
        raise TransformError(
            f"{op.name} cannot be made into {parts!r} parts; the number of parts must be an integer of at least 1."
        )
    if parts > MOST_PARTS:
        raise TransformError(f"{op.name} cannot be made into {parts} parts; choose at most {MOST_PARTS}.")
