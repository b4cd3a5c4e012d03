"""GPT-2 of the Hugging Face library (Radford et al. 2019), with the language-model loss.

Sizes: small (124 million parameters, the default), medium (355), large (774), xl (1558): vocabulary 50257, sequence
1024, batch 8, and dropout 0.1 as in the family's config. tiny: 2 layers, hidden 64, 4 heads, sequence 32, vocabulary
512, batch 8, and dropout 0, so that runs can be compared.
"""

from __future__ import annotations

from torch import nn

from superscaler.models.huggingface import causal, check_sequence, make_batch, renamed
from superscaler.specs.options import Options, check_divides

__all__ = ["DEFAULT", "OPTIONS", "build", "make_batch"]

_FAMILY = {"seq": 1024, "batch": 8, "vocab": 50257, "dropout": 0.1}
_NAMES = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "seq": "n_positions", "vocab": "vocab_size",
          "dropout": "attn_pdrop embd_pdrop resid_pdrop"}  # fmt: skip
DEFAULT = "small"
OPTIONS = {
    "tiny": {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "batch": 8, "vocab": 512, "dropout": 0.0},
    "small": {"layers": 12, "hidden": 768, "heads": 12, **_FAMILY},
    "medium": {"layers": 24, "hidden": 1024, "heads": 16, **_FAMILY},
    "large": {"layers": 36, "hidden": 1280, "heads": 20, **_FAMILY},
    "xl": {"layers": 48, "hidden": 1600, "heads": 25, **_FAMILY},
}


def build(options: Options, name: str = "gpt2") -> nn.Module:
    """Return the module. Keys: size, layers, hidden, heads, seq, batch, vocab, dropout, seed, device."""
    check_divides(name, "hidden", "heads", options)
    check_sequence(name, options)
    # The config's own number is a token of the full vocabulary.
    last = dict.fromkeys(("bos_token_id", "eos_token_id"), options["vocab"] - 1)
    return causal("GPT2Config", "GPT2LMHeadModel", **renamed(options, _NAMES), **last)
