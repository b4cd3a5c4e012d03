"""Models of the Hugging Face library, unmodified, from a config."""

import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from superscaler.errors import InputError
from superscaler.models import family
from superscaler.models.family import Family
from superscaler.replaced import quiet
from superscaler.specs.options import Options
from superscaler.specs.sizes import read_lengths

Values = dict[str, Any]

_CHANNELS = 3
# option -> what most configs of the library call it, each name by itself; what stands in no table is not of the config
_USUAL = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "mlp": "intermediate_size",
    "kv_heads": "num_key_value_heads", "tied": "tie_word_embeddings", "seq": "max_position_embeddings",
    "vocab": "vocab_size", "image": "image_size", "patch": "patch_size", "classes": "num_labels",
    "dropout": "hidden_dropout_prob attention_probs_dropout_prob", "attention": "attn_implementation",
}  # fmt: skip
_IMAGES: Values = {"num_channels": _CHANNELS, "problem_type": "single_label_classification"}


def from_library(
    config: str,
    model: str,
    default: str,
    sizes: Mapping[str, Options],
    own: Callable[[str, Options], Values],
    names: Mapping[str, str] | None = None,
) -> Family:
    """Return a family of the library, from the names of its config class and model class. `names`: options by the
    fields of the config.

    `own(name, options)` gives further values of the config; it raises InputError for options that do not fit together.
    """
    renamed = {**_USUAL, **(names or {})}

    def build(name: str, options: Options) -> nn.Module:
        values = {word: value for key, value in options.items() for word in renamed.get(key, "").split()}
        return _from_config(config, model, values | (_IMAGES if "image" in options else {}) | own(name, options))

    return Family(default, sizes, build, _images if "image" in sizes[default] else _tokens)


def _from_config(config: str, model: str, values: Values) -> nn.Module:
    """Return the model class of the library with random weights, for its config class with these values."""
    transformers = library()
    # The library advises about configs, for those who load trained weights.
    with quiet(logging.ERROR, "transformers"):
        module: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values))
    if model.endswith(("ForCausalLM", "LMHeadModel")):
        # Not every class of the library names its loss; without a name it warns in the first step.
        module.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return module


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


def _tokens(options: Options, step: int) -> dict[str, Tensor]:
    """Return `input_ids` of shape (batch, seq) and `labels` of the same shape, or of (batch, target) if it is given; of
    packed rows `position_ids`, too.
    """
    sequences = (options["seq"], options.get("target", options["seq"]))
    found = family.tokens(options["seed"], step, options["batch"], sequences, options["vocab"])
    if documents := options.get("documents"):
        found["position_ids"] = family.positions(read_lengths("documents", documents), options["batch"], sequences[0])
    return found


def _images(options: Options, step: int) -> dict[str, Tensor]:
    """Return `pixel_values` of shape (batch, 3, image, image) and `labels` of shape (batch,)."""
    shape = (options["batch"], _CHANNELS, options["image"], options["image"])
    return family.classes(options["seed"], step, "pixel_values", shape, options["classes"])
