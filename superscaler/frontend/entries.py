"""What the cache keeps of a capture: the model as text, the constants that capture computed, the exported program."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from superscaler import cache
from superscaler.ir.graph import Model
from superscaler.ir.text import parse_model, print_model

_MODEL, _NAMES, _CONSTANTS, _PROGRAM = "model.txt", "names.json", "constants.safetensors", "program.pt2"


class Inputs(NamedTuple):
    """The keyword arguments in the order of export, and the names that it gave the leaves of all arguments."""

    keywords: list[str]
    names: list[str]


class Kept(NamedTuple):
    """An entry: the model, the constants, the names of all values in their order, and the inputs."""

    model: Model
    constants: dict[str, Tensor]
    names: list[str]
    inputs: Inputs


def inputs_of(exported: ExportedProgram) -> Inputs:
    specs = [s for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    spec = exported.call_spec.in_spec
    return Inputs(list(spec.children()[1].context) if spec else [], [s.arg.name for s in specs])


def values_of(module: nn.Module, model: Model) -> dict[str, Tensor]:
    """Return the values that a model has of its module: parameters, segments of them, and buffers, if not on meta."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers(remove_duplicate=False))}
    found = {name: value.detach() for name, value in named.items() if not value.is_meta}
    for piece, (name, dim, start, end) in model.segments.items():
        if name in found:
            found[piece] = found[name].narrow(dim, start, end - start)
    return {name: value.contiguous() for name, value in found.items()}


def save(
    key: str, model: Model, own: Mapping[str, Tensor], values: Mapping[str, Tensor], exported: ExportedProgram
) -> None:
    """Keep a capture whose module has the values `own`, if all of it can be read back."""
    text, inputs = print_model(model), inputs_of(exported)
    try:
        if parse_model(text) != model:
            return
        constants = {n: v.detach().clone() for n, v in values.items() if n not in own}
        parts = {
            _MODEL: text.encode(),
            _NAMES: json.dumps([list(values), {n: str(v.device) for n, v in constants.items()}, *inputs]).encode(),
            _CONSTANTS: save_tensors(constants),
            _PROGRAM: _pack(exported),
        }
    except Exception:
        # torch cannot write every program that it can export; those are exported again.
        return
    cache.write(key, parts)


def load(key: str) -> Kept | None:
    """Return the entry without its program, or None where there is none that can be read."""
    parts = cache.read(key, _MODEL, _NAMES, _CONSTANTS)
    if parts is None:
        return None
    try:
        names, devices, *inputs = json.loads(parts[1])
        constants = {n: v.to(devices[n]) for n, v in load_tensors(parts[2]).items()}
        return Kept(parse_model(parts[0].decode()), constants, names, Inputs(*inputs))
    except Exception:
        # An entry that something else than this program wrote is none.
        return None


def load_program(key: str) -> ExportedProgram | None:
    """Return the program of an entry; one that cannot be read ends its entry, which the next capture writes again."""
    parts = cache.read(key, _PROGRAM)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(io.BytesIO((parts or [b""])[0]))
    except Exception:
        cache.remove(key)
        return None


def _pack(exported: ExportedProgram) -> bytes:
    """Return a program as bytes, without the values of parameters and of examples, which come with each use."""
    state, given = exported._state_dict, exported._example_inputs
    parameters = set(exported.graph_signature.parameters)
    exported._state_dict = {n: _hollow(v) if n in parameters else v for n, v in state.items()}
    exported._example_inputs = None
    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(exported, file)
    finally:
        exported._state_dict, exported._example_inputs = state, given
    return file.getvalue()


def _hollow(parameter: Any) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
