"""Bugs on purpose: small changes of compiled plans, each with the culprit that a report must name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from superscaler.certify.certificate import CHECKS
from superscaler.compiler import Compiled
from superscaler.ir import program as p
from superscaler.verify import compare_with_eager
from tests.helpers.changes import at, codes, named, renamed, with_change, with_codes, without_frees
from tests.helpers.mutants import changes
from tests.helpers.ran import rewritten
from tests.helpers.small_plans import Noise, Small, exact_of
from tests.helpers.small_plans import named as of_library

# A mutated step that hangs must not take long.
TIMEOUT = 5.0
Code = list[p.Instruction]
Edit = Callable[[Compiled, list[Code]], Compiled | None]


@dataclass(frozen=True)
class Mutation:
    """`edit` changes a plan `spec` of `model`; a report must contain one of `culprits`."""

    name: str
    model: str
    spec: str
    culprits: tuple[str, ...]
    edit: Edit


TABLE: list[Mutation] = []
DP, TP = "data_parallel", "tensor_parallel:vocabulary=false"
PIPE = "pipeline_1f1b:stages=2,microbatches=4"
GRID = "hybrid:dp=1,tp=2,pp=2,microbatches=2,vocabulary=false"
TP4 = "hybrid:dp=1,tp=4,vocabulary=false"
WORLD = {GRID: 4, TP4: 4, DP: 2, TP: 2, PIPE: 2}


def chosen(rank: int, kind: str, what: str) -> Edit:
    """Return the first change of a class of a device which says `what`."""

    def edit(exact: Compiled, code: list[Code]) -> Compiled:
        found = changes(exact.program, rank)
        change = next(change for one, told, change in found if one == kind and what in told)
        changed = with_change(exact.program, [rank], change)
        assert changed is not None
        return replace(exact, program=changed)

    return edit


def mutation(spec: str, *culprits: str, model: str = "mlp") -> Callable[[Edit], Edit]:
    def keep(edit: Edit) -> Edit:
        TABLE.append(Mutation(edit.__name__.replace("_", " "), model, spec, culprits, edit))
        return edit

    return keep


@cache
def intact(model: str, spec: str) -> Compiled:
    """Return a plan in float64 without Free, which an edit would have to keep up to date."""
    make = (lambda: (Noise(), (torch.randn(8, 6),), {})) if model == "noise" else of_library(model)
    exact = exact_of(Small(make, spec, WORLD[spec]))
    whole = replace(exact.program, devices=tuple(exact.program.devices))
    return replace(exact, program=without_frees(whole))


def mutate(mutation: Mutation) -> Compiled:
    """Return the plan with the bug: what `edit` returns, or its plan with the instructions that it changed."""
    exact = intact(mutation.model, mutation.spec)
    code = codes(exact.program)
    return mutation.edit(exact, code) or replace(exact, program=with_codes(exact.program, code))


def report(mutation: Mutation) -> tuple[str, str]:
    """Return what caught a mutation, and what was said; nothing caught it where the first is empty."""
    result = compare_with_eager(mutate(mutation), timeout=TIMEOUT)
    checks = [name for name in CHECKS if not result[name]]
    return "" if result["equal"] else (checks or ["numbers"])[0], result["first_difference"]


def change(code: Code, of: type, where: dict[str, Any], **new: Any) -> None:
    n = at(code, of, **where)
    code[n] = replace(code[n], **new)


def skip_collective(code: Code, work: str) -> None:
    """Drop a collective of one tensor and give its readers what it was given."""
    started = at(code, p.Collective, works=work)
    waited = at(code, p.Wait, work=work)
    out, (source,) = code[waited].out, code[started].sources
    del code[waited], code[started]
    code[:] = renamed(code, out, source)


def bucket_of(code: Code) -> tuple[int, p.Collective]:
    """Return where the first collective of several tensors is, and it."""
    return next((n, i) for n, i in enumerate(code) if isinstance(i, p.Collective) and len(i.works) > 1)


def edit_op(exact: Compiled, op: str, new: Callable[[Any], Any]) -> Compiled:
    """Change an op in the last of the functions that have it."""
    functions = list(exact.program.functions)
    found = [n for n, f in enumerate(functions) if any(o.name == op for o in f.ops)]
    function = functions[found[-1]]
    functions[found[-1]] = replace(function, ops=tuple(new(o) if o.name == op else o for o in function.ops))
    return replace(exact, program=replace(exact.program, functions=tuple(functions)))


def remove_op(function: p.Function, name: str) -> p.Function:
    """Take an element-wise op out of a function: its readers read its first input."""
    gone = next(op for op in function.ops if op.name == name)
    old, new = gone.outputs[0].tensor, gone.inputs[0].tensor
    ops = []
    for op in function.ops:
        inputs = tuple(replace(o, tensor=new) if o.tensor == old else o for o in op.inputs)
        ops.append(replace(op, inputs=inputs))
    kept = [k for k, op in enumerate(ops) if op.name != name]
    outputs = tuple(new if o == old else o for o in function.outputs)
    boxes, coordinates = (tuple(x[k] for k in kept) for x in (function.boxes, function.coordinates))
    ops = [ops[k] for k in kept]
    return replace(function, ops=tuple(ops), boxes=boxes, coordinates=coordinates, outputs=outputs)


# Single changes, of those that `mutants` makes of all plans.


CHOSEN = (
    ("order of a group reversed on one device", TP, 1, "group order", "product_2", "all_gather of linear_product_2"),
    ("send dropped", PIPE, 0, "delete", "Send of linear_m2", "recv of linear", "Recv of d_linear_m2_work"),
    ("loss counted on one device only", DP, 1, "flag", "counted", "cross_entropy_loss"),
    ("replica of a weight not updated", DP, 1, "entry", "entry 4 of weights", "layers.1.bias"),
    ("weight in another optimizer group by the program", TP, 0, "weight group", "layers_0_bias", "layers.0.bias"),
    ("use of a tied weight left out", TP, 0, "piece", "entry 0", "the gradient of transformer.wte.weight"),
)
for name, spec, rank, kind, what, *culprits in CHOSEN:
    model = "gpt2:size=tiny" if "tied" in name else "mlp"
    TABLE.append(Mutation(name, model, spec, tuple(culprits), chosen(rank, kind, what)))


# Communication.


@mutation(TP, "linear_product_1")
def all_reduce_dropped_on_one_device(exact: Compiled, code: list[Code]) -> None:
    skip_collective(code[1], "linear_product_1_work")


@mutation(TP4, "of member 1 of the group is", model="mlp:classes=8")
def members_of_a_gather_exchanged(exact: Compiled, code: list[Code]) -> None:
    for mine in code:
        change(mine, p.Collective, {"kind": "all_gather"}, group=(0, 2, 1, 3))


@mutation(PIPE, "linear[0:4, 0:64] on device 1, microbatch 0", "linear is read as [0:4, 0:64], but it has [4:8")
def arrived_messages_swapped(exact: Compiled, code: list[Code]) -> None:
    waits = [n for n, i in enumerate(code[1]) if isinstance(i, p.Wait) and i.out.name == "linear"][:2]
    a, b = (code[1][n] for n in waits)
    code[1][waits[0]] = replace(a, work=b.work)
    code[1][waits[1]] = replace(b, work=a.work)
    received = [n for n, i in enumerate(code[1]) if isinstance(i, p.Recv)][:2]
    code[1].insert(received[0] + 1, code[1].pop(received[1]))


# What runs, and when.


@mutation(TP, "s3")
def backward_before_its_forward(exact: Compiled, code: list[Code]) -> None:
    code[0].insert(at(code[0], p.Forward, task="s3"), code[0].pop(at(code[0], p.Backward, task="s3")))


@mutation(DP, "gelu", "linear_product_1")
def op_dropped_from_the_schedule_too(exact: Compiled, code: list[Code]) -> Compiled:
    functions = [remove_op(f, "gelu") if any(o.name == "gelu" for o in f.ops) else f for f in exact.program.functions]
    segments = [replace(s, ops=tuple(o for o in s.ops if o.name != "gelu")) for s in exact.schedule.segments]
    changed = replace(exact, program=replace(exact.program, functions=tuple(functions)))
    return replace(changed, schedule=replace(exact.schedule, segments=segments))


# What is computed.


@mutation(DP, "scaled_dot_product_attention", model="gpt2:size=tiny")
def attention_with_the_wrong_scale(exact: Compiled, code: list[Code]) -> Compiled:
    op = next(o for o in exact.graph.forward_ops if "attention" in o.target)
    return edit_op(exact, op.name, lambda op: replace(op, kwargs=(("scale", 0.1),)))


@mutation(TP, "layers.0.weight")
def wrong_rows_of_a_weight_at_rest(exact: Compiled, code: list[Code]) -> Compiled:
    """Device 1 holds what device 0 holds."""
    first, second = exact.program.devices
    weights = tuple(replace(w, box=v.box) for w, v in zip(second.weights, first.weights, strict=True))
    devices = (first, replace(second, weights=(weights[0], *second.weights[1:])))
    return replace(exact, program=replace(exact.program, devices=devices))


@mutation(DP, "rand_like", model="noise")
def random_numbers_of_the_wrong_part(exact: Compiled, code: list[Code]) -> Compiled:
    tables = exact.emitted.tables
    assert tables[0].draws != tables[1].draws
    tables = (tables[0], replace(tables[1], draws=tables[0].draws))
    return rewritten(exact, replace(exact.emitted, tables=tables))


# Updates.


def with_table(exact: Compiled, rank: int, tensor: str, **new: Any) -> Compiled:
    """Change an entry of a device's table of weights in what was emitted."""
    tables = list(exact.emitted.tables)
    weights = [{**w, **new} if w["tensor"] == tensor else w for w in tables[rank].weights]
    tables[rank] = replace(tables[rank], weights=weights)
    return rewritten(exact, replace(exact.emitted, tables=tuple(tables)))


@mutation(DP, "head.weight")
def weight_frozen_on_one_device(exact: Compiled, code: list[Code]) -> Compiled:
    return with_table(exact, 1, "head.weight", trained=False)


@mutation(TP, "gelu_1")
def value_freed_before_its_last_read(exact: Compiled, code: list[Code]) -> None:
    code[0].insert(at(code[0], p.Forward, task="s2"), p.Free((named("gelu_1"),)))


# What was emitted, where the program is right.


@mutation(PIPE, "linear")
def tags_of_messages_swapped_in_the_tables(exact: Compiled, code: list[Code]) -> Compiled:
    first, second = exact.emitted.tables
    messages = [first.messages[1], first.messages[0], *first.messages[2:]]
    tables = (replace(first, messages=messages), second)
    return rewritten(exact, replace(exact.emitted, tables=tables))


@mutation(DP, "linear_2[0:8, 0:10] is made")
def other_function_in_the_emitted_text(exact: Compiled, code: list[Code]) -> Compiled:
    files = dict(exact.emitted.files)
    files["segments.py"] = files["segments.py"].replace("F.gelu(", "F.silu(").replace(", approximate='none'", "")
    return rewritten(exact, replace(exact.emitted, files=files))


@mutation(PIPE, "labels[4:8] on device 1, microbatch 1", "labels is read as [4:8]")
def labels_of_another_microbatch(exact: Compiled, code: list[Code]) -> None:
    change(code[1], p.Load, {"tensor": "labels", "out": "labels_m1"}, box=((0, 4),))


@mutation(DP, "the gradient of layers.0.weight", "the gradient of layers.1.weight")
def bucket_reduced_twice(exact: Compiled, code: list[Code]) -> None:
    """The sum over two replicas of what is a sum already."""
    for mine in code:
        n, bucket = bucket_of(mine)
        waits = {i.work: m for m, i in enumerate(mine) if isinstance(i, p.Wait) and i.work in bucket.works}
        once, twice = ([w._replace(number=k) for w in waits] for k in (8, 9))
        done = [replace(mine[m], out=o._replace(is_handle=False)) for m, o in zip(waits.values(), once, strict=True)]
        for m, work in zip(waits.values(), twice, strict=True):
            mine[m] = replace(mine[m], work=work)
        again = replace(bucket, works=tuple(twice), sources=tuple(d.out for d in done))
        mine[n + 1 : n + 1] = [*done, again]
