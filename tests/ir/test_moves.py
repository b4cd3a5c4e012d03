"""What moves evenly is what its samples say, and the loops of code are its code, by arithmetic of this file alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import superscaler as ss
from superscaler.compiler import compile_graph
from superscaler.emit.loops import Section, runs_of
from superscaler.ir.instructions.fields import evenly, mover
from superscaler.ir.loops import Loop
from superscaler.ir.program import Accumulate, Forward, Free, Instruction, Send, Task, Value
from superscaler.plans import resolve
from tests.helpers.graphs import graph_of

Place = tuple[int, ...]
Data = Callable[[Place], Any]
numbers = st.integers(-4, 4)


def even_data(axes: int) -> st.SearchStrategy[Data]:
    """Return data in any nesting, each as a function of the place."""
    steps = st.lists(numbers, min_size=axes, max_size=axes)
    flags = st.lists(st.booleans(), min_size=axes, max_size=axes)

    def number(base: int, by: Sequence[int]) -> Data:
        return lambda place: base + sum(n * step for n, step in zip(place, by, strict=True))

    def flag(base: bool, kept: Sequence[bool]) -> Data:
        return lambda place: base and all(keeps or n == 0 for n, keeps in zip(place, kept, strict=True))

    def joined(some: Sequence[Data]) -> Data:
        return lambda place: tuple(one(place) for one in some)

    def named(number: Data) -> Data:
        return lambda place: Value("x", microbatch=number(place))

    ints = st.builds(number, numbers, steps)
    leaves = ints | st.builds(flag, st.booleans(), flags) | st.sampled_from(["a", None]).map(lambda x: lambda _: x)
    return st.recursive(leaves | ints.map(named), lambda inner: st.lists(inner, max_size=3).map(joined), max_leaves=8)


@given(
    st.integers(1, 3).flatmap(
        lambda axes: st.tuples(even_data(axes), st.lists(st.integers(0, 5), min_size=axes, max_size=axes))
    )
)
def test_samples_determine_the_data_of_all_places(drawn: tuple[Data, list[int]]) -> None:
    data, place = drawn[0], tuple(drawn[1])
    zero = (0,) * len(place)
    samples = [data(zero), *(data((*zero[:k], 1, *zero[k + 1 :])) for k in range(len(place)))]
    move, wanted = mover(samples), data(place)
    assert (move is None) == all(sample == samples[0] for sample in samples)
    for found in (samples[0] if move is None else move(*place), evenly(samples, place)):
        assert found == wanted
        assert kinds(found) == kinds(wanted)


def kinds(value: Any) -> Any:
    return (type(value), *map(kinds, value)) if isinstance(value, tuple) else type(value)


def test_data_of_other_lengths_do_not_move_evenly() -> None:
    with pytest.raises(ValueError, match="shorter"):
        mover([(1, 2), (1,)])


def along(first: Any, second: Any, turn: int) -> Any:
    if first == second:
        return first
    if isinstance(first, tuple):
        return getattr(first, "_make", tuple)([along(a, b, turn) for a, b in zip(first, second, strict=True)])
    return first + turn * (second - first)


def repeated(first: Any, second: Any, turn: int) -> Any:
    """Return an instruction in a repetition of a loop, from those of the first two."""
    names = [f.name for f in fields(first) if f.compare]
    return type(first)(**{name: along(getattr(first, name), getattr(second, name), turn) for name in names})


def written_out(sections: Sequence[Section], sample: int) -> Iterator[Instruction]:
    for section in sections:
        for turn in range(section.count):
            for one, other in zip(section.rows, section.later or section.rows, strict=True):
                yield repeated(one[sample], other[sample], turn)


MLP = "mlp:layers=4,hidden=8,inputs=4,classes=4,batch=64"


@pytest.mark.parametrize(
    ("plan", "devices"),
    [
        # Compiled whole, and with loops beside those that were found before.
        ("pipeline_1f1b:microbatches=8", 2),
        ("pipeline_1f1b:microbatches=32", 4),
        ("hybrid:dp=2,tp=1,pp=2,microbatches=16", 4),
        ("zbv:microbatches=8", 2),
        ("gradient_accumulation:microbatches=4", 1),
    ],
)
def test_loops_and_folds_written_out_are_the_code(plan: str, devices: int) -> None:
    program = compile_graph(graph_of(MLP), resolve(plan), ss.Cluster.local(devices)).program
    codes = [[device.instructions for device in samples] for _, samples in program.groups]
    found = [runs_of(own) for own in codes]
    assert any(section.count > 2 for sections in found for section in sections)
    for own, sections in zip(codes, found, strict=True):
        for sample, code in enumerate(own):
            assert list(written_out(sections, sample)) == list(code)


@st.composite
def codes(draw: st.DrawFn) -> list[Instruction]:
    """Draw code in which bodies repeat, up to some instructions that are elsewhere, left out, or there twice."""
    code = list[Instruction]()
    for segment in range(draw(st.integers(1, 3))):
        start, step, size = draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(numbers)
        for m in range(start, start + step * draw(st.integers(1, 6)), step):
            x, y, total = Value("x", microbatch=m), Value("y", microbatch=m), Value("w", is_gradient=True)
            code.append(Forward(Task(segment, m), 0, (size * m,), (x,), (y,)))
            code += [Accumulate(total, total, y, True)] * draw(st.booleans())
            code += [Send(y, 1, m, 4, m)] * (segment == 1)
            code.append(Free((x, y)))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(code) - 1))
        i = code[at]
        moved = [replace(i, at=(draw(numbers),))] if isinstance(i, Forward) else [i]
        code[at : at + 1] = draw(st.sampled_from([[], [i, i], [Free((Value("z", microbatch=at),))], moved, moved]))
    return code


@given(codes())
def test_loops_of_any_code_written_out_are_the_code(code: list[Instruction]) -> None:
    assert list(written_out(runs_of([code]), 0)) == code
    assert list(written_out(runs_of([code, code]), 1)) == code


@given(st.integers(3, 9), numbers, st.integers(1, 3))
def test_a_body_that_repeats_is_one_loop(count: int, step: int, size: int) -> None:
    code: list[Instruction] = [
        Forward(Task(n, m), 0, (step * m,), (Value("x", microbatch=m),), ()) for m in range(count) for n in range(size)
    ]
    (section,) = [section for section in runs_of([code]) if section.rows]
    assert (len(section.rows), section.count) == (size, count)
    assert list(Loop(tuple(code[:size]), tuple(code[size : 2 * size]), count)) == code
