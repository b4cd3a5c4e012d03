"""`superscaler`: the commands together, and the end of the process after an error."""

import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, NoReturn

import typer

import superscaler
from superscaler.cli import checkpoint, launch
from superscaler.cli.capture import capture
from superscaler.cli.compile import compile
from superscaler.cli.doctor import doctor, torch_in_range
from superscaler.cli.explain import diff, explain
from superscaler.cli.library import examples, models, plans
from superscaler.cli.options.declare import HELP
from superscaler.cli.report import report
from superscaler.cli.simulate import search, simulate
from superscaler.cli.train import train
from superscaler.cli.validate import validate
from superscaler.cli.verify import verify
from superscaler.errors import InputError, PlanError, printable

app = typer.Typer(
    name="superscaler",
    help="Parallelize an unmodified PyTorch training step. Exit code 1: the plan does not hold; 2: wrong input.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
for verb in (
    capture,
    compile,
    validate,
    verify,
    simulate,
    search,
    train,
    explain,
    report,
    diff,
    plans,
    models,
    examples,
):
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
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Run before every command: refuse an untested version of torch in one line."""
    if context.invoked_subcommand != "doctor" and not (torch := torch_in_range()).ok:
        raise InputError(f"torch is {torch.found}; {torch.advice}.")


@cache
def _group() -> Any:
    """Return the commands as one that can be called, made once in a process: that looks at each of 190 options."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with the exit code of the command, or of its error."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    # As git and others have it: superscaler help train.
    given = [*given[1:], "--help"] if given[:1] == ["help"] else given
    try:
        # Libraries abort without a current directory.
        os.getcwd()
        _group()(args=given, prog_name="superscaler")
    except PlanError as error:
        text = str(error)
        for argument in given:
            text = text.replace(argument, printable(argument)) if "\n" in argument else text
        _fail(printable(text, but="\n"), error.exit_code)
    except OSError as error:
        # Files that a user names are checked where they are used. Left: standard output, and the current directory.
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.ENOENT):
            raise
        sys.stdout = io.StringIO()
        what = "standard output cannot be written" if error.errno == errno.ENOSPC else "the current directory is gone"
        _fail(f"{what}: {error.strerror}.", 2)


def _fail(text: str, code: int) -> NoReturn:
    # What was printed before comes first, also where both go into one file.
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    try:
        print(f"error: {text}", file=sys.stderr)
    except OSError:
        # At exit Python writes the rest once more, and would then end with a code of its own.
        sys.stderr = io.StringIO()
    sys.exit(code)
