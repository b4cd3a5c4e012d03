"""BERT (Devlin et al. 2019) of the Hugging Face library, with the loss of masked tokens.

Sizes: base (110 million parameters, the default: 12 layers, hidden 768, 12 heads, MLP 3072) and large (335: 24 layers,
hidden 1024, 16 heads, MLP 4096): vocabulary 30522, sequence 512, batch 8, dropout 0.1 as in the family's config. tiny:
2 layers, hidden 48, 4 heads, MLP 160, sequence 20, vocabulary 320, no dropout.
"""

from __future__ import annotations

from torch import nn

from superscaler.models.huggingface import from_config, make_batch, usual
from superscaler.specs.options import Options, check_divides

__all__ = ["DEFAULT", "OPTIONS", "build", "make_batch"]

_FAMILY = {"seq": 512, "batch": 8, "vocab": 30522, "dropout": 0.1}
_TINY = {"seq": 20, "batch": 8, "vocab": 320, "dropout": 0.0}
DEFAULT = "base"
OPTIONS = {
    "tiny": {"layers": 2, "hidden": 48, "heads": 4, "mlp": 160, **_TINY},
    "base": {"layers": 12, "hidden": 768, "heads": 12, "mlp": 3072, **_FAMILY},
    "large": {"layers": 24, "hidden": 1024, "heads": 16, "mlp": 4096, **_FAMILY},
}


def build(options: Options) -> nn.Module:
    """Return the module. Keys: size, layers, hidden, heads, mlp, seq, batch, vocab, dropout, seed, device."""
    check_divides("bert", "hidden", "heads", options)
    return from_config("BertConfig", "BertForMaskedLM", **usual(options))
