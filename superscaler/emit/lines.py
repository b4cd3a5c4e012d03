"""Lines of emitted code: at most 120 characters, broken inside of brackets."""

import re
from collections.abc import Iterator, Sequence

WIDTH = 120
_MARKS = re.compile(r"[\"'()\[\]{} ]")


def deleted(names: Sequence[str]) -> str:
    """Return the statement that ends names."""
    ended = ", ".join(names)
    return f"del ({ended})" if len(ended) > WIDTH - 20 else f"del {ended}"


def wrapped(line: str) -> str:
    """Return a line, over several lines if it is too long.

    >>> print(wrapped("    f(" + ", ".join(f"argument_{n}" for n in range(10)) + ")"))
        f(argument_0, argument_1, argument_2, argument_3, argument_4, argument_5, argument_6, argument_7, argument_8,
            argument_9)
    """
    if len(line) <= WIDTH:
        return line
    outer = line[: len(line) - len(line.lstrip())]
    indent, found = outer + "    ", [""]
    for part in _parts(line):
        if found[-1] and len(found[-1]) + len(part.rstrip()) > WIDTH:
            found[-1] = found[-1].rstrip()
            found.append(indent)
        found[-1] += part
    target, equals, value = line.partition(" = ")
    if equals and max(map(len, found)) > WIDTH:
        return f"{wrapped(target)} = (\n{wrapped(indent + value)}\n{outer})"
    return "\n".join(found)


def _parts(line: str) -> Iterator[str]:
    """Yield the parts of a line, each up to a bracket that opens, or a space inside of brackets; not in strings or in
    the place of a list.
    """
    depth, places, quote, start = 0, 0, "", 0
    for found in _MARKS.finditer(line):
        letter = found[0]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
            places += (letter == "[") - (letter == "]")
            if letter in " (" and depth and not places:
                yield line[start : found.end()]
                start = found.end()
    yield line[start:]
