"""GPT-3 (Brown et al. 2020): the GPT-2 of the Hugging Face library at its widths, with the language-model loss.

Sizes: 1.3b (the default), 2.6b, 6.7b and 15b as in the paper's table: 24, 32, 32 and 48 layers, hidden 2048, 2560,
4096 and 5120, 32 heads, sequence 16384. 175b: 96 layers, hidden 12288, 96 heads, sequence 2048. Vocabulary 50257, batch
8, no dropout. tiny: 2 layers, hidden 48, 4 heads, sequence 24, vocabulary 320, batch 8.
"""

from __future__ import annotations

from torch import nn

from superscaler.models import gpt2
from superscaler.models.gpt2 import make_batch
from superscaler.specs.options import Options

__all__ = ["DEFAULT", "OPTIONS", "build", "make_batch"]

_FAMILY = {"batch": 8, "vocab": 50257, "dropout": 0.0}
_LONG = {"heads": 32, "seq": 16384, **_FAMILY}
DEFAULT = "1.3b"
OPTIONS = {
    "tiny": {"layers": 2, "hidden": 48, "heads": 4, "seq": 24, **_FAMILY, "vocab": 320},
    "1.3b": {"layers": 24, "hidden": 2048, **_LONG},
    "2.6b": {"layers": 32, "hidden": 2560, **_LONG},
    "6.7b": {"layers": 32, "hidden": 4096, **_LONG},
    "15b": {"layers": 48, "hidden": 5120, **_LONG},
    "175b": {"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048, **_FAMILY},
}


def build(options: Options) -> nn.Module:
    """Return the module. Keys: size, layers, hidden, heads, seq, batch, vocab, dropout, seed, device."""
    return gpt2.build(options, "gpt3")
