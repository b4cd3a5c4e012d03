"""Operators that users registered in this process, with the places where they did."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any


@dataclass(frozen=True, slots=True)
class Registered:
    """A user's operator: its notation, the `sizes` of letters that occur in products only, the place of its definition.

    `module` is empty for a file that is run but not imported by name, `file` for code that was typed in; `source`: the
    bytes of the file when the operator was registered. `code`: that of a function. `check` tries the operator with
    other values of plain arguments, and with the sizes of a call; `checked`: the calls that it has tried.
    """

    notation: str
    sizes: Mapping[str, int]
    module: str
    file: str
    line: int
    source: bytes = field(repr=False)
    code: CodeType | None = None
    check: Callable[[Mapping[str, Any], Mapping[str, int]], None] | None = field(default=None, repr=False)
    checked: set[str] = field(default_factory=set, repr=False, compare=False)

    @property
    def place(self) -> str:
        return f"{self.file or self.module or 'line'}:{self.line}"


# By the target of calls; superscaler.register fills it. Torch keeps its operators per process too.
REGISTERED: dict[str, Registered] = {}
