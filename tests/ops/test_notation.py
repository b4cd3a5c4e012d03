"""The grammar of notations, and what a notation says of shapes."""

from __future__ import annotations

import re

import pytest

from superscaler.errors import InputError
from superscaler.frontend import infer
from superscaler.frontend.capture import capture
from superscaler.ops.notation import check, resolve
from superscaler.ops.table import ROWS
from tests.frontend.examples import gpt2, llama, tokens
from tests.frontend.test_cuts import small_models


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
    for module, args in small_models():
        capture(module, args)
    for module in (gpt2(), llama()):
        capture(module, (), tokens())
    assert len(seen) > 40
    for notation in seen:
        # A dim that is made needs a row that is placed, which no operator of a user's is.
        check(re.sub(r"\bmd\d", r"\g<0>^", notation))


def test_the_only_unknown_letter_of_a_product_is_solved() -> None:
    found = resolve("b (h d), d -> b (h d)", [(2, 12), (4,)], [(2, 12)])
    assert found is not None
    assert found.sizes["h"] == 3
    assert resolve("b (h d), d -> b (h d)", [(2, 12), (5,)], [(2, 12)]) is None
    assert resolve("b (h d) -> b (h d)", [(2, 12)], [(2, 12)]) is None


def test_one_is_a_size_and_broadcasting_is_a_choice() -> None:
    assert resolve("b 1 -> b", [(2, 1)], [(2,)]) is not None
    assert resolve("b 1 -> b", [(2, 3)], [(2,)]) is None
    assert resolve("b h, h -> b h", [(2, 3), (1,)], [(2, 3)]) is not None
    assert resolve("b h, h -> b h", [(2, 3), (1,)], [(2, 3)], broadcasts=False) is None
    assert resolve("b h, h -> b h", [(2, 1), (1,)], [(2, 1)], broadcasts=False) is not None
