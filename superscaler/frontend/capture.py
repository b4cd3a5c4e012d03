"""Capture: an unmodified module and its example arguments -> the data-flow graph of one training iteration.

export (experts and autocast are made explicit) -> read -> fold constants -> simplify by them -> decompose -> cut packed
weights -> drop idle detaches -> infer indices -> name factors -> Model
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from superscaler.errors import CaptureError, InputError
from superscaler.frontend.agreement import agree
from superscaler.frontend.autocast import Autocast, read_autocast
from superscaler.frontend.capture_cache import Inputs, inputs_of, key_of, load, save
from superscaler.frontend.effects import refuse_shared
from superscaler.frontend.export import examples, export
from superscaler.frontend.infer import Indexed, Inference, infer
from superscaler.frontend.losses import separate
from superscaler.frontend.naming import name_factors
from superscaler.frontend.packed_weights import Segments, cut_segments
from superscaler.frontend.precision import Narrowed, narrowed
from superscaler.frontend.results import names_of
from superscaler.frontend.rewrites.constants import fold
from superscaler.frontend.rewrites.normalize import normalize, remove_dead
from superscaler.frontend.trace import Trace, base_of, dtype_of, op_name, outputs, read, reads, shape_of, target_of
from superscaler.frontend.training import (
    Optimizers,
    Training,
    depends,
    read_optimizers,
    remove_idle_detaches,
    with_gradient,
)
from superscaler.ir.model import (
    Factor,
    Index,
    Mark,
    Model,
    Op,
    Operand,
    Optimizer,
    PTensor,
    Ref,
    TensorKind,
    common_module,
)
from superscaler.ir.model_text import unique
from superscaler.ops.table import row_of, with_linearity
from superscaler.specs.options import WHOLE
from superscaler.specs.reads import watched
from superscaler.timing import timed, without_garbage_collection


@dataclass(frozen=True)
class Call:
    """The captured call of a module, its autocast, the modes of its submodules, and the updated parameters. For several
    losses, also their keys, and for each parameter the output that is its loss.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Inputs
    training: tuple[bool, ...]
    autocast: Autocast | None = None
    updated: frozenset[str] = frozenset()
    losses: tuple[Any, ...] = ()
    loss_of: Mapping[str, str] = field(default_factory=dict)

    def batch(self) -> dict[str, Tensor]:
        """Return the example inputs by their exported names, in export's order."""
        pairs = zip(self.inputs.names, self._flat()[0], strict=True)
        return {name: value for name, value in pairs if isinstance(value, Tensor)}

    def arguments(self, batch: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call with a batch in the place of the example."""
        flat, spec = self._flat()
        pairs = zip(self.inputs.names, flat, strict=True)
        args, kwargs = pytree.tree_unflatten([batch.get(name, value) for name, value in pairs], spec)
        return args, kwargs

    def _flat(self) -> tuple[list[Any], pytree.TreeSpec]:
        return pytree.tree_flatten((self.args, {name: self.kwargs[name] for name in self.inputs.keywords}))


@dataclass(frozen=True)
class Captured:
    """A captured step: the model; its initial values and example batch by pTensor name; the captured call and exported
    program.

    `values` lacks tensors on the meta device. `fixed` has the buffers of the module's state that became constants, or
    that nothing reads: with the model's own tensors they are that state, whole. `seconds`: of `export` (torch),
    `capture` (the rest) and `check`. `checked`: one line about the check of the module.
    """

    model: Model
    values: dict[str, Tensor]
    call: Call
    program: Callable[[], ExportedProgram]
    seconds: dict[str, float]
    batch: dict[str, Tensor]
    fixed: dict[str, Tensor] = field(default_factory=dict)
    checked: str = ""

    @cached_property
    def exported(self) -> ExportedProgram:
        return self.program()


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    optimizer: Optimizers | None = None,
    autocast: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    cache: str | None = None,
    is_trained: bool = True,
    is_kept: bool = False,
    check: bool = False,
    precision: str | None = None,
) -> Captured:
    """Return the captured step of a module; `superscaler.plan.capture` describes the common arguments.

    `is_trained`: the step has a backward and updates. `is_kept`: it returns the module's results beside its loss.
    Raises CaptureError for a graph that differs from the module (`check`), for a module that gives no scalar loss,
    cannot be exported, changes its inputs, or is on two devices, or for another optimizer; InputError for other wrong
    arguments.
    """
    if cache and not isinstance(cache, str):
        raise InputError(
            f"cache={cache!r} is not the name of a model; name this one, as cache='mine', and use another name "
            "for a model that differs in anything outside its files."
        )
    device = _device(module)
    cast = read_autocast(autocast, device.type)
    training = read_optimizers(module, optimizer, scaler) if is_trained else Training(Optimizer("", ()), {})
    is_kept = is_kept or bool(training.losses)
    refuse_shared(module, training.groups)
    if precision is not None:
        if cast is not None:
            raise InputError(
                "autocast and precision exclude each other: autocast casts float32 weights in the graph, precision has "
                "16-bit weights with float32 copies; capture with one of them, and outside of torch.autocast."
            )
        module, optimizer, args, kwargs = narrowed(Narrowed(module, optimizer, args, kwargs), precision)
        training = replace(training, optimizer=replace(training.optimizer, precision=precision if is_trained else ""))
    inputs = examples(module, args, kwargs or {})
    kinds = [training.kind(name) for name in training.groups]
    named = (kinds, training.groups, training.loss_of, bool(training.optimizer.scaler), precision)
    chosen = (*named, aliases_of(module), device, cast, is_trained, is_kept)
    exported: ExportedProgram | None = None

    def program() -> ExportedProgram:
        if exported is not None:
            return exported
        with torch.autocast(device.type, enabled=False):
            return export(module, *inputs, cast, is_trained, is_kept, training.losses)[0]

    seconds = dict.fromkeys(("export", "capture", "check"), 0.0)
    with timed(seconds, "capture"):
        key = key_of(cache, module, inputs, *chosen) if cache else ""
        kept = load(key, module, check) if cache else None
    is_new, is_asked = kept is None, False
    if kept is None:
        with torch.autocast(device.type, enabled=False), without_garbage_collection(), watched(False) as seen:
            with timed(seconds, "export"):
                exported, form = export(module, *inputs, cast, is_trained, is_kept, training.losses)
            with timed(seconds, "capture"):
                kept = (*_read(module, exported, form, training, device), inputs_of(exported), "")
        # A key that changed while the model ran (it loaded code, or set a buffer) is no later capture's key. Files that
        # the model reads in its forward are not part of any key.
        reads_nothing = not seen.own and not seen.unknown
        is_asked = bool(cache and reads_nothing and key == key_of(cache, module, inputs, *chosen))
    model, values, names, checked = kept
    model = replace(model, optimizer=training.optimizer)
    _warn_of_underflow(model)
    modes = tuple(m.training for m in module.modules())
    given, losses = (tuple(args), dict(kwargs or {})), (training.losses, training.of_pieces(model.segments).loss_of)
    call = Call(module, *given, names, modes, cast, frozenset(training.groups), *losses)
    captured = Captured(model, values, call, program, seconds, call.batch(), _fixed(module, model), checked)
    if is_new and check:
        with timed(seconds, "check"), torch.autocast(device.type, enabled=False):
            captured = replace(captured, checked=agree(captured, optimizer))
    if is_asked:
        save(key, module, model, values, names, captured.checked)
    return captured


def _fixed(module: nn.Module, model: Model) -> dict[str, Tensor]:
    """Return the tensors of a module's state that the model lacks, as far as they have data."""
    known = {*model.tensors, *model.aliases, *(packed for packed, *_ in model.segments.values())}
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    return {name: value.detach().clone() for name, value in state.items() if name not in known and not value.is_meta}


def _read(
    module: nn.Module, exported: ExportedProgram, form: str, training: Training, device: torch.device
) -> tuple[Model, dict[str, Tensor]]:
    """Return the model in an exported program, and its values."""
    aliases = aliases_of(module)
    trace = read(exported, aliases, names_of(form))
    _require_values(module, trace)
    remove_dead(trace)
    fold(trace, device)
    normalize(trace)
    _copy_given(trace)
    segments = cut_segments(trace, [name for name in training.groups if training.kind(name) in WHOLE])
    values = {x.name: x.meta["value"].contiguous() for x in trace.leaves() if x.meta.get("value") is not None}
    training = training.of_pieces(segments)
    if training.losses:
        separate(trace, training.loss_of)
        remove_dead(trace)
    return replace(_build(trace, training, aliases, segments), result=form), values


def _copy_given(trace: Trace) -> None:
    """Replace outputs, new values of buffers, and the loss by copies if no op makes them (a weight or an input, or a
    view of one): weights and buffers change at the end of the step.
    """
    end, results = trace.graph.output_node(), list(trace.results)
    for at, (name, node) in enumerate(zip((*trace.writes, *trace.kept, "loss"), results, strict=False)):
        if name != node.name and "kind" in base_of(node).meta:
            with trace.graph.inserting_before(end):
                copy = trace.graph.call_function(torch.ops.aten.clone.default, (node,))
            plain = {"module": node.meta.get("module", ""), "source": "", "region": None}
            (results[at],) = trace.name_call(copy, name.replace(".", "_") + "_copy", plain, node.meta["val"])
    end.args = (tuple(results),)


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Return the kept name of each further name of a tied parameter: the first of `named_parameters`."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            found[name] = first[id(parameter)]
    return found


def _require_values(module: nn.Module, trace: Trace) -> None:
    known = {leaf.name for leaf in trace.leaves("parameter")}
    for name, _ in module.named_parameters():
        if name not in known:
            raise CaptureError(f"parameter {name} of {type(module).__name__} is not in the exported graph; rename it.")


def _device(module: nn.Module) -> torch.device:
    """Return the device of constants: the module's device, or the CPU for a module without data."""
    first: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise CaptureError(
                f"parameter {name} of {type(module).__name__} has no shape yet; call the module once before capture."
            )
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


def _build(trace: Trace, training: Training, aliases: dict[str, str], segments: Segments) -> Model:
    trained = [leaf for leaf in trace.leaves("parameter") if leaf.name in training.groups]
    remove_idle_detaches(trace, trained)
    needed = with_gradient(trace, trained, trace.loss)
    if trace.loss is not None and trace.loss not in needed:
        raise CaptureError(
            f"the loss depends on none of the {len(training.groups)} parameters that the optimizer trains; "
            "check requires_grad, torch.no_grad, .detach() and reentrant checkpoints in the model."
        )
    found = infer(trace)
    builder = Builder(trace, found, needed)
    forward = builder.forward()
    needing = {leaf.name: leaf for leaf in needed}
    given = {}
    updates = [
        builder.in_place(needing[n], f"update.{n}", f"ss.{training.kind(n)}", group=group)
        for n, group in training.groups.items()
        if n in needing
    ]
    updates += [builder.in_place(buffer, f"write.{buffer.name}", "ss.write", new) for buffer, new in trace.written()]
    for name, new in trace.outputs():
        given[name] = replace(builder.tensor(new), name=name, kind="output", requires_grad=False)
        updates.append(builder.in_place(given[name], name, "ss.output", new))
    kinds: tuple[TensorKind, ...] = ("parameter", "buffer", "input", "constant")
    leaves = [leaf for kind in kinds for leaf in trace.leaves(kind)]
    tensors = {x.name: builder.tensor(x) for x in (*leaves, *(x for node in trace.calls() for x in outputs(node)))}
    tensors |= given
    inputs = tuple(leaf.name for leaf in trace.leaves("input"))
    ops, factors = (*forward, *updates), builder.factors()
    assert len({op.name for op in ops}) == len(ops), "two ops of one name"
    loss, unsupported = "" if trace.loss is None else trace.loss.name, dict(found.unsupported)
    return Model(tensors, ops, factors, inputs, loss, training.optimizer, aliases, unsupported, segments)


class Builder:
    """A writer of the inferred graph as frozen data."""

    def __init__(self, trace: Trace, found: Inference, needed: Set[Node]) -> None:
        self.found = found
        self.needed = needed
        self.names = name_factors(trace, found)
        self.from_weights = depends(trace, "parameter")
        self.from_inputs = depends(trace, "input")
        self.checkpoints = _checkpoints(indexed.call for indexed in found.calls)

    def factors(self) -> dict[str, Factor]:
        spans = [s for name in self.found.dims for dim in self.found.classes(name) for s in dim]
        spans += [s for indexed in self.found.calls for s in indexed.classes]
        return {self.names[id(s)]: Factor(self.names[id(s)], s.size) for s in spans}

    def tensor(self, node: Node) -> PTensor:
        dims = self.found.classes(node)
        slots = tuple(tuple(self.names[id(s)] for s in dim) for dim in dims)
        extents = tuple(s.size for dim in dims for s in dim)
        dtype, kind = str(dtype_of(node)).removeprefix("torch."), node.meta.get("kind", "activation")
        return PTensor(node.name, shape_of(node), dtype, kind, slots, extents, node in self.needed)

    def forward(self) -> list[Op]:
        return with_linearity(self._op(indexed) for indexed in self.found.calls)

    def _op(self, indexed: Indexed) -> Op:
        call = indexed.call
        read, made, numbers = reads(call), outputs(call), count()
        indices = zip(indexed.classes, indexed.marks, indexed.until, strict=True)
        op = Op(
            name=op_name(call),
            target=target_of(call),
            args=_literal(call.args, numbers),
            kwargs=tuple((k, _literal(v, numbers)) for k, v in call.kwargs.items() if k not in _DROPPED),
            inputs=tuple(Operand(x.name, s) for x, s in zip(read, indexed.inputs, strict=True)),
            outputs=tuple(Operand(x.name, s) for x, s in zip(made, indexed.outputs, strict=True)),
            indices=tuple(
                Index(s.size, self.names[id(s)], mark, None if until is None else (until, 0, 0))
                for s, mark, until in indices
            ),
            has_mirror=not self.needed.isdisjoint(made),
            module=call.meta["module"],
            source=call.meta["source"],
            from_data=self.from_weights.isdisjoint(made),
            from_weights=self.from_inputs.isdisjoint(made),
            checkpoint=self.checkpoints.get(call.meta.get("region"), ""),
        )
        return replace(op, flops=row_of(op.target).flops(op, [*map(shape_of, read)], [*map(shape_of, made)]))

    def in_place(self, what: PTensor | Node, name: str, target: str, *others: Node, group: int = 0) -> Op:
        """Return the op that sets a tensor at the end of the step, from others of its shape: element by element, but
        for the optimizers in WHOLE.
        """
        tensor = self.tensor(what) if isinstance(what, Node) else what
        slots = tuple(range(len(tensor.factors)))
        mark: Mark = "frozen" if target.removeprefix("ss.") in WHOLE else "spatial"
        return Op(
            name=name,
            target=target,
            args=tuple(map(Ref, range(1 + len(others)))),
            kwargs=(),
            inputs=tuple(Operand(name, slots) for name in (tensor.name, *(x.name for x in others))),
            outputs=(Operand(tensor.name, slots),),
            indices=tuple(Index(size, f, mark) for size, f in zip(tensor.extents, tensor.factors, strict=True)),
            kind="optimizer",
            module=tensor.name.rpartition(".")[0] if tensor.kind != "output" else "",
            from_weights=True,
            group=group,
        )


def _checkpoints(calls: Iterable[Node]) -> dict[int | None, str]:
    """Return names of the regions of the model's own checkpoints: the module of each, or its first op."""
    members: dict[int | None, list[Node]] = {}
    for call in calls:
        members.setdefault(call.meta.get("region"), []).append(call)
    members.pop(None, None)
    taken: set[str] = set()
    modules = {number: common_module(call.meta["module"] for call in some) for number, some in members.items()}
    return {number: unique(modules[number] or op_name(some[0]), taken) for number, some in members.items()}


_DROPPED = frozenset({"device", "layout", "memory_format", "pin_memory", "generator", "non_blocking"})


def _literal(value: Any, numbers: Iterator[int]) -> Any:
    """Return an argument as a plain value: tensors as operand numbers, dtypes as text, devices and layouts as None."""
    if isinstance(value, Node):
        return Ref(next(numbers))
    if isinstance(value, list | tuple):
        return tuple(_literal(v, numbers) for v in value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.device | torch.layout | torch.memory_format | torch.Generator):
        return None
    return value
