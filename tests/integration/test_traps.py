"""The numerical traps of captured graphs, each in a small model, under plans that cut what is wrong to cut naively."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superscaler.cluster import Cluster
from superscaler.ir.graph import Graph
from superscaler.ir.model import Op
from superscaler.plan import compile
from superscaler.verbs import Replicate, Split, op_assign, op_trans
from tests.helpers.ran import Around, captured, equal, trained
from tests.helpers.random_sprograms import Author
from tests.helpers.sweeps import slow

Forward = Callable[..., Tensor]
CASES: dict[str, tuple[Forward, Callable[[], tuple[Any, ...]]]] = {}


def around(function: Forward) -> Around:
    """Return a module with some layers, and a function that uses them."""
    layers = {"first": nn.Linear(6, 6), "second": nn.Linear(6, 6, bias=False), "table": nn.Embedding(12, 6),
              "scale": nn.Parameter(torch.randn(6)), "convolution": nn.Conv1d(6, 4, 3, padding=1),
              "dropout": nn.Dropout(0.5), "weights": nn.Buffer(torch.linspace(0.5, 1.5, 6))}  # fmt: skip
    return Around(function, **layers)


def trap(inputs: Callable[[], tuple[Any, ...]]) -> Callable[[Forward], Forward]:
    def keep(function: Forward) -> Forward:
        CASES[function.__name__] = (function, inputs)
        return function

    return keep


def rows() -> tuple[Tensor]:
    return (torch.randn(8, 6),)


def cubes() -> tuple[Tensor]:
    return (torch.randn(8, 4, 6),)


def labeled() -> tuple[Tensor, Tensor]:
    """Labels that count unevenly over the batch."""
    labels = torch.randint(0, 6, (8, 4))
    labels[0], labels[3, :2] = -100, -100
    return torch.randn(8, 4, 6), labels


@trap(labeled)
def losses_of_labels(m: Around, x: Tensor, y: Tensor) -> Tensor:
    logits, y = m.first(x).flatten(0, 1), y.flatten()
    each = F.cross_entropy(logits, y, reduction="none")
    return (
        F.cross_entropy(logits, y, reduction="sum") * 0.1
        + F.cross_entropy(m.second(x).mT, y.view(8, 4), label_smoothing=0.2)
        + F.nll_loss(logits.log_softmax(-1), y)
        + F.cross_entropy(logits, m.second(x).flatten(0, 1).detach().softmax(-1))
        + each.sum() / (y != -100).sum()
    )


@trap(labeled)
def losses_of_elements(m: Around, x: Tensor, y: Tensor) -> Tensor:
    """Losses that are added up from zero on."""
    found, wanted = m.first(x), m.weights * x
    return (
        0.0
        + F.mse_loss(found, wanted)
        + F.l1_loss(found, wanted, reduction="sum") * 0.1
        + F.huber_loss(found, wanted)
        + F.kl_div(found.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        + F.kl_div(found.log_softmax(-1), wanted.softmax(-1), reduction="mean")
        + F.poisson_nll_loss(found, wanted.abs())
        + F.binary_cross_entropy_with_logits(found, wanted.sigmoid(), pos_weight=m.weights)
        + found[..., 0].mean() * 0.5
    )


@trap(labeled)
def losses_weighted_by_class(m: Around, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.first(x).mT, y, weight=m.weights)


@trap(cubes)
def biases(m: Around, x: Tensor) -> Tensor:
    """Affine operators one after the other, so that every bias is on a contracted index."""
    h = F.linear(m.first(x).tanh(), m.second.weight, m.scale)
    h = torch.addmm(m.scale, h.flatten(0, 1), m.second.weight, beta=0.5, alpha=2.0).view_as(x).tanh()
    h = torch.baddbmm(m.scale.expand(8, 4, 6), h, m.first.weight.expand(8, 6, 6))
    return m.convolution(h.mT).square().mean()


@trap(cubes)
def detached(m: Around, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = m.first(x).softmax(-1)
        target = m.second(x)
    h = m.second(x)
    rounded = h + (h.round() - h).detach()
    return (rounded * gate - target).square().mean() + (m.first(x).detach() * m.first(x)).mean()


@trap(rows)
def in_place(m: Around, x: Tensor) -> Tensor:
    h = m.first(x)
    h.add_(1).mul_(m.scale)
    h += m.second(x)
    h.masked_fill_(x > 0.5, -1.0).div_(2).relu_()
    return h.square().mean() + m.second(x).masked_fill(x < 0, m.scale[0]).mean()


@trap(cubes)
def in_place_on_views(m: Around, x: Tensor) -> Tensor:
    h = m.first(x).clone()
    h[:, 1:3].copy_(m.second(x)[:, :2])
    h[:, 0].copy_(m.scale)
    h[..., 2] = 3.0
    h[..., 4:] *= 2
    out = torch.zeros(8, 4, 6)
    out[:, :2] = h[:, 2:]
    out[:, 3] += m.scale
    return (out * x + h.tanh()).square().mean()


@trap(cubes)
def in_place_by_index(m: Around, x: Tensor) -> Tensor:
    h = m.first(x).clone()
    h[:, torch.tensor([0, 2])] = m.second(x)[:, :2]
    h[x > 1] = 0.0
    added = torch.zeros(6, 6).index_put((torch.arange(8) % 6,), h[:, 1], accumulate=True)
    return h.tanh().mean() + added.square().mean()


@trap(cubes)
def constants(m: Around, x: Tensor) -> Tensor:
    """Masks and positions that the forward builds, some of them as long as the batch."""
    q, place = m.first(x), torch.arange(4)
    mask = torch.full((4, 4), float("-inf")).triu(1)
    bias = -(place[:, None] - place).abs() * m.scale[0]
    by_hand = (q @ q.mT + mask + bias).softmax(-1) @ m.second(x)
    fused = F.scaled_dot_product_attention(q, q, m.second(x), attn_mask=torch.ones(4, 4).tril() > 0)
    open_keys = (x[:, :, 0] > 0) | (place == 0)
    padded = F.scaled_dot_product_attention(q, q, m.second(x), attn_mask=open_keys[:, None])
    last = q[torch.arange(8), torch.arange(8) % 4]
    return (by_hand * fused + padded).mean() + (last * torch.arange(8.0)[:, None]).mean()


@trap(lambda: (x := torch.randn(8, 6), x))
def the_same_twice(m: Around, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.first(m.first(x)), y) + (m.second(x) * y).mean()


@trap(cubes)
def casts(m: Around, x: Tensor) -> Tensor:
    h = F.linear(x.double(), m.second.weight.double()) * m.scale.double()
    return (h.float() + m.first(x)).square().mean() + F.layer_norm(h, (6,)).float().pow(3).mean()


@trap(lambda: (torch.randn(8, 12),))
def conflicting_views(m: Around, x: Tensor) -> Tensor:
    """12 as 3 x 4, and then as 4 x 3."""
    h = (x.view(8, 3, 4) * m.scale[:4]).tanh().reshape(8, 12)
    return F.linear(h.view(8, 4, 3).softmax(-1), m.first.weight[:, :3]).square().mean()


@trap(lambda: (torch.randint(0, 12, (8, 4)), torch.randint(0, 12, (8, 4))))
def tied(m: Around, ids: Tensor, labels: Tensor) -> Tensor:
    h = torch.tanh(m.first(m.table(ids)))
    return F.cross_entropy(F.linear(h, m.table.weight).mT, labels) + m.table.weight.square().sum() * 0.01


@functools.cache
def graph(name: str) -> Graph:
    function, inputs = CASES[name]
    return captured(lambda: (around(function), inputs()), 1e-2, torch.optim.AdamW)


def cut_each(choose: Callable[[Op], list[int | None]]) -> Callable[[Graph, Cluster], None]:
    """Return a plan that halves each op on the first chosen index that may be halved, and replicates the others."""

    def plan(graph: Graph, cluster: Cluster) -> None:
        for op in graph.ops:
            able = (op.indices[i] for i in choose(op) if i is not None)
            factor = next((i.factor for i in able if i.mark != "frozen" and i.size % 2 == 0), None)
            index = op.find(factor) if factor else None
            algorithm = Split(factor, 2) if index is not None and op.indices[index].size % 2 == 0 else Replicate(2)
            op_assign(graph, op_trans(graph, op, algorithm), cluster.devices)

    return plan


def sums(op: Op) -> list[int | None]:
    return [i for i, index in enumerate(op.indices) if index.mark == "summed"]


def columns(op: Op) -> list[int | None]:
    return list(reversed(op.outputs[0].slots))


def scattered(graph: Graph, cluster: Cluster) -> None:
    """Nested cuts, replicas and places at random, in the order that dependencies leave."""
    author = Author(graph, random.Random(2), len(cluster.devices))
    author.free()
    author.optimizers()


PLANS: list[tuple[Any, int]] = [(cut_each(sums), 2), (cut_each(columns), 2)]
# Models with an op that needs the whole batch, so that no microbatch can be done apart.
COUPLED = ("losses_weighted_by_class", "in_place_by_index", "biases", "constants")


@pytest.mark.parametrize(
    ("name", "plans"), [row for n, name in enumerate(CASES) for row in ((name, [n % 2]), *slow((name, [1 - n % 2])))]
)
def test_every_plan_is_equal(name: str, plans: list[int]) -> None:
    for plan, world in (PLANS[n] for n in plans):
        equal(graph(name), plan, world)
    equal(graph(name), *(("data_parallel", 2) if name in COUPLED else ("pipeline_1f1b:stages=1,microbatches=4", 1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_parts_anywhere_are_equal(name: str) -> None:
    equal(graph(name), scattered, 3)


def test_tied_weights_are_cut_on_another_dim_in_each_use() -> None:
    def plan(graph: Graph, cluster: Cluster) -> None:
        for op in graph.ops:
            factor = {"aten.embedding.default": "hidden", "aten.linear.default": "vocabulary"}.get(op.target, "")
            has = factor in graph.factors and op.find(factor) is not None
            op_assign(graph, op_trans(graph, op, Split(factor, 2) if has else Replicate(2)), cluster.devices)

    made = equal(graph("tied"), plan).graph
    cut = {
        op.target: op.indices[axis.index].factor
        for op, _ in made.model.uses["table.weight"]
        for axis in made.grids[op.name].axes
        if axis.index is not None
    }
    assert cut == {"aten.embedding.default": "hidden", "aten.linear.default": "vocabulary"}


def test_conflicting_views_freeze_neither_the_batch_nor_other_ops() -> None:
    for op in graph("conflicting_views").forward_ops:
        assert op.from_weights or op.find("batch") is not None or not op.outputs[0].slots, op.notation()


def dropped(m: Around, x: Tensor) -> Tensor:
    """Dropout on results, weights, constants, transposed and regrouped; in regions without gradients too."""
    with torch.no_grad():
        gate = m.dropout(m.first(x))
    h = m.dropout(m.second(x)) * gate
    noise = m.dropout(torch.ones(8, 4, 6)) * m.dropout(torch.ones(1, 4, 1))
    mixed = F.scaled_dot_product_attention(h, h, m.first(x), dropout_p=0.3, is_causal=True)
    turned = m.dropout(mixed.transpose(0, 1).reshape(4, 48)).square().mean()
    return turned + (h * noise).mean() + (m.dropout(m.first(x)).detach() * F.dropout(m.scale, 0.2)).mean()


def test_dropout_is_by_element_under_every_plan() -> None:
    drops = captured(lambda: (around(dropped), cubes()))
    ((alone, _),) = trained(compile(drops, "single", "local:1"))
    assert len(set(alone)) == 3
    for spec, world in [*PLANS, (scattered, 3), ("pipeline_1f1b:stages=1,microbatches=4", 1)]:
        for found, _ in trained(compile(drops, spec, f"local:{world}")):
            assert found == pytest.approx(alone, abs=1e-5)
    assert compile(drops, "data_parallel", "local:2").verify()["equal"]
