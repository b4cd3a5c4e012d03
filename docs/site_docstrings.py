"""An extension of griffe, with which mkdocstrings reads docstrings: code and columns in them become code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

_CODE = re.compile(r"^(>>> |@|def |    |- \||\S+ {2,}\S)", re.MULTILINE)


def fenced(text: str) -> str:
    """Return a docstring as Markdown."""
    found = []
    for paragraph in text.split("\n\n"):
        language = "pycon" if paragraph.startswith(">>> ") else "text"
        found.append(f"```{language}\n{paragraph}\n```" if _CODE.search(paragraph) else paragraph)
    return "\n\n".join(found)


class CodeBlocks(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
