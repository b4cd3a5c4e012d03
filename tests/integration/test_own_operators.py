"""Plans of models with users' own operators: equal to one device, batch or inner dim cut, in files that stand alone."""

from __future__ import annotations

import pytest
import torch

import superscaler as ss
from tests.frontend import own


def captured(module: torch.nn.Module) -> ss.Graph:
    torch.manual_seed(0)
    return ss.capture(module, (torch.randn(4, 6, 8),), optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3))


@ss.sprogram
def split_inner(graph: ss.Graph, cluster: ss.Cluster) -> None:
    for op in graph.ops:
        algo = ss.Split("hidden", 2) if op.find("hidden") is not None else ss.Replicate(2)
        for part, device in zip(ss.op_trans(graph, op, algo), cluster.devices, strict=True):
            ss.op_assign(graph, part, device)


@pytest.mark.parametrize("factor", ["batch", "hidden", "x.2"])
def test_which_operators_a_factor_cuts(factor: str) -> None:
    cut = {op.target for op in captured(own.Block()).ops if op.find(factor) is not None}
    norm, gate, project, scale = (f"{n}.default" for n in (
        "ss_own.rms_norm", "superscaler_tests.gate", "ss_own.project", "ss_own.scale_and_size"))  # fmt: skip
    expected = {"batch": {norm, gate, project, scale}, "hidden": {gate, project}, "x.2": {project}}[factor]
    assert cut & {norm, gate, project, scale} == expected


@pytest.mark.parametrize("sprogram", ["data_parallel", "tensor_parallel", split_inner])
def test_a_plan_equals_one_device(sprogram) -> None:
    plan = ss.compile(captured(own.Block()), sprogram, "local:2")
    text = plan.compiled.emitted.files["segments.py"]
    for name in ("ss_own.rms_norm", "superscaler_tests.gate", "ss_own.project", "ss_own.scale_and_size"):
        assert f"torch.ops.{name}.default(" in text
    result = plan.verify()
    assert result["equal"], result


def wrong(x):
    return x.softmax(0)


def test_verify_finds_what_was_registered_unchecked() -> None:
    class Model(own.Block):
        def forward(self, x):
            return super().forward(ss.register("b s h -> b s h", wrong, check=False)(x))

    result = ss.compile(captured(Model()), "data_parallel", "local:2").verify()
    assert not result["equal"]
    assert result["loss_error"] > 1e-6
