"""`superscaler plans` and `superscaler models`: the values of --plan and MODEL, in one line each.

`superscaler examples`: files to start from.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import superscaler
from superscaler.cli.options.command import command
from superscaler.cli.printing import Printer
from superscaler.errors import InputError, unknown
from superscaler.specs.file_errors import writing
from superscaler.timing import phase

_EXAMPLES = Path(superscaler.__file__).with_name("examples")


@command
def plans(
    printer: Printer, name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One plan, in full.")] = None
) -> None:
    """List the plans of the library, with their keys: --plan NAME:key=value,..."""
    from superscaler.plans import names

    if name is not None and name not in names():
        raise InputError(unknown("plan", name, names()))
    if name is not None:
        keys, text = _plan(name)
        printer.show(f"{name}{_words(' Keys: ', [f'{key}={value}' for key, value in keys.items()])}\n\n{text}")
        printer.result = {name: {"keys": list(keys), "about": text}}
        return
    found = {name: (list(keys), first_sentence(text)) for name in names() for keys, text in [_plan(name)]}
    width = max(map(len, found))
    printer.show(*(f"{name:{width}}  {text}{_words(' Keys: ', keys)}" for name, (keys, text) in found.items()))
    printer.result = {name: {"keys": keys, "about": text} for name, (keys, text) in found.items()}


def _plan(name: str) -> tuple[dict[str, Any], str]:
    """Return the keys of a plan with their defaults, and what its file says about it."""
    from superscaler.plans import home_of, keys_of
    from superscaler.plans.lib.schedules import RULES

    home = home_of(name)
    about = f"{inspect.getdoc(RULES[name])}\n\n{home.__doc__}" if name in RULES else home.__doc__
    return keys_of(name), (about or "").strip()


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


@command
def examples(
    printer: Printer,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write into.")] = Path("examples"),
) -> None:
    """Write examples into a folder: plans, a model and a loop of your own. Files that are there stay."""
    files = sorted(file for file in _EXAMPLES.glob("*.py") if file.stem != "__init__")
    with writing(directory, "name another folder"):
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            if (directory / file.name).exists():
                raise InputError(f"{directory / file.name} exists, and would be replaced; name another folder.")
        for file in files:
            (directory / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    heads = (file.read_text(encoding="utf-8").split("\n", 1)[0].strip('"') for file in files)
    printer.show(*(f"{directory / file.name}: {head}" for file, head in zip(files, heads, strict=True)))
    printer.result = {"files": [str(directory / file.name) for file in files]}
