"""The cache of captures of the library's models: the model as text, and the constants that capture computed.

An entry belongs to a name, with its options, to the versions of packages and of this one, and to the module as seen
from outside. A model of a user's file is captured anew each time: nothing shows all that its code reads. The exported
program is not kept: `verify` exports it again.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from superscaler.bits import bytes_of
from superscaler.frontend.base.captured import Inputs
from superscaler.frontend.base.oracle import values_of
from superscaler.frontend.rewrites.constants import compact
from superscaler.ir.model import Model
from superscaler.ir.text.model import parse_model, print_model
from superscaler.store import cache

_INSTALLED = "-packages"


# A model, its values, its inputs, and the result of its check.
Kept = tuple[Model, dict[str, Tensor], Inputs, str]


def inputs_of(exported: ExportedProgram) -> Inputs:
    specs = [s for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    spec = exported.call_spec.in_spec
    return Inputs(list(spec.children()[1].context) if spec else [], [s.arg.name for s in specs])


def key_of(name: str, module: nn.Module, inputs: Any, *options: Any) -> str:
    """Return the hash of everything that the capture of a named model depends on.

    Values of parameters and of input tensors do not count, because no capture reads them. Values of buffers do.
    """
    flags = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    versions = (platform.python_version(), torch.__version__, cache.sources(), _installed())
    leaves, spec = pytree.tree_flatten(inputs)
    seen = [name, options, flags, torch.get_default_device(), torch.cuda.is_available(), versions, spec]
    seen += [_layout(x) if isinstance(x, Tensor) else x for x in leaves]
    # transformers marks modules that it checkpoints by an attribute.
    seen += [module, [(m.training, vars(m).get("gradient_checkpointing")) for m in module.modules()]]
    seen += [(n, _layout(x)) for n, x in module.named_parameters(remove_duplicate=False)]
    seen += [(n, _layout(x), _bits(x)) for n, x in module.named_buffers(remove_duplicate=False)]
    return hashlib.sha256("\n".join(map(repr, seen)).encode()).hexdigest()


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, tuple(x.shape), x.stride(), x.device, x.requires_grad


def _bits(x: Tensor) -> str:
    if x.is_meta:
        return ""
    plain = x.detach().resolve_conj().resolve_neg().cpu()
    return hashlib.sha256(bytes_of(plain).numpy().data).hexdigest()


def _installed() -> list[str]:
    """Return the importable packages with their versions, read from pip's folders."""
    return sorted(f.name for home in sys.path if _INSTALLED in home for f in Path(home).glob("*-info"))


def save(key: str, module: nn.Module, model: Model, values: Mapping[str, Tensor], inputs: Inputs, checked: str) -> None:
    """Store a capture of a module, without the module's own values, and the result of its check. Of a constant that
    repeats along a dim (a mask of a whole batch) one row is stored.
    """
    own = values_of(module, model)
    head = {
        "model": print_model(model),
        "values": {n: str(v.device) for n, v in values.items()},
        "inputs": inputs,
        "checked": checked,
    }
    # safetensors has no name for a few dtypes, as complex128: a model with such constants is captured each time.
    with suppress(KeyError):
        constants = save_tensors({n: compact(v.detach()).clone() for n, v in values.items() if n not in own})
        cache.write(key, json.dumps(head).encode() + b"\n" + constants)


def load(key: str, module: nn.Module, check: bool) -> Kept | None:
    """Return the saved capture with the values of this module; None if nothing is saved, or without a wanted check."""
    data = cache.read(key)
    if data is None:
        return None
    text, _, constants = data.partition(b"\n")
    head = json.loads(text)
    if check and not head["checked"]:
        return None
    model = parse_model(head["model"])
    stored = {n: x.expand(model.tensors[n].shape) for n, x in load_tensors(constants).items()}
    values = {**stored, **values_of(module, model)}
    return (
        model,
        {n: values[n].to(device) for n, device in head["values"].items()},
        Inputs(*head["inputs"]),
        head["checked"],
    )
