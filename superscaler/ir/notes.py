"""What a program tells about its communication: why it goes the way it goes, and along which path."""

from __future__ import annotations

from dataclasses import dataclass, field

from superscaler.ir.layout import Layout

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PathStep:
    """A step of a path: it makes `layout`, puts `moved` bytes on links, and was taken to last `seconds`."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    layout: Layout
    moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Path:
    """How `count` tensors of `sizes` per slot, or their gradients, went from a layout to another in several steps."""

    is_backward: bool
    sizes: Shape
    dtype: str
    source: Layout
    steps: tuple[PathStep, ...]
    tensors: tuple[str, ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """Why a tensor, or its gradient (`is_backward`), goes the way it goes, and the path if that has several steps.
    `number` orders what starts on all devices.
    """

    tensor: str
    is_backward: bool
    reason: str
    path: Path | None = None
    number: int = field(default=0, compare=False)
