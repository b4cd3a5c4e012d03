"""The user's own module as the oracle: torch runs it eagerly, in float64 or in its own dtypes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from superscaler.errors import PlanError, brief
from superscaler.frontend.base.checkpoints import marked
from superscaler.frontend.base.oracle import (
    DRAWN,
    Draw,
    Reference,
    call_with,
    default_dtype,
    dense,
    gradients_of,
    is_same,
    packed,
    pieces,
    retyped,
)
from superscaler.frontend.base.results import form_and_tensors, loss_of
from superscaler.frontend.checks.agreement import WithoutDropout
from superscaler.frontend.effects.untouched import untouched
from superscaler.ir.model import Model
from superscaler.ops.table import RANDOM, row_of
from superscaler.replaced import replaced
from superscaler.specs.options import HALVES

if TYPE_CHECKING:
    from superscaler.frontend.base.captured import Call, Captured

_WIDE = torch.float64
_DTYPE = vars(torch._C.TensorBase)["dtype"].__get__
_CASTS = frozenset((Tensor.float, Tensor.half, Tensor.bfloat16))
# Functions that read only the shape and the dtype of their tensor.
_FILLS = frozenset(["full_like", "new_full", "new_tensor", "ones_like", "new_ones", "zeros_like", "new_zeros"])
_RANDOM = re.compile(
    "(geometric|cauchy|log_normal|random|rrelu)_$|rrelu$|"
    "multinomial|randperm|poisson$|gumbel_softmax|(feature_|alpha_)+dropout_?$|dropout_$"
)
# Functions that fill a tensor with random numbers -> their results, from uniform numbers and their own arguments.
_FILLING: Mapping[str, Callable[..., Tensor]] = {
    "bernoulli_": lambda u, x, p=0.5, **_: u < p,
    "uniform_": DRAWN["uniform"],
    "normal_": DRAWN["normal_functional"],
    "exponential_": DRAWN["exponential"],
}


class Unlike(Exception):
    """The reason why a module cannot be the oracle, in a few words."""


# Loss, gradients of the leaves, outputs.
_Ran = tuple[Tensor | None, dict[str, Tensor | None], dict[str, Tensor]]


class _Gradients(nn.Module):
    """A module and the backward of its losses, if it trains; both run on tensors that replace the module's own."""

    def __init__(self, call: Call, model: Model) -> None:
        super().__init__()
        self.module, self.call, self.model = call.module, call, model

    def forward(self, args: Any, kwargs: Any, leaves: dict[str, Tensor]) -> _Ran:
        output, name = self.module(*args, **kwargs), type(self.module).__name__
        loss = loss_of(output, name, self.call.losses) if self.model.loss else None
        outputs = form_and_tensors(output, name, loss)[1] if self.model.result else {}
        found = gradients_of(loss, outputs, leaves, self.call.loss_of)
        return loss, found, {n: x.detach().cpu() for n, x in outputs.items()}


class Eager:
    """A captured module that steps on copies of its tensors, in float64 if `is_wide`. Raises Unlike if it cannot."""

    def __init__(self, captured: Captured, batch: Mapping[str, Tensor], is_wide: bool = True) -> None:
        self.is_wide = is_wide
        self.call, self.model = captured.call, captured.model
        module = self.call.module
        tensors = [*module.parameters(), *module.buffers()]
        if any(x.is_meta for x in tensors):
            raise Unlike("the module has no data (it was built on the meta device)")
        self.device = next((x.device for x in tensors), torch.device("cpu"))
        precision = self.model.optimizer.precision
        self.shown = getattr(torch, HALVES[precision]) if precision else _floats(module)
        kind, dtype = self.call.autocast or (self.device.type, None)
        self.autocast = kind, dtype, dtype is not None
        self.args, self.kwargs = self.call.arguments({n: self._copy(x) for n, x in batch.items()})
        self.written = {op.inputs[0].tensor for op in self.model.ops if op.is_write and not op.is_output}

    def step(self, known: Mapping[str, Tensor], draw: Draw) -> Reference:
        """Return the loss, the gradient of each updated tensor (None: it has none), and the buffers that it changed.

        `known`: parameters and buffers before it, by name. Dropout keeps everything; `draw` gives other random numbers.
        """
        known = {**known, **packed(self.model, known)}
        draws = _draws(self.model, draw)
        mode = _Wide(self.shown, draws) if self.is_wide else _GivenDraws(draws)
        module = self.call.module
        wanted = {n: bool(self.model.loss) and p.requires_grad for n, p in module.named_parameters()}
        leaves = {n: self._copy(known[n]).requires_grad_(wants) for n, wants in wanted.items()}
        fixed = {n: b.clone() for n, b in module.named_buffers() if n not in self.written}
        buffers = {n: fixed[n].clone() if n in fixed else self._copy(known[n]) for n, _ in module.named_buffers()}
        trained = {n: x for n, x in leaves.items() if x.requires_grad and n in self.call.updated}
        mode.add((list(leaves.values()), [buffers[n] for n in self.written], self.args, self.kwargs))
        state = {f"module.{n}": x for n, x in {**leaves, **buffers}.items()}
        loss, found, outputs = self._run(mode, state, trained)
        given = {n: None if g is None else dense(g, g).cpu() for n, g in found.items()}
        gradients = {**given, **pieces(self.model, given)}
        after = {n: state[f"module.{n}"].detach().cpu() for n in buffers}
        changed = {n: b for n, b in after.items() if n not in fixed or not is_same(fixed[n].cpu(), b).all()}
        return Reference(None if loss is None else loss.detach().cpu(), gradients, changed, outputs)

    def _copy(self, value: Tensor) -> Tensor:
        return retyped(value.detach(), _WIDE if self.is_wide else None).to(self.device, copy=True)

    def _run(self, mode: TorchFunctionMode, state: dict[str, Tensor], leaves: dict[str, Tensor]) -> _Ran:
        default = default_dtype(torch.get_default_dtype())
        try:
            modes = [(m, "training", t) for m, t in zip(self.call.module.modules(), self.call.training, strict=True)]
            # Autocast leaves float64 alone. It casts only what depends on no input or parameter, as in the capture.
            with (
                untouched(self.call.module),
                default,
                replaced(*modes),
                mode,
                marked(),
                torch.enable_grad(),
                torch.autocast(*self.autocast),
            ):
                whole = _Gradients(self.call, self.model)
                ran: _Ran = call_with(whole, state, (self.args, self.kwargs, leaves))
                return ran
        except (PlanError, Unlike):
            raise
        except Exception as error:
            # A module's code may raise any exception.
            wide, text = " in float64" * self.is_wide, brief(error) or "no message"
            raise Unlike(f"the module does not run{wide} ({type(error).__name__}: {text})") from error


def _floats(module: nn.Module) -> torch.dtype | None:
    """Return the floating dtype of a module's parameters, None if there are several."""
    found = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return found.pop() if len(found) == 1 else None


def _draws(model: Model, draw: Draw) -> Callable[..., Tensor]:
    """Return a function that returns the uniform numbers of the next random call, in the order of the graph."""
    ops = (op for op in model.ops if op.target in RANDOM and row_of(op.target).rate is None)

    def following(shape: tuple[int, ...]) -> Tensor:
        op = next(ops, None)
        if op is None or model.tensors[op.outputs[0].tensor].shape != shape:
            raise Unlike("its random numbers do not come in the order of the captured ones")
        return draw(op.name, shape)

    return following


def _draws_nothing(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is of an rrelu that does not train."""
    return name.startswith("rrelu") and not kwargs.get("training", (*args, *[False] * 4)[3])


class _GivenDraws(WithoutDropout):
    """A mode without dropout in which the other random operators use given numbers."""

    def __init__(self, following: Callable[..., Tensor]) -> None:
        super().__init__()
        self.following = following

    def add(self, tensors: Any) -> None:
        """Register tensors that depend on an input or a parameter."""

    def _called(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        if name in _FILLING:
            return self._called(Tensor.copy_, "copy_", (args[0], self._filling(name, *args, **(kwargs or {}))), {})
        if _RANDOM.match(name) and not _draws_nothing(name, args, kwargs or {}):
            raise Unlike(f"it draws random numbers by {name}")
        return (self._drawn if name in DRAWN else self._computed)(func, name, args, kwargs)

    def _filling(self, name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _FILLING[name](self.following(tuple(x.shape)), x, *args, **kwargs).to(x.dtype)

    def _computed(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _drawn(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        with torch.device("meta"):
            spec = func(*pytree.tree_map_only(Tensor, lambda x: x.to("meta"), args), **kwargs)
        return DRAWN[name](self.following(tuple(spec.shape)), *args, **kwargs).to(spec.dtype)


class _Wide(_GivenDraws):
    """A mode in which a module computes in float64 whatever depends on an input or a parameter, despite the dtypes in
    its code.

    All other values are part of the model: they are computed in their own dtype, and widened where they are used. The
    code of the module still reads the dtype of its parameters (`shown`), so that it takes the same branches.
    """

    def __init__(self, shown: torch.dtype | None, following: Callable[..., Tensor]) -> None:
        super().__init__(following)
        self.shown = shown
        self.default = torch.get_default_dtype()
        self._live = WeakTensorKeyDictionary()

    def add(self, tensors: Any) -> None:
        for x in pytree.tree_leaves(tensors):
            if isinstance(x, Tensor):
                self._live[x] = True

    def _is_live(self, x: Tensor) -> bool:
        # Inside a backward, tensors that user code is called with are gradients.
        return x.requires_grad or x in self._live or torch._C._current_graph_task_id() != -1

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == _DTYPE:
            is_shown = self._is_live(args[0]) and self.shown is not None and func(*args) == _WIDE
            return self.shown if is_shown else func(*args)
        return super().__torch_function__(func, types, args, kwargs)

    def _computed(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_fill = name in _FILLS and len(tensors) == 1 and self.shown is not None
        if is_fill and _DTYPE(tensors[0]) == _WIDE:
            kwargs = {"dtype": self.shown, **(kwargs or {})}
        if is_fill or not any(map(self._is_live, tensors)):
            torch.set_default_dtype(self.default)
            return func(*args, **kwargs)
        torch.set_default_dtype(_WIDE)
        func = _grouped if name in ("grouped_mm", "_grouped_mm") else func
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
            _widen_in_place(args[0])
        args, kwargs = pytree.tree_map(_widened, self._rounded(func, name, args, kwargs))
        result = (Tensor.double if func in _CASTS else func)(*args, **kwargs)
        self.add(result)
        return result

    def _rounded(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return arguments in which the tensors that are part of the model are rounded as under autocast."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        own = [x for x in flat if isinstance(x, Tensor) and x.dtype == torch.float32 and not self._is_live(x)]
        if not own or name.endswith("_") or not torch.is_autocast_enabled(own[0].device.type):
            return args, kwargs
        inputs = pytree.tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype == _WIDE else x, flat)
        casts = _Casts(own)
        with torch.no_grad(), casts:
            inner_args, inner_kwargs = pytree.tree_unflatten(inputs, spec)
            func(*inner_args, **inner_kwargs)
        return pytree.tree_unflatten([casts.found.get(id(x), x) for x in flat], spec)

    def _filling(self, name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._live_numbers(super()._filling(name, _widened(x), *args, **kwargs))

    def _drawn(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        return self._live_numbers(super()._drawn(func, name, *pytree.tree_map(_widened, (args, kwargs))))

    def _live_numbers(self, drawn: Tensor) -> Tensor:
        drawn = retyped(drawn, _WIDE)
        self.add(drawn)
        return drawn


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records the target dtypes of casts."""

    def __init__(self, watched: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watched = set(map(id, watched))
        self.found: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self.watched:
            self.found[id(args[0])] = result
        return result


def _grouped(x: Tensor, weights: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None) -> Tensor:
    """Multiply the rows of `x` up to each offset by the weight of that group. torch's kernel for it lacks float64."""
    bounds = [0, *offs.tolist()]
    found = [x[start:end] @ w for start, end, w in zip(bounds, bounds[1:], weights, strict=False)]
    return F.pad(torch.cat(found), (0, 0, 0, len(x) - bounds[-1]))


def _widen_in_place(x: Any) -> None:
    """Widen a tensor made by the module, and what it is a view of, so that they can hold float64 values."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != _WIDE:
        whole = x if x._base is None else x._base
        whole.data = whole.data.to(_WIDE)
        if whole is not x:
            x.data = whole.data.as_strided(x.shape, x.stride(), x.storage_offset())


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return retyped(value, _WIDE)
    return _WIDE if isinstance(value, torch.dtype) and value.is_floating_point else value
