"""The library of plans, one a file, each an sProgram written only in the verbs; and how a plan is named in text."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from superscaler.errors import InputError, unknown
from superscaler.specs.user_file import load_file, running
from superscaler.verbs import Cluster, Graph

SProgram = Callable[[Graph, Cluster], None]
HELPERS = ("shared",)


def names() -> list[str]:
    """Return the names of the plans of the library."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in HELPERS)


def resolve(spec: str) -> SProgram:
    """Return the sProgram that `NAME[:key=value,...]` or `path/to/file.py:function[:key=value,...]` names.

    Raises InputError for an unknown plan, function or key, a value of the wrong type, or a file that cannot be run.
    What an sProgram of a file raises becomes an InputError that names its line.
    """
    name, _, rest = spec.partition(":")
    if not name.endswith(".py"):
        if name not in names():
            raise InputError(f"{unknown('plan', name, names())} Or give a file: path/to/file.py:function.")
        function = getattr(importlib.import_module(f"{__name__}.{name}"), name)
        return functools.partial(function, **_options(spec, function, rest))
    function_name, _, rest = rest.partition(":")
    function = _from_file(name, function_name)
    _check_signature(name, function)
    return _told_by_line(Path(name), functools.partial(function, **_options(spec, function, rest)))


def _from_file(path: str, function: str) -> Callable[..., Any]:
    if not Path(path).is_file():
        raise InputError(f"there is no plan file {path}; write NAME or path/to/file.py:function.")
    found = {k: v for k, v in vars(load_file(Path(path))).items() if inspect.isfunction(v)}
    marked = {k: v for k, v in found.items() if getattr(v, "is_sprogram", False)}
    if not function and len(marked) == 1:
        return next(iter(marked.values()))
    if not found:
        raise InputError(f"{path} has no function; a plan is a function f(graph, cluster, **options).")
    if not function:
        raise InputError(f"'{path}' names no function; write {path}:FUNCTION, one of {', '.join(marked or found)}.")
    if function not in found:
        raise InputError(f"{path}: {unknown('function', function, marked or found)}")
    return found[function]


def _check_signature(path: str, function: Callable[..., Any]) -> None:
    """Raise InputError unless the function takes a graph and a cluster first."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        raise InputError(
            f"{path}: {function.__name__}{inspect.signature(function)} takes {len(positional)} positional arguments, "
            f"but an sProgram takes 2 and its keys; write {function.__name__}(graph, cluster, ...)."
        )


def _told_by_line(file: Path, function: SProgram) -> SProgram:
    def run(graph: Graph, cluster: Cluster) -> None:
        with running(file, "failed"):
            function(graph, cluster)

    return run


def _options(spec: str, function: Callable[..., Any], text: str) -> dict[str, Any]:
    # Models need torch; a misspelled plan does not wait for it.
    from superscaler.specs.options import for_function, read_pairs

    where = f"plan {spec}"
    return for_function(where, read_pairs(where, text), function, skip=2)
