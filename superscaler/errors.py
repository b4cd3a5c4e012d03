"""The errors of each phase. A message names the thing, the numbers, the place, and the remedy."""

import difflib
from collections.abc import Iterable, Sequence
from math import isqrt


class PlanError(Exception):
    """The base of every error that a user can cause. `exit_code`: the exit status of the command line."""

    exit_code = 1


class InputError(PlanError):
    """The input was wrong: an unknown name or key, a split that does not divide, a bad file."""

    exit_code = 2


class CaptureError(InputError):
    """The model cannot be captured, or has something without a rule."""


class TransformError(InputError):
    """An `op_trans` that cannot be applied."""


class NoneOfThese(TransformError):
    """An `op_trans` whose algorithm has nothing to do with any of its ops."""


class ScheduleError(PlanError):
    """The schedule cannot run: a cycle, something unassigned, something missing."""


class TranslationError(PlanError):
    """The emitted code does something else than the program that was certified."""


class RuntimeFailure(PlanError):
    """A rank failed while it was running."""


def brief(value: object) -> str:
    r"""Return the first line of a value's text, cut if it is long.

    >>> brief("one\ntwo"), len(brief("1" * 1000))
    ('one', 203)
    """
    text = (str(value).strip().splitlines() or [""])[0]
    return text if len(text) <= 200 else f"{text[:200]}..."


def named(value: object) -> str:
    """Return a value in an error: its text, or its type and its own name where the text is long.

    >>> named("linear"), named([1] * 99)
    ("'linear'", 'a list')
    """
    text = repr(value)
    if len(text) <= 60:
        return text
    name = getattr(value, "name", "")
    kind = "tuple" if isinstance(value, tuple) else type(value).__name__
    return f"{a(kind)}{f' ({name})' if isinstance(name, str) and name else ''}"


def printable(text: str, but: str = "") -> str:
    """Return a text in which escapes replace unprintable characters, except those in `but`.

    >>> print(printable("a\\nb"), printable("é\\x1b[1m", but="\\n"))
    a\\nb é\\x1b[1m
    """
    return "".join(c if c.isprintable() or c in but else ascii(c)[1:-1] for c in text)


def divisors(number: int) -> str:
    """Return the numbers that divide a number, to choose from.

    >>> divisors(12), divisors(7)
    ('1, 2, 3, 4, 6 or 12', '1 or 7')
    """
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    *found, last = sorted({*small, *(number // n for n in small)})
    return f"{', '.join(map(str, found))} or {last}" if found else str(last)


def a(word: str) -> str:
    """Return a word with its article.

    >>> a("plan"), a("optimizer"), a("Iterator")
    ('a plan', 'an optimizer', 'an Iterator')
    """
    return f"{'an' if word[:1] in 'aeioAEIO' else 'a'} {word}"


def some(names: Sequence[str], most: int = 6) -> str:
    """Return the first of many names, and the number of the others.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Return one sentence that says `name` is unknown, gives the nearest spelling and the known names.

    >>> unknown("plan", "singel", ["single", "hybrid"])
    "unknown plan 'singel'; did you mean 'single'? Known: hybrid, single."
    """
    names = sorted(filter(None, known))
    lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.55)
    hint = f"; did you mean '{lower[near[0]]}'?" if near else "."
    return f"unknown {kind} '{name}'{hint} Known: {some(names, 20) or 'none'}."
