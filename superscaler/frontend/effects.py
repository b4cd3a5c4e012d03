"""Side effects of a forward that a captured step would lose: found while it runs, and refused."""

import inspect
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks
from torch.utils import _pytree as pytree

from superscaler.errors import CaptureError
from superscaler.frontend.places import Lines, Places, join, line_of_set, recorded
from superscaler.frontend.refusals import blocked, forward_line, is_model, line_of

_STANDARD = frozenset(nn.Module().__dict__)
_PLAIN = (bool, int, float, str)
_CONTAINERS = (list, dict, deque)
_HELD = (*_PLAIN, *_CONTAINERS, Tensor)
# The place of a value, as the user's code names it -> its owner, and the value.
State = dict[str, tuple[Any, Any]]


class StateWasSet(Exception):
    """The first call of a module set state that later calls read, so the graph of a later one is needed."""

    def __init__(self, message: str, found: Sequence[tuple[Any, str]]) -> None:
        super().__init__(message)
        kept = ((owner, name) for owner, name in found if name in vars(owner) and not isinstance(owner, type))
        self._values = [(owner, name, vars(owner)[name]) for owner, name in kept]

    def restore(self) -> None:
        for owner, name, value in self._values:
            vars(owner)[name] = value


def refuse_hooks(module: nn.Module) -> None:
    """Raise CaptureError for a hook that changes gradients: mirrors differentiate the captured operators alone."""
    found = {f"parameter {n}": (p._backward_hooks, p._post_accumulate_grad_hooks) for n, p in module.named_parameters()}
    modules = module.named_modules()
    found |= {f"module {n or type(m).__name__}": (m._backward_hooks, m._backward_pre_hooks) for n, m in modules}
    found["all modules"] = (_global_backward_hooks, _global_backward_pre_hooks)
    hooked = [(name, hook) for name, tables in found.items() for table in tables for hook in (table or {}).values()]
    if hooked:
        (name, hook), *_ = hooked
        where = line_of(hook)
        raise CaptureError(
            f"{len(hooked)} gradient hooks would be lost, the first that of {name}{f' ({where})' if where else ''}; "
            "remove them for capture, and write what they do as an operator of the forward."
        )


def refuse_shared(module: nn.Module, trained: Mapping[str, Any]) -> None:
    """Raise CaptureError for a view of a trained parameter in a module: its copy would not follow updates."""
    parameters = [(name, p) for name, p in module.named_parameters() if name in trained]
    spans = {p.untyped_storage()._cdata: (name, p) for name, p in parameters}
    others: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
    others += [(path, x) for path, (_, value) in _state(module).items() for x in pytree.tree_leaves(value)]
    for name, x in others:
        is_dense = isinstance(x, Tensor) and not x.is_sparse and x.numel() > 0
        found = spans.get(x.untyped_storage()._cdata) if is_dense else None
        if found is not None and found[1] is not x and _overlap(found[1], x):
            raise CaptureError(
                f"{name.removeprefix('self.')} of {type(module).__name__} shares memory with parameter {found[0]}, "
                "which training changes, but a captured step has a copy of it; compute it from the parameter in the "
                "forward, or tie modules by assigning the parameter itself."
            )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage may share an element."""
    (a, b), (c, d) = map(_span, (one, other))
    return a < d and c < b


def _span(x: Tensor) -> tuple[int, int]:
    """Return the range of bytes of a tensor in its storage."""
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(x.shape, x.stride(), strict=True))
    start = int(x.storage_offset()) * x.element_size()
    return start, start + (last + 1) * x.element_size()


def call(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's forward during export. Raises CaptureError for effects that the graph would lose silently.

    The graph of a second run is taken if the first one sets state once (a cache). A tensor as state needs no other
    export; any other state raises StateWasSet, so that the caller exports once more.
    """
    with blocked(), recorded() as lines:
        given, before, draws = _flat(args, kwargs), _state(module), _draws()
        buffers, named = [(buffer, buffer.clone()) for buffer in module.buffers()], Places(module, lines)
        result = forward(*args, **kwargs)
        named.take()
        after = _state(module)
        if (drawn := _draws()) != draws:
            raise CaptureError(
                f"{forward_line(module)} draws random numbers of "
                f"{'Python' if drawn[0] != draws[0] else 'numpy'}, but a captured step would have the same ones "
                "always; draw them by torch, or pass them in as an input."
            )
        if found := _changed(before, after):
            if not any(isinstance(x, Tensor) for path in found for x in pytree.tree_leaves(after[path][1])):
                owned = [(after[path][0], path.rpartition(".")[2]) for path in found]
                raise StateWasSet(_message(module, found[0], after, lines), owned)
            # Changes of buffers by the first run are undone: a step runs the forward once.
            for buffer, value in buffers:
                buffer.copy_(value)
            result = forward(*args, **kwargs)
            named.take()
        if found := _changed(after, state := _state(module)):
            raise CaptureError(_message(module, found[0], state, lines))
        if _flat(args, kwargs) != given:
            raise CaptureError(
                f"{forward_line(module)} changes the lists or dicts among its inputs, which the captured step would "
                "not; build new ones."
            )
        named.write()
    return result


def _message(module: nn.Module, path: str, state: State, lines: Lines) -> str:
    owner = state[path][0]
    where = line_of_set(lines, owner if isinstance(owner, nn.Module) else module, path.rpartition(".")[2])
    return (
        f"{where} changes {path} in every call, which the captured step would not; pass such state in as an input, and "
        "return what you want to watch."
    )


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[int], str]:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return [id(leaf) for leaf in leaves], str(spec)


def _draws() -> list[Any]:
    """Return the states of the random numbers of Python and of numpy."""
    numpy = sys.modules.get("numpy")
    return [random.getstate(), None if numpy is None else pickle.dumps(numpy.random.get_state())]


def _state(module: nn.Module) -> State:
    """Return the state of modules, their classes, plain objects and the user's functions between calls, by path."""
    found: State = {f"{name}.requires_grad": (p, p.requires_grad) for name, p in module.named_parameters()}
    seen: set[int] = set()
    for kind in dict.fromkeys(kind for m in module.modules() for kind in type(m).__mro__ if _is_own(kind)):
        found |= {f"{kind.__name__}.{n}": (kind, _held(x)) for n, x in vars(kind).items() if isinstance(x, _HELD)}
    for name, owner in module.named_modules():
        for attribute, value in owner.__dict__.items():
            if attribute not in _STANDARD:
                path = join("self", name, attribute)
                found[path] = owner, _held(value)
                found |= _fields(path, value)
        found |= {join("self", name, key): (owner, x) for key, x in owner._buffers.items()}
        hooks = (*owner._forward_hooks.values(), *owner._forward_pre_hooks.values())
        for function in (type(owner).forward, *hooks):
            if id(function) not in seen:
                seen.add(id(function))
                found |= _kept(function)
    return found


def _kept(function: Any) -> State:
    """Return the values that a function of the user's own takes from its surroundings."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType) or not is_model(function.__code__.co_filename, own=True):
        return {}
    values = {n: function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            # The attribute is not set yet.
            continue
    found: State = {}
    for name, value in values.items():
        if isinstance(value, _HELD):
            found[name] = function, _held(value)
        found |= _fields(name, value)
    return found


def _fields(path: str, value: Any) -> State:
    """Return the attributes of an object of the user's own classes."""
    is_own = _is_own(type(value)) and not isinstance(value, nn.Module | type)
    fields = getattr(value, "__dict__", {}) if is_own else {}
    return {f"{path}.{name}": (value, _held(x)) for name, x in fields.items()}


def _is_own(kind: type) -> bool:
    """Return whether a class is the user's own."""
    return is_model(getattr(sys.modules.get(kind.__module__), "__file__", None) or "", own=True)


def _changed(before: State, after: State) -> list[str]:
    """Return the paths whose values differ."""
    return [p for p, (_, value) in after.items() if _differs(before.get(p, (None, None))[1], value)]


def _held(value: Any) -> Any:
    return tuple(value.items() if isinstance(value, dict) else value) if isinstance(value, _CONTAINERS) else value


def _differs(before: Any, after: Any) -> bool:
    if isinstance(after, tuple):
        same = isinstance(before, tuple) and len(before) == len(after)
        return not same or any(_differs(b, a) for b, a in zip(before, after, strict=True))
    if isinstance(after, _PLAIN):
        return bool(before != after)
    return isinstance(after, Tensor) and before is not after
