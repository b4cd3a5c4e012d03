"""Packed projections of unequal segments: each segment can be cut on its own heads."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import FalconConfig, FalconForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

import superscaler as ss
from tests.helpers.ran import captured, equal
from tests.helpers.sweeps import slow

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 8}


def phi3(**options: Any) -> PreTrainedModel:
    sizes = {**SIZES, "intermediate_size": 40, "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 1}
    return Phi3ForCausalLM(Phi3Config(**(sizes | options)))


def falcon(grouped: bool) -> PreTrainedModel:
    options = {"num_kv_heads": 4, "new_decoder_architecture": True} if grouped else {"multi_query": True, "bias": True}
    return FalconForCausalLM(FalconConfig(**SIZES, **options, alibi=False))


def words() -> dict[str, Tensor]:
    ids = torch.randint(2, 96, (4, 6))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("module", "pieces"), [(lambda: falcon(False), 2 * 3), *slow((phi3, 3), (lambda: falcon(True), 0))]
)
def test_hugging_face(module, pieces: int) -> None:  # type: ignore[no-untyped-def]
    graph = captured(lambda: (module(), words()))
    assert len(graph.model.segments) == pieces
    equal(graph, "tensor_parallel", 4)
    cut = next(op for op in graph.ops if op.target.endswith("scaled_dot_product_attention.default"))
    assert "spatial" in {cut.indices[i].mark for i in cut.outputs[0].slots[1:2] if i is not None}


@cache
def uneven() -> ss.Graph:
    return captured(lambda: (phi3(num_hidden_layers=3, tie_word_embeddings=True), words()))


@pytest.mark.slow
def test_segments_and_tied_weights_of_uneven_stages_may_be_old() -> None:
    plan = "pipedream_2bw"
    graph = uneven()
    ages, first = equal(graph, f"{plan}:microbatches=2,blocks=2+1").graph.model.ages, int(plan == "pipedream_2bw")
    assert [ages[f"model.layers.{k}.self_attn.qkv_proj.weight.1"] for k in range(3)] == [1, 1, first]
    assert ages["model.embed_tokens.weight"] == 1


class Packed(nn.Module):
    """One projection read in unequal segments: as slices, as a split, or in a way that leaves it whole."""

    def __init__(self, how: str, trained: bool = True) -> None:
        super().__init__()
        self.how = how
        self.packed, self.out = nn.Linear(6, 18), nn.Linear(4, 3)
        self.packed.weight.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        p = self.packed(x)
        if self.how == "view":
            p = p.view(x.shape[0], 9, 2)
            a, b, c = (p[:, at : at + n].flatten(1) for at, n in ((0, 2), (2, 2), (4, 5)))
        elif self.how == "split":
            a, b, c = p.split([4, 4, 10], -1)
        else:
            a, b, c = p[:, :4], p[:, 4:8], p[:, 8:]
        extra = {"overlap": lambda: p[:, 2:6], "whole": lambda: p, "weight": lambda: self.packed.weight}
        rest = extra[self.how]().sum() if self.how in extra else 0.0
        return F.silu(self.out(a * b)).sum() + (c**2).mean() + rest


@pytest.mark.parametrize(
    ("how", "is_cut"),
    [("whole", False), ("weight", False)],
)
def test_segments_are_parameters(how: str, is_cut: bool) -> None:
    graph = captured(lambda: (Packed(how), torch.randn(8, 6)))
    names = {f"packed.{kind}.{k}" for kind in ("weight", "bias") for k in range(3)}
    assert set(graph.model.segments) == (names if is_cut else set())
    assert ("packed.weight" in graph.model.tensors) == (not is_cut)

    @ss.sprogram
    def cut(graph: ss.Graph, cluster: ss.Cluster) -> None:
        factor = graph.model.tensors["out.weight"].slots[1][0]
        for op in graph.ops:
            ss.op_assign(graph, ss.op_trans(graph, op, ss.Split(factor, 2)), cluster.devices)

    program = equal(graph, cut).program
    boxes = {w.box[0] for d in program.devices for w in d.weights if w.tensor == "packed.weight.1"}
    assert len(boxes) == (2 if is_cut else 0)


def test_frozen_packed_weights() -> None:
    equal(captured(lambda: (Packed("slices", trained=False), torch.randn(8, 6))), "data_parallel")
