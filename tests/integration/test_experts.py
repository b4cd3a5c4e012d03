"""Mixtures of experts: one operator, cut on tokens, experts and their width; the router's loss over all tokens."""

from __future__ import annotations

from collections import defaultdict
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

import superscaler as ss
from superscaler.frontend.rewrites.custom_ops import experts
from superscaler.runtime import functional
from tests.helpers.graphs import graph_of
from tests.helpers.ran import captured, equal
from tests.helpers.sweeps import few
from tests.transform.test_experts import MODEL

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "max_position_embeddings": 64,
}


def model() -> tuple[MixtralForCausalLM, dict[str, Tensor]]:
    config = MixtralConfig(**SIZES, intermediate_size=20, num_local_experts=4)
    return MixtralForCausalLM(config), words()


def words() -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (4, 6))
    return {"input_ids": ids, "labels": ids}


def mixtral() -> ss.Graph:
    return graph_of(MODEL, "SGD")


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


@pytest.mark.parametrize("words", few(PLANS.values(), 1), ids=PLANS)
def test_cuts(words: dict[str, int]) -> None:
    moe = next(op for op in mixtral().ops if op.target == "ss.experts")
    rows = equal(mixtral(), split(words)).compiled.schedule.flow.rows[moe.name]
    assert len({tuple(map(int, row)) for row in rows.lo}) == 2


def test_no_operator_is_left_without_a_rule_and_the_model_stays_as_it_was() -> None:
    graph = mixtral()
    module = graph.captured.call.module
    assert not graph.model.unsupported
    assert module.config._experts_implementation == "grouped_mm"
    found = equal(graph, "single", 1).found
    # The module's own kernel of grouped products has no float64.
    assert (found["reference"], found["note"]) == ("eager", "")
    assert abs(found["loss"] - module(**graph.captured.batch).loss.item()) < 1e-5


def test_shared_experts_of_another_family() -> None:
    sizes = {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 12, "intermediate_size": 24}
    config = Qwen2MoeConfig(**SIZES, **sizes, num_experts=4)
    graph = captured(lambda: (Qwen2MoeForCausalLM(config), words()))
    assert any(op.target == "ss.experts" for op in graph.ops)
    equal(graph, "data_parallel")


def test_without_data() -> None:
    def on_meta() -> tuple[MixtralForCausalLM, dict[str, Tensor]]:
        with torch.device("meta"):
            return model()[0], {}

    graph = captured(lambda: (on_meta()[0], words()))
    assert not any(name.startswith("model") for name in graph.captured.values)
    equal(graph, "data_parallel")


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
    gradients = (torch.autograd.grad(x.sin().sum(), leaves) for x in (ours, whole))
    torch.testing.assert_close(*gradients)


def test_experts_compute_the_tokens_that_chose_them_and_a_prediction_an_even_share() -> None:
    """As docs/experts.md says of a plan without a capacity; with one, a prediction has all rows in use."""
    found, nonzero = defaultdict[bool, set[int]](set), functional._nonzero

    def counted(mask: Tensor, expected: int) -> tuple[Tensor, ...]:
        made = nonzero(mask, expected)
        found[type(mask) is Tensor].add(len(made[0]))
        return made

    with patch.object(functional, "_nonzero", counted):
        assert equal(mixtral(), "expert_parallel").found["dropped"] == (0, 0)
        assert len(found[True]) > 1
        # 8 sequences of 20 tokens, each for 2 of 4 experts.
        ss.compile(mixtral(), "expert_parallel", "a100:1x2").simulate()
        assert found.pop(False) == {8 * 20 * 2 // 4}
        ss.compile(mixtral(), "expert_parallel:capacity=1.5", "a100:1x2").simulate()
    assert found[False] == {8 * 15}
