"""Capture: an unmodified module and its example arguments -> the data-flow graph of one training iteration.

export (experts and autocast are made explicit) -> read -> fold constants -> simplify by them -> decompose -> cut packed
weights -> drop idle detaches -> infer indices -> name factors -> Model
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy

from superscaler.errors import CaptureError, InputError
from superscaler.frontend.base.autocast import Autocast, read_autocast
from superscaler.frontend.base.captured import Call, Captured, Given
from superscaler.frontend.base.read_export import read
from superscaler.frontend.base.refusals import refuse_averages, refuse_scripted, refuse_set_weights
from superscaler.frontend.base.results import names_of
from superscaler.frontend.base.trace import Trace, base_of
from superscaler.frontend.base.training import Optimizers, Training, given_optimizers, read_optimizers
from superscaler.frontend.capture_cache import Kept, inputs_of, key_of, load, save
from superscaler.frontend.checks.agreement import agree
from superscaler.frontend.checks.shorter import needs_all_rows, shorter
from superscaler.frontend.effects.calls import refuse_shared
from superscaler.frontend.effects.untouched import untouched
from superscaler.frontend.export import examples, export
from superscaler.frontend.model_builder import build
from superscaler.frontend.precision import Narrowed, narrowed
from superscaler.frontend.rewrites.constants import fold, part_numbers
from superscaler.frontend.rewrites.normalize import normalize, remove_dead
from superscaler.frontend.rewrites.packed_weights import cut_segments
from superscaler.frontend.rewrites.several_losses import separate
from superscaler.ir.model import Model, Optimizer
from superscaler.replaced import replaced
from superscaler.specs.options import WHOLE
from superscaler.timing import timed, without_garbage_collection


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    optimizer: Optimizers | None = None,
    autocast: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    name: str | None = None,
    is_trained: bool = True,
    is_kept: bool = False,
    check: bool = False,
    precision: str | None = None,
) -> Captured:
    """Return the captured step of a module; `superscaler.plan.capture` describes the common arguments.

    `name`: that of a model of the library, whose captures are kept on disk (`capture_cache`).
    `is_trained`: the step has a backward and updates. `is_kept`: it returns the module's results beside its loss.
    Raises CaptureError for a graph that differs from the module (`check`), for a module that gives no scalar loss,
    cannot be exported, changes its inputs, or is on two devices, or for another optimizer; InputError for other wrong
    arguments.
    """
    refuse_scripted(module)
    refuse_set_weights(module)
    refuse_averages(module)
    device = _device(module)
    cast = read_autocast(autocast, device.type)
    training = read_optimizers(module, optimizer, scaler) if is_trained else Training(Optimizer("", ()), {})
    made = given_optimizers(module, optimizer) if is_trained else ()
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
    request = _Request(
        module, args, kwargs or {}, examples(module, args, kwargs or {}), optimizer, made, training, device, cast,
        is_trained, is_kept, precision, tuple(part.training for part in module.modules()),
    )  # fmt: skip
    return request.capture(name, check)


@dataclass(frozen=True)
class _Request:
    """What `capture` was asked for, checked: the module in its precision, its call, and its training.

    `modes`: of the parts of the module. `inputs`: the arguments of the export. `optimizers`: as the user made them, in
    the place of `optimizer`, which has the parameters of the module in its precision.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    optimizer: Optimizers | None
    optimizers: tuple[Given, ...]
    training: Training
    device: torch.device
    autocast: Autocast | None
    is_trained: bool
    is_kept: bool
    precision: str | None
    modes: tuple[bool, ...]

    def capture(self, name: str | None, check: bool) -> Captured:
        """Return the captured step, from the cache if it has an entry of this name; see `capture`."""
        return replace(self._first(name, check), again=partial(self._again, name, check))

    def _first(self, name: str | None, check: bool) -> Captured:
        seconds = dict.fromkeys(("export", "capture", "check", "smaller"), 0.0)
        with timed(seconds, "capture"):
            key = self._key(name) if name else ""
            kept = load(key, self.module, check) if name else None
        if kept is not None:
            return self._captured(kept, lambda: self._export()[0], seconds)
        with self._without_autocast(), without_garbage_collection():
            with timed(seconds, "export"):
                exported, form = self._export()
            with timed(seconds, "capture"):
                kept = (*_read(self.module, exported, form, self.training, self.device), inputs_of(exported), "")
        captured = self._captured(kept, lambda: exported, seconds)
        with self._without_autocast(), without_garbage_collection():
            if check:
                with timed(seconds, "check"):
                    captured = replace(captured, checked=agree(captured, self.optimizer))
            if check or not any(x.is_meta for x in self.module.parameters()):
                with timed(seconds, "smaller"):
                    model = replace(captured.model, shorter=shorter(captured) if check else {})
                    captured = replace(captured, model=model)
                    captured = replace(captured, model=replace(model, is_whole=needs_all_rows(captured)))
        if name:
            save(key, self.module, captured.model, captured.values, captured.call.inputs, captured.checked)
        return captured

    def _key(self, name: str) -> str:
        training = self.training
        kinds = [training.kind(parameter) for parameter in training.groups]
        named = (kinds, training.groups, training.loss_of, bool(training.optimizer.scaler), self.precision)
        chosen = (aliases_of(self.module), self.device, self.autocast, self.is_trained, self.is_kept)
        return key_of(name, self.module, self.inputs, *named, *chosen)

    def _without_autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, enabled=False)

    def _export(self) -> tuple[ExportedProgram, str]:
        with self._without_autocast(), untouched(self.module, *self.inputs):
            losses = self.training.losses
            return export(self.module, *self.inputs, self.autocast, self.is_trained, self.is_kept, losses)

    def _again(self, name: str | None, check: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Captured:
        """Return the capture of the same step for other arguments of the module."""
        modes = zip(self.module.modules(), self.modes, strict=True)
        with replaced(*((part, "training", mode) for part, mode in modes)):
            inputs = examples(self.module, args, kwargs)
            return replace(self, args=args, kwargs=kwargs, inputs=inputs).capture(name, check)

    def _captured(self, kept: Kept, program: Callable[[], ExportedProgram], seconds: dict[str, float]) -> Captured:
        model, values, names, checked = kept
        model = replace(model, optimizer=self.training.optimizer)
        _warn_of_underflow(model)
        _warn_of_repeated(model)
        losses = self.training.losses, self.training.of_pieces(model.segments).loss_of
        given = tuple(self.args), dict(self.kwargs)
        call = Call(self.module, *given, names, self.modes, self.autocast, self.optimizers, *losses)
        return Captured(model, values, call, program, seconds, call.batch(), _fixed(self.module, model), checked)


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
    # A module whose weights alone are on the meta device was exported with all of it there.
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for leaf in trace.leaves("buffer"):
        if leaf.meta.get("value") is None and leaf.name in buffers and not buffers[leaf.name].is_meta:
            leaf.meta["value"] = buffers[leaf.name].detach()
    remove_dead(trace)
    fold(trace, device)
    part_numbers(trace, device)
    normalize(trace)
    _copy_given(trace)
    segments = cut_segments(trace, [name for name in training.groups if training.kind(name) in WHOLE])
    # A model without data never runs, so that a mask of its whole batch stays one row.
    is_shown = any(parameter.is_meta for parameter in module.parameters())
    known = {x.name: x.meta["value"] for x in trace.leaves() if x.meta.get("value") is not None}
    values = known if is_shown else {name: value.contiguous() for name, value in known.items()}
    training = training.of_pieces(segments)
    if training.losses:
        separate(trace, training.loss_of)
        remove_dead(trace)
    return replace(build(trace, training, aliases, segments), result=form), values


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
            # The name of a module in a Sequential is a number.
            copied = f"{name.replace('.', '_')}_copy"
            copied = copied if copied.isidentifier() else f"_{copied}"
            (results[at],) = trace.name_call(copy, copied, plain, node.meta["val"])
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


def _warn_of_repeated(model: Model) -> None:
    makers = {o.tensor: op for op in model.forward_ops for o in op.outputs}
    writes = ((op.inputs[0].tensor, makers.get(op.inputs[1].tensor)) for op in model.ops if op.is_write)
    found = [(name, maker.source) for name, maker in writes if maker is not None and maker.checkpoint]
    if found and model.loss:
        name, source = found[0]
        warnings.warn(
            f"{source} changes {name} inside torch.utils.checkpoint ({len(found)} buffers in all). torch runs that "
            "line again in the backward, and so changes it twice a step; a plan changes it once, as without "
            "checkpoint.",
            stacklevel=8,
        )


def _warn_of_underflow(model: Model) -> None:
    found = [t.name for t in model.tensors.values() if t.requires_grad and t.dtype == "float16"]
    if found and not model.optimizer.scaler:
        warnings.warn(
            f"{len(found)} tensors of this model, {found[0]} first, have float16 gradients, which are 0 where "
            "they should be below 6e-8; give capture a scaler=torch.amp.GradScaler(...), or use bf16.",
            stacklevel=8,
        )
