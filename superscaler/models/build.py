"""A model's spec -> the module, the example inputs of one training step, and a maker of batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from superscaler.errors import InputError, unknown
from superscaler.models import file
from superscaler.specs.options import read_pairs, settle

# Each is a file of this package, which has OPTIONS (by size), DEFAULT, build(options) and make_batch(options, step).
NAMES = ("alphafold2", "bert", "gpt2", "gpt3", "llama", "mbart", "mixtral", "mlp", "swin", "t5", "vit")


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A module in training mode whose `module(*args, **kwargs)` gives a scalar loss or an object with `.loss`.

    `make_batch(step)` gives real tensors for the inputs by name, equal for equal steps, also when the module is on
    the meta device; it is None for a model from a file, whose inputs only their author knows.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    make_batch: Callable[[int], dict[str, Tensor]] | None


def names() -> list[str]:
    """Return the names of the models that need no file."""
    return list(NAMES)


def build(spec: str) -> BuiltModel:
    """Return the model that `NAME[:key=value,...]` or `path/to/file.py:function[:key=value,...]` describes.

    Common keys of the named models: size, layers (of swin: depths), hidden, batch, seed (default 0) and device (cpu or
    meta: shapes only, no memory). Weights are random and depend on the seed only. Raises InputError for an unknown
    model, key, file or function, and for a value of the wrong type.
    """
    name, _, rest = spec.partition(":")
    if name.endswith(".py"):
        module, args, kwargs = file.build(spec)
        return BuiltModel(spec, module, args, kwargs, None)
    if name not in NAMES:
        raise InputError(f"{unknown('model', name, NAMES)} Or give a file: path/to/file.py:function.")
    home = importlib.import_module(f"superscaler.models.{name}")
    options = settle(spec, read_pairs(spec, rest), home.OPTIONS, home.DEFAULT)
    try:
        # Weights are drawn on the device that was asked for, and the caller's generator stays as it was.
        with torch.random.fork_rng(devices=[]), torch.device(options["device"]):
            torch.manual_seed(options["seed"])
            module = home.build(options).train()
        example = {name: x.to(options["device"]) for name, x in home.make_batch(options, 0).items()}
    except RuntimeError as error:
        # The options were checked: what is left is the size of the memory, or of a 64-bit number.
        told = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"'{spec}' is too large for this machine: {told}; choose smaller sizes.") from error
    return BuiltModel(spec, module, (), example, lambda step: home.make_batch(options, step))
