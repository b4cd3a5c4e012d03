"""Several iterations in one step: each reads the weights that the one before it left, whatever the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import InputError, ScheduleError, TransformError
from superscaler.ir.program import Copy, Forward, Slice, Update
from superscaler.ir.text.model import parse_model, print_model
from superscaler.plan import Plan
from superscaler.runtime.step import Step
from superscaler.train.loop import _turns
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal, on_ranks
from tests.helpers.rewrites import on_top, swapped, unrolled
from tests.helpers.sweeps import slow

Batch = Mapping[str, Tensor]


def losses_of(plan: Plan, batches: Sequence[Batch]) -> list[float]:
    def train(step: Step) -> list[float]:
        n = step.iterations
        given = [list(batches[k : k + n]) if n > 1 else batches[k] for k in range(0, len(batches), n)]
        return [float(x) for some in given for x in step(some).reshape(-1)]

    return on_ranks(plan, train)[0]


def shuffled(batch: Batch, count: int) -> list[Batch]:
    """Return batches of the same rows, in which each row of an input has another's label."""
    generator = torch.Generator().manual_seed(0)
    return [{n: x[torch.randperm(len(x), generator=generator)] for n, x in batch.items()} for _ in range(count)]


@pytest.mark.parametrize("plan", ["single", *slow("zero:stage=3"), *slow("pipeline_1f1b:microbatches=2")])
def test_losses_are_those_of_the_plan_itself_bit_by_bit(plan: str) -> None:
    graph = graph_of("gpt2:size=tiny")
    world = 1 if plan == "single" else 2
    batches = shuffled(graph.captured.batch, 4)
    plain = losses_of(ss.compile(graph, plan, f"local:{world}"), batches)
    assert losses_of(ss.compile(graph, unrolled(plan), f"local:{world}"), batches) == plain
    assert len(set(plain)) == 4


def test_each_update_of_an_unrolled_plan_is_verified() -> None:
    assert equal(graph_of("mlp"), unrolled("tensor_parallel", 3)).found["module_compared"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "momentum"])
@pytest.mark.parametrize(
    ("plan", "world"),
    [
        ("zero:stage=1", 2), ("zero:stage=3", 4), ("recompute", 2), ("zb_h1:microbatches=4", 2), ("swap:what=both", 2),
        ("hybrid:dp=2,tp=2,pp=2", 8), ("interlaced:microbatches=2", 2), ("chimera:microbatches=2", 2),
    ],
)  # fmt: skip
def test_any_plan_can_be_unrolled(plan: str, world: int, optimizer: str) -> None:
    equal(graph_of("gpt2:size=tiny", optimizer), unrolled(plan), world)


def test_turns_are_taken_in_each_iteration() -> None:
    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        for op in graph.forward_ops:
            parts = ss.op_trans(graph, op, ss.Microbatch(2))
            factor = graph.updates["layers.0.weight"].indices[0].factor
            ss.op_assign(graph, ss.op_trans(graph, parts, ss.Split(factor, 2)), cluster.devices)
        ss.op_order(graph, *(graph.select(microbatch=k) for k in (0, 1)), turns=True)
        graph.unroll(2)

    module = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())))
    graph = captured(lambda: (Around(lambda m, x: m.layers(x).square().mean(), layers=module), torch.randn(4, 4)))
    code = equal(graph, plan).code()
    turns = [i.task.microbatch for i in code if isinstance(i, Forward)]
    assert turns == turns[: len(turns) // 2] * 2
    assert turns[:4] == [0, 1, 0, 1]


class Normed(nn.Module):
    """Changes buffers, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.drop(self.norm(x))), y)


class Spectral(nn.Module):
    """Changes a buffer that no iteration reads, and one of which its backward reads a view."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(x.tanh()) @ self.head.weight * self.scale.view(1, -1), y)
        self.scale.mul_(0.5)
        return loss


@pytest.mark.parametrize(
    ("kind", "plan"),
    [(Normed, "single"), (Spectral, "bytescheduler"), *slow((Normed, "bytescheduler"), (Spectral, "single"))],
)
def test_buffers_and_random_numbers_go_on_from_iteration_to_iteration(kind: type[nn.Module], plan: str) -> None:
    graph = captured(lambda: (kind(), (torch.randn(6, 8), torch.randint(0, 4, (6,)))), lr=0.5)
    plain, given = ss.compile(graph, "single", "local:1"), (unrolled(plan), 1) if plan == "single" else (plan, 2)
    both, batches = ss.compile(graph, given[0], f"local:{given[1]}"), shuffled(graph.captured.batch, 4)
    assert losses_of(both, batches) == pytest.approx(losses_of(plain, batches), rel=0 if plan == "single" else 1e-6)
    equal(graph, *given)


def test_checkpoints_of_unrolled_plans_and_of_others_resume_each_other(tmp_path: Path) -> None:
    graph = graph_of("mlp")
    batch = graph.captured.batch
    ss.compile(graph, "single", "local:1").save(tmp_path / "plain", evaluation=False)
    ss.compile(graph, unrolled("single"), "local:1").save(tmp_path / "both", evaluation=False)
    plain, both = ss.load(tmp_path / "plain"), ss.load(tmp_path / "both")
    plain(batch)
    plain.save(tmp_path / "a")
    assert both.restore(tmp_path / "a") == 1
    losses = both([batch, batch]).tolist()
    assert losses == [float(plain(batch)), float(plain(batch))]
    both.save(tmp_path / "b")
    assert plain.restore(tmp_path / "b") == 3
    assert float(plain(batch)) == float(both([batch, batch])[0])


def test_one_learning_rate_is_that_of_all_iterations_of_a_step(tmp_path: Path) -> None:
    graph = graph_of("mlp", "momentum")
    batch = graph.captured.batch
    for name, plan in (("plain", "single"), ("both", unrolled("single"))):
        ss.compile(graph, plan, "local:1").save(tmp_path / name, evaluation=False)
    plain, both = ss.load(tmp_path / "plain"), ss.load(tmp_path / "both")
    for rate in (0.5, 0.01):
        plain.lr = both.lr = rate
        assert both([batch, batch]).tolist() == [float(plain(batch)), float(plain(batch))]


def test_the_text_of_an_unrolled_model_reads_back() -> None:
    graph = graph_of("mlp").copy()
    graph.unroll(2)
    text = print_model(graph.model)
    assert parse_model(text) == graph.model
    assert "op update.head.weight = ss.AdamW(Ref(0)) : head.weight[0 1] -> head.weight+1[0 1]" in text


def test_a_step_takes_as_many_batches_as_it_has_iterations(tmp_path: Path) -> None:
    graph = graph_of("mlp")
    batch = graph.captured.batch
    ss.compile(graph, unrolled("single"), "local:1").save(tmp_path / "plan", evaluation=False)
    step = ss.load(tmp_path / "plan")
    for given, told in ((batch, "dict"), ([batch], "1 batches"), ([batch] * 3, "3 batches")):
        with pytest.raises(InputError, match=f"at once: a step takes a list of 2 batches, not {told}"):
            step(given)
    with pytest.raises(InputError, match="'x' has shape"):
        step([batch, {**batch, "x": batch["x"][:1]}])
    for options in ({"clip": 1.0}, {"check_finite": True}):
        with pytest.raises(InputError, match=f"2 iterations at once, whose updates .* {next(iter(options))} looks at"):
            step([batch, batch], **options)
    with pytest.raises(InputError, match=r"--steps 5 leaves 5 to train from step 0 on, .* 2 at once; give --steps 6"):
        _turns(step, 0, 5)
    assert list(_turns(step, 1, 5)) == [1, 3]


@pytest.mark.parametrize(
    ("before", "iterations", "told"),
    [
        (None, 1, "1 is no number of iterations; give 2 or more"),
        (None, 10**9, "1000000000 iterations make 1000000000 copies of the model; choose at most 1024"),
        (None, 2.0, "iterations is 2.0 of type float; give int"),
        (lambda graph: graph.unroll(2), 2, "2 iterations already"),
        (lambda graph: ss.op_trans(graph, graph.forward_ops, ss.Stale()), 2, "are read as they were updates ago"),
    ],
)
def test_what_cannot_be_unrolled_is_told(before: Any, iterations: Any, told: str) -> None:
    graph = graph_of("mlp").copy()
    if before is not None:
        before(graph)
    with pytest.raises(InputError, match=rf"unroll at .*test_unroll.py:\d+: .*{told}"):
        graph.unroll(iterations)


def test_a_loss_scale_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    graph = captured(lambda: (Normed(), (torch.randn(6, 8), torch.randint(0, 4, (6,)))), scaler=scaler)
    with pytest.raises(TransformError, match="a GradScaler looks at the gradients of all weights"):
        graph.unroll(2)


def in_halves(graph: ss.Graph) -> None:
    """Let the parts of an op read halves of a weight that rests whole beside them."""
    (weight,) = (op for op in graph.ops if op.is_update and op.inputs[0].tensor == "head.weight")
    (reader,) = (op for op, _ in graph.model.uses["head.weight"])
    ss.op_assign(graph, ss.op_trans(graph, reader, ss.Split(weight.indices[0].factor, 2)), 0)
    ss.op_assign(graph, weight, 0)


def test_an_iteration_takes_its_own_slices_of_weights() -> None:
    code = equal(graph_of("mlp"), unrolled(on_top("single", in_halves)), 1).code()
    assert sum(isinstance(i, Slice) and str(i.source) == "head_weight" for i in code) == 4


def test_weights_on_the_host_and_on_the_device_go_on_where_they_are() -> None:
    def hosted(graph: ss.Graph) -> None:
        ss.op_assign(graph, graph.updates["head.weight"], "host")

    code = equal(graph_of("mlp"), unrolled(on_top("single", hosted)), 1).code()
    (first, _) = (i for i in code if isinstance(i, Update))
    assert {str(name) for name in first.goes_on} > {"head_weight"}


def test_rewrites_before_and_after_unrolling_make_one_program() -> None:
    graph, swap = graph_of("mlp"), swapped("single")
    codes = [equal(graph, plan, 1).code() for plan in (unrolled(swap), swapped(unrolled("single")))]
    before, after = (Counter(type(i).__name__ for i in code) for code in codes)
    assert before == after
    assert before["Copy"] > 0


def test_what_only_one_iteration_has_is_rewritten_there() -> None:
    def copied(graph: ss.Graph) -> None:
        graph.unroll(2)
        for tensor in ("head.weight+1", "gelu+1"):
            (copy,) = ss.op_trans(graph, graph.forward_ops, ss.Insert(tensor))
            assert copy.op.iteration == 1
            ss.op_assign(graph, copy, "host")

    code = equal(graph_of("mlp"), on_top("single", copied), 1).code()
    assert sum(isinstance(i, Copy) for i in code) == 4
    graph = graph_of("mlp").copy()
    graph.unroll(2)
    with pytest.raises(TransformError, match="the activation or the weight 'nothing'; none of these do"):
        ss.op_trans(graph, graph.forward_ops, ss.Insert("nothing"))


def test_updates_of_one_weight_stay_where_the_first_is() -> None:
    def moved(graph: ss.Graph) -> None:
        ss.op_assign(graph, graph.op("update.head.weight+1"), 1)

    with pytest.raises(ScheduleError, match=r"update.head.weight\+1 is cut or placed otherwise than update.head"):
        ss.compile(graph_of("mlp"), on_top(unrolled("single"), moved), "local:2")


def test_updates_of_one_weight_may_name_its_place_in_other_ways() -> None:
    def named(graph: ss.Graph) -> None:
        for name, devices in (("update.head.weight", 0), ("update.head.weight+1", [0, 0])):
            op = graph.op(name)
            ss.op_assign(graph, ss.op_trans(graph, op, ss.Split(op.indices[0].factor, 2)), devices)

    equal(graph_of("mlp"), on_top(unrolled("single"), named), 1)
