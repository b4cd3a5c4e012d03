"""The recipes of operators whose notation depends on the call: computed from its shapes and arguments.

A recipe returns notation (see notation.py), with the sizes of letters that stand in products only; None means that
nothing can be cut. Sizes in the arguments of views, expansions and splits are computed again for each part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from superscaler.ops.notation import Shape
from superscaler.ops.spans import Span, leaves, unify


@dataclass(frozen=True, slots=True)
class Site:
    """One call with the shapes of its tensor operands, in the order of its arguments, and of its results.

    `masks` are the operands that are bool: as indices, they stand for other elements than numbers do.
    """

    target: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    ins: tuple[Shape, ...]
    outs: tuple[Shape, ...]
    masks: frozenset[int]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    @property
    def letters(self) -> list[str]:
        """Return a letter for each dim of the first operand."""
        return letters(len(self.ins[0]))

    def dims(self, position: int, name: str, default: Any = None) -> list[int]:
        """Return an argument that names dims of the first operand, as non-negative numbers; None names all."""
        rank = len(self.ins[0])
        value = self.argument(position, name, default)
        if value is None or value == []:
            return list(range(rank))
        return [d % max(rank, 1) for d in ([value] if isinstance(value, int) else value)]


Sized = tuple[str, Mapping[str, int]]
Recipe = Callable[[Site], str | Sized | None]


def letters(count: int) -> list[str]:
    return [f"d{k}" for k in range(count)]


def whole(names: Sequence[str], dims: Iterable[int]) -> str:
    """Return the dims of an operand with these ones read whole, or made whole."""
    chosen = set(dims)
    return " ".join("_" if d in chosen else name for d, name in enumerate(names))


def alike(site: Site, operand: str, result: str | None = None) -> str:
    """Return the notation of a call whose operands are all of one form, and whose results are: by default the same."""
    results = [operand if result is None else result] * len(site.outs)
    return f"{', '.join([operand] * len(site.ins))} -> {', '.join(results)}"


def _marked(names: Sequence[str], dims: Collection[int], mark: str) -> str:
    return " ".join(name + mark * (d in dims) for d, name in enumerate(names))


def elementwise(site: Site) -> str:
    return alike(site, "d..")


def view(site: Site) -> Sized:
    """Refine both shapes where they group the same elements; what does not fit is frozen there only."""
    (before, *_), after = site.ins, site.outs[0]
    left = [[Span(s)] if s > 1 else [] for s in before]
    right = [[Span(s)] if s > 1 else [] for s in after]
    for (a, b), (c, d) in _groups(before, after):
        unify([s for dim in left[a:b] for s in dim], [s for dim in right[c:d] for s in dim])
    names: dict[int, str] = {}
    sizes: dict[str, int] = {}
    for leaf in leaves(s for dims in (left, right) for dim in dims for s in dim):
        names.setdefault(id(leaf), f"v{len(names)}")
        sizes[names[id(leaf)]] = leaf.size
    kept = {id(leaf) for leaf in leaves(s for dim in left for s in dim)}

    def written(dim: list[Span], is_result: bool) -> str:
        words = [names[id(x)] + ("^" if is_result and id(x) not in kept else "") for x in leaves(dim)]
        return f"({' '.join(words)})"

    ins, outs = " ".join(written(dim, False) for dim in left), " ".join(written(dim, True) for dim in right)
    return f"{ins} -> {outs}", sizes


def _groups(before: Shape, after: Shape) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the smallest runs of dims of both shapes that hold the same number of elements."""
    first, second = ([*accumulate(shape, lambda x, y: x * y, initial=1)] for shape in (before, after))
    cuts = [(0, 0)]
    for k in range(1, len(first)):
        start = cuts[-1][1]
        match = next((j for j in range(start, len(second)) if second[j] == first[k]), None)
        if match is not None and first[k] != first[cuts[-1][0]]:
            cuts.append((k, match))
    cuts.append((len(before), len(after)))
    return [((a, b), (c, d)) for (a, c), (b, d) in pairwise(cuts)]


def permute(site: Site) -> str:
    return _reordered(site.dims(1, "dims"))


def transpose(site: Site) -> str:
    order = list(range(len(site.ins[0])))
    if order:
        a, b = site.dims(1, "dim0")[0], site.dims(2, "dim1")[0]
        order[a], order[b] = b, a
    return _reordered(order)


def reverse(site: Site) -> str:
    return _reordered(range(len(site.ins[0]))[::-1])


def _reordered(order: Sequence[int]) -> str:
    names = letters(len(order))
    return f"{' '.join(names)} -> {' '.join(names[d] for d in order)}"


def split(site: Site) -> Sized | str:
    """Equal segments are (segment^ rest): the rest can be cut; unequal ones are whole."""
    dim = site.dims(2, "dim", 0)[0]
    if len({shape[dim] for shape in site.outs}) > 1:
        return alike(site, whole(site.letters, [dim]))
    return _packed(site, dim, len(site.outs))


def gated(site: Site) -> Sized:
    """glu: the first half of a dim is gated by the second."""
    return _packed(site, site.dims(1, "dim", -1)[0], 2)


def _packed(site: Site, dim: int, count: int) -> Sized:
    """Return the notation where a dim of the operand is `count` times that of the results."""
    names = site.letters
    packed = [*names[:dim], f"(t^ {names[dim]})", *names[dim + 1 :]]
    return alike(site, " ".join(packed), " ".join(names)), {"t": count, names[dim]: site.outs[0][dim]}


def along(position: int, name: str = "dim", default: Any = None) -> Recipe:
    """Return the recipe of operators that need some dims whole, as are those whose size differs between operands."""

    def recipe(site: Site) -> str | None:
        names = site.letters
        if any(len(shape) != len(names) for shape in (*site.ins, *site.outs)):
            return None
        uneven = [d for d, sizes in enumerate(zip(*site.ins, *site.outs, strict=True)) if len(set(sizes)) > 1]
        return alike(site, whole(names, [*site.dims(position, name, default), *uneven]))

    return recipe


def softmax(site: Site) -> str:
    dims, names = site.dims(1, "dim"), site.letters
    return f"{_marked(names, dims, '^')} -> {' '.join(names)}"


def select(site: Site) -> str:
    """One place of a dim, or (unbind) each of them."""
    dim, names = site.dims(1, "dim", 0)[0], site.letters
    rest = " ".join(names[:dim] + names[dim + 1 :])
    return f"{whole(names, [dim])} -> {', '.join([rest] * len(site.outs))}"


def select_scatter(site: Site) -> str:
    dim, names = site.dims(2, "dim")[0], site.letters
    return f"{whole(names, [dim])}, {' '.join(names[:dim] + names[dim + 1 :])} -> {whole(names, [dim])}"


def pad(site: Site) -> str:
    touched = [len(site.ins[0]) - 1 - k // 2 for k, amount in enumerate(site.args[1]) if amount]
    return alike(site, whole(site.letters, touched))


def stack(site: Site) -> str:
    dim, names = site.argument(1, "dim", 0) % len(site.outs[0]), site.letters
    return alike(site, " ".join(names), " ".join([*names[:dim], "_", *names[dim:]]))


def reduction(position: int | None, mark: str = "^", default: Any = None) -> Recipe:
    """Return the recipe of reductions: over all dims, or those of an argument. Kept dims have size 1."""

    def recipe(site: Site) -> str | None:
        dims = set(range(len(site.ins[0])) if position is None else site.dims(position, "dim", default))
        names = site.letters
        if len(set(site.ins)) > 1:
            return None
        keeps = len(site.outs[0]) == len(names)
        rest = " ".join(("1" if d in dims else name) for d, name in enumerate(names) if keeps or d not in dims)
        return alike(site, _marked(names, dims, mark), rest)

    return recipe


def reduced_loss(site: Site) -> str | None:
    """A loss of elements: none reduced, summed, or (mean squared error, whose mean the emitter divides) averaged."""
    if site.outs[0]:
        return elementwise(site)
    return alike(site, "d..+", "") if len(set(site.ins)) == 1 else None


def cross_entropy(site: Site) -> str | None:
    """Labels are classes or probabilities of classes; not as a mean, whose denominator depends on all labels."""
    if site.argument(3, "reduction", 1) == 1 or len(site.ins[0]) < 2:
        return None
    labels = "b c^ r.." if site.ins[0] == site.ins[1] else "b r.."
    return f"b c^ r.., {labels}, _ -> b r.." if site.outs[0] else f"b+ c^ r..+, {labels}, _ -> "


def layer_norm(site: Site) -> str:
    count = len(site.args[1])
    kept = site.letters[: len(site.ins[0]) - count]
    own = [f"n{k}^" for k in range(count)]
    operands = [" ".join(kept + own)] + [" ".join(own)] * (len(site.ins) - 1)
    return f"{', '.join(operands)} -> {' '.join(kept + own)}"


def matmul(site: Site) -> str:
    first, second = ("k+" if len(s) == 1 else w for s, w in zip(site.ins, ("b.. m k+", "b.. k+ n"), strict=True))
    rows, columns = ("m " if len(site.ins[0]) > 1 else ""), ("n" if len(site.ins[1]) > 1 else "")
    return f"{first}, {second} -> b.. {rows}{columns}"


def embedding(site: Site) -> str | None:
    """The gradient of `scale_grad_by_freq` depends on all ids."""
    return None if site.argument(3, "scale_grad_by_freq", False) else "v+ h, i.. -> i.. h"


def experts(site: Site) -> Sized:
    """Tokens; experts, their choices and width are summed, as the result is; outputs, but not inputs."""
    width = {"s": 2, "f": site.ins[4][2]}
    return "t a^, t k+, t k+, e+ (s^ f+) a^, e+ o f+ -> t o", width


def histogram(site: Site) -> str | None:
    """Counts add up, between ends that are given."""
    low, high = site.argument(2, "min", 0), site.argument(3, "max", 0)
    return "d..+ -> _" if low < high else None


def attention(site: Site) -> Sized | str:
    """Batch, heads and queries; never keys. Parts of the queries of causal attention get their rows of the mask."""
    keys = ["b.. s^ e^", "b.. s^ v"]
    if len(site.ins[0]) < 4 or site.ins[0][-3] == site.ins[1][-3]:
        return f"b.. l e^, {', '.join(keys)}, b.. l s^ -> b.. l v"
    groups = {"g": site.ins[0][-3] // site.ins[1][-3], "h": site.ins[1][-3]}
    mask = "b.. (h g) l s^" if len(site.ins) > 3 and len(site.ins[3]) > 2 else "l s^"
    shared = ", ".join(k.replace("b..", "b.. h") for k in keys)
    return f"b.. (h g) l e^, {shared}, {mask} -> b.. (h g) l v", groups


def index(site: Site) -> str | None:
    """x[:, i, j]: adjacent index tensors replace their dims by their own, which can be cut; theirs in x are whole."""
    found = _indexed(site, len(site.ins))
    return found and f"{found[0]} -> {' '.join(found[1])}"


def index_put(site: Site) -> str | None:
    """x[:, i, j] = values: only the dims that are not indexed can be cut."""
    found = _indexed(site, len(site.ins) - 1)
    if found is None:
        return None
    operands, result = found
    values = result[len(result) - len(site.ins[-1]) :]
    return f"{operands}, {' '.join(values)} -> {operands.split(',')[0]}"


def _indexed(site: Site, count: int) -> tuple[str, list[str]] | None:
    """Return the operands of x[:, i, j], which are the first `count`, and the dims of its result."""
    indices = site.args[1]
    at = [d for d, i in enumerate(indices) if i is not None]
    if site.masks.intersection(range(1, count)) or at != list(range(at[0], at[-1] + 1)):
        return None
    names = site.letters
    rank = max(len(shape) for shape in site.ins[1:count])
    result = [*names[: at[0]], *(f"i{rank - k}" for k in range(rank)), *names[at[-1] + 1 :]]
    found = [" ".join(f"i{len(s) - k}" for k in range(len(s))) for s in site.ins[1:count]]
    return f"{whole(names, at)}, {', '.join(found)}", result


def index_write(site: Site) -> str:
    """index_add and its like: only the other dims can be cut."""
    dim, names = site.dims(1, "dim")[0], site.letters
    source = " ".join("i" if d == dim else name for d, name in enumerate(names)) if site.ins[-1] else ""
    return f"{whole(names, [dim])}, i, {source} -> {whole(names, [dim])}"


def gather(site: Site) -> str:
    """The dims of the index tensor that are as large as the operand's can be cut, and the gathered one in it alone."""
    dim, names = site.dims(1, "dim")[0], site.letters
    short = {d for d, (a, b) in enumerate(zip(site.ins[0], site.outs[0], strict=True)) if a != b} - {dim}
    own = whole(["i" if d == dim else name for d, name in enumerate(names)], short)
    return f"{whole(names, short | {dim})}, {own} -> {own}"


def index_select(site: Site) -> str:
    dim, names = site.dims(1, "dim")[0], site.letters
    own = ["i" if d == dim else name for d, name in enumerate(names)]
    return f"{whole(names, [dim])}, i -> {' '.join(own)}"


def convolution(site: Site) -> Sized | None:
    """Batch, groups, output channels; input channels are contracted where nothing is added; space is whole."""
    is_general = "convolution" in site.target
    groups = site.argument(8 if is_general else 6, "groups", 1)
    if len(site.ins[0]) != len(site.ins[1]):
        return None
    space = " ".join("_" for _ in site.ins[0][2:])
    c = "c^" if len(site.ins) > 2 else "c+"
    weight = f"(g {c}) o" if "transpose" in site.target or (is_general and site.args[6]) else f"(g o) {c}"
    sizes = {"g": groups, "c": site.ins[0][1] // groups, "o": site.outs[0][1] // groups}
    return f"b (g {c}) {space}, {weight} {space}, (g o) -> b (g o) {space}", sizes


def batch_norm(site: Site) -> str:
    """By given statistics; those of the batch are decomposed."""
    return f"b c r..{', c' * (len(site.ins) - 1)} -> b c r.."


def pool(site: Site) -> str:
    """All but the space, whose number of dims is in the operator's name."""
    rank, space = len(site.ins[0]), int("".join(re.findall(r"\dd", site.target))[0])
    return alike(site, whole(letters(rank), range(rank - space, rank)))


def windows(site: Site) -> Sized:
    """im2col and col2im: channels and the places of a kernel are one dim."""
    is_apart = "im2col" in site.target
    places = prod(site.args[1 if is_apart else 2])
    sizes = {"k": places, "c": max(site.ins[0][1], site.outs[0][1]) // places}
    return ("b c _ _ -> b (c k^) _" if is_apart else "b (c k^) _ -> b c _ _"), sizes


def unfold(site: Site) -> str:
    dim, names = site.dims(1, "dimension")[0], site.letters
    return f"{whole(names, [dim])} -> {whole(names, [dim])} _"


def pixel_shuffle(site: Site) -> Sized:
    factor, is_reverse = site.args[1], "unshuffle" in site.target
    sides = ["b.. (c i^ j^) h w", "b.. c (h i^) (w j^)"]
    channels, h, w = (site.outs if is_reverse else site.ins)[0][-3:]
    sizes = {"i": factor, "j": factor, "c": channels // factor**2, "h": h, "w": w}
    return " -> ".join(reversed(sides) if is_reverse else sides), sizes


def repeat(site: Site) -> Sized:
    """Each dim of the result is (times dim)."""
    names = letters(len(site.outs[0]))
    before = (*(1 for _ in range(len(names) - len(site.ins[0]))), *site.ins[0])
    sizes = {f"t{n}": b // a for n, a, b in zip(names, before, site.outs[0], strict=True)}
    sizes |= dict(zip(names, before, strict=True))
    own = names[len(names) - len(site.ins[0]) :]
    return f"{' '.join(own)} -> {' '.join(f'(t{n} {n})' for n in names)}", sizes


def einsum(site: Site) -> str | None:
    """The letters of the equation; those that are not in the result are summed. A diagonal cannot be cut."""
    left, arrow, right = site.args[0].replace(" ", "").partition("->")
    if not arrow:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = "..." * ("..." in left) + "".join(once)
    sides = [re.findall(r"\.\.\.|\w", side) for side in (*left.split(","), right)]
    if any(len(set(side)) < len(side) for side in sides):
        return None
    marked = [" ".join(w.replace("...", "e..") + "+" * (w not in sides[-1]) for w in side) for side in sides]
    return f"{', '.join(marked[:-1])} -> {marked[-1]}"


def diagonal(site: Site) -> str:
    names, dims = site.letters, {*site.dims(2, "dim1", 0), *site.dims(3, "dim2", 1)}
    return f"{whole(names, dims)} -> {' '.join(n for d, n in enumerate(names) if d not in dims)} _"
