"""Copies, for plan directories, of the users' files that register operators, and of the modules that these import."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from superscaler.specs.registered import REGISTERED, Registered
from superscaler.specs.user_file import is_installed
from superscaler.store.folder import digest
from superscaler.store.plan import OPERATORS


def copies(targets: Iterable[str]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the entries of operators in plan.json, by target, and the files that go into its directory.

    A module lies where its name says, so that it is imported by name; a file that is run by its path lies in a numbered
    folder. Modules of installed packages are not copied, and typed-in code is in no file. None stands for an
    unregistered operator.
    """
    files: dict[str, bytes] = {}
    rules = {target: REGISTERED.get(target) for target in sorted(targets)}
    return {target: rule and _home(rule, files) for target, rule in rules.items()}, files


def _home(rule: Registered, files: dict[str, bytes]) -> dict[str, str]:
    """Add the copies that an operator needs; return the file and module that register it."""
    name = ""
    if not rule.module and rule.file:
        path = Path(rule.file).name
        places = (f"{OPERATORS}/{number}/{path}" for number in count(1))
        name = next(place for place in places if files.get(place, rule.source) == rule.source)
        files[name] = rule.source
        _add_imports(rule.source, "", files)
    elif rule.module and not is_installed(rule.file):
        _add(rule.module, files)
        name = _place(rule.module, rule.file)
    return {"module": rule.module, "file": name, "sha256": digest(rule.source)}


def _place(module: str, file: str) -> str:
    path = module.replace(".", "/")
    return f"{OPERATORS}/{path}/__init__.py" if Path(file).name == "__init__.py" else f"{OPERATORS}/{path}.py"


def _add(name: str, files: dict[str, bytes]) -> None:
    """Add a loaded module, if it is the user's own, with the packages that it is in and all that they import."""
    parent = name.rpartition(".")[0]
    if parent:
        _add(parent, files)
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    is_own = file.endswith(".py") and not is_installed(file) and name.split(".")[0] != "superscaler"
    if not is_own or _place(name, file) in files:
        return
    sources = {rule.file: rule.source for rule in REGISTERED.values()}
    source = files[_place(name, file)] = sources.get(file) or Path(file).read_bytes()
    _add_imports(source, name if Path(file).name == "__init__.py" else parent, files)


def _add_imports(source: bytes, package: str, files: dict[str, bytes]) -> None:
    for imported in _imports(source, package):
        _add(imported, files)


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Yield the names that a module of a package may import; some are names inside a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
