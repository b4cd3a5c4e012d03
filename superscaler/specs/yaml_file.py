"""Tables that users write, in files as YAML: read and checked, with errors of one line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from superscaler.errors import InputError, unknown


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that is given twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for n, key in enumerate(keys) if key in keys[:n]), None)
        if twice is not None:
            raise yaml.YAMLError(f"the key '{twice}' is given twice, at line {node.start_mark.line + 1} and below")
        return dict(super().construct_mapping(node, deep))


def parse(text: str, where: str) -> Any:
    """Return what YAML says. Raises InputError for what is none."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise InputError(f"{where}: lists or mappings are nested too deep.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{where} is not YAML: {' '.join(str(error).split())}.") from None


def read(file: str, where: str) -> Any:
    """Return what a YAML file says. Raises InputError for one that cannot be read, or is none."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{where} cannot be read: {' '.join(str(error).split())}") from None
    return parse(text, where)


def table(given: Any, where: str, known: Collection[str] = ()) -> Mapping[str, Any]:
    """Return a table of names. Raises InputError for anything else, and for names that are not among the known."""
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InputError(f"{where} is {given!r}, but it must be a table of names.")
    for key in (key for key in given if known and key not in known):
        raise InputError(f"{where}: {unknown('key', key, known)}")
    return given
