"""The operators that users registered in this process, and where."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any


@dataclass(frozen=True, slots=True)
class Registered:
    """The notation that a user gave an operator, the sizes of letters that stand in products only, and where it is.

    `module` is empty for a file that is run but not imported by name, `file` for code that was typed in; `source`: the
    bytes of the file when the operator was registered. `code` is that of a function. `check` tries the operator with
    other values of plain arguments, and with the sizes of a call; `checked` are the calls for which it was.
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
