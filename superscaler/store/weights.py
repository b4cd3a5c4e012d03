"""Weights of a checkpoint, or of safetensors files, loaded into a user's own module."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from superscaler.errors import InputError
from superscaler.store.pieces import whole
from superscaler.store.tensors import missing, open_stored, read_named


def load_weights(module: nn.Module, path: str | Path) -> list[str]:
    """Set a module's parameters and buffers from a checkpoint, or from a safetensors file or folder.

    `path` may also be a folder of checkpoints; the last one is taken. Tied parameters stay tied; buffers that are not
    stored stay as they are. Returns the names there that the module lacks. Raises InputError, with nothing changed, for
    a damaged file, a missing parameter, and for another shape or dtype.
    """
    stored = open_stored(path)
    found: list[tuple[Tensor, Tensor]] = []
    tensors = named(module)
    for names, tensor in tensors:
        if tensor.is_meta:
            raise InputError(f"{names[0]} is on the meta device; give it memory first: module.to_empty(device='cpu').")
        value = read_named(stored, names, tuple(tensor.shape), tensor.dtype, whole(tensor.shape))
        if value is not None:
            found.append((tensor, value))
        elif isinstance(tensor, nn.Parameter):
            raise missing(stored, names[0])
    with torch.no_grad():
        for tensor, value in found:
            tensor.copy_(value)
    return sorted(stored.names - {name for names, _ in tensors for name in names})


def named(module: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return the parameters and buffers of a module, each once with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    every = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, tensor in (pair for pairs in every for pair in pairs):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(names[key], tensor) for key, tensor in tensors.items()]
