"""Pipelines whose stages have a number of devices, a (dp, tp) and a recomputation of their own."""

import re
from math import prod

import pytest

import superscaler as ss
from superscaler.errors import PlanError
from superscaler.ir.mask import extents
from superscaler.plans import check, over_servers
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal
from tests.helpers.sweeps import slow

GPT, LLAMA = "gpt2:size=tiny", "llama:size=tiny,layers=4,batch=8"


@pytest.mark.parametrize(
    ("model", "plan", "devices"),
    [
        (GPT, "pp=2,dp=1+2,tp=2+1,microbatches=2,zero=1,recompute=full+none", 4),
        *slow(
            (LLAMA, "pp=2,dp=2+1,tp=1,microbatches=2,blocks=3+1", 3),
            (GPT, "pp=2,dp=2+1,tp=1+2,microbatches=2,schedule=zb_h1", 4),
            (GPT, "pp=2,dp=2+1,tp=1+2,microbatches=4,schedule=F(FB)B/(FB)", 4),
            (LLAMA, "pp=2,dp=2+1,tp=1+2,microbatches=4,schedule=zbv,recompute=none+full", 4),
            (GPT, "pp=2,dp=4+2,tp=1+2,microbatches=2,halves=true,recompute=none+full", 8),
            (LLAMA, "pp=2,dp=4+2,tp=1+2,microbatches=2,sequence=true,zero=1,recompute=none+selective", 8),
            (LLAMA, "pp=3,dp=4+1+1,tp=1+2+2,microbatches=2,zero=1,blocks=1+2+1", 8),
            (LLAMA, "pp=2,dp=4+2,tp=1,microbatches=2,recompute=full+none,blocks=3+1", 6),
            (LLAMA, "pp=2,dp=2+1,tp=1+2,chunks=2,microbatches=2,zero=1,recompute=selective+full", 4),
            ("mbart:size=tiny,batch=8", "pp=2,dp=2+1,tp=1+2,microbatches=4", 4),
            ("bert:size=tiny,layers=4,batch=8", "pp=2,dp=2+1,tp=2+4,microbatches=2,sequence=true,zero=1", 8),
        ),
    ],
)
def test_stages_with_cuts_of_their_own_equal_the_model(model: str, plan: str, devices: int) -> None:
    equal(graph_of(model), f"hybrid:{plan}", devices)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan", "devices"), [
    (GPT, "pp=2,dp=1+2,tp=2+1,microbatches=2,zero=1,recompute=full+none", 4),
    (LLAMA, "pp=2,dp=4+2,tp=1+2,microbatches=2,sequence=true,zero=1,recompute=none+selective", 8),
])  # fmt: skip
def test_stages_with_cuts_of_their_own_verify(model: str, plan: str, devices: int) -> None:
    """In the trained dtype, too."""
    found = ss.compile(graph_of(model), f"hybrid:{plan}", f"local:{devices}").verify()
    assert found["equal"]
    assert found["deadlock_free"]
    assert max(found["loss_error"], found["gradient_error"], found["parameter_error"]) <= 1e-9


def test_each_stage_is_on_devices_of_its_own_and_cut_as_it_says() -> None:
    """Elements of the first MLP weight of each block on each device: whole, and in halves; one stage recomputes."""
    plan = "hybrid:pp=2,dp=2+1,tp=1+2,microbatches=2,recompute=full+none"
    program = ss.compile(graph_of(GPT), plan, "local:4").compiled.program
    held = {
        device.rank: {w.tensor: prod(extents(w.box)) for w in device.weights if "c_fc.weight" in w.tensor}
        for device in program.devices
    }
    size = prod(program.model.tensors["transformer.h.0.mlp.c_fc.weight"].shape)
    own = {0: (0, size), 1: (0, size), 2: (1, size // 2), 3: (1, size // 2)}
    assert held == {rank: {f"transformer.h.{n}.mlp.c_fc.weight": count} for rank, (n, count) in own.items()}
    assert {op.module.split(".")[2] for op in program.model.ops if op.origin} == {"0"}


REFUSED = [
    ("pp=2,dp=2+1+1", 4, "hybrid:dp=2+1+1 has 3 values, but there are 2 stages (pp=2); write one for all, or one for"),
    ("pp=2,recompute=full+none+none,dp=2", 4, "hybrid:recompute=full+none+none has 3 values, but there are 2 stages"),
    ("pp=2,recompute=full+some,dp=2", 4, "hybrid:recompute=some: choose none, selective, full."),
    ("pp=2,dp=2+many", 4, "hybrid:dp=2+many: write a whole number, as 4, or one for each stage, as 4+2."),
    ("dp=1.5", 4, "hybrid:dp=1.5: write a whole number, as 4, or one for each stage, as 4+2."),
    ("pp=2,dp=2+0", 4, "hybrid:dp=2+0: the number of a stage is 0; write 1 or more for each."),
    ("pp=2,dp=2+1,tp=1+1", 4, "hybrid: the stages have 2 x 1 + 1 x 1 = 3 devices (dp x tp), but the cluster has 4"),
    ("pp=2,dp=1+3,microbatches=2", 4, "batch=8 is not divisible by dp=3 x microbatches=2; give batch=6 or 12"),
    ("pp=2,dp=1,tp=1+3,microbatches=2", 4, "tensor parallelism into 3 parts divides no factor of this model"),
    ("pp=2,dp=2,schedule=zb_h3", 4, "hybrid:schedule=zb_h3: unknown schedule 'zb_h3'; did you mean 'zb_h2'"),
    ("pp=2,dp=2,schedule=chimera", 4, "hybrid:schedule=chimera: unknown schedule 'chimera'. Known"),
    ("pp=2,dp=2,schedule=zb_h1,chunks=2", 4, "schedule=zb_h1,chunks=2: chunks have the interleaved order; leave one"),
    ("pp=1000000000,dp=1", 4, "needs 1000000000 devices, but there are 4"),
]


@pytest.mark.parametrize(("plan", "devices", "message"), REFUSED)
def test_wrong_numbers_of_stages_are_refused_in_words(plan: str, devices: int, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        ss.compile(graph_of(GPT), f"hybrid:{plan}", f"local:{devices}")


def test_wrong_numbers_of_stages_are_refused_before_the_model_is_built() -> None:
    with pytest.raises(PlanError, match=re.escape("heads=4 is not divisible by tp=3")):
        check("hybrid:pp=2,dp=1,tp=1+3", {"batch": 8, "heads": 4}, ss.Cluster.local(4))


def test_the_widest_stage_is_said_to_communicate_over_servers() -> None:
    assert "tp of 16" in over_servers("hybrid:pp=2,dp=8+1,tp=1+16", ss.Cluster.parse("a100:3x8"))
