"""Plans of the library on its models are equal to the model.

A few pairs always run, each the only one that reaches some mechanism; all plans on all models run with `-m slow`, in
float64 and in the trained dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

import superscaler as ss
from superscaler.plans.lib import schedules
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal
from tests.helpers.sweeps import few, slow

Row = tuple[str, str, int]
GPT, LLAMA, MBART, DEEP = "gpt2:size=tiny", "llama:size=tiny", "mbart:size=tiny", "gpt2:size=tiny,layers=4,batch=16"
ALPHAFOLD = "alphafold2:size=tiny,layers=1,passes=2"
# Microbatches of 2 rows and of 1.
UNEVEN = "gpt2:size=tiny,batch=6"
# Its meshes do not depend on the number of its passes.
MESHED = f"{ALPHAFOLD.replace('passes=2', 'passes=1')},sequences=8,residues=8,hidden=32,heads=8,pair_heads=8"

# In float64 and in the trained dtype, but for what tests/integration/test_equality.py trains for twenty steps.
TRAINED: list[Row] = [
    ("mlp", "data_parallel", 4),
    ("mlp", "pipeline_1f1b:stages=4,microbatches=8", 4),
    (GPT, "tensor_parallel", 4),
    (GPT, "hybrid:dp=2,tp=2,pp=2,microbatches=2", 8),
    (GPT, "zero:2,stage=3 x tensor_parallel:2 x recompute", 4),
    (GPT, "zb_h1:2 x zero:2,stage=1", 4),
]
ALWAYS: list[Row] = [
    ("mlp", "single", 1),
    ("mlp", "tensor_parallel", 4),
    # The sequence: rings, all_to_alls; two stacks.
    (MBART, "ring_attention", 2),
    (LLAMA, "ring_attention:2 x ulysses:2", 4),
    # Microbatches of unequal sizes that are computed again.
    (UNEVEN, "hybrid:tp=2,pp=2,microbatches=4,recompute=full", 4),
    # Parts of one gradient are reduced in two groups, one after the other.
    ("mlp", "zero:2,stage=2,microbatches=2 x tensor_parallel:4", 8),
]


# What other tests reach: two axes, a ring, ZeRO with microbatches and in groups, ZeRO on a pipeline, Megatron whole.
REACHED: list[Row] = [
    (MESHED, "dap", 2),
    (GPT, "ring_attention", 4),
    (GPT, "zero:stage=2,microbatches=4", 2),
    (GPT, "fsdp:shard=2", 4),
    (GPT, "pipeline_1f1b:2,microbatches=2 x zero x tensor_parallel:2", 8),
    (LLAMA, "hybrid:dp=2,tp=2,pp=2,microbatches=2,sequence=true,recompute=full,zero=1", 8),
]

# Each step of these is a step of another row, or of a test of its rewrite.
SWEPT: list[Row] = [
    ("mlp", "hybrid:dp=2,tp=2,pp=2,microbatches=4", 8),
    (LLAMA, "ring_attention:zigzag=true", 2),
    (GPT, "sequence_parallel", 2),
    (LLAMA, "ulysses", 2),
    # Weights at rest in slices: kept, cut where 3 divides no index.
    (GPT, "zero:stage=3,keep=2,microbatches=2", 2),
    (UNEVEN, "zero:stage=3", 3),
    (LLAMA, "zero:stage=3,shard=2,microbatches=2", 4),
    (GPT, "gradient_accumulation", 2),
    (UNEVEN, "zero:1,stage=2,microbatches=4 x tensor_parallel:2", 2),
    ("gpt2:size=tiny,dropout=0.1", "recompute:what=full,microbatches=2", 2),
    (LLAMA, "recompute:2,what=attention x tensor_parallel:2", 4),
    (MBART, "co_shard:parts=2,factors=heads+mlp x tensor_parallel:2", 2),
    (LLAMA, "pipeline_1f1b:2,microbatches=4 x recompute", 2),
    (MBART, "interlaced:2,microbatches=2,recompute=early", 2),
    (DEEP, "hybrid:tp=2,pp=2,microbatches=4,chunks=2,sequence=true,recompute=selective", 4),
]

CAUSAL = ["gpt2:size=tiny,heads=8", "gpt3:size=tiny,seq=16,heads=8", "llama:size=tiny,heads=8,kv_heads=8",
          "mixtral:size=tiny,seq=16"]  # fmt: skip
# Attention without a learned bias.
PLAIN = [*CAUSAL, "bert:size=tiny,seq=16,heads=8", "mbart:size=tiny,seq=16,target=16,heads=8", "vit:size=tiny"]
T5, SWIN = "t5:size=tiny,seq=16,target=16,heads=8", "swin:size=tiny"
MESHES = {
    "ring_attention": PLAIN,
    "ring_attention:zigzag=true": CAUSAL,
    "data_parallel:2 x ring_attention": PLAIN,
    "sequence_parallel": [*PLAIN, SWIN, T5],
    "data_parallel:2 x sequence_parallel": [*PLAIN, SWIN, T5],
    "ulysses": [*PLAIN, MESHED, T5],
    "data_parallel:2 x ulysses": [*PLAIN, T5],
    "dap": [MESHED],
    "data_parallel:2 x dap": [MESHED],
    "zero:2,stage=3 x sequence_parallel": CAUSAL,
    "zero:2,stage=3 x ulysses": CAUSAL,
    "zero:2,stage=3 x ring_attention": CAUSAL,
    "data_parallel:2 x tensor_parallel:2 x ulysses": CAUSAL,
    "data_parallel:2 x tensor_parallel:2 x ring_attention": CAUSAL,
    "zero:2,stage=3 x tensor_parallel:2 x sequence_parallel": CAUSAL,
}
FIRST = [
    ("single", 1), ("data_parallel", 2), ("data_parallel", 4), ("tensor_parallel", 2), ("tensor_parallel", 4),
    *((f"pipeline_1f1b:stages={s},microbatches={m}", s) for s in (2, 4) for m in (4, 8)),
    ("hybrid:dp=2,tp=2,pp=2,microbatches=2", 8), ("hybrid:dp=2,tp=2,pp=2,microbatches=4", 8),
]  # fmt: skip
FSDP = [("fsdp:recompute=true,microbatches=2", 2), ("fsdp:microbatches=2", 2), ("fsdp:2 x recompute", 2),
        ("fsdp:4,shard=2 x tensor_parallel:2", 8), ("pipeline_1f1b:2,microbatches=2 x fsdp:2", 4)]  # fmt: skip
MEMORY: list[Row] = [
    (SWIN, "recompute:what=block", 2),
    (MBART, "chain_recompute:limit=4.5e6", 2),
    (MBART, "swap:what=both,microbatches=2", 2),
    (LLAMA, "chain_recompute:every=sqrt,microbatches=2", 4),
    ("gpt2:size=tiny,dropout=0.1", "co_shard", 1),
    (GPT, "pipeline_1f1b:2,microbatches=2 x co_shard:2,parts=2", 4),
    (GPT, "co_shard:parts=2,factors=sequence", 1),
    (GPT, "chunked_loss:parts=4,microbatches=2", 2),
    (LLAMA, "chunked_loss:1,parts=4 x zero:2,stage=3", 2),
    (LLAMA, "chunked_loss:1,parts=4 x ulysses:2", 2),
    ("t5:size=tiny", "chunked_loss:parts=3 x recompute", 2),
    ("vit:size=tiny", "chunked_loss:parts=2", 2),
    ("bert:size=tiny", "chunked_loss:1,parts=2 x tensor_parallel:2", 2),
    ("mixtral:size=tiny", "chunked_loss:1,parts=2 x expert_parallel:2", 2),
    (LLAMA, "chunked_loss:1,parts=4 x pipeline_1f1b:2,microbatches=2", 2),
    (GPT, "chunked_loss:1,parts=2 x zb_h1:2,microbatches=2", 2),
    (GPT, "swap", 1),
    (GPT, "recompute:what=attention x zero:2,stage=3", 2),
    (GPT, "zero:2 x swap:what=both", 2),
    (LLAMA, "tensor_parallel:2 x chain_recompute:every=sqrt", 2),
    (GPT, "pipeline_1f1b:2,microbatches=2 x swap", 2),
    (GPT, "pipeline_1f1b:2,microbatches=4,recompute=early", 2),
    (MBART, "pipeline_1f1b:2,microbatches=4,recompute=early", 2),
    (GPT, "zb_h1:2,microbatches=4,recompute=late", 2),
    (LLAMA, "gradient_accumulation:microbatches=2", 4),
    (MBART, "gradient_accumulation:microbatches=8", 1),
    ("gpt2:size=tiny,batch=1", "co_shard:1,parts=2", 1),
    (SWIN, "recompute:what=attention,microbatches=2", 1),
    (MBART, "recompute:what=attention", 2),
    (ALPHAFOLD, "recompute:what=block", 2),
    (LLAMA, "co_shard:1,parts=2,blocks=first:1 x tensor_parallel:2", 2),
    (SWIN, "co_shard:parts=2", 2),
    (LLAMA, "swap:what=optimizer", 2),
    ("gpt2:size=tiny,layers=3", "zero:stage=3,keep=1", 8),
    (LLAMA, "zero:4,stage=3,secondary=2 x tensor_parallel:2", 8),
    ("mixtral:size=tiny", "zero:stage=3", 4),
    (MBART, "zero:stage=1,shard=2", 8),
    (ALPHAFOLD, "zero:stage=3", 2),
    (GPT, "zero:2,stage=3 x tensor_parallel:2", 4),
    *((model, plan, devices) for model in (GPT, LLAMA, MBART, "t5:size=tiny") for plan, devices in FSDP),
    (LLAMA, "data_parallel:2 x tensor_parallel", 8),
    (LLAMA, "hybrid:dp=2,tp=2,pp=2,microbatches=2", 8),
    ("gpt2:size=tiny,batch=6", "zero:stage=3,shard=3", 6),
    (LLAMA, "tensor_parallel:4 x zero:2,stage=2,microbatches=2", 8),
    (f"{LLAMA},layers=4", "hybrid:dp=2,tp=2,pp=2,microbatches=2,chunks=2,sequence=true,recompute=full,zero=1", 8),
]
PRODUCTS = ["interleaved:2 x zero:2,stage=1", "data_parallel:2 x chimera:2", "zb_h1:2 x tensor_parallel:2",
            "interlaced:2,microbatches=2 x tensor_parallel:2", "interlaced:2,microbatches=2 x data_parallel:2",
            "zb_h1:2 x data_parallel:2", "chimera:2 x tensor_parallel:2", "pipeline_1f1b:2 x tensor_parallel:2",
            "pipeline_1f1b:2 x data_parallel:2"]  # fmt: skip
# Each option alone, then several.
MEGATRON = ["dp=2,zero=1", "tp=2,sequence=true", "pp=2,microbatches=4,chunks=2", "recompute=full",
            "recompute=selective", "pp=2,dp=2,tp=2,microbatches=2,sequence=true",
            "pp=2,dp=2,tp=2,microbatches=4,chunks=2,sequence=true,recompute=selective,zero=1",
            "pp=2,tp=2,microbatches=4,sequence=true,recompute=selective", "pp=2,tp=2,microbatches=2,recompute=full",
            "pp=2,dp=2,microbatches=2,chunks=2,recompute=selective,zero=1",
            "dp=2,tp=2,sequence=true,recompute=full,zero=1,vocabulary=false"]  # fmt: skip
STACKED = [f"{GPT},layers=4", f"{LLAMA},layers=4", "bert:size=tiny,layers=4", f"{T5},layers=4",
           "vit:size=tiny,layers=4,image=28", MBART]  # fmt: skip
ODD = ["pipeline_1f1b:microbatches=3", "hybrid:tp=2,microbatches=4", "zero:1,stage=2,microbatches=3 x tensor_parallel",
       "pipeline_1f1b:2,microbatches=3 x recompute", "co_shard:1,parts=2,microbatches=2 x tensor_parallel"]  # fmt: skip
# Weights with momentum, too.
UNROLLED: list[Row] = [
    (GPT, "bytescheduler:piece=16000", 4),
    ("mbart:size=tiny,batch=4", "bytescheduler:piece=16000", 2),
    ("mbart:size=tiny,batch=4", "bytescheduler", 4),
    ("alphafold2:size=tiny,batch=4", "bytescheduler", 2),
    ("alphafold2:size=tiny,batch=4", "bytescheduler:piece=4000", 4),
    ("llama:size=tiny,batch=4", "bytescheduler:ahead=0,piece=16000", 4),
    ("gpt2:size=tiny,batch=4", "bytescheduler:2,piece=9000 x tensor_parallel:2", 4),
    ("gpt2:size=tiny,batch=4", "bytescheduler:2,piece=9000 x recompute:2", 4),
]


def on_meshes() -> Iterator[Row]:
    for plan, models in MESHES.items():
        for model, devices in product(models, (2, 4, 8)[plan.count(" x ") :]):
            # The tokens of the blocks of these are along factors of 2 and 3, and along one of 26.
            if not model.startswith(("swin", "vit")) or devices <= 2 * 2 ** plan.count(" x "):
                yield model, plan, devices


def in_stages() -> Iterator[Row]:
    """Yield every schedule that a model and its number of devices can have."""
    for model, name in product(("gpt2", "llama", "mbart", "alphafold2"), [*schedules.RULES, "interlaced"]):
        if name in ("terapipe", "seq1f1b") and model in ("mbart", "alphafold2"):
            # They are not causal.
            continue
        for devices, count in product((2, 4, 8), (4, 8)):
            is_wide = devices == 8 and (model not in ("gpt2", "llama") or count < 8)
            is_short = name in ("zbv", "dualpipe_v") and count < 2 * devices
            deep = "" if model == "alphafold2" else f",layers={max(8, 2 * devices)}"
            if not is_wide and not is_short:
                yield f"{model}:size=tiny,batch=16{deep}", f"{name}:microbatches={count}", devices
    for name, model in product(("pipeline_1f1b", "zb_h1", "interleaved"), ("gpt2", "llama", "mbart")):
        # Uneven stages, whose first and last share an embedding.
        tied = ",tied=true" if model == "llama" else ""
        plan = f"{name}:blocks=1+4+2+1,microbatches=4"
        yield f"{model}:size=tiny,batch=8,layers=8{tied}", plan, 2 if name == "interleaved" else 4
    for devices, plan in ((4, "dualpipe:4,microbatches=8"), (4, "dualpipe:2 x zero:2"), (4, "dualpipe:2 x ulysses:2")):
        yield "gpt2:size=tiny,layers=8,batch=16", plan, devices


def sweep() -> Iterator[Row]:
    for model, plan in product(["mlp", GPT, LLAMA, f"{GPT},layers=4", f"{LLAMA},layers=4"], FIRST):
        yield model, *plan
    yield from on_meshes()
    yield from MEMORY
    yield from in_stages()
    yield from product((DEEP, f"{LLAMA},layers=4,batch=16"), PRODUCTS, [4])
    for model, plan in product(("llama", "mbart", "bert", "vit", "swin", "alphafold2"), ODD):
        yield f"{model}:size=tiny,batch=7", plan, 2
    for model, options in product(STACKED, MEGATRON):
        yield model, f"hybrid:{options}", 2 ** sum(f"{axis}=2" in options.split(",") for axis in ("dp", "tp", "pp"))
    yield from (*ALWAYS, *REACHED, *SWEPT)


@pytest.mark.parametrize(("model", "plan", "devices"), few(TRAINED, 0))
def test_equal_as_trained(model: str, plan: str, devices: int) -> None:
    result = ss.compile(graph_of(model), plan, f"local:{devices}").verify()
    assert result["equal"], result
    assert max(result["loss_error"], result["gradient_error"], result["parameter_error"]) <= 1e-9
    assert result["bytes_moved"] == result["bytes_planned"]


@pytest.mark.parametrize(("model", "plan", "devices"), [*ALWAYS, *slow(*SWEPT)])
def test_equal(model: str, plan: str, devices: int) -> None:
    equal(graph_of(model), plan, devices)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan", "devices"), list(sweep()))
def test_every_plan_on_every_model(model: str, plan: str, devices: int) -> None:
    found = ss.compile(graph_of(model), plan, f"local:{devices}").verify()
    assert found["equal"], found


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "row"), list(product(("AdamW", "momentum"), UNROLLED)))
def test_updates_under_the_next_forward(optimizer: str, row: Row) -> None:
    found = ss.compile(graph_of(row[0], optimizer), row[1], f"local:{row[2]}").verify()
    assert found["equal"], found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "momentum"])
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (2, 8), (4, 4), (4, 8)])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_pipedream_equals_its_recurrence(model: str, stages: int, count: int, optimizer: str) -> None:
    graph = graph_of(f"{model}:size=tiny,layers=4,batch=8", optimizer)
    found = ss.compile(graph, f"pipedream:microbatches={count}", f"local:{stages}").verify()
    assert found["equal"], found["first_difference"]
    assert found["stale"] == list(range(stages))
