"""Refinement of dims, and the notation of rules."""

from __future__ import annotations

import pytest

from superscaler.ops.notation import frozen, resolve
from superscaler.ops.spans import Span, leaves, unify


def spans(*sizes: int) -> list[Span]:
    return [Span(size) for size in sizes]


@pytest.mark.parametrize(
    ("first", "second", "refined"),
    [
        ((384,), (3, 4, 32), [3, 4, 32]),
        ((6, 4), (3, 8), [3, 2, 4]),
        ((10, 3), (5, 6), [5, 2, 3]),
        ((2, 6), (4, 3), [2, 2, 3]),
        ((3, 4), (4, 3), None),
    ],
)
def test_unify_refines_both_or_says_no(
    first: tuple[int, ...], second: tuple[int, ...], refined: list[int] | None
) -> None:
    a, b = spans(*first), spans(*second)
    assert unify(a, b) == (refined is not None)
    if refined is None:
        assert ([s.size for s in leaves(a)], [s.size for s in leaves(b)]) == (list(first), list(second))
    else:
        assert leaves(a) == leaves(b)
        assert [s.size for s in leaves(a)] == refined


def test_ends_that_fit_are_unified_around_a_middle_that_does_not() -> None:
    a, b = spans(2, 3, 4, 5), spans(2, 4, 3, 5)
    assert not unify(a, b)
    assert leaves(a)[0] is leaves(b)[0]
    assert leaves(a)[-1] is leaves(b)[-1]
    assert leaves(a)[1] is not leaves(b)[1]


def test_later_refinements_reach_all_members() -> None:
    a, b, c = spans(12), spans(12), spans(3, 4)
    unify(a, b)
    unify(b, c)
    assert leaves(a) == leaves(c)


def test_notation_gives_letters_and_marks() -> None:
    found = resolve("b.. k+, n k -> b.. n", [(2, 1, 4), (5, 4)], [(2, 1, 5)])
    assert found is not None
    assert found.inputs == ((("b..2",), (), ("k",)), (("n",), ("k",)))
    assert found.outputs == ((("b..2",), (), ("n",)),)
    assert found.marks == {"b..2": "spatial", "n": "spatial", "k": "summed"}


def test_notation_that_does_not_fit_gives_nothing() -> None:
    assert resolve("m k+, k n -> m n", [(2, 3), (4, 5)], [(2, 5)]) is None
    assert resolve("m k+, k n -> m n", [(2, 3, 3), (3, 5)], [(2, 5)]) is None


def test_without_a_rule_everything_is_whole() -> None:
    found = frozen([(2, 3), ()], [(6,)])
    assert found.inputs == ((None, None), ())
    assert set(found.marks.values()) == {"frozen"}
