"""The training half of a captured step: which tensors need gradients, and the ops of the optimizer."""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.optim.optimizer import _global_optimizer_post_hooks as _global_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _global_pre_hooks
from torch.utils import _pytree as pytree

from superscaler.errors import CaptureError, InputError, unknown
from superscaler.frontend.base.captured import Given
from superscaler.frontend.base.refusals import line_of
from superscaler.frontend.base.results import RESULT
from superscaler.frontend.base.trace import Trace, dtype_of, outputs, reads, target_of
from superscaler.ir.model import Optimizer, TensorKind
from superscaler.ops.table import row_of
from superscaler.specs.options import CLASS, CONSTRUCTED, OPTIMIZERS, WHOLE, by_looks

_DETACH = "aten.detach.default"


def remove_idle_detaches(trace: Trace, trained: Iterable[Node]) -> None:
    """Drop detaches without a gradient to stop, or with readers that only lead to other stops."""
    stopped = _stopped(trace)
    reached = _forward(trace, trained, stopped)
    for node in trace.calls():
        if target_of(node) == _DETACH and (reads(node)[0] not in reached or node in stopped):
            trace.replace(node, *reads(node))


def _stopped(trace: Trace) -> set[Node]:
    """Return the tensors whose readers all stop gradients, or only lead to stops."""
    passing, calls = set(trace.results), trace.calls()
    for node in reversed(calls):
        if not row_of(target_of(node)).stops and passing.intersection(outputs(node)):
            passing.update(reads(node))
    return {x for node in calls for x in outputs(node)} - passing


def with_gradient(trace: Trace, trained: Iterable[Node], loss: Node | None) -> set[Node]:
    """Return the tensors whose gradient is needed: on a differentiable path from a trained parameter to a loss."""
    reached = _forward(trace, trained)
    needed = reached.intersection([loss])
    for node in reversed(trace.calls()):
        if needed.intersection(outputs(node)) and not row_of(target_of(node)).stops:
            needed.update(reached.intersection(reads(node)))
    return needed


def _forward(trace: Trace, trained: Iterable[Node], removed: Collection[Node] = ()) -> set[Node]:
    """Return the tensors that trained parameters reach, also through detached tensors in `removed`."""
    reached = set(trained)
    for node in trace.calls():
        if (not row_of(target_of(node)).stops or outputs(node)[0] in removed) and reached.intersection(reads(node)):
            reached.update(x for x in outputs(node) if dtype_of(x).is_floating_point)
    return reached


def depends(trace: Trace, kind: TensorKind) -> set[Node]:
    """Return the tensors that depend on leaves of this kind."""
    found = set(trace.leaves(kind))
    for node in trace.calls():
        if found.intersection(reads(node)):
            found.update(outputs(node))
    return found


_SUPPORTED = {name: getattr(torch.optim, name) for name in OPTIMIZERS.values()}
# Others of torch, and why no plan runs them.
_REFUSED = {
    "Adafactor": "has states of rows and columns, which plans neither cut nor save",
    "LBFGS": "computes the loss several times a step, and a plan once",
    "SparseAdam": "needs sparse gradients, and those of a plan are dense",
}
# An optimizer, or several of one loss, each over its own parameters.
_Each = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
# Those of a step, or of each of its losses by the key of the loss in the output of the module.
Optimizers = _Each | Mapping[Any, _Each]
_DEFAULT = Optimizer("SGD", ((("lr", 1e-2),),))


@dataclass(frozen=True, slots=True)
class Training:
    """The optimizer, and the parameter group of each parameter that it updates, by canonical name.

    `losses`: the keys of several losses in the output of the module; `loss_of`: for a parameter, the name of the output
    that is its loss.
    """

    optimizer: Optimizer
    groups: dict[str, int]
    losses: tuple[Any, ...] = ()
    loss_of: dict[str, str] = field(default_factory=dict)

    def kind(self, name: str) -> str:
        """Return the class name of the optimizer of a parameter."""
        return self.optimizer.kind(self.groups[name])

    def of_pieces(self, segments: Mapping[str, tuple[str, int, int, int]]) -> "Training":
        """Return the training half with the segments of packed parameters too."""
        of = {piece: whole for piece, (whole, *_) in segments.items()}
        groups = {piece: self.groups[whole] for piece, whole in of.items() if whole in self.groups}
        losses = {piece: self.loss_of[whole] for piece, whole in of.items() if whole in self.loss_of}
        return replace(self, groups=self.groups | groups, loss_of=self.loss_of | losses)


def given_optimizers(module: nn.Module, optimizer: Optimizers | None) -> tuple[Given, ...]:
    """Return each optimizer of a step as the user made it, with the options that it has now."""
    names = {id(p): name for name, p in module.named_parameters()}
    if optimizer is None:
        return (Given(torch.optim.SGD, dict(_DEFAULT.groups[0]), [({}, list(names.values()))]),)
    found = []
    for _, one in optimizers_of(optimizer):
        known = inspect.signature(type(one)).parameters
        groups = [(_now(group), [names[id(p)] for p in group["params"]]) for group in one.param_groups]
        found.append(Given(type(one), _now({key: x for key, x in one.defaults.items() if key in known}), groups))
    return tuple(found)


def _now(options: Mapping[str, Any]) -> Any:
    """Return options without parameters, and without tensors, which a schedule changes in place."""
    kept = {key: x for key, x in options.items() if key not in ("params", "param_names")}
    return pytree.tree_map_only(Tensor, Tensor.item, kept)


def read_optimizers(module: nn.Module, optimizer: Optimizers | None, scaler: torch.amp.GradScaler | None) -> Training:
    """Return the training half of a captured optimizer, or of several, as one with the parameter groups of all.

    Raises CaptureError as `read_optimizer`, and for optimizers that share a parameter.
    """
    losses = tuple(optimizer) if isinstance(optimizer, Mapping) else ()
    if isinstance(optimizer, Mapping) and len(losses) < 2:
        raise InputError("optimizer={...} needs at least 2 losses; of one loss, pass the optimizer itself.")
    if losses and scaler is not None:
        raise InputError("a scaler scales one loss; capture several losses without it, in bf16 or float32.")
    if optimizer is None:
        return read_optimizer(module, None, scaler)
    if not (pairs := optimizers_of(optimizer)):
        raise InputError("optimizer=[] has no optimizer; give one, or None for inference.")
    options, groups, loss_of, kinds = list[Any](), dict[str, int](), dict[str, str](), list[str]()
    for key, own in pairs:
        found = read_optimizer(module, own, scaler)
        for name in (name for name in found.groups if name in groups):
            both = f", of the losses {loss_of[name].removeprefix(RESULT)[1:]!r} and {key!r}" if losses else ""
            raise CaptureError(f"{name} is a parameter of two optimizers{both}; leave it out of one of them.")
        groups |= {name: len(options) + number for name, number in found.groups.items()}
        loss_of |= dict.fromkeys(found.groups, f"{RESULT}.{key}") if losses else {}
        options += found.optimizer.groups
        kinds += [found.optimizer.name] * len(found.optimizer.groups)
    names = dict.fromkeys(kinds)
    if len(names) > 1:
        options = [((CLASS, kind), *group) for kind, group in zip(kinds, options, strict=True)]
    together = replace(found.optimizer, name="+".join(names), groups=tuple(options))
    return Training(together, groups, losses, loss_of)


def optimizers_of(optimizer: Optimizers | None) -> list[tuple[Any, torch.optim.Optimizer]]:
    """Return each optimizer of a step, with the key of its loss if there are several losses."""
    given = optimizer if isinstance(optimizer, Mapping) else {None: optimizer}
    every = ((key, own if isinstance(own, Sequence) else [own]) for key, own in given.items())
    return [(key, one) for key, some in every for one in some if one is not None]


def read_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, scaler: torch.amp.GradScaler | None = None
) -> Training:
    """Return the training half of a captured optimizer. None means SGD on all parameters that require gradients, for a
    graph that is only inspected; `ss.capture` refuses None.

    Raises CaptureError for a class outside OPTIMIZERS, and for parameters of another module.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    scaling = tuple(scaler.state_dict().items()) if scaler is not None else ()
    if optimizer is None:
        trained = {name: 0 for name, p in module.named_parameters() if p.requires_grad}
        return Training(replace(_DEFAULT, scaler=scaling), trained)
    kind = type(optimizer).__name__
    if _SUPPORTED.get(kind) is not type(optimizer):
        for name in (name for name, known in _SUPPORTED.items() if isinstance(optimizer, known)):
            raise CaptureError(
                f"{kind} is a class of its own over torch's {name}{_at(type(optimizer).step)}, whose changes a plan "
                f"would not run; capture with a torch.optim.{name}."
            )
        if type(optimizer) is getattr(torch.optim, kind, None) and kind in _REFUSED:
            raise CaptureError(f"torch.optim.{kind} {_REFUSED[kind]}; take one of {', '.join(_SUPPORTED)}.")
        raise CaptureError(unknown("optimizer", kind, _SUPPORTED))
    _require_new(optimizer, names)
    _refuse_changed(optimizer)
    groups: dict[str, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CaptureError(
                    f"parameter group {number} of {kind} holds a parameter of shape {tuple(parameter.shape)} that is "
                    f"none of the {len(names)} of {type(module).__name__}; make the optimizer of module.parameters()."
                )
            if parameter.requires_grad:
                groups[names[id(parameter)]] = number
    more = {key: optimizer.defaults[key] for key in CONSTRUCTED if key in optimizer.defaults}
    options = tuple(_options(type(optimizer), {**g, **more}) for g in optimizer.param_groups)
    return Training(Optimizer(kind, options, scaling), groups)


def named_optimizer(
    name: str, parameters: Iterable[nn.Parameter], lr: float, given: Iterable[str]
) -> torch.optim.Optimizer:
    """Return torch's optimizer of a name of the command line, with options as `key=value`.

    Raises InputError for an unknown key, with the nearest one, and for a value that the optimizer refuses.
    """
    kind = _SUPPORTED[OPTIMIZERS[name]]
    known = [key for key in inspect.signature(kind).parameters if key not in _NOT_SET]
    # Where torch may choose, a GPU updates by lists, which takes three times as long (runtime/optimizer.py).
    options: dict[str, Any] = {"fused": True} if kind in (torch.optim.Adam, torch.optim.AdamW) else {}
    for text in given:
        key, separator, value = text.partition("=")
        if not separator:
            raise InputError(f"--set {text} has no value; write --set KEY=VALUE, as {text}=0.1.")
        if key not in known:
            raise InputError(f"--set {text}: {unknown(f'option of torch.optim.{kind.__name__}', key, known)}")
        options[key] = by_looks(f"[{value}]" if "," in value else value)
    try:
        return kind(parameters, lr=lr, **options)
    except (ValueError, TypeError) as error:
        more = "".join(f" --set {text}" for text in given)
        hint = "; FILE.py:FUNCTION can give it these, and another one the rest" if kind.__name__ in WHOLE else ""
        raise InputError(f"--optimizer {name}{more}: {str(error).rstrip('.')}{hint}.") from None


# Arguments of optimizers that are no options of the command line, or have one of their own.
_NOT_SET = ("params", "lr", "foreach", "capturable", "differentiable", "fused")


def _refuse_changed(optimizer: torch.optim.Optimizer) -> None:
    """Raise CaptureError for an optimizer whose step is not torch's own alone."""
    kind = type(optimizer).__name__
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    for tables, whose in ((own, f"this {kind} has"), ((_global_pre_hooks, _global_post_hooks), "all optimizers have")):
        for hook in (hook for table in tables for hook in table.values()):
            raise CaptureError(f"{whose} hooks around the step{_at(hook)}, which a plan would not run; remove them.")
    # A learning rate schedule wraps `step`, and so does torch itself.
    step = inspect.unwrap(getattr(optimizer.step, "__func__", optimizer.step))
    if not str(getattr(step, "__module__", "")).startswith("torch.optim."):
        raise CaptureError(
            f"the step of this {kind} is replaced{_at(step)}, which a plan would not run; capture with torch's own, "
            "and change gradients in the forward, or the learning rate by the step's lr."
        )


def _at(function: Any) -> str:
    where = line_of(function)
    return f" ({where})" if where else ""


def _require_new(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    """Raise InputError for an optimizer that has taken steps: its state would be lost."""
    # Adagrad makes its state at once.
    used = [
        p for p, state in optimizer.state.items()
        if any(isinstance(v, Tensor) for v in state.values()) and float(state.get("step", 1))
    ]  # fmt: skip
    if used:
        kind = type(optimizer).__name__
        raise InputError(
            f"this {kind} has state of {len(used)} parameters already, {names.get(id(used[0]), 'one')} first, which a "
            f"plan does not take over; capture with a new {kind} over the same parameters, or before its first step."
        )


def _options(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the options of a group that the constructor takes, as plain values."""
    accepted = set(inspect.signature(kind).parameters) - {"params"}
    return tuple((name, _plain(value)) for name, value in group.items() if name in accepted)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    return value
