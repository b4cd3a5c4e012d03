"""The models of the paper's evaluation: its table, by family, from the smallest on 4 GPUs to the largest on 32.

Widths and depths are the paper's; what it does not give is said here. There is no dropout: ours draws numbers that are
equal under all plans, in some ten kernels of integers, where the paper's torch had one. Attention of GPT-3 writes all
scores out (gpt3.py): the V100 has no FlashAttention, which came after the paper's PyTorch 1.11. Its softmax is in
float32, as Megatron-LM's above 4,096 tokens; float16 is shown as another assumption. The vocabulary is padded to
51,200, as Megatron-LM does. Windows of Swin are 48 patches wide: so are those for images of 1536 in the example of the
paper's authors (nnScaler, examples/vision/swin/model.py), which has the model of 1.8B and one of 355M, too; 24 is shown
as another assumption. Layers are spread over four stages as there, most in the third. DeepSpeed pads weights that its
devices do not divide, so that Swin has 1,024 classes there and 1,000 elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

GPUS = (4, 8, 16, 32)


_GPT3 = "benchmarks/paper/gpt3.py:gpt3"


def _sizes(model: str, sizes: str, keys: str = "") -> dict[int, str]:
    return {gpus: f"{model}:size={size}{keys}" for gpus, size in zip(GPUS, sizes.split(), strict=True)}


_GPT3_SIZES = "1.3b 2.6b 6.7b 15b"
_SWIN_SIZES = "1.8b 6.6b 13b 30b"

# family -> the model of each number of GPUs.
MODELS: Mapping[str, Mapping[int, str]] = {
    "swin": _sizes("swin", _SWIN_SIZES, ",window=48"),
    "swin, windows of 24": _sizes("swin", _SWIN_SIZES),
    "gpt3": _sizes(_GPT3, _GPT3_SIZES, ",softmax=float32"),
    "gpt3, softmax in float16": _sizes(_GPT3, _GPT3_SIZES, ",softmax=float16"),
    "gpt3, no scores": {32: "gpt3:size=15b,seq=16384,vocab=51200,dropout=0.0"},
    "mbart": _sizes("mbart", "4.7b 9.5b 20b 32b", ",dropout=0.0"),
    "alphafold2": _sizes("alphafold2", "87m 930m 2.4b 3.2b", ",dropout=0.0,pair_dropout=0.0"),
}

# The layers of AlphaFold2 by size, and those that are simulated: a point of more layers is on the line through both, as
# 22 thousand operations take two minutes to capture and 60 thousand six. 2.4b and 3.2b differ in layers alone.
ALPHAFOLD2 = {"87m": 48, "930m": 64, "2.4b": 96, "3.2b": 128}
ALPHAFOLD2_DEPTHS = (8, 12)
# Of the four stages of Swin the layers of the third and of the fourth, and those of the third that are simulated. Where
# a pipeline cuts layers apart there is no line, and the model is whole.
SWIN = {"1.8b": (26, 2), "6.6b": (40, 4), "13b": (48, 4), "30b": (58, 2)}
SWIN_DEPTHS = (6, 10)


def shallow(model: str, stages: int) -> tuple[int, dict[int, str]]:
    """Return the layers of a model, and models in its place by their layers; none for what is simulated whole."""
    family, _, options = model.partition(":size=")
    size = options.partition(",")[0]
    if family == "alphafold2" and "layers=" not in options:
        return ALPHAFOLD2[size], {n: f"{model.replace('3.2b', '2.4b')},layers={n}" for n in ALPHAFOLD2_DEPTHS}
    if family == "swin" and stages == 1 and "depths=" not in options:
        third, fourth = SWIN[size]
        return third, {n: f"{model},depths=2-2-{n}-{fourth}" for n in SWIN_DEPTHS}
    return 0, {}


# E6: Swin by millions of parameters, and the parts of co-shard: the heads of its first stage. The paper names 907 and
# 1,300, and a ratio of 3.7, which is 351; its authors' example has 355.
SWIN_SIZES: Mapping[int, tuple[str, int]] = {
    355: ("hidden=256,heads=8,depths=2-2-18-2", 8),
    907: ("hidden=384,heads=12,depths=2-2-22-2", 12),
    1300: ("hidden=448,heads=14,depths=2-2-24-2", 14),
}


# Those of windows of 24, which say what the window does; the point of a key is known.
NARROW_SIZES: Mapping[int, tuple[str, int]] = {
    345: ("hidden=224,heads=7", 7),
    849: ("hidden=352,heads=11", 11),
    1374: ("hidden=448,heads=14", 7),
}


def small_swin(options: str, window: int) -> str:
    return f"swin:size=1.8b,{f'window={window},' if window != 24 else ''}{options}"


# E7: GPT-3 1.3B by sequence.
SEQUENCES = (2048, 4096, 6144, 8192, 10240, 12288)


def long(sequence: int, softmax: str = "float16") -> str:
    """Return GPT-3 1.3B at a sequence."""
    return f"{_GPT3}:size=1.3b,seq={sequence},softmax={softmax}"
