"""What a captured step cannot hold, in one sentence: the user's line, what it does, and what to write instead."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import _engine_run_backward
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from superscaler.errors import CaptureError
from superscaler.frontend.rules import REGISTERED
from superscaler.frontend.trace import FRAME, source_of

_PYTHON = sysconfig.get_paths()["stdlib"]
_LIBRARIES = (_PYTHON, *(sysconfig.get_paths()[k] for k in ("purelib", "platlib")))

FIXED_SHAPE = "keep a fixed shape: weigh by a mask, or use torch.where, instead of picking elements"
# What torch.export raises -> what the line does, and what to write instead.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (r"specialized integer|converted to an index", "uses a value of a tensor as a size or an index", FIXED_SHAPE),
    (
        r"Could not guard|DataDependentOutput",
        "takes a Python value out of a tensor, and what runs depends on it",
        "select with torch.where, or decide by a shape or an option of the module",
    ),
    (
        r"\.numpy\(\)",
        "calls numpy on a tensor, which no graph sees",
        "use torch's own function, and make arrays tensors before the step",
    ),
    (
        r"DeviceMismatch|same device",
        "mixes tensors of two devices",
        "create tensors with device=x.device of an input, and register fixed ones with register_buffer",
    ),
    (
        r"fake tensor in the exported program constant",
        "changes a tensor through .data, or keeps one of an earlier call",
        "compute a new tensor instead",
    ),
    (r"UnsupportedOperator", "runs an operator whose result has no shape before it ran", "use a dense one"),
)
# So many elements are tried at most, to see whether a function's own backward is its derivative.
_MOST = 1 << 24
_INPUT = re.compile(r"Unsupported input type <class '(.*?)'>")


class _Lost(Exception):
    """A call whose effect export would drop; says what it does and what to write instead."""


def explain(module: nn.Module, error: BaseException) -> CaptureError:
    """Return one sentence about a failed export, with the user's own line where the exception shows it."""
    name, where = type(module).__name__, user_line("".join(traceback.format_exception(error)))
    if isinstance(error, _Lost):
        return CaptureError(f"{where or forward_line(module)} {error}.")
    text = str(error).strip()
    said = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}".rstrip(".")
    if found := _INPUT.search(text):
        return CaptureError(
            f"{name} is given an input of type {found[1]}; give tensors (torch.as_tensor makes one of an array), "
            "numbers or text, or lists, tuples and dicts of them."
        )
    for pattern, what, remedy in _KNOWN:
        if re.search(pattern, said):
            short = said.split(" (unhinted")[0].split(". ")[0]
            return CaptureError(f"{where or forward_line(module)} {what}; {remedy}. (torch.export: {short})")
    return CaptureError(
        f"torch.export cannot capture {name}{f' at {where}' if where else ''}: {said}. "
        "Run the module once on these arguments; where that works, the line branches on data or mutates state."
    )


def user_line(stack: str) -> str:
    """Return `file:line` of the innermost frame of the user's own code, else of a library's other than torch, or ''."""
    own = [f'File "{f}", line {n}' for f, n in FRAME.findall(stack) if not f.startswith(_LIBRARIES)]
    other = [f'File "{f}", line {n}' for f, n in FRAME.findall(stack) if _is_model(f)]
    return source_of("\n".join(own)) or source_of("\n".join(other))


def forward_line(module: nn.Module) -> str:
    """Return `file:line` of a module's forward, with its name."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    where = user_line(f'File "{code.co_filename}", line {code.co_firstlineno}') if code else ""
    return f"{where} ({type(module).__name__}.forward)" if where else f"{type(module).__name__}.forward"


def _is_model(file: str) -> bool:
    """Tell whether a file belongs to neither Python nor torch."""
    return not file.startswith(_PYTHON) or "-packages" in file


def refuse_hooks(module: nn.Module) -> None:
    """Raise CaptureError where a hook changes gradients: mirrors differentiate the captured operators alone."""
    hooked = [f"parameter {n}" for n, p in module.named_parameters() if p._backward_hooks]
    hooked += [f"module {n or type(m).__name__}" for n, m in module.named_modules() if _backward_hooks(m)]
    if hooked:
        raise CaptureError(
            f"{len(hooked)} gradient hooks would be lost, the first that of {hooked[0]}; remove them for capture."
        )


def _backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def call(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's forward during export. Raises CaptureError for effects that the graph would lose silently.

    A module that changed its own attributes runs again: what is set once, such as a cache, is settled then.
    """
    with _blocked(), _recorded() as places:
        given, before = _flat(args, kwargs), _state(module)
        result = forward(*args, **kwargs)
        settled = _state(module)
        if _changed(before, settled):
            result = forward(*args, **kwargs)
        if found := _changed(settled, _state(module)):
            owner, path, attribute = found
            raise CaptureError(
                f"{places.get((id(owner), attribute), '') or forward_line(owner)} changes {path} in every call, which "
                "the captured step would not; pass such state in as an input, and return what you want to watch."
            )
        if _flat(args, kwargs) != given:
            raise CaptureError(
                f"{forward_line(module)} changes the lists or dicts among its inputs, which the captured step would "
                "not; build new ones."
            )
    return result


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[int], str]:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return [id(leaf) for leaf in leaves], str(spec)


_STANDARD = frozenset(nn.Module().__dict__)


State = dict[tuple[str, str], tuple[nn.Module, Any]]


def _state(module: nn.Module) -> State:
    """Return the modules' own attributes: tensors and plain values as they are, of containers what they hold."""
    return {
        (name, attribute): (owner, _held(value))
        for name, owner in module.named_modules()
        for attribute, value in owner.__dict__.items()
        if attribute not in _STANDARD
    }


def _changed(before: State, after: State) -> tuple[nn.Module, str, str] | None:
    """Return the first attribute that differs: its module, path and name."""
    for (name, attribute), (owner, value) in after.items():
        if _differs(before.get((name, attribute), (None, None))[1], value):
            return owner, ".".join(filter(None, ("self", name, attribute))), attribute
    return None


def _held(value: Any) -> Any:
    return tuple(value.items() if isinstance(value, dict) else value) if isinstance(value, list | dict) else value


def _differs(before: Any, after: Any) -> bool:
    if isinstance(after, tuple):
        same = isinstance(before, tuple) and len(before) == len(after)
        return not same or any(_differs(b, a) for b, a in zip(before, after, strict=True))
    if isinstance(after, bool | int | float | str):
        return bool(before != after)
    return isinstance(after, Tensor) and before is not after


@contextmanager
def _recorded() -> Iterator[dict[tuple[int, str], str]]:
    """Record the line that last set each attribute of a module."""
    places: dict[tuple[int, str], str] = {}
    original = nn.Module.__setattr__

    def record(self: nn.Module, name: str, value: Any) -> None:
        places[id(self), name] = _line(sys._getframe(1))
        original(self, name, value)

    nn.Module.__setattr__ = record  # type: ignore[method-assign, assignment]
    try:
        yield places
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]


def _line(frame: FrameType) -> str:
    return user_line(f'File "{frame.f_code.co_filename}", line {frame.f_lineno}')


# Calls whose effect on gradients export drops: (owner, name, what it does and what to write instead).
_LOST: tuple[tuple[Any, str, str], ...] = (
    (
        torch.autograd,
        "_engine_run_backward",
        "computes gradients inside the forward; return the loss only, and leave the backward to the captured step",
    ),
    (
        Tensor,
        "register_hook",
        "registers a gradient hook, which the captured step would not run; write it as an operator of the forward",
    ),
    (
        torch.autograd.Function,
        "apply",
        "uses {}, whose own backward is not its derivative and would not run; write it in differentiable operators, as "
        "x + (f(x) - x).detach() for a gradient straight through, or make it an operator by superscaler.register",
    ),
    (
        CheckpointFunction,
        "apply",
        "uses a reentrant checkpoint, which runs without gradients; pass use_reentrant=False, or leave recomputation "
        "to the plan",
    ),
)


@contextmanager
def _blocked() -> Iterator[None]:
    saved = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in _LOST]
    try:
        for (owner, name, text), (_, _, original) in zip(_LOST, saved, strict=True):
            setattr(owner, name, _refusing(text) if name != "apply" else _refusing_apply(original, text))
        yield
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original) if original is not None else delattr(owner, name)


def _refusing(text: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise _Lost(text)

    return refuse


def _refusing_apply(original: Any, text: str) -> Any:
    """torch's own functions do what their operators do, and a registered operator runs as it is written.

    Of any other one the forward is captured, if its own backward is the derivative of that.
    """

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if original is not None and (cls.__module__.startswith("torch.") or _in_operator(sys._getframe(1))):
            return original.__func__(cls, *args, **kwargs)
        if original is None or kwargs or not _is_derivative(cls, original, args):
            raise _Lost(text.format(cls.__qualname__))
        return _forward(cls, *args)

    return classmethod(apply)


class _Context(SimpleNamespace):
    """Takes what a function's forward keeps for its backward."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def _forward(cls: type[Function], *args: Any) -> Any:
    is_split = cls.setup_context is not Function.setup_context
    return cls.forward(*args) if is_split else cls.forward(_Context(needs_input_grad=[True] * len(args)), *args)


def _is_derivative(cls: type[Function], original: Any, args: Sequence[Any]) -> bool:
    """Tell whether the own backward of a function gives what autograd gives of its forward, on random numbers."""
    if sum(a.numel() for a in args if isinstance(a, Tensor)) > _MOST:
        return False
    generator = torch.Generator().manual_seed(0)

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return torch.zeros(value.shape, dtype=value.dtype)
        return torch.randn(value.shape, generator=generator, dtype=torch.float64).requires_grad_()

    forward = partial(_forward, cls)
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.enable_grad():
        try:
            given = [real(a) for a in args]
            leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
            first, second = (_with_gradients(f, given, leaves) for f in (partial(original.__func__, cls), forward))
            return len(first) == len(second) and all(map(partial(torch.allclose, rtol=1e-6, atol=1e-6), first, second))
        except Exception:
            return False


def _with_gradients(function: Callable[..., Any], given: Sequence[Any], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of a function, and the gradients of the leaves from some gradient of each result."""
    outputs = [y for y in pytree.tree_leaves(function(*given)) if isinstance(y, Tensor) and y.requires_grad]
    gradients = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape) for y in outputs]
    # torch.autograd.grad itself is refused here.
    found = _engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, tuple(leaves), True, accumulate_grad=False
    )
    return [*outputs, *(torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True))]


def _in_operator(frame: FrameType | None) -> bool:
    """Tell whether a frame runs inside a registered function."""
    codes = {rule.code for rule in REGISTERED.values()}
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None
