"""The journal of a graph: calls of verbs, and the lines of the plan that made them."""

import sys
from dataclasses import dataclass

from superscaler.specs.arguments import checked

# The modules between a verb and the line of the plan that calls it.
_OWN = (__name__, "superscaler.ir.graph", checked.__module__, "superscaler.ordering", "superscaler.verbs")


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the journal: the call of a verb, the op, and the place of the call in the user's code."""

    verb: str
    op: str
    detail: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.verb} {self.op} {self.detail}"


def caller() -> str:
    """Return file:line of the first frame outside of this module and the verbs: the line of the plan."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _OWN:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
