"""The systems that are compared, as plans, and the space that each is tuned over, as data.

A system has its published plans and no other. A space is a list of ladders: plans that differ in how far they cut
tensors, the one that sends least first. The first of a ladder that fits stands for it, and the fastest of all ladders
for its system. Not compiled are plans whose states (18 bytes a parameter) and scores of attention in one layer (three
tensors) do not fit, see `check_bound` in points.py; the page says which.

Alpa's stages may have settings of their own; GPT-3's are equal, so that its space there is Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from models import MODELS
from points import Point

Ladder = list[Point]
# Makes the point of a plan of a family on so many GPUs: the model, the cluster and the batch.
Place = Callable[..., Point]

CLUSTERS: Mapping[int, str] = {1: "v100:1x1", 4: "v100:1x4", 8: "v100:1x8", 16: "v100:2x8", 32: "v100:4x8"}

# One GPU, E6 and E7: each layer is recomputed.
SINGLE: Mapping[str, str] = {
    "recompute": "recompute:microbatches={m}",
    "ZeRO-3 offload": "recompute:1,microbatches={m} x swap:1,what=optimizer",
    "co-shard": "co_shard:parts=PARTS,microbatches={m}",
}

# The factors of a product are written from the outer to the inner: stages between servers, tensors cut inside of them.
# One string a ladder, its steps separated by |. Megatron: stages x tensor parallel x data parallel, + where layers are
# computed again. DeepSpeed: ZeRO-3 data parallel x tensor parallel; `offload` where it is the last resort. co-shard:
# as Megatron, / parts, + where all other layers are computed again. interlaced: stages x tensor parallel. DAP: axial x
# data parallel; 3F1B: stages x data parallel, x axial where that does not fit.
SPACES: Mapping[tuple[str, int], Mapping[str, Sequence[str]]] = {
    ("gpt3", 4): {
        "Megatron-LM, Alpa": ["1x2x2+|1x4x1+", "1x4x1", "2x2x1+"],
        "DeepSpeed": ["4x1|2x2|1x4"],
        "co-shard": ["4x1x1/8", "2x1x2/8", "2x2x1/4"],
    },
    ("gpt3", 8): {
        "Megatron-LM, Alpa": ["2x4x1+", "1x4x2+|1x8x1+", "1x8x1"],
        "DeepSpeed": ["4x2|2x4|1x8"],
        "co-shard": ["8x1x1/8", "4x1x2/8", "4x2x1/4"],
    },
    ("gpt3", 16): {
        "Megatron-LM, Alpa": ["4x4x1+|2x8x1+", "1x16x1+"],
        "DeepSpeed": ["4x4|2x8"],
        "co-shard": ["8x2x1/8", "4x4x1/4"],
    },
    ("gpt3", 32): {
        "Megatron-LM, Alpa": ["8x4x1+|4x8x1+|2x16x1+"],
        "DeepSpeed": ["8x4|4x8|2x16"],
        "co-shard": ["8x4x1/4", "4x8x1/2"],
    },
    ("mbart", 4): {
        "Megatron-LM": ["1x4x1|1x4x1+", "2x2x1+"],
        "DeepSpeed": ["4x1|4x1 offload|1x4 offload"],
        "interlaced, recompute late": ["4x1", "2x2"],
        "interlaced": ["4x1", "2x2"],
    },
    ("mbart", 8): {
        "Megatron-LM": ["1x8x1|1x8x1+", "2x4x1+"],
        "DeepSpeed": ["8x1|8x1 offload|1x8 offload"],
        "interlaced, recompute late": ["8x1", "4x2"],
        "interlaced": ["8x1", "4x2"],
    },
    ("mbart", 16): {
        "Megatron-LM": ["2x8x1|2x8x1+|1x16x1|1x16x1+"],
        "DeepSpeed": ["4x4|4x4 offload|2x8 offload"],
        "interlaced, recompute late": ["4x4|2x8"],
        "interlaced": ["4x4|2x8"],
    },
    ("mbart", 32): {
        "Megatron-LM": ["4x8x1+|2x16x1+|1x32x1+"],
        "DeepSpeed": ["4x8|4x8 offload"],
        "interlaced, recompute late": ["4x8"],
        "interlaced": ["4x8"],
    },
    ("swin", 4): {
        "Megatron-LM": ["1x2x2+|1x4x1+", "2x2x1+"],
        "DeepSpeed": ["4x1|2x2|1x4"],
        "co-shard, first 4": ["4x1x1/4|4x1x1/4+", "2x2x1/4|2x2x1/4+"],
    },
    ("swin", 8): {
        "Megatron-LM": ["1x4x2+|1x8x1+", "2x4x1+"],
        "DeepSpeed": ["8x1|4x2|2x4|1x8"],
        "co-shard, first 4": ["4x2x1/4|4x2x1/4+"],
    },
    ("swin", 16): {
        "Megatron-LM": ["4x4x1+|2x8x1+|1x16x1+"],
        "DeepSpeed": ["16x1|8x2|4x4|2x8|1x16"],
        "co-shard, first 4": ["4x4x1/4+"],
    },
    ("swin", 32): {
        "Megatron-LM": ["4x8x1+|2x16x1+|1x32x1+"],
        "DeepSpeed": ["32x1|16x2|8x4|4x8|2x16|1x32"],
        "co-shard, first 4": ["4x8x1/2+|4x8x1/4+"],
    },
    ("alphafold2", 4): {
        "DAP + DP": ["1x4|1x4+|2x2+|4x1+"],
        "DeepSpeed": ["4x1"],
        "3F1B": ["1x4|1x4+|2x2+|4x1+"],
    },
    ("alphafold2", 8): {
        "DAP + DP": ["1x8+|2x4+|4x2+"],
        "DeepSpeed": ["8x1"],
        "3F1B": ["2x4+|4x2+"],
    },
    ("alphafold2", 16): {
        "DAP + DP": ["4x4+|8x2+"],
        "DeepSpeed": ["16x1"],
        "3F1B": ["4x4+|4x2x2+"],
    },
    ("alphafold2", 32): {
        "DAP + DP": ["8x4+|16x2+|32x1+"],
        "DeepSpeed": ["32x1"],
        "3F1B": ["4x8+|4x4x2+|4x2x4+"],
    },
}


# What came after the paper, on 32 GPUs: family, the plan in words, the plan. `no scores`: attention in one kernel.
BEYOND: Sequence[tuple[str, str, str]] = (
    ("gpt3", "sequence parallel, attention again (2022)",
     "hybrid:tp=8,pp=4,microbatches={m},sequence=true,recompute=selective"),
    ("gpt3", "sequence parallel, all again", "hybrid:tp=8,pp=4,microbatches={m},sequence=true,recompute=full"),
    ("gpt3, no scores", "1F1B, all again", "hybrid:tp=8,pp=4,microbatches={m},recompute=full"),
    ("gpt3, no scores", "co-shard", "pipeline_1f1b:4,microbatches={m} x co_shard:1,parts=2 x tensor_parallel:8"),
    ("gpt3, no scores", "sequence parallel", "hybrid:tp=8,pp=4,microbatches={m},sequence=true"),
    ("gpt3, no scores", "sequence parallel, ZB-H1", "zb_h1:4,microbatches={m} x sequence_parallel:8"),
    ("gpt3, no scores", "sequence parallel, ZBV", "zbv:4,microbatches={m} x sequence_parallel:8"),
    ("gpt3, no scores", "sequence parallel, DualPipe", "dualpipe:4,microbatches={m} x sequence_parallel:8"),
    ("gpt3, no scores", "Seq1F1B", "seq1f1b:4,slices=4,microbatches={m} x tensor_parallel:8"),
    ("gpt3, no scores", "vocabulary-parallel", "interlaced:4,microbatches={m} x sequence_parallel:8"),
    ("gpt3, no scores", "ring attention",
     "pipeline_1f1b:4,microbatches={m} x ring_attention:2,zigzag=true x tensor_parallel:4"),
    ("mbart", "vocabulary-parallel, sequence parallel", "interlaced:4,microbatches={m} x sequence_parallel:8"),
    ("mbart", "sequence parallel", "hybrid:tp=8,pp=4,microbatches={m},sequence=true,recompute=full"),
    ("mbart", "sequence parallel, ZB-H1", "zb_h1:4,microbatches={m} x sequence_parallel:8"),
)  # fmt: skip


def beyond(family: str, plan: str, cluster: str = CLUSTERS[32]) -> Point:
    return Point(MODELS[family][32], plan, cluster, 512, stages=4)


def single(model: str, system: str, parts: int) -> Point:
    """Return the point of a system on one GPU, with microbatches of one sample."""
    return Point(model, SINGLE[system].replace("PARTS", str(parts)), CLUSTERS[1], 512)


def megatron(place: Place, config: str) -> Point:
    pp, tp, dp = _numbers(config.rstrip("+"))
    again = "full" if config.endswith("+") else "none"
    plan = f"hybrid:dp={dp},tp={tp},pp={pp},microbatches={{m}},recompute={again}"
    return place(plan, stages=pp, dp=dp, spread=pp * tp, cut=tp)


def deepspeed(place: Place, config: str) -> Point:
    sizes, _, offload = config.partition(" ")
    dp, tp = _numbers(sizes)
    if dp == 1 and not offload:
        # On one device there is nothing to cut: what is left of ZeRO-3 is that each layer is computed again.
        return megatron(place, f"1x{tp}x1+")
    plans = [f"zero:{dp},stage=3,microbatches={{m}}"]
    plans += [f"tensor_parallel:{tp}"] if tp > 1 else []
    plans += ["swap:1,what=optimizer"] if offload else []
    # With offload, the states are on the host.
    point = place(" x ".join(plans), dp=dp, spread=0 if offload else dp * tp, cut=tp)
    # It pads what its devices do not divide: here the classes of Swin.
    return replace(point, model=f"{point.model},classes=1024") if point.model.startswith("swin:size=") else point


def co_shard(place: Place, config: str, blocks: str = "all") -> Point:
    """Return the point of co-sharded blocks in a pipeline; with + all others are computed again, too."""
    sizes, _, parts = config.rstrip("+").partition("/")
    pp, tp, dp = _numbers(sizes)
    again = ",recompute=late" if config.endswith("+") else ""
    plans = [f"pipeline_1f1b:{pp},microbatches={{m}}{again}", f"co_shard:{dp},parts={parts},blocks={blocks}"]
    plans += [f"tensor_parallel:{tp}"] if tp > 1 else []
    return place(" x ".join(plans), stages=pp, dp=dp, spread=pp * tp, cut=tp * int(parts))


def interlaced(place: Place, config: str, recompute: str = "early") -> Point:
    pp, tp = _numbers(config)
    plan = f"interlaced:{pp},microbatches={{m}},recompute={recompute}"
    return place(f"{plan} x tensor_parallel:{tp}" if tp > 1 else plan, stages=pp, spread=pp * tp, cut=tp)


def axial(place: Place, config: str) -> Point:
    dap, dp = _numbers(config.rstrip("+"))
    plan = _accumulated(dp, config)
    return place(f"{plan} x dap:{dap}" if dap > 1 else plan, dp=dp)


def three_f_one_b(place: Place, config: str) -> Point:
    pp, dp, *more = _numbers(config.rstrip("+"))
    if pp == 1:
        return place(_accumulated(dp, config), dp=dp)
    plans = [f"three_f_one_b:{pp},microbatches={{m}}", f"data_parallel:{dp}", *(f"dap:{n}" for n in more)]
    return place(" x ".join([*plans, *(["recompute:1"] if config.endswith("+") else [])]), stages=pp, dp=dp)


def _accumulated(dp: int, config: str) -> str:
    """Return data parallelism with microbatches, whose layers are computed again where the configuration says so."""
    return f"{'recompute' if config.endswith('+') else 'gradient_accumulation'}:{dp},microbatches={{m}}"


MAKERS: Mapping[str, Callable[[Place, str], Point]] = {
    "Megatron-LM": megatron,
    "Megatron-LM, Alpa": megatron,
    "DeepSpeed": deepspeed,
    "co-shard": co_shard,
    "co-shard, first 4": lambda place, config: co_shard(place, config, "first:4"),
    "DAP + DP": axial,
    "3F1B": three_f_one_b,
    "interlaced": interlaced,
    "interlaced, recompute late": lambda place, config: interlaced(place, config, "late"),
}


def spaces(family: str, gpus: int, cluster: str = "") -> dict[str, list[Ladder]]:
    """Return the ladders of each system for a family on so many GPUs, V100s where no cluster is given."""

    def place(plan: str, **sizes: int) -> Point:
        batch = 128 if family == "alphafold2" else 512
        return Point(MODELS[family][gpus], plan, cluster or CLUSTERS[gpus], batch, **sizes)

    return {
        system: [[MAKERS[system](place, config) for config in ladder.split("|")] for ladder in ladders]
        for system, ladders in SPACES.get((family.partition(",")[0], gpus), {}).items()
    }


def _numbers(sizes: str) -> list[int]:
    return [int(size) for size in sizes.split("x")]
