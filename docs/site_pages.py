"""Pages of the site that are made from the package, so that they cannot differ from it: mkdocs calls `on_files`."""

from __future__ import annotations

import inspect
import json
import re
import runpy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

import superscaler as ss
from superscaler import errors, plans
from superscaler.cli.main import app
from superscaler.ir.program import KINDS

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    pages = {
        "index.md": home(),
        "measured.md": measured(),
        "session.md": session(),
        "reference/commands.md": commands(),
        "reference/python.md": python(),
        "reference/plans.md": library(),
        "reference/instructions.md": instructions(),
        "reference/errors.md": errors_page(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def home() -> str:
    """Return the README, with links as they are from here."""
    text = (ROOT / "README.md").read_text()
    results = r"\]\(benchmarks/results/[^)]*\)"
    return re.sub(results, "](measured.md)", text.replace("](docs/", "]("))


def session() -> str:
    """Return the notebook."""
    page = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["page"]
    return str(page(json.loads((ROOT / "docs" / "session.ipynb").read_text())))


def commands() -> str:
    """Return the options of each command, from what `--help` reads."""
    found = ["# Command line", "", "Made from `superscaler --help` and the help of each command."]
    for name, command in sorted(_commands(typer.main.get_command(app), "superscaler")):
        arguments = [p for p in command.params if p.name != "help"]
        shown = " ".join(_written(p) for p in arguments if p.param_type_name == "argument")
        found += [
            "",
            f"## {name}",
            "",
            f"`{name} {shown}`".replace(" `", "`"),
            "",
            inspect.cleandoc(command.help or ""),
        ]
        rows = [(_written(p), getattr(p, "help", "") or "") for p in arguments]
        found += ["", "| option | |", "|---|---|", *(f"| `{a}` | {_cell(b)} |" for a, b in rows)] if rows else []
    return "\n".join(found)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for word, each in inner.items():
        yield from _commands(each, f"{name} {word}")


def _written(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return ", ".join(parameter.opts) + value


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def python() -> str:
    """Return the public names, by their homes; mkdocstrings reads their docstrings."""
    found = ["# Python", "", "The names of `import superscaler as ss`."]
    for name in sorted(set(ss.__all__) - {"__version__"}, key=str.lower):
        value = getattr(ss, name)
        found += ["", f"::: {value.__module__}.{value.__qualname__}"]
    return "\n".join(found)


def library() -> str:
    """Return what the file of each plan says of it."""
    found = ["# Plans", "", "From the docstrings of `superscaler/plans`."]
    for name in plans.names():
        file = Path(plans.__file__).with_name(f"{name}.py")
        if file.exists():
            module = __import__(f"superscaler.plans.{name}", fromlist=[name])
            options = inspect.signature(getattr(module, name)).parameters
            found += ["", f"## {name}", "", "```text", inspect.cleandoc(module.__doc__ or ""), "```"]
            found += ["", "Options: " + (", ".join(f"`{p}`" for p in options.values()) or "none") + "."]
    return "\n".join(found)


def instructions() -> str:
    """Return the instructions of a program."""
    found = ["# Instructions of a program", "", "A program is made of these; `program.txt` of a plan has one a line."]
    for kind in KINDS:
        found += ["", f"## {kind.__name__}", "", "```text", inspect.cleandoc(kind.__doc__ or ""), "```", ""]
        found += ["Fields: " + ", ".join(f"`{field.name}`" for field in fields(kind)) + "."]
    return "\n".join(found)


def errors_page() -> str:
    """Return the errors."""
    found = [
        "# Errors",
        "",
        "Every message says what is wrong, where, and what to do; the command line prints it alone.",
    ]
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, Exception):
            found += ["", f"## {name}", "", inspect.cleandoc(kind.__doc__ or "")]
    return "\n".join(found)


def measured() -> str:
    """Return the tables of benchmarks/results."""
    found = [
        "# Measured",
        "",
        "Written by the scripts in `benchmarks`, on two cores of a CPU unless they say otherwise.",
    ]
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.txt")):
        found += ["", f"## {file.stem}", "", "```text", file.read_text().rstrip(), "```"]
    return "\n".join(found)
