"""Views and other moves of elements; the sizes in their arguments are adapted to each part."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from superscaler.ir.model import Op, PTensor
from superscaler.ops.call import Local, Site
from superscaler.ops.notation import Shape
from superscaler.ops.row import (
    Dims,
    Recipe,
    Sized,
    along,
    call,
    first,
    method,
    plain,
    row,
    sizes,
    to_shape,
    together,
    whole,
)
from superscaler.ops.spans import Span, leaves, unify


def _view(site: Site) -> Sized:
    """Refine both shapes if they group the same elements; dims that do not fit are frozen, only there."""
    (before, *_), after = site.ins, site.outs[0]
    left = [[Span(s)] if s > 1 else [] for s in before]
    right = [[Span(s)] if s > 1 else [] for s in after]
    for (a, b), (c, d) in _groups(before, after):
        unify([s for dim in left[a:b] for s in dim], [s for dim in right[c:d] for s in dim])
    names: dict[int, str] = {}
    extents: dict[str, int] = {}
    for leaf in leaves(s for dims in (left, right) for dim in dims for s in dim):
        names.setdefault(id(leaf), f"v{len(names)}")
        extents[names[id(leaf)]] = leaf.size
    kept = {id(leaf) for leaf in leaves(s for dim in left for s in dim)}

    def written(dim: list[Span], is_result: bool) -> str:
        words = [names[id(x)] + ("^" if is_result and id(x) not in kept else "") for x in leaves(dim)]
        return f"({' '.join(words)})"

    ins, outs = " ".join(written(dim, False) for dim in left), " ".join(written(dim, True) for dim in right)
    return f"{ins} -> {outs}", extents


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


def _transpose(site: Site) -> str:
    order = list(range(len(site.ins[0])))
    if order:
        a, b = site.dims(1, "dim0")[0], site.dims(2, "dim1")[0]
        order[a], order[b] = b, a
    return _reordered(site, order)


def _reordered(site: Site, order: Sequence[int]) -> str:
    return f"{' '.join(site.letters)} -> {' '.join(site.letters[d] for d in order)}"


def _split(site: Site) -> Sized | str:
    """Return the notation: equal segments are (segment^ rest), and rest can be cut; unequal ones are whole."""
    dim = site.dims(2, "dim", 0)[0]
    if len({shape[dim] for shape in site.outs}) > 1:
        return site.alike(whole(site.letters, [dim]))
    return _packed(site, dim, len(site.outs))


def _split_text(x: Local) -> str:
    dim = x.argument(2, "dim", 0)
    own = [shape[dim] for shape in x.results]
    return f"torch.split({x.names[0]}, {own[0] if len(set(own)) == 1 else own}, {dim})"


def _packed(site: Site, dim: int, count: int) -> Sized:
    """Return the notation for a dim of the operand that is `count` times as large as in the results."""
    names = site.letters
    packed = [*names[:dim], f"(t^ {names[dim]})", *names[dim + 1 :]]
    return site.alike(" ".join(packed), " ".join(names)), {"t": count, names[dim]: site.outs[0][dim]}


def _repeat(site: Site) -> Sized:
    """Return the notation in which each dim of the result is (times dim)."""
    names = [f"d{k}" for k in range(len(site.outs[0]))]
    added = len(names) - len(site.ins[0])
    before = (*[1] * added, *site.ins[0])
    known = {f"t{n}": b // a for n, a, b in zip(names, before, site.outs[0], strict=True)}
    known |= dict(zip(names, before, strict=True))
    return f"{' '.join(names[added:])} -> {' '.join(f'(t{n} {n})' for n in names)}", known


def _repeat_text(x: Local) -> str:
    (before, *_), after = x.shapes, x.results[0]
    added = len(after) - len(before)
    times = [*after[:added], *(b // a for a, b in zip(before, after[added:], strict=True))]
    return f"{x.names[0]}.repeat({sizes(tuple(times))})"


def _select(site: Site) -> str:
    """Return the notation of select, which takes one place of a dim, or of unbind, which takes all one by one."""
    dim, names = site.dims(1, "dim", 0)[0], site.letters
    return site.alike(whole(names, [dim]), " ".join(names[:dim] + names[dim + 1 :]))


def _select_scatter(site: Site) -> str:
    dim, names = site.dims(2, "dim")[0], site.letters
    return f"{whole(names, [dim])}, {' '.join(names[:dim] + names[dim + 1 :])} -> {whole(names, [dim])}"


def _pad(site: Site) -> str:
    touched = [len(site.ins[0]) - 1 - k // 2 for k, amount in enumerate(site.args[1]) if amount]
    return site.alike(whole(site.letters, touched))


def _stack(site: Site) -> str:
    dim, names = site.argument(1, "dim", 0) % len(site.outs[0]), site.letters
    return site.alike(" ".join(names), " ".join([*names[:dim], "_", *names[dim:]]))


def _diagonal(site: Site) -> str:
    names, dims = site.letters, {*site.dims(2, "dim1", 0), *site.dims(3, "dim2", 1)}
    return f"{whole(names, dims)} -> {' '.join(n for d, n in enumerate(names) if d not in dims)} _"


def _unfold(site: Site) -> str:
    dim, names = site.dims(1, "dimension")[0], site.letters
    return f"{whole(names, [dim])} -> {whole(names, [dim])} _"


def _pixel_shuffle(site: Site) -> Sized:
    factor, is_reverse = site.args[1], "unshuffle" in site.target
    sides = ["b.. (c i^ j^) h w", "b.. c (h i^) (w j^)"]
    channels, h, w = (site.outs if is_reverse else site.ins)[0][-3:]
    known = {"i": factor, "j": factor, "c": channels // factor**2, "h": h, "w": w}
    return " -> ".join(reversed(sides) if is_reverse else sides), known


def _made(position: int, name: str) -> Recipe:
    """Return the recipe of operators whose parts compute some dims whole and keep their piece of them, see `piece`."""

    def recipe(site: Site) -> str:
        names, dims = site.letters, site.dims(position, name)
        return f"{whole(names, dims)} -> {' '.join('m' * (d in dims) + n for d, n in enumerate(names))}"

    return recipe


def _piece(x: Local) -> str:
    source = plain(x)
    for number, dim in _made_dims(x.op, x.tensors):
        if part := x.part(number, dim):
            source = f"functional.piece({source}, {dim}, {part})"
    return source


def _made_dims(op: Op, tensors: Mapping[str, PTensor]) -> Dims:
    """Return the dims of the result that no operand has."""
    slots, read = iter(op.outputs[0].slots), {i for operand in op.inputs for i in operand.slots}
    dims = enumerate(tensors[op.outputs[0].tensor].slots)
    return [(len(op.inputs), dim) for dim, own in dims if {next(slots) for _ in own} - read]


def _as_strided(x: Local) -> str:
    """Return the source for elements in order, as they are in the model."""
    size, stride = map(x.literal, x.op.args[1:3])
    return f"{x.names[0]}.contiguous().as_strided({size}, {stride})"


_VIEW = {"linear": first, "is_view": True}

ROWS = {
    **row("view _unsafe_view", _view, text=to_shape("reshape"), **_VIEW),
    **row("unsqueeze", _view, text=method("unsqueeze"), **_VIEW),
    **row("permute", lambda site: _reordered(site, site.dims(1, "dims")), text=method("permute"), **_VIEW),
    **row("transpose.int", _transpose, text=method("transpose"), **_VIEW),
    **row("t", lambda site: _reordered(site, range(len(site.ins[0]))[::-1]), text=method("t"), **_VIEW),
    **row("split.Tensor split_with_sizes", _split, text=_split_text, is_view=True),
    **row("slice.Tensor", along(1, default=0), **_VIEW),
    **row("select.int", _select, **_VIEW),
    **row("unbind.int", _select, is_view=True),
    **row("diagonal", _diagonal, **_VIEW),
    **row("unfold", _unfold, **_VIEW),
    **row("as_strided", text=_as_strided, is_view=True),
    **row("view.dtype", is_view=True),
    **row("repeat", _repeat, text=_repeat_text),
    # The second half of a dim gates the first.
    **row("glu", lambda site: _packed(site, site.dims(1, "dim", -1)[0], 2)),
    **row("cat", along(1, default=0), text=call("torch.cat"), linear=together(1)),
    **row("stack", _stack, linear=together(1)),
    **row("pad constant_pad_nd", _pad),
    **row("select_scatter", _select_scatter),
    **row("slice_scatter", along(2, default=0)),
    **row("roll", _made(2, "dims"), text=_piece, placed=_made_dims),
    **row("flip", _made(1, "dims"), text=_piece, placed=_made_dims),
    **row("cumsum", _made(1, "dim"), text=_piece, placed=_made_dims),
    **row("cross", along(2)),
    **row("diff topk linalg_cross", along(2, default=-1)),
    **row("sort argsort", along(1, default=-1)),
    **row("sort.stable", along(9, default=-1)),
    **row("cumprod cummax cummin logcumsumexp", along(1)),
    **row("tril triu", "b.. _ _ -> b.. _ _"),
    **row("pixel_shuffle pixel_unshuffle", _pixel_shuffle),
}  # fmt: skip
