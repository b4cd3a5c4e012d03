"""What one microbatch communicates inside a stage travels while another one computes, and the plan stays equal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest

import superscaler as ss
from superscaler.errors import InputError, ScheduleError
from superscaler.ir.communication import bytes_moved
from superscaler.ir.program import Backward, Collective, Device, Forward, Value, Wait, reads, writes
from superscaler.plans.dualpipe import in_pairs
from superscaler.plans.lib.schedules import dualpipe_v
from superscaler.verbs import Action
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Ran, equal
from tests.schedule.clock import run

# Without the loss of the router, which is of all microbatches together.
MIXTRAL = "mixtral:size=tiny,layers=4,balance=0,batch=12,experts=4"
EXPERTS = "expert_parallel:2,capacity=2.0"


@cache
def plan_of(plan: str) -> ss.Plan:
    return ss.compile(graph_of(MIXTRAL, "SGD"), plan, "local:4")


def hidden(device: Device, kind: str) -> Iterator[tuple[int, bool]]:
    """Yield for each collective of a kind when it starts, and whether another microbatch computes until it is waited
    for.
    """
    code, made = device.instructions, dict[Value, int]()
    waits = {i.work: at for at, i in enumerate(code) if isinstance(i, Wait)}
    for at, i in enumerate(code):
        is_work = isinstance(i, Forward | Backward)
        own = i.task.microbatch if is_work else next((made[name] for name in reads(i) if name in made), -1)
        made |= dict.fromkeys(writes(i), own)
        if isinstance(i, Collective) and i.kind == kind:
            end = min(waits[work] for work in i.works if work in waits)
            between = {o.task.microbatch for o in code[at:end] if isinstance(o, Forward | Backward)}
            yield at, bool(between - {own})


def steady(device: Device) -> range:
    """Return where a device has forwards and backwards in turn: after its first backward, before its last forward."""
    trained = {i.task: at for at, i in reversed([*enumerate(device.instructions)]) if isinstance(i, Backward)}
    forwards = [at for at, i in enumerate(device.instructions) if isinstance(i, Forward) and i.task in trained]
    first = min(trained.values())
    return range(first, forwards[-1])


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (EXPERTS, "all_to_all"),
        pytest.param("ulysses:2", "all_to_all", marks=pytest.mark.slow),
        pytest.param("tensor_parallel:2", "all_reduce", marks=pytest.mark.slow),
    ],
)
def test_other_microbatches_compute_while_one_communicates(other: str, kind: str) -> None:
    """On the device whose stages are of layers alone, without embedding and loss."""
    for plan, least, most in (("dualpipe_v", 0.0, 0.0), ("dualpipe", 0.9, 1.0)):
        device = plan_of(f"{plan}:2,microbatches=6 x {other}").compiled.program.devices[2]
        found = [is_hidden for at, is_hidden in hidden(device, kind) if at in steady(device)]
        assert len(found) > 20
        assert least <= sum(found) / len(found) <= most


def exposed(plan: str, seconds: float) -> float:
    """Return how much longer a step takes if what moves takes so many seconds, a forward between two of them one."""
    schedule = plan_of(f"{plan}:2,microbatches=6 x {EXPERTS}").compiled.whole_schedule

    def step(moving: float) -> float:
        return max(d.end for d in run(schedule, {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "C": moving}).values())

    return step(seconds) - step(0.0)


def test_the_time_of_what_moves_is_hidden_but_at_the_ends() -> None:
    """Each of 6 microbatches goes 10 times to experts or back on a device; alone 2 or 3 are on their way in and out.

    Dispatch and collection are in one segment with the layer around them, so that weight halves hide some of it anyway.
    """
    assert exposed("dualpipe_v", 1.0) >= 30
    assert exposed("dualpipe", 1.0) <= 20
    # More than what computes meanwhile takes cannot be hidden whole.
    assert exposed("dualpipe", 3.0) > 3 * exposed("dualpipe", 1.0)


@pytest.mark.parametrize("other", [EXPERTS, pytest.param("tensor_parallel:2", marks=pytest.mark.slow)])
def test_dualpipe_equals_the_model(other: str) -> None:
    found = equal(graph_of(MIXTRAL, "SGD"), f"{other} x dualpipe:2,microbatches=6", 4).found
    assert (found["reference"], found["dropped"]) == ("eager", (0, 0))


def test_a_product_is_the_same_in_any_order() -> None:
    """Microbatches are cut first: of rows for experts, which are not cut on the batch, each has those of its own."""
    one, other = (plan_of(f"{a} x {b}") for a, b in permutations((EXPERTS, "dualpipe:2,microbatches=6")))
    assert bytes_moved(one.compiled.program) == bytes_moved(other.compiled.program)


def test_the_page_shows_the_pairs_of_a_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
    shown = page.partition("**`dualpipe`**")[2].split("```")[1]
    table = [in_pairs(row) for row in dualpipe_v(2, 4)]
    words = [[f"({w[0]} {w[1]})" if isinstance(w, tuple) else str(w) for w in row] for row in table]
    assert shown.strip() == "\n".join(map(" ".join, words))


def in_turns(*pairs: tuple[tuple[int, str], tuple[int, str]]) -> Ran:
    """Return a plan of tensor parallelism where pairs of a microbatch and kind take turns."""

    @ss.sprogram
    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        ss.op_trans(graph, graph.forward_ops, ss.Microbatch(2))
        for name, cuts in ss.tensor_splits(graph, 2, "tp").items():
            for cut in cuts:
                ss.op_trans(graph, graph.op(name), cut)
        ss.op_assign(graph, graph.forward_ops, cluster.mesh(tp=2))
        for pair in pairs:
            ss.op_order(graph, *(graph.select(microbatch=k, kind=kind) for k, kind in pair), turns=True)

    return equal(graph_of("gpt2:size=tiny", "SGD"), plan)


def test_any_groups_take_turns() -> None:
    """Two microbatches: what each sums over devices travels while the other one computes."""
    program = in_turns(((0, "F"), (1, "F")), ((0, "B"), (1, "B"))).program
    found = [h for device in program.devices for _, h in hidden(device, "all_reduce")]
    assert sum(found) > 0.8 * len(found) > 10


def test_turns_that_cannot_be_taken_are_told() -> None:
    with pytest.raises(ScheduleError) as raised:
        in_turns(((0, "F"), (0, "B")))
    assert "wait for each other" in str(raised.value)
    assert "F(embedding) of microbatch 0 in turns with B(embedding) of microbatch 0, at " in str(raised.value)
    graph = graph_of("gpt2:size=tiny", "SGD").copy()
    with pytest.raises(InputError, match=r"update\.transformer\.wte\.weight takes no turns"):
        ss.op_order(graph, graph.select(kind="F"), graph.updates["transformer.wte.weight"], turns=True)


def test_pairs_of_a_row_are_in_turns() -> None:
    graph = graph_of("gpt2:size=tiny", "SGD").copy()
    parts = ss.stages(graph, 2)
    ss.op_trans(graph, graph.forward_ops, ss.Microbatch(2))
    ss.order(graph, [[Action(0, "F", 0), (Action(0, "F", 1), Action(0, "B", 0)), Action(0, "B", 1)]], parts)
    assert list(map(str, graph.orders)) == [
        "0F1 in turns with 0B0", "0F0 before 0F1", "0F0 before 0B0", "0F1 before 0B1", "0B0 before 0B1",
    ]  # fmt: skip
