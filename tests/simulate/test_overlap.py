"""Communication of tensor parallelism beside products: what hides it, and what it costs then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import superscaler as ss
from superscaler.errors import InputError
from superscaler.ir import program as p
from superscaler.ir.cohorts import cohorts
from superscaler.ir.program import Collective, CollectiveArg, Instruction, Task, Value
from superscaler.simulate.clock import Behavior, clock
from superscaler.simulate.predict import simulate
from superscaler.simulate.system import System
from superscaler.simulate.timetable import COMPUTE, Events
from superscaler.simulate.transfers.beside import Beside, Overlap
from superscaler.simulate.works import Kernel
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import slow
from tests.simulate.by_hand import END, cluster, made_of, reduced, run, wait, work

X, H, Y, W = (Value(name) for name in "xhyw")
# 8 tokens of 4 over 4 devices, and 6 columns of a weight on each.
ROWS, HIDDEN, WEIGHT = (8, 4), (8, 6), (4, 6)


def mm(left: tuple[int, ...], right: tuple[int, ...]) -> Kernel:
    halves = ((shape, "bfloat16") for shape in (left, right))
    return Kernel("mm", tuple(halves), (((left[0], right[1]), "bfloat16"),))


def moved(kind: str, source: Value, out: Value, local: tuple[int, ...], shape: tuple[int, ...]) -> list[Instruction]:
    work = out._replace(is_handle=True)
    way = CollectiveArg(local, 0, -1, local, shape)
    return [p.Collective(kind, (work,), (source,), (0, 1, 2, 3), (way,), "bfloat16", 64), p.Wait(out, work, shape)]


def found(code: Sequence[Instruction], kernels: Sequence[Sequence[Kernel]], is_pipelined: bool) -> dict[int, Beside]:
    """Each product takes 8 seconds, other kernels 100."""
    overlap = Overlap(lambda k: 8.0 if k.name == "mm" else 100.0, 1.25, is_pipelined, frozenset("w"))
    return dict(overlap.of(code, kernels))


OTHER = Kernel("gelu", ((HIDDEN, "bfloat16"),), ((HIDDEN, "bfloat16"),))
COLUMN, GRADIENT, INPUT = mm(ROWS, (4, 6)), mm((6, 8), ROWS), mm(HIDDEN, (6, 4))


def test_rows_are_gathered_beside_the_product_of_those_that_are_there() -> None:
    code = [*moved("all_gather", X, H, (2, 4), ROWS), p.Forward(Task(0), 0, (0,), (H,), (Y,))]
    kernels = [(), (), (COLUMN, OTHER, COLUMN)]
    # Of four pieces, one is there: three quarters of 16 seconds, which communication makes 1.25 times as long.
    assert found(code, kernels, True) == {0: Beside(1.25 * 12, 0.0, 1.25)}
    assert not found(code, kernels, False)


def test_a_result_is_scattered_in_quarters_of_which_the_last_is_late() -> None:
    code = [p.Forward(Task(0), 0, (0,), (H,), (X,)), *moved("reduce_scatter", X, Y, ROWS, (2, 4))]
    assert found(code, [(COLUMN, INPUT), (), ()], True) == {1: Beside(1.25 * 6, 0.25, 1.25)}
    # A sum that all devices need is not scattered, so that a product cannot make it ready in pieces.
    whole = [code[0], *moved("all_reduce", X, Y, ROWS, ROWS)]
    assert not found(whole, [(COLUMN, INPUT), (), ()], True)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_gradients_of_inputs_are_summed_beside_those_of_weights(kind: str) -> None:
    backward = p.Backward(Task(0), (H,), (X,))
    code = [backward, *moved(kind, X, Y, ROWS, ROWS)]
    for is_pipelined in (False, True):
        assert found(code, [(INPUT, GRADIENT), (), ()], is_pipelined) == {1: Beside(1.25 * 8, 0.0, 1.25)}
    # The first half of a split backward has none to hide it.
    assert not found(code, [(INPUT,), (), ()], True)


def test_inputs_are_gathered_again_beside_the_gradients_of_inputs() -> None:
    backward = p.Backward(Task(0), (Y,), (X,), again=(H,))
    code = [*moved("all_gather", X, H, (2, 4), ROWS), backward]
    for is_pipelined in (False, True):
        assert found(code, [(), (), (INPUT, GRADIENT)], is_pipelined) == {0: Beside(1.25 * 8, 0.0, 1.25)}


def test_gathers_of_weights_and_of_keys_are_not_hidden() -> None:
    attention = Kernel("_scaled_dot_product_flash_attention", ((ROWS, "bfloat16"),) * 3, ((ROWS, "bfloat16"),))
    use = p.Forward(Task(0), 0, (0,), (H,), (Y,))
    assert not found([*moved("all_gather", X, H, (2, 4), ROWS), use], [(), (), (attention,)], True)
    # A weight that happens to have the shape of rows.
    assert not found([*moved("all_gather", W, H, (2, 4), ROWS), use], [(), (), (COLUMN,)], True)


@pytest.mark.parametrize(("beside", "seconds"), [(None, 13), (Beside(4, 0, 2), 11), (Beside(99, 0.25, 2), 10)])
def test_the_clock_moves_what_is_left_after_products(beside: Beside | None, seconds: float) -> None:
    """8 seconds of communication after 5 of work: of those that are hidden, half are lost by slower products."""
    code = [run(5.0), reduced("g", [0, 1], 8), wait("g"), END]
    table = clock(made_of(code, code), cluster(1, 2), work, Behavior(hidden=lambda cohort, at: beside))
    assert table.seconds == seconds
    assert table.exposed.tolist() == [seconds - 5] * 2


def test_a_system_overlaps_its_tensor_parallelism() -> None:
    model = "gpt3:layers=1,hidden=2048,heads=16,seq=2048,vocabulary=1024,batch=1,device=meta"
    plan = ss.compile(graph_of(model), "sequence_parallel:4,regather=true", "h100:1x4")
    plain, bulk, pipelined = (plan.simulate(system=ss.System(overlap=way)) for way in ("", "bulk", "pipelined"))
    assert pipelined.step_seconds < bulk.step_seconds < plain.step_seconds
    # The same work, and communication that is not waited for.
    assert pipelined.mean("compute") == bulk.mean("compute") == plain.mean("compute")
    assert pipelined.mean("communication") < 0.5 * plain.mean("communication")
    assert "beside products (pipelined)" in pipelined.assumed
    assert "beside products (bulk)" in plan.simulate(system=ss.System(fused=True)).assumed
    assert plain.links == pipelined.links
    with pytest.raises(InputError, match=r"--overlap: unknown overlap 'tensor'.* Known: bulk, pipelined"):
        plan.simulate(system=ss.System(overlap="tensor"))


@pytest.mark.parametrize(("awaited", "seconds"), [(frozenset[int](), 8), ({0}, 13)])
def test_the_clock_runs_nothing_beside_collectives_that_are_awaited(awaited: frozenset[int], seconds: float) -> None:
    """5 seconds of work after the start of 8 of communication, beside it or behind it."""
    code = [reduced("g", [0, 1], 8), run(5.0), wait("g"), END]
    table = clock(made_of(code, code), cluster(1, 2), work, Behavior(awaited=lambda cohort: awaited))
    assert table.seconds == seconds
    assert table.exposed.tolist() == [seconds - 5] * 2


@pytest.mark.parametrize(("owned", "seconds"), [({}, 3 + 3 * 8), ({0: 1.0}, 3 + 32), ({0: 3.0}, 3 * 3 + 32)])
def test_the_clock_broadcasts_one_by_one_in_place_of_a_gather(owned: dict[int, float], seconds: float) -> None:
    """Of 8 bytes of each of 4 devices, in a chain of 3 links of one second each, all 32 pass each link."""
    gather = replace(reduced("g", range(4), 8), kind="all_gather")
    how = Behavior(owned=lambda cohort: owned)
    table = clock(made_of(*[[gather, wait("g"), END]] * 4), cluster(1, 4, 1.0), work, how)
    assert table.seconds == seconds


def _beside(lane: Events, kind: str) -> float:
    """Return the seconds of work beside collectives of a kind."""
    starts, ends = lane.start[:, 0], lane.end[:, 0]
    is_work = (lane.stream == COMPUTE) & (lane.waited < 0)
    found = 0.0
    for n in (lane.stream != COMPUTE).nonzero()[0]:
        i = lane.code[int(lane.instruction[n])]
        if isinstance(i, Collective) and i.kind == kind:
            both = ends[is_work].clip(max=ends[n]) - starts[is_work].clip(min=starts[n])
            found += float(both.clip(min=0.0).sum())
    return found


@pytest.mark.parametrize("plan", ["zero:4,stage=1,microbatches=2", *slow("fsdp")])
def test_a_system_without_prefetch_gathers_weights_beside_no_work(plan: str) -> None:
    model = "gpt3:layers=4,hidden=1024,heads=16,seq=512,vocabulary=1024,batch=8,device=meta"
    compiled = ss.compile(graph_of(model), plan, "a100:1x4")
    lanes = {
        is_off: simulate(compiled.compiled.program, compiled.compiled.cluster, system=System(no_prefetch=is_off)).table
        for is_off in (False, True)
    }
    kinds = "all_gather", "reduce_scatter"
    weights, gradients = ([_beside(lanes[is_off].lanes[0], kind) for is_off in lanes] for kind in kinds)
    assert weights[1] == 0.0 < weights[0]
    # Sums of gradients are beside the backward in both.
    assert min(gradients) > 0.0
    # What no work hides is waited for, and the same bytes move.
    assert lanes[True].exposed[0] > lanes[False].exposed[0] + 0.5 * weights[0]
    assert lanes[True].bytes == lanes[False].bytes
    assert "no work beside gathers of weights" in compiled.simulate(system=ss.System(no_prefetch=True)).assumed


def test_a_system_without_prefetch_has_nothing_to_wait_for_where_weights_are_whole() -> None:
    plan = ss.compile(graph_of("gpt3:size=tiny,device=meta"), "data_parallel:4", "a100:1x4")
    assert plan.simulate(system=ss.System(no_prefetch=True)).step_seconds == plan.simulate().step_seconds


@pytest.mark.parametrize("count", [4, 64])
def test_devices_broadcast_weights_together_or_one_by_one(count: int) -> None:
    """One has several of the tensors, or one of them at most."""
    model = f"gpt3:size=tiny,layers=2,hidden=256,batch={count},device=meta"
    plan = ss.compile(graph_of(model), f"zero:{count},stage=1", f"a100:{max(1, count // 8)}x{min(count, 8)}")
    program = plan.compiled.program
    (cohort,) = cohorts(program)
    gathers = [i for i in cohort.code[:] if isinstance(i, Collective) and i.kind == "all_gather"]
    tensors = sum(len(i.sources) for i in gathers)
    assert 4 < tensors < 64
    assert sum(System(broadcast=True).owned(program)(cohort).values()) == pytest.approx(min(count, tensors))
    one, every = (plan.simulate(system=System(no_prefetch=True, broadcast=way)) for way in (True, False))
    assert (one.step_seconds > every.step_seconds) is (count == 64)
    assert "weights broadcast one by one" in one.assumed
