"""Certificates at small shapes: what is verified is the plan, on fewer elements, places and microbatches."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import InputError
from superscaler.plan import Plan
from tests.helpers.commands import run
from tests.helpers.graphs import graph_of, step_of
from tests.helpers.sweeps import slow


def plan_of(spec: str, plan: object, devices: int) -> Plan:
    return ss.compile(graph_of(spec), plan, ss.Cluster.local(devices))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "plan", "devices"),
    [
        *slow(("t5:size=tiny", "tensor_parallel", 4), ("swin:size=tiny", "tensor_parallel", 4)),
        *slow(("vit:size=tiny,layers=1", "data_parallel", 8)),
        *slow(("gpt2:size=tiny,layers=4,batch=16", "pipeline_1f1b:stages=2,microbatches=8", 2)),
        ("mlp:batch=64", "pipeline_1f1b:stages=2,microbatches=8", 2),
    ],
)
def test_a_plan_equals_the_model_at_a_small_shape(spec: str, plan: str, devices: int) -> None:
    result = plan_of(spec, plan, devices).verify(shapes="small")
    assert result["equal"], result
    assert result["conservation"]
    assert result["deadlock_free"]
    assert result["gradient_error"] < 1e-9
    assert result["shrunk"]["batch"][1] < result["shrunk"]["batch"][0]
    assert result["world"] <= devices


def test_a_model_without_weights_on_many_devices_is_verified_here() -> None:
    """8 devices in 2 stages with 4 microbatches of a model that was never allocated."""
    spec = "gpt2:layers=2,hidden=512,heads=8,seq=256,vocab=4096,batch=128,dropout=0,device=meta"
    result = plan_of(spec, "hybrid:dp=4,tp=1,pp=2,microbatches=4", 8).verify()
    assert result["equal"], result["first_difference"]
    assert result["shapes"] == "small"
    assert result["shrunk"]["devices"] == (8, result["world"]) == (8, 6)


def test_a_wrong_plan_is_not_equal_at_a_small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the copies are not summed; the checks of the whole plan do not see that, the numbers do."""
    from superscaler.runtime.executor import Rank

    plan = plan_of("mlp", "data_parallel", 4)

    class Same:
        def __init__(self, x: object) -> None:
            self.x = x

        def wait(self) -> object:
            return self.x

    monkeypatch.setattr(Rank, "all_reduce_bucket", lambda self, tensors, group: tuple(map(Same, tensors)))
    result = plan.verify(shapes="small")
    assert not result["equal"]
    assert result["conservation"]
    assert "gradient" in result["first_difference"]


def test_uneven_cuts_keep_their_factor() -> None:
    @ss.sprogram
    def uneven(graph: ss.Graph, cluster: ss.Cluster) -> None:
        for op in graph.forward_ops:
            algorithm = ss.Split("batch", sizes=(3, 5)) if op.find("batch") is not None else ss.Replicate(2)
            ss.op_assign(graph, ss.op_trans(graph, op, algorithm), cluster.devices)

    result = plan_of("gpt2:size=tiny", uneven, 2).verify(shapes="small")
    assert result["equal"], result
    assert "batch" not in result["shrunk"]
    assert "hidden" in result["shrunk"]


def test_orders_of_single_parts_keep_all_microbatches() -> None:
    @ss.sprogram
    def ordered(graph: ss.Graph, cluster: ss.Cluster) -> None:
        parts = [ss.op_trans(graph, op, ss.Microbatch(8)) for op in graph.forward_ops]
        for some in parts:
            ss.op_assign(graph, some, cluster.devices[0])
        trained = [some for some in parts if some.op.has_mirror]
        for first, second in itertools.pairwise(range(8)):
            ss.op_order(graph, trained[-1][first], trained[0][second])

    result = plan_of("mlp:batch=64", ordered, 1).verify(shapes="small")
    assert result["equal"], result
    assert result["shrunk"]["batch"][1] % 8 == 0


def test_what_cannot_shrink_says_why() -> None:
    plan = plan_of("mixtral:size=tiny", "tensor_parallel", 4)
    with pytest.raises(InputError, match=r"experts of \d+ is cut, but cannot shrink, since experts"):
        plan.verify(shapes="small")
    with pytest.raises(InputError, match="smal"):
        plan.verify(shapes="smal")


def test_the_command_tells_what_shrank(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--plan", "data_parallel", "--cluster", "local:4", "--shapes", "small")
    assert run("verify", "mlp:batch=8", *shape) == 0
    told = capsys.readouterr().out
    assert "batch 8 -> 6" in told
    assert "devices 4 -> 3" in told


class Labeled(nn.Module):
    """Scores of classes, of which one label stands for none."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.table, self.head, self.ignored = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False), ignored

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten(), ignore_index=self.ignored)


@cache
def labelled(ignored: int) -> ss.Graph:
    ids, labels = torch.randint(16, (4, 6)), torch.randint(16, (4, 6))
    labels[:, :4] = ignored
    return step_of(Labeled(ignored), ids, labels)


@pytest.mark.parametrize(
    ("ignored", "plan", "shapes"),
    [
        *slow((255, "data_parallel", "model")),
        *slow((255, "gradient_accumulation:microbatches=2", "small")),
        *slow((3, "tensor_parallel", "model")),
        (3, "data_parallel", "small"),
        *slow((-100, "tensor_parallel", "small")),
    ],
)
def test_labels_that_do_not_count_are_any_number(ignored: int, plan: str, shapes: str) -> None:
    """At the small shape the first labels are all that there are, and a mean of none is nan."""
    graph = labelled(ignored)
    found = ss.compile(graph, plan, "local:2").verify(shapes=shapes)
    assert found["equal"], found
    if shapes == "model":
        call = graph.captured.call
        assert found["loss"] == pytest.approx(call.module(*graph.captured.batch.values()).item())


def test_labels_of_no_class_are_refused() -> None:
    ids = torch.zeros(4, 6, dtype=torch.long)
    with pytest.raises(InputError, match="'labels' has 254, but the model has 16 rows for it"):
        ss.compile(labelled(255), "single", "local:1").verify(batch={"ids": ids, "labels": ids + 254})
