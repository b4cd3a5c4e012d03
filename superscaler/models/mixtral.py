"""Mixtral (Jiang et al. 2024) of the Hugging Face library, with the losses of the language model and of the router.

Sizes: 8x7b (the default: 46.7 billion parameters, 32 layers, hidden 4096, 32 heads, 8 key/value heads, 8 experts of MLP
14336 of which each token takes 2): vocabulary 32000, sequence 2048, batch 8. tiny: 2 layers, hidden 48, 8 heads, 4
key/value heads, 12 experts of MLP 80, sequence 20, vocabulary 320, batch 8.
"""

from __future__ import annotations

from torch import nn

from superscaler.errors import InputError
from superscaler.models.huggingface import causal, check_sequence, make_batch, renamed, rotary_head, usual
from superscaler.specs.options import Options

__all__ = ["DEFAULT", "OPTIONS", "build", "make_batch"]

_TINY = {"layers": 2, "hidden": 48, "heads": 8, "kv_heads": 4, "mlp": 80, "experts": 12, "chosen": 2}
_LARGE = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "experts": 8, "chosen": 2}
DEFAULT = "8x7b"
OPTIONS = {
    "tiny": {**_TINY, "seq": 20, "batch": 8, "vocab": 320},
    "8x7b": {**_LARGE, "seq": 2048, "batch": 8, "vocab": 32000},
}


def build(options: Options) -> nn.Module:
    """Return the module.

    Keys: size, layers, hidden, heads, kv_heads, mlp, experts, chosen (experts of a token), seq, batch, vocab, seed,
    device.
    """
    check_sequence("mixtral", options)
    head = rotary_head("mixtral", options)
    if options["chosen"] > options["experts"]:
        raise InputError(
            f"mixtral: chosen={options['chosen']} experts of a token, but there are experts={options['experts']}; "
            "choose no more than there are."
        )
    own = renamed(options, {"experts": "num_local_experts", "chosen": "num_experts_per_tok"}) | usual(options)
    own |= {"head_dim": head, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    return causal("MixtralConfig", "MixtralForCausalLM", **own, **router)
