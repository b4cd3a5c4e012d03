"""The oracle of equality checks: torch runs the exported program itself in another dtype, without any of our rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.func import functional_call
from torch.fx import Interpreter, Node

from superscaler.frontend.base.captured import Captured
from superscaler.frontend.base.results import names_of
from superscaler.groups import collect
from superscaler.ir.model import Model

Draw = Callable[[str, tuple[int, ...]], Tensor]
Dtype = torch.dtype | None
# Random functions -> their results, computed from uniform numbers and their own arguments.
DRAWN: Mapping[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("rand", "rand_like"), lambda u, *_, **__: u),
    **dict.fromkeys(("randn", "randn_like"), lambda u, *_, **__: _normal(u)),
    **dict.fromkeys(("randint", "randint_like"), lambda u, *given, **named: _whole(u, *given, **named)),
    "bernoulli": lambda u, x, p=None, **_: u < (x if p is None else p),
    "uniform": lambda u, x, *given, **named: _between(u, *given, **named),
    "normal_functional": lambda u, x, mean=0.0, std=1.0, **_: _normal(u) * std + mean,
    "normal": lambda u, mean, std=1.0, **_: (_normal(u) * std + mean).detach(),
    "exponential": lambda u, x, lambd=1.0, **_: (u.double() + 2.0**-25).log() / -lambd,
}
_CONSTANT = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_ATTENTION = "aten.scaled_dot_product_attention.default"


def _normal(u: Tensor) -> Tensor:
    return torch.special.ndtri(u.double() + 2.0**-25)


def _between(u: Tensor, *given: float, to: float = 1.0, **named: Any) -> Tensor:
    """Return numbers between `from`, a word of Python, and `to`."""
    low = given[0] if given else named.get("from", 0.0)
    high = given[1] if len(given) > 1 else to
    return u.double() * (high - low) + low


def _whole(u: Tensor, *given: Any, low: int = 0, high: int | None = None, **_: Any) -> Tensor:
    """Return integers in [low, high); `low` defaults to 0."""
    bounds = [low, *(x for x in (*given, high) if isinstance(x, int))]
    low, high = bounds[-2:]
    return (u.double() * (high - low)).floor() + low


def packed(model: Model, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole parameters that the model has in segments."""
    parts = collect(((name, dim), values[piece]) for piece, (name, dim, *_) in model.segments.items())
    return {name: torch.cat(some, dim) for (name, dim), some in parts.items()}


def pieces(model: Model, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the segments of packed parameters, or of their gradients, which may be None."""
    rows = ((piece, values[name], cut) for piece, (name, *cut) in model.segments.items() if name in values)
    return {piece: x if x is None else x.narrow(dim, lo, hi - lo) for piece, x, (dim, lo, hi) in rows}


class Reference(NamedTuple):
    """The results of one step of the unsplit program: no loss if nothing is trained, None for a missing gradient."""

    loss: Tensor | None
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    outputs: Mapping[str, Tensor] = {}

    def tensors(self) -> dict[tuple[str, str], Tensor]:
        """Return the tensors of the step by their kinds and names."""
        kinds = {"output": self.outputs, "gradient": self.gradients, "buffer": self.buffers}
        found = {("loss", ""): self.loss, **{(kind, n): x for kind, some in kinds.items() for n, x in some.items()}}
        return {key: x for key, x in found.items() if x is not None}


def dense(gradient: Tensor | None, of: Tensor) -> Tensor:
    """Return the gradient of a tensor: zeros if there is none, with all elements if it is sparse."""
    return torch.zeros_like(of) if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient


def gradients_of(
    loss: Tensor | None, outputs: Mapping[str, Tensor], leaves: Mapping[str, Tensor], loss_of: Mapping[str, str]
) -> dict[str, Tensor | None]:
    """Return the gradient of each leaf by torch: of its own loss among the outputs, or of the one loss, if any."""
    found: dict[str, Tensor | None] = {}
    for name in dict.fromkeys(loss_of.get(leaf, "") for leaf in leaves):
        own = {leaf: x for leaf, x in leaves.items() if loss_of.get(leaf, "") == name}
        end = outputs[name] if name else loss
        if end is not None:
            made = torch.autograd.grad(end, list(own.values()), retain_graph=bool(name), allow_unused=True)
            found |= zip(own, made, strict=True)
    return found


def call_with(
    module: nn.Module, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a module with other parameters and buffers, by name; `tensors` then has those that it ended with.

    In a block that leaves the module `untouched`: torch leaves its tensors in a submodule with two names.
    """
    return functional_call(module, tensors, args, dict(kwargs or {}))


def largest(x: Tensor) -> float:
    """Return the largest finite element, by size."""
    return float(x.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0


def is_same(one: Tensor, other: Tensor) -> Tensor:
    """Return for each element whether it is equal in both; nan equals nan."""
    return (one == other) | ((one != one) & (other != other))


def gaps(one: Tensor, other: Tensor) -> Tensor:
    """Return the difference of each element, infinite between nan and a number."""
    gap = (one.double() - other.double()).abs().nan_to_num(torch.inf, torch.inf)
    return torch.where(is_same(one, other), 0.0, gap)


def largest_gap(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors; infinite if their shapes differ."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    # Nan, if one of them or both have one, and where both are infinite.
    gap = float((one.double() - other.double()).abs().max())
    return gap if isfinite(gap) else float(gaps(one, other).max())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make a dtype that of tensors which are given none, as of an integer divided by a number."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def reference_step(
    captured: Captured,
    batch: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    dtype: Dtype = None,
    draw: Draw | None = None,
) -> Reference:
    """Return the loss, the gradients of the trained parameters by canonical name, the changed buffers, and the outputs.

    `dtype` replaces every floating dtype, also in casts and factories. Dropout keeps everything.
    `draw(node, shape)` returns the uniform numbers for other random operators; without it torch draws them.
    """
    model = captured.model
    trained = [t.name for t in model.trained_parameters()]
    leaves = {name: retyped(values[name].detach(), dtype).clone().requires_grad_() for name in trained}
    device = next((x.device for x in values.values()), torch.device("cpu"))
    known = {**values, **leaves, **batch}
    known.update(packed(model, known))
    inputs = [_argument(captured, spec, known, dtype, device) for spec in captured.exported.graph_signature.input_specs]
    before = torch.get_default_dtype()
    with default_dtype(dtype or before), torch.enable_grad():
        results = list(_Retyped(captured.exported, dtype, before, device, draw).run(*inputs))
        loss: Tensor | None = results.pop() if model.loss else None
        losses = dict(zip(reversed(names_of(model.result)), reversed(results), strict=False))
        gradients = gradients_of(loss, losses, leaves, captured.call.loss_of)
    specs = captured.exported.graph_signature.output_specs
    written = [str(spec.target) for spec in specs if spec.kind is OutputKind.BUFFER_MUTATION]
    made = dict(zip((*written, *names_of(model.result)), (x.detach() for x in results), strict=True))
    outputs = {name: made.pop(name) for name in names_of(model.result)}
    # The program returns unchanged buffers too.
    changed = {op.inputs[0].tensor for op in model.ops if op.is_write}
    buffers = {name: made[name] for name in written if name in changed}
    return Reference(None if loss is None else loss.detach(), gradients, buffers, outputs)


def _argument(captured: Captured, spec: Any, known: Mapping[str, Tensor], dtype: Dtype, device: torch.device) -> Any:
    """Return the value of one placeholder: the given one, or the constant in the program."""
    exported = captured.exported
    if _is_constant(exported, spec):
        value = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
        if value is not None and not value.is_meta:
            return value.to(device)
        if value is not None and not value.numel():
            return torch.empty(value.shape, dtype=value.dtype, device=device)
    name = captured.model.aliases.get(spec.target, spec.target) if spec.target else getattr(spec.arg, "name", "")
    value = known.get(name)
    return getattr(spec.arg, "value", None) if value is None else retyped(value.to(device), dtype)


def _is_constant(exported: ExportedProgram, spec: InputSpec) -> bool:
    return spec.kind in _CONSTANT and spec.target not in exported.graph_signature.buffers_to_mutate.values()


def retyped(value: Tensor, dtype: Dtype) -> Tensor:
    return value.to(dtype) if dtype is not None and value.dtype.is_floating_point else value


class _Retyped(Interpreter):
    """An interpreter that runs a graph in another floating dtype, on another device, without dropout.

    A value that depends on no input or parameter is part of the model: it is computed in its own dtype, then retyped.
    """

    def __init__(
        self,
        exported: ExportedProgram,
        dtype: Dtype,
        default: torch.dtype,
        device: torch.device,
        draw: Draw | None,
    ) -> None:
        super().__init__(exported.graph_module)
        constant = {s.arg.name for s in exported.graph_signature.input_specs if _is_constant(exported, s)}
        self.constants: set[Node] = set()
        for node in exported.graph.nodes:
            inner = node.op == "call_function" and all(n in self.constants for n in node.all_input_nodes)
            inner = inner and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
            if inner or (node.op == "placeholder" and node.name in constant):
                self.constants.add(node)
        self.dtype = dtype
        self.default = default
        self.device = device
        self.draw = draw

    def run_node(self, node: Node) -> Any:
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        if self.draw is not None and node.op == "call_function" and name in DRAWN:
            spec = node.meta["val"]
            args, _ = self.fetch_args_kwargs_from_env(node)
            drawn = DRAWN[name](self.draw(node.name, tuple(spec.shape)), *args)
            return drawn.to(dtype=self._convert(spec.dtype), device=self.device)
        if node not in self.constants or node.op != "call_function":
            return super().run_node(node)
        if "_assert" in str(node.target):
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        kwargs = {k: self.device if isinstance(v, torch.device) else v for k, v in kwargs.items()}
        with default_dtype(self.default), torch.no_grad():
            return super().call_function(node.target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(target)
        if "_assert" in name:
            return None
        args, kwargs = self._convert(args), self._convert(kwargs)
        if name == "aten.native_dropout.default":
            return args[0], torch.ones_like(args[0], dtype=torch.bool)
        if name == _ATTENTION:
            args = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:])
            kwargs.pop("dropout_p", None)
        if name == "aten.copy.default":
            return args[1].to(args[0].dtype).expand(args[0].shape)
        if name == "aten.histc.default" and not args[0].is_floating_point():
            return target(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        # The strides of results differ between devices and dtypes; a view needs the captured ones.
        return args[0].reshape(args[1]) if name == "aten.view.default" else target(*args, **kwargs)

    def _convert(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return retyped(value, self.dtype)
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, torch.dtype):
            return self.dtype if self.dtype is not None and value.is_floating_point else value
        if isinstance(value, dict):
            return {k: self._convert(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._convert(v) for v in value)
        return value


def values_of(module: nn.Module, model: Model) -> dict[str, Tensor]:
    """Return the model's values from its module: parameters, segments of them, and buffers, if not on meta."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers(remove_duplicate=False))}
    found = {name: value.detach() for name, value in named.items() if not value.is_meta}
    return {name: value.contiguous() for name, value in {**found, **pieces(model, found)}.items()}
