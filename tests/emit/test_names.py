"""Models that call their weights, inputs and modules like what emitted code calls its own."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import superscaler as ss
from superscaler.verify.plan_dir import validate_directory
from tests.helpers.graphs import step_of
from tests.helpers.ran import Around, SProgram, captured, equal
from tests.helpers.sweeps import slow

TAKEN = (
    "one", "rt", "segments", "_", "w", "d_w", "w_work", "w__2", "w_m0", "functional", "random", "range", "print",
    "torch", "len", "m",
)  # fmt: skip


class Taken(nn.Module):
    """Products with weights of given names, in a model with a module and an input that are called oddly, too."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleDict({"2x": nn.Linear(8, 8)})
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(8, 8)))

    def forward(self, x: Tensor, float: Tensor) -> Tensor:
        h = self.layers["2x"](x)
        for name in self.names:
            h = (h @ getattr(self, name)).tanh()
        return h.masked_fill(float > 0, -torch.inf).softmax(-1).square().mean()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Given(nn.Module):
    """Inputs with such names."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, rt: Tensor, one: Tensor) -> Tensor:
        segments, d_w = rt @ self.w, one @ self.w
        return (segments * d_w).square().mean()


@ss.sprogram
def scattered(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Cut the batch, and each weight at rest."""
    n = len(cluster.devices)
    for op in graph.ops:
        algorithm = ss.Split("batch", n) if op.is_forward else ss.Split(op.indices[0].factor, n)
        ss.op_assign(graph, ss.op_trans(graph, op, algorithm), cluster.devices)


@pytest.mark.parametrize(
    ("plan", "module"),
    [
        *slow(("tensor_parallel", Taken(TAKEN)), (scattered, Taken(TAKEN))),
        ("pipeline_1f1b:microbatches=16", Taken(TAKEN)),
        ("pipeline_1f1b:microbatches=16", Given()),
    ],
)
def test_names_of_a_model_do_not_meet_those_of_its_code(plan: SProgram, module: nn.Module) -> None:
    compiled = equal(step_of(module, torch.randn(16, 8), torch.randn(16, 8), check=False), plan).compiled
    has_loop = any("for m in range(" in text for text in compiled.emitted.files.values())
    assert has_loop == (plan == "pipeline_1f1b:microbatches=16")


@pytest.mark.parametrize("name", ["l", "range", "rt", "in"])
def test_a_list_of_weights_takes_no_name_that_loops_use(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in getattr(m, name):
            x = x + layer(x).tanh()
        return x.square().mean()

    layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(6)])
    module = Around(forward, **{name: layers})
    ran = equal(step_of(module, torch.randn(8, 8), check=False), "tensor_parallel")
    assert "for l in range(" in ran.compiled.emitted.files["program_0.py"]


@pytest.mark.timeout(60)
def test_names_read_back_where_a_weight_or_a_module_is_called_as_gradients_begin(tmp_path: Path) -> None:
    """The list of handles of `d.weight` and `d.bias` has the name of both; that of another weight is `d`."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return (m.inner.d(x).tanh() @ m.d).square().mean()

    def make() -> tuple[nn.Module, Tensor]:
        inner = nn.ModuleDict({"d": nn.Linear(8, 8)})
        return Around(forward, inner=inner, d=nn.Parameter(torch.randn(8, 8))), torch.randn(8, 8)

    for graph in (
        captured(make),
        step_of(nn.Sequential(OrderedDict(d=nn.Linear(8, 8), loss=Mean())), torch.randn(8, 8)),
    ):
        ss.compile(graph, "zero", "local:2").save(tmp_path, evaluation=False)
        validate_directory(tmp_path)


def test_words_of_python_are_names_also_where_a_tensor_is_changed_in_place() -> None:
    module, batch = Taken(("and", "class")), (torch.randn(16, 8), torch.randn(16, 8))
    for plan in ("tensor_parallel", "pipeline_1f1b:microbatches=16"):
        equal(step_of(module, *batch, check=False), plan)
    changing = Around(lambda m, x, y: m.inner(x.clone().mul_(2.0), y), inner=module)
    equal(step_of(changing, *batch, check=False), "tensor_parallel")


def test_a_family_of_layers_has_a_name_that_no_value_of_a_microbatch_has() -> None:
    """What the first of five layers makes is in no loop, and alive until the others are done."""

    def forward(m: Any, ids: Tensor, labels: Tensor) -> Tensor:
        h, total = m.embedding(ids), 0
        kept = list[Tensor]()
        for layer, norm in zip(m.layers, m.norms, strict=True):
            kept += [layer(norm(h))]
            h = h + torch.tanh(kept[-1])
            total = total + h.square().mean()
        h = h + kept[0]
        return F.cross_entropy(F.linear(h, m.embedding.weight).flatten(0, 1), labels.flatten()) + 0.1 * total

    def halves(graph: ss.Graph, cluster: ss.Cluster) -> None:
        for op in graph.forward_ops:
            parts = ss.op_trans(graph, op, ss.Microbatch(2))
            adds = op.target == "aten.add.Tensor"
            ss.op_assign(graph, ss.op_trans(graph, parts, ss.Split("batch", 2)) if adds else parts, cluster.devices[0])

    def make() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        layers, norms = (
            nn.ModuleList([kind() for _ in range(5)]) for kind in (lambda: nn.Linear(8, 8), lambda: nn.LayerNorm(8))
        )
        module = Around(forward, embedding=nn.Embedding(12, 8), layers=layers, norms=norms)
        return module, (torch.randint(0, 12, (4, 6)), torch.randint(0, 12, (4, 6)))

    files = equal(captured(make), halves, 1).compiled.emitted.files
    assert "for l in range(" in files["program_0.py"]
