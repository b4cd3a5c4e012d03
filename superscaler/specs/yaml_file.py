"""Tables that users write, in YAML files: read and checked, with errors of one line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from superscaler.errors import InputError, unknown
from superscaler.specs.file_errors import reading

_KINDS = {int: "an integer", str: "a name", list: "a list"}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader that refuses a key given twice; YAML's own loader takes the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for n, key in enumerate(keys) if key in keys[:n]), None)
        if twice is not None:
            raise yaml.YAMLError(f"the key '{twice}' is given twice, at line {node.start_mark.line + 1} and below")
        return dict(super().construct_mapping(node, deep))


def parse(text: str, where: str) -> Any:
    """Return the data of a YAML text. Raises InputError for a text that is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise InputError(f"{where}: lists or mappings are nested too deep.") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        # The last two: a value that is not of its tag, as `!!bool x`.
        raise InputError(f"{where} is not YAML: {_fault(error)}.") from None


def _fault(error: Exception) -> str:
    """Return the fault of a text that is not YAML, with its place in the text."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split()).rstrip(".")
    parts = getattr(error, "context", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {', '.join(part for part in parts if part)}"


def read(given: Any, where: str) -> Any:
    """Return the data of a YAML file; data given instead of a file name are returned unchanged. Raises InputError for a
    file that cannot be read, or is not YAML.
    """
    if not isinstance(given, str):
        return given
    with reading(where, "name a YAML file in UTF-8", (ValueError,), "text in UTF-8"):
        text = Path(given).read_text(encoding="utf-8")
    return parse(text, where)


def table(given: Any, where: str, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a table of names. With `known`, missing names get these defaults. Raises InputError for other data; with
    `known` also for other names, and for values of another kind than their default.
    """
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InputError(f"{where} is {given!r}, but it must be a table of names.")
    if known is None:
        return dict(given)
    for key in (key for key in given if key not in known):
        raise InputError(f"{where}: {unknown('key', key, known)}")
    return {**known, **{key: of_kind(known[key], value, f"{where}: {key}") for key, value in given.items()}}


def of_kind(default: Any, given: Any, where: str) -> Any:
    """Return a given value. Raises InputError unless it is of the default's kind: a number, a name, a list or a
    table.
    """
    if isinstance(default, Mapping):
        return table(given, where)
    if type(given) is not type(default):
        raise InputError(f"{where} is {given!r}, but it must be {_KINDS[type(default)]}.")
    return given
