"""The users' operators that a saved plan calls: a rank imports what registers them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from superscaler.errors import InputError
from superscaler.specs.user_file import load_file, root_of, running

# By operator (`namespace.name.overload`), the module and the file that register it.
Homes = Mapping[str, Sequence[str] | None]


def import_operators(homes: Homes, plan: Path) -> None:
    """Import what registers the operators that this process does not have yet.

    A file is looked for at its place and beside the plan; without it, its module by name. Raises InputError for an
    operator that is then still missing.
    """
    for target, home in homes.items():
        if _exists(target):
            continue
        if home is None:
            raise InputError(
                f"the plan in {plan} calls {target}, which nothing here defines; give it a notation with "
                "superscaler.register and compile the plan again, or import what defines it before the plan is loaded."
            )
        module, file = home
        if not _import(module, [Path(file), plan / Path(file).name]):
            raise InputError(
                f"the plan in {plan} calls {target}, but {file or module}, which registers it, cannot be found; "
                f"copy the file there or into {plan}."
            )
        if not _exists(target):
            raise InputError(
                f"the plan in {plan} calls {target}, but importing {file} does not register it; "
                "register it at the top level of that file, or compile the plan again if it was renamed."
            )


def _exists(target: str) -> bool:
    namespace, name, overload = target.split(".")
    return hasattr(getattr(getattr(torch.ops, namespace), name, None), overload)


def _import(module: str, files: Sequence[Path]) -> bool:
    """Import a module from the first of these files that is there, else by its name; tell whether one was found."""
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        return bool(module) and _import_installed(module)
    root = root_of(module, file)
    if root is None:
        load_file(file)
        return True
    # From its root, so that what it imports of its own package is there too.
    sys.path.insert(0, str(root))
    try:
        with running(file, "cannot be imported"):
            importlib.import_module(module)
    finally:
        sys.path.remove(str(root))
    return True


def _import_installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if module.startswith(str(error.name)):
            return False
        raise
    return True
