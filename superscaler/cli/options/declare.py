"""The declaration of options for Typer."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from superscaler.errors import InputError
from superscaler.train.options import Option

Completion = Callable[[str], list[str]]


def option(name: str, text: str, metavar: str | None = None, completion: Completion | None = None) -> Any:
    """Return an option. `completion`: from what was typed of its value to the values that the shell offers."""
    return typer.Option(name, metavar=metavar, help=text, autocompletion=completion)


def path(name: str, metavar: str, text: str, what: str = "file or folder") -> Any:
    """Return an option that takes a path. It refuses an empty one: that is an unset variable of a shell."""

    def read(given: object) -> Path:
        if given == "":
            raise InputError(f"{name} is empty; name a {what} ('.' is the current one).")
        if not isinstance(given, str | Path):
            raise InputError(f"{name} is {given!r} in --config, but it must be a {what}; write its name in quotes.")
        return Path(given)

    return typer.Option(name, metavar=metavar, parser=read, help=text)


# -h is --help in every command.
HELP = {"help_option_names": ["-h", "--help"]}


def fields_of(kind: type) -> list[Parameter]:
    """Return the fields of a dataclass of options, as parameters for Typer."""
    return [_for_typer(p) for p in signature(kind, eval_str=True).parameters.values()]


def _for_typer(p: Parameter) -> Parameter:
    """Return a parameter whose `Option` of a run is one of Typer."""
    given = next((x for x in getattr(p.annotation, "__metadata__", ()) if isinstance(x, Option)), None)
    if given is None:
        return p
    kind, name = p.annotation.__origin__, f"--{p.name.replace('_', '-')}"
    if kind == Path | None:
        made = path(name, given.metavar or "PATH", given.help)
    else:
        metavar = given.metavar or "|".join(given.choices) or None
        made = typer.Option(name, metavar=metavar, min=given.least, max=given.most, help=given.help)
    made.rich_help_panel = given.panel
    return p.replace(annotation=Annotated[kind, made])
