"""The library of plans, one a file, each an sProgram written only in the verbs; and how a plan is named in text."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from superscaler.errors import InputError, unknown
from superscaler.verbs import Cluster, Graph

SProgram = Callable[[Graph, Cluster], None]
HELPERS = ("shared",)


def names() -> list[str]:
    """Return the names of the plans of the library."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in HELPERS)


def resolve(spec: str) -> SProgram:
    """Return the sProgram that `NAME[:key=value,...]` or `path/to/file.py:function[:key=value,...]` names.

    Raises InputError for an unknown plan, function or key, or a value of the wrong type.
    """
    name, _, rest = spec.partition(":")
    if name.endswith(".py"):
        function_name, _, rest = rest.partition(":")
        function = _from_file(name, function_name)
    elif name in names():
        function = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    else:
        raise InputError(unknown("plan", name, names()))
    return functools.partial(function, **_options(spec, function, rest))


def _from_file(path: str, function: str) -> Callable[..., Any]:
    if not Path(path).is_file():
        raise InputError(f"there is no plan file {path}; write NAME or path/to/file.py:function.")
    found = {k: v for k, v in runpy.run_path(path).items() if inspect.isfunction(v)}
    marked = {k: v for k, v in found.items() if getattr(v, "is_sprogram", False)}
    if not function and len(marked) == 1:
        return next(iter(marked.values()))
    if function not in found:
        raise InputError(f"{path}: {unknown('function', function, marked or found)}")
    return found[function]


def _options(spec: str, function: Callable[..., Any], text: str) -> dict[str, Any]:
    parameters = dict(list(inspect.signature(function).parameters.items())[2:])
    options: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if key not in parameters:
            raise InputError(f"plan '{spec}': {unknown('key', key, parameters)}")
        if not equals:
            raise InputError(f"plan '{spec}': the key '{key}' has no value; write {key}=VALUE.")
        options[key] = _value(spec, key, value, parameters[key])
    missing = [k for k, p in parameters.items() if p.default is inspect.Parameter.empty and k not in options]
    if missing:
        raise InputError(f"plan '{spec}' needs {', '.join(missing)}; write {spec.split(':')[0]}:{missing[0]}=VALUE.")
    return options


def _value(spec: str, key: str, text: str, parameter: inspect.Parameter) -> Any:
    kind = {"int": int, "float": float, "str": str}.get(str(parameter.annotation), str)
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"plan '{spec}': {key}={text} is not of type {kind.__name__}.") from None
