"""Operators that read or write at integer positions."""

from dataclasses import replace

from superscaler.ops.call import Local, Site
from superscaler.ops.row import Recipe, along, on, plain, row, whole

# The rows of the table that is looked up; the index of index_add.
_TABLE, _ADDED = (0, 0), (1, 0)


def _embedding(site: Site) -> str | None:
    """Return the notation; the gradient of `scale_grad_by_freq` depends on all ids."""
    return None if site.argument(3, "scale_grad_by_freq", False) else "v+ h, i.. -> i.. h"


def _embedding_text(x: Local) -> str:
    weight, ids = x.literal(x.op.args[0]), x.literal(x.op.args[1])
    padding = x.argument(2, "padding_idx", -1)
    extra = f", padding_idx={padding}" if padding not in (-1, None) else ""
    if part := x.part(*_TABLE):
        return f"functional.embedding_part({ids}, {weight}, {part}{extra})"
    return f"F.embedding({ids}, {weight}{extra})"


def _index(site: Site) -> str | None:
    """Return the notation of x[:, i, j]. Adjacent index tensors replace the dims that they index by their own dims,
    which can be cut; the indexed dims of x are whole.
    """
    found = _indexed(site, len(site.ins))
    return found and f"{found[0]} -> {' '.join(found[1])}"


def _index_put(site: Site) -> str | None:
    """Return the notation of x[:, i, j] = values: only the dims that are not indexed can be cut."""
    found = _indexed(site, len(site.ins) - 1)
    if found is None:
        return None
    operands, result = found
    values = result[len(result) - len(site.ins[-1]) :]
    return f"{operands}, {' '.join(values)} -> {operands.split(',')[0]}"


def _indexed(site: Site, count: int) -> tuple[str, list[str]] | None:
    """Return the operands of x[:, i, j], the first `count`, and the dims of its result."""
    indices = site.args[1]
    at = [d for d, i in enumerate(indices) if i is not None]
    if site.masks.intersection(range(1, count)) or at != list(range(at[0], at[-1] + 1)):
        return None
    names = site.letters
    rank = max(len(shape) for shape in site.ins[1:count])
    result = [*names[: at[0]], *(f"i{rank - k}" for k in range(rank)), *names[at[-1] + 1 :]]
    found = [" ".join(f"i{len(s) - k}" for k in range(len(s))) for s in site.ins[1:count]]
    return f"{whole(names, at)}, {', '.join(found)}", result


def _index_write(mark: str = "") -> Recipe:
    """Return the recipe of index_add and its like: dims that are not indexed are cut; a written one has `mark`."""

    def recipe(site: Site) -> str:
        dim, names, entry = site.dims(1, "dim")[0], site.letters, f"i{mark}"
        source = " ".join(entry if d == dim else name for d, name in enumerate(names)) if site.ins[-1] else ""
        return f"{whole(names, [dim])}, {entry}, {source} -> {whole(names, [dim])}"

    return recipe


def _index_add(x: Local) -> str:
    """Add the first part to the operand, and each other part to zeros: the parts then add up."""
    part = x.parts.get(_ADDED)
    return plain(replace(x, names=(f"functional.of_first({x.names[0]}, {part})", *x.names[1:])) if part else x)


def _gather(site: Site) -> str:
    """Cut the dims of the index that are as large as the operand's; the gathered one is cut in the index only."""
    dim, names = site.dims(1, "dim")[0], site.letters
    short = {d for d, (a, b) in enumerate(zip(site.ins[0], site.outs[0], strict=True)) if a != b} - {dim}
    own = whole(["i" if d == dim else name for d, name in enumerate(names)], short)
    return f"{whole(names, short | {dim})}, {own} -> {own}"


def _index_select(site: Site) -> str:
    dim, names = site.dims(1, "dim")[0], site.letters
    return f"{whole(names, [dim])}, i -> {' '.join('i' if d == dim else name for d, name in enumerate(names))}"


ROWS = {
    **row("embedding", _embedding, text=_embedding_text, placed=on(*_TABLE), roles=((*_TABLE, "vocabulary"),)),
    **row("one_hot", "i.. -> i.. _"),
    **row("index.Tensor", _index),
    **row("index_put", _index_put),
    **row("index_select", _index_select),
    **row("index_add", _index_write("+"), text=_index_add, placed=on(*_ADDED)),
    **row("index_copy index_fill.int_Scalar index_fill.int_Tensor", _index_write()),
    **row("gather", _gather),
    **row("scatter.src scatter.value scatter_add scatter_reduce.two", along(1)),
}
