"""Export: a module and its example arguments become a program whose outputs are its loss and other kept results."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, wraps
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.export import ExportedProgram, _trace
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from superscaler.errors import CaptureError, PlanError, a
from superscaler.frontend.base import autocast as casts
from superscaler.frontend.base import checkpoints
from superscaler.frontend.base.autocast import Autocast
from superscaler.frontend.base.refusals import Lost, explain, forward_line, is_users
from superscaler.frontend.base.results import returned
from superscaler.frontend.base.trace import argument, source_of
from superscaler.frontend.composites import decomposed
from superscaler.frontend.effects.calls import StateWasSet, call, refuse_hooks
from superscaler.frontend.effects.untouched import without_checks
from superscaler.frontend.rewrites import custom_ops as experts
from superscaler.replaced import quiet, replaced

# Synonyms of operators that have a rule, and composites that torch decomposes into such operators.
_COMPOSITE = """absolute broadcast_tensors clip cosine_embedding_loss divide greater greater_equal kl_div less
less_equal margin_ranking_loss multiply negative not_equal pairwise_distance poisson_nll_loss prelu repeat_interleave
subtract tensordot tile triplet_margin_loss true_divide type_as"""
# Dropout functions -> number of dims of an input without a batch; 0: they have no such form.
_DROPOUTS = {F.dropout: 0, F.dropout1d: 2, F.dropout2d: 0, F.dropout3d: 4}

_SWITCHES = (Tensor.requires_grad_, vars(torch._C.TensorBase)["requires_grad"].__set__)
_DATA = (vars(torch._C.TensorBase)["data"].__get__, vars(torch._C.TensorBase)["data"].__set__)

# What torch does during an export, and needs not: the validity of a distribution's arguments is no part of a graph, and
# `effects` writes what is assigned to buffers.
_UNUSED = (
    (Distribution, "_validate_args", False),
    (_trace, "register_buffer_assignment_hook", lambda *_: SimpleNamespace(remove=lambda: None)),
)

# These loggers print errors with a traceback that torch raises too, and that are reported in one line.
_TALKATIVE = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    autocast: Autocast | None = None,
    is_trained: bool = True,
    is_kept: bool = False,
    losses: Sequence[Any] = (),
) -> tuple[ExportedProgram, str]:
    """Return a functional program of semantic-level ATen operators, and the form of its kept results (see `results`).

    Its outputs are the loss (`is_trained`; the sum of several `losses`) and the other results (`is_kept`). Calls
    without gradients are detached, and autocast is casts. Raises CaptureError for a module without a loss, or one that
    torch cannot export (with the line).
    """
    forms: list[str] = []
    refuse_hooks(module)
    with (
        _only_wanted(module, autocast, partial(returned, is_trained=is_trained, is_kept=is_kept, keys=losses), forms),
        experts.chosen(module), checkpoints.marked(), _on_one_device(module), _with_shapes(),
        replaced(*_UNUSED), without_checks(), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        try:
            exported = _exported(module, args, dict(kwargs))
            if casts.has_regions(exported) and any(p.is_meta for p in module.parameters()):
                with casts.stand_ins(module, args, kwargs) as (own_args, own_kwargs):
                    exported = torch.export.export(module, own_args, own_kwargs, strict=False)
            _refuse_strided(exported)
            casts.open_regions(exported)
            exported = decomposed(exported, _decompositions(exported))
            casts.share_casts(exported)
            casts.forget_stand_ins(exported)
            return exported, forms[-1]
        except PlanError:
            raise
        except (Exception, SystemExit) as error:
            # A model's code may raise any exception, and so may torch where it cannot trace it.
            raise explain(module, error) from error


@contextmanager
def _with_shapes() -> Iterator[None]:
    """Tell torch the shapes of the results of a ctc loss, which it would only know from the lengths of the labels."""

    def ctc_loss(scores: Tensor, labels: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        steps, rows = scores.shape[:2]
        return scores.new_empty(rows), scores.new_empty(rows, steps, 2 * labels.shape[-1] + 1)

    with torch.library._scoped_library("aten", "FRAGMENT") as library:
        # Torch refuses a second one, beside the user's own.
        with suppress(RuntimeError):
            torch.library.register_fake("aten::_ctc_loss.Tensor", ctc_loss, lib=library)
        yield


@contextmanager
def _on_one_device(module: nn.Module) -> Iterator[None]:
    """Set the buffers of a module whose weights are on the meta device to tensors there: export mixes no devices."""
    is_meta = any(p.is_meta for p in module.parameters())
    own = [(part, dict(part.named_buffers(recurse=False))) for part in module.modules() if is_meta]
    for part, buffers in own:
        part._buffers.update({name: buffer.to("meta") for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for part, buffers in own:
            part._buffers.update(buffers)


def _exported(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """Export a module, a second time if its first call set state that later calls read."""
    try:
        return torch.export.export(module, args, kwargs, strict=False)
    except StateWasSet as first:
        first.restore()
        try:
            return torch.export.export(module, args, kwargs, strict=False)
        except StateWasSet as error:
            raise CaptureError(str(error)) from None


def _refuse_strided(exported: ExportedProgram) -> None:
    """Raise CaptureError for strides of a tensor whose elements do not lie in order: a plan keeps no other layout."""
    for node in exported.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        source, size, stride = node.args[:3]
        x, start = source.meta["val"], argument(node, 3, "storage_offset")
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if not x.is_contiguous() or last >= x.numel() or start not in (None, x.storage_offset()):
            raise CaptureError(
                f"{source_of(node) or 'the model'} calls as_strided on a tensor whose elements do not lie in order, or "
                "reads beyond it; give it x.contiguous(), or use unfold, transpose or indices."
            )


def _decompositions(exported: ExportedProgram) -> dict[Any, Any]:
    """Return torch's decompositions of the composite operators in a program that have no rule of their own."""
    names = set(_COMPOSITE.split())
    found = {n.target for n in exported.graph.nodes if str(n.target).removeprefix("aten.").split(".")[0] in names}
    # Instance norm with running statistics changes them, although its schema does not say so.
    changing = torch.ops.aten.instance_norm.default
    found |= {changing for n in exported.graph.nodes if n.target is changing and n.args[3] is not None}
    table = torch.export.default_decompositions() if found else {}
    # All other ways to read the table first fill it with the operators of all namespaces.
    written = {operator: table.pop(operator, None) for operator in found}
    return {operator: function for operator, function in written.items() if function is not None}


def examples(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for the export: a tensor passed twice is cloned, and all are on meta if the module is.

    Export deduplicates tensor objects, and would wire `labels` into `input_ids`.
    """
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        raise CaptureError(
            f"args is {a(type(args).__name__)} and kwargs {a(type(kwargs).__name__)}, but a tuple and a dict are "
            "needed; write args=(x,) and kwargs={'name': x}."
        )
    is_meta = any(p.is_meta for p in module.parameters())
    seen: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.layout is not torch.strided:
            raise CaptureError(f"an example input of shape {tuple(value.shape)} is sparse; give dense tensors.")
        if not value.numel():
            raise CaptureError(f"an example input has shape {tuple(value.shape)}: give at least one element per dim.")
        if is_meta:
            return value.detach().to("meta").clone()
        copy = value.clone() if id(value) in seen else value
        seen.add(id(value))
        return copy

    return tuple(pytree.tree_map(own, tuple(args))), pytree.tree_map(own, dict(kwargs))


@contextmanager
def _only_wanted(
    module: nn.Module, autocast: Autocast | None, wanted: Callable[..., Any], forms: list[str]
) -> Iterator[None]:
    """Make the module return tensors alone, and append their form. Its own `forward` is wrapped, so that all names are
    unchanged. The wrapper runs the whole call, with hooks and an own `__call__`.
    """
    kind, run = _called(module)

    @wraps(run)
    def only_wanted(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        with _Explicit(), torch.enable_grad(), torch.autocast(*autocast) if autocast else nullcontext():
            try:
                output = call(module, run, args, kwargs)
            except RuntimeError as error:
                if "data-dependent" not in str(error):
                    raise
                # torch.export would print the whole graph before it raised this.
                raise explain(module, error) from error
            tensors, form = wanted(output, forward_line(module))
            forms.append(form)
            return tensors

    with quiet(logging.CRITICAL, *_TALKATIVE), _as_it_is(module, kind, only_wanted):
        yield


def _called(module: nn.Module) -> tuple[type[nn.Module], Callable[..., Any]]:
    """Return a class whose call runs the forward alone, and the forward for it: the module's own, or its whole call."""
    kind, forward, own = type(module), module.forward, module.__dict__.get("forward")
    is_own = kind.__call__ is not nn.Module.__call__
    if not (is_own or module._forward_hooks or module._forward_pre_hooks):
        return kind, forward

    @wraps(module.__call__ if is_own else forward)
    def whole(*args: Any, **kwargs: Any) -> Any:
        with _as_it_is(module, kind, own):
            return module(*args, **kwargs)

    plain = {"__call__": lambda self, *args, **kwargs: self.forward(*args, **kwargs)}
    return type(kind.__name__, (kind,), plain), whole


@contextmanager
def _as_it_is(module: nn.Module, kind: type[nn.Module], forward: Any) -> Iterator[None]:
    """Set the class of a module, and its own forward, if any."""
    before = module.__class__, module.__dict__.pop("forward", None)

    def put(kind: type[nn.Module], forward: Any) -> None:
        module.__class__ = kind
        module.__dict__.pop("forward", None)
        if forward is not None:
            module.__dict__["forward"] = forward

    put(kind, forward)
    try:
        yield
    finally:
        put(*before)


class _Explicit(TorchFunctionMode):
    """A mode that makes explicit what torch.export's graph loses. Results without gradients are detached, with their
    switch hidden: it would split autocast regions. Autocast's casts inside of an einsum come before it. Dropout in
    place or of channels is a dropout; torch writes it as draws of random numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            with torch._C.DisableTorchFunction():
                return func(*args)
        if func is torch._VF._pack_padded_sequence:
            raise Lost(
                "packs sequences by their lengths, so that the data says how many elements there are; run the layer on "
                "the padded sequences, with labels to ignore, or a mask, where they are padded"
            )
        if func in _DATA and is_users(sys._getframe(1)):
            raise Lost(
                "reads or sets .data of a tensor, which the captured step does not see; read x.detach(), and change a "
                "buffer by x.copy_(value), or by x.mul_(0.9) and the like, under torch.no_grad()"
            )
        if func in _SWITCHES and isinstance(args[0], nn.Parameter) and args[0].requires_grad != (*args[1:], True)[0]:
            raise Lost(
                "switches requires_grad of a parameter, but a captured step trains what it did before; do it once"
            )
        if func is torch.functional.einsum:
            args = casts.cast_product(*args)
        if isinstance(func, FunctionType) and func in _DROPOUTS:
            func = partial(_drop, func)
        if torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        return _without_gradients(func, args, kwargs or {})


def _without_gradients(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function: its results are detached; what it changes in place keeps the gradient from before."""
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dtype.is_floating_point]
    # Inference tensors have no version counter, and need none: no gradient flows to them.
    given = [x for x in given if not x.is_inference()]
    before = [(x, x._version, x.clone() if x.grad_fn is not None else None) for x in given]
    result = function(*args, **kwargs)
    for x, version, old in before:
        if x._version != version:
            # `old - old` is 0, and so is its gradient.
            x.copy_(x.detach() if old is None else x.detach() + (old - old.detach()))
    return pytree.tree_map(lambda x: x if any(x is y for y in given) else _detach(x), result)


def _drop(function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not p:
        return input
    kept = input.shape if function is F.dropout else input.shape[: 1 if input.dim() == _DROPOUTS[function] else 2]
    if len(kept) == input.dim():
        result = F.dropout(input, p)
    else:
        result = input * F.dropout(input.new_ones(*kept, *[1] * (input.dim() - len(kept))), p)
    return input.copy_(result) if inplace else result


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.dtype.is_floating_point else value
