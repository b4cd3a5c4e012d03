"""What runs of a module leave behind is put back: attributes, containers, tensors, caches, random numbers.

torch.export runs a forward on tensors without data, and the checks run it in other dtypes: what it keeps of such a run
would be read by the next one. The objects that a module reaches are searched once before the runs, and each that
changed gets its old contents. torch's and Python's own objects, loggers and trainers are not searched.
"""

import functools
import random
import sys
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copyreg import _slotnames  # type: ignore[attr-defined]
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from superscaler.frontend.base.oracle import is_same
from superscaler.frontend.base.refusals import is_model
from superscaler.replaced import own_numbers, variable

_MISSING = object()
_LRU = type(functools.lru_cache(lambda: None))
_ATOMS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    ModuleType,
    CodeType,
)
# Packages whose objects other threads and the loop itself may change meanwhile.
_OTHERS = frozenset({"torch", "superscaler", "lightning", "pytorch_lightning", "accelerate", "rich", "tqdm"})
_NAMESPACES = (SimpleNamespace, Namespace, nn.Module)
# Tensors and arrays of more bytes are not copied.
_MOST = 1 << 30
# Puts an object back.
Put = Callable[[], None]


@contextmanager
def untouched(module: nn.Module, *others: Any) -> Iterator[None]:
    """Restore a module, the other objects, what they reach, and the random generators after the block."""
    kept = _Kept(module)
    kept.search([module, *others])
    with own_numbers(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        try:
            yield
        finally:
            # A mode of the caller would record what is put back.
            with torch.no_grad(), torch._C.DisableTorchFunction():
                for put in kept.puts:
                    put()


def without_checks() -> AbstractContextManager[None]:
    """Leave out the checks of values in models of transformers: a tensor without data has none."""
    return variable("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")


class _Kept:
    """The contents of objects, and what puts them back."""

    def __init__(self, module: nn.Module) -> None:
        self.puts: list[Put] = []
        # No object may be freed, and its id given to another, during the search.
        self._seen: dict[int, Any] = {}
        # torch.export and the checks put other tensors in their place, and a copy of all would need as much memory.
        self._parameters = {id(p) for p in module.parameters()}
        # By class: what keeps its objects, and which of its bases are searched.
        self._keepers: dict[type, Keep | None] = {}
        self._bases: dict[type, tuple[list[str], list[type]]] = {}

    def search(self, values: Iterable[Any]) -> None:
        todo = list(values)
        while todo:
            value = todo.pop()
            kind = type(value)
            if kind not in self._keepers:
                self._keepers[kind] = _keeper(kind)
            keep = self._keepers[kind]
            if keep is not None and id(value) not in self._seen:
                self._seen[id(value)] = value
                todo += keep(self, value)

    def _dict(self, held: dict[Any, Any]) -> Iterable[Any]:
        kind = OrderedDict if isinstance(held, OrderedDict) else dict
        keys, values = [*held.keys()], [*held.values()]

        def put() -> None:
            if not _is_alike(held.keys(), keys) or not _is_alike(held.values(), values):
                kind.clear(held)
                for key, value in zip(keys, values, strict=True):
                    kind.__setitem__(held, key, value)

        self.puts.append(put)
        return [*values, getattr(held, "__dict__", None)]

    def _list(self, held: Any) -> Iterable[Any]:
        saved = list(held)

        def put() -> None:
            if not _is_alike(held, saved):
                held.clear()
                held.extend(saved)

        self.puts.append(put)
        return [*saved, getattr(held, "__dict__", None)]

    def _set(self, held: set[Any]) -> Iterable[Any]:
        saved = set(held)

        def put() -> None:
            if held != saved:
                held.clear()
                held.update(saved)

        self.puts.append(put)
        return ()

    def _object(self, owner: Any) -> Iterable[Any]:
        if (kind := type(owner)) not in self._bases:
            self._bases[kind] = _slotnames(kind), [base for base in kind.__mro__ if is_searched(base)]
        names, bases = self._bases[kind]
        if names:
            self._attributes(owner, names)
        return [*(getattr(owner, name, None) for name in names), getattr(owner, "__dict__", None), *bases]

    def _attributes(self, owner: Any, names: Iterable[str]) -> None:
        saved = {name: getattr(owner, name, _MISSING) for name in names}

        def put() -> None:
            for name, value in saved.items():
                if getattr(owner, name, _MISSING) is not value:
                    delattr(owner, name) if value is _MISSING else setattr(owner, name, value)

        self.puts.append(put)

    def _class(self, kind: type) -> Iterable[Any]:
        if not is_searched(kind):
            return ()
        saved = dict(vars(kind))

        def put() -> None:
            now = dict(vars(kind))
            for name in now.keys() - saved.keys():
                type.__delattr__(kind, name)
            for name, value in saved.items():
                if now.get(name, _MISSING) is not value:
                    type.__setattr__(kind, name, value)

        self.puts.append(put)
        return [getattr(value, "fget", getattr(value, "__func__", value)) for value in saved.values()]

    def _function(self, function: FunctionType) -> Iterable[Any]:
        self._attributes(function, ("__defaults__", "__kwdefaults__"))
        inside = [function.__defaults__, function.__kwdefaults__, vars(function), *(function.__closure__ or ())]
        if is_model(function.__code__.co_filename, own=True) and not _is_other(function.__module__):
            inside += self._globals(function)
        return inside

    def _globals(self, function: FunctionType) -> list[Any]:
        home, names = function.__globals__, names_in(function.__code__)
        saved = {name: home.get(name, _MISSING) for name in names}

        def put() -> None:
            for name, value in saved.items():
                if value is _MISSING:
                    home.pop(name, None)
                elif home.get(name, _MISSING) is not value:
                    home[name] = value

        self.puts.append(put)
        return [value for value in saved.values() if value is not _MISSING]

    def _cell(self, cell: CellType) -> Iterable[Any]:
        try:
            saved = cell.cell_contents
        except ValueError:
            # It is not set yet.
            return ()

        def put() -> None:
            cell.cell_contents = saved

        self.puts.append(put)
        return (saved,)

    def _cache(self, cached: Any) -> Iterable[Any]:
        misses = cached.cache_info().misses
        # The entries cannot be read. They are made again.
        self.puts.append(lambda: cached.cache_clear() if cached.cache_info().misses != misses else None)
        return (cached.__wrapped__,)

    def _tensor(self, x: Tensor) -> Iterable[Any]:
        if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided:
            # A tensor of another class may have no memory of its own.
            return (vars(x),)
        grad, wants, data = x.grad if x.is_leaf else None, x.requires_grad, x.detach()
        values = data.clone() if id(x) not in self._parameters and _has_values(x) else None

        def put() -> None:
            if x.is_leaf and (x.requires_grad is not wants or x.grad is not grad):
                x.requires_grad_(wants).grad = grad
            if _place(x) != _place(data):
                x.data = data
            if values is not None and not is_same(data, values).all():
                with torch.inference_mode(data.is_inference()):
                    data.copy_(values)

        self.puts.append(put)
        return vars(x), grad

    def _array(self, held: Any) -> Iterable[Any]:
        if held.flags.writeable and held.nbytes <= _MOST:
            saved = held.copy()
            # Objects in an array are compared by identity.
            self.puts.append(lambda: None if held.tobytes() == saved.tobytes() else np.copyto(held, saved))
        return held.tolist() if held.dtype == object else ()

    def _draws(self, generator: Any) -> Iterable[Any]:
        read, write = next((read, write) for kind, read, write in _GENERATORS if isinstance(generator, kind))
        saved = read(generator)
        self.puts.append(lambda: write(generator, saved))
        return ()


# Random generators -> how their states are read and set.
_GENERATORS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (random.Random, lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    (np.random.RandomState, lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    (
        np.random.Generator,
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
)
Keep = Callable[[_Kept, Any], Iterable[Any]]
# What an object is -> what keeps its contents, and returns the objects in it.
_KEEPERS: tuple[tuple[Any, Keep], ...] = (
    (Tensor, _Kept._tensor),
    (type, _Kept._class),
    (_NAMESPACES, _Kept._object),
    (dict, _Kept._dict),
    ((list, deque), _Kept._list),
    (set, _Kept._set),
    ((tuple, frozenset), lambda kept, held: held),
    (FunctionType, _Kept._function),
    (MethodType, lambda kept, bound: (bound.__self__, bound.__func__)),
    (functools.partial, lambda kept, made: (made.func, made.args, made.keywords, vars(made))),
    (CellType, _Kept._cell),
    (_LRU, _Kept._cache),
    (np.ndarray, _Kept._array),
    (tuple(kind for kind, *_ in _GENERATORS), _Kept._draws),
)


def _keeper(kind: type) -> Keep | None:
    """Return the keeper of the objects of a class, None for those that cannot change or are not searched."""
    found = next((keep for kinds, keep in _KEEPERS if issubclass(kind, kinds)), None)
    return None if issubclass(kind, _ATOMS) else found or (_Kept._object if is_searched(kind) else None)


def _is_alike(some: Iterable[Any], others: list[Any]) -> bool:
    """Return whether these are the same objects."""
    found = list(some)
    return len(found) == len(others) and all(map(is_, found, others))


def _has_values(x: Tensor) -> bool:
    """Return whether a tensor has values that can be copied back: an expanded one is changed by none."""
    is_expanded = any(size > 1 and not step for size, step in zip(x.shape, x.stride(), strict=True))
    return not x.is_meta and not is_expanded and x.nbytes <= _MOST


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), 0 if x.is_meta else x.data_ptr()


def names_in(code: CodeType) -> set[str]:
    """Return the names that code, and the code of functions inside of it, may look up globally."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def is_searched(kind: type) -> bool:
    """Return whether objects of a class, and the class itself, are searched."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    # Code that was typed in is in no file.
    return not _is_other(kind.__module__) and (kind.__module__ == "__main__" or is_model(file))


def _is_other(module: str | None) -> bool:
    return (module or "").split(".")[0] in _OTHERS
