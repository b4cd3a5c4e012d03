"""What several plans need: stages, the 1F1B order, tensor-parallel splits, counts that use all devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from chains import chain
from torch import Tensor, nn

import superscaler as ss
from superscaler import plans
from superscaler.errors import InputError
from superscaler.ir.fold import Folded
from superscaler.plans import names, resolve
from superscaler.plans.lib.schedules import schedule_1f1b
from superscaler.plans.lib.shared import stages, tensor_splits
from tests.graphs import graph_of
from tests.ran import captured, equal


def test_stages_are_contiguous_balanced_and_whole() -> None:
    graph = chain(7)
    found = stages(graph, 3)
    assert [op for part in found for op in part] == list(graph.forward_ops)
    # Seven blocks of one FLOP each, and a sum of none.
    assert sorted(sum(op.flops for op in part) for part in found) == [2, 2, 3]


@pytest.mark.parametrize("count", [0, -1, 9])
def test_stages_that_do_not_fit_are_refused_with_both_numbers(count: int) -> None:
    with pytest.raises(InputError, match=f"{count} stages do not fit a model of 8 .*choose 1 to 8"):
        stages(chain(7), count)


@pytest.mark.parametrize(("count", "microbatches"), [(1, 1), (3, 2), (4, 8)])
def test_1f1b_keeps_as_many_microbatches_as_stages_follow(count: int, microbatches: int) -> None:
    for stage, row in enumerate(schedule_1f1b(count, microbatches)):
        assert sorted((w.kind, w.microbatch) for w in row) == sorted(
            (kind, m) for kind in "FB" for m in range(microbatches)
        )
        alive, most = 0, 0
        for work in row:
            alive += 1 if work.kind == "F" else -1
            most = max(most, alive)
            assert work.stage == stage
        assert most == min(count - stage, microbatches)


def test_tensor_splits_that_divide_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="tensor parallelism into 5 parts divides no factor of this model"):
        tensor_splits(chain(3), 5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hybrid:dp=2,tp=2,pp=2", "mesh pp=2,dp=2,tp=2 needs 8 devices, but there are 4"),
        ("hybrid:dp=0,tp=2,pp=2", "every size must be at least 1"),
        ("hybrid:dq=2", "dq"),
        ("hybird", "did you mean 'hybrid'"),
    ],
)
def test_a_wrong_plan_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        resolve(spec)(chain(), ss.Cluster.local(4))


def test_every_plan_of_the_library_has_a_name_and_a_text() -> None:
    assert {"single", "data_parallel", "tensor_parallel", "pipeline_1f1b", "hybrid"} <= set(names())
    for name in names():
        assert callable(resolve(name))


def test_every_plan_of_the_library_is_short() -> None:
    files = [Path(plans.__file__).with_name(f"{name}.py") for name in names()]
    lines = {file.name: len(file.read_text().splitlines()) for file in files if file.exists()}
    assert len(lines) > 20
    assert {name: count for name, count in lines.items() if count > 60} == {}


def test_devices_that_have_slices_of_a_vocabulary_or_of_experts_fold() -> None:
    for spec in ("gpt2:size=tiny", "mixtral:size=tiny"):
        plan = "tensor_parallel" if spec.startswith("gpt2") else "tensor_parallel:vocabulary=false"
        compiled = ss.compile(graph_of(spec, "SGD"), plan, "local:4")
        assert isinstance(compiled.compiled.program.devices, Folded)
        assert compiled.counts["distinct_programs"] == 1
        slices = [tables.parts for tables in compiled.compiled.emitted.tables]
        assert all(slices[0] != other for other in slices[1:])


@pytest.mark.parametrize("frozen", [(0, 1), (0, 1, 2), (3,), (1, 2)])
@pytest.mark.parametrize("plan", ["pipeline_1f1b:stages=4,microbatches=2", "hybrid:dp=2,pp=2,microbatches=2"])
def test_a_stage_may_have_nothing_to_train(plan: str, frozen: tuple[int, ...]) -> None:
    layers = [nn.Linear(8, 8).requires_grad_(k not in frozen) for k in range(4)]
    equal(captured(lambda: (nn.Sequential(*layers, Square()), torch.randn(4, 8))), plan, 4)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()
