"""`superscaler`: the commands together, and how their errors end the process."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import superscaler
from superscaler.cli import checkpoint, launch
from superscaler.cli.capture import capture
from superscaler.cli.compile import compile
from superscaler.cli.doctor import doctor
from superscaler.cli.explain import diff, explain
from superscaler.cli.train import train
from superscaler.cli.validate import validate
from superscaler.cli.verify import verify
from superscaler.errors import PlanError

app = typer.Typer(
    name="superscaler",
    help="Parallelize an unmodified PyTorch training step. Exit code 1: the plan does not hold; 2: wrong input.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (capture, compile, validate, verify, train, explain, diff):
    app.command(verb.__name__)(verb)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(launch.app, name="launch")
app.command("doctor")(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"superscaler {superscaler.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Run before every command; only the options of `superscaler` itself are here."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with the exit code of the command, or of its error."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="superscaler")
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # What a user names is checked where it is used: what is left is standard output, as on a full disk.
        if error.filename is not None or error.errno != errno.ENOSPC:
            raise
        sys.stdout = io.StringIO()
        print(f"error: standard output cannot be written: {error.strerror}.", file=sys.stderr)
        sys.exit(2)
