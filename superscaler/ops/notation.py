"""The notation of op rules: `b.. k+, n k -> b.. n` names each dim of the tensor operands and of the results.

A letter is an index. `+` marks it as summed, `^` as frozen. An unmarked letter is spatial if every result has it, and
frozen otherwise. `b..` stands for all remaining dims, aligned at the right; a dim of size 1 is broadcast. `(h d)` is a
dim that is a product, major to minor; the sizes of all its letters but one come from elsewhere. `_` is a dim with an
index of its own that cannot be cut; in an operand it is read whole. `1` is a dim of size 1. A call may leave out the
last operands.

`s<=l` marks index s as frozen and bounded: element l of the results needs the elements of s up to l only, as the keys
in causal attention. Parts read s up to their end on l. If l has another size they read s whole.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from superscaler.errors import InputError
from superscaler.ir.op import Mark

Shape = tuple[int, ...]
Dim = tuple[str, ...] | None
_TOKEN = re.compile(r"\(([^)]*)\)|(\S+)")
_SCAN = re.compile(r"->|[(),]|[^\s(),]+?(?=->|[\s(),]|$)")
_WORD = re.compile(r"_|1|([A-Za-z]\w*(?:\.\.)?)([+^]|<=[A-Za-z]\w*)?")
_UNTIL = re.compile(r"(\w+)<=(\w+)")


@dataclass(frozen=True, slots=True)
class Signature:
    """The letters of each dim of each operand (None: read whole) and result, and their sizes and marks.

    `until`: for each bounded letter, the letter that bounds it.
    """

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]
    marks: Mapping[str, Mark]
    until: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Word:
    """A letter in a notation: its mark, its place, the number of its operand, and whether it is in a product."""

    letter: str
    mark: str
    at: int
    operand: int
    is_factor: bool


def check(notation: str) -> None:
    """Raise InputError, with a caret below the place, for a notation without a meaning."""
    words, first, count = _words(notation)
    # The result of an op without operands (random numbers by element) can be cut on any index.
    is_source = not notation.partition("->")[0].strip()
    for n, word in enumerate(words):
        before = [w.letter for w in words[:n] if w.operand == word.operand]
        same = [w for w in words if w.letter == word.letter]
        until = word.mark.removeprefix("<=") if word.mark.startswith("<=") else ""
        marks = {w.mark for w in same} - {""}
        results = {w.operand for w in same if w.operand >= first}
        name, is_result, is_read = word.letter, word.operand >= first, any(w.operand < first for w in same)
        is_stretch, is_named = ".." in name, name not in "_1"
        choice = f"{name}^" if results else f"{name}+ where the results of parts add up, or {name}^ where it is whole"
        table = (
            (word.is_factor and (is_stretch or name == "_"), f"{name} cannot be in a product"),
            (is_stretch and any(".." in w for w in before), "one operand has at most one .."),
            (is_named and name in before, f"{name} stands twice in one operand"),
            (len(marks) > 1, f"{name} is marked {' and '.join(sorted(marks))}"),
            (
                until
                and not all(
                    any((w.letter, w.mark, w.operand) == (until, "", k) for w in words) for k in range(first, count)
                ),
                f"{until} is not in every result, or it is marked",
            ),
            (until and bool(results), f"{name}<={until} is in a result, which would not be whole"),
            (
                is_named and not is_read and marks != {"^"} and not is_source,
                f"{name} is in no operand; a new dim is {name}^ or _",
            ),
            (is_result and "+" in marks, f"{name}+ is summed, so it is in no result"),
            (is_named and not marks and len(results) < count - first, f"{name} is not in every result; write {choice}"),
        )
        for is_wrong, problem in table:
            if is_wrong:
                raise _malformed(notation, word.at, problem)


def _words(notation: str) -> tuple[list[_Word], int, int]:
    """Return the words, the number of the first result, and the number of operands and results together."""
    words: list[_Word] = []
    opened, operand, first = -1, 0, 0
    for found in _SCAN.finditer(notation):
        text, at, word = found[0], found.start(), _WORD.fullmatch(found[0])
        if text in ("->", ",") and opened < 0 and not (text == "->" and first):
            operand += 1
            first = operand if text == "->" else first
        elif text == "(" and opened < 0:
            opened = at
        elif text == ")" and opened >= 0:
            opened = -1
        elif word:
            words.append(_Word(word[1] or text, word[2] or "", at, operand, opened >= 0))
        elif text in "->,(":
            raise _malformed(notation, *((opened, "this ( is not closed") if opened >= 0 else (at, "a second ->")))
        else:
            problem = "this ) closes nothing" if text == ")" else f"{text} is no letter with .., + or ^ behind it"
            raise _malformed(notation, at, problem)
    if opened >= 0 or not first:
        raise _malformed(notation, *((opened, "this ( is not closed") if first else (len(notation), "-> is missing")))
    return words, first, operand + 1


def _malformed(notation: str, at: int, problem: str) -> InputError:
    return InputError(f"the notation has no meaning: {problem}.\n  {notation}\n  {' ' * at}^")


@lru_cache(maxsize=4096)
def _tokens(side: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return the tokens of each operand: for each dim, its words."""
    operands = [part.strip() for part in side.split(",")]
    return tuple(tuple(tuple((m[1] if m[2] is None else m[2]).split()) for m in _TOKEN.finditer(o)) for o in operands)


def resolve(
    notation: str,
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    sizes: Mapping[str, int] | None = None,
    broadcasts: bool = True,
    given: Sequence[int] | None = None,
) -> Signature | None:
    """Return the signature of a call with these shapes, or None if the notation does not fit them.

    Unless it `broadcasts`, a dim of size 1 fits only if its letters are 1 everywhere. `given`: the operands of the
    notation that the call has, if they are not the first ones.
    """
    plain = without_until(notation)
    left, right = (_tokens(side.strip()) for side in plain.split("->"))
    left = left if given is None else tuple(left[k] for k in given if k < len(left))
    if len(inputs) > len(left) or len(outputs) != len(right):
        return None
    found = _Sizes({"1": 1, **(sizes or {})}, broadcasts)
    sides = []
    for shapes, patterns, prefix in ((inputs, left, ""), (outputs, right, "_")):
        rows = [_operand(shape, p, f"{prefix}{n}") for n, (shape, p) in enumerate(zip(shapes, patterns, strict=False))]
        sides.append(rows)
    if any(row is None for rows in sides for row in rows):
        return None
    pairs = [[row for row in rows if row is not None] for rows in sides]
    if not all(found.learn(size, dim) for rows in pairs for row in rows for size, dim in row):
        return None
    found.solve([pair for rows in pairs for row in rows for pair in row])
    if not all(found.fits(size, dim) for rows in pairs for row in rows for size, dim in row):
        return None
    ins, outs = (tuple(tuple(found.strip(size, dim) for size, dim in row) for row in rows) for rows in pairs)
    marks = _marks(plain, ins, outs)
    until = {
        letter: other
        for letter, other in untils(notation).items()
        if marks.keys() >= {letter, other} and found.sizes[letter] == found.sizes[other]
    }
    return Signature(ins, outs, found.sizes, marks, until)


def untils(notation: str) -> dict[str, str]:
    """Return the bounded letters (`s<=l`), each with the letter that bounds it."""
    return dict(_UNTIL.findall(notation))


def without_until(notation: str) -> str:
    """Return the notation with all bounded dims read whole.

    >>> without_until("b l e^, b s<=l e^ -> b l")
    'b l e^, b s^ e^ -> b l'
    """
    return _UNTIL.sub(r"\1^", notation)


def misfit(notation: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> str:
    """Return the reason why a notation does not fit a call with these shapes, in which no dim broadcasts."""
    notation = without_until(notation)
    sizes: dict[str, tuple[int, str]] = {"1": (1, "the notation")}
    for kind, side, shapes in zip(("operand", "result"), notation.split("->"), (inputs, outputs), strict=True):
        patterns, texts = _tokens(side.strip()), side.split(",")
        if len(shapes) > len(patterns) or (kind == "result" and len(shapes) < len(patterns)):
            return f"{len(shapes)} {kind}s, and the notation has {len(patterns)}"
        for n, (shape, pattern, text) in enumerate(zip(shapes, patterns, texts, strict=False)):
            row = _operand(shape, pattern, "")
            if row is None:
                return f"{kind} {n} has {len(shape)} dims, {shape}, and the notation '{text.strip()}'"
            for size, dim in row:
                if dim is not None and len(dim) == 1:
                    known, where = sizes.setdefault(dim[0], (size, f"{kind} {n}"))
                    if known != size:
                        return f"{dim[0]} is {known} in {where} and {size} in {kind} {n}, {shape}"
    return f"a product has another size than its letters; the shapes are {list(inputs)} -> {list(outputs)}"


def frozen(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Signature:
    """Return the signature of an op without a rule: everything is read whole, no index can be cut."""
    ins = ", ".join(" ".join("_" for _ in shape) for shape in inputs)
    outs = ", ".join(" ".join("_" for _ in shape) for shape in outputs)
    signature = resolve(f"{ins} -> {outs}", inputs, outputs)
    assert signature is not None
    return signature


def _operand(shape: Shape, pattern: Sequence[tuple[str, ...]], number: str) -> list[tuple[int, Dim]] | None:
    """Return (size, letters) of each dim of an operand; None where the number of dims does not fit."""
    stretch = [k for k, words in enumerate(pattern) if words and words[0].rstrip("+^").endswith("..")]
    extra = len(shape) - len(pattern) + len(stretch)
    if (not stretch and extra) or extra < 0:
        return None
    dims: list[Dim] = []
    for words in pattern:
        if words and words[0].rstrip("+^").endswith(".."):
            stem = words[0].rstrip("+^")
            dims += [(f"{stem}{extra - k}",) for k in range(extra)]
        elif words == ("_",):
            dims.append((f"_{number}.{len(dims)}",) if number.startswith("_") else None)
        else:
            dims.append(tuple(word.rstrip("+^") for word in words))
    return list(zip(shape, dims, strict=True))


def operand_dims(notation: str, extra: int) -> list[list[Dim]]:
    """Return the letters of each dim of each operand, where `..` stands for `extra` dims."""
    found = []
    for pattern in _tokens(without_until(notation).split("->")[0].strip()):
        is_stretched = any(words and ".." in words[0] for words in pattern)
        row = _operand((1,) * (len(pattern) + (extra - 1) * is_stretched), pattern, "")
        found.append([dim for _, dim in row or ()])
    return found


class _Sizes:
    """The sizes of letters, learned from dims of one letter. A dim of size 1 that broadcasts determines nothing."""

    def __init__(self, sizes: dict[str, int], broadcasts: bool) -> None:
        self.sizes = sizes
        self.broadcasts = broadcasts

    def learn(self, size: int, dim: Dim) -> bool:
        if dim is None or len(dim) != 1 or (size == 1 and self.broadcasts):
            return True
        return self.sizes.setdefault(dim[0], size) == size

    def solve(self, dims: Sequence[tuple[int, Dim]]) -> None:
        """Learn the only unknown letter of a product."""
        alone = {dim[0] for _, dim in dims if dim is not None and len(dim) == 1}
        for size, dim in dims:
            unknown = [letter for letter in dim or () if letter not in self.sizes and letter not in alone]
            if len(unknown) == 1 and size > 1:
                self.sizes[unknown[0]] = max(size // prod(self.sizes.get(letter, 1) for letter in dim or ()), 1)

    def fits(self, size: int, dim: Dim) -> bool:
        if dim is None or (size == 1 and self.broadcasts):
            return True
        return prod(self.sizes.get(letter, 1) for letter in dim) == size

    def strip(self, size: int, dim: Dim) -> Dim:
        """Leave out letters of size 1, and all of a dim of size 1, which is broadcast or has no slot."""
        if dim is None or size == 1:
            return None if dim is None else ()
        return tuple(letter for letter in dim if self.sizes.get(letter, 1) > 1)


def _marks(notation: str, inputs: tuple[tuple[Dim, ...], ...], outputs: tuple[tuple[Dim, ...], ...]) -> dict[str, Mark]:
    written = {word.rstrip("+^"): word[-1] for word in re.split(r"[\s,()]+|->", notation) if word[-1:] in ("+", "^")}
    results = [{letter for dim in output for letter in dim or ()} for output in outputs]
    marks: dict[str, Mark] = {}
    for letter in dict.fromkeys(w for row in (*outputs, *inputs) for dim in row for w in dim or ()):
        stem = letter.rstrip("0123456789") if ".." in letter else letter
        sign = written.get(stem, "")
        if sign == "+" and not any(letter in result for result in results):
            marks[letter] = "summed"
        elif sign or letter.startswith("_") or not all(letter in result for result in results):
            marks[letter] = "frozen"
        else:
            marks[letter] = "spatial"
    return marks
