"""Errors of reading and writing files, as one line: the file, the cause and the remedy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from superscaler.errors import InputError, PlanError, brief
from superscaler.specs.whole_file import write_file

# Python's errors for data of another form than expected.
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
Errors = tuple[type[BaseException], ...]


def refuse(file: object, fault: str, hint: str) -> NoReturn:
    """Raise the InputError of a file."""
    raise InputError(f"{file} {fault}; {hint}.")


def require_file(file: Path, hint: str, may_link: bool = True) -> None:
    """Raise InputError for a missing file, and for a folder or pipe: reading a pipe would block for ever."""
    with reading(file, hint):
        if not may_link and file.is_symlink():
            refuse(file, "is a link, not a file of its own", hint)
        if not file.is_file():
            refuse(file, f"is {'a folder' if file.is_dir() else 'not a file' if file.exists() else 'missing'}", hint)


@contextmanager
def reading(file: object, hint: str, damage: Errors = DAMAGE, kind: str = "") -> Iterator[None]:
    """Turn an OSError, and the errors that show `damage`, into an InputError with the file, the cause and a hint.

    `kind`: the expected kind of file. A PlanError stays.
    """
    try:
        yield
    except PlanError:
        raise
    except OSError as error:
        raise InputError(f"{file} cannot be read: {cause(error, file)}; {hint}.") from None
    except damage as error:
        trouble = f"no {kind}, or is damaged" if kind else "damaged"
        raise InputError(f"{file} is {trouble} ({cause(error)}); {hint}.") from error


@contextmanager
def writing(file: object, hint: str, failures: Errors = ()) -> Iterator[None]:
    """Turn an OSError, and the errors of a library, into an InputError with the file, the cause and a hint."""
    errors: Errors = (OSError, *failures)
    try:
        yield
    except errors as error:
        raise InputError(f"{unwritable(file, error)}; {hint}.") from error


def replace_own(file: Path, text: str, head: str, kind: str) -> None:
    """Write a text that begins with `head`. Raises InputError for a file that cannot be written, or is of another kind
    than `kind`.
    """
    with writing(file, "name a file in a folder that exists and has space"):
        if file.is_file() and not file.read_bytes().startswith(head.encode()):
            raise InputError(f"{file} is there and is no {kind}; name a new file, or remove that one.")
        if file.exists() and not file.is_file():
            # A pipe or a device, as /dev/stdout.
            file.write_text(text, encoding="utf-8")
            return
        write_file(file.resolve(), text)


def unwritable(file: object, error: BaseException) -> str:
    """Return the file that cannot be written, and the cause."""
    return f"{file} cannot be written: {cause(error, file)}"


def cause(error: BaseException, file: object = "") -> str:
    """Return the last line of an error's text; for an OSError its reason, and its file if that is another one.

    >>> cause(FileNotFoundError(2, "No such file or directory", "a/b"), "a"), cause(KeyError("x")), cause(ValueError())
    ('No such file or directory (a/b)', "KeyError: 'x'", 'ValueError')
    """
    if isinstance(error, OSError) and error.strerror:
        other = str(error.filename or "")
        return error.strerror + (f" ({other})" if other not in str(file) else "")
    name = type(error).__name__
    text = (str(error).strip() or name).splitlines()[-1]
    return brief(f"{name}: {text}" if isinstance(error, LookupError) else text)
