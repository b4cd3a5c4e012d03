"""The values of a user's objects that a capture reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import nn


def settings(objects: Mapping[str | None, object]) -> dict[str | None, object]:
    """Return the `config` and `args` that objects have, each by its first path."""
    found = {
        id(value): (f"{path}.{name}" if path else name, value)
        for path, one in [*objects.items()][::-1]
        for name, value in vars(one).items()
        # No read of a SimpleNamespace can be seen: its class is C's.
        if name in ("config", "args")
        and hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | SimpleNamespace)
    }
    return dict(found.values())


@contextmanager
def reads(objects: Mapping[str | None, object]) -> Iterator[set[tuple[str | None, str]]]:
    """Collect the numbers, flags and texts that are read from attributes of objects: the path and the name.

    Not what the model sets when it first runs, as `config.problem_type`: other ranks have not run it.
    """
    before = {path: dict(vars(one)) for path, one in objects.items()}
    paths, found = {id(one): path for path, one in objects.items()}, set[tuple[str | None, str]]()

    def noting(read: Callable[[object, str], Any]) -> Callable[[object, str], Any]:
        def get(one: object, name: str) -> Any:
            value = read(one, name)
            if isinstance(value, bool | int | float | str) and id(one) in paths and name in vars(one):
                found.add((paths[id(one)], name))
            return value

        return get

    classes: set[Any] = {type(one) for one in objects.values() if not isinstance(one, nn.Module)} | {
        nn.Module,
        type(objects[None]),
    }
    with ExitStack() as stack:
        for kind in classes:
            stack.enter_context(patch.object(kind, "__getattribute__", noting(kind.__getattribute__)))
        yield found
    found -= {(path, name) for path, name in found if before[path].get(name) != vars(objects[path])[name]}
