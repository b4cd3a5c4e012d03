"""Capture: an unmodified module and its example arguments -> the data-flow graph of one training iteration.

export -> read -> fold constants -> normalize -> infer indices -> name factors -> Model
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from superscaler.errors import CaptureError, InputError
from superscaler.frontend.autocast import read_autocast
from superscaler.frontend.constants import fold, rename
from superscaler.frontend.entries import Inputs, inputs_of, key_of, load, save
from superscaler.frontend.export import examples, export
from superscaler.frontend.flops import FlopCounter
from superscaler.frontend.gradients import depends, has_mirror, remove_idle_detaches, with_gradient
from superscaler.frontend.infer import Indexed, Inference, infer
from superscaler.frontend.linear import with_linearity
from superscaler.frontend.naming import name_factors
from superscaler.frontend.normalize import normalize, remove_dead
from superscaler.frontend.optimizer import Training, read_optimizer
from superscaler.frontend.segments import Segments, cut_segments
from superscaler.frontend.trace import Trace, read, substitute
from superscaler.ir.graph import Factor, Index, Model, Op, Operand, PTensor, Ref
from superscaler.timing import without_garbage_collection


@dataclass(frozen=True)
class Captured:
    """A captured step: the model; its initial values and example batch by pTensor name; the program it came from.

    `values` lacks what was built on the meta device. `fixed` has the buffers of the module's state that became
    constants, or that nothing reads: with the model's own tensors they are that state, whole. `seconds` has `export`
    (torch) and `capture` (the rest).
    """

    model: Model
    values: dict[str, Tensor]
    program: Callable[[], ExportedProgram]
    seconds: dict[str, float]
    batch: dict[str, Tensor]
    fixed: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def exported(self) -> ExportedProgram:
        return self.program()


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    autocast: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    cache: str | None = None,
) -> Captured:
    """Return the data-flow graph of `loss = module(*args, **kwargs); loss.backward(); optimizer.step()`.

    The forward runs under `torch.autocast` to "bf16" or "fp16", or in the autocast region around this call, if any.
    `scaler` scales the loss and skips updates whose gradients are not finite, as a loop with it does. With a name as
    `cache`, what was captured under it from equal files, versions, options and shapes is read from disk. Raises
    CaptureError where the module gives no scalar loss, cannot be exported, changes its inputs, or is on two
    devices, or where the optimizer is not supported; InputError for another name of autocast, and a cache of no name.
    """
    if cache and not isinstance(cache, str):
        raise InputError(
            f"cache={cache!r} does not tell models apart; give this one a name, as cache='mine', and another name "
            "where it differs in what is not in its files."
        )
    device = _device(module)
    cast = read_autocast(autocast, device.type)
    training = read_optimizer(module, optimizer, scaler)
    inputs = examples(module, args, kwargs or {})
    named = (training.optimizer.name, training.groups, bool(training.optimizer.scaler))
    chosen = (*named, aliases_of(module), device, cast)
    exported: ExportedProgram | None = None

    def program() -> ExportedProgram:
        if exported is not None:
            return exported
        with torch.autocast(device.type, enabled=False):
            return export(module, *inputs, cast)

    start = exported_at = time.perf_counter()
    key = key_of(cache, module, inputs, *chosen) if cache else ""
    kept = load(key, module) if cache else None
    if kept is None:
        with torch.autocast(device.type, enabled=False), without_garbage_collection():
            start = time.perf_counter()
            exported = program()
            exported_at = time.perf_counter()
            kept = (*_read(module, exported, training, device), inputs_of(exported))
        # Another key says that the model loaded code, or set a buffer, as it ran: no later capture asks for that key.
        if cache and key == key_of(cache, module, inputs, *chosen):
            save(key, module, *kept)
    model, values, names = kept
    model = replace(model, optimizer=training.optimizer)
    _warn_of_underflow(model)
    seconds = {"export": exported_at - start, "capture": time.perf_counter() - exported_at}
    return Captured(model, values, program, seconds, _batch(names, args, kwargs or {}), _fixed(module, model))


def _fixed(module: nn.Module, model: Model) -> dict[str, Tensor]:
    """Return what a module saves and the model has not, as far as it has data."""
    known = {*model.tensors, *model.aliases, *(packed for packed, *_ in model.segments.values())}
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    return {name: value.detach().clone() for name, value in state.items() if name not in known and not value.is_meta}


def _read(
    module: nn.Module, exported: ExportedProgram, training: Training, device: torch.device
) -> tuple[Model, dict[str, Tensor]]:
    """Return the model that is in an exported program, and its values."""
    aliases = aliases_of(module)
    trace = read(exported, aliases)
    _require_values(module, trace)
    remove_dead(trace)
    fold(trace, device)
    normalize(trace)
    segments = cut_segments(trace)
    pieces = {piece: training.groups[p] for piece, (p, *_) in segments.items() if p in training.groups}
    trace.values = {name: value.contiguous() for name, value in trace.values.items()}
    training = replace(training, groups={**training.groups, **pieces})
    return _build(trace, training, aliases, segments), trace.values


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Return for each further name of a tied parameter the name that is kept: the first of `named_parameters`."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            found[name] = first[id(parameter)]
    return found


def _require_values(module: nn.Module, trace: Trace) -> None:
    """Add the parameters that the graph does not read, so that they are saved and loaded like the others."""
    for name, parameter in module.named_parameters():
        if name not in trace.specs:
            raise CaptureError(f"parameter {name} of {type(module).__name__} is not in the exported graph; rename it.")
        if not parameter.is_meta:
            trace.values[name] = parameter.detach()


def _device(module: nn.Module) -> torch.device:
    """Return where constants are computed: on the module's device, on the CPU for a module without data."""
    first: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        first.setdefault(parameter.device, name)
    if len(first) > 1:
        (here, one), (there, other), *_ = first.items()
        raise CaptureError(
            f"parameter {one} of {type(module).__name__} is on {here}, but {other} on {there}; "
            "put the whole module on one device before it is captured."
        )
    device = next(iter(first), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _warn_of_underflow(model: Model) -> None:
    found = [t.name for t in model.tensors.values() if t.requires_grad and t.dtype == "float16"]
    if found and not model.optimizer.scaler:
        warnings.warn(
            f"{len(found)} tensors of this model, {found[0]} first, have float16 gradients, which are 0 where "
            "they should be below 6e-8; give capture a scaler=torch.amp.GradScaler(...), or use bf16.",
            stacklevel=4,
        )


def _batch(inputs: Inputs, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the example inputs by the names that export gave them, in its order."""
    flat = pytree.tree_leaves((args, {k: kwargs[k] for k in inputs.keywords}))
    return {name: v for name, v in zip(inputs.names, flat, strict=True) if isinstance(v, Tensor)}


def _build(trace: Trace, training: Training, aliases: dict[str, str], segments: Segments) -> Model:
    trained = set(training.groups)
    same = remove_idle_detaches(trace, trained)
    trace.calls = [rename(call, same) for call in trace.calls if call.outputs[0] not in same]
    trace.rename_results(same)
    needed = with_gradient(trace, trained)
    if trace.loss not in needed:
        raise CaptureError(
            f"the loss depends on none of the {len(trained)} parameters that the optimizer trains; "
            "check requires_grad, torch.no_grad and .detach() in the model."
        )
    found = infer(trace)
    builder = Builder(trace, found, needed)
    forward = builder.forward()
    updates = [builder.update(name, group, training) for name, group in training.groups.items() if name in needed]
    updates += [builder.write(name, new) for name, new in trace.writes.items()]
    tensors = {name: builder.tensor(name) for name in _order(trace)}
    inputs = tuple(name for name, kind in trace.kinds.items() if kind == "input")
    ops, factors = (*forward, *updates), builder.factors()
    return Model(
        tensors, ops, factors, inputs, trace.loss, training.optimizer, aliases, dict(found.unsupported), segments
    )


def _order(trace: Trace) -> list[str]:
    kinds = ("parameter", "buffer", "input", "constant")
    leaves = [name for kind in kinds for name, k in trace.kinds.items() if k == kind]
    return leaves + [name for call in trace.calls for name in call.outputs]


class Builder:
    """Writes the inferred graph down as frozen data."""

    def __init__(self, trace: Trace, found: Inference, needed: set[str]) -> None:
        self.trace = trace
        self.found = found
        self.needed = needed
        self.names = name_factors(trace, found)
        self.flops = FlopCounter()
        self.from_weights = depends(trace, ("parameter",))
        self.from_inputs = depends(trace, ("input",))

    def factors(self) -> dict[str, Factor]:
        spans = [s for name in self.found.dims for dim in self.found.classes(name) for s in dim]
        spans += [s for indexed in self.found.calls for s in indexed.classes]
        return {self.names[id(s)]: Factor(self.names[id(s)], s.size) for s in spans}

    def tensor(self, name: str) -> PTensor:
        spec, dims = self.trace.specs[name], self.found.classes(name)
        slots = tuple(tuple(self.names[id(s)] for s in dim) for dim in dims)
        extents = tuple(s.size for dim in dims for s in dim)
        dtype, kind = str(spec.dtype).removeprefix("torch."), self.trace.kinds.get(name, "activation")
        return PTensor(name, spec.shape, dtype, kind, slots, extents, name in self.needed)

    def forward(self) -> list[Op]:
        return with_linearity(self._op(indexed) for indexed in self.found.calls)

    def _op(self, indexed: Indexed) -> Op:
        call = indexed.call
        reads = call.reads()
        numbers = iter(range(len(reads)))
        args, kwargs = substitute((call.args, _options(call.kwargs)), lambda _: Ref(next(numbers)))
        pairs = zip(indexed.classes, indexed.marks, strict=True)
        return Op(
            name=call.name,
            target=call.target,
            args=_literal(args),
            kwargs=tuple((k, _literal(v)) for k, v in kwargs.items()),
            inputs=tuple(Operand(n, s) for n, s in zip(reads, indexed.inputs, strict=True)),
            outputs=tuple(Operand(n, s) for n, s in zip(call.outputs, indexed.outputs, strict=True)),
            indices=tuple(Index(s.size, self.names[id(s)], mark) for s, mark in pairs),
            has_mirror=has_mirror(call, self.needed),
            module=call.module,
            source=call.source,
            flops=self.flops.count(call, self.trace.specs),
            from_data=not self.from_weights.intersection(call.outputs),
            from_weights=not self.from_inputs.intersection(call.outputs),
        )

    def update(self, name: str, group: int, training: Training) -> Op:
        """Return the op that updates a parameter in place; each of its elements is updated apart."""
        return self._in_place(name, f"update.{name}", f"ss.{training.optimizer.name}", group=group)

    def write(self, name: str, new: str) -> Op:
        """Return the op that sets a buffer at the end of the step."""
        if new in self.trace.kinds:
            raise CaptureError(f"the model sets its buffer {name} to {new}, which it does not compute; take it out.")
        return self._in_place(name, f"write.{name}", "ss.write", (new,))

    def _in_place(self, name: str, op: str, target: str, others: tuple[str, ...] = (), group: int = 0) -> Op:
        tensor = self.tensor(name)
        factors = [factor for dim in tensor.slots for factor in dim]
        slots = tuple(range(len(factors)))
        return Op(
            name=op,
            target=target,
            args=tuple(map(Ref, range(1 + len(others)))),
            kwargs=(),
            inputs=tuple(Operand(x, slots) for x in (name, *others)),
            outputs=(Operand(name, slots),),
            indices=tuple(Index(size, f, "spatial") for size, f in zip(tensor.extents, factors, strict=True)),
            kind="optimizer",
            module=name.rpartition(".")[0],
            from_weights=True,
            group=group,
        )


_DROPPED = frozenset({"device", "layout", "memory_format", "pin_memory", "generator", "non_blocking"})


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _DROPPED}


def _literal(value: Any) -> Any:
    """Return an argument as a plain value: dtypes as text, nothing that names a device or a memory layout."""
    if isinstance(value, tuple):
        return tuple(_literal(v) for v in value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.device | torch.layout | torch.memory_format | torch.Generator):
        return None
    return value
