"""GPT-2 of the Hugging Face library (Radford et al. 2019), with the language-model loss.

Sizes: small (124 million parameters, the default), medium (355), large (774), xl (1558): vocabulary 50257, sequence
1024, batch 8, and dropout 0.1 as in the family's config. tiny: 2 layers, hidden 64, 4 heads, sequence 32, vocabulary
512, batch 8, and dropout 0, so that runs can be compared.
"""

from __future__ import annotations

from torch import nn

from superscaler.models.huggingface import causal, check_sequence, make_batch
from superscaler.specs.options import Options, check_divides

__all__ = ["DEFAULT", "OPTIONS", "build", "make_batch"]

_FAMILY = {"seq": 1024, "batch": 8, "vocab": 50257, "dropout": 0.1}
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
    dropout, vocab = options["dropout"], options["vocab"]
    return causal(
        "GPT2Config",
        "GPT2LMHeadModel",
        n_layer=options["layers"],
        n_embd=options["hidden"],
        n_head=options["heads"],
        n_positions=options["seq"],
        vocab_size=vocab,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        # The config's own number is a token of the full vocabulary.
        bos_token_id=vocab - 1,
        eos_token_id=vocab - 1,
    )
