"""A multilayer perceptron that classifies vectors, with its loss inside."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from superscaler.models.family import Family, classes


class MLP(nn.Module):
    """`layers` times linear and GELU, then a linear to the classes; `forward` gives the mean cross entropy."""

    def __init__(self, layers: int, hidden: int, inputs: int, classes: int) -> None:
        super().__init__()
        widths = [inputs] + [hidden] * layers
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of `x` (batch, inputs) for `labels` (batch,), where label -100 is ignored."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.cross_entropy(self.head(x), labels)


FAMILY = Family(
    "",
    {"": {"layers": 2, "hidden": 64, "inputs": 32, "classes": 10, "batch": 16}},
    lambda _, o: MLP(o["layers"], o["hidden"], o["inputs"], o["classes"]),
    lambda o, step: classes(o["seed"], step, "x", (o["batch"], o["inputs"]), o["classes"]),
)
