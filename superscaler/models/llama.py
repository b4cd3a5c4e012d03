"""Llama of the Hugging Face library, with the language-model loss.

Sizes: 1b (the default: 1.24 billion parameters, the shape of Llama 3.2 1B: 16 layers, hidden 2048, 32 heads, 8
key/value heads, MLP 8192, tied embeddings), 8b and 70b (the shapes of Llama 3.1): vocabulary 128256, sequence 2048,
batch 8. tiny: 2 layers, hidden 64, 4 heads, 2 key/value heads, MLP 256, sequence 32, vocabulary 512, batch 8, untied.
"""

from __future__ import annotations

from torch import nn

from superscaler.models.huggingface import causal, check_sequence, make_batch, rotary_head, usual
from superscaler.specs.options import Options

__all__ = ["DEFAULT", "OPTIONS", "build", "make_batch"]

_FAMILY = {"seq": 2048, "batch": 8, "vocab": 128256}
_TINY = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "seq": 32, "batch": 8, "vocab": 512}
DEFAULT = "1b"
OPTIONS = {
    "tiny": {**_TINY, "mlp": 256, "tied": False},
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "mlp": 8192, "tied": True, **_FAMILY},
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "tied": False, **_FAMILY},
    "70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672, "tied": False, **_FAMILY},
}


def build(options: Options) -> nn.Module:
    """Return the module. Keys: size, layers, hidden, heads, kv_heads, mlp, tied, seq, batch, vocab, seed, device."""
    check_sequence("llama", options)
    head = rotary_head("llama", options)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return causal("LlamaConfig", "LlamaForCausalLM", head_dim=head, rope_parameters=rope, **usual(options))
