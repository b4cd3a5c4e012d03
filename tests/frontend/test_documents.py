"""Masks of documents that capture knows, and those that it leaves as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import superscaler as ss
from tests.helpers.graphs import assert_equal
from tests.helpers.packed import own, packed

WHOLE, INSIDE = "aten.scaled_dot_product_attention.default", "ss.attention_documents"
Mask = Callable[[Tensor], Tensor]


def same(d: Tensor) -> Tensor:
    return (d.unsqueeze(-1) == d.unsqueeze(-2)).unsqueeze(1)


def lower(d: Tensor) -> Tensor:
    return torch.ones(d.shape[1], d.shape[1], dtype=torch.bool).tril()


KNOWN: dict[str, tuple[Mask, bool]] = {
    "same": (same, False),
    "same and a causal constant": (lambda d: same(d) & lower(d), True),
    "a causal constant and same": (lambda d: torch.logical_and(lower(d), same(d)), True),
    "tril": (lambda d: (d[:, :, None] == d[:, None]).tril()[:, None], True),
    "for all heads": (lambda d: same(d).expand(-1, 4, -1, -1), False),
    "of the first row": (lambda d: same(d[:1]), False),
    "added": (lambda d: torch.where(same(d), 0.0, float("-inf")), False),
    "filled": (lambda d: torch.zeros(4, 1, 16, 16).masked_fill(~(same(d) & lower(d)), float("-inf")), True),
    "of rows that are alike": (lambda d: (d[0, :, None] == d[0]).tril(), True),
    "places": (lambda d: same(d) & (torch.arange(16)[None] <= torch.arange(16)[:, None]), True),
}
OTHERS: dict[str, Mask] = {
    "others": lambda d: (d.unsqueeze(-1) != d.unsqueeze(-2)).unsqueeze(1) | torch.eye(16, dtype=torch.bool),
    "same or causal": lambda d: same(d) | lower(d),
    "a window": lambda d: same(d) & lower(d) & ~lower(d).tril(-3),
    "two numbers": lambda d: same(d) & same(d // 2),
    "shifted": lambda d: (d.unsqueeze(-1) <= d.unsqueeze(-2)).unsqueeze(1),
    "places that are no order": lambda d: same(d) & (d.unsqueeze(-2) <= d.unsqueeze(-1)).unsqueeze(1),
    # As many heads as rows.
    "of each head": lambda d: d[:, None, :, None] == d[None, :, None],
    "low": lambda d: torch.where(same(d), 0.0, -1.0),
    "added numbers": lambda d: torch.where(same(d), 1.0, float("-inf")),
    "below the diagonal": lambda d: (d[:, :, None] == d[:, None]).tril(1)[:, None],
}


def targets(graph: ss.Graph) -> list[str]:
    return [op.target for op in graph.forward_ops if "attention" in op.target]


@pytest.mark.parametrize("name", KNOWN)
def test_a_mask_of_documents_is_known_by_their_numbers(name: str) -> None:
    mask, is_causal = KNOWN[name]
    graph = own(mask)
    op = next(op for op in graph.forward_ops if "attention" in op.target)
    assert (op.target, op.args[5]) == (INSIDE, is_causal)
    # The mask itself is not made.
    from_data = [o for op in graph.forward_ops if op.from_data for o in op.outputs]
    assert all(graph.model.tensors[o.tensor].shape[-2:] != (16, 16) for o in from_data)
    assert_equal(graph, "tensor_parallel")


@pytest.mark.parametrize("name", OTHERS)
def test_another_mask_stays(name: str) -> None:
    graph = own(OTHERS[name])
    assert targets(graph) == [WHOLE]
    assert_equal(graph, "tensor_parallel")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_documents_are_known_by_position_ids(kind: str) -> None:
    graph = packed(kind)
    causal = [op.args[5] for op in graph.forward_ops if op.target == INSIDE]
    assert (targets(graph), causal) == ([INSIDE] * 2, [True] * 2)
