"""mBART (Liu et al. 2020) of the Hugging Face library, with the loss of translation.

Sizes: 4.7b (the default), 9.5b, 20b and 32b as in the paper's table: 24, 32, 48 and 56 layers, half of them in the
encoder and half in the decoder, hidden 3072, 4096, 5120 and 6144, 16, 32, 32 and 32 heads, MLP 4 times the hidden size,
both sequences 1024, vocabulary 500000, batch 8, dropout 0.1 as in the family's config. tiny: 4 layers, hidden 48, 4
heads, MLP 160, sequence 20 and target 12, vocabulary 320, no dropout.
"""

from __future__ import annotations

from torch import nn

from superscaler.errors import InputError
from superscaler.models.huggingface import from_config, make_batch, renamed
from superscaler.specs.options import Options, check_divides

__all__ = ["DEFAULT", "OPTIONS", "build", "make_batch"]

_FAMILY = {"seq": 1024, "target": 1024, "batch": 8, "vocab": 500_000, "dropout": 0.1}
_TINY = {"seq": 20, "target": 12, "batch": 8, "vocab": 320, "dropout": 0.0}
_NAMES = {"hidden": "d_model", "heads": "encoder_attention_heads decoder_attention_heads", "vocab": "vocab_size",
          "mlp": "encoder_ffn_dim decoder_ffn_dim", "dropout": "dropout attention_dropout"}  # fmt: skip
DEFAULT = "4.7b"
OPTIONS = {
    "tiny": {"layers": 4, "hidden": 48, "heads": 4, "mlp": 160, **_TINY},
    "4.7b": {"layers": 24, "hidden": 3072, "heads": 16, "mlp": 12288, **_FAMILY},
    "9.5b": {"layers": 32, "hidden": 4096, "heads": 32, "mlp": 16384, **_FAMILY},
    "20b": {"layers": 48, "hidden": 5120, "heads": 32, "mlp": 20480, **_FAMILY},
    "32b": {"layers": 56, "hidden": 6144, "heads": 32, "mlp": 24576, **_FAMILY},
}


def build(options: Options) -> nn.Module:
    """Return the module.

    Keys: size, layers (of encoder and decoder together), hidden, heads, mlp, seq, target, batch, vocab, dropout, seed,
    device.
    """
    check_divides("mbart", "hidden", "heads", options)
    if options["vocab"] < 3:
        raise InputError(f"mbart: vocab={options['vocab']}, but its special tokens are numbers 0 to 2; give 3 or more.")
    if options["layers"] % 2:
        raise InputError(f"mbart: layers={options['layers']} cannot be halved; give an even number of layers.")
    own = dict.fromkeys(("encoder_layers", "decoder_layers"), options["layers"] // 2)
    own |= {"use_cache": False, "max_position_embeddings": max(options["seq"], options["target"])}
    return from_config("MBartConfig", "MBartForConditionalGeneration", **renamed(options, _NAMES), **own)
