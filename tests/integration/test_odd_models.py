"""Models of operators that no rule knows: captured, equal under data parallelism, and told what is not cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superscaler.cluster import Cluster
from superscaler.plan import capture, compile
from superscaler.report.model import describe


class Systems(nn.Module):
    """Solves a linear system per sample, and scores it by a determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.mix(x)
        gram = h @ h.mT + 6 * torch.eye(5)
        found = torch.linalg.solve(gram, h)
        factor = torch.linalg.cholesky(gram)
        return F.mse_loss(self.out(found).squeeze(-1), y) + factor.diagonal(dim1=-2, dim2=-1).log().sum(-1).mean()


class Distances(nn.Module):
    """The second smallest distance to learned centers, and how it grows along a path."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.centers = nn.Linear(4, 4), nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(self.mix(x), self.centers).kthvalue(2, -1).values
        return torch.cummax(near, 1).values.logsumexp(-1).mean()


class Recurrent(nn.Module):
    """A recurrent layer, and a loop over a cell on top of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.cell = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, _ = self.layer(self.table(ids))
        state, states = torch.zeros(ids.shape[0], 8), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return F.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), labels.flatten())


class Warped(nn.Module):
    """An image sampled on a learned grid."""

    def __init__(self) -> None:
        super().__init__()
        self.pose, self.convolution, self.head = nn.Linear(4, 6), nn.Conv2d(2, 3, 3, padding=1), nn.Linear(3, 1)

    def forward(self, image: Tensor, z: Tensor, y: Tensor) -> Tensor:
        grid = F.affine_grid(self.pose(z).view(-1, 2, 3), [image.shape[0], 2, 6, 6], align_corners=False)
        seen = F.grid_sample(image, grid, align_corners=False)
        return F.mse_loss(self.head(self.convolution(seen).mean((2, 3)))[:, 0], y)


class Windows(nn.Module):
    """Medians over overlapping windows of a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x.unfold(1, 3, 1)).quantile(0.5, 1).logsumexp(-1).mean()


def words() -> Tensor:
    return torch.randint(0, 20, (8, 5))


ODD: dict[type[nn.Module], tuple[Callable[[], tuple[Tensor, ...]], set[str]]] = {
    Systems: (
        lambda: (torch.randn(8, 5, 6), torch.randn(8, 5)),
        {"aten.linalg_solve.default", "aten.linalg_cholesky.default"},
    ),
    Distances: (lambda: (torch.randn(8, 5, 4),), {"aten.kthvalue.default"}),
    Recurrent: (lambda: (words(), words()), set()),
    Warped: (
        lambda: (torch.randn(8, 2, 6, 6), torch.randn(8, 4), torch.randn(8)),
        {"aten.affine_grid_generator.default"},
    ),
    Windows: (lambda: (torch.randn(8, 7),), {"aten.quantile.scalar"}),
}


@pytest.mark.parametrize("kind", ODD, ids=lambda kind: kind.__name__)
def test_an_odd_model_is_equal_and_says_what_is_frozen(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    inputs, unknown = ODD[kind]
    module = kind()
    graph = capture(module, inputs(), {}, torch.optim.AdamW(module.parameters(), lr=1e-2))
    found = describe(graph.model)
    assert set(found["unsupported"]) == unknown
    assert {row["operator"] for row in found["frozen"] if row["reason"] == "no rule"} == unknown
    # What stands before them is still cut on the batch.
    assert any(op.find("batch") is not None for op in graph.forward_ops)
    result = compile(graph, "data_parallel", Cluster.local(4)).verify()
    assert result["equal"], result
