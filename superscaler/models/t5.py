"""T5 (Raffel et al. 2020) of the Hugging Face library, with the loss of its decoder.

Sizes: small (the default), base, large, 3b and 11b: 60.5, 222.9, 737.7, 2852 and 11307 million parameters; 6, 12, 24,
24 and 24 layers in the encoder and as many in the decoder; vocabulary 32128, both sequences 512, batch 8, dropout 0.1
as in the family's config. tiny: 2 layers in each, hidden 40, 4 heads of 6 channels, MLP 96, sequence 20 and target 12,
vocabulary 320, no dropout.
"""

from __future__ import annotations

from torch import nn

from superscaler.models.huggingface import from_config, make_batch, renamed
from superscaler.specs.options import Options

__all__ = ["DEFAULT", "OPTIONS", "build", "make_batch"]

_FAMILY = {"seq": 512, "target": 512, "batch": 8, "vocab": 32128, "dropout": 0.1}
_TINY = {"seq": 20, "target": 12, "batch": 8, "vocab": 320, "dropout": 0.0}
_NAMES = {"layers": "num_layers", "hidden": "d_model", "heads": "num_heads", "channels": "d_kv", "mlp": "d_ff",
          "vocab": "vocab_size", "dropout": "dropout_rate"}  # fmt: skip
DEFAULT = "small"
OPTIONS = {
    "tiny": {"layers": 2, "hidden": 40, "heads": 4, "channels": 6, "mlp": 96, **_TINY},
    "small": {"layers": 6, "hidden": 512, "heads": 8, "channels": 64, "mlp": 2048, **_FAMILY},
    "base": {"layers": 12, "hidden": 768, "heads": 12, "channels": 64, "mlp": 3072, **_FAMILY},
    "large": {"layers": 24, "hidden": 1024, "heads": 16, "channels": 64, "mlp": 4096, **_FAMILY},
    "3b": {"layers": 24, "hidden": 1024, "heads": 32, "channels": 128, "mlp": 16384, **_FAMILY},
    "11b": {"layers": 24, "hidden": 1024, "heads": 128, "channels": 128, "mlp": 65536, **_FAMILY},
}


def build(options: Options) -> nn.Module:
    """Return the module.

    Keys: size, layers (of the encoder, and of the decoder), hidden, heads, channels (of a head), mlp, seq, target,
    batch, vocab, dropout, seed, device.
    """
    # The token that a decoder starts from is number 0.
    own = {"use_cache": False, "decoder_start_token_id": 0}
    return from_config("T5Config", "T5ForConditionalGeneration", **renamed(options, _NAMES), **own)
