"""Mixtures of experts: one operator, cut on tokens, experts and their width; the router's loss over all tokens."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

import superscaler as ss
from superscaler.frontend.rewrites.custom_ops import experts
from superscaler.runtime import functional

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "max_position_embeddings": 64,
}


@cache
def mixtral() -> tuple[ss.Graph, MixtralForCausalLM, Tensor]:
    torch.manual_seed(0)
    module = MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=20, num_local_experts=4))
    ids = torch.randint(0, 32, (4, 6))
    return (
        ss.capture(
            module, kwargs={"input_ids": ids, "labels": ids}, optimizer=torch.optim.SGD(module.parameters(), lr=1e-2)
        ),
        module,
        ids,
    )


def split(words: dict[str, int]) -> object:
    """Return a plan that cuts each op on the first of the factors that it has, by the weight dim that they are."""

    @ss.sprogram
    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        chosen = ["batch"] if "batch" in words else []
        for name, dim in words.items():
            weights = [t for t in graph.model.tensors.values() if t.name.endswith(name) and t.kind == "parameter"]
            chosen += [t.slots[dim][-1] for t in weights]
        for op in graph.ops:
            factor = next((f for f in chosen if op.find(f) is not None), chosen[0])
            parts = ss.op_trans(graph, op, ss.Split(factor, len(cluster.devices)))
            for part, device in zip(parts, cluster.devices, strict=True):
                ss.op_assign(graph, part, device)

    return plan


PLANS = {
    "tokens": {"batch": 0},
    "experts": {"experts.gate_up_proj": 0},
    "width": {"experts.gate_up_proj": 1},
    "outputs": {"experts.down_proj": 1},
}


@pytest.mark.parametrize("words", PLANS.values(), ids=PLANS)
def test_cuts(words: dict[str, int]) -> None:
    graph, *_ = mixtral()
    plan = ss.compile(graph, split(words), ss.Cluster.local(2))  # type: ignore[arg-type]
    assert plan.verify()["equal"]
    moe = next(op for op in graph.ops if op.target == "ss.experts")
    assert len({tuple(map(int, row)) for row in plan.compiled.schedule.edges.rows[moe.name].lo}) == 2


def test_no_operator_is_left_without_a_rule_and_the_model_stays_as_it_was() -> None:
    graph, module, ids = mixtral()
    assert not graph.model.unsupported
    assert module.config._experts_implementation == "grouped_mm"
    found = ss.compile(graph, "single", ss.Cluster.local(1)).verify()
    # The module's own kernel of grouped products has no float64.
    assert (found["equal"], found["reference"], found["note"]) == (True, "eager", "")
    assert abs(found["loss"] - module(input_ids=ids, labels=ids).loss.item()) < 1e-5


def test_shared_experts_of_another_family() -> None:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=20, shared_expert_intermediate_size=12, intermediate_size=24
    )
    ids = torch.randint(0, 32, (4, 6))
    graph = ss.capture(
        m := Qwen2MoeForCausalLM(config),
        kwargs={"input_ids": ids, "labels": ids},
        optimizer=torch.optim.SGD(m.parameters(), lr=1e-2),
    )
    assert any(op.target == "ss.experts" for op in graph.ops)
    assert ss.compile(graph, "data_parallel", ss.Cluster.local(2)).verify()["equal"]


def test_without_data() -> None:
    with torch.device("meta"):
        module = MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=20, num_local_experts=4))
    ids = torch.randint(0, 32, (4, 6))
    graph = ss.capture(
        module, kwargs={"input_ids": ids, "labels": ids}, optimizer=torch.optim.SGD(module.parameters(), lr=1e-2)
    )
    assert not any(name.startswith("model") for name in graph.captured.values)
    assert ss.compile(graph, "data_parallel", ss.Cluster.local(2)).verify()["equal"]


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_experts_one_by_one_are_experts_gathered(activation: str) -> None:
    torch.manual_seed(0)
    shapes = (7, 6), (7, 2), (4, 10, 6), (4, 6, 5)
    x, weights, gate_up, down = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    # Expert 3 has no token.
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(7)])
    whole = experts(x, ids, weights, gate_up, down, activation)
    ours = functional.experts(x, ids, weights, gate_up, down, activation, [(0, 4)], [4])
    torch.testing.assert_close(ours, whole)
    leaves = (x, weights, gate_up, down)
    for a, b in zip(
        torch.autograd.grad(ours.sin().sum(), leaves), torch.autograd.grad(whole.sin().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b)
