"""The library of plans, one a file, each an sProgram written only in the verbs; and how a plan is named in text."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable

from superscaler.errors import InputError, unknown
from superscaler.specs.options import for_function
from superscaler.specs.user_file import from_file
from superscaler.verbs import Cluster, Graph

SProgram = Callable[[Graph, Cluster], None]
HELPERS = ("chains", "schedules", "shared", "tables")


def names() -> list[str]:
    """Return the names of the plans of the library."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in HELPERS)


def resolve(spec: str) -> SProgram:
    """Return the sProgram that `NAME[:key=value,...]` or `path/to/file.py:function[:key=value,...]` names.

    Raises InputError for an unknown plan, function or key, a value of the wrong type, or a file that cannot be run.
    What an sProgram of a file raises becomes an InputError that names its line.
    """
    name, _, keys = spec.partition(":")
    if name.endswith(".py"):
        return from_file(spec, "plan", ("graph", "cluster"), "is_sprogram")
    if name not in names():
        raise InputError(f"{unknown('plan', name, names())} Or give a file: path/to/file.py:function.")
    function = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    return functools.partial(function, **for_function(spec, keys, function, skip=2))
