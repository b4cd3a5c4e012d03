"""The algorithms of `op_trans`: what each makes of one part, as one more axis of its grid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import pairwise
from numbers import Integral, Real
from typing import Protocol, runtime_checkable

from superscaler.errors import TransformError, divisors, unknown
from superscaler.ir.graph import Op, is_named
from superscaler.ir.parts import Axis, Mirror
from superscaler.transform.losses import Decompose


@runtime_checkable
class Algorithm(Protocol):
    """What `op_trans` applies: a name for the journal, and the axis that it adds to a part with `sizes` (per index)."""

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis: ...


class _Told:
    """Reads as it was written, without what is as by default."""

    __slots__ = ()

    def __str__(self) -> str:
        given = [(f, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        told = (repr(v) if f.default is MISSING else f"{f.name}={v!r}" for f, v in given if v != f.default)
        return f"{type(self).__name__}({', '.join(told)})"


# Parts of one op: more than any cluster has devices and any step has microbatches.
MOST_PARTS = 2**24


@dataclass(frozen=True, slots=True)
class Replicate(_Told):
    """Make `parts` equal copies. `mirror` says whether their backward ops `copy` (each reads the whole gradient) or
    `route` (each reads what its own readers send); the default is route for ops that depend on weights only.
    `axis` names the axis of a mesh along which `op_assign` places them.
    """

    parts: int
    mirror: Mirror | None = None
    axis: str = field(default="", repr=False)

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        check_parts(self.parts, op)
        if self.mirror not in (None, "copy", "route"):
            raise TransformError(f"Replicate of {op.name}: {unknown('mirror', str(self.mirror), ['copy', 'route'])}")
        if self.mirror and not op.is_forward:
            raise TransformError(
                f"Replicate of {op.name}: an update has no backward; leave mirror={self.mirror!r} out."
            )
        mirror = self.mirror or ("route" if op.from_weights else "copy")
        return Axis(None, (1,) * self.parts, mirror, name=self.axis)


@dataclass(frozen=True, slots=True)
class Split(_Told):
    """Cut one index of a factor into `parts` equal parts, or into parts of the given `sizes`.

    Of several factors, the first that the op has and that `parts` divides. `h.*.mlp` is any factor that fits (that of
    each block); `sequence@1` the second of `op.indices` with that factor, `hidden@summed` the first that is summed;
    without either it is the first of the op's output.

    An op without the factor, or that cannot be cut on it, is replicated instead; with `required` it is an error. A
    scalar op that is linear in a sum over the factor (a scaled loss) splits that value. `axis` names the axis of a mesh
    along which `op_assign` places the parts, in order, or each at the place that `at` has for it.
    """

    factor: str | tuple[str, ...]
    parts: int = 0
    sizes: tuple[int, ...] = ()
    required: bool = False
    axis: str = field(default="", repr=False)
    at: tuple[int, ...] = field(default=(), repr=False)

    @property
    def factors(self) -> tuple[str, ...]:
        return (self.factor,) if isinstance(self.factor, str) else tuple(self.factor)

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        count = self.parts or len(self.sizes)
        check_parts(count, op)
        if self.sizes and count != len(self.sizes):
            raise TransformError(
                f"{self._told} of {op.name} asks for {count} parts, but gives {len(self.sizes)} sizes; "
                "give the number of parts, or the sizes."
            )
        found = [index for factor in self.factors if (index := op.find(factor)) is not None]
        if found:
            index = next((i for i in found if sizes[i] % count == 0), found[0])
            return Axis(index, self._sizes(op, sizes[index], op.indices[index].factor), name=self.axis, at=self.at)
        passed = (group for factor in self.factors for f, group in op.passes if is_named(f, factor))
        if (value := next(passed, None)) is not None:
            return Axis(None, (1,) * count, value=value, name=self.axis, at=self.at)
        if self.required:
            why = why_whole(op, self.factors)
            raise TransformError(f"{self._told} is required, but {op.name} ({op.target}) {why}.")
        return Replicate(count, axis=self.axis).cut(op, sizes)

    @property
    def _told(self) -> str:
        return f"Split({self.factor!r}{f', {self.parts}' if self.parts else ''})"

    def _sizes(self, op: Op, extent: int, factor: str) -> tuple[int, ...]:
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
            raise TransformError(
                f"{self._told} does not divide: {where} has {extent} elements of {factor} there, and {extent} % "
                f"{self.parts} = {extent % self.parts}. Choose {divisors(extent)}, or give sizes=(...)."
            )
        return (extent // self.parts,) * self.parts


@dataclass(frozen=True, slots=True)
class Shard(_Told):
    """Cut the largest index that `parts` divides, or else the largest one unevenly; what is smaller is replicated.

    Shard(4) of [768, 3]: 4 x [192, 3]    of [10, 3]: [2, 3] [3, 3] [2, 3] [3, 3]    of [3]: 4 copies
    """

    parts: int
    axis: str = field(default="", repr=False)

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        check_parts(self.parts, op)
        free = [(size % self.parts == 0, size, -at) for at, size in enumerate(sizes) if op.indices[at].mark != "frozen"]
        _, size, at = max(free, default=(False, 0, 0))
        if size < self.parts:
            return Replicate(self.parts, axis=self.axis).cut(op, sizes)
        bounds = [k * size // self.parts for k in range(self.parts + 1)]
        return Axis(-at, tuple(hi - lo for lo, hi in pairwise(bounds)), name=self.axis)


@dataclass(frozen=True, slots=True)
class ValueSplit(_Told):
    """Make `parts` parts whose results add up: each reads some addends of input `operand` (and of what is added to it).

    y = a x1 + a x2  ->  y1 = a x1; y2 = a x2.  For ops that are linear in that input, whose value comes in parts.
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
        return Axis(None, (1,) * self.parts, value=group, name=self.axis)


@dataclass(frozen=True, slots=True)
class Microbatch(_Told):
    """Split the batch into `parts` microbatches, and mark the parts with their number.

    Of microbatches it makes smaller ones: `Microbatch(2, "sequence")` of microbatch 1 makes microbatches 2 and 3. Of
    several factors it is the first that `Split` would take.

    An update runs once: it keeps its parts, but its gradient is reduced in each microbatch, not their sum at the end.
    """

    parts: int
    factor: str | tuple[str, ...] = "batch"

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        axis = Split(self.factor, self.parts).cut(op, sizes)
        return replace(axis, is_microbatch=True)


@dataclass(frozen=True, slots=True)
class Stage(_Told):
    """Leave parts whole, at place `number` (from 0) along an axis of a mesh: one stage of a pipeline."""

    number: int
    axis: str

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        if not isinstance(self.number, Integral) or self.number < 0:
            raise TransformError(f"{op.name} cannot be at stage {self.number!r} of {self.axis}; give 0, 1, 2, ...")
        return Axis(None, (1,), name=self.axis, at=(int(self.number),))


def why_whole(op: Op, factors: Iterable[str]) -> str:
    """Return why no index of an op can be cut on any of these factors."""
    names = [factor.partition("@")[0] for factor in factors]
    held = [i.factor for i in op.indices if any(is_named(i.factor, name) for name in names)]
    if any(Decompose.has_steps(op, factor) for factor in held):
        return "needs that factor whole; op_trans it with ss.Decompose() before, for steps that can be cut"
    return "cannot be cut on that factor (no rule allows it)" if held else "has no such factor"


def check_parts(parts: int, op: Op) -> None:
    if not isinstance(parts, Integral) or parts < 1:
        raise TransformError(
            f"{op.name} cannot be made into {parts!r} parts; the number of parts must be an integer of at least 1."
        )
    if parts > MOST_PARTS:
        raise TransformError(f"{op.name} cannot be made into {parts} parts; choose at most {MOST_PARTS}.")
