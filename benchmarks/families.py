"""Families of `transformers`, tiny and unmodified, each captured and verified against its own eager training.

    python benchmarks/families.py [--only NAME ...] [--jobs 2]

Each family runs in a process of its own: a tiny config, random weights, dropout as the library has it (and off in
`verify`), AdamW. Two steps in float64 of every plan are compared with two of the module that torch runs eagerly. A cell
is the largest error of losses, gradients, weights, buffers and optimizer state; or `refused`, WRONG or CRASH, with the
reason below. `judge` is `eager`; or `export` where the module cannot be it, with the reason below. Exits with 1 where a
cell is WRONG or CRASH.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PLANS = {
    "single": ("single", 1),
    "data": ("data_parallel", 2),
    "tensor": ("tensor_parallel", 2),
    "1F1B": ("pipeline_1f1b:stages=2,microbatches=2", 2),
}
SECONDS = 600
PROCESSES = multiprocessing.get_context("forkserver")
ROOT = str(Path(__file__).parents[1]) + os.sep
BATCH, SEQUENCE, VOCABULARY, HIDDEN = 4, 8, 64, 32

Values = dict[str, Any]
_TEXT: Values = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 32, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "use_cache": False,
}  # fmt: skip
_GROUPED = _TEXT | {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = _GROUPED | {"num_experts_per_tok": 2, "output_router_logits": True}
_PAIR = _TEXT | {
    "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "decoder_start_token_id": 2, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}  # fmt: skip
_IMAGE: Values = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16,
    "patch_size": 4, "num_labels": 5, "problem_type": "single_label_classification",
}  # fmt: skip
_SOUND = _TEXT | {
    "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A model class of the library, the values of its config, and the kind of its inputs."""

    model: str
    values: Values
    inputs: str = "tokens"


def _tiny(model: str, base: Values, inputs: str = "tokens", **values: Any) -> Tiny:
    return Tiny(model, {name: value for name, value in (base | values).items() if value is not None}, inputs)


# fmt: off
FAMILIES: dict[str, Tiny] = {
    # Decoders.
    "gpt2": _tiny("GPT2LMHeadModel", _TEXT),
    "gpt_bigcode": _tiny("GPTBigCodeForCausalLM", _TEXT),
    "gpt_neo": _tiny("GPTNeoForCausalLM", _TEXT, attention_types=[[["global", "local"], 1]], window_size=4),
    "gpt_neox": _tiny("GPTNeoXForCausalLM", _TEXT),
    "gptj": _tiny("GPTJForCausalLM", _TEXT, rotary_dim=4),
    "codegen": _tiny("CodeGenForCausalLM", _TEXT, rotary_dim=4),
    "ctrl": _tiny("CTRLLMHeadModel", _TEXT, dff=64),
    "openai-gpt": _tiny("OpenAIGPTLMHeadModel", _TEXT),
    "opt": _tiny("OPTForCausalLM", _TEXT, ffn_dim=64, word_embed_proj_dim=HIDDEN, layerdrop=0.0),
    "xglm": _tiny("XGLMForCausalLM", _PAIR, num_layers=2, attention_heads=4, ffn_dim=64, layerdrop=0.0),
    "biogpt": _tiny("BioGptForCausalLM", _TEXT, layerdrop=0.0),
    "bloom": _tiny("BloomForCausalLM", _TEXT),
    "falcon": _tiny("FalconForCausalLM", _TEXT),
    "falcon-alibi": _tiny("FalconForCausalLM", _TEXT, alibi=True, multi_query=False, new_decoder_architecture=False),
    "mpt": _tiny("MptForCausalLM", _TEXT, expansion_ratio=2, max_seq_len=32),
    "llama": _tiny("LlamaForCausalLM", _GROUPED),
    "mistral": _tiny("MistralForCausalLM", _GROUPED, sliding_window=4),
    "qwen2": _tiny("Qwen2ForCausalLM", _GROUPED),
    "qwen3": _tiny("Qwen3ForCausalLM", _GROUPED),
    "gemma": _tiny("GemmaForCausalLM", _GROUPED),
    "gemma2": _tiny("Gemma2ForCausalLM", _GROUPED, sliding_window=4),
    "gemma3": _tiny("Gemma3ForCausalLM", _GROUPED, sliding_window=4),
    "phi": _tiny("PhiForCausalLM", _TEXT),
    "phi3": _tiny("Phi3ForCausalLM", _GROUPED),
    "stablelm": _tiny("StableLmForCausalLM", _GROUPED),
    "starcoder2": _tiny("Starcoder2ForCausalLM", _GROUPED),
    "olmo": _tiny("OlmoForCausalLM", _GROUPED),
    "olmo2": _tiny("Olmo2ForCausalLM", _GROUPED),
    "cohere": _tiny("CohereForCausalLM", _GROUPED),
    "granite": _tiny("GraniteForCausalLM", _GROUPED),
    "glm": _tiny("GlmForCausalLM", _GROUPED),
    "smollm3": _tiny("SmolLM3ForCausalLM", _GROUPED),
    "persimmon": _tiny("PersimmonForCausalLM", _TEXT),
    "nemotron": _tiny("NemotronForCausalLM", _GROUPED),
    # Mixtures of experts.
    "mixtral": _tiny("MixtralForCausalLM", _EXPERTS, num_local_experts=4),
    "qwen2_moe": _tiny(
        "Qwen2MoeForCausalLM", _EXPERTS, num_experts=4, moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_moe": _tiny("Qwen3MoeForCausalLM", _EXPERTS, num_experts=4, moe_intermediate_size=16),
    "olmoe": _tiny("OlmoeForCausalLM", _EXPERTS, num_experts=4),
    "phimoe": _tiny("PhimoeForCausalLM", _EXPERTS, num_local_experts=4),
    "granitemoe": _tiny("GraniteMoeForCausalLM", _EXPERTS, num_local_experts=4),
    "switch_transformers": _tiny(
        "SwitchTransformersForConditionalGeneration", _PAIR, "masked", num_layers=2, num_decoder_layers=2,
        num_heads=4, d_kv=8, d_ff=64, num_experts=4, expert_capacity=16, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    # States instead of attention.
    "mamba": _tiny("MambaForCausalLM", _TEXT, state_size=4, time_step_rank=4),
    "mamba2": _tiny("Mamba2ForCausalLM", _TEXT, state_size=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=4),
    "falcon_mamba": _tiny("FalconMambaForCausalLM", _TEXT, state_size=4, time_step_rank=4),
    "rwkv": _tiny("RwkvForCausalLM", _TEXT, attention_hidden_size=HIDDEN, context_length=32),
    "recurrent_gemma": _tiny("RecurrentGemmaForCausalLM", _GROUPED, lru_width=32, attention_window_size=4),
    # Encoders.
    "bert": _tiny("BertForMaskedLM", _TEXT),
    "roberta": _tiny("RobertaForMaskedLM", _TEXT),
    "camembert": _tiny("CamembertForMaskedLM", _TEXT),
    "electra": _tiny("ElectraForMaskedLM", _TEXT, embedding_size=16),
    "albert": _tiny("AlbertForMaskedLM", _TEXT, embedding_size=16),
    "distilbert": _tiny("DistilBertForMaskedLM", _TEXT, hidden_dim=64),
    "deberta": _tiny("DebertaForMaskedLM", _TEXT, relative_attention=True, pos_att_type="c2p|p2c"),
    "deberta-v2": _tiny(
        "DebertaV2ForMaskedLM", _TEXT, relative_attention=True, position_buckets=8, pos_att_type="p2c|c2p",
    ),
    "mpnet": _tiny("MPNetForMaskedLM", _TEXT),
    "mobilebert": _tiny(
        "MobileBertForMaskedLM", _TEXT, embedding_size=HIDDEN, intra_bottleneck_size=16, true_hidden_size=16,
    ),
    "squeezebert": _tiny("SqueezeBertForMaskedLM", _TEXT, embedding_size=HIDDEN),
    "modernbert": _tiny("ModernBertForMaskedLM", _TEXT, cls_token_id=0, sep_token_id=2, local_attention=4),
    "roformer": _tiny("RoFormerForMaskedLM", _TEXT, embedding_size=HIDDEN),
    "convbert": _tiny("ConvBertForMaskedLM", _TEXT, embedding_size=HIDDEN, conv_kernel_size=3),
    "fnet": _tiny("FNetForMaskedLM", _TEXT),
    "xlnet": _tiny("XLNetLMHeadModel", _TEXT, d_inner=64, d_head=8, max_position_embeddings=None),
    "funnel": _tiny(
        "FunnelForMaskedLM", _TEXT, block_sizes=[1, 1], d_model=HIDDEN, n_head=4, d_head=8, d_inner=64,
        num_hidden_layers=None,
    ),
    "longformer": _tiny("LongformerForMaskedLM", _TEXT, attention_window=4),
    "big_bird": _tiny("BigBirdForMaskedLM", _TEXT, attention_type="original_full"),
    "nystromformer": _tiny("NystromformerForMaskedLM", _TEXT, num_landmarks=4, segment_means_seq_len=SEQUENCE),
    "reformer": _tiny(
        "ReformerModelWithLMHead", _TEXT, is_decoder=True, attention_head_size=8, feed_forward_size=64,
        axial_pos_shape=[2, 4], axial_pos_embds_dim=[16, 16], attn_layers=["local", "local"],
        local_attn_chunk_length=4, num_hashes=1,
    ),
    # Encoders with decoders.
    "t5": _tiny("T5ForConditionalGeneration", _PAIR, num_layers=2, num_heads=4, d_kv=8, d_ff=64),
    "mt5": _tiny("MT5ForConditionalGeneration", _PAIR, num_layers=2, num_heads=4, d_kv=8, d_ff=64),
    "longt5": _tiny(
        "LongT5ForConditionalGeneration", _PAIR, "masked", num_layers=2, num_heads=4, d_kv=8, d_ff=64,
        local_radius=3,
    ),
    "bart": _tiny("BartForConditionalGeneration", _PAIR),
    "mbart": _tiny("MBartForConditionalGeneration", _PAIR),
    "pegasus": _tiny("PegasusForConditionalGeneration", _PAIR),
    "marian": _tiny("MarianMTModel", _PAIR),
    "led": _tiny(
        "LEDForConditionalGeneration", _PAIR, attention_window=4, max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    ),
    "blenderbot": _tiny("BlenderbotForConditionalGeneration", _PAIR),
    "m2m_100": _tiny("M2M100ForConditionalGeneration", _PAIR),
    # Pictures.
    "vit": _tiny("ViTForImageClassification", _IMAGE, "image"),
    "deit": _tiny("DeiTForImageClassification", _IMAGE, "image"),
    "beit": _tiny("BeitForImageClassification", _IMAGE, "image", drop_path_rate=0.0),
    "dinov2": _tiny("Dinov2ForImageClassification", _IMAGE, "image"),
    "swin": _tiny(
        "SwinForImageClassification", _IMAGE, "image", embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2,
        drop_path_rate=0.0, patch_size=2, num_attention_heads=None, num_hidden_layers=None,
    ),
    "swinv2": _tiny(
        "Swinv2ForImageClassification", _IMAGE, "image", embed_dim=16, depths=[1, 1], num_heads=[2, 2],
        window_size=2, drop_path_rate=0.0, patch_size=2, num_attention_heads=None, num_hidden_layers=None,
    ),
    "convnext": _tiny(
        "ConvNextForImageClassification", _IMAGE, "image", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
    ),
    "convnextv2": _tiny(
        "ConvNextV2ForImageClassification", _IMAGE, "image", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
    ),
    "segformer": _tiny(
        "SegformerForImageClassification", _IMAGE, "image", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
        hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        drop_path_rate=0.0,
    ),
    "segformer-mask": _tiny(
        "SegformerForSemanticSegmentation", _IMAGE, "mask", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
        hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        drop_path_rate=0.0, decoder_hidden_size=16,
    ),
    "resnet": _tiny(
        "ResNetForImageClassification", _IMAGE, "image", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
        layer_type="basic",
    ),
    "mobilenet_v2": _tiny("MobileNetV2ForImageClassification", _IMAGE, "image", depth_multiplier=0.25, min_depth=4),
    "poolformer": _tiny(
        "PoolFormerForImageClassification", _IMAGE, "image", num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[8,
        16], patch_sizes=[3, 3], strides=[2, 2], padding=[1, 1],
    ),
    "vit_mae": _tiny(
        "ViTMAEForPreTraining", _IMAGE, "picture", decoder_hidden_size=16, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2, decoder_intermediate_size=32,
    ),
    "clip": Tiny("CLIPModel", {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 16}, "captioned"),
    "siglip": Tiny(
        "SiglipModel", {"text_config": _TEXT | {"projection_size": HIDDEN}, "vision_config": _IMAGE}, "captioned",
    ),
    # Sound and time.
    "wav2vec2": _tiny("Wav2Vec2ForSequenceClassification", _SOUND, "sound", num_labels=5),
    "wav2vec2-ctc": _tiny("Wav2Vec2ForCTC", _SOUND, "sounds"),
    "hubert": _tiny("HubertForSequenceClassification", _SOUND, "sound", num_labels=5),
    "wavlm": _tiny("WavLMForSequenceClassification", _SOUND, "sound", num_labels=5),
    "audio-spectrogram-transformer": _tiny(
        "ASTForAudioClassification", _IMAGE, "spectrum", num_mel_bins=16, max_length=16, frequency_stride=4,
        time_stride=4,
    ),
    "whisper": _tiny(
        "WhisperForConditionalGeneration", _PAIR, "speech frames", num_mel_bins=8, max_source_positions=8,
        max_target_positions=16, suppress_tokens=None, begin_suppress_tokens=None,
    ),
    "speech_to_text": _tiny(
        "Speech2TextForConditionalGeneration", _PAIR, "speech", max_source_positions=16, max_target_positions=16,
        input_feat_per_channel=8, conv_channels=16,
    ),
    "time_series_transformer": _tiny(
        "TimeSeriesTransformerForPrediction", _PAIR, "series", prediction_length=4, context_length=8,
        lags_sequence=[1, 2], num_time_features=2, d_model=HIDDEN,
    ),
    "patchtst": _tiny(
        "PatchTSTForPrediction", _TEXT, "window", num_input_channels=2, context_length=16, patch_length=4,
        patch_stride=4, prediction_length=4, d_model=HIDDEN, ffn_dim=64,
    ),
    "patchtsmixer": _tiny(
        "PatchTSMixerForPrediction", {}, "window", num_input_channels=2, context_length=16, patch_length=4,
        patch_stride=4, prediction_length=4, d_model=16, num_layers=2,
    ),
}
# fmt: on


def inputs_of(kind: str, draw: Any) -> Values:
    """Return random inputs of a kind, by the names of the library; some labels are left out."""
    import torch

    def tokens() -> Any:
        return torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=draw)

    def floats(*shape: int) -> Any:
        return torch.randn(BATCH, *shape, generator=draw)

    def labels() -> Any:
        found = tokens()
        found[0, :3] = -100
        return found

    classes = torch.arange(BATCH) % 5
    kinds: dict[str, Callable[[], Values]] = {
        "tokens": lambda: {"input_ids": tokens(), "labels": labels()},
        "masked": lambda: {"input_ids": tokens(), "labels": labels(), "attention_mask": torch.ones(BATCH, SEQUENCE)},
        "image": lambda: {"pixel_values": floats(3, 16, 16), "labels": classes},
        "picture": lambda: {"pixel_values": floats(3, 16, 16), "noise": torch.rand(BATCH, 16, generator=draw)},
        "mask": lambda: {
            "pixel_values": floats(3, 16, 16),
            "labels": torch.randint(5, (BATCH, 16, 16), generator=draw),
        },
        "captioned": lambda: {"input_ids": tokens(), "pixel_values": floats(3, 16, 16), "return_loss": True},
        "sound": lambda: {"input_values": floats(160), "labels": classes},
        "sounds": lambda: {"input_values": floats(160), "labels": tokens()[:, :4]},
        "spectrum": lambda: {"input_values": floats(16, 16), "labels": classes},
        "speech frames": lambda: {"input_features": floats(8, 16), "labels": labels()},
        "speech": lambda: {"input_features": floats(16, 8), "labels": labels()},
        "window": lambda: {"past_values": floats(16, 2), "future_values": floats(4, 2)},
        "series": lambda: {
            "past_values": floats(10), "past_time_features": floats(10, 2), "future_values": floats(4),
            "past_observed_mask": torch.ones(BATCH, 10), "future_time_features": floats(4, 2),
        },
    }  # fmt: skip
    return kinds[kind]()


def one(name: str) -> Iterator[Values]:
    """Yield what was found of a family: its capture, then each plan."""
    import torch
    import transformers

    import superscaler as ss
    from superscaler.plans import resolve

    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    tiny = FAMILIES[name]
    model = getattr(transformers, tiny.model)
    module = model(model.config_class(**tiny.values)).train()
    if tiny.model.endswith(("ForCausalLM", "LMHeadModel", "WithLMHead")):
        module.loss_type = "ForCausalLM"
    kwargs = inputs_of(tiny.inputs, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    try:
        graph = ss.capture(module, (), kwargs, optimizer)
    except ss.PlanError as error:
        yield {column: {"refused": str(error)} for column in PLANS}
        return
    yield {"ops": len(graph.forward_ops)}
    for column, (plan, devices) in PLANS.items():
        yield {column: _verified(ss, graph, resolve(plan), devices)}


def _verified(ss: Any, graph: Any, plan: Any, devices: int) -> Values:
    try:
        found = ss.compile(graph, plan, ss.Cluster.local(devices)).verify()
    except ss.PlanError as error:
        return {"refused": str(error)}
    error = max(found[f"{kind}_error"] for kind in ("loss", "gradient", "parameter"))
    judged = {"reference": found["reference"], "note": found["note"]}
    return {"error": error, **judged, **({} if found["equal"] else {"wrong": found["first_difference"]})}


@dataclass(frozen=True)
class Row:
    """What is said of a family: a cell per plan, and the reasons of what is no number."""

    name: str
    ops: str
    judge: str
    cells: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        return not {"WRONG", "CRASH"}.intersection(self.cells)

    def text(self) -> str:
        return f"{self.name:32}{self.ops:>6} {self.judge:8}" + "".join(f"{cell:>9}" for cell in self.cells)


def row_of(name: str, found: Values, last: str) -> Row:
    """Return the row of a family from what its process found; `last` says why that ended, if something is missing."""
    results = [found.get(column, {"crash": last}) for column in PLANS]
    cells = tuple(map(_cell, results))
    judges = dict.fromkeys(r["reference"] for r in results if "reference" in r)
    reasons: dict[str, list[str]] = {}
    for column, result in zip(PLANS, results, strict=True):
        if why := next((result[key] for key in ("refused", "wrong", "crash", "note") if result.get(key)), ""):
            reasons.setdefault(" ".join(why.replace(ROOT, "").split()), []).append(column)
    told = (f"{name}, {', '.join(on) if len(on) < len(PLANS) else 'all plans'}: {why}" for why, on in reasons.items())
    return Row(name, str(found.get("ops", "-")), ", ".join(judges) or "-", cells, tuple(told))


def _cell(result: Values) -> str:
    if "error" in result:
        return "WRONG" if "wrong" in result else f"{result['error']:.0e}"
    return "refused" if "refused" in result else "CRASH"


def run(name: str) -> Row:
    """Return the row of a family, found in a process of its own."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_work, args=(name, sender))
    process.start()
    sender.close()
    found: Values = {}
    end = time.monotonic() + SECONDS
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            found |= receiver.recv()
        found["crash"] = f"took more than {SECONDS} s"
        process.kill()
    except EOFError:
        process.join()
    return row_of(name, found, found.get("crash") or f"exit code {process.exitcode}")


def _work(name: str, sender: Connection) -> None:
    try:
        for found in one(name):
            sender.send(found)
    except Exception as error:
        sender.send({"crash": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"})
        raise


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    PROCESSES.set_forkserver_preload(
        ["torch.export", "transformers.modeling_utils", "superscaler.frontend.capture", "superscaler.verify.run"]
    )
    print(Row("family", "ops", "judge", tuple(PLANS), ()).text(), flush=True)
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(run, options.only):
            print(row.text(), flush=True)
            rows.append(row)
    whole = sum(all("refused" not in cell for cell in row.cells) and row.is_right for row in rows)
    captured = sum(row.ops != "-" for row in rows)
    print(f"\n{len(rows)} families: {captured} captured, {whole} equal under every plan\n")
    for reason in (reason for row in rows for reason in row.reasons):
        print(reason)
    return not all(row.is_right for row in rows)


if __name__ == "__main__":
    sys.exit(main())
