"""A model from a user's own Python file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from superscaler.errors import InputError, unknown
from superscaler.specs.options import for_function, read_pairs
from superscaler.specs.user_file import load_file, running

_SHAPE = "(module, args) or (module, args, kwargs)"


def build(spec: str, path: str, function: str, text: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Call the function of the file and return its module, args and kwargs.

    The file's folder can be imported from meanwhile, as when Python runs the file. Raises InputError for a missing
    file or function, a file or function that fails, a bad key, and a result of another shape.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no model file {path}; write NAME or path/to/file.py:function.")
    made = _call(spec, load_file(file), function, text)
    return _checked(f"{path}:{function}", made)


def _call(spec: str, module: ModuleType, function: str, text: str) -> Any:
    own = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    if not function:
        raise InputError(
            f"'{spec}' names no function; write {spec.rstrip(':')}:FUNCTION, one of {', '.join(own) or '-'}."
        )
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"{module.__file__}: {unknown('function', function, own)}")
    options = for_function(spec, read_pairs(spec, text), found)
    with running(Path(str(module.__file__)), "failed"):
        return found(**options)


def _checked(where: str, made: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        told = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise InputError(f"{where} returned {told}; return {_SHAPE}.")
    module, args, kwargs = made if len(made) == 3 else (*made, {})
    wanted = (("module", module, nn.Module), ("args", args, (tuple, list)), ("kwargs", kwargs, dict))
    for name, value, kind in wanted:
        if not isinstance(value, kind):
            hint = "; write (x,) for one argument" if name == "args" else ""
            raise InputError(f"{where} returned a {type(value).__name__} as {name}; return {_SHAPE}{hint}.")
    return module, tuple(args), dict(kwargs)
