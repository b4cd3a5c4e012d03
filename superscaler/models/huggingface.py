"""Models of the Hugging Face library, unmodified, from a config."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from superscaler.errors import InputError
from superscaler.models import batch
from superscaler.specs.options import Options, check_divides

CHANNELS, _CLASSES = 3, "single_label_classification"


def library() -> ModuleType:
    """Return the `transformers` module. Raises InputError when it is not installed."""
    try:
        import transformers
    except ImportError:
        raise InputError(
            "this model comes from the Hugging Face library, which is not installed; "
            "install it with: pip install 'superscaler[hf]'"
        ) from None
    return transformers


# option -> what most configs of the library call it
_USUAL = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "mlp": "intermediate_size",
    "kv_heads": "num_key_value_heads", "tied": "tie_word_embeddings", "seq": "max_position_embeddings",
    "vocab": "vocab_size", "image": "image_size", "patch": "patch_size", "classes": "num_labels",
}  # fmt: skip


def usual(options: Options) -> dict[str, Any]:
    """Return the options by the names that most configs have for them."""
    found = renamed(options, {key: name for key, name in _USUAL.items() if key in options})
    if "dropout" in options:
        found |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), options["dropout"])
    return found | ({"num_channels": CHANNELS, "problem_type": _CLASSES} if "image" in options else {})


def renamed(options: Options, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that stand in `names`, by the names that it gives them, separated by spaces."""
    return {name: options[key] for key, words in names.items() for name in words.split()}


def from_config(config: str, model: str, **values: Any) -> nn.Module:
    """Return the model class of the library with random weights, for its config class with these values."""
    transformers = library()
    with _quiet():
        module: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values))
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the library's advice about configs, which is for those who load trained weights."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def causal(config: str, model: str, **values: Any) -> nn.Module:
    """Return a model that predicts the next token, without the cache of generation."""
    module = from_config(config, model, use_cache=False, **values)
    # Not every class of the library names its loss; it would say in the first step that it takes this one.
    module.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return module


def make_batch(options: Options, step: int) -> dict[str, Tensor]:
    """Return `input_ids` of shape (batch, seq) and `labels` of the same shape, or (batch, target) where it is given."""
    sequences = (options["seq"], options.get("target", options["seq"]))
    return batch.tokens(options["seed"], step, options["batch"], sequences, options["vocab"])


def make_images(options: Options, step: int) -> dict[str, Tensor]:
    """Return `pixel_values` of shape (batch, 3, image, image) and `labels` of shape (batch,)."""
    shape = (options["batch"], CHANNELS, options["image"], options["image"])
    return batch.classes(options["seed"], step, "pixel_values", shape, options["classes"])


def check_sequence(model: str, options: Options) -> None:
    """Raise InputError for sequences that leave nothing to predict after the shift of the labels."""
    if options["seq"] < 2:
        raise InputError(f"{model}: seq={options['seq']}, but predicting a next token needs a sequence of 2 or more.")


def rotary_head(model: str, options: Options) -> int:
    """Return the channels of a head of grouped attention. Raises InputError where they cannot be rotated in pairs."""
    check_divides(model, "hidden", "heads", options)
    check_divides(model, "heads", "kv_heads", options)
    head: int = options["hidden"] // options["heads"]
    if head % 2:
        raise InputError(
            f"{model}: hidden={options['hidden']} with heads={options['heads']} makes heads of {head} channels, but "
            "its rotary embedding turns pairs of them; give numbers that make heads of an even size."
        )
    return head
