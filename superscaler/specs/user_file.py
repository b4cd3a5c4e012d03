"""Code of the user's own files: loading it, running it, and finding the line of an error."""

import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import iscoroutinefunction
from pathlib import Path
from types import ModuleType
from typing import Any

from superscaler.errors import InputError, PlanError, a, brief, unknown
from superscaler.specs.options import for_function

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


# By path, time and size.
_RUN: dict[tuple[str, int, int], ModuleType] = {}


def is_function(data: Path | None) -> bool:
    """Return whether data is `FILE.py:function[:key=value,...]`.

    >>> is_function(Path("data.py:train:size=3")), is_function(Path("data.txt"))
    (True, False)
    """
    return data is not None and ".py:" in str(data)


def file_of(data: Path) -> Path:
    """Return the file of a function of data, or the text itself.

    >>> file_of(Path("data.py:train:size=3")).name
    'data.py'
    """
    text = str(data)
    return Path(text[: text.index(".py:") + 3]) if is_function(data) else data


def load_file(file: Path, is_new: bool = True) -> ModuleType:
    """Run a Python file as a module of its own. Raises InputError that names its line when it cannot be run. Unless
    `is_new`, a file that has run in this process and is unchanged does not run again.
    """
    stat = file.stat()
    key = os.path.realpath(file), stat.st_mtime_ns, stat.st_size
    if not is_new and key in _RUN:
        return _RUN[key]
    name = f"superscaler_user_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise InputError(f"{file} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(found)
    # Dataclasses and export look their module up by name.
    sys.modules[name] = module
    with running(file, "cannot be imported"):
        found.loader.exec_module(module)
    _RUN[key] = module
    return module


def from_file(
    spec: str, kind: str, given: Sequence[str] = (), mark: str = "", may_yield: bool = False, is_new: bool = True
) -> Callable[..., Any]:
    """Return the function in `path/to/file.py:function[:key=value,...]`, with its keys as keyword arguments.

    `kind`: its name in errors. `given`: the arguments that it will get. `mark`: an attribute; the only function with it
    needs no name. `may_yield`: it may be a generator function. `is_new`: see `load_file`. Raises InputError for a
    missing file or function, a file that cannot be run, a function with other arguments, and a bad key. The function
    raises InputError with the line, too, for any error of its own.
    """
    path, _, rest = spec.partition(":")
    name, _, keys = rest.partition(":")
    file = Path(path)
    if not os.path.isfile(file):
        raise InputError(f"there is no {kind} file {path}; write NAME or path/to/file.py:function.")
    module = load_file(file, is_new)
    found = {k: v for k, v in vars(module).items() if inspect.isfunction(v)}
    marked = [k for k, v in found.items() if mark and hasattr(v, mark)]
    known = marked or [k for k, v in found.items() if v.__module__ == module.__name__]
    if not name and len(marked) == 1:
        name = marked[0]
    if not name:
        choice = f"write {path}:FUNCTION, one of {', '.join(known)}" if known else "the file has none, so write one"
        raise InputError(f"'{spec}' names no function; {choice}.")
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{path}: {unknown('function', name, known)}")
    is_generator = inspect.isgeneratorfunction(function) and not may_yield
    if is_generator or inspect.isasyncgenfunction(function) or iscoroutinefunction(function):
        raise InputError(
            f"{path}: {name} is a generator or async, but {a(kind)} is a plain function; write def and return."
        )
    try:
        parameters = inspect.signature(function)
    except ValueError:
        raise InputError(f"{path}: {name} is {function!r}, without a readable signature; write a function.") from None
    taken = [p for p in parameters.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(taken) < len(given):
        raise InputError(
            f"{path}: {name}{parameters} takes {len(taken)} positional arguments, but {a(kind)} is given {len(given)} "
            f"and its keys; write {name}({', '.join(given)}, ...)."
        )
    options = for_function(spec, keys, function, len(given))

    def run(*args: Any) -> Any:
        with running(file, "failed"):
            return function(*args, **options)

    run.__name__ = name
    run.__dict__.update(vars(function))
    return run


def is_installed(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package, which other machines have by themselves."""
    return "-packages" in file or file.startswith(_LIBRARIES)


def root_of(module: str, file: Path) -> Path | None:
    """Return the folder that contains this module under its dotted name, None if the file has another path.

    >>> root_of("package.ops", Path("/code/package/ops.py")).as_posix()
    '/code'
    >>> root_of("__main__", Path("/code/train.py")) is None
    True
    """
    path = file.parent if file.name == "__init__.py" else file.with_suffix("")
    names = module.split(".")
    return path.parents[len(names) - 1] if list(path.parts[-len(names) :]) == names else None


@contextmanager
def running(file: Path, trouble: str) -> Iterator[None]:
    """Run code of the user's file with its folder on `sys.path`, as Python does for a script; see `locating`."""
    with first_on_path(file.resolve().parent), locating(file, trouble):
        yield


@contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """Import modules from a folder before others."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def locating(file: Path, trouble: str) -> Iterator[None]:
    """Turn an error of a file's code into an InputError with `trouble` and the line; a PlanError passes unchanged."""
    try:
        yield
    except (PlanError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        code = brief(repr(error.code))
        raise InputError(f"{_place(file, error)} {trouble}: it ends the process with sys.exit({code}).") from None
    except BaseException as error:
        # The user's code may raise anything, and its author needs the line, not the frames of this library.
        raise InputError(f"{_place(file, error)} {trouble}: {_message(error)}") from error


def _place(file: Path, error: BaseException) -> str:
    """Return file:line of the last frame in the user's folder, or of the syntax error in it, or the file alone."""
    folder = file.resolve().parent
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    trace = traceback.extract_tb(error.__traceback__)
    frames = [f for f in trace if not f.filename.startswith("<") and Path(f.filename).resolve().parent == folder]
    return f"{frames[-1].filename}:{frames[-1].lineno} (in {frames[-1].name})" if frames else str(file)


def _message(error: BaseException) -> str:
    text = brief(traceback.format_exception_only(error)[-1]) or type(error).__name__
    return text.rstrip(".") + "."
