"""The options of a command as a YAML file, which `--config` reads and a run writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from superscaler.errors import InputError, brief, unknown


def save_options(folder: Path, options: Mapping[str, Any]) -> None:
    """Write the options of a command, by their names, into a file that --config takes."""
    import yaml

    from superscaler.specs.file_errors import writing

    with writing(f"--run {folder}", "name a folder that you may write to"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "options.yaml").write_text(yaml.safe_dump(dict(options), sort_keys=False))


def resolved(context: typer.Context) -> dict[str, Any]:
    """Return the options of a command that have a value, by their names."""
    pairs = ((_long(p), context.params.get(str(p.name))) for p in context.command.params)
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in pairs if name != "config"}
    return {name: value for name, value in plain.items() if value not in (None, False, [], ())}


def _long(parameter: Any) -> str:
    """Return the name of an option without its dashes, or of an argument."""
    return str(max(parameter.opts, key=len).lstrip("-"))


def read_options(context: typer.Context, file: str | None) -> str | None:
    """Take the options in a YAML file as the defaults of a command."""
    if file is not None:
        from superscaler.specs import yaml_file

        known = {_long(p): p for p in context.command.params}
        given = yaml_file.table(yaml_file.read(file, f"--config {file}"), f"--config {file}")
        for name, value in given.items():
            if name not in known:
                raise InputError(f"--config {file}: {unknown('option', name, known)}")
            is_many = known[name].multiple or known[name].nargs != 1
            if value is not None and (isinstance(value, list) != is_many or isinstance(value, dict)):
                what = "a list, as [A, B]" if is_many else "one value"
                raise InputError(f"--config {file}: {name} is {brief(repr(value))}, but it must be {what}.")
        context.default_map = {str(known[name].name): value for name, value in given.items()}
    return file
