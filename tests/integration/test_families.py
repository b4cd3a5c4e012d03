"""Models of the library that were once captured wrong, or called wrong, against their own eager training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Swinv2Config,
    Swinv2ForImageClassification,
)  # fmt: skip

import superscaler as ss
from tests.helpers.ran import captured, equal
from tests.helpers.sweeps import slow

Built = tuple[nn.Module, dict[str, Tensor]]


def falcon_with_alibi() -> Built:
    config = FalconConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=True, multi_query=False,
        new_decoder_architecture=False,
    )  # fmt: skip
    ids = torch.randint(0, 32, (4, 6))
    return FalconForCausalLM(config), {"input_ids": ids, "labels": ids}


def segformer() -> Built:
    """The batch norm of its head moves once a step."""
    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], drop_path_rate=0.0, decoder_hidden_size=8, num_labels=5,
    )  # fmt: skip
    return SegformerForSemanticSegmentation(config), {
        "pixel_values": torch.randn(4, 3, 16, 16),
        "labels": torch.randint(5, (4, 16, 16)),
    }


def mobilenet() -> Built:
    """Biases before its batch norms have gradients of zero, of which AdamW makes whole steps."""
    config = MobileNetV2Config(image_size=16, depth_multiplier=0.25, min_depth=4, num_labels=5)
    return MobileNetV2ForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 16, 16),
        "labels": torch.arange(4),
    }


def swin() -> Built:
    """Its position biases are computed from a table, which autocast rounds."""
    config = Swinv2Config(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4, drop_path_rate=0.2,
        num_labels=5,
    )  # fmt: skip
    module = Swinv2ForImageClassification(config)
    module.gradient_checkpointing_enable()
    return module, {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.arange(4)}


@pytest.mark.parametrize("make", [falcon_with_alibi, *slow(segformer, mobilenet)])
def test_two_steps_are_those_of_the_module(make: Callable[[], Built]) -> None:
    found = equal(captured(make, 1e-3, torch.optim.AdamW), "data_parallel").found
    assert found["reference"] == "eager"


@pytest.mark.slow
def test_two_steps_under_autocast_are_those_of_the_module() -> None:
    graph = captured(swin, 1e-3, torch.optim.AdamW, autocast="bf16")
    found = ss.compile(graph, "data_parallel", "local:2").verify()
    assert (found["equal"], found["reference"]) == (True, "eager"), found
