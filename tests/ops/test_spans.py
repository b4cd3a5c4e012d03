"""Refinement of dims; the grammar of notations, and what a notation says of shapes."""

from __future__ import annotations

import re

import pytest

from superscaler.errors import InputError
from superscaler.frontend import infer
from superscaler.frontend.capture import capture
from superscaler.ops.notation import check, frozen, resolve
from superscaler.ops.spans import Span, leaves, unify
from superscaler.ops.table import ROWS
from tests.frontend.test_cuts import small_models


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


def test_without_a_rule_everything_is_whole() -> None:
    found = frozen([(2, 3), ()], [(6,)])
    assert found.inputs == ((None, None), ())
    assert set(found.marks.values()) == {"frozen"}


@pytest.mark.parametrize(
    ("notation", "at", "told"),
    [
        ("b s h", 5, "-> is missing"),
        ("b -> b -> b", 7, "a second ->"),
        ("b (s h -> b", 2, "this ( is not closed"),
        ("b ((s)) -> b", 2, "this ( is not closed"),
        ("b s) -> b", 3, "this ) closes nothing"),
        ("b $ -> b", 2, "$ is no letter"),
        ("b^^ -> b", 0, "b^^ is no letter"),
        ("2b -> 2b", 0, "2b is no letter"),
        ("b -> _^", 5, "_^ is no letter"),
        ("b.. c.. -> b.. c..", 4, "one operand has at most one .."),
        ("b (c..) -> b c..", 3, "c.. cannot be in a product"),
        ("b (_ s) -> b s", 3, "_ cannot be in a product"),
        ("b b -> b", 2, "b stands twice in one operand"),
        ("b+ c^, b^ -> c^", 0, "b is marked + and ^"),
        ("b -> b n", 7, "n is in no operand; a new dim is n^ or _"),
        ("b s+ -> b s", 10, "s+ is summed, so it is in no result"),
        ("b l, b s<=z -> b l", 7, "z is not in every result, or it is marked"),
        ("b l, s<=b -> b l s", 5, "s<=b is in a result, which would not be whole"),
        ("b s h -> b s", 4, "h is not in every result; write h+ where the results of parts add up, or h^"),
        ("b s -> b s, b", 2, "s is not in every result; write s^"),
    ],
)
def test_a_malformed_notation_is_shown_with_a_caret(notation: str, at: int, told: str) -> None:
    with pytest.raises(InputError) as error:
        check(notation)
    said, shown, caret = str(error.value).splitlines()
    assert told in said
    assert shown == f"  {notation}"
    assert caret == "  " + " " * at + "^"


@pytest.mark.parametrize(
    "notation",
    ["b.. k+, n k -> b.. n", "k+, k -> ", "b s^ -> b s, b", "b 1 1, (h d) -> b 1 (h d)", "b->b n^"],
)
def test_what_has_a_meaning_passes(notation: str) -> None:
    check(notation)


def test_our_own_rules_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {row.notation for row in ROWS.values() if isinstance(row.notation, str)}
    monkeypatch.setattr(infer, "resolve", lambda notation, *rest: seen.add(notation) or resolve(notation, *rest))
    for module, args in small_models()[:4]:
        capture(module, args)
    assert len(seen) > 40
    for notation in seen:
        # A dim that is made needs a row that is placed, which no operator of a user's is.
        check(re.sub(r"\bmd\d", r"\g<0>^", notation))


@pytest.mark.parametrize(
    ("notation", "operands", "result", "fits"),
    [
        ("m k+, k n -> m n", [(2, 3), (4, 5)], (2, 5), False),
        ("m k+, k n -> m n", [(2, 3, 3), (3, 5)], (2, 5), False),
        # The only unknown letter of a product is solved.
        ("b (h d), d -> b (h d)", [(2, 12), (4,)], (2, 12), True),
        ("b (h d), d -> b (h d)", [(2, 12), (5,)], (2, 12), False),
        ("b (h d) -> b (h d)", [(2, 12)], (2, 12), False),
        ("b 1 -> b", [(2, 1)], (2,), True),
        ("b 1 -> b", [(2, 3)], (2,), False),
        ("b h, h -> b h", [(2, 3), (1,)], (2, 3), True),
    ],
)
def test_a_notation_fits_some_shapes(
    notation: str, operands: list[tuple[int, ...]], result: tuple[int, ...], fits: bool
) -> None:
    found = resolve(notation, operands, [result])
    assert (found is not None) == fits
    assert found is None or "(h d)" not in notation or found.sizes["h"] == 3


def test_broadcasting_is_a_choice() -> None:
    assert resolve("b h, h -> b h", [(2, 3), (1,)], [(2, 3)], broadcasts=False) is None
    assert resolve("b h, h -> b h", [(2, 1), (1,)], [(2, 1)], broadcasts=False) is not None
