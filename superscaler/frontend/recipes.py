"""The recipes of operators whose notation depends on the call: computed from its shapes and arguments.

A recipe returns notation (see notation.py), with the sizes of letters that stand in products only; None means that
nothing can be cut. Sizes in the arguments of views, expansions and splits are computed again for each part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from superscaler.frontend.notation import Shape
from superscaler.frontend.spans import Span, leaves, unify
from superscaler.frontend.trace import Call, Var


@dataclass(frozen=True, slots=True)
class Site:
    """One call with the shapes of its tensor operands, in the order of its arguments, and of its results."""

    call: Call
    ins: tuple[Shape, ...]
    outs: tuple[Shape, ...]

    def dims(self, position: int, name: str, default: Any = None) -> list[int]:
        """Return an argument that names dims of the first operand, as non-negative numbers; None names all."""
        rank = len(self.ins[0])
        value = self.call.argument(position, name, default)
        if value is None or value == ():
            return list(range(rank))
        return [d % max(rank, 1) for d in ([value] if isinstance(value, int) else value)]

    def is_tensor(self, position: int) -> bool:
        return position < len(self.call.args) and isinstance(self.call.args[position], Var)


_LETTER = re.compile(r"\.\.\.|\w")
Recipe = Callable[[Site], str | tuple[str, Mapping[str, int]] | None]


def letters(count: int) -> list[str]:
    return [f"d{k}" for k in range(count)]


def whole(names: Sequence[str], dims: Iterable[int]) -> str:
    """Return the dims of an operand with these ones read whole, or made whole."""
    chosen = set(dims)
    return " ".join("_" if d in chosen else name for d, name in enumerate(names))


def elementwise(site: Site) -> str:
    return ", ".join(["d.."] * len(site.ins)) + " -> d.."


def view(site: Site) -> tuple[str, Mapping[str, int]]:
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
    order, names = site.dims(1, "dims"), letters(len(site.ins[0]))
    return f"{' '.join(names)} -> {' '.join(names[d] for d in order)}"


def transpose(site: Site) -> str:
    names = letters(len(site.ins[0]))
    swapped = list(names)
    if names:
        a, b = site.dims(1, "dim0")[0], site.dims(2, "dim1")[0]
        swapped[a], swapped[b] = swapped[b], swapped[a]
    return f"{' '.join(names)} -> {' '.join(swapped)}"


def reverse(site: Site) -> str:
    names = letters(len(site.ins[0]))
    return f"{' '.join(names)} -> {' '.join(names[::-1])}"


def expand(site: Site) -> str:
    return "d.. -> d.." if len(site.ins) == 1 else "d.., d.. -> d.."


def split(site: Site) -> tuple[str, Mapping[str, int]] | str:
    """Equal segments are (segment^ rest): the rest can be cut; unequal ones are whole."""
    dim = site.dims(2, "dim", 0)[0]
    names = letters(len(site.ins[0]))
    sizes = {shape[dim] for shape in site.outs}
    if len(sizes) > 1:
        out = whole(names, [dim])
        return f"{out} -> {', '.join([out] * len(site.outs))}"
    packed = [*names[:dim], f"(t^ {names[dim]})", *names[dim + 1 :]]
    known = {"t": len(site.outs), names[dim]: sizes.pop()}
    return f"{' '.join(packed)} -> {', '.join([' '.join(names)] * len(site.outs))}", known


def unbind(site: Site) -> str:
    names = letters(len(site.ins[0]))
    dim = site.dims(1, "dim", 0)[0]
    rest = " ".join(names[:dim] + names[dim + 1 :])
    return f"{whole(names, [dim])} -> {', '.join([rest] * len(site.outs))}"


def along(position: int, name: str = "dim", default: Any = None) -> Recipe:
    """Return the recipe of operators that need some dims whole; all operands and results have the same dims."""

    def recipe(site: Site) -> str | None:
        dims = site.dims(position, name, default)
        names = letters(len(site.ins[0]))
        if any(len(shape) != len(names) for shape in (*site.ins, *site.outs)):
            return None
        side = whole(names, dims)
        return f"{', '.join([side] * len(site.ins))} -> {', '.join([side] * len(site.outs))}"

    return recipe


def normalized(position: int) -> Recipe:
    """Return the recipe of operators that keep their shape and freeze some dims (softmax)."""

    def recipe(site: Site) -> str:
        dims = set(site.dims(position, "dim"))
        names = letters(len(site.ins[0]))
        marked = " ".join(name + "^" * (d in dims) for d, name in enumerate(names))
        return f"{marked} -> {' '.join(names)}"

    return recipe


def select(site: Site) -> str:
    dim, names = site.dims(1, "dim")[0], letters(len(site.ins[0]))
    return f"{whole(names, [dim])} -> {' '.join(names[:dim] + names[dim + 1 :])}"


def select_scatter(site: Site) -> str:
    dim, names = site.dims(2, "dim")[0], letters(len(site.ins[0]))
    return f"{whole(names, [dim])}, {' '.join(names[:dim] + names[dim + 1 :])} -> {whole(names, [dim])}"


def pad(site: Site) -> str:
    names = letters(len(site.ins[0]))
    padding = site.call.args[1]
    touched = [len(names) - 1 - k // 2 for k, amount in enumerate(padding) if amount]
    return f"{whole(names, touched)} -> {whole(names, touched)}"


def stack(site: Site) -> str:
    dim = site.call.argument(1, "dim", 0) % len(site.outs[0])
    names = letters(len(site.ins[0]))
    return f"{', '.join([' '.join(names)] * len(site.ins))} -> {' '.join([*names[:dim], '_', *names[dim:]])}"


def reduction(position: int | None, mark: str = "^") -> Recipe:
    """Return the recipe of reductions: over all dims, or those of an argument. Kept dims have size 1."""

    def recipe(site: Site) -> str:
        dims = set(range(len(site.ins[0])) if position is None else site.dims(position, "dim"))
        names = letters(len(site.ins[0]))
        marked = " ".join(name + mark * (d in dims) for d, name in enumerate(names))
        keeps = len(site.outs[0]) == len(names)
        rest = " ".join(("1" if d in dims else name) for d, name in enumerate(names) if keeps or d not in dims)
        return f"{marked} -> {', '.join([rest] * len(site.outs))}"

    return recipe


def reduced_loss(site: Site) -> str | None:
    """A loss of elements: none reduced, summed, or (mean squared error, whose mean the emitter divides) averaged."""
    operands = ", ".join(["d..+"] * len(site.ins))
    if site.outs[0] == ():
        return f"{operands} -> " if len(set(site.ins)) == 1 else None
    return elementwise(site)


def cross_entropy(site: Site) -> str | None:
    """Only without weights, and not as a mean, whose denominator depends on all labels."""
    if site.call.argument(3, "reduction", 1) == 1 or len(site.ins) > 2 or len(site.ins[0]) < 2:
        return None
    if site.call.argument(5, "label_smoothing", 0.0) or site.ins[0] == site.ins[1]:
        return None
    return "b c^ r.., b r.. -> b r.." if site.outs[0] else "b+ c^ r..+, b r.. -> "


def layer_norm(site: Site) -> str:
    count = len(site.call.args[1])
    kept = letters(len(site.ins[0]))[: len(site.ins[0]) - count]
    own = [f"n{k}^" for k in range(count)]
    operands = [" ".join(kept + own)] + [" ".join(own)] * (len(site.ins) - 1)
    return f"{', '.join(operands)} -> {' '.join(kept + own)}"


def matmul(site: Site) -> str:
    first, second = ("k+" if len(s) == 1 else w for s, w in zip(site.ins, ("b.. m k+", "b.. k+ n"), strict=True))
    rows, columns = ("m " if len(site.ins[0]) > 1 else ""), ("n" if len(site.ins[1]) > 1 else "")
    return f"{first}, {second} -> b.. {rows}{columns}"


def einsum(site: Site) -> str | None:
    """As its equation says; where an operand holds a letter twice (a diagonal), nothing can be cut."""
    left, arrow, right = site.call.args[0].partition("->")
    *operands, result = ([w.replace("...", "e..") for w in _LETTER.findall(side)] for side in (*left.split(","), right))
    count = Counter(letter for operand in operands for letter in operand)
    if any(len(set(operand)) < len(operand) for operand in operands):
        return None
    if not arrow:
        result = sorted((x for x, n in count.items() if n == 1 or x == "e.."), key=lambda x: (x != "e..", x))
    sides = [" ".join(x if x in result else f"{x}+" for x in operand) for operand in operands]
    return f"{', '.join(sides)} -> {' '.join(result)}"


def embedding(site: Site) -> str | None:
    """The gradient of `scale_grad_by_freq` depends on all ids."""
    return None if site.call.argument(3, "scale_grad_by_freq", False) else "v^ h, i.. -> i.. h"


def attention(site: Site) -> tuple[str, Mapping[str, int]] | str:
    """Batch and heads; queries unless causal (the mask is aligned at the first query); never keys."""
    causal = bool(site.call.argument(5, "is_causal", False))
    query = "l^" if causal else "l"
    keys = ["b.. s^ e^", "b.. s^ v"]
    if len(site.ins[0]) < 4 or site.ins[0][-3] == site.ins[1][-3]:
        return f"b.. {query} e^, {', '.join(keys)}, b.. {query} s^ -> b.. {query} v"
    groups = {"g": site.ins[0][-3] // site.ins[1][-3], "h": site.ins[1][-3]}
    mask = f"b.. (h g) {query} s^" if len(site.ins) > 3 and len(site.ins[3]) > 2 else f"{query} s^"
    shared = ", ".join(k.replace("b..", "b.. h") for k in keys)
    return f"b.. (h g) {query} e^, {shared}, {mask} -> b.. (h g) {query} v", groups


def index(site: Site) -> str | None:
    """x[:, i, j]: adjacent index tensors replace their dims by their own, which can be cut; theirs in x are whole."""
    indices = site.call.args[1]
    at = [d for d, i in enumerate(indices) if i is not None]
    if at != list(range(at[0], at[-1] + 1)):
        return None
    names = letters(len(site.ins[0]))
    rank = max(len(shape) for shape in site.ins[1:])
    result = [*names[: at[0]], *(f"i..{rank - k}" for k in range(rank)), *names[at[-1] + 1 :]]
    found = [" ".join(f"i..{len(s) - k}" for k in range(len(s))) for s in site.ins[1:]]
    text = f"{whole(names, at)}, {', '.join(found)} -> {' '.join(result)}"
    return text.replace("i..", "i")


def gather(site: Site) -> str:
    """The dims of the index tensor that are as large as the operand's can be cut, but for the gathered one."""
    dim = site.dims(1, "dim")[0]
    names = letters(len(site.ins[0]))
    short = {d for d, (a, b) in enumerate(zip(site.ins[0], site.outs[0], strict=True)) if a != b}
    own = [f"g{d}" if d == dim or d in short else name for d, name in enumerate(names)]
    return f"{whole(names, short | {dim})}, {' '.join(own)} -> {' '.join(own)}"


def index_select(site: Site) -> str:
    dim = site.dims(1, "dim")[0]
    names = letters(len(site.ins[0]))
    own = ["i" if d == dim else name for d, name in enumerate(names)]
    return f"{whole(names, [dim])}, i -> {' '.join(own)}"


def convolution(site: Site) -> str | None:
    """Batch and output channels; input channels are contracted where nothing else is added; space is whole."""
    groups = site.call.argument(8 if "convolution" in site.call.target else 6, "groups", 1)
    if groups != 1 or len(site.ins[0]) != len(site.ins[1]):
        return None
    space = " ".join("_" for _ in site.ins[0][2:])
    contracted = "c^" if len(site.ins) > 2 else "c+"
    return f"b {contracted} {space}, o {contracted} {space}, o -> b o {space}"


def pool(site: Site) -> str:
    rank = len(site.ins[0])
    side = whole(letters(rank), range(2, rank))
    return f"{side} -> {', '.join([side] * len(site.outs))}"
