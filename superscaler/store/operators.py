"""Operators of users in a plan directory: the files that register them, to be imported by ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from superscaler.errors import InputError
from superscaler.specs.registered import REGISTERED
from superscaler.specs.user_file import first_on_path, is_installed, load_file, locating, root_of
from superscaler.store.folder import digest


def homes(targets: Iterable[str]) -> dict[str, Any]:
    """Return the entries of operators in plan.json, by target: the module and file that register it, and its hash.

    The module is empty for a file that is run by its path, both for typed-in code. None stands for an unregistered
    operator.
    """
    rules = {target: REGISTERED.get(target) for target in sorted(targets)}
    return {
        target: rule and {"module": rule.module, "file": rule.file, "sha256": digest(rule.source)}
        for target, rule in rules.items()
    }


def import_operators(operators: Mapping[str, Any], plan: Path, is_checked: bool = True) -> None:
    """Import what registers the operators of a plan directory that are not registered in this process.

    Raises InputError for an operator that is then still missing, and (if `is_checked`) for one that another file
    registers.
    """
    for target, home in operators.items():
        if not _exists(target):
            _import(target, home, plan, is_checked)
    for target, home in operators.items():
        rule = REGISTERED.get(target)
        if is_checked and home and rule:
            _check(target, home, rule.place, rule.source, plan)


def _exists(target: str) -> bool:
    namespace, name, overload = target.split(".")
    return hasattr(getattr(getattr(torch.ops, namespace), name, None), overload)


def _import(target: str, home: Mapping[str, str] | None, plan: Path, is_checked: bool) -> None:
    if home is None:
        raise InputError(
            f"the plan in {plan} calls {target}, which nothing here defines; give it a notation with "
            "superscaler.register and compile the plan again, or import what defines it before the plan is loaded."
        )
    file = _find(home)
    if file is None:
        what = f"module {home['module']} of " * bool(home["module"])
        raise InputError(
            f"the plan in {plan} calls {target}, which {what}{home['file']} registers, but that file is not here; put "
            "the folder from which it is imported on PYTHONPATH, or import it before the plan is loaded."
        )
    if is_checked:
        _check(target, home, str(file), file.read_bytes(), plan)
    if home["module"]:
        _import_module(home["module"], file)
    else:
        load_file(file, is_new=False)
    if not _exists(target):
        raise InputError(
            f"the plan in {plan} calls {target}, but importing {file} does not register it; "
            "register it at the top level of that file, and compile the plan again."
        )


def _import_module(name: str, file: Path) -> None:
    root = None if is_installed(str(file)) else root_of(name, file)
    with first_on_path(root) if root else nullcontext(), locating(file, "cannot be imported"):
        importlib.import_module(name)


def _find(home: Mapping[str, str]) -> Path | None:
    """Return the file that registered an operator, or else one that has its module's name on `sys.path`."""
    file = Path(home["file"])
    if file.is_file():
        return file
    name = home["module"] or file.stem
    with locating(Path(name), "cannot be imported"):
        try:
            found = find_spec(name)
        except (ImportError, ValueError):
            return None
    return Path(found.origin) if found and found.has_location and found.origin else None


def _check(target: str, home: Mapping[str, str], place: str, source: bytes, plan: Path) -> None:
    """Raise InputError if a source is not the one whose hash a plan has."""
    if digest(source) != home["sha256"]:
        raise InputError(
            f"{target} is registered by {place}, which is not {home['file']} as it was when the plan in {plan} was "
            "compiled; restore that file and load the plan in a process of its own, or compile the plan again."
        )
