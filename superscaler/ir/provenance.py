"""Provenance of communication: the reason of each transfer, and its path."""

from dataclasses import dataclass, field

from superscaler.ir.layout import Layout

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PathStep:
    """A step of a path: it makes `layout`, puts `moved` bytes on links, and was predicted to take `seconds`."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    layout: Layout
    moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Path:
    """The path of `count` tensors (or gradients) of `sizes` per slot from one layout to another, in several steps."""

    is_backward: bool
    sizes: Shape
    dtype: str
    source: Layout
    steps: tuple[PathStep, ...]
    tensors: tuple[str, ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Provenance:
    """The reason for the way of a tensor, or of its gradient (`is_backward`), and its path if that has several steps.

    `number` orders the starts of communication on all devices.
    """

    tensor: str
    is_backward: bool
    reason: str
    path: Path | None = None
    number: int = field(default=0, compare=False)
