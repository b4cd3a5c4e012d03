"""Every rule is true: calls of every operator that has one are executed in parts, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from superscaler.emit.expressions import RANDOM, Local, draw, expression
from superscaler.frontend.normalize import normalize
from superscaler.frontend.proof import Run, ops_of, prove, record
from superscaler.frontend.rules import RULES
from superscaler.frontend.trace import Call, Spec, Trace, Var
from superscaler.ir.graph import Op, PTensor
from superscaler.ir.mask import Box
from superscaler.runtime import functional
from tests.frontend.samples import FROZEN, SAMPLES, Draw, Sample

Case = tuple[Op, dict[str, PTensor], list[Tensor], Run]


def function(target: str) -> Any:
    space, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def executor(op: Op, tensors: dict[str, PTensor]) -> Run:
    """Return what runs the expression that is emitted for a part."""

    def run(box: Box, pieces: Sequence[Tensor], results: Sequence[tuple[int, ...]]) -> list[Tensor]:
        names = [f"x{k}" for k in range(len(pieces))]
        local = Local(op, box, names, [tuple(p.shape) for p in pieces], results, tensors, "random")
        scope = {"torch": torch, "F": F, "functional": functional, **dict(zip(names, pieces, strict=True))}
        if op.target in RANDOM:
            where, extents, shape = draw(local)
            scope["random"] = functional.uniform(1, 2, 3, where, extents, "cpu").reshape(shape)
        found = eval(expression(local), scope)
        return [found] if isinstance(found, Tensor) else list(found)

    return run


def refine(trace: Trace, values: dict[str, Tensor], draw: Draw) -> None:
    """Make some inputs views, so that their dims of size 4 or 6 are products of two indices."""
    for name, value in list(values.items()):
        factors = [
            ({4: (2, 2), 6: draw.one_of((2, 3), (3, 2))}.get(n, (n,)), (n,))[draw.one_of(0, 1)] for n in value.shape
        ]
        shape = tuple(f for dim in factors for f in dim)
        if shape == tuple(value.shape) or trace.kinds[name] == "buffer":
            continue
        source = f"{name}_parts"
        values[source] = values.pop(name).reshape(shape)
        trace.specs[source], trace.kinds[source] = Spec(shape, value.dtype), "input"
        del trace.kinds[name]
        args = (Var(source), tuple(value.shape))
        view = Call(f"view_{name}", "aten.view.default", function("aten.view.default"), args, {}, (name,), "", "")
        trace.calls.insert(0, view)


def cases(sample: Sample, draw: Draw) -> list[Case]:
    """Draw a call, and return the ops that it is captured as, with the values that they read."""
    args, kwargs = sample.make(draw)
    torch.manual_seed(0)
    trace, values = record(sample.source, function(sample.source), args, kwargs)
    expected = function(sample.source)(*args, **kwargs)
    refine(trace, values, draw)
    normalize(trace)
    ops, tensors = ops_of(trace)
    found: list[Case] = []
    for op in ops:
        run, own = executor(op, tensors), [values[o.tensor] for o in op.inputs]
        found.append((op, tensors, own, run))
        results = run(tuple((0, i.size) for i in op.indices), own, [tensors[o.tensor].shape for o in op.outputs])
        values.update(zip((o.tensor for o in op.outputs), results, strict=True))
    if not any(op.target in RANDOM for op in ops):
        first = expected if isinstance(expected, Tensor) else expected[0]
        torch.testing.assert_close(values[trace.loss], first, rtol=1e-9, atol=1e-9, equal_nan=True)
    return found


def check(name: str, random: Random) -> Counter[str]:
    """Prove the ops of one call of an operator; return how many indices of each may be cut."""
    cut: Counter[str] = Counter()
    draw = Draw(random)
    for op, tensors, values, run in cases(random.choice(SAMPLES[name]), draw):
        failure = prove(op, tensors, values, run)
        assert failure is None, str(failure)
        cut[op.target] += sum(i.mark != "frozen" for i in op.indices)
    return cut


def test_every_rule_has_a_sample() -> None:
    assert set(RULES) == set(SAMPLES)


def attack(name: str, examples: int) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.randoms(use_true_random=False))
    def each(random: Random) -> None:
        seen.update(check(name, random))

    each()
    assert (seen[name] > 0) == (name not in FROZEN), f"{seen[name]} indices of calls of {name} could be cut"


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    attack(name, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_rule_on_many_calls(name: str) -> None:
    attack(name, 60)
