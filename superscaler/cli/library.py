"""`superscaler plans` and `superscaler models`: what --plan and MODEL may name, in one line each."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from typing import Any

from superscaler.cli.common import Printer, command
from superscaler.timing import phase


@command
def plans(printer: Printer) -> None:
    """List the plans of the library, with their keys: --plan NAME:key=value,..."""
    from superscaler.plans import names

    found = {name: _plan(name) for name in names()}
    width = max(map(len, found))
    printer.show(*(f"{name:{width}}  {text}{_words(' Keys: ', keys)}" for name, (keys, text) in found.items()))
    printer.result = {name: {"keys": keys, "about": text} for name, (keys, text) in found.items()}


def _plan(name: str) -> tuple[list[str], str]:
    """Return the keys of a plan, and the first sentence about it."""
    from superscaler.plans.lib.schedules import RULES

    home = importlib.import_module(f"superscaler.plans.{'pipeline' if name in RULES else name}")
    function = getattr(home, home.__name__.rpartition(".")[2])
    _, _, *keys = inspect.signature(function).parameters
    about = inspect.getdoc(RULES[name]) if name in RULES else home.__doc__
    return [key for key in keys if name not in RULES or key != "schedule"], first_sentence(about or "")


def _words(title: str, names: Sequence[str]) -> str:
    return f"{title}{', '.join(names)}." if names else ""


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, in one line.

    >>> first_sentence("A plan (Li et al.,\\n2021) of stages. It has more.")
    'A plan (Li et al., 2021) of stages.'
    """
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


@command
def models(printer: Printer) -> None:
    """List the models of the library, with their sizes and keys: NAME:size=SIZE,key=value,..."""
    with phase("import"):
        from superscaler.models.families import FAMILIES

    found: dict[str, Any] = {}
    for name, family in sorted(FAMILIES.items()):
        sizes = [size + " (default)" * (size == family.default) for size in family.sizes if size]
        found[name] = {"sizes": sizes, "keys": list(family.sizes[family.default])}
    width = max(map(len, found))
    for name, each in found.items():
        printer.show(f"{name:{width}}  {_words('Sizes: ', each['sizes'])}{_words(' Keys: ', each['keys'])}".rstrip())
    printer.result = found
