"""Operators of users in a plan directory: copies of the files that register them, to be imported by ranks."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from typing import Any

import torch

from superscaler.errors import InputError
from superscaler.specs.registered import REGISTERED, Registered
from superscaler.specs.user_file import is_installed, locating
from superscaler.store.folder import digest
from superscaler.store.plan import OPERATORS


def copies(targets: Iterable[str]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the entries of operators in plan.json, by target, and the files to copy into its directory.

    A module has the path of its dotted name, so that it is imported by name; a file that is run by its path has a
    numbered folder. Modules of installed packages are not copied, and typed-in code is in no file. None stands for an
    unregistered operator.
    """
    files: dict[str, bytes] = {}
    rules = {target: REGISTERED.get(target) for target in sorted(targets)}
    return {target: rule and _home(rule, files) for target, rule in rules.items()}, files


def _home(rule: Registered, files: dict[str, bytes]) -> dict[str, str]:
    """Add the copies that an operator needs; return the file and module of its registration."""
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
    """Add a loaded module, if it is the user's own, with its packages and all its imports."""
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


def import_operators(
    operators: Mapping[str, Any], sources: Mapping[str, bytes], plan: Path, is_checked: bool = True
) -> None:
    """Import the copied files of operators that are not registered in this process.

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
    """A loader that runs the checked text, never cached bytecode of it."""

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
