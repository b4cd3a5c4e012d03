"""Published seconds of training steps beside those that `superscaler simulate` gives. Nothing is fitted to them.

    python benchmarks/simulate_published.py [--only mosaic,korthikanti] [--rows "hidden=2048"] [--shards]
        [--torch-compile] [--fused] [--overlap pipelined] [--recorded benchmarks/results/simulate_published.txt]

`tau`: Kendall's, of the rows of one model on one kind of GPU. `regret`: of the plans of a source for one model on one
cluster, the measured seconds of a sample under the plan that is predicted to be the fastest of those that fit, over
those of the best measured. `--recorded`: of the last line that a file has of each row; nothing is simulated. A step
that was published as tokens, or operations, per second is computed from these. A row takes 10 to 80 CPU seconds, those
with pipelines minutes. `unseen`: rows that no choice in the simulator was made after. `--shards`: rows with FSDP keep
float32 shards alone, and gather bf16. `--torch-compile`, `--fused`: operators are fused, as the systems of some rows
fuse them. `--overlap`: communication of tensor parallelism beside products, as theirs.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from superscaler.cluster import Cluster
from tests.helpers.ranked import Measured, summary, tau

if TYPE_CHECKING:
    from torch.nn import Module

    from superscaler.simulate.prediction import Prediction

# MosaicML, llm-foundry, scripts/train/benchmarking/README.md (commit 061f2c7): MPT models, 8 GPUs a server, FSDP with
# FULL_SHARD, AMP in bfloat16, vocabulary 50,368, biases, learned positions, fused cross entropy. Attention is
# FlashAttention 1 in Triton with ALiBi: on A100 30 to 50 % of the peak, backward 25 to 35 % (Dao 2023, from 512 keys to
# 16,384: so the ramps). A size: layers, hidden, heads. A row: size, GPU, GPUs, sequence, microbatch, number of these,
# recomputation, tokens per second in all.
_MPT = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
_MOSAIC = (
    ("125m", "a100", 8, 512, 128, 2, False, 1325455), ("125m", "a100", 8, 2048, 32, 2, False, 1133901),
    ("125m", "a100", 8, 8192, 8, 2, False, 723142), ("350m", "a100", 8, 512, 128, 2, False, 554643),
    ("350m", "a100", 8, 2048, 32, 2, False, 470263), ("350m", "a100", 8, 8192, 8, 2, False, 292559),
    ("760m", "a100", 8, 2048, 24, 2, False, 259472), ("760m", "a100", 8, 8192, 6, 2, False, 167471),
    ("1b", "a100", 8, 2048, 14, 4, False, 164109), ("1b", "a100", 8, 8192, 3, 4, False, 110516),
    ("3b", "a100", 8, 2048, 10, 2, False, 86491), ("3b", "a100", 8, 8192, 3, 6, False, 61567),
    ("7b", "a100", 8, 1024, 64, 2, True, 34857), ("7b", "a100", 8, 2048, 6, 2, False, 37130),
    ("7b", "a100", 8, 4096, 16, 2, True, 29472), ("13b", "a100", 8, 2048, 2, 3, False, 18097),
    ("13b", "a100", 8, 4096, 10, 3, True, 16482), ("760m", "h100", 8, 512, 96, 2, False, 669998),
    ("760m", "h100", 8, 4096, 12, 2, False, 443674), ("1b", "h100", 8, 2048, 14, 1, False, 363645),
    ("1b", "h100", 16, 2048, 20, 1, False, 736596), ("1b", "h100", 64, 2048, 20, 1, False, 2841754),
    ("1b", "h100", 8, 8192, 3, 4, False, 233256), ("3b", "h100", 8, 1024, 20, 6, False, 216369),
    ("3b", "h100", 16, 2048, 10, 3, False, 386285), ("7b", "h100", 8, 2048, 6, 1, False, 85144),
    ("7b", "h100", 8, 4096, 16, 2, True, 68893), ("13b", "h100", 8, 2048, 2, 1, False, 38336),
    ("13b", "h100", 64, 2048, 2, 1, False, 307209),
)  # fmt: skip
# Other rows of the same tables, which no choice was made after: those of 40 GB have all states in bfloat16.
_MOSAIC_UNSEEN = (
    ("70b", "h100", 64, 2048, 8, 4, True, 66523), ("70b", "h100", 32, 2048, 2, 16, True, 28242),
    ("30b", "h100", 8, 4096, 1, 21, True, 14419), ("30b", "h100", 32, 2048, 14, 3, True, 73860),
    ("30b", "h100", 8, 2048, 3, 21, True, 16022), ("13b", "h100", 8, 32768, 1, 3, True, 15812),
    ("13b", "h100", 8, 4096, 10, 3, True, 37740), ("13b", "h100", 32, 2048, 2, 1, False, 153960),
    ("7b", "h100", 8, 8192, 8, 2, True, 55481), ("7b", "h100", 8, 1024, 64, 2, True, 81628),
    ("3b", "h100", 8, 8192, 3, 6, False, 132626), ("3b", "h100", 64, 2048, 6, 3, False, 1441663),
    ("1b", "h100", 8, 16384, 2, 4, False, 157194), ("1b", "h100", 8, 512, 56, 4, False, 418201),
    ("760m", "h100", 32, 2048, 24, 1, False, 2175091), ("70b", "a100", 64, 2048, 8, 4, True, 26274),
    ("70b", "a100", 32, 2048, 2, 16, True, 11962), ("30b", "a100", 8, 2048, 3, 21, True, 7330),
    ("13b", "a100", 8, 16384, 3, 3, True, 11454), ("7b", "a100", 8, 32768, 2, 2, True, 13382),
    ("3b", "a100", 8, 512, 40, 6, False, 97019), ("1b", "a100", 8, 16384, 2, 4, False, 79650),
    ("125m", "a100", 8, 65536, 1, 2, False, 162946),
)  # fmt: skip

# Korthikanti et al. 2022, table 5: A100, sequence 2048, vocabulary 51,200, before FlashAttention. A row: sizes, plan,
# servers, batch, seconds.
_22B, _175B = "layers=48,hidden=6144,heads=64", "layers=96,hidden=12288,heads=96"
_530B, _1T = "layers=105,hidden=20480,heads=128", "layers=128,hidden=25600,heads=160"
_DEEP, _DEEPER = "hybrid:tp=8,pp=8,chunks=3,microbatches=64", "hybrid:tp=8,pp=35,chunks=3,microbatches=280"
_DEEPEST = "hybrid:tp=8,pp=64,microbatches=512"
_KORTHIKANTI = (
    (_22B, "hybrid:tp=8,recompute=full", 1, 4, 1.42),
    (_22B, "hybrid:tp=8,sequence=true,recompute=selective", 1, 4, 1.10),
    (_175B, f"{_DEEP},recompute=full", 8, 64, 18.13),
    (_175B, f"{_DEEP},sequence=true,recompute=selective", 8, 64, 13.75),
    (_530B, f"{_DEEPER},recompute=full", 35, 280, 49.05),
    (_530B, f"{_DEEPER},sequence=true,recompute=selective", 35, 280, 37.83),
    (_1T, f"{_DEEPEST},recompute=full", 64, 512, 94.42),
    (_1T, f"{_DEEPEST},sequence=true,recompute=selective", 64, 512, 71.49),
)

# Narayanan et al. 2021, table 1: A100, sequence 2048, vocabulary 51,200, all layers computed again, 96 B l s h^2
# (1 + s/6h + V/16lh) operations; gradients sent in 16 bits after the backward, as in Megatron-LM of that year. Its
# examples/sc21/run_table_1.sh (commit 79a3bb6) has the sizes of microbatches, and the layers of a chunk. A row: layers,
# hidden, heads, tp, pp, chunks, GPUs, batch, sequences a microbatch, Tflop/s of a GPU.
_NARAYANAN = (
    (24, 2304, 24, 1, 1, 1, 32, 512, 16, 137), (30, 3072, 32, 2, 1, 1, 64, 512, 16, 138),
    (36, 4096, 32, 4, 1, 1, 128, 512, 16, 142), (40, 6144, 48, 8, 1, 1, 256, 1024, 8, 135),
    (48, 8192, 64, 8, 2, 1, 512, 1536, 4, 138), (60, 10240, 80, 8, 4, 3, 1024, 1792, 2, 140),
    (80, 12288, 96, 8, 8, 2, 1536, 2304, 2, 148), (96, 16384, 128, 8, 16, 2, 1920, 2160, 1, 155),
    (105, 20480, 128, 8, 35, 3, 2520, 2520, 1, 163), (128, 25600, 160, 8, 64, 1, 3072, 3072, 1, 163),
)  # fmt: skip

# BigScience, train/tr11-176B-ml/chronicles-prequel.md, "Best TFLOPs": 8 A100 (80 GB), fp16, sequence 2048, vocabulary
# 250,880, each layer computed again, 2,048 microbatches of one sequence, of which 64 are simulated. A row: layers,
# hidden, heads, seconds.
_BIGSCIENCE = ((8, 14400, 32, 769.99),)

# The same, chronicles-prequel.md (commit 053adaf), "Rebalancing layers": BLOOM on 384 A100, bf16, ZeRO-1, all layers
# computed again, 2 sequences a microbatch; Jean Zay's servers have four NICs of 100 Gbit/s. 59 GB were used. A row: dp,
# tp, pp, heads, seconds.
_BLOOM = ((8, 4, 12, 112, 104.50),)

# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: Llama 3.1 8B, FSDP, eager, sequence 8192, two
# samples a GPU, H100 with 2.4 TB/s and 500 W, NICs of 400 Gbit/s. What it computes again is compared with all and none.
_TITAN = ((8, 5762), (128, 5605))

# OneFlow, DLPerf, Megatron-LM/README.md (commit 01e43de): Megatron-LM of April 2021, V100 (16 GB), servers of 8 with a
# NIC of 100 Gbit/s, fp16, sequence 2048, vocabulary 51,200, dropout (which ours lacks), all layers computed again,
# gradients sent in fp16 after the backward. A row: dp, tp, pp, microbatch, batch, layers, hidden, heads, milliseconds.
_DLPERF = (
    (1, 1, 1, 2, 2, 16, 1536, 16, 464.12), (8, 1, 1, 2, 16, 16, 1536, 16, 480.96),
    (16, 1, 1, 2, 32, 16, 1536, 16, 664.46), (32, 1, 1, 2, 64, 16, 1536, 16, 683.51),
    (1, 1, 1, 8, 8, 12, 768, 12, 611.2), (1, 8, 1, 16, 16, 16, 1536, 16, 664.64),
    (2, 4, 1, 8, 16, 16, 1536, 16, 576.48), (4, 2, 1, 4, 16, 16, 1536, 16, 593.68),
    (2, 8, 1, 8, 16, 24, 2304, 24, 1313.52), (4, 8, 1, 8, 32, 24, 2304, 24, 1508.48),
    (1, 16, 1, 16, 16, 16, 3072, 32, 5610.23), (1, 32, 1, 16, 16, 32, 3072, 32, 13037.85),
    (8, 1, 4, 2, 512, 16, 1536, 16, 4893.55), (1, 8, 4, 16, 512, 24, 2304, 24, 22166.85),
    (2, 4, 4, 8, 512, 24, 2304, 24, 15331.23), (2, 8, 2, 8, 512, 24, 2304, 24, 16281.51),
)  # fmt: skip


# foundation-model-stack/fms-fsdp, README.md (commit 0d31998): Llama 2 on 128 A100 (80 GB), sequence 4096, bfloat16,
# FlashAttention 2, 400 Gbit/s a server (PyTorch's blog of March 2024). 7b and 13b are in hybrid shards without
# recomputation, with gradients in bfloat16. A row: layers, hidden, heads, heads of keys, feed-forward,
# hybrid, sequences a GPU, tokens per second of a GPU.
_IBM = (
    (32, 4096, 32, 32, 11008, True, 2, 3760), (40, 5120, 40, 40, 13824, True, 1, 1700),
    (48, 8192, 64, 8, 22016, False, 8, 772), (80, 8192, 64, 8, 28672, False, 6, 380),
)  # fmt: skip

# InternLM/InternEvo, doc/en/train_performance.md (commit 3a665e8): 7B, A100, four NICs of 100 Gbit/s, sequence 2048,
# vocabulary 103,168, 16,384 tokens of a GPU a step in four microbatches, gradients in 16 bits, ZeRO-1 over all replicas
# or those of a server. Theirs sends whole updated weights after the update (configs/7B_sft.py: overlap_sync_param is
# off), each from the device that updated it; ours gathers slices during the next forward, unless `no_prefetch`. By tp
# and slices (0: all): tokens per second of a GPU on 8, 16, ... 1,024.
_INTERNEVO = {
    (1, 0): (4062, 3842, 3752, 3690, 3571, 3209, 2861, 2271), (1, 8): (4078, 3939, 3919, 3944, 3928, 3920, 3835, 3625),
    (2, 0): (3822, 3595, 3475, 3438, 3308, 3094, 2992, 2785), (2, 4): (3761, 3658, 3655, 3650, 3651, 3653, 3589, 3486),
}  # fmt: skip
# The same page, "FLOPS testing": ZeRO-1 inside a server. GPUs, sequences a microbatch, number of these, recomputation,
# tokens per second of a GPU.
_INTERNEVO_FULL = (
    (8, 8, 1, True, 3314), (16, 8, 1, True, 3268), (32, 8, 1, True, 3323), (64, 8, 1, True, 3217),
    (128, 8, 1, True, 3260), (256, 8, 1, True, 3215), (512, 8, 1, True, 3199), (1024, 8, 1, True, 3163),
    (512, 4, 1, True, 2963), (1024, 2, 1, True, 2341), (1024, 4, 1, True, 2796), (512, 2, 2, False, 3084),
    (1024, 2, 1, False, 2346), (1024, 2, 2, False, 2817),
)  # fmt: skip

# Qi et al. 2023 (arXiv 2401.10241), tables 4, 6 and 7, its baselines of Megatron-LM: pipelines alone, A100, sequence
# 1024; the first and the last stage have one layer less. Published memory says that scores were kept, and nothing was
# computed again. Their network and vocabulary are not given. A row: layers, hidden, heads, GPUs, chunks, sequences a
# microbatch, number of these: samples per second of a GPU.
_ZERO_BUBBLE = (
    (22, 2304, 24, 8, 1, 6, {24: 11.8, 32: 12.5, 64: 13.6}), (22, 2304, 24, 8, 3, 6, {24: 13.1, 32: 13.4, 64: 13.9}),
    (30, 4096, 32, 8, 1, 3, {24: 3.5, 32: 3.7, 64: 4.03}), (30, 4096, 32, 8, 4, 3, {24: 4.01, 32: 4.08, 64: 4.19}),
    (46, 5120, 40, 16, 1, 1, {48: 1.4, 64: 1.49, 128: 1.64}), (46, 5120, 40, 16, 3, 1, {48: 1.54, 64: 1.59, 128: 1.66}),
    (62, 6144, 48, 32, 1, 1, {96: 0.76, 128: 0.8, 256: 0.88}), (30, 4096, 32, 16, 1, 3, {64: 3.48}),
    (62, 6144, 48, 32, 2, 1, {96: 0.82, 128: 0.85, 256: 0.9}), (46, 5120, 40, 24, 1, 1, {96: 1.47}),
    (46, 5120, 40, 24, 1, 2, {72: 1.52, 96: 1.61, 192: 1.76}),
    (30, 4096, 32, 16, 1, 6, {48: 3.38, 64: 3.57, 128: 3.91}),
    (62, 6144, 48, 32, 1, 2, {96: 0.82, 128: 0.87, 256: 0.95}),
)  # fmt: skip

# BigScience, chronicles-prequel.md (commit 053adaf), sweeps of February 25, 26 and 28, on 384 A100 as for BLOOM. Until
# then layers are in equal stages, and gradients in fp16; on the 28th embedding and head are a layer each, and gradients
# in float32. DeepSpeed sends them after the backward. Ours lack dropout and ALiBi. A row: layers, hidden, heads, dp,
# tp, pp, sequences a microbatch, number of these, seconds.
_PREQUEL = {
    "fp16": (
        (72, 14336, 64, 16, 4, 6, 4, 32, 117.11), (72, 14336, 64, 12, 8, 4, 4, 42, 114.81),
        (72, 14336, 64, 24, 8, 2, 2, 42, 136.13), (72, 14336, 64, 8, 8, 6, 6, 42, 123.57),
        (72, 14336, 64, 8, 8, 6, 4, 64, 114.11), (72, 14336, 64, 8, 4, 12, 4, 64, 111.89),
        (72, 14336, 64, 16, 4, 6, 2, 64, 111.71), (72, 14336, 64, 16, 2, 12, 2, 64, 112.5),
        (72, 14336, 64, 6, 8, 8, 4, 84, 113.16), (72, 14336, 64, 12, 8, 4, 2, 84, 125.52),
        (72, 14336, 64, 24, 8, 2, 1, 84, 145.45), (72, 14336, 64, 4, 8, 12, 4, 128, 117.07),
        (72, 14336, 64, 8, 4, 12, 2, 128, 110.48), (72, 14336, 64, 8, 2, 24, 2, 128, 122.75),
        (84, 13312, 64, 8, 4, 12, 4, 64, 113.21), (84, 13312, 64, 8, 4, 12, 2, 128, 103.82),
        (84, 13312, 64, 8, 8, 6, 2, 128, 129.61),
    ),
    "bf16": (
        (106, 12288, 96, 8, 4, 12, 4, 64, 120.34), (100, 12288, 64, 8, 8, 6, 4, 64, 120.96),
        (82, 13312, 64, 8, 4, 12, 4, 64, 104.82), (70, 14336, 64, 8, 4, 12, 4, 64, 102.27),
        (106, 12288, 96, 8, 4, 12, 2, 128, 118.79), (100, 12288, 64, 8, 8, 6, 2, 128, 139.72),
        (82, 13312, 64, 8, 4, 12, 2, 128, 104.45), (82, 13312, 64, 4, 8, 12, 4, 128, 111.79),
        (70, 14336, 64, 8, 4, 12, 2, 128, 102.03),
    ),
}  # fmt: skip

# NVIDIA/dgxc-benchmarking, READMEs of nemo_megatron, llama3.1 and nemotron (commits 0b71cfd, 143b90d): NeMo, DGX H100,
# ZeRO-1, sequence parallel with products that overlap its communication (which ours lacks). The two matrices of squared
# ReLU are the three of llama with 2/3 of the width. Context parallelism is a ring with balanced halves; ours keeps
# slices of the optimizer over dp alone. A row: model, plan, GPUs of a replica, batch of a replica; seconds by replicas.
_15B = "llama:layers=32,hidden=6144,heads=48,kv_heads=8,mlp=16384,tied=false,seq=4096,vocabulary=256000"
_340B = "llama:layers=96,hidden=18432,heads=96,kv_heads=8,mlp=49152,tied=false,seq=4096,vocabulary=256000"
_405B = "llama:layers=7,hidden=16384,heads=128,kv_heads=16,mlp=53248,tied=false,seq=8192,vocabulary=51200"
_ONES, _FOURS = "+".join(["1"] * 96), "+".join(["4"] * 20)
_DGXC = (
    (_15B, "zero:{},stage=1,microbatches=4 x sequence_parallel:4,regather=true", 4, 16,
     {4: 2.812, 8: 2.824, 16: 2.845, 32: 2.859, 64: 2.852, 128: 2.875, 256: 2.895, 512: 2.887}),
    (_15B, "zero:{},stage=1,microbatches=4 x sequence_parallel:2,regather=true", 2, 8, {8: 2.746}),
    ("llama:size=8b,seq=8192", "zero:{},stage=1,microbatches=32 x ring_attention:2,zigzag=true", 2, 32,
     {4: 12.91, 8: 13.0, 16: 13.05, 32: 13.08, 64: 13.1}),
    (_405B, "zero:{},stage=1,microbatches=63 x ring_attention:2,zigzag=true x sequence_parallel:8,regather=true", 16,
     63, {2: 8.85}),
    (_340B, f"interleaved:8,chunks=12,microbatches=16,blocks={_ONES} x zero:{{}},stage=1,halves=true x "
     "sequence_parallel:8,regather=true", 64, 16, {2: 4.61, 4: 4.67, 8: 4.7, 16: 4.73, 32: 4.84}),
    (f"gpt3:{_175B},seq=2048,vocabulary=51200", "hybrid:dp={},tp=4,pp=8,chunks=12,microbatches=64,sequence=true,zero=1,"
     "halves=true", 32, 64, {4: 8.309, 8: 8.408, 16: 8.42, 32: 8.453, 64: 8.49}),
    ("llama:size=70b,seq=8192", f"interleaved:4,chunks=5,microbatches=64,blocks={_FOURS} x zero:{{}},stage=1 x "
     "ring_attention:2,zigzag=true x sequence_parallel:4,regather=true", 32, 64, {2: 14.72, 4: 14.73, 64: 14.98}),
)  # fmt: skip

# The same repository, maxtext/README_70b.md (commit 143b90d): Llama 2 70B, two sequences of 4096 a GPU, slices over 128
# GPUs at most; queries, keys and values are kept (ours: all is computed again). JAX-Toolbox,
# docs/frameworks/maxtext/README.md (commit 67b7949): 7B without recomputation. A row: size, plan, GPUs, seconds.
_MAXTEXT = (
    ("70b", "fsdp:recompute=true", 64, 6.999), ("70b", "fsdp:recompute=true", 128, 7.072),
    ("70b", "fsdp:recompute=true", 256, 7.153), ("70b", "fsdp:shard=128,recompute=true", 512, 7.091),
    ("70b", "fsdp:shard=128,recompute=true", 1024, 7.084), ("70b", "fsdp:shard=128,recompute=true", 2048, 7.066),
    ("7b", "fsdp", 8, 0.721),
)  # fmt: skip

# FlagOpen/FlagPerf, training/nvidia/llama1_7B-paddle/README.md (commit 20ce265): PaddlePaddle, 8 A100, fp16, sequence
# 2048, a batch of 2,048. Those of 40 GB have 1,555 GB/s; those of 80 have fused norms alone, and took 70.1, 58.7,
# 54.0 and 46.8 GiB. Weights are sent after the update. A row: plan, GB, samples per second.
_PADDLE = (
    ("zero:stage=2,microbatches=64,halves=true", 80, 16.67),
    ("zero:4,stage=1,microbatches=128,halves=true x tensor_parallel:2", 80, 15.19),
    ("zero:4,stage=2,microbatches=128,halves=true x tensor_parallel:2", 80, 14.26),
    ("pipeline_1f1b:4,microbatches=512,blocks=8+8+8+8 x tensor_parallel:2", 80, 14.54),
    ("zero:8,stage=2,microbatches=128,halves=true x recompute:what=block", 40, 10.72),
    ("zero:4,stage=1,microbatches=256,halves=true x tensor_parallel:2 x recompute:what=block", 40, 8.45),
    ("zero:4,stage=2,microbatches=256,halves=true x tensor_parallel:2 x recompute:what=block", 40, 8.44),
    ("pipeline_1f1b:4,microbatches=1024,blocks=8+8+8+8 x tensor_parallel:2 x recompute:what=block", 40, 8.72),
)
# The same, llama3_8B-megatron and llama3_70B-megatron (commits 0e0fc76, 61ac079): Megatron-core 0.6, H100, sequence
# 8192, a batch of 512, nothing overlaps the backward by the script. A row: size, GPUs, plan, tokens per second of a
# GPU.
_FLAGPERF = (
    ("8b", 8, "zero:4,stage=1,microbatches=128 x sequence_parallel:2,regather=true", 8103),
    ("8b", 16, "zero:8,stage=1,microbatches=64 x sequence_parallel:2,regather=true", 7914),
    ("70b", 64, "pipeline_1f1b:4,microbatches=256,blocks=20+20+20+20 x zero:2,stage=1 x "
     "sequence_parallel:8,regather=true", 851),
)  # fmt: skip

# torchtitan, docs/performance.md (commit 0413364): FSDP on 64 A100 (network not given), eager. Where theirs computes
# every second layer again, ours does the first half. A row: size, vocabulary, sequence, sequences a GPU, plan, tokens
# per second of a GPU.
_TITAN_A100 = (
    ("8b", 128256, 8192, 1, "zero:stage=3,keep=16", 2904), ("70b", 128256, 8192, 1, "fsdp:recompute=true", 331),
    ("13b", 32000, 4096, 2, "fsdp", 2162), ("13b", 32000, 4096, 2, "zero:stage=3,keep=20", 1914),
    ("70b", 32000, 4096, 2, "fsdp:recompute=true", 353),
)  # fmt: skip

# moussaKam.github.io, docs/_posts/2024-09-02-fsdp-vs-3D-parallelism.markdown (commit 9f06370): nanotron, Llama 3.1 8B,
# servers of 4 H100 (network not given), sequence 4096, 4 sequences a microbatch. Recomputation and ZeRO-1 are not said:
# neither here. A row: dp, tp, pp, microbatches, tokens per second.
_NANOTRON = (
    (2, 8, 1, 8, 83300), (4, 4, 1, 4, 128000), (4, 2, 2, 1, 49200), (4, 4, 1, 1, 108000), (8, 4, 1, 4, 253000),
    (4, 8, 1, 8, 154000),
)  # fmt: skip

# nanotron/old_bench on Hugging Face, llama-1B/8_GPUS (uploads of July 2024), log_metrics.csv: 8 H100, 24 layers of
# 2048, feed-forward 4096, 50,257 words (padded to `tp` only), a batch of 1,024 sequences of 4096, ZeRO-1, 1F1B,
# sequence parallelism without overlap, no recomputation (bench_cluster of huggingface, create_configs.py, whose costs
# of blocks make the stages). Known before it was predicted. A row: dp, tp, pp, sequences a microbatch, seconds.
_NANOTRON_1B = (
    (4, 2, 1, 8, 15.8), (2, 4, 1, 8, 18.9), (2, 1, 4, 4, 22.0), (2, 1, 4, 2, 22.4), (1, 4, 2, 8, 20.3),
    (1, 2, 4, 4, 23.6), (1, 8, 1, 8, 26.2), (2, 2, 2, 1, 46.8),
)  # fmt: skip
_NANOTRON_STAGES = {2: ",blocks=14+10", 4: ",blocks=7+7+6+4"}

# Nemotron-4 15B (arXiv 2402.16819): H100, tp 8, ZeRO-1, four sequences a replica, taken as one microbatch with sequence
# parallelism (neither is said). Seconds by replicas.
_NEMOTRON = {96: 0.57, 192: 0.58, 288: 0.64}

# DS3Lab/Decentralized_FM_alpha, results/gpt3_xl_fp16.md (commit 01aedd5): GPipe over 8 V100, three layers of 2048 each,
# 96 microbatches of one sequence of 2048, a small head. Activations of 96 microbatches fit into 16 GB only where they
# are computed again. A row: seconds of a message, bytes per second, seconds.
_SHAPED = (
    (1e-4, 1.25e9, 8.14), (1e-3, 0.625e9, 8.79), (5e-3, 0.25e9, 10.69), (1e-2, 0.125e9, 15.64), (5e-2, 0.125e9, 16.23),
)  # fmt: skip

# NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md (Megatron-Core 0.8): Mixtral 8x7B on 64 H100, dropless,
# 438 Tflop/s of a GPU by its formula, which counts all scores of attention; sequence 4096, experts on 8 devices, 4
# stages of 8 chunks, one sequence a microbatch, a batch of 256. Ours has as many tokens for each expert.
_MEGATRON_MIXTRAL = 438e12


@dataclass(frozen=True)
class Row:
    """A published step. `late`: gradients are sent after the backward. `attention`: its kernel, if not torch's.
    `unseen`: nothing was changed after the row was predicted. `fused`: its system has fused norms and activations.
    `sum_halves`: its system sums gradients in 16 bits. `no_prefetch`: it gathers weights beside no work. `broadcast`:
    it broadcasts them one by one. `seconds`: `inf` if it ran out of memory. `table`: its own, if not that of its model
    and cluster. `norms`: its system has fused norms, and nothing else that is fused.
    """

    source: str
    sweep: str
    model: str
    plan: str
    cluster: str
    seconds: float
    precision: str = "bf16"
    late: bool = False
    unseen: bool = False
    attention: str = ""
    fused: bool = False
    sum_halves: bool = False
    no_prefetch: bool = False
    table: str = ""
    norms: bool = False
    broadcast: bool = False


def rows() -> Iterator[Row]:
    """Yield all rows."""
    mosaic = [(row, False) for row in _MOSAIC] + [(row, True) for row in _MOSAIC_UNSEEN]
    for (name, gpu, count, seq, micro, number, again, speed), unseen in mosaic:
        layers, hidden, heads = _MPT[name]
        batch = micro * number * count
        model = f"gpt3:layers={layers},hidden={hidden},heads={heads},seq={seq},vocabulary=50368,batch={batch}"
        plan = f"fsdp:microbatches={number}" + ",recompute=true" * again
        cluster, seconds = f"{gpu}:{count // 8}x8", batch * seq / speed
        yield Row("mosaic", f"{name} {gpu}", model, plan, cluster, seconds, unseen=unseen, attention="flash1")
    old = "seq=2048,vocabulary=51200,attention=eager"
    for sizes, plan, servers, batch, seconds in _KORTHIKANTI:
        model, cluster = f"gpt3:{sizes},{old},batch={batch}", f"a100:{servers}x8"
        yield Row("korthikanti", sizes, model, plan, cluster, seconds, unseen=servers > 8)
    for layers, hidden, heads, tp, pp, chunks, count, batch, micro, speed in _NARAYANAN:
        model = f"gpt3:layers={layers},hidden={hidden},heads={heads},{old},batch={batch}"
        dp = count // tp // pp
        flops = 96 * batch * layers * 2048 * hidden**2 * (1 + 2048 / 6 / hidden + 51200 / 16 / layers / hidden)
        deep = f"pp={pp}," * (pp > 1) + f"chunks={chunks}," * (chunks > 1)
        plan = f"hybrid:dp={dp},tp={tp},{deep}microbatches={batch // dp // micro},recompute=full,halves=true"
        seconds = flops / count / speed / 1e12
        yield Row("narayanan", "weak", model, plan, f"a100:{count // 8}x8", seconds, late=True, unseen=pp > 1)
    for layers, hidden, heads, seconds in _BIGSCIENCE:
        sizes = f"layers={layers},hidden={hidden},heads={heads},seq=2048,vocabulary=250880,batch=64,attention=eager"
        plan = "hybrid:tp=8,microbatches=64,recompute=full"
        yield Row("bigscience", "20b", f"gpt3:{sizes}", plan, "a100:1x8", seconds * 64 / 2048)
    for dp, tp, pp, heads, seconds in _BLOOM:
        sizes = f"layers=70,hidden=14336,heads={heads},seq=2048,vocabulary=250880,batch=2048,attention=eager"
        plan = f"hybrid:dp={dp},tp={tp},pp={pp},microbatches={1024 // dp},recompute=full,zero=1"
        links = "links: {network: {bandwidth: 12e9}, nics: 4}"
        cluster = f"{{name: jean-zay, preset: a100, servers: 48, devices_per_server: 8, {links}}}"
        yield Row("bloom", "bloom", f"gpt3:{sizes}", plan, cluster, seconds, unseen=True)
    for count, speed in _TITAN:
        model = f"llama:size=8b,seq=8192,batch={2 * count}"
        slow = "device: {memory: 96e9, speeds: {memory: [2100e9, 2250e9]}}"
        cluster = f"{{name: titan, preset: h100, servers: {count // 8}, devices_per_server: 8, {slow}}}"
        for plan in ("fsdp", "fsdp:recompute=true"):
            yield Row("titan", f"8b {plan}", model, plan, cluster, 2 * 8192 / speed)
    for layers, hidden, heads, kv, mlp, hybrid, each, speed in _IBM:
        sizes = f"layers={layers},hidden={hidden},heads={heads},kv_heads={kv},mlp={mlp},tied=false"
        model = f"llama:{sizes},seq=4096,vocabulary=32000,batch={128 * each}"
        plan = "fsdp:shard=8,halves=true" if hybrid else "fsdp:recompute=true"
        cluster = "{name: ibm, preset: a100, servers: 16, devices_per_server: 8, links: {nics: 2}}"
        yield Row("ibm", f"llama {plan}", model, plan, cluster, each * 4096 / speed, unseen=not hybrid)
    for dp, tp, pp, micro, batch, layers, hidden, heads, milliseconds in _DLPERF:
        model = f"gpt3:layers={layers},hidden={hidden},heads={heads},{old},batch={batch}"
        plan = f"hybrid:dp={dp},tp={tp},pp={pp},microbatches={batch // dp // micro},recompute=full,halves=true"
        count = dp * tp * pp
        shape = f"servers: {max(1, count // 8)}, devices_per_server: {min(count, 8)}"
        cluster = f"{{name: dlperf, preset: v100, {shape}, device: {{memory: 16e9}}}}"
        yield Row("dlperf", f"{layers}x{hidden} v100", model, plan, cluster, milliseconds / 1e3, "fp16", late=True)
    # The model of products was changed after those of nanotron-1b, and `no_prefetch` made after the others.
    seen = ("nanotron-1b", "internevo", "paddle")
    yield from (replace(row, unseen=row.source not in seen) for row in unseen_rows())


def _even(layers: int, stages: int, less: int = 0) -> str:
    """Return `blocks` of stages with equally many layers, of which the first and the last one have `less` fewer."""
    each = (layers + 2 * less) // stages
    return "+".join(str(each - less * (k in (0, stages - 1))) for k in range(stages))


def unseen_rows() -> Iterator[Row]:
    """Yield rows of sources that were read after the last change of the simulator."""
    halves = {"sum_halves": True, "no_prefetch": True, "broadcast": True}
    nics, size = "links: {network: {bandwidth: 12e9}, nics: 4}", "seq=2048,vocabulary=103168"
    for (tp, shard), speeds in _INTERNEVO.items():
        for count, speed in ((8 << k, speed) for k, speed in enumerate(speeds)):
            plan = f"zero:{count // tp},stage=1,shard={shard},microbatches=4,halves=true"
            cluster = f"{{name: internevo, preset: a100, servers: {count // 8}, devices_per_server: 8, {nics}}}"
            plan += f" x tensor_parallel:{tp}" * (tp > 1)
            model = f"llama:size=7b,{size},batch={8 * count}"
            yield Row("internevo", "7b", model, plan, cluster, 16384 / speed, **halves)
    for count, micro, number, again, speed in _INTERNEVO_FULL:
        plan = f"zero:{count},stage=1,shard=8,microbatches={number},halves=true" + " x recompute:what=block" * again
        model = f"llama:size=7b,{size},batch={count * micro * number}"
        cluster = f"{{name: internevo, preset: a100, servers: {count // 8}, devices_per_server: 8, {nics}}}"
        seconds = micro * number * 2048 / speed
        yield Row("internevo", f"7b {micro} x {number}", model, plan, cluster, seconds, **halves)
    for layers, hidden, heads, pp, chunks, micro, found in _ZERO_BUBBLE:
        for number, rate in found.items():
            sizes = f"layers={layers},hidden={hidden},heads={heads},seq=1024,attention=eager,batch={micro * number}"
            order = f"interleaved:{pp},chunks={chunks}" if chunks > 1 else f"pipeline_1f1b:{pp}"
            blocks = f",blocks={_even(layers, pp, 1)}" * (chunks == 1)  # Each layer is a chunk, as are both ends.
            plan = f"{order},microbatches={number}{blocks}"
            seconds = micro * number / pp / rate
            yield Row("zerobubble", f"{layers} layers {number}", f"gpt3:{sizes}", plan, f"a100:{pp // 8}x8", seconds)
    for precision, table in _PREQUEL.items():
        for layers, hidden, heads, dp, tp, pp, micro, number, seconds in table:
            sizes = f"layers={layers},hidden={hidden},heads={heads},seq=2048,vocabulary=250880,attention=eager"
            blocks, halves = _even(layers, pp, precision == "bf16"), ",halves=true" * (precision == "fp16")
            plan = f"pipeline_1f1b:{pp},microbatches={number},blocks={blocks} x zero:{dp},stage=1{halves}"
            plan += f" x tensor_parallel:{tp} x recompute:what=block"
            cluster = f"{{name: jean-zay, preset: a100, servers: 48, devices_per_server: 8, {nics}}}"
            model = f"gpt3:{sizes},batch={dp * micro * number}"
            way = {"late": True, "sum_halves": precision == "fp16"}
            yield Row("prequel", f"{layers}x{hidden}", model, plan, cluster, seconds, precision, **way)
    for model, plan, devices, batch, times in _DGXC:
        for dp, seconds in times.items():
            cluster = f"h100:{dp * devices // 8}x8"
            yield Row("dgxc", model[:30], f"{model},batch={dp * batch}", plan.format(dp), cluster, seconds)
    for name, plan, count, seconds in _MAXTEXT:
        model = f"llama:size={name},seq=4096,vocabulary=32000,batch={2 * count}"
        yield Row("maxtext", f"llama {name}", model, plan, f"h100:{count // 8}x8", seconds)
    for plan, memory, rate in _PADDLE:
        model = "llama:size=7b,seq=2048,batch=2048"
        slow = "device: {memory: 40e9, speeds: {memory: [1320e9, 1405e9]}}"
        cluster = f"{{preset: a100, servers: 1, devices_per_server: 8, {slow}}}" if memory == 40 else "a100:1x8"
        way = {"no_prefetch": True, "norms": memory == 80}
        yield Row("paddle", f"7b {memory} GB", model, plan, cluster, 2048 / rate, "fp16", **way)
    for name, count, plan, speed in _FLAGPERF:
        model = f"llama:size={name},seq=8192,batch=512"
        yield Row("flagperf", name, model, plan, f"h100:{count // 8}x8", 512 * 8192 / speed / count, late=True)
    for name, vocabulary, seq, each, plan, speed in _TITAN_A100:
        model = f"llama:size={name},seq={seq},vocabulary={vocabulary},batch={64 * each}"
        yield Row("titan-a100", name, model, plan, "a100:8x8", each * seq / speed)
    for dp, tp, pp, number, speed in _NANOTRON:
        plan = f"hybrid:dp={dp},tp={tp},pp={pp},microbatches={number},sequence=true"
        model, batch = "llama:size=8b,seq=4096", dp * number * 4
        yield Row("nanotron", "8b", f"{model},batch={batch}", plan, f"h100:{dp * tp * pp // 4}x4", batch * 4096 / speed)
    for dp, tp, pp, micro, seconds in _NANOTRON_1B:
        number, words = 1024 // dp // micro, -(-50257 // tp) * tp
        first = f"pipeline_1f1b:{pp},microbatches={number}{_NANOTRON_STAGES[pp]} x " if pp > 1 else ""
        plan = (
            f"{first}zero:{dp},stage=1"
            + f",microbatches={number}" * (pp == 1)
            + f" x sequence_parallel:{tp}" * (tp > 1)
        )
        plan = (
            plan.replace("zero:1,stage=1 x ", "")
            if dp * pp > 1
            else f"hybrid:tp={tp},microbatches={number},sequence=true"
        )
        model = f"llama:layers=24,hidden=2048,heads=32,kv_heads=32,mlp=4096,tied=true,seq=4096,vocabulary={words}"
        yield Row("nanotron-1b", "1b", f"{model},batch=1024", plan, "h100:1x8", seconds, table="nanotron-1b, 8 H100")
    for dp, seconds in _NEMOTRON.items():
        plan = f"zero:{dp},stage=1 x sequence_parallel:8,regather=true"
        yield Row("nemotron", "15b", f"{_15B},batch={4 * dp}", plan, f"h100:{dp}x8", seconds)
    layer = 4096**2 * (1 + 8 / 32 + 1 + 2 * 1.5 * 14336 / 4096)
    flops = 12 * 256 * 4096 * (32 * layer + 32000 * 4096 / 2)
    plan = "interleaved:4,chunks=8,microbatches=16 x data_parallel:2 x expert_parallel:8,capacity=1.0"
    model, seconds = "mixtral:seq=4096,batch=256,balance=0", flops / 64 / _MEGATRON_MIXTRAL
    yield Row("mixtral", "8x7b", model, plan, "h100:8x8", seconds, fused=True)
    for alpha, bandwidth, seconds in _SHAPED:
        links = f"links: {{network: {{alpha: {alpha}, bandwidth: {bandwidth}}}}}"
        cluster = f"{{name: shaped, preset: v100, servers: 8, devices_per_server: 1, {links}}}"
        model = "gpt3:layers=24,hidden=2048,heads=16,seq=2048,vocabulary=1024,attention=eager,batch=96"
        plan = f"gpipe:8,microbatches=96,blocks={_even(24, 8)},recompute=late"
        yield Row("shaped", "gpt3-xl", model, plan, cluster, seconds, "fp16")


def simulated(
    row: Row, shards: bool = False, torch_compile: bool = False, fused: bool = False, overlap: str = ""
) -> Prediction:
    """Return the prediction for a row; with `shards` of weights that rest in float32 and are gathered in bf16."""
    import torch

    import superscaler as ss
    from superscaler.models import build

    model = build(f"{row.model},device=meta")
    if row.norms:
        fuse_norms(model.module)
    optimizer = torch.optim.AdamW(model.module.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu") if row.precision == "fp16" else None
    way: dict[str, Any] = {"autocast" if shards else "precision": row.precision}
    graph = ss.capture(model.module, model.args, model.kwargs, optimizer, scaler=scaler, check=False, **way)
    if row.late:
        graph.send_gradients_last()
    more = f"{',' if ':' in row.plan else ':'}gather_halves=true" * shards
    plan = ss.compile(graph, row.plan + more, row.cluster)
    is_fused = fused or row.fused
    system = ss.System(
        torch_compile=torch_compile,
        attention=row.attention,
        fused=is_fused,
        overlap=overlap,
        sum_halves=row.sum_halves,
        no_prefetch=row.no_prefetch,
        broadcast=row.broadcast,
    )
    return plan.simulate(system=system)


def fuse_norms(module: Module) -> None:
    """Replace the norms of a llama, which run operator by operator, by those of torch, which GPUs run in one kernel."""
    from torch import nn

    for name, norm in [pair for pair in module.named_modules() if type(pair[1]).__name__ == "LlamaRMSNorm"]:
        fused = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, device="meta")
        fused.weight = norm.weight
        module.set_submodule(name, fused)


class Found(NamedTuple):
    """What is predicted for a row: seconds of a step, bytes of the fullest device, and whether they fit."""

    row: Row
    seconds: float
    peak: float
    fits: bool


def key_of(row: Row) -> str:
    """Return the text that ends the line of a row."""
    return f"{row.plan} {row.model} {row.cluster.partition('device:')[0]}".strip()


def recorded(file: Path, wanted: list[Row]) -> Iterator[Found]:
    """Yield what the last line of a file says of each of these rows, without those of which it has none."""
    lines = re.findall(r"^\S+ +[\d.]+ +([\d.]+) +\S+% +([\d.]+) +\d+  (.*?) *$", file.read_text(), re.MULTILINE)
    known = {key: (float(seconds), float(peak) * 1e9) for seconds, peak, key in lines}
    for row in wanted:
        if key_of(row) in known:
            seconds, peak = known[key_of(row)]
            kind = Cluster.parse(row.cluster).device_kind
            yield Found(row, seconds, peak, kind is None or peak <= kind.memory)


def run(wanted: list[Row], given: argparse.Namespace) -> Iterator[Found]:
    """Simulate these rows, and print a line for each."""
    print(f"{'source':11} {'published s':>11} {'predicted':>9} {'error':>6} {'peak GB':>7} {'CPU s':>5}  plan, model")
    for row in wanted:
        start = time.process_time()
        is_sharded = given.shards and row.plan.startswith("fsdp")
        p = simulated(row, is_sharded, given.torch_compile, given.fused, given.overlap)
        took, peak = time.process_time() - start, p.fullest.peak_bytes
        times = f"{row.seconds:11.3f} {p.step_seconds:9.3f} {p.step_seconds / row.seconds - 1:+6.1%}"
        print(f"{row.source:11} {times} {peak / 1e9:7.1f} {took:5.0f}  {key_of(row)}", flush=True)
        yield Found(row, p.step_seconds, peak, p.fits)


def measured(found: Found) -> Measured:
    """Return a row with its seconds of a sample."""
    row, samples = found.row, int(re.findall(r"\bbatch=(\d+)", found.row.model)[0])
    return Measured(row.plan, found.seconds / samples, row.seconds / samples, found.fits)


def table_of(row: Row) -> str:
    """Return the source, the model without its batch, and the cluster: rows that share them are a table."""
    return row.table or f"{row.source} {re.sub(r',?batch=[0-9]+', '', row.model)} {row.precision} {row.cluster}"


def show(found: list[Found]) -> None:
    """Print the errors of all rows, tau of sweeps, and the regret of tables with three plans or more."""
    sweeps, tables = defaultdict[str, list[Measured]](list), defaultdict[str, list[Measured]](list)
    for each in found:
        sweeps[each.row.sweep].append(Measured(each.row.plan, each.seconds, each.row.seconds))
        tables[table_of(each.row)].append(measured(each))
    ran = [each for each in found if each.row.seconds < inf]
    errors = [(abs(each.seconds / each.row.seconds - 1), each.row.unseen) for each in ran]
    near = sum(error <= 0.2 for error, _ in errors)
    print(f"mean error {sum(e for e, _ in errors) / max(len(errors), 1):.1%}; {near} of {len(errors)} within 20 %")
    if unseen := [error for error, is_unseen in errors if is_unseen]:
        print(f"unseen: mean error {sum(unseen) / len(unseen):.1%} of {len(unseen)}")
    for sweep, plans in sweeps.items():
        if len(plans) > 2:
            print(f"tau {tau(plans):+.2f}  {sweep}")
    for table, plans in tables.items():
        if len(plans) > 2:
            print(summary(table, plans))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", default="")
    parser.add_argument("--shards", action="store_true")
    parser.add_argument("--torch-compile", action="store_true")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--overlap", default="")
    parser.add_argument("--recorded", type=Path)
    given = parser.parse_args()
    only = given.only.split(",")
    wanted = [row for row in rows() if not given.only or row.source in only]
    wanted = [row for row in wanted if given.rows in f"{row.sweep} {row.model} {row.plan}"]
    show(list(recorded(given.recorded, wanted) if given.recorded else run(wanted, given)))


if __name__ == "__main__":
    main()
