"""Every rule is true: calls of every operator that has one are executed in parts, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from superscaler.frontend.base.trace import Trace
from superscaler.frontend.rewrites.normalize import normalize
from superscaler.frontend.users.proof import Run, ops_of, prove, record
from superscaler.ir.mask import Box
from superscaler.ir.model import Op, PTensor
from superscaler.ir.op import Mark, Ref
from superscaler.ops import reductions
from superscaler.ops.call import Local
from superscaler.ops.row import Recipe, first, plain
from superscaler.ops.table import ROWS, parts_of, row_of
from superscaler.runtime import functional
from tests.helpers.sweeps import slow
from tests.ops.samples import FROZEN, SAMPLES, Draw, Sample

CLONE = Op("", "aten.clone.default", (Ref(0),), (), (), (), ())
Case = tuple[Op, dict[str, PTensor], list[Tensor], Run]


def function(target: str) -> Any:
    space, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def executor(op: Op, tensors: dict[str, PTensor]) -> Run:
    """Return what runs the expression that is emitted for a part."""

    def run(box: Box, pieces: Sequence[Tensor], results: Sequence[tuple[int, ...]]) -> list[Tensor]:
        names = [f"x{k}" for k in range(len(pieces))]
        parts = {key: str(part) for key, part in parts_of(op, box, tensors).items()}
        local = Local(op, box, names, [tuple(p.shape) for p in pieces], results, tensors, "random", parts)
        scope = {"torch": torch, "F": F, "functional": functional, **dict(zip(names, pieces, strict=True))}
        if random := row_of(op.target).random:
            where, extents, shape = random(op, box, tensors)
            scope["random"] = functional.draw(1, 2, 3, where, extents, "cpu").reshape(shape)
        found = eval(row_of(op.target).text(local), scope)
        return [found] if isinstance(found, Tensor) else list(found)

    return run


def refine(trace: Trace, values: dict[str, Tensor], draw: Draw) -> None:
    """Make some inputs views, so that their dims of size 4 or 6 are products of two indices."""
    for name, value in list(values.items()):
        factors = [
            ({4: (2, 2), 6: draw.one_of((2, 3), (3, 2))}.get(n, (n,)), (n,))[draw.one_of(0, 1)] for n in value.shape
        ]
        shape = tuple(f for dim in factors for f in dim)
        leaf = next(leaf for leaf in trace.leaves() if leaf.name == name)
        if shape == tuple(value.shape) or leaf.meta["kind"] == "buffer":
            continue
        source = f"{name}_parts"
        values[source] = values.pop(name).reshape(shape)
        parts = trace.leaf(source, "input", values[source])
        with trace.graph.inserting_before(trace.calls()[0]):
            view = trace.graph.call_function(torch.ops.aten.view.default, (parts, tuple(value.shape)))
        trace.name_call(view, f"view_{name}", {"module": "", "source": ""}, value)
        trace.replace(leaf, view)


def cases(sample: Sample, draw: Draw) -> list[Case]:
    """Draw a call, and return the ops that it is captured as, with the values that they read."""
    args, kwargs = sample.make(draw)
    torch.default_generator.manual_seed(0)
    trace, values = record(function(sample.source), args, kwargs)
    expected = function(sample.source)(*args, **kwargs)
    refine(trace, values, draw)
    normalize(trace)
    ops, tensors = ops_of(trace)
    found: list[Case] = []
    for op in ops:
        run, own = executor(op, tensors), [values[o.tensor] for o in op.inputs]
        found.append((op, tensors, own, run))
        results = run(tuple((0, i.size) for i in op.indices), own, [tensors[o.tensor].shape for o in op.outputs])
        check_memory(op.target, own, results)
        values.update(zip((o.tensor for o in op.outputs), results, strict=True))
    if not any(row_of(op.target).random for op in ops):
        first = expected if isinstance(expected, Tensor) else expected[0]
        torch.testing.assert_close(values[trace.loss.name], first, rtol=1e-9, atol=1e-9, equal_nan=True)
    return found


def check_memory(target: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Results of views lie in the memory of the first operand, all others in no operand's."""
    own = {x.untyped_storage().data_ptr() for x in results if x.numel()}
    shared = {k for k, x in enumerate(operands) if x.untyped_storage().data_ptr() in own}
    is_copied = row_of(target).is_view and not shared and not operands[0].is_contiguous()
    assert is_copied or shared == ({0} if row_of(target).is_view else set()), target


def check(name: str, random: Random) -> Counter[str]:
    """Prove the ops of one call of an operator; return how many indices of each may be cut."""
    cut: Counter[str] = Counter()
    for op, tensors, values, run in cases(random.choice(SAMPLES[name]), Draw(random)):
        failure = prove(op, tensors, values, run)
        assert failure is None, str(failure)
        cut[op.target] += sum(i.mark != "frozen" for i in op.indices)
    return cut


def attack(name: str, examples: int) -> None:
    """Check drawn calls of an operator, always the same ones."""
    seen: Counter[str] = Counter()

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def each(random: Random) -> None:
        seen.update(check(name, random))

    each()
    assert (seen[name] > 0) == (name not in FROZEN), f"{seen[name]} indices of calls of {name} could be cut"


def test_every_rule_has_a_sample() -> None:
    ruled = {name for name, row in ROWS.items() if row.notation is not None}
    assert ruled <= set(SAMPLES)
    others = [function(name) for name in SAMPLES if name not in ruled]
    assert all(torch.Tag.pointwise in operator.tags for operator in others)


def test_rows_know_what_shares_memory_as_torch_does() -> None:
    ours = {name for name, row in ROWS.items() if row.is_view and name.startswith("aten.")}
    schemas = {name: function(name)._schema for name in ROWS if name.startswith("aten.")}
    torchs = {name for name, schema in schemas.items() if any(r.alias_info for r in schema.returns)}
    # Its result has the memory of its operand, which its schema hides from autograd.
    assert ours - {"aten._unsafe_view.default"} == torchs


def test_rows_without_samples_know_what_shares_memory() -> None:
    x, labels, ids = torch.rand(4, 6), torch.tensor([0, 5, 2, 1]), torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]])
    q, rows, weights = torch.rand(1, 2, 4, 3), torch.rand(3, 1, 8, 6), torch.rand(4, 2)
    few, all_keys = x.amax(1), [(0, "all")]
    f = functional
    calls: dict[str, tuple[Any, Sequence[Tensor]]] = {
        "aten.as_strided.default": (torch.as_strided(x, (2, 2), (2, 1)), [x]),
        "aten.view.dtype": (x.view(torch.int32), [x]),
        "aten.clone.default": (eval(row_of("aten.clone.default").text(Local(CLONE, (), ["x"], [], [], {}))), [x]),
        "ss.identity": (eval(row_of("ss.identity").text(Local(CLONE, (), ["x"], [], [], {}))), [x]),
        "ss.attention_block": (f.attention_block(q, q, q, None, None, all_keys, 1), [q]),
        "ss.attention_gradient": (f.attention_gradient(q, q, q, None, q, few, None, all_keys, 1), [q, few]),
        "ss.attention_merge": (f.attention_merge(q, q[..., 0], q, q[..., 1]), [q]),
        "ss.class_sums": (f.class_sums(x, labels, few), [x, labels, few]),
        "ss.collect": (f.collect(rows, ids, weights), [rows, ids, weights]),
        "ss.dispatch": (f.dispatch(x, ids, 3, 1, 8), [x, ids]),
        "ss.exp_sum": (f.exp_sum(x, few, 1), [x, few]),
        "ss.expert_rows": (
            f.expert_rows(rows, ids[:3, :1], x[:3, None].expand(3, 10, 6), q.new_ones(3, 6, 5), "silu"),
            [rows],
        ),
        "ss.largest": (f.largest(x, 1, x.dtype), [x]),
        "ss.normalized": (f.normalized(x, few, few, 1, x.dtype), [x, few]),
        "ss.picked": (f.picked(x, labels), [x, labels]),
        "ss.row_losses": (f.row_losses(labels, few[0], few, ignore_index=9), [labels, few]),
    }
    # test_rule finds each other row with a sample in a call of its own.
    sampled = {op.target for name in FROZEN for s in SAMPLES[name] for op, *_ in cases(s, Draw(Random(0)))}
    assert set(ROWS) <= (SAMPLES.keys() - FROZEN) | sampled | calls.keys()
    for target, (made, operands) in calls.items():
        check_memory(target, operands, [made] if isinstance(made, Tensor) else made)


# Operators without a row have the rule of all that are pointwise.
POINTWISE = [name for name in SAMPLES if name not in ROWS]
SWEPT = {*POINTWISE} - {*POINTWISE[::6]} | {"aten.conv3d.padding", "aten.conv_transpose3d.input"}


@pytest.mark.parametrize("name", [slow(name)[0] if name in SWEPT else name for name in SAMPLES])
def test_rule(name: str) -> None:
    # A mean is one of three reductions, and is divided only where it is cut. Few distances have several channels.
    attack(name, 12 if name in ("aten.mse_loss.default", "aten.cdist.default") else 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_rule_on_many_calls(name: str) -> None:
    attack(name, 30)


def is_needless(case: Case, number: int) -> bool:
    """Tell whether an index that is frozen could be cut: as spatial where all results have it, as summed where none."""
    op, tensors, values, run = case
    has = {number in output.slots for output in op.outputs}
    if len(has) > 1 or not any(number in operand.slots for operand in op.inputs):
        return False
    mark: Mark = "spatial" if has == {True} else "summed"
    indices = (replace(i, mark=mark if n == number else "frozen") for n, i in enumerate(op.indices))
    return prove(replace(op, indices=tuple(indices), linear=()), tensors, values, run) is None


# Sums of what is bool, or of counts: right in this arithmetic, but no gradient asks for them.
NEEDLESS = frozenset(f"aten.{name}" for name in (
    "any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims", "bucketize.Tensor",
))  # fmt: skip


def freezes_needlessly(name: str) -> bool:
    """Tell whether each of some calls that have a frozen index has one that could be cut."""
    draws = [Random(seed) for seed in range(8)]
    own = [c for random in draws for c in cases(random.choice(SAMPLES[name]), Draw(random)) if c[0].target == name]
    frozen = [(c, [n for n, i in enumerate(c[0].indices) if i.mark == "frozen"]) for c in own]
    found = [any(is_needless(c, n) for n in numbers) for c, numbers in frozen if numbers]
    return bool(found) and all(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in NEEDLESS])
def test_no_rule_freezes_what_could_be_cut(name: str) -> None:
    assert not freezes_needlessly(name)


_ATTENTION, _CONVOLUTION = "aten.scaled_dot_product_attention.default", "aten.conv2d.default"
# What is changed, of which operator, to which rule; without a rule, the operator is emitted as it was captured.
MUTATIONS: list[tuple[str, str, str | Recipe | None]] = [
    ("a frozen mark removed", "aten._softmax.default", "d.. -> d.."),
    ("a frozen mark removed", "aten.group_norm.default", "b c r..^, c, c -> b c r.."),
    ("a frozen mark removed", "aten.instance_norm.default", "b c r.., c, c, c, c -> b c r.."),
    ("a summed mark dropped", "aten.linear.default", "b.. k, n k -> b.. n"),
    ("a summed mark added", "aten.amax.default", reductions._reduction(1, "+")),
    ("a summed mark added", _ATTENTION, "b.. l e^, b.. s+ e^, b.. s+ v, b.. l s -> b.. l v"),
    ("a bias added in each part", _CONVOLUTION, "b c+ _ _, o c+ _ _, o -> b o _ _"),
    ("two letters swapped", "aten.mm.default", "m k+, n k -> m n"),
    ("a whole dim cut", "aten.roll.default", "d.. -> d.."),
    ("a size not rewritten", "aten.view.default", None),
    ("groups not rewritten", _CONVOLUTION, None),
    ("the mean of a part", "aten.mean.default", None),
    ("a mask aligned at a part", _ATTENTION, None),
    ("ids looked up in a part", "aten.embedding.default", None),
]


def believe(name: str) -> None:
    attack(name, 20)
    assert not freezes_needlessly(name), f"{name} freezes an index that could be cut"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name", "rule"), MUTATIONS)
def test_a_wrong_rule_is_caught(
    what: str, name: str, rule: str | Recipe | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(ROWS[name], text=plain) if rule is None else replace(ROWS[name], notation=rule)
    monkeypatch.setitem(ROWS, name, wrong)
    with pytest.raises(AssertionError):
        believe(name)


@pytest.mark.slow
def test_a_wrong_claim_of_linearity_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "aten.tanh.default"
    monkeypatch.setitem(ROWS, name, replace(ROWS[name], linear=first))
    with pytest.raises(AssertionError, match=r"is not linear in operands \[0\]"):
        attack(name, 3)


def test_a_failure_names_the_cut_the_tensor_and_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "aten._softmax.default"
    monkeypatch.setitem(ROWS, name, replace(ROWS[name], notation="a b -> a b"))
    trace, values = record(torch.ops.aten._softmax.default, (torch.eye(2).double(), 1, False), {})
    (op,), tensors = ops_of(trace)
    failure = prove(op, tensors, [values["x0"]], executor(op, tensors))
    assert str(failure) == (
        "aten._softmax.default: batch x0.1 -> batch x0.1 cut on x0.1 in 1 + 1: "
        "result 0 is 1 at [0, 0], of the whole op 0.731058579"
    )
