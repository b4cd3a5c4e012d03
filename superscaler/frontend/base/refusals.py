"""Refusals of what a captured step cannot hold, in one sentence: the user's line, its effect, and the remedy."""

import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from superscaler.errors import CaptureError
from superscaler.frontend.base.samples import is_derivative
from superscaler.frontend.base.trace import FRAME, innermost
from superscaler.replaced import replaced
from superscaler.specs.registered import REGISTERED

_PYTHON = sysconfig.get_paths()["stdlib"]
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARIES = (_PYTHON, *(sysconfig.get_paths()[k] for k in ("purelib", "platlib")))

SETS_DRAWS = (
    "sets the state of torch's random numbers, but a captured step draws its own; seed them before the step, or pass "
    "the numbers in as an input"
)
FIXED_SHAPE = "keep a fixed shape: weigh by a mask, or use torch.where, instead of picking elements"
# An error of torch.export -> the fault of the user's line, and its replacement.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (r"specialized integer|converted to an index", "uses a value of a tensor as a size or an index", FIXED_SHAPE),
    (
        r"in gaussian_nll_loss\)",
        "calls gaussian_nll_loss, which looks at the values of its variances",
        "write its formula: (0.5 * (var.log() + (input - target) ** 2 / var)).mean()",
    ),
    (
        r"DataDependentOutput.*aten\.equal",
        "compares the values of tensors, as torch.equal, torch.cov and torch.corrcoef do, and what runs depends on it",
        "select with torch.where; a covariance of rows is x @ x.T / (n - 1) of x - x.mean(1, keepdim=True)",
    ),
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
        "keeps a tensor of an earlier call",
        "compute a new tensor instead",
    ),
    (
        r"attribute '\w+' already exists",
        "reads a buffer or parameter of a name that torch.export has a use for",
        "give it another name",
    ),
    (
        r"Constant \w+ is mutated",
        "changes a tensor in place that is an attribute of a module, and no buffer",
        "register it, by self.register_buffer(name, tensor) in __init__",
    ),
    (
        r"Couldn't swap",
        "casts or moves a module, which changes its parameters",
        "do it once before the step, and cast the tensors that it is given",
    ),
    (
        r"SyntaxError.*eval_with_key",
        "has a parameter, a buffer or a module whose name is a word of Python",
        "rename it",
    ),
    (r"UnsupportedOperator", "runs an operator whose result has no shape before it ran", "use a dense one"),
)
_INPUT = re.compile(r"Unsupported input type <class '(.*?)'>")


class Lost(Exception):
    """A call whose effect export would drop, with its effect and the remedy."""


def explain(module: nn.Module, error: BaseException) -> CaptureError:
    """Return one sentence about a failed export, with the user's own line if the exception shows it."""
    name, where = type(module).__name__, user_line(FRAME.findall("".join(traceback.format_exception(error))))
    if isinstance(error, Lost):
        return CaptureError(f"{where or forward_line(module)} {error}.")
    text = str(error).strip()
    message = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}".rstrip(".")
    if found := _INPUT.search(text):
        return CaptureError(
            f"{name} is given an input of type {found[1]}; give tensors (torch.as_tensor makes one of an array), "
            "numbers or text, or lists, tuples and dicts of them."
        )
    cause = "".join(re.findall("Caused by: .*", text))
    for pattern, what, remedy in _KNOWN:
        if re.search(pattern, message + cause):
            short = message.split(" (unhinted")[0].split(". ")[0]
            return CaptureError(f"{where or forward_line(module)} {what}; {remedy}. (torch.export: {short})")
    if not where and (twins := _twin_buffers(module)):
        one, other = twins
        return CaptureError(
            f"the forward changes buffer {one} of {name}, which is also its {other}, and torch.export cannot capture a "
            "buffer that changes under two names: keep that module or buffer under one name and use it by that "
            "everywhere, or make two, whose values then differ."
        )
    return CaptureError(
        f"torch.export cannot capture {name}{f' at {where}' if where else ''}: {message}. "
        "Run the module once on these arguments; where that works, the line branches on data, mutates state, or does "
        "something else while torch.export traces it."
    )


def refuse_scripted(module: nn.Module) -> None:
    """Raise CaptureError for a module that torch.jit made, or that has one."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the module'} is a torch.jit.ScriptModule, which torch.export cannot capture; give the "
                "module of which torch.jit made it."
            )


def refuse_set_weights(module: nn.Module) -> None:
    """Raise CaptureError for a weight that a hook of torch's older utilities computes and sets as an attribute."""
    for path, part in module.named_modules():
        for hook in part._forward_pre_hooks.values():
            if (kind := type(hook)).__module__.startswith("torch.nn.utils."):
                name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", "its weight")
                raise CaptureError(
                    f"{path or type(part).__name__} has {kind.__module__}.{kind.__qualname__}, which sets {name} in "
                    "every call, outside of the captured step; use a parametrization: torch.nn.utils.parametrizations "
                    "has weight_norm, spectral_norm and orthogonal, and torch.nn.utils.parametrize takes your own."
                )


def refuse_averages(module: nn.Module) -> None:
    """Raise CaptureError for a BatchNorm in training that weighs a batch by the number of batches before it."""
    for path, part in module.named_modules():
        is_average = isinstance(part, _BatchNorm) and part.momentum is None
        if is_average and part.training and part.track_running_stats:
            kind = type(part).__name__
            raise CaptureError(
                f"{path or 'the module'} is a {kind} with momentum=None, whose running statistics are averages over "
                f"all steps, which a captured step cannot count; give it a momentum, as {kind}(..., momentum=0.1)."
            )


def _twin_buffers(module: nn.Module) -> tuple[str, str] | None:
    """Return two names of one buffer, as of a module that is there twice."""
    first: dict[int, str] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if first.setdefault(id(buffer), name) != name:
            return first[id(buffer)], name
    return None


def user_line(frames: Sequence[tuple[str, Any]]) -> str:
    """Return `file:line` of the innermost frame of the user's own code, else of a library's other than torch, or ''."""
    own = [(file, line) for file, line in frames if not file.startswith(_LIBRARIES)]
    return innermost(own) or innermost([(file, line) for file, line in frames if is_model(file)])


def forward_line(module: nn.Module) -> str:
    """Return `file:line` of a module's forward, with its name."""
    where = line_of(type(module).forward)
    return f"{where} ({type(module).__name__}.forward)" if where else f"{type(module).__name__}.forward"


def line_of(function: Any) -> str:
    """Return `file:line` of a function of the user's own, or ''."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return user_line([(code.co_filename, code.co_firstlineno)]) if code else ""


def is_model(file: str, own: bool = False) -> bool:
    """Return whether a file belongs to neither Python nor, with `own`, to any package."""
    return bool(file) and (
        not file.startswith(_LIBRARIES) if own else not file.startswith(_PYTHON) or "-packages" in file
    )


def is_users(frame: FrameType) -> bool:
    """Return whether a frame runs the code of a model, not of Python or torch."""
    file = frame.f_code.co_filename
    return is_model(file) and not file.startswith(_TORCH)


def _refusing(text: str) -> Callable[[Any], Any]:
    """Return a function that replaces any call by a refusal."""

    def refuse(*_: Any, **__: Any) -> None:
        raise Lost(text)

    return lambda original: refuse


def _refusing_to_users(original: Any) -> Any:
    """torch keeps the state of random numbers around what it traces."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if not is_users(sys._getframe(1)):
            return original(*args, **kwargs)
        raise Lost(SETS_DRAWS)

    return refuse


def _refusing_hooks(original: Any) -> Any:
    """torch's own hooks, of checkpoints and for memory, change no gradient."""

    def init(self: saved_tensors_hooks, *args: Any) -> None:
        if type(self) is saved_tensors_hooks or not type(self).__module__.startswith("torch."):
            raise Lost(
                "sets hooks on the tensors that backward reads, which the captured step would not run; take them out, "
                "and use torch.utils.checkpoint where they are for memory"
            )
        original(self, *args)

    return init


def _refusing_apply(original: Any) -> Any:
    """torch's own functions do what their operators do, and a registered operator runs as it is written.

    Of any other function the forward is captured, if its own backward is the derivative of that.
    """
    known: dict[tuple[type[Function], str], bool] = {}

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch.") or _in_operator(sys._getframe(1)):
            return original.__get__(None, cls)(*args, **kwargs)
        forms = [(a.dtype, a.shape, a.requires_grad) if isinstance(a, Tensor) else a for a in args]
        key = cls, repr((torch.is_grad_enabled(), forms))
        if key not in known:
            known[key] = not kwargs and is_derivative(original.__get__(None, cls), partial(_forward, cls), args)
        if not known[key]:
            raise Lost(
                f"uses {cls.__qualname__}, whose own backward is not its derivative and would not run; write it in "
                "differentiable operators, as x + (f(x) - x).detach() for a gradient straight through, or make it an "
                "operator by superscaler.register"
            )
        return _forward(cls, *args)

    return classmethod(apply)


def _refusing_gradients(original: Any) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        if sys._getframe(1).f_code.co_name == "backward":
            raise Lost(
                "runs a backward inside the forward; return the loss only: the captured step has its own backward"
            )
        raise Lost(
            "computes gradients inside the forward, as of forces or of a penalty on gradients, but a captured step has "
            "one backward, that of its loss; write these gradients as operators, or leave the term out of the model"
        )

    return refuse


_HOOK = "registers a gradient hook, which the captured step would not run; write it as an operator of the forward"
# Calls whose effect export drops: the owner, the name, and what makes the refusing function of the original one.
_LOST: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (torch.autograd, "_engine_run_backward", _refusing_gradients),
    (Tensor, "register_hook", _refusing(_HOOK)),
    (Tensor, "register_post_accumulate_grad_hook", _refusing(_HOOK)),
    *(
        (owner, name, _refusing_to_users)
        for owner in (torch, torch.random, torch.cuda)
        for name in ("manual_seed", "seed", "set_rng_state")
    ),
    (torch.random, "fork_rng", _refusing_to_users),
    (saved_tensors_hooks, "__init__", _refusing_hooks),
    (Function, "apply", _refusing_apply),
)


def blocked() -> AbstractContextManager[None]:
    """Refuse these calls in the block."""
    return replaced(*((owner, name, refusing(vars(owner)[name])) for owner, name, refusing in _LOST))


class _Context(SimpleNamespace):
    """A stand-in for the context in which a function's forward keeps tensors for its backward."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def _forward(cls: type[Function], *args: Any) -> Any:
    is_split = cls.setup_context is not Function.setup_context
    return (
        cls.forward(*args)
        if is_split
        else cls.forward(_Context(needs_input_grad=[isinstance(a, Tensor) and a.requires_grad for a in args]), *args)
    )


def _in_operator(frame: FrameType) -> bool:
    """Return whether a frame runs inside a registered function."""
    codes = {rule.code for rule in REGISTERED.values()}
    return any(inner.f_code in codes for inner, _ in traceback.walk_stack(frame))
