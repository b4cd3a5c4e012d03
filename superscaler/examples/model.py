"""A model of your own: superscaler train model.py:build --plan data_parallel --cluster local:2 --steps 3"""

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """A classifier of sequences."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.layers(x)).mean(1)
        return nn.functional.cross_entropy(scores, labels)


def muon(module: Model, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the rest: --optimizer model.py:muon"""
    matrices = [p for p in module.layers.parameters() if p.dim() == 2]
    vectors = [p for p in module.layers.parameters() if p.dim() < 2]
    return [torch.optim.Muon(matrices, lr=10 * lr), torch.optim.AdamW([*vectors, *module.head.parameters()], lr=lr)]


def build(batch: int = 16) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the module, and inputs of the global batch with which it is captured."""
    torch.manual_seed(0)
    return Model(), (torch.randn(batch, 8, 64), torch.randint(0, 10, (batch,)))


def rows(count: int = 200, seed: int = 1) -> list[dict[str, Tensor]]:
    """Return samples by the names of the inputs of `forward`: --data model.py:rows"""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=draw)
    return [{"x": torch.randn(8, 64, generator=draw) + label / 5, "labels": label} for label in labels]


def held_out() -> torch.utils.data.DataLoader[dict[str, Tensor]]:
    """Return batches to evaluate on: --eval model.py:held_out"""
    return torch.utils.data.DataLoader(rows(32, seed=2), batch_size=16)  # type: ignore[arg-type]
