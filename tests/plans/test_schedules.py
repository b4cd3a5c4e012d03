"""Each schedule has the idle time and keeps the activations that its authors say, by the order of the compiled plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import InputError
from superscaler.ir.orders import parse_schedule, print_schedule
from superscaler.plans import resolve
from superscaler.plans.lib import schedules
from superscaler.plans.lib.place_table import place_table
from superscaler.plans.lib.stages import stages
from superscaler.plans.lib.tables import Table, check, finish
from superscaler.schedule.order import complete
from superscaler.transform.place import place_twins
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal
from tests.helpers.sweeps import few, slow
from tests.schedule.clock import run
from tests.simulate.by_hand import chain, linear

SIZES = [(4, 8), (4, 16), (8, 16)]


def measured(table: Table, **seconds: float) -> tuple[list[float], list[float], list[int]]:
    """Return per device the idle time of the whole step, that between its first and last work, and its peak."""
    works = [work for row in table for work in row]
    count, microbatches = (max(getattr(w, name) for w in works) + 1 for name in ("stage", "microbatch"))
    graph = chain(count, microbatches).copy()
    parts = stages(graph, count)
    place = {(work.stage, work.microbatch): d for d, row in enumerate(table) for work in row}
    for stage, ops in enumerate(parts):
        for op in ops:
            made = ss.op_trans(graph, op, ss.Microbatch(microbatches))
            ss.op_assign(graph, made, [place[stage, k] for k in range(microbatches)])
    halved = {work.stage for work in works if work.kind == "I"}
    for stage in halved:
        ss.op_trans(graph, [op for op in parts[stage] if op.has_mirror], ss.SplitBackward())
    ss.order(graph, table, parts)
    place_twins(graph)
    found = run(complete(graph), {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, **seconds})
    devices = [found[d] for d in range(len(table))]
    last = max(device.end for device in devices)
    idle = [last - device.busy for device in devices]
    return idle, [device.end - device.start - device.busy for device in devices], [device.peak for device in devices]


@pytest.mark.parametrize(("p", "m"), few(SIZES, 0, 1))
def test_gpipe_and_1f1b_wait_for_the_pipeline_to_fill_and_drain(p: int, m: int) -> None:
    idle, _, peaks = measured(schedules.gpipe(p, m))
    assert idle == [3 * (p - 1)] * p
    assert peaks == [m] * p
    idle, _, peaks = measured(schedules.schedule_1f1b(p, m))
    assert idle == [3 * (p - 1)] * p
    assert peaks == [p - d for d in range(p)]


@pytest.mark.parametrize(("p", "m"), few(SIZES, 1))
def test_chunks_divide_the_bubble(p: int, m: int) -> None:
    """Narayanan et al., 2021, section 2.2; the activations of a chunk are half those of a stage."""
    half = {"F": 0.5, "B": 1.0}
    idle, _, peaks = measured(schedules.interleaved(p, m, 2), **half)
    assert idle == [3 * (p - 1) / 2] * p
    assert max(peaks) / 2 == p * (1 + (p - 1) / (2 * p))
    idle, _, peaks = measured(schedules.breadth_first(p, m, 2), **half)
    assert idle == [3 * (p - 1) / 2] * p
    assert peaks == [2 * m] * p


class Summed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


@pytest.mark.parametrize(("p", "m"), few(SIZES, 0))
def test_what_is_computed_again_early_fills_the_bubble(p: int, m: int) -> None:
    """Late, a gradient waits in each stage for what is computed again, as if backwards took so much longer."""
    graph = captured(lambda: (nn.Sequential(*(nn.Linear(2, 2) for _ in range(p - 1)), Summed(2, 2)), torch.randn(m, 2)))
    for when, idle in (("late", (p - 1) * (1 + 1 + 2)), ("early", (p - 1) * (1 + 2))):
        planned = graph.copy()
        resolve(f"pipeline_1f1b:microbatches={m},recompute={when}")(planned, ss.Cluster.local(p))
        place_twins(planned)
        found = run(complete(planned), {"F": 1.0, "B": 2.0})
        step = max(device.end for device in found.values())
        assert [device.busy for device in found.values()] == [4 * m] * p
        assert [step - device.busy for device in found.values()] == [idle] * p
        assert [device.peak for device in found.values()] == [1] * p


def test_a_table_says_when_stages_are_computed_again(tmp_path: Path) -> None:
    file = tmp_path / "table"
    file.write_text("0F0 0F1 0R0 0B0 0R1 0B1\n1F0 1B0 1F1 1B1")
    graph = captured(lambda: (nn.Sequential(nn.Linear(2, 2), Summed(2, 2)), torch.randn(2, 2)))
    assert {op.module for op in equal(graph, f"pipeline:schedule={file}").graph.twins.values()} == {"0"}
    with pytest.raises(InputError, match="0B0 waits for 0R0, at step 2 of device 0"):
        check(parse_schedule("0F0 0B0 0R0"))


def causal(m: Around, x: Tensor) -> Tensor:
    """Run stages of one segment each: attention to earlier tokens, and a layer."""
    for number, layer in enumerate(m.layers):
        x = layer(F.scaled_dot_product_attention(x, x, x, is_causal=True) if number else x)
    return x.sum()


@pytest.mark.parametrize(
    ("rule", "p", "m", "k"),
    [
        *slow((schedules.terapipe, 4, 1, 8)),
        *slow((schedules.terapipe, 4, 2, 4)),
        *slow((schedules.seq1f1b, 4, 4, 2)),
        (schedules.seq1f1b, 4, 2, 4),
    ],
)
def test_slices_divide_the_bubble_and_what_1f1b_keeps(rule: Callable[..., Table], p: int, m: int, k: int) -> None:
    """Li et al., 2021: (p - 1) / (m k + p - 1) of the step is idle; Sun et al., 2024. Times are those of a slice."""
    graph = captured(lambda: (Around(causal, layers=linear(p)), torch.randn(m, k, 2)))
    firsts = [n for n, op in enumerate(graph.forward_ops) if "attention" in op.target]
    parts = [list(graph.forward_ops[a:b]) for a, b in pairwise([0, *firsts, len(graph.forward_ops)])]
    place_table(graph, "pp", rule(p, m, k), parts, k)
    ss.op_assign(graph, graph.forward_ops, ss.Cluster.local(p).mesh(pp=p))
    found = run(complete(graph), {"F": 1.0, "B": 2.0})
    step = max(device.end for device in found.values())
    assert [step - device.busy for device in found.values()] == [3 * (p - 1)] * p
    if rule is schedules.terapipe:
        assert 3 * (p - 1) / step == (p - 1) / (m * k + p - 1)
        assert [device.peak for device in found.values()] == [m * k] * p
    else:
        assert [found[d].peak for d in range(p)] == [p - d + k - 1 for d in range(p)]


@pytest.mark.parametrize(("p", "m"), few(SIZES, 0))
def test_weight_gradients_fill_the_bubble(p: int, m: int) -> None:
    """Qi et al., 2023, table 2, with F = I = W; 2024 for the V, whose activations are of half a stage."""
    idle, _, peaks = measured(schedules.zb_h1(p, m))
    assert idle == [p - 1] * p
    assert peaks == [p] * p
    idle, inner, peaks = measured(schedules.zb_h2(p, m))
    assert inner == [0] * p
    assert idle == [p - 1] * p
    assert peaks == [2 * p - 1] * p
    idle, inner, peaks = measured(schedules.zbv(p, m), F=0.5, I=0.5, W=0.5)
    assert inner == [0] * p
    assert idle == [(p - 1) / 2] * p
    assert peaks == [2 * p] * p


@pytest.mark.parametrize(("p", "m"), few(SIZES, 0, 1))
def test_dualpipe_v_starts_a_forward_before_its_pair_is_done(p: int, m: int) -> None:
    """The authors' idle time, (p - 1) (F&B + B - 3 W) of chunks, takes a forward and a backward side by side for one
    work of F + B. Here what the forward or I of a pair makes leaves when it is there, so that it is less.
    """
    idle, _, peaks = measured(schedules.dualpipe_v(p, m))
    assert idle == [p - 1] * p
    assert (p - 1) * (3 + 2 - 3) > p - 1
    assert peaks == [2 * p + 1] * p


@pytest.mark.parametrize(("p", "m"), [(4, 4), (8, 8), *SIZES])
def test_chimera_halves_the_bubble(p: int, m: int) -> None:
    """Li and Hoefler, 2021, table 2: (D - 2) / (1.5 N + D - 2) of the step is idle where a backward is two forwards."""
    idle, _, peaks = measured(schedules.chimera(p, m))
    step = 3 * m + idle[0]
    assert idle == [step * (p - 2) / (1.5 * m + p - 2)] * p
    assert p / 2 + 1 <= min(peaks) <= max(peaks) <= p


def test_chimera_of_one_round_idles_two_slots_less_than_devices() -> None:
    idle, _, peaks = measured(schedules.chimera(4, 4), B=1.0)
    assert idle == [2] * 4
    assert sorted(peaks) == [3, 3, 4, 4]


@pytest.mark.parametrize(("p", "m"), [(4, 4), *SIZES])
def test_three_forwards_and_one_backward_idle_as_little_as_one_can(p: int, m: int) -> None:
    """No order idles less than (p - 1) (F + B): the first backward needs a forward of each device, and the last drains.

    The greedy order that takes the latest pass first idles 17 at 4 devices.
    """
    ends = finish(schedules.three_f_one_b(p, m))
    assert max(ends.values()) - 5 * m == 3 * (p - 1)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 2), (3, 9), (5, 10), *SIZES])
@pytest.mark.parametrize("backward", [1.0, 1.5, 2.0])
def test_interlaced_idles_as_little_as_one_can(p: int, m: int, backward: float) -> None:
    """Each device has three forwards and three backwards of a microbatch: of its own stage, and of those of all.

    No order idles less than (p - 1) (F + B): while the first microbatch comes to the last stage, and the last one back,
    its device has nothing but what all do together, for which the stages in between wait.
    """
    table, seconds = schedules.interlaced(p, m), {"F": 1.0, "B": backward}
    reached, bound = max(finish(table, seconds).values()), 3 * m * (1 + backward) + (p - 1) * (1 + backward)
    kept = [list(accumulate({"F": 1, "B": -1}[w.kind] for w in row if 0 < w.stage <= p)) for row in table]
    print(f"{p} devices, {m} microbatches: {reached} units of at least {bound}; {max(map(max, kept))} activations")
    assert reached == bound
    assert max(map(max, kept)) <= max(1, 3 * p // 2)


RULES = [
    *schedules.RULES.values(), schedules.three_f_one_b, schedules.interlaced,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tables_can_run_print_and_parse_back(rule: Callable[[int, int], Table]) -> None:
    short = (schedules.gpipe, schedules.schedule_1f1b, schedules.breadth_first, schedules.zb_h1, schedules.zb_h2)
    few = ((4, 1), (4, 3)) if rule in short else ()
    for p, m in ((1, 2), (2, 4), (2, 6), (4, 8), (4, 12), *few):
        if rule is schedules.chimera and p == 1:
            continue
        table = rule(p, m)
        check(table)
        assert parse_schedule(print_schedule(table)) == table


def test_a_first_stage_that_trains_has_its_backwards(tmp_path: Path) -> None:
    """A stage without backwards in the table ran them at the end, in silence; one that trains nothing has none."""
    (tmp_path / "table").write_text("0F0 0F1\n1F0 1B0 1F1 1B1\n")
    with pytest.raises(InputError, match="microbatch 0 of stage 0 has F, not FB or FIW"):
        ss.compile(graph_of("gpt2:size=tiny"), f"pipeline:schedule={tmp_path}/table", "local:2")
    layers = {name: nn.Linear(8, 8) for name in ("first", "last")}
    layers["first"].requires_grad_(False)
    frozen = captured(lambda: (Around(lambda m, x: m.last(m.first(x)).square().sum(), **layers), torch.ones(4, 8)))
    equal(frozen, f"pipeline:schedule={tmp_path}/table")


@pytest.mark.parametrize(
    ("rule", "p", "m", "message"),
    [
        (schedules.interleaved, 4, 6, "6 microbatches do not come in rounds of 4"),
        (schedules.interleaved, 2, 1, "; choose 2[.]$"),
        (schedules.zbv, 4, 6, "choose at least 8"),
        (schedules.dualpipe_v, 4, 6, "choose at least 8"),
        (schedules.chimera, 4, 5, "even numbers"),
        (schedules.chimera, 3, 6, "even numbers"),
        (schedules.gpipe, 4, 0, "1 or more microbatches, but 0"),
        (partial(schedules.terapipe, slices=0), 4, 2, "1 or more slices, but 0"),
    ],
)
def test_counts_that_a_rule_cannot_take_are_refused(
    rule: Callable[[int, int], Table], p: int, m: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        rule(p, m)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F1 0B0 0B1\n1F0 1F1 1B0", r"1 of stage 1 has F, not FB or FIW[^\n]*\nMend step 1 of device 1"),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1B1 1F1", r"1B1 waits for 1F1, at step 3 of device 1[^\n]*\nMend step 2 of"),
        ("0F0 0F1 0B0 0B1\n1F1 1B1 1F0 1B0", r"1F1 is before 1F0, but device 0 sends to 1F0 before"),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", r"0B0 waits for 1B0, at step 2 of device 1, for ever"),
        ("0F0 0F0 0B0\n1F0 1B0", "0F0 is there already, at step 0"),
        ("0F0 0I0 0W0 0B0\n1F0 1B0", "microbatch 0 of stage 0 has FBIW"),
        ("0F0\n0B0", "microbatch 0 of stage 0 has its F on 0 and B on 1"),
        ("1F0 1B0", "microbatch 0 of stage 0 has nothing"),
        ("0F0 0F1 0B0 0B1\n0F1 0F0 0B0 0B1", "0F0 waits for device 1, which shares it and is at 0F1"),
        ("", "without work"),
    ],
)
def test_wrong_tables_are_refused_with_the_step(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        check(parse_schedule(text))
    assert not text or "<--" in str(raised.value)
