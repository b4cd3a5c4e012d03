"""Torch's optimizer of a rank over its slices, or over float32 copies of these; a check that torch's fused updates
equal the plain ones.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby, islice
from typing import Any, NoReturn

import torch
from torch import Tensor

from superscaler.errors import InputError
from superscaler.runtime.replayable.refusals import kernels_of
from superscaler.specs.options import CONSTRUCTED, kind_of
from superscaler.store.checkpoint import AVERAGE

# More elements than the vector of any kernel, and a rate at which an update is visible.
_SHAPE, _RATE = (3, 43), 0.05
# Relative to the largest element: the same float32 operations in another order.
ROUNDING = 4 * torch.finfo(torch.float32).eps
# The same of compiled steps, whose results differ by rounding anyway: torch's fused kernels for GPUs compute 1 - 0.999
# in float32 (torch 2.11).
COMPILED_ROUNDING = 3e-5
# On a GPU torch updates all weights in one list, and makes lists of temporary tensors. Lists of so many bytes of
# float32 are as fast. The fused kernel of Adam, which makes none, takes 1 - 0.999 for 0.00099999 there (torch 2.11).
LISTED = 1 << 28


class WithCopies(torch.optim.Optimizer):
    """An optimizer that updates float32 copies of 16-bit weights, and rounds each weight from its copy.

    The copy of a weight is one of its states, `copy`. A missing copy is made from the weight.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], **more: Any) -> None:
        """Take groups and options; gradients of 16-bit weights are float32, and so are states that are made here."""
        some = _halves(groups)
        for weight in some:
            weight.grad_dtype = torch.float32
        with _as_data(some, _empty(some)):
            super().__init__(groups, **more)  # type: ignore[call-arg]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights that have gradients."""
        some = [w for w in _halves(self.param_groups) if w.grad is not None]
        kept = [self.state[w].pop("copy", None) for w in some]
        copies = [w.detach().float() if copy is None else copy for w, copy in zip(some, kept, strict=True)]
        with _as_data(some, copies):
            super().step()
        if some:
            torch._foreach_copy_([w.detach() for w in some], copies)
        for weight, copy in zip(some, copies, strict=True):
            self.state[weight]["copy"] = copy

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of an optimizer of this class."""
        some = _halves(self.param_groups)
        # Torch casts states to the dtypes of their weights.
        with _as_data(some, _empty(some)):
            super().load_state_dict(state_dict)
        _lay_out_states(self)


def _halves(groups: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    return [w for group in groups for w in group["params"] if w.dtype in (torch.float16, torch.bfloat16)]


def _empty(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return float32 tensors of the shapes of weights, without memory."""
    return [w.new_empty((), dtype=torch.float32).expand(w.shape) for w in weights]


@contextmanager
def _as_data(weights: Sequence[Tensor], data: Sequence[Tensor]) -> Iterator[None]:
    """Replace the data of weights in the block."""
    own = [w.data for w in weights]
    try:
        for weight, other in zip(weights, data, strict=True):
            weight.data = other
        yield
    finally:
        for weight, other in zip(weights, own, strict=True):
            weight.grad, weight.data = None, other


@cache
def with_copies(name: str) -> Callable[..., WithCopies]:
    """Return torch's optimizer of this name as one that updates copies."""
    return type(name, (WithCopies, getattr(torch.optim, name)), {})


def optimizer_of(
    table: Sequence[Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    name: str,
    groups: Sequence[Mapping[str, Any]],
    is_mixed: bool = False,
    rounding: float = ROUNDING,
    is_recorded: bool = False,
) -> torch.optim.Optimizer | None:
    """Return torch's own optimizer over the local slices, in the user's parameter groups.

    `is_mixed`: float32 copies of 16-bit weights are updated. `rounding`: how far a fused update may be from the plain.
    `is_recorded`: updates are recorded, to be replayed; raises InputError if they cannot be.
    """
    members: list[list[Tensor]] = [[] for _ in groups]
    for entry in table:
        if entry["trained"]:
            members[entry["group"]].append(weights[entry["name"]])
    pairs = [(params, dict(options)) for params, options in zip(members, groups, strict=True) if params]
    for params, options in pairs:
        # The fused kernel passes over memory once. It is used if the user left the choice to torch and it is exact.
        if is_open(options) and is_plain(*kind_of(options, name), params, is_mixed, rounding):
            options["fused"] = True
        options |= kernels_of(name, options, params, is_mixed) if is_recorded else {}
    return together(name, [{"params": params, **options} for params, options in pairs], is_mixed) if pairs else None


def is_open(options: Mapping[str, Any]) -> bool:
    """Return whether the user leaves the kernels of an update to torch."""
    return options.get("fused") is None and not any(map(options.get, ("foreach", "differentiable", "capturable")))


def together(name: str, groups: Sequence[Mapping[str, Any]], is_mixed: bool = False) -> torch.optim.Optimizer:
    """Return torch's own optimizer over parameter groups: the one of this name, or those named by the groups."""
    kinds = groupby((kind_of(group, name) for group in groups), key=lambda pair: pair[0])
    made = [_made(kind, [options for _, options in some], is_mixed) for kind, some in kinds]
    return made[0] if len(made) == 1 else Together(made)


def _made(name: str, groups: list[dict[str, Any]], is_mixed: bool) -> torch.optim.Optimizer:
    more = {key: groups[0][key] for key in CONSTRUCTED if key in groups[0]}
    if is_mixed:
        return with_copies(name)(groups, **more)
    made: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **more)
    # Torch warns of steps that are not recorded.
    made._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    made.register_load_state_dict_post_hook(_lay_out_states)
    return made


def for_schedules(name: str, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer with parameter groups of these options, but without parameters and without a state."""
    made = together(name, [{**group, "params": [torch.nn.Parameter(torch.zeros(0, 0))]} for group in groups])
    # Schedules warn of an optimizer that has taken no step; this one takes none.
    made._opt_called = True  # type: ignore[attr-defined]
    made.register_state_dict_pre_hook(_refuse_state)
    made.register_load_state_dict_pre_hook(_refuse_state)
    return made


def _refuse_state(*_: Any) -> NoReturn:
    raise InputError(
        "step.optimizer has no state: it has the options of the parameter groups, for schedules. step.state_dict() and "
        "step.save(folder) have the state of the optimizer too."
    )


class Together(torch.optim.Optimizer):
    """Several optimizers that step together, each on parameter groups of its own."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = members
        super().__init__([group for one in members for group in one.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Share groups and states with the members."""
        self.param_groups = [group for one in self.members for group in one.param_groups]
        self.state = defaultdict(dict, {weight: state for one in self.members for weight, state in one.state.items()})
        for one in self.members:
            one.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights that have gradients."""
        for one in self.members:
            one.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of the same optimizers."""
        groups = iter(state_dict["param_groups"])
        for one in self.members:
            own = list(islice(groups, len(one.param_groups)))
            numbers = {number for group in own for number in group["params"]}
            states = {number: state for number, state in state_dict["state"].items() if number in numbers}
            one.load_state_dict({"state": states, "param_groups": own})
        self._share()


def is_listed(name: str, options: Mapping[str, Any], fuses: bool = False) -> bool:
    """Return whether a GPU updates weights of a parameter group by kernels over lists: Adam's, if they are not fused,
    as compiled and replayed steps (`fuses`) have them where the user leaves it open.

    >>> is_listed("AdamW", {"lr": 0.1}), is_listed("AdamW", {"fused": True}), is_listed("SGD", {})
    (True, False, False)
    """
    kind, options = kind_of(dict(options), name)
    return kind in ("Adam", "AdamW") and not options.get("fused") and not (fuses and is_open(options))


def at_once(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the weights that one call of the optimizer updates: all, or on a GPU lists of LISTED bytes."""
    some, size = dict[str, Tensor](), 0
    is_listed = not all(group.get("fused") for group in optimizer.param_groups)
    for name, weight in weights.items():
        more = 4 * weight.numel() if weight.is_cuda and is_listed else 0
        if some and size + more > LISTED:
            yield some
            some, size = {}, 0
        some[name], size = weight, size + more
    yield some


def changes_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an update changes gradients in place, which others may share: that of nesterov over lists."""
    return any(group.get("nesterov") and not group.get("fused") for group in optimizer.param_groups)


@contextmanager
def skipping(optimizer: torch.optim.Optimizer, found: Tensor | None) -> Iterator[None]:
    """Let fused updates in the block read whether weights and states stay as they are: where `found` is 1."""
    if found is None:
        yield
        return
    members = getattr(optimizer, "members", [optimizer])
    for one in members:
        one.grad_scale, one.found_inf = None, found  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for one in members:
            del one.grad_scale, one.found_inf  # type: ignore[attr-defined]


def average(
    optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], decay: float | None, found: Tensor | None = None
) -> None:
    """Move the averages of weights, states of the optimizer, towards the weights; the first averages are the weights.
    Without a decay the averages are dropped. `found`: 1 if all stay as they are.

    The average of a 16-bit weight with a float32 copy is float32.
    """
    states = [optimizer.state[weight] for weight in weights]
    if decay is None:
        for state in states:
            state.pop(AVERAGE, None)
        return
    values = [state.get("copy", weight.detach()) for state, weight in zip(states, weights, strict=True)]
    for state, value in zip(states, values, strict=True):
        if AVERAGE in state:
            own = state[AVERAGE]
            own.lerp_(value, 1 - decay if found is None else ((1 - found) * (1 - decay)).to(own.device, own.dtype))
        else:
            state[AVERAGE] = value.clone()


@contextmanager
def averaged(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Replace weights that have an average by it, in the block."""
    states = optimizer.state if optimizer is not None else {}
    pairs = [(weight.detach(), state[AVERAGE]) for weight, state in states.items() if AVERAGE in state]
    kept = [weight.clone() for weight, _ in pairs]
    try:
        for weight, mean in pairs:
            weight.copy_(mean)
        yield
    finally:
        for (weight, _), own in zip(pairs, kept, strict=True):
            weight.copy_(own)


def _lay_out_states(optimizer: torch.optim.Optimizer) -> None:
    """Give loaded states the strides of their weights."""
    for weight, states in optimizer.state.items():
        for name, value in states.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                states[name] = laid_out(value, weight)


def laid_out(x: Tensor, weight: Tensor) -> Tensor:
    """Return a tensor with the strides of a weight: a fused optimizer goes through both in the order of memory."""
    return x if x.stride() == weight.stride() else torch.empty_like(weight, dtype=x.dtype).copy_(x)


def is_plain(
    name: str,
    options: Mapping[str, Any],
    weights: Iterable[Tensor],
    is_mixed: bool = False,
    rounding: float = ROUNDING,
) -> bool:
    """Return whether fused updates of all weights, or of their copies, equal the plain ones, by default to the last
    digits of float32.
    """
    text = json.dumps({**options, "lr": _RATE}, sort_keys=True)
    kinds = {(torch.float32 if is_mixed else x.dtype, x.device, x.is_contiguous()) for x in weights}
    return all(_agrees(name, text, rounding, *kind) for kind in kinds)


@cache
def _agrees(
    name: str, options: str, rounding: float, dtype: torch.dtype, device: torch.device, is_contiguous: bool
) -> bool:
    """Compare two updates of a weight. Torch 2.13 does not update vectors of half precision (SGD, CPU)."""
    given = json.loads(options)
    try:
        fused, plain = (_updated(name, {**given, "fused": k}, dtype, device, is_contiguous) for k in (True, None))
    except (RuntimeError, TypeError):
        # Torch has no such kernel.
        return False
    return all(float((a - b).abs().max()) <= rounding * float(b.abs().max()) for a, b in zip(fused, plain, strict=True))


def _updated(
    name: str, options: Mapping[str, Any], dtype: torch.dtype, device: torch.device, is_contiguous: bool
) -> list[Tensor]:
    """Return a weight and its optimizer states after two updates, in float64."""
    draw = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        x = torch.randn(_SHAPE, generator=draw, dtype=torch.float64).to(device, dtype)
        return x if is_contiguous else x.t().contiguous().t()

    weight = drawn().requires_grad_()
    optimizer = getattr(torch.optim, name)([weight], **options)
    for _ in range(2):
        weight.grad = drawn()
        optimizer.step()
    states = [x for x in optimizer.state[weight].values() if isinstance(x, Tensor)]
    return [x.detach().double().cpu() for x in (weight, *states)]
