"""Operators of users in a saved plan: a rank imports the copied files that register them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from superscaler.errors import InputError
from superscaler.specs.registered import REGISTERED
from superscaler.specs.user_file import locating
from superscaler.store.folder import digest
from superscaler.store.plan import OPERATORS


def import_operators(
    operators: Mapping[str, Any], sources: Mapping[str, bytes], plan: Path, is_checked: bool = True
) -> None:
    """Import the copied files that register operators unknown to this process.

    `operators` and `sources` (copies by file) are those of the plan directory. Raises InputError for an operator that
    is then still missing, and (if `is_checked`) for one that another file registered.
    """
    copies = _Copies(plan, operators, sources)
    if not all(map(_exists, operators)):
        copies.check()
        sys.meta_path.insert(0, copies)
        try:
            for target, home in operators.items():
                if not _exists(target):
                    _import(target, home, copies, plan)
            copies.import_rest()
        finally:
            sys.meta_path.remove(copies)
    for target, home in operators.items():
        rule = REGISTERED.get(target)
        if is_checked and home and rule and digest(rule.source) != home["sha256"]:
            theirs = f"the copy in {plan / home['file']}" if home["file"] else "the one that the plan was compiled with"
            raise InputError(
                f"{target} is registered by {rule.place}, which is not {theirs}; load the plan in a process of its "
                "own, or compile it again."
            )


def _exists(target: str) -> bool:
    namespace, name, overload = target.split(".")
    return hasattr(getattr(getattr(torch.ops, namespace), name, None), overload)


def _import(target: str, home: Mapping[str, str] | None, copies: _Copies, plan: Path) -> None:
    if home is None:
        raise InputError(
            f"the plan in {plan} calls {target}, which nothing here defines; give it a notation with "
            "superscaler.register and compile the plan again, or import what defines it before the plan is loaded."
        )
    file = plan / home["file"] if home["file"] else Path(home["module"])
    with locating(file, "cannot be imported"):
        if home["module"]:
            importlib.import_module(home["module"])
        else:
            copies.run(home["file"])
    if not _exists(target):
        raise InputError(
            f"the plan in {plan} calls {target}, but importing {file} does not register it; "
            "register it at the top level of that file, and compile the plan again."
        )


class _Copies(MetaPathFinder):
    """A finder of modules among the copies in a plan directory, so that nothing else there is imported."""

    def __init__(self, plan: Path, operators: Mapping[str, Any], sources: Mapping[str, bytes]) -> None:
        self.plan, self.sources = plan, sources
        by_path = {home["file"] for home in operators.values() if home and not home["module"]}
        self.files = {_module(name): name for name in sources if name not in by_path}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname in self.files:
            return self._spec(fullname, self.files[fullname])
        if any(name.startswith(f"{fullname}.") for name in self.files):
            # A package without a file.
            found = ModuleSpec(fullname, None, is_package=True)
            found.submodule_search_locations = []
            return found
        return None

    def _spec(self, module: str, name: str) -> ModuleSpec:
        file = self.plan / name
        found = spec_from_file_location(module, file, loader=_Source(file, self.sources[name]))
        assert found is not None
        return found

    def run(self, name: str) -> None:
        """Run a file that cannot be imported by name."""
        spec = self._spec(f"superscaler_user_{Path(name).stem}", name)
        module = sys.modules[spec.name] = module_from_spec(spec)
        assert spec.loader is not None
        spec.loader.exec_module(module)

    def import_rest(self) -> None:
        """Import the modules that functions may import when they are called."""
        for module, name in self.files.items():
            with locating(self.plan / name, "cannot be imported"):
                importlib.import_module(module)

    def check(self) -> None:
        """Raise InputError if a loaded module with the name of a copy is another one."""
        for module, name in self.files.items():
            loaded = sys.modules.get(module)
            file = getattr(loaded, "__file__", None)
            if loaded is not None and _source(loaded, file) != self.sources[name]:
                raise InputError(
                    f"{self.plan / name} cannot be imported: {module} is loaded from {file} already, which is another "
                    "one; load the plan in a process of its own, or compile it again."
                )


class _Source(SourceLoader):
    """A loader that runs the checked text, and no bytecode that Python may have kept of it."""

    def __init__(self, file: Path, source: bytes) -> None:
        self.file, self.source = file, source

    def get_filename(self, fullname: str) -> str:
        return str(self.file)

    def get_data(self, path: str | bytes) -> bytes:
        return self.source


def _module(name: str) -> str:
    """Return the name of the module of a copy.

    >>> _module("operators/package/ops.py"), _module("operators/package/__init__.py")
    ('package.ops', 'package')
    """
    return name.removeprefix(f"{OPERATORS}/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _source(loaded: object, file: str | None) -> bytes | None:
    loader = getattr(getattr(loaded, "__spec__", None), "loader", None)
    if isinstance(loader, _Source):
        return loader.source
    return Path(file).read_bytes() if file and Path(file).is_file() else None
