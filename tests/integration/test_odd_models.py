"""Operators that no rule knows, users' own ones, and parts that must know where they are: cut where they can be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.emit.segments import emit_segments
from superscaler.report.model import describe
from tests.frontend import own
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, SProgram, captured, equal


def systems(m: Around, x: Tensor, y: Tensor) -> Tensor:
    """Solve a linear system per sample, and score it by a determinant."""
    h = m.mix(x)
    gram = h @ h.mT + 6 * torch.eye(5)
    found = torch.linalg.solve(gram, h)
    factor = torch.linalg.cholesky(gram)
    return F.mse_loss(m.out(found).squeeze(-1), y) + factor.diagonal(dim1=-2, dim2=-1).log().sum(-1).mean()


def distances(m: Around, x: Tensor) -> Tensor:
    """Return the second smallest distance to learned centers, as it grows along a path."""
    near = torch.cdist(m.mix(x), m.centers).kthvalue(2, -1).values
    return torch.cummax(near, 1).values.logsumexp(-1).mean()


def recurrent(m: Around, ids: Tensor, labels: Tensor) -> Tensor:
    """Run a recurrent layer, and a loop over a cell on top of it."""
    x, _ = m.layer(m.table(ids))
    state, states = torch.zeros(ids.shape[0], 8), []
    for step in x.unbind(1):
        state = m.cell(step, state)
        states.append(state)
    return F.cross_entropy(m.head(torch.stack(states, 1)).flatten(0, 1), labels.flatten())


def warped(m: Around, image: Tensor, z: Tensor, y: Tensor) -> Tensor:
    """Sample an image on a learned grid."""
    grid = F.affine_grid(m.pose(z).view(-1, 2, 3), [image.shape[0], 2, 6, 6], align_corners=False)
    seen = F.grid_sample(image, grid, align_corners=False)
    return F.mse_loss(m.head(m.convolution(seen).mean((2, 3)))[:, 0], y)


def windows(m: Around, x: Tensor) -> Tensor:
    """Return medians over overlapping windows of a signal."""
    return m.scores(x.unfold(1, 3, 1)).quantile(0.5, 1).logsumexp(-1).mean()


def step_of(function: Callable[..., Tensor]) -> ss.Graph:
    words, linear = (torch.randint(0, 20, (8, 5)) for _ in range(2)), nn.Linear
    layers, inputs = {
        systems: ({"mix": linear(6, 6), "out": linear(6, 1)}, (torch.randn(8, 5, 6), torch.randn(8, 5))),
        distances: ({"mix": linear(4, 4), "centers": nn.Parameter(torch.randn(6, 4))}, torch.randn(8, 5, 4)),
        recurrent: (
            {"table": nn.Embedding(20, 8), "layer": nn.LSTM(8, 8, batch_first=True), "cell": nn.GRUCell(8, 8),
             "head": linear(8, 20)}, tuple(words),
        ),
        warped: (
            {"pose": linear(4, 6), "convolution": nn.Conv2d(2, 3, 3, padding=1), "head": linear(3, 1)},
            (torch.randn(8, 2, 6, 6), torch.randn(8, 4), torch.randn(8)),
        ),
        windows: ({"scores": linear(3, 4)}, torch.randn(8, 7)),
    }[function]  # fmt: skip
    return captured(lambda: (Around(function, **layers), inputs))


UNKNOWN = [(systems, {"aten.linalg_solve.default", "aten.linalg_cholesky.default"}),
           (distances, {"aten.kthvalue.default"}), (recurrent, set()),
           (warped, {"aten.affine_grid_generator.default"}), (windows, {"aten.quantile.scalar"})]  # fmt: skip


@pytest.mark.parametrize(("function", "unknown"), UNKNOWN)
def test_an_odd_model_is_equal_and_says_what_is_frozen(function: Callable[..., Tensor], unknown: set[str]) -> None:
    graph = step_of(function)
    found = describe(graph.model)
    assert set(found["unsupported"]) == unknown
    assert {row["operator"] for row in found["frozen"] if row["reason"] == "no rule"} == unknown
    # What stands before them is still cut on the batch.
    assert any(op.find("batch") is not None for op in graph.forward_ops)
    equal(graph, "data_parallel", 4)


@ss.sprogram
def split_inner(graph: ss.Graph, cluster: ss.Cluster) -> None:
    for op in graph.ops:
        algorithm = ss.Split("hidden", 2) if op.find("hidden") is not None else ss.Replicate(2)
        ss.op_assign(graph, ss.op_trans(graph, op, algorithm), cluster.devices)


OWN = [f"{n}.default" for n in ("ss_own.rms_norm", "superscaler_tests.gate", "ss_own.project", "ss_own.scale_and_size")]


@cache
def of_own() -> ss.Graph:
    return captured(lambda: (own.Block(), torch.randn(4, 6, 8)))


@pytest.mark.parametrize(("factor", "cut"), [("batch", OWN), ("hidden", OWN[1:3]), ("x.2", OWN[2:3])])
def test_factors_that_cut_users_own_operators(factor: str, cut: list[str]) -> None:
    assert {op.target for op in of_own().ops if op.find(factor) is not None}.intersection(OWN) == set(cut)


@pytest.mark.parametrize("plan", ["data_parallel", "tensor_parallel", split_inner])
def test_plans_of_users_own_operators(plan: str | SProgram) -> None:
    text = equal(of_own(), plan).compiled.emitted.files["segments.py"]
    assert all(f"torch.ops.{name}(" in text for name in OWN)


def wrong(x: Tensor) -> Tensor:
    return x.softmax(0)


def test_verify_finds_what_was_registered_unchecked() -> None:
    class Model(own.Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(ss.register("b s h -> b s h", wrong, check=False)(x))

    graph = captured(lambda: (Model(), torch.randn(4, 6, 8)))
    found = ss.compile(graph, "data_parallel", "local:2").verify()
    assert not found["equal"]
    assert found["loss_error"] > 1e-6


def test_an_uneven_part_of_a_vocabulary_knows_where_it_starts() -> None:
    graph = graph_of("gpt2:size=tiny", "SGD")
    op = next(op for op in graph.forward_ops if op.target == "aten.embedding.default")
    index = op.indices[op.inputs[0].slots[0] or 0]
    sizes = (index.size // 2 + 1, index.size - index.size // 2 - 1)

    def uneven(graph: ss.Graph, cluster: ss.Cluster) -> None:
        for op in graph.forward_ops:
            ss.op_assign(graph, ss.op_trans(graph, op, ss.Split(index.factor, sizes=sizes)), cluster.devices)

    assert "functional.embedding_part(" in emit_segments(equal(graph, uneven).program)[0]
