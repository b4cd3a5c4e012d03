"""HTML and SVG from Python: elements whose text and attributes are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, *inner: object, **attributes: object) -> Markup:
    """Return an element. What is no `Markup` inside is escaped; `class_` stands for class, `a_b` for a-b.

    >>> tag("p", "a < b", tag("b", 3), class_="quiet")
    '<p class="quiet">a &lt; b<b>3</b></p>'
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    given = "".join(f' {key}="{escape(str(value))}"' for key, value in pairs)
    return Markup(f"<{name}{given}>{''.join(map(_text, inner))}</{name}>")


def _text(part: object) -> str:
    return part if isinstance(part, Markup) else escape(str(part))


def table(names: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1, title: str = "") -> Markup:
    """Return a table, whose columns after the first `left` ones, at most 4, have numbers."""
    head = (tag("th", name, scope="col") for name in names)
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    caption = [tag("caption", title)] if title else []
    return tag("table", *caption, tag("thead", tag("tr", *head)), tag("tbody", *body), class_=f"left{left}")
