"""Published seconds of training steps beside those that `superscaler simulate` gives. Nothing is fitted to them.

    python benchmarks/simulate_published.py [--only mosaic,korthikanti] [--rows "hidden=2048"] [--shards]

`tau`: Kendall's, of the rows of one model on one kind of GPU. A step that was published as tokens, or operations, per
second is computed from these. A row takes 10 to 80 CPU seconds, those with pipelines minutes. `unseen`: rows that no
choice in the simulator was made after. `--shards`: rows with FSDP keep float32 shards alone, and gather bf16.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from superscaler.simulate.prediction import Prediction

# MosaicML, llm-foundry, scripts/train/benchmarking/README.md (commit 061f2c7): MPT models, 8 GPUs a server, FSDP with
# FULL_SHARD, AMP in bfloat16, vocabulary 50,368, biases, learned positions, fused cross entropy. Attention is
# FlashAttention 1 in Triton with ALiBi: on A100 30 to 50 % of the peak, backward 25 to 35 % (Dao 2023, from 512 keys to
# 16,384: so the ramps). A size: layers, hidden, heads. A row: size, GPU, GPUs, sequence, microbatch, number of these,
# recomputation, tokens per second in all.
_FLASH = "rates: {%d: [%g, %g]}, ramp: %d, causal: 0.9, tile: 128"
_FIRST = {"forward": (128, 156e12, 156e12, 341), "backward": (128, 109e12, 109e12, 205)}
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
# recomputation, with gradients in bfloat16 (ours: float32). A row: layers, hidden, heads, heads of keys, feed-forward,
# hybrid, sequences a GPU, tokens per second of a GPU.
_IBM = (
    (32, 4096, 32, 32, 11008, True, 2, 3760), (40, 5120, 40, 40, 13824, True, 1, 1700),
    (48, 8192, 64, 8, 22016, False, 8, 772), (80, 8192, 64, 8, 28672, False, 6, 380),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published step. `late`: gradients are sent after the backward. `unseen`: nothing was changed after the row was
    predicted."""

    source: str
    sweep: str
    model: str
    plan: str
    cluster: str
    seconds: float
    precision: str = "bf16"
    late: bool = False
    unseen: bool = False


def rows() -> Iterator[Row]:
    """Yield all rows."""
    mosaic = [(row, False) for row in _MOSAIC] + [(row, True) for row in _MOSAIC_UNSEEN]
    for (name, gpu, count, seq, micro, number, again, speed), unseen in mosaic:
        layers, hidden, heads = _MPT[name]
        batch = micro * number * count
        model = f"gpt3:layers={layers},hidden={hidden},heads={heads},seq={seq},vocabulary=50368,batch={batch}"
        plan = f"fsdp:microbatches={number}" + ",recompute=true" * again
        cluster = f"{gpu}:{count // 8}x8"
        if gpu == "a100":
            old = ", ".join(f"{way}: {{{_FLASH % rates}}}" for way, rates in _FIRST.items())
            device = f"device: {{speeds: {{attention: {{{old}}}}}}}"
            cluster = f"{{name: mosaic, preset: a100, servers: {count // 8}, devices_per_server: 8, {device}}}"
        yield Row("mosaic", f"{name} {gpu}", model, plan, cluster, batch * seq / speed, unseen=unseen)
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
        plan = "fsdp:shard=8" if hybrid else "fsdp:recompute=true"
        cluster = "{name: ibm, preset: a100, servers: 16, devices_per_server: 8, links: {nics: 2}}"
        yield Row("ibm", f"llama {plan}", model, plan, cluster, each * 4096 / speed, unseen=not hybrid)
    for dp, tp, pp, micro, batch, layers, hidden, heads, milliseconds in _DLPERF:
        model = f"gpt3:layers={layers},hidden={hidden},heads={heads},{old},batch={batch}"
        plan = f"hybrid:dp={dp},tp={tp},pp={pp},microbatches={batch // dp // micro},recompute=full,halves=true"
        count = dp * tp * pp
        shape = f"servers: {max(1, count // 8)}, devices_per_server: {min(count, 8)}"
        cluster = f"{{name: dlperf, preset: v100, {shape}, device: {{memory: 16e9}}}}"
        yield Row("dlperf", f"{layers}x{hidden} v100", model, plan, cluster, milliseconds / 1e3, "fp16", late=True)


def simulated(row: Row, shards: bool = False) -> Prediction:
    """Return the prediction for a row; with `shards` of weights that rest in float32 and are gathered in bf16."""
    import torch

    import superscaler as ss
    from superscaler.models import build

    model = build(f"{row.model},device=meta")
    optimizer = torch.optim.AdamW(model.module.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu") if row.precision == "fp16" else None
    way: dict[str, Any] = {"autocast" if shards else "precision": row.precision}
    graph = ss.capture(model.module, model.args, model.kwargs, optimizer, scaler=scaler, check=False, **way)
    if row.late:
        graph.send_gradients_last()
    more = f"{',' if ':' in row.plan else ':'}gather_halves=true" * shards
    return ss.compile(graph, row.plan + more, row.cluster).simulate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", default="")
    parser.add_argument("--shards", action="store_true")
    given = parser.parse_args()
    only, found, unseen = given.only.split(","), defaultdict(list), list[float]()
    print(f"{'source':11} {'published s':>11} {'predicted':>9} {'error':>6} {'peak GB':>7} {'CPU s':>5}  plan, model")
    for row in rows():
        if (given.only and row.source not in only) or given.rows not in f"{row.sweep} {row.model} {row.plan}":
            continue
        start = time.process_time()
        p = simulated(row, given.shards and row.plan.startswith("fsdp"))
        found[row.sweep].append((p.step_seconds, row.seconds))
        unseen += [abs(p.step_seconds / row.seconds - 1)] * row.unseen
        took, peak = time.process_time() - start, p.fullest.peak_bytes / 1e9
        times = f"{row.seconds:11.3f} {p.step_seconds:9.3f} {p.step_seconds / row.seconds - 1:+6.1%}"
        name = row.cluster.partition("device:")[0]
        print(f"{row.source:11} {times} {peak:7.1f} {took:5.0f}  {row.plan} {row.model} {name}", flush=True)
    errors = [abs(ours / real - 1) for pairs in found.values() for ours, real in pairs]
    near = sum(error <= 0.2 for error in errors)
    print(f"mean error {sum(errors) / max(len(errors), 1):.1%}; {near} of {len(errors)} within 20 %")
    if unseen:
        print(f"unseen: mean error {sum(unseen) / len(unseen):.1%} of {len(unseen)}")
    for sweep, pairs in found.items():
        signs = [(a - c) * (b - d) for (a, b), (c, d) in combinations(pairs, 2)]
        if len(signs) > 2:
            print(f"tau {sum((s > 0) - (s < 0) for s in signs) / len(signs):+.2f}  {sweep}")


if __name__ == "__main__":
    main()
