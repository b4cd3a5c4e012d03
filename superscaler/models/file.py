"""A model from a user's own Python file."""

from __future__ import annotations

from typing import Any

from torch import nn

from superscaler.errors import InputError
from superscaler.specs.user_file import from_file

_SHAPE = "(module, args) or (module, args, kwargs)"


def build(spec: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Call the function that `path/to/file.py:function[:key=value,...]` names; return its module, args and kwargs.

    The file's folder can be imported from meanwhile, as when Python runs the file. Raises InputError for a missing
    file or function, a file or function that fails, a bad key, and a result of another shape.
    """
    where, made = ":".join(spec.split(":")[:2]), from_file(spec, "model")()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        told = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise InputError(f"{where} returned {told}; return {_SHAPE}.")
    module, args, kwargs = made if len(made) == 3 else (*made, {})
    for name, value, kind in (("module", module, nn.Module), ("args", args, (tuple, list)), ("kwargs", kwargs, dict)):
        if not isinstance(value, kind):
            hint = "; write (x,) for one argument" if name == "args" else ""
            raise InputError(f"{where} returned a {type(value).__name__} as {name}; return {_SHAPE}{hint}.")
    return module, tuple(args), dict(kwargs)
