"""Experts in steps: tokens travel to them, and nothing else; exact where all have rows, and told where not."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
import torch

import superscaler as ss
from superscaler.cli.verify import _certificate
from superscaler.errors import InputError, TransformError
from superscaler.ir.program import Collective, Send
from superscaler.ir.text.model import parse_model, print_model
from superscaler.runtime import functional
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal
from tests.helpers.sweeps import slow

# 4 sequences of 20 tokens, each for 2 of 4 experts.
MODEL = "mixtral:size=tiny,layers=1,experts=4,batch=8"


def plan_of(spec: str, world: int, model: str = MODEL) -> ss.Plan:
    return ss.compile(graph_of(model, "SGD"), spec, ss.Cluster.local(world))


@pytest.mark.parametrize(
    ("spec", "world"),
    [
        # Twice the even share of 2 in 4 experts is a row for every token.
        *slow(("expert_parallel:capacity=2.0", 4)),
        *slow(("data_parallel:2 x expert_parallel:4,capacity=1.0", 8)),
        *slow(("zero:2 x expert_parallel:2", 4)),
        *slow(("zero:2,stage=3 x expert_parallel:2,capacity=2.0", 4)),
        *slow(("expert_parallel:2 x data_parallel:2 x recompute:what=block", 4)),
        ("tensor_parallel:2 x expert_parallel:2", 4),
    ],
)
def test_expert_parallel_is_equal(spec: str, world: int) -> None:
    found = equal(graph_of(MODEL, "SGD"), spec, world).found
    if "=1.0" not in spec:
        assert (found["reference"], found["dropped"]) == ("eager", (0, 0))


@pytest.mark.parametrize("others", ["data_parallel:2", "zero:2,stage=1", "zero:2,stage=3"])
@pytest.mark.parametrize("is_outer", [False, True])
def test_tokens_travel_inside_of_a_group_of_experts(others: str, is_outer: bool) -> None:
    """One program for all devices, with one all_to_all for all that a group sends: no other group has its tokens."""
    experts = "expert_parallel:2,capacity=1.0"
    spec = f"{experts} x {others}" if is_outer else f"{others} x {experts}"
    program = plan_of(spec, 4, f"{MODEL},balance=0").compiled.program
    sent = [i for device in program.devices for i in device.instructions if isinstance(i, Collective | Send)]
    assert not [i for i in sent if isinstance(i, Send)]
    groups = {tuple(i.group) for i in sent if i.kind == "all_to_all"}
    assert groups == ({(0, 2), (1, 3)} if is_outer else {(0, 1), (2, 3)})


def test_tokens_travel_to_their_experts_and_back() -> None:
    """4 k T h elements (n - 1) / n in forward and backward at the even share; beside them how many rows are in use."""
    world = 4
    program = plan_of("expert_parallel:capacity=1.0", world).compiled.program
    moved = Counter[str]()
    for device in program.devices:
        for i in device.instructions:
            assert not isinstance(i, Send)
            if isinstance(i, Collective) and i.kind != "all_reduce":
                assert i.kind == "all_to_all"
                moved[i.dtype] += i.bytes * (world - 1) // world
    tokens, chosen, hidden = 8 * 20, 2, 48
    assert moved["float32"] == 4 * chosen * tokens * hidden * 4 * (world - 1) // world
    assert moved["int64"] == 8 * 4 * 8 * (world - 1) // world


def test_what_a_capacity_drops_is_told_and_equal_to_one_device() -> None:
    found, other = (equal(graph_of(MODEL, "SGD"), "expert_parallel:capacity=0.75", n).found for n in (2, 4))
    lost, of = found["dropped"]
    assert 0 < lost < of == 8 * 20 * 2
    assert found["reference"] == "graph"
    assert f"equal to one device, with a capacity of experts that drops {lost} of {of} choices" in _certificate(
        plan_of("expert_parallel:capacity=0.75", 2).verify(), "float32"
    )
    exact = equal(graph_of(MODEL, "SGD"), "expert_parallel", 2).found
    assert (exact["reference"], exact["dropped"]) == ("eager", (0, 0))
    assert found["loss"] != pytest.approx(exact["loss"], rel=1e-6)
    assert other["loss"] == pytest.approx(found["loss"], rel=1e-12)


@pytest.mark.slow
def test_the_steps_print_and_parse_back_and_run_at_small_shapes() -> None:
    plan = plan_of("expert_parallel:capacity=1.5", 2)
    model = plan.compiled.graph.model
    assert parse_model(print_model(model)) == model
    assert plan.verify(shapes="small")["equal"]


@pytest.mark.parametrize("capacity", [3, 6])
def test_rows_beyond_the_capacity_are_the_later_ones(capacity: int) -> None:
    shapes = (12, 5), (12, 2), (4, 8, 5), (4, 5, 4)
    x, weights, gate_up, down = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(12)])
    rows, wanted = functional.dispatch(x, ids, 4, 2, capacity)
    assert tuple(rows.shape) == (4, 2, capacity, 5)
    made = functional.collect(functional.expert_rows(rows, wanted, gate_up, down, "silu"), ids, weights)
    kept, seen = weights.clone(), Counter[tuple[int, int]]()
    for token, own in enumerate(ids.tolist()):
        for place, expert in enumerate(own):
            seen[token // 6, expert] += 1
            if seen[token // 6, expert] > capacity:
                kept[token, place] = 0.0
    want = functional.experts(x, ids, kept, gate_up, down, "silu")
    leaves = (x, weights, gate_up, down)
    pairs = zip((made, *grads(made, leaves)), (want, *grads(want, leaves)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)
    assert bool((wanted > capacity).any()) == (capacity < 6)
    assert int(wanted.sum()) == prod(ids.shape)


def grads(made: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(made.sin().sum(), leaves, retain_graph=True)


def test_what_is_no_mixture_is_refused_in_words() -> None:
    graph = graph_of(MODEL, "SGD").copy()
    with pytest.raises(TransformError, match=r"test_experts.py:\d+: Dispatch of embedding .*no mixture of experts"):
        ss.op_trans(graph, graph.forward_ops[0], ss.Dispatch())
    with pytest.raises(TransformError, match=r"Dispatch\(0\): give a positive multiple"):
        ss.op_trans(graph, [op for op in graph.forward_ops if op.target == "ss.experts"], ss.Dispatch(0))
    with pytest.raises(InputError, match="expert_parallel: the model has no mixture of experts"):
        plan_of("expert_parallel", 2, "mlp")
