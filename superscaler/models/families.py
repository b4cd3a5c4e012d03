"""The named models by their families, with the sizes of each: a row a size. Keys are those of its sizes.

All have the loss of their task inside, and a size `tiny` without dropout, so that runs can be compared.
"""

from collections.abc import Mapping

from superscaler.errors import InputError, unknown
from superscaler.models import alphafold2, mlp
from superscaler.models.family import Family
from superscaler.models.huggingface import Values, from_library
from superscaler.specs.options import Options, check_divides
from superscaler.specs.sizes import read_lengths

# Fused, or with all scores written out, as before FlashAttention.
_ATTENTIONS = ("sdpa", "eager")


def _bert(name: str, options: Options) -> Values:
    check_divides(name, "hidden", "heads", options)
    return {}


def _gpt(name: str, options: Options) -> Values:
    check_divides(name, "hidden", "heads", options)
    # The config's own number is a token of the full vocabulary.
    return _causal(name, options) | dict.fromkeys(("bos_token_id", "eos_token_id"), options["vocab"] - 1)


def _gpt3(name: str, options: Options) -> Values:
    # The library's own GELU for GPT-2 has the same values, in eight kernels that keep five tensors. Rows that pad the
    # vocabulary are in the softmax, as Megatron-LM's (--make-vocab-size-divisible-by) and those of nanoGPT's 50,304.
    rows = -(-options["vocab"] // options["pad"]) * options["pad"]
    return _gpt(name, options) | {"activation_function": "gelu_pytorch_tanh", "vocab_size": rows}


def _llama(name: str, options: Options, theta: float = 500000.0) -> Values:
    found, given = _causal(name, options), options.get("head", 0)
    if not given:
        check_divides(name, "hidden", "heads", options)
    check_divides(name, "heads", "kv_heads", options)
    head: int = given or options["hidden"] // options["heads"]
    if head % 2:
        made = f"hidden={options['hidden']} with heads={options['heads']} makes heads of {head} channels"
        raise InputError(
            f"{name}: {f'head={head} is odd' if given else made}, but its rotary embedding turns pairs of them; give "
            "numbers that make heads of an even size."
        )
    return found | {"head_dim": head, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _mixtral(name: str, options: Options) -> Values:
    found = _llama(name, options, 1000000.0)
    if options["chosen"] > options["experts"]:
        raise InputError(
            f"{name}: chosen={options['chosen']} experts of a token, but there are experts={options['experts']}; "
            "choose no more than there are."
        )
    if not options["balance"] >= 0:
        raise InputError(f"{name}: balance={options['balance']} of the router's loss; give 0 (none) or more.")
    # At 0 the router's loss would be computed all the same, over the whole batch.
    return found | {"output_router_logits": options["balance"] > 0}


def _causal(name: str, options: Options) -> Values:
    if options["seq"] < 2:
        raise InputError(f"{name}: seq={options['seq']}, but predicting a next token needs a sequence of 2 or more.")
    if options.get("attention", "sdpa") not in _ATTENTIONS:
        raise InputError(f"{name}: {unknown('attention', options['attention'], _ATTENTIONS)}")
    if options.get("documents"):
        read_lengths(f"{name}: documents", options["documents"])
    return {"use_cache": False}


def _mbart(name: str, options: Options) -> Values:
    check_divides(name, "hidden", "heads", options)
    if options["vocab"] < 3:
        raise InputError(
            f"{name}: vocab={options['vocab']}, but its special tokens are numbers 0 to 2; give 3 or more."
        )
    if options["layers"] % 2:
        raise InputError(f"{name}: layers={options['layers']} cannot be halved; give an even number of layers.")
    halves = dict.fromkeys(("encoder_layers", "decoder_layers"), options["layers"] // 2)
    return {"use_cache": False, "max_position_embeddings": max(options["seq"], options["target"]), **halves}


def _t5(name: str, options: Options) -> Values:
    # The token that a decoder starts from is number 0.
    return {"use_cache": False, "decoder_start_token_id": 0}


def _vit(name: str, options: Options) -> Values:
    check_divides(name, "hidden", "heads", options)
    check_divides(name, "image", "patch", options)
    return {}


def _swin(name: str, options: Options) -> Values:
    _vit(name, options)
    words = options["depths"].split("-")
    if not all(word.isdecimal() and int(word) for word in words):
        raise InputError(
            f"{name}: depths is '{options['depths']}', but it must be the layers of each stage, as 2-2-6-2."
        )
    side, multiple = options["image"] // options["patch"], options["window"] << (len(words) - 1)
    if side % multiple:
        raise InputError(
            f"{name}: image={options['image']} with patch={options['patch']} makes {side} patches a side, but windows "
            f"of {options['window']} in {len(words)} stages need a multiple of {multiple}, since each stage after the "
            "first halves the side."
        )
    heads = [options["heads"] << stage for stage in range(len(words))]
    return {"depths": list(map(int, words)), "num_heads": heads}


_SMALL = {"seq": 20, "batch": 8, "vocab": 320}
_BERT = {"seq": 512, "batch": 8, "vocab": 30522, "dropout": 0.1}
_GPT2 = {"seq": 1024, "batch": 8, "vocab": 50257, "dropout": 0.1, "attention": "sdpa", "documents": ""}
_GPT2_NAMES = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "seq": "n_positions",
               "dropout": "attn_pdrop embd_pdrop resid_pdrop"}  # fmt: skip
_GPT3 = {"batch": 8, "vocab": 50257, "pad": 64, "dropout": 0.0, "attention": "sdpa", "documents": ""}
_LONG = {"heads": 32, "seq": 16384, **_GPT3}
_LLAMA = {"seq": 2048, "batch": 8, "vocab": 128256, "attention": "sdpa", "documents": ""}
_MBART = {"seq": 1024, "target": 1024, "batch": 8, "vocab": 500_000, "dropout": 0.1}
_MBART_NAMES = {"layers": "", "hidden": "d_model", "heads": "encoder_attention_heads decoder_attention_heads",
                "mlp": "encoder_ffn_dim decoder_ffn_dim", "dropout": "dropout attention_dropout"}  # fmt: skip
_MIXTRAL = {"balance": 0.02, "head": 0, "seq": 2048, "batch": 8, "vocab": 32000}
_SWIN = {"image": 1536, "patch": 4, "window": 24, "classes": 1000, "batch": 8, "dropout": 0.0, "drop_path": 0.1}
_T5 = {"seq": 512, "target": 512, "batch": 8, "vocab": 32128, "dropout": 0.1}
_T5_NAMES = {"layers": "num_layers", "hidden": "d_model", "heads": "num_heads", "channels": "d_kv", "mlp": "d_ff",
             "seq": "", "dropout": "dropout_rate"}  # fmt: skip
_TRANSLATED = {**_SMALL, "target": 12, "dropout": 0.0}
_VIT = {"image": 224, "classes": 1000, "batch": 8, "dropout": 0.0}

FAMILIES: Mapping[str, Family] = {
    "alphafold2": alphafold2.FAMILY,
    # Devlin et al. 2019, masked tokens: 110 and 335 million parameters. Dropout is that of the library's config, here
    # and below.
    "bert": from_library("BertConfig", "BertForMaskedLM", "base", {
        "tiny": {"layers": 2, "hidden": 48, "heads": 4, "mlp": 160, **_SMALL, "dropout": 0.0},
        "base": {"layers": 12, "hidden": 768, "heads": 12, "mlp": 3072, **_BERT},
        "large": {"layers": 24, "hidden": 1024, "heads": 16, "mlp": 4096, **_BERT},
    }, _bert),
    # Radford et al. 2019, the next token: 124, 355, 774 and 1558 million parameters.
    "gpt2": from_library("GPT2Config", "GPT2LMHeadModel", "small", {
        "tiny": {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "batch": 8, "vocab": 512, "dropout": 0.0,
                 "attention": "sdpa", "documents": ""},
        "small": {"layers": 12, "hidden": 768, "heads": 12, **_GPT2},
        "medium": {"layers": 24, "hidden": 1024, "heads": 16, **_GPT2},
        "large": {"layers": 36, "hidden": 1280, "heads": 20, **_GPT2},
        "xl": {"layers": 48, "hidden": 1600, "heads": 25, **_GPT2},
    }, _gpt, _GPT2_NAMES),
    # Brown et al. 2020: GPT-2 at its widths; 1.3b to 15b as in the paper's table.
    "gpt3": from_library("GPT2Config", "GPT2LMHeadModel", "1.3b", {
        "tiny": {"layers": 2, "hidden": 48, "heads": 4, "seq": 24, **_GPT3, "vocab": 320},
        "1.3b": {"layers": 24, "hidden": 2048, **_LONG},
        "2.6b": {"layers": 32, "hidden": 2560, **_LONG},
        "6.7b": {"layers": 32, "hidden": 4096, **_LONG},
        "15b": {"layers": 48, "hidden": 5120, **_LONG},
        "175b": {"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048, **_GPT3},
    }, _gpt3, _GPT2_NAMES),
    # The next token: the shape of Llama 3.2 1B (1.24 billion parameters), those of Llama 3.1 for 8b, 70b and 405b, and
    # those of Llama 2 for 7b and 13b.
    "llama": from_library("LlamaConfig", "LlamaForCausalLM", "1b", {
        "tiny": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "mlp": 256, "tied": False,
                 "seq": 32, "batch": 8, "vocab": 512, "attention": "sdpa", "documents": ""},
        "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "mlp": 8192, "tied": True, **_LLAMA},
        "7b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "mlp": 11008, "tied": False, **_LLAMA,
               "vocab": 32000},
        "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "tied": False, **_LLAMA},
        "13b": {"layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 40, "mlp": 13824, "tied": False, **_LLAMA,
                "vocab": 32000},
        "70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672, "tied": False, **_LLAMA},
        "405b": {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "mlp": 53248, "tied": False, **_LLAMA},
    }, _llama),
    # Liu et al. 2020, translation; sizes as in the paper's table. Half of the layers are in the encoder, half in the
    # decoder.
    "mbart": from_library("MBartConfig", "MBartForConditionalGeneration", "4.7b", {
        "tiny": {"layers": 4, "hidden": 48, "heads": 4, "mlp": 160, **_TRANSLATED},
        "4.7b": {"layers": 24, "hidden": 3072, "heads": 16, "mlp": 12288, **_MBART},
        "9.5b": {"layers": 32, "hidden": 4096, "heads": 32, "mlp": 16384, **_MBART},
        "20b": {"layers": 48, "hidden": 5120, "heads": 32, "mlp": 20480, **_MBART},
        "32b": {"layers": 56, "hidden": 6144, "heads": 32, "mlp": 24576, **_MBART},
    }, _mbart, _MBART_NAMES),
    # Jiang et al. 2024, the next token and `balance` times the loss of the router, over the whole batch: 46.7 and 140.6
    # billion parameters; `chosen` experts a token, `head` channels of a head (0: hidden / heads).
    "mixtral": from_library("MixtralConfig", "MixtralForCausalLM", "8x7b", {
        "tiny": {"layers": 2, "hidden": 48, "heads": 8, "kv_heads": 4, "mlp": 80, "experts": 12, "chosen": 2,
                 "balance": 0.02, "head": 0, **_SMALL},
        "8x7b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "experts": 8, "chosen": 2,
                 **_MIXTRAL},
        "8x22b": {"layers": 56, "hidden": 6144, "heads": 48, "kv_heads": 8, "mlp": 16384, "experts": 8, "chosen": 2,
                  **_MIXTRAL, "vocab": 32768},
    }, _mixtral, {"experts": "num_local_experts", "chosen": "num_experts_per_tok",
                "balance": "router_aux_loss_coef"}),
    "mlp": mlp.FAMILY,
    # Liu et al. 2022 (version 2), classes of images; layers, hidden and heads as in the paper's table.
    # `depths` are the layers of each stage; hidden and heads are of the first, and double with each. The paper does not
    # say how the layers are spread; so, there are 1.79, 6.52, 13.2 and 30.6 billion parameters.
    "swin": from_library("Swinv2Config", "Swinv2ForImageClassification", "1.8b", {
        "tiny": {"depths": "2-2", "hidden": 24, "heads": 4, **_SWIN, "image": 24, "patch": 2, "window": 3,
                 "classes": 10},
        "1.8b": {"depths": "2-2-26-2", "hidden": 512, "heads": 16, **_SWIN},
        "6.6b": {"depths": "2-2-40-4", "hidden": 768, "heads": 24, **_SWIN},
        "13b": {"depths": "2-2-48-4", "hidden": 1024, "heads": 32, **_SWIN},
        "30b": {"depths": "2-2-58-2", "hidden": 1536, "heads": 32, **_SWIN},
    }, _swin, {"hidden": "embed_dim", "heads": "", "window": "window_size", "drop_path": "drop_path_rate"}),
    # Raffel et al. 2020, the loss of the decoder: 60.5, 222.9, 737.7, 2852 and 11307 million parameters. As many
    # `layers` are in the encoder as in the decoder; `channels` are of a head.
    "t5": from_library("T5Config", "T5ForConditionalGeneration", "small", {
        "tiny": {"layers": 2, "hidden": 40, "heads": 4, "channels": 6, "mlp": 96, **_TRANSLATED},
        "small": {"layers": 6, "hidden": 512, "heads": 8, "channels": 64, "mlp": 2048, **_T5},
        "base": {"layers": 12, "hidden": 768, "heads": 12, "channels": 64, "mlp": 3072, **_T5},
        "large": {"layers": 24, "hidden": 1024, "heads": 16, "channels": 64, "mlp": 4096, **_T5},
        "3b": {"layers": 24, "hidden": 1024, "heads": 32, "channels": 128, "mlp": 16384, **_T5},
        "11b": {"layers": 24, "hidden": 1024, "heads": 128, "channels": 128, "mlp": 65536, **_T5},
    }, _t5, _T5_NAMES),
    # Dosovitskiy et al. 2021, classes of images: 86.6, 304 and 632 million parameters.
    "vit": from_library("ViTConfig", "ViTForImageClassification", "base", {
        "tiny": {"layers": 2, "hidden": 48, "heads": 4, "mlp": 160, "patch": 4, **_VIT, "image": 20, "classes": 10},
        "base": {"layers": 12, "hidden": 768, "heads": 12, "mlp": 3072, "patch": 16, **_VIT},
        "large": {"layers": 24, "hidden": 1024, "heads": 16, "mlp": 4096, "patch": 16, **_VIT},
        "huge": {"layers": 32, "hidden": 1280, "heads": 16, "mlp": 5120, "patch": 14, **_VIT},
    }, _vit),
}  # fmt: skip
