"""Products of tensors, and attention."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from superscaler.ir.mask import Box, extents
from superscaler.ir.model import Op, PTensor
from superscaler.ops.call import Local, Site, ranges, ranges_of
from superscaler.ops.notation import Shape
from superscaler.ops.row import Dims, Drawn, Sized, call, each, on, row


def _contraction(op: Op, ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    return 2 * prod(outs[0]) * ins[0][-1]


def _matmul(site: Site) -> str:
    first, second = ("k+" if len(s) == 1 else w for s, w in zip(site.ins, ("b.. m k+", "b.. k+ n"), strict=True))
    rows, columns = ("m " if len(site.ins[0]) > 1 else ""), ("n" if len(site.ins[1]) > 1 else "")
    return f"{first}, {second} -> b.. {rows}{columns}"


def _einsum(site: Site) -> str | None:
    """Return the letters of the equation, summed if they are not in the result. A diagonal cannot be cut."""
    left, arrow, right = site.args[0].replace(" ", "").partition("->")
    if not arrow:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = "..." * ("..." in left) + "".join(once)
    sides = [re.findall(r"\.\.\.|\w", side) for side in (*left.split(","), right)]
    if any(len(set(side)) < len(side) for side in sides):
        return None
    marked = [" ".join(w.replace("...", "e..") + "+" * (w not in sides[-1]) for w in side) for side in sides]
    return f"{', '.join(marked[:-1])} -> {marked[-1]}"


_QUERIES, _EXPERTS = (0, -2), (3, 0)


def _of_causal(op: Op, tensors: Mapping[str, PTensor]) -> Dims:
    """Return the dims of the queries, if attention is causal and the keys do not determine the queries of a part."""
    is_causal = op.args[5] if len(op.args) > 5 else dict(op.kwargs).get("is_causal")
    return (_QUERIES,) if is_causal and all(i.until is None for i in op.indices) else ()


def _attention(site: Site) -> Sized | str:
    """Cut batch, heads and queries, never keys. In causal attention, a part of the queries reads the keys up to its end
    and its own rows of the mask.
    """
    keys = [f"b.. s{'<=l' if site.argument(5, 'is_causal', False) else '^'} e^", "b.. s v"]
    if len(site.ins[0]) < 4 or site.ins[0][-3] == site.ins[1][-3]:
        return f"b.. l e^, {', '.join(keys)}, b.. l s -> b.. l v"
    groups = {"g": site.ins[0][-3] // site.ins[1][-3], "h": site.ins[1][-3]}
    mask = "b.. (h g) l s" if len(site.ins) > 3 and len(site.ins[3]) > 2 else "l s"
    shared = ", ".join(k.replace("b..", "b.. h") for k in keys)
    return f"b.. (h g) l e^, {shared}, {mask} -> b.. (h g) l v", groups


def _documents(site: Site) -> Sized | str:
    """Cut attention inside documents as any other; the numbers of queries and keys are cut with these."""
    is_causal = site.argument(5, "causal", False)
    found = _attention(replace(site, args=(), kwargs={"is_causal": is_causal}, ins=site.ins[:3]))
    notation, sizes = (found, {}) if isinstance(found, str) else found
    operands, arrow, result = notation.partition(" -> ")
    q, k, v, _ = operands.split(", ")
    numbers = f"b.. l 1, b.. 1 s{'<=l' if is_causal else '^'}"
    return f"{q}, {k}, {v}, {numbers}{arrow}{result}", sizes


def _documents_text(x: Local) -> str:
    q, k, v, *_, causal, scale = map(x.literal, x.op.args)
    return f"functional.attention_documents({q}, {k}, {v}, {causal}, {scale}, {_numbers(x, x.op.args[3:5], _rows(x))})"


def _numbers(x: Local, documents: Sequence[Any], part: str, *step: int) -> str:
    return f"functional.documents({', '.join([*map(x.literal, documents), *[part] * bool(part), *map(str, step)])})"


def _attention_text(x: Local) -> str:
    mask, dropout = x.argument(3, "attn_mask"), x.argument(4, "dropout_p", 0.0)
    options = [f"attn_mask={x.literal(mask)}"] if mask is not None else []
    options += [f"dropout_p={dropout}"] if dropout else []
    if x.argument(5, "is_causal", False):
        options += [f"attn_mask={_causal_mask(x)}" if _is_behind(x) else "is_causal=True"]
    others = [(k, v) for k, v in x.op.kwargs if k in ("scale", "enable_gqa") and v not in (None, False)]
    options += [f"{k}={x.literal(v)}" for k, v in others]
    return f"F.scaled_dot_product_attention({', '.join([*(x.literal(a) for a in x.op.args[:3]), *options])})"


def _is_behind(x: Local) -> bool:
    """Return whether a part lacks the first queries, or has other numbers of queries and keys: torch aligns a causal
    mask at the first of both.
    """
    is_first = any(i.until is not None and not x.box[i.until][0] for i in x.op.indices)
    return bool(_rows(x)) and not (is_first and x.shapes[0][-2] == x.shapes[1][-2])


def _rows(x: Local) -> str:
    """Return the range of the queries of a part; '' for all, and if it reads keys up to their end."""
    own, whole = ranges_of(x.op, x.box, x.tensors, *_QUERIES)
    return x.part(*_QUERIES) or (f"{own}, {whole}" if extents(own) != whole else "")


def _causal_mask(x: Local) -> str:
    """Return the rows of the causal mask for a part of the queries."""
    return f"functional.causal_mask({_rows(x)}, {x.shapes[1][-2]}, {x.names[0]})"


def _attention_dropout(x: Local) -> str:
    q, k, v, mask, p, causal, scale = map(x.literal, x.op.args)
    if x.op.args[5] and _is_behind(x):
        mask, causal = _causal_mask(x), "False"
    return f"functional.attention_dropout({q}, {k}, {v}, {mask}, {p}, {causal}, {scale}, {x.random})"


def _attention_block(x: Local) -> str:
    *given, is_causal, scale = x.op.args[:6]
    first, step, chunks = next(i.follows for i in x.op.indices if i.follows)
    size = x.op.indices[first].size
    part = x.part(*_QUERIES) or f"[(0, {size})], [{size}]"
    seen = f"functional.seen_by({part}, {step}, {chunks}, {is_causal})"
    name, documents = x.op.target.removeprefix("ss."), dict(x.op.kwargs).get("documents")
    inside = f", {_numbers(x, documents, part, step, chunks)}" if documents else ""
    return f"functional.{name}({', '.join(map(x.literal, (*given, *x.op.args[6:], scale)))}, *{seen}{inside})"


def _scores(op: Op, box: Box, tensors: Mapping[str, PTensor]) -> Drawn:
    """Draw a random number for each query and key."""
    queries, keys = (tensors[o.tensor] for o in op.inputs[:2])
    slots, width = ranges(op.inputs[0], queries, box), len(queries.slots[-1])
    rows = slice(len(slots) - width)
    shape = queries.local_shape(extents(slots))
    read = keys.local_shape(extents(ranges(op.inputs[1], keys, box)))[-2]
    return (*slots[rows], (0, read)), (*queries.extents[rows], keys.shape[-2]), (*shape[:-1], read)


def _attention_flops(op: Op, ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    query, key, value = ins[:3]
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _experts(site: Site) -> Sized:
    """Cut tokens and outputs, not inputs; experts, choices and width are summed: the result is linear in them."""
    width = {"s": 2, "f": site.ins[4][2]}
    return "t a^, t k+, t k+, e+ (s^ f+) a^, e+ o f+ -> t o", width


def _experts_text(x: Local) -> str:
    part = x.part(*_EXPERTS)
    return f"functional.experts({x.arguments}{part and ', '}{part})"


def _experts_flops(op: Op, ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    """Count the operations of the experts that each token chose."""
    return 2 * prod(ins[1]) * (prod(ins[3][1:]) + prod(ins[4][1:]))


_HEADS = ((0, -3, "heads"), (0, -1, "head_dim"), (2, -1, "value_dim"))

ROWS = {
    **row("linear", "b.. k+, n k -> b.. n", text=call("F.linear"), linear=each, flops=_contraction,
          biased="F.linear({0}, {1}, {2})"),
    **row("mm", "m k+, k n -> m n", text=call("torch.mm"), linear=each, flops=_contraction,
          biased="torch.addmm({2}, {0}, {1})"),
    **row("bmm", "b m k+, b k n -> b m n", text=call("torch.bmm"), linear=each, flops=_contraction),
    **row("matmul", _matmul, text=call("torch.matmul"), linear=each, flops=_contraction),
    **row("mv", "m k+, k -> m", linear=each, flops=_contraction),
    **row("dot vdot", "k+, k -> ", linear=each, flops=_contraction),
    **row("einsum", _einsum, text=call("torch.einsum"), linear=each,
          flops=lambda op, ins, outs: 2 * prod(i.size for i in op.indices) * (len(ins) > 1)),
    **row("outer", "m, n -> m n"),
    **row("bilinear", "b.. i^, b.. j^, o i j, o -> b.. o"),
    **row("cdist", "b.. m k^, b.. n k -> b.. m n"),
    **row("scaled_dot_product_attention", _attention, text=_attention_text, placed=_of_causal, flops=_attention_flops,
          roles=_HEADS),
    **row("ss.attention_dropout", _attention, text=_attention_dropout, placed=_of_causal, flops=_attention_flops,
          roles=_HEADS, random=_scores, rate=4),
    **row("ss.attention_documents", _documents, text=_documents_text, placed=on(*_QUERIES), flops=_attention_flops,
          roles=_HEADS),
    **row("ss.attention_block ss.attention_gradient", text=_attention_block, placed=on(*_QUERIES)),
    **row("ss.attention_merge", text=call("functional.attention_merge")),
    **row("ss.experts", _experts, text=_experts_text, placed=on(*_EXPERTS), flops=_experts_flops,
          roles=((3, 0, "experts"), (4, 0, "experts"))),
    **row("ss.dispatch", text=lambda x: f"functional.dispatch({x.arguments}, {', '.join(map(str, x.results[0][:3]))})"),
    **row("ss.expert_rows", text=call("functional.expert_rows")),
    **row("ss.collect", text=call("functional.collect")),
}  # fmt: skip
