"""Side effects of a forward that a captured step would lose: found while it runs, and refused."""

import pickle
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from superscaler.errors import CaptureError
from superscaler.frontend.base.refusals import SETS_DRAWS, blocked, forward_line, line_of
from superscaler.frontend.effects.places import Lines, Places, line_of_set, recorded
from superscaler.frontend.effects.state import Array, State, changed, of_draws, state_of

# The seed of torch's generators during an export. No forward sets the same one.
_SEED = 0x5CA1AB1E


class StateWasSet(Exception):
    """The first call of a module set state that later calls read, so the graph of a later one is needed."""

    def __init__(self, message: str, found: Sequence[tuple[Any, str]]) -> None:
        super().__init__(message)
        kept = ((o, n) for o, n in found if n in getattr(o, "__dict__", ()) and not isinstance(o, type))
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
    """Raise CaptureError for a view of a trained parameter in a module: its copy would not follow updates. Raise it for
    memory of numpy's that the module holds, too: its changes would not come into the copy.
    """
    parameters = [(name, p) for name, p in module.named_parameters() if name in trained]
    spans = {p.untyped_storage()._cdata: (name, p) for name, p in parameters}
    others: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
    leaves = [(path, x) for path, (_, value) in state_of(module).items() for x in pytree.tree_leaves(value)]
    others = [(n, x) for n, x in [*others, *leaves] if isinstance(x, Tensor) and not x.is_sparse and x.numel() > 0]
    _refuse_arrays(module, others, [(path, x) for path, x in leaves if isinstance(x, Array)])
    for name, x in others:
        found = spans.get(x.untyped_storage()._cdata)
        if found is not None and found[1] is not x and _overlap(found[1], x):
            raise CaptureError(
                f"{name.removeprefix('self.')} of {type(module).__name__} shares memory with parameter {found[0]}, "
                "which training changes, but a captured step has a copy of it; compute it from the parameter in the "
                "forward, or tie modules by assigning the parameter itself."
            )


def _refuse_arrays(
    module: nn.Module, tensors: Sequence[tuple[str, Tensor]], arrays: Sequence[tuple[str, Array]]
) -> None:
    """Raise CaptureError for a tensor in the memory of an array that the module holds."""
    for name, x in tensors:
        if x.device.type != "cpu" or is_traceable_wrapper_subclass(x) or not arrays:
            continue
        start = x.data_ptr()
        for path, array in arrays:
            if start < array.address + array.size and array.address < start + x.nbytes:
                raise CaptureError(
                    f"{name.removeprefix('self.')} of {type(module).__name__} shares memory with the array {path} of "
                    "numpy, but a captured step has a copy of it, which does not follow the array; give it "
                    "torch.tensor(array), and change that by torch."
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
        for generator in _generators():
            generator.manual_seed(_SEED)
        given, before, draws = _flat(args, kwargs), state_of(module), _draws()
        buffers, named = [(buffer, buffer.clone()) for buffer in module.buffers()], Places(module, lines)
        result = forward(*args, **kwargs)
        named.take()
        after = state_of(module)
        _refuse_draws(module, draws, _draws())
        if found := changed(before, after):
            if not any(isinstance(x, Tensor) for path in found for x in pytree.tree_leaves(after[path][1])):
                owned = [(after[path][0], path.rpartition(".")[2]) for path in found]
                raise StateWasSet(_message(module, found[0], after, lines), owned)
            # Changes of buffers by the first run are undone: a step runs the forward once.
            for buffer, value in buffers:
                buffer.copy_(value)
            result = forward(*args, **kwargs)
            named.take()
        if found := changed(after, state := state_of(module)):
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


def _generators() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


def _draws() -> dict[str, Any]:
    """Return the states of the random numbers of Python, of numpy and of torch."""
    numpy = sys.modules.get("numpy")
    return {
        "Python": random.getstate(),
        "numpy": None if numpy is None else pickle.dumps(numpy.random.get_state()),
        "torch": [of_draws(g) for g in _generators()],
    }


def _refuse_draws(module: nn.Module, before: dict[str, Any], after: dict[str, Any]) -> None:
    if before["torch"] != after["torch"]:
        raise CaptureError(f"{forward_line(module)} {SETS_DRAWS}.")
    for name in ("Python", "numpy"):
        if before[name] != after[name]:
            raise CaptureError(
                f"{forward_line(module)} draws random numbers of {name}, but a captured step would have the same ones "
                "always; draw them by torch, or pass them in as an input."
            )
