"""Programs that compute something else under names, places and numbers that look right are refused, each in a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

import superscaler as ss
from superscaler.certify.certificate import CHECKS
from superscaler.errors import ScheduleError
from superscaler.ir.fold import Folded
from superscaler.ir.program import (
    Collective,
    Combine,
    Forward,
    Free,
    Function,
    Load,
    Program,
    Recv,
    Send,
    Slice,
    Update,
    Value,
    Wait,
)  # fmt: skip
from tests.helpers.changes import Code, at, codes, exchanged, named, with_codes
from tests.helpers.graphs import graph_of
from tests.helpers.outcome import differs
from tests.helpers.small_plans import exact
from tests.helpers.sweeps import slow

Edit = Callable[[Program], Program]


@dataclass(frozen=True)
class Hole:
    """An edit of a plan that `says` why it is refused; `is_right`: its numbers are those of the plan."""

    plan: str
    says: str
    edit: Edit
    is_right: bool = False


HOLES: dict[str, Hole] = {}


def hole(plan: str, says: str, is_right: bool = False) -> Callable[[Edit], Edit]:
    def keep(edit: Edit) -> Edit:
        HOLES[edit.__name__] = Hole(plan, says, edit, is_right)
        return edit

    return keep


def copy_of(code: Code, out: Value, source: Value) -> Combine:
    """Return what gives a weight at rest another name."""
    box = code[at(code, Load, out=source)].box
    view = tuple(hi - lo for lo, hi in box)
    return Combine(out, (source,), (tuple((0, size) for size in view),), view, view, "float64")


FIRST, SECOND = named("layers_0_weight"), named("layers_0_weight_p1")


@hole("early", "loads layers.1.weight after its update", is_right=True)
def weight_loaded_again_after_its_update(program: Program) -> Program:
    code = codes(program)
    again = code[0][at(code[0], Load, tensor="layers.1.weight")]
    code[0][-2:-2] = [Free((again.out,)), again]
    return with_codes(program, code)


@hole("early", r"changes layers_0_weight as \[4:6, 0:6\], but it has \[0:2, 0:6\]", is_right=True)
def slices_of_a_weight_under_the_names_of_each_other(program: Program) -> Program:
    code = codes(program)
    n, other = next(n for n, i in enumerate(code[0]) if isinstance(i, Update) and FIRST in i.weights), named("other")
    update = code[0][n]
    gradients = exchanged(update.gradients, *(update.weights.index(name) for name in (FIRST, SECOND)))
    first, second = (copy_of(code[0], *pair) for pair in ((other, FIRST), (FIRST, SECOND)))
    last = replace(copy_of(code[0], SECOND, FIRST), pieces=(other,))
    code[0][n : n + 1] = [first, Free((FIRST,)), second, Free((SECOND,)), last]
    code[0].insert(n + 5, replace(update, gradients=gradients))
    return with_codes(program, code)


@hole("early", "changes layers_1_weight, which is a copy of the weight at rest")
def update_of_a_copy(program: Program) -> Program:
    code = codes(program)
    name, rows = named("layers_1_weight"), (named("row_1"), named("row_2"))
    n = next(n for n, i in enumerate(code[0]) if isinstance(i, Update))
    boxes = (((0, 1), (0, 8)), ((1, 2), (0, 8)))
    cut = [Slice(row, name, (2, 8), box, (1, 8)) for row, box in zip(rows, boxes, strict=True)]
    code[0][n:n] = [*cut, Free((name,)), Combine(name, rows, boxes, (2, 8), (2, 8), "float64")]
    return with_codes(program, code)


@hole("data", "has two weights at rest of one name, layers_0_weight")
def weight_at_rest_twice(program: Program) -> Program:
    """The optimizer would have it twice."""
    first, second = program.devices
    again = replace(first.weights[0], counted=False)
    return replace(program, devices=(replace(first, weights=(*first.weights, again)), second))


def moved(f: Function, is_one: bool) -> Function:
    """Return a function whose queries start an element earlier, in attention alone or wherever they are."""
    for op, box, where in zip(f.ops, f.boxes, f.coordinates, strict=True):
        first = next((i.until for i in op.indices if i.until is not None), None)
        if first is not None and box[first][0]:
            boxes = tuple(
                tuple(
                    (lo - 1, hi - 1) if c == where[first] and (other is op or not is_one) else (lo, hi)
                    for (lo, hi), c in zip(box, own, strict=True)
                )
                for other, box, own in zip(f.ops, f.boxes, f.coordinates, strict=True)
            )
            return replace(f, boxes=boxes)
    return f


@hole("uneven", "runs transpose_3 from 1 of sequence, where others start at 0")
def start_of_attention_moved(program: Program) -> Program:
    return replace(program, functions=tuple(moved(f, is_one=True) for f in program.functions))


@hole("uneven", r"runs scaled_dot_product_attention on 0:\d of sequence, not on 0:")
def start_of_queries_moved(program: Program) -> Program:
    return replace(program, functions=tuple(moved(f, is_one=False) for f in program.functions))


@hole("early", "sends .* to device 1 as message 9, the number of another one to that device")
def messages_of_one_number(program: Program) -> Program:
    code = codes(program)
    for mine in code:
        mine[:] = [replace(i, message=9) if isinstance(i, Send | Recv) and i.message == 11 else i for i in mine]
    waits = [n for n, i in enumerate(code[1]) if isinstance(i, Wait) and str(i.work).startswith("layers_1_weight_work")]
    first, second = (code[1][n] for n in waits)
    code[1][waits[0]], code[1][waits[1]] = replace(first, work=second.work), replace(second, work=first.work)
    return with_codes(program, code)


@hole("values", "takes the largest of no pieces")
def largest_of_no_pieces(program: Program) -> Program:
    code = codes(program)
    empty = next((mine, n) for mine in code for n, i in enumerate(mine) if isinstance(i, Combine) and not i.pieces)
    empty[0][empty[1]] = replace(empty[0][empty[1]], largest=True)
    return with_codes(program, code)


@hole("early", "makes head_bias, which exists already")
def handle_under_the_name_of_a_value(program: Program) -> Program:
    code = codes(program)
    old, new = named("layers_0_weight_work"), named("head_bias")
    n = at(code[0], Recv, work=old)
    code[0][n] = replace(code[0][n], work=new)
    code[0][at(code[0], Wait, work=old)] = replace(code[0][at(code[0], Wait, work=old)], work=new)
    return with_codes(program, code)


@pytest.mark.parametrize("name", HOLES)
def test_it_is_refused(name: str) -> None:
    hole = HOLES[name]
    mutant = hole.edit(exact(hole.plan).program)
    with pytest.raises(ScheduleError, match=rf"^device \d+.*{hole.says}") as refused:
        check(mutant)
    assert "\n" not in str(refused.value)
    assert bool(differs(hole.plan, mutant)) != hole.is_right
    check(exact(hole.plan).program)


def check(program: Program) -> None:
    for one in CHECKS.values():
        one(program)


@pytest.mark.parametrize("change", ["shorter", "another kind", "other weights", "more pieces"])
def test_places_of_a_fold_that_run_other_programs_are_refused(change: str) -> None:
    program = exact("folded").program
    devices = program.devices
    assert isinstance(devices, Folded)
    rank = devices.fold.samples(0)[1]
    code, weights = list(devices.compiled[rank].instructions), devices.compiled[rank].weights
    n = next(n for n, i in enumerate(code) if isinstance(i, Load) and i.tensor == "labels")
    if change == "shorter":
        del code[n]
    elif change == "another kind":
        code[n] = Free((code[n].out,))
    elif change == "other weights":
        weights = weights[1:]
    else:
        code[n] = replace(code[n], box=code[n].box * 2)
    changed = replace(devices.compiled[rank], instructions=tuple(code), weights=weights)
    mutant = replace(program, devices=replace(devices, compiled={**devices.compiled, rank: changed}))
    with pytest.raises(ScheduleError, match=rf"devices? .*{rank}"):
        check(mutant)


@pytest.mark.parametrize(("is_twice", "says"), [(False, "lacks"), *slow((True, "has 2 times"))])
def test_counts_of_experts_that_are_not_summed_once_are_refused_soon(is_twice: bool, says: str) -> None:
    """The gradients behind them have an addend for each way through the blocks, of which there are millions."""
    program = ss.compile(graph_of("mixtral:size=tiny"), "data_parallel", "local:2").compiled.program
    count, once, twice, work = map(named, ("histc", "histc__2", "twice", "twice_work"))
    code = codes(program)
    for own in code:
        n, k, read = at(own, Wait, out=once), at(own, Forward, inputs=once), twice if is_twice else count
        own[k] = replace(own[k], inputs=tuple(read if x == once else x for x in own[k].inputs))
        first = next(i for i in own if isinstance(i, Collective) and count in i.sources)
        again = replace(first, works=(work,), sources=(once,), ways=first.ways[:1], bytes=48)
        own[n + 1 : n + 1] = [again, replace(own[n], out=twice, work=work)] if is_twice else []
    with pytest.raises(ScheduleError, match=rf"of more than 200 partial addends, since the gradient of sum_3.* {says}"):
        check(with_codes(program, code))
