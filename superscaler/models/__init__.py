"""A model's spec -> the module, the example inputs of one training step, and a maker of batches."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from superscaler.errors import InputError, a, unknown
from superscaler.models.families import FAMILIES
from superscaler.models.family import Family
from superscaler.models.without_data import forget, without_data
from superscaler.specs.memory import free_memory
from superscaler.specs.options import ALIASES, Options, options_of, read_pairs
from superscaler.specs.user_file import from_file

_SHAPE = "(module, args) or (module, args, kwargs)"


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A module in training mode whose `module(*args, **kwargs)` gives a scalar loss or an object with `.loss`.

    `make_batch(step)` returns real tensors for the inputs by name, equal for equal steps, even if the module is on the
    meta device. It is None for a model from a file: only its author knows the inputs.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    make_batch: Callable[[int], dict[str, Tensor]] | None

    @property
    def is_named(self) -> bool:
        """Return whether it is a model of the library, which its name identifies."""
        return self.make_batch is not None


def names() -> list[str]:
    """Return the names of the models that need no file."""
    return sorted(FAMILIES)


def build(spec: str) -> BuiltModel:
    """Return the model of `NAME[:key=value,...]` or `path/to/file.py:function[:key=value,...]`.

    Common keys of the named models: size, layers (of swin: depths), hidden, batch, seed (default 0) and device (cpu or
    meta: shapes only, no memory). Weights are random and depend on the seed only. Raises InputError for an unknown
    model, key, file or function, and for a value of the wrong type.
    """
    name = spec.partition(":")[0]
    if name.endswith(".py"):
        return _from_file(spec)
    given, options = _read(spec)
    family = FAMILIES[name]
    kept = [f"{key}={options[key]}" for key in ("mlp", "kv_heads") if key in options and key not in given]
    if kept and "size" not in given and given & {"hidden", "heads"}:
        logging.getLogger(__name__).warning(
            "%s: %s stay those of size=%s; give them too, if the model has others",
            name,
            ", ".join(kept),
            family.default,
        )
    is_meta = options["device"] == "meta"
    try:
        if options["device"] == "cpu":
            _check_memory(spec, family, options)
        # Weights are drawn on the requested device; the caller's generator is left unchanged.
        with torch.random.fork_rng(devices=[]), without_data() if is_meta else torch.device(options["device"]):
            torch.manual_seed(options["seed"])
            module = family.build(name, options).train()
        module = forget(module) if is_meta else module
        example = {name: x.to(options["device"]) for name, x in family.make_batch(options, 0).items()}
    except RuntimeError as error:
        # The options are checked already: only memory, or a size beyond 64 bits, can fail here.
        message = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"'{spec}' is too large for this machine: {message}; choose smaller sizes.") from error
    return BuiltModel(spec, module, (), example, partial(family.make_batch, options))


def _check_memory(spec: str, family: Family, options: Options) -> None:
    """Raise InputError for weights of more bytes than are free: the system would end the process without a word."""
    free = free_memory()
    # A part of the weights of a transformer. Only large models are counted, which takes seconds.
    some = 16 * options.get("layers", 1) * options["hidden"] ** 2
    if free is None or 8 * some < free:
        return
    with without_data():
        needed = sum(p.nbytes for p in family.build(spec.partition(":")[0], options).parameters())
    if needed > free:
        raise InputError(
            f"'{spec}' is too large for this machine: its weights take {needed / 1e9:.1f} GB, of which "
            f"{free / 1e9:.1f} GB are free; choose smaller sizes, or device=meta for what needs no weights (compile "
            "without --out; simulate and search take any size)."
        )


def sizes_of(spec: str) -> Options:
    """Return the options of a named model; none for a model from a file. Raises InputError as `build` does."""
    return {} if spec.partition(":")[0].endswith(".py") else _read(spec)[1]


def _read(spec: str) -> tuple[set[str], Options]:
    """Return the keys that the text of a named model gives, and all its options."""
    name, _, rest = spec.partition(":")
    if name not in FAMILIES:
        raise InputError(f"{unknown('model', name, FAMILIES)} Or give a file: path/to/file.py:function.")
    pairs = read_pairs(spec, rest)
    options = options_of(spec, pairs, FAMILIES[name].sizes, FAMILIES[name].default)
    return {ALIASES.get(word, word) for word in pairs}, options


def _from_file(spec: str) -> BuiltModel:
    """Call the function of the file. Raises InputError for one that fails, and for a result of another shape."""
    where, made = ":".join(spec.split(":")[:2]), from_file(spec, "model")()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        result = f"a tuple of {len(made)}" if isinstance(made, tuple) else a(type(made).__name__)
        raise InputError(f"{where} returned {result}; return {_SHAPE}.")
    module, args, kwargs = made if len(made) == 3 else (*made, {})
    for name, value, kind in (("module", module, nn.Module), ("args", args, (tuple, list)), ("kwargs", kwargs, dict)):
        if not isinstance(value, kind):
            hint = "; write (x,) for one argument" if name == "args" else ""
            raise InputError(f"{where} returned {a(type(value).__name__)} as {name}; return {_SHAPE}{hint}.")
    return BuiltModel(spec, module, tuple(args), dict(kwargs), None)
