"""A model from a user's own Python file."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from superscaler.errors import InputError, unknown
from superscaler.models.options import for_function, read_pairs

_SHAPE = "(module, args) or (module, args, kwargs)"


def build(spec: str, path: str, function: str, text: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Call the function of the file and return its module, args and kwargs.

    The file's folder can be imported from meanwhile, as when Python runs the file. Raises InputError for a missing
    file or function, a file that cannot be imported, a bad key, and a result of another shape.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no model file {path}; write NAME or path/to/file.py:function.")
    with _on_path(file.resolve().parent):
        made = _call(spec, _load(file), function, text)
    return _checked(f"{path}:{function}", made)


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _load(file: Path) -> ModuleType:
    name = f"superscaler_user_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise InputError(f"{file} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(found)
    # Dataclasses and export look their module up by name.
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise InputError(f"{file} cannot be imported: {type(error).__name__}: {error}.") from error
    return module


def _call(spec: str, module: ModuleType, function: str, text: str) -> Any:
    own = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    if not function:
        raise InputError(
            f"'{spec}' names no function; write {spec.rstrip(':')}:FUNCTION, one of {', '.join(own) or '-'}."
        )
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"{module.__file__}: {unknown('function', function, own)}")
    return found(**for_function(spec, read_pairs(spec, text), found))


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
