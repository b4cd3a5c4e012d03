"""The operators that users registered in this process, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType


@dataclass(frozen=True, slots=True)
class Registered:
    """The notation that a user gave an operator, the sizes of letters that stand in products only, and where it is.

    `module` is empty for a file that is run but not imported by name, `file` for what was typed in; `source` is what
    the file held when the operator was registered. `code` is that of a function.
    """

    notation: str
    sizes: Mapping[str, int]
    module: str
    file: str
    line: int
    source: bytes = field(repr=False)
    code: CodeType | None = None

    @property
    def place(self) -> str:
        return f"{self.file or self.module or 'line'}:{self.line}"


# Filled by superscaler.register, by the target of calls; torch keeps its operators per process too.
REGISTERED: dict[str, Registered] = {}
