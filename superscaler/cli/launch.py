"""`superscaler launch`: commands and scripts that start a saved plan, on one server or on many."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from superscaler.cli.explain import Directory
from superscaler.cli.options.command import command
from superscaler.cli.options.declare import HELP, option
from superscaler.cli.printing import Printer
from superscaler.cluster import Cluster
from superscaler.errors import InputError
from superscaler.launch import jobs as start

app = typer.Typer(
    help="Print how a saved plan is started: a command, or a file for a scheduler.",
    no_args_is_help=True,
    context_settings=HELP,
)

Options = Annotated[
    list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="Options of the plan's run.py, as -- --steps 100.")
]
Restarts = Annotated[int, typer.Option("--max-restarts", min=0, help="How often all ranks start again when one fails.")]


@command
def torchrun(printer: Printer, plan: Directory, options: Options = None, restarts: Restarts = 0) -> None:
    """Print the command for this server, or for each of several; HOST stands for the name of one of them."""
    _print(printer, start.torchrun(_read(plan, options, restarts)) + "\n")


@command
def slurm(
    printer: Printer,
    plan: Directory,
    options: Options = None,
    restarts: Restarts = 0,
    time: Annotated[str | None, option("--time", "Limit of the job, as 1-12:00:00.")] = None,
    partition: Annotated[str | None, option("--partition", "Partition of the cluster.")] = None,
) -> None:
    """Print a script for sbatch. The plan directory must be on a disk shared by all servers."""
    _print(printer, start.slurm(_read(plan, options, restarts), time, partition))


@command
def kubernetes(
    printer: Printer,
    plan: Directory,
    image: Annotated[str, option("--image", "Container image that has superscaler and torch.")],
    claim: Annotated[str, option("--claim", "PersistentVolumeClaim with the plan's folder at its top.")],
    options: Options = None,
    restarts: Restarts = 0,
) -> None:
    """Print an Indexed Job and its headless Service, for kubectl apply. It runs in the top folder of the claim."""
    _print(printer, start.kubernetes(_read(plan, options, restarts), image, claim))


def _read(plan: Path, options: list[str] | None, restarts: int) -> start.Start:
    from superscaler.store.plan import read_plan
    from superscaler.store.plan_head import RUN_FILE
    from superscaler.train.options import check_words

    check_words(options or ())
    cluster = Cluster.parse(read_plan(plan).head["cluster"])
    name = start.job_name(plan)
    return start.Start(cluster=cluster, program=plan / RUN_FILE, options=options or (), restarts=restarts, name=name)


def _print(printer: Printer, text: str) -> None:
    # Unchanged text: lines for people may be wrapped, and their words replaced by signs.
    if not printer.as_json:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError as error:
            raise InputError(
                f"{text[error.start]!a} of the plan's path or options is not in {encoding}, which standard output has; "
                "rename it, or set PYTHONIOENCODING=utf-8."
            ) from None
        print(text, end="")
    printer.result = {"text": text}


for verb in (torchrun, slurm, kubernetes):
    app.command(verb.__name__)(verb)
