"""What a capture depends on, as one hash: the module's state and code, its inputs, the optimizer, the versions.

Whatever is found that has state or code which cannot be seen gives no hash at all. The values of parameters and of
input tensors are left out: no capture reads them.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import platform
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from superscaler.frontend import experts
from superscaler.frontend.rules import REGISTERED
from superscaler.frontend.trace import shorten

_PACKAGE = Path(__file__).parents[1]
_SOURCES = ("frontend", "ir", "models")
_LIBRARIES = tuple(sysconfig.get_paths()[k] for k in ("stdlib", "purelib", "platlib"))
# What these are is said by their versions, or by _SOURCES.
_VERSIONED = frozenset(
    {"torch", "torchgen", "functorch", "numpy", "superscaler", *sys.stdlib_module_names} - {"__main__"}
)
# A function that names one of these may read what no hash sees.
_HIDDEN = frozenset({"__import__", "import_module", "environ", "getenv", "open", "load_file"})
# What a class has of Python's, and what is made of its annotations.
_OF_CLASSES = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__abstractmethods__"}
    | {"_abc_impl", "__parameters__", "__orig_bases__", "__dataclass_fields__", "__dataclass_params__"}
    | {"__static_attributes__", "__firstlineno__"}
)
# What Hugging Face keeps of Python's own hash, which is another one in each process.
_RANDOM = "_original_object_hash"
_MOST = 5000


class Unseen(Exception):
    """Something that a capture may depend on cannot be hashed."""


def fingerprint(module: nn.Module, args: Any, kwargs: Mapping[str, Any], *options: Any) -> str | None:
    """Return the hash of what a capture depends on, its `options` included, or None where not all of it is seen."""
    walk = _Walk()
    try:
        walk.add((*options, *_settings()))
        walk.inputs(args, kwargs)
        walk.add(module)
        for name, rule in sorted(REGISTERED.items()):
            walk.put(name)
            walk.registered(rule)
        walk.add(_interfaces())
        walk.files()
    except Exception:
        # Objects of the user's classes are asked for their state, which may raise anything.
        return None
    return walk.hash.hexdigest()


def _settings() -> tuple[Any, ...]:
    """Return the versions, our own sources, and the switches of torch that a forward sees."""
    own = hashlib.sha256()
    for file in sorted(f for part in _SOURCES for f in (_PACKAGE / part).glob("*.py")):
        own.update(file.name.encode() + file.read_bytes())
    versions = tuple(_version(name) for name in ("torch", "transformers", "numpy"))
    switches = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    device = (str(torch.get_default_device()), torch.cuda.is_available())
    return (
        sys.modules["superscaler"].__version__,
        platform.python_version(),
        own.hexdigest(),
        *versions,
        *switches,
        device,
    )


@functools.cache
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", ""))


def _interfaces() -> list[Any]:
    """Return the functions that Hugging Face models choose by a name in their config, apart from the library's own."""
    found = []
    for home, name in (
        ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
        ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
        ("transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS"),
    ):
        interface = getattr(sys.modules.get(home), name, None)
        if interface is not None:
            chosen = sorted((k, v) for k, v in interface.items() if k != experts.NAME)
            found += [pair for pair in chosen if not getattr(pair[1], "__module__", "").startswith("transformers.")]
    return found


class _Walk:
    """Hashes objects with all that they hold; what is met again is a number, so that shared is not equal."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.seen: dict[int, int] = {}
        # Numbers of objects stay theirs only as long as they live.
        self.kept: list[Any] = []
        self.modules: dict[str, None] = {}

    def put(self, *words: Any) -> None:
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            self.hash.update(len(data).to_bytes(8, "little") + data)

    def add(self, value: Any) -> None:
        self.put(type(value).__qualname__)
        if type(value) in _PLAIN:
            self.put(repr(value))
        elif type(value) is tuple:
            self.items(value)
        elif id(value) in self.seen:
            self.put(self.seen[id(value)])
        else:
            self.seen[id(value)] = len(self.seen)
            self.kept.append(value)
            how = _EXACT.get(type(value)) or next((how for kind, how in _KINDS if isinstance(value, kind)), _Walk.any)
            how(self, value)

    def items(self, values: Any) -> None:
        self.put(len(values))
        for value in values:
            self.add(value)

    def inputs(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        self.put(spec)
        for leaf in leaves:
            self.layout(leaf) if isinstance(leaf, Tensor) else self.add(leaf)

    def layout(self, x: Tensor) -> None:
        if type(x) not in (Tensor, nn.Parameter, nn.Buffer) or x.layout is not torch.strided:
            raise Unseen
        self.put(x.dtype, tuple(x.shape), x.stride(), x.device, x.requires_grad)
        self.add((x._backward_hooks, x.__dict__))

    def tensor(self, x: Tensor) -> None:
        self.layout(x)
        if not isinstance(x, nn.Parameter) and not x.is_meta:
            plain = x.detach().resolve_conj().resolve_neg().cpu().flatten().contiguous()
            self.put(plain.view(torch.uint8).numpy().tobytes())

    def array(self, x: Any) -> None:
        if x.dtype.hasobject:
            raise Unseen
        self.put(x.dtype, x.shape, x.tobytes())

    def mapping(self, value: dict[Any, Any]) -> None:
        self.items([pair for pair in value.items() if pair[0] != _RANDOM])

    def set(self, value: Any) -> None:
        if not all(type(v) in _PLAIN for v in value):
            raise Unseen
        self.put(*sorted(map(repr, value)))

    def module(self, value: nn.Module) -> None:
        if isinstance(value, torch.jit.ScriptModule):
            raise Unseen
        self.type(type(value))
        self.mapping(value.__dict__)

    def registered(self, rule: Any) -> None:
        self.put(rule.notation, rule.sizes, rule.module, shorten(rule.file), rule.line)
        self.add(rule.code)
        self.put(Path(rule.file).read_bytes())

    def partial(self, value: Any) -> None:
        self.add((value.func, value.args, value.keywords))

    def method(self, value: Any) -> None:
        self.add((value.__func__, value.__self__))

    def builtin(self, value: Any) -> None:
        self.put(value.__module__, value.__qualname__)
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, ModuleType | type(None)):
            self.add(owner)

    def function(self, f: FunctionType) -> None:
        home = f.__globals__.get("__name__", "")
        self.put(home, f.__qualname__)
        self.add(tuple(cell.cell_contents for cell in f.__closure__ or ()))
        self.add((f.__defaults__, f.__kwdefaults__, f.__dict__))
        if self.is_own(home):
            self.add(f.__code__)
            names = dict.fromkeys(_names(f.__code__))
            if _HIDDEN.intersection(names):
                raise Unseen
            self.globals(f.__globals__, names)

    def globals(self, home: Mapping[str, Any], names: Mapping[str, None], *above: str) -> None:
        """Hash what code with these names may find in a module, and in the user's modules that it finds there."""
        for name in names:
            if name in home:
                value = home[name]
                self.put(name)
                self.add(value)
                if isinstance(value, ModuleType) and value.__name__ not in above and self.is_own(value.__name__):
                    self.globals(vars(value), names, *above, value.__name__)

    def code(self, code: CodeType) -> None:
        self.put(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)
        self.put(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        self.put(code.co_firstlineno, code.co_linetable)
        self.add(code.co_consts)

    def type(self, cls: type) -> None:
        for base in cls.__mro__:
            self.put(base.__module__, base.__qualname__)
            if self.is_own(base.__module__) or _is_made(base):
                self.mapping({k: v for k, v in vars(base).items() if k not in _OF_CLASSES})

    def any(self, value: Any) -> None:
        """Hash an object by what pickle would keep of it, and by its attributes."""
        self.add(type(value))
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            self.put(reduced)
            return
        make, args, *rest = reduced
        state, items, pairs = (*rest, None, None, None)[:3]
        self.add((make, args, getattr(value, "__dict__", None), state, [*(items or ())], [*(pairs or ())]))

    def is_own(self, name: str) -> bool:
        """Tell whether a module is the user's, and note it: its text counts."""
        self.modules[name] = None
        return name.split(".")[0] not in _VERSIONED and _is_own(_file(name))

    def files(self) -> None:
        """Hash the text of all modules that were noted, and of those that they import."""
        found: dict[str, str] = {}
        left = list(self.modules)
        while left:
            name = left.pop()
            if name in found or name.split(".")[0] in _VERSIONED:
                continue
            file = _file(name)
            text = file.read_bytes() if file else b""
            found[name] = hashlib.sha256(text).hexdigest() + (shorten(str(file)) if file else "")
            if len(found) > _MOST:
                raise Unseen
            if file and _is_own(file):
                left += _imports(name, file, text) if file.suffix == ".py" else ()
            elif file:
                left += _used(name)
            elif not _is_absent(name):
                raise Unseen
        self.put(sorted(found.items()), sorted((top, _version(top)) for top in {n.split(".")[0] for n in found}))


def _file(name: str) -> Path | None:
    """Return the file of a module, loaded or a top one that could be."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
        return Path(file).resolve() if file else None
    if "." in name:
        return None
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).resolve() if spec and spec.origin and spec.has_location else None


def _is_absent(name: str) -> bool:
    """Tell whether a module without a file has no code of its own: a namespace, or one that is not there."""
    return hasattr(sys.modules[name], "__path__") if name in sys.modules else True


def _is_made(cls: type) -> bool:
    """Tell whether a class was made at run time: it is not what its module has by its name."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    is_python = bool(cls.__flags__ & 1 << 9)
    return is_python and found is not cls


def _is_own(file: Path | None) -> bool:
    return file is None or not (str(file).startswith(_LIBRARIES) or "-packages" in str(file))


def _imports(name: str, file: Path, text: bytes) -> Iterator[str]:
    """Yield the modules that a user's file names in imports, wherever in it, and the packages that they are in."""
    package = getattr(sys.modules.get(name), "__package__", None) or ""
    for node in _run(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*parents, *([node.module] if node.module else [])])
            names = [home, *(f"{home}.{alias.name}" for alias in node.names if f"{home}.{alias.name}" in sys.modules)]
        else:
            continue
        for found in names:
            words = found.split(".")
            if found not in sys.modules and _is_beside(file, found):
                raise Unseen
            yield from (".".join(words[:k]) for k in range(1, len(words) + 1) if words[0])


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a syntax tree, those under `if TYPE_CHECKING` left out."""
    yield node
    is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    for child in node.orelse if is_typing else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        yield from _run(child)


def _is_beside(file: Path, name: str) -> bool:
    """Tell whether a module that is not loaded could be the user's: it may be imported in a forward."""
    top = name.split(".")[0]
    if top in _VERSIONED:
        return False
    near = file.parent / top
    if top not in sys.modules:
        return near.is_dir() or near.with_suffix(".py").is_file() or _is_own_top(top)
    return _is_own(_file(top))


def _is_own_top(top: str) -> bool:
    spec = importlib.util.find_spec(top)
    return spec is not None and (not spec.has_location or _is_own(Path(str(spec.origin)).resolve()))


def _used(name: str) -> Iterator[str]:
    """Yield the modules of the same library from which a module has functions and classes."""
    top, module = name.split(".")[0] + ".", sys.modules.get(name)
    # One that is not loaded holds nothing yet, and a lazy one fills as it is used.
    for value in list(vars(module).values()) if type(module) is ModuleType else ():
        is_code = isinstance(value, FunctionType | type)
        home = value.__name__ if type(value) is ModuleType else value.__module__ if is_code else ""
        if isinstance(home, str) and home.startswith(top) and home in sys.modules:
            yield home


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names(value)


def _as_text(walk: _Walk, value: Any) -> None:
    walk.put(repr(value))


_PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), torch.dtype, torch.device}
    | {torch.Size, torch.layout, torch.memory_format, slice, range}
)


def _module(walk: _Walk, value: ModuleType) -> None:
    walk.is_own(value.__name__)
    walk.put(value.__name__)


_EXACT: dict[type, Callable[[_Walk, Any], None]] = {
    dict: _Walk.mapping,
    list: _Walk.items,
    set: _Walk.set,
    frozenset: _Walk.set,
}
# The first that fits an object; what fits none is hashed as pickle sees it.
_KINDS: tuple[tuple[Any, Callable[[_Walk, Any], None]], ...] = (
    (type, _Walk.type),
    (nn.Module, _Walk.module),
    (Tensor, _Walk.tensor),
    (FunctionType, _Walk.function),
    (CodeType, _Walk.code),
    (types.MethodType, _Walk.method),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _Walk.builtin),
    ((types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType), _as_text),
    ((types.MemberDescriptorType, types.GetSetDescriptorType), _as_text),
    (functools.partial, _Walk.partial),
    ((staticmethod, classmethod), lambda walk, value: walk.add(value.__func__)),
    (property, lambda walk, value: walk.add((value.fget, value.fset, value.fdel))),
    (functools.cached_property, lambda walk, value: walk.add(value.func)),
    (functools._lru_cache_wrapper, lambda walk, value: walk.add(value.__wrapped__)),
    ((OpOverload, OpOverloadPacket), lambda walk, value: walk.put(str(value))),
    (CustomOpDef, lambda walk, value: walk.add((value._qualname, value._init_fn))),
    (enum.Enum, lambda walk, value: walk.add((type(value), value.name, value.value))),
    (logging.Logger, lambda walk, value: walk.put(value.name)),
    (ModuleType, _module),
    ((types.GenericAlias, types.UnionType, type(typing.Any), type(typing.Union[int, str])), _as_text),  # noqa: UP007
    (np.ndarray, _Walk.array),
    ((torch.jit.ScriptFunction, torch.Generator), lambda walk, value: _refuse()),
)


def _refuse() -> None:
    raise Unseen
