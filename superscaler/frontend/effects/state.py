"""The state that a forward keeps between its calls, as far as it can be seen: a captured step would not change it."""

from __future__ import annotations

import inspect
import itertools
import random
import sys
import warnings
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from copyreg import _slotnames  # type: ignore[attr-defined]
from dataclasses import dataclass
from operator import length_hint
from types import FunctionType, GeneratorType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from superscaler.frontend.base.refusals import is_model
from superscaler.frontend.effects.places import join
from superscaler.frontend.effects.untouched import is_searched, names_in

_STANDARD = frozenset(nn.Module().__dict__)
_PLAIN = (bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, dict, deque)
# Containers and objects are looked into so deep. Of larger arrays only the place is compared.
_DEEP, _MOST = 3, 1 << 26
# The place of a value, as the user's code names it -> its owner, and the value.
State = dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Array:
    """The bytes of an array of numpy, and its address."""

    data: bytes
    address: int
    size: int


def state_of(module: nn.Module) -> State:
    """Return the state of modules, their classes, plain objects and the user's functions between calls, by path."""
    found: State = {f"{name}.requires_grad": (p, p.requires_grad) for name, p in module.named_parameters()}
    kinds = dict.fromkeys(kind for m in module.modules() for kind in type(m).__mro__ if _is_own(kind))
    seen: dict[Any, Any] = {}
    for kind in kinds:
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType):
                found |= _kept(value, seen)
            elif _is_state(value):
                found[f"{kind.__name__}.{name}"] = kind, held(value)
    for name, owner in module.named_modules():
        for attribute, value in owner.__dict__.items():
            if attribute not in _STANDARD:
                path = join("self", name, attribute)
                found[path] = owner, held(value)
                found |= _kept(value, seen) if isinstance(value, FunctionType) else _fields(path, value, seen)
        found |= {join("self", name, key): (owner, x) for key, x in owner._buffers.items()}
        for hook in (*owner._forward_hooks.values(), *owner._forward_pre_hooks.values()):
            found |= _kept(hook, seen)
    return found


def changed(before: State, after: State) -> list[str]:
    """Return the paths whose values differ."""
    return [p for p, (_, value) in after.items() if _differs(before.get(p, (None, None))[1], value)]


def held(value: Any, deep: int = _DEEP) -> Any:
    """Return a value as plain data: tensors as they are, None for an object whose state is not seen."""
    if isinstance(value, (*_PLAIN, Tensor)):
        return value
    if isinstance(value, _CONTAINERS):
        if not deep:
            return len(value)
        keys = tuple(map(held, value)) if isinstance(value, dict) else ()
        return keys, tuple(held(x, deep - 1) for x in (value.values() if isinstance(value, dict) else value))
    return next((read(value) for kind, read in _SEEN if isinstance(value, kind)), None)


def of_draws(generator: torch.Generator) -> bytes:
    """Return the state of random numbers of torch, also while torch.export traces."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return generator.get_state().numpy().tobytes()


def _of_generator(generator: GeneratorType[Any, Any, Any]) -> Any:
    frame = generator.gi_frame
    return None if frame is None else (frame.f_lasti, held(dict(frame.f_locals)))


def _of_iterator(iterator: Any) -> Any:
    """Return the place that an iterator of Python's own has reached, if it shows."""
    if type(iterator).__module__ not in ("builtins", "itertools"):
        return None
    if (left := length_hint(iterator, -1)) >= 0:
        return left
    # Those of itertools say it until Python 3.14.
    with warnings.catch_warnings(), suppress(TypeError, AttributeError):
        warnings.simplefilter("ignore")
        return held(iterator.__reduce__()[1:])
    return None


def _of_array(x: Any) -> Array:
    small = x.nbytes <= _MOST and x.dtype != object
    return Array(x.tobytes() if small else b"", x.__array_interface__["data"][0], x.nbytes)


# Kinds of objects -> how their state is read.
_SEEN: tuple[tuple[Any, Any], ...] = (
    (np.ndarray, _of_array),
    (np.generic, lambda x: x.item()),
    ((bytearray, array), bytes),
    ((set, frozenset), lambda x: tuple(sorted(map(repr, x)))),
    (torch.Generator, lambda g: of_draws(g)),
    (random.Random, lambda g: hash(g.getstate())),
    (np.random.Generator, lambda g: str(g.bit_generator.state)),
    (np.random.RandomState, lambda g: str(g.get_state(legacy=False))),
    (GeneratorType, _of_generator),
    ((itertools.count, itertools.repeat), repr),
    (Iterator, lambda x: _of_iterator(x)),
)


def _is_state(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, *_CONTAINERS, Tensor)) or any(isinstance(value, kind) for kind, _ in _SEEN)


def _kept(function: Any, seen: dict[Any, Any]) -> State:
    """Return the values that a function of the user's own, and such functions that it names, take from around them."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType) or not is_model(function.__code__.co_filename, own=True):
        return {}
    if id(function) in seen:
        return {}
    seen[id(function)] = function
    values = {n: function.__globals__[n] for n in names_in(function.__code__) if n in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            # The attribute is not set yet.
            continue
    named = [*inspect.signature(function).parameters.values()]
    values |= {p.name: p.default for p in named if p.default is not inspect.Parameter.empty}
    values |= {f"{function.__name__}.{name}": value for name, value in vars(function).items()}
    found: State = {}
    for name, value in values.items():
        # Functions of two files may have other values of one name.
        path = name if seen.setdefault(name, value) is value else f"{function.__module__}.{name}"
        if isinstance(value, FunctionType):
            found |= _kept(value, seen)
        elif _is_state(value):
            found[path] = function, held(value)
        else:
            found |= _fields(path, value, seen)
    return found


def _fields(path: str, value: Any, seen: dict[Any, Any], deep: int = _DEEP) -> State:
    """Return the attributes of an object, and of the objects in them, that no library of torch's or Python's made."""
    kind = type(value)
    is_seen = isinstance(value, SimpleNamespace | Namespace) or is_searched(kind)
    if not is_seen or isinstance(value, nn.Module | type | Tensor) or id(value) in seen or not deep:
        return {}
    seen[id(value)] = value
    fields = {name: getattr(value, name) for name in _slotnames(kind) if hasattr(value, name)}
    found: State = {}
    for name, x in {**fields, **getattr(value, "__dict__", {})}.items():
        found[f"{path}.{name}"] = value, held(x)
        found |= _fields(f"{path}.{name}", x, seen, deep - 1)
    return found


def _is_own(kind: type) -> bool:
    """Return whether a class is the user's own."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ == "__main__" or is_model(file, own=True)


def _differs(before: Any, after: Any) -> bool:
    if isinstance(after, tuple):
        same = isinstance(before, tuple) and len(before) == len(after)
        return not same or any(_differs(b, a) for b, a in zip(before, after, strict=True))
    if isinstance(after, Tensor):
        return before is not after
    return after is not None and (type(before) is not type(after) or bool(before != after))
