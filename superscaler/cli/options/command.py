"""Functions that become commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from inspect import Parameter, Signature, getdoc, signature
from typing import Annotated, Any

import typer

from superscaler.cli.options.declare import fields_of, option
from superscaler.cli.options.files import read_options, resolved
from superscaler.cli.printing import printing, refusing
from superscaler.errors import RuntimeFailure


def command(function: Callable[..., bool | None]) -> Callable[..., None]:
    """Make a command of `function(printer, options)`, where a dataclass stands for its fields. --json is an option of
    all commands. If the function returns False, the exit code is 1.
    """
    _, *own = signature(function, eval_str=True).parameters.values()
    kinds: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
    fields = {name: fields_of(kind) for name, kind in kinds.items()}
    options = [option for p in own for option in fields.get(p.name, [p])]
    as_json = Annotated[bool, option("--json", "One JSON object as the last line of standard output.")]
    timed = Annotated[bool, option("--timings", "Print at the end where the time went.")]
    config = Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="YAML with options by name, which those given here replace.",
                     is_eager=True, callback=read_options),
    ]  # fmt: skip
    first = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    last = [
        Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=config),
        Parameter("timings", Parameter.KEYWORD_ONLY, default=False, annotation=timed),
        Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=as_json),
    ]

    def run(context: typer.Context, as_json: bool, timings: bool, config: str | None, **given: Any) -> None:
        made = {name: kind(**{p.name: given.pop(p.name) for p in fields[name]}) for name, kind in kinds.items()}
        with refusing(as_json), printing(as_json, timings) as printer:
            printer.options = resolved(context)
            is_good = function(printer, **made, **given)
        if printer.failure:
            raise RuntimeFailure(printer.failure)
        if is_good is False:
            raise typer.Exit(1)

    for p in (*options, *last):
        for given in getattr(p.annotation, "__metadata__", ()):
            if isinstance(given, typer.models.OptionInfo):
                panel = "Model and plan" if p in fields.get("request", ()) else "Output" if p in last else None
                given.rich_help_panel = panel or given.rich_help_panel
                # A flag has no value.
                given.metavar = " " if p.annotation.__origin__ is bool else given.metavar
    # Typer reads this signature and lists its options in order: required ones first.
    ordered = sorted(options, key=lambda p: p.default is not Parameter.empty)
    options = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in ordered]
    # Typer shows the lines of a paragraph as they are.
    paragraphs = (getdoc(function) or "").split("\n\n")
    run.__name__, run.__doc__ = function.__name__, "\n\n".join(" ".join(text.split()) for text in paragraphs)
    run.__signature__ = Signature([first, *options, *last])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (first, *options, *last)}
    return run
