"""Calls of every operator that has a rule: small shapes and options drawn at random, one row per kind of arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import Buffer

Shape = tuple[int, ...]
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Draw:
    """Draws sizes and options from `random` (hypothesis shrinks them), and values of tensors from a seed of it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.generator = torch.Generator().manual_seed(random.randrange(1 << 16))

    def sizes(self, least: int, most: int | None = None) -> Shape:
        """Return a shape: sizes from 2 to 6, mostly distinct."""
        count = self.random.randint(least, least if most is None else most)
        pool = self.random.sample((2, 3, 4, 5, 6, 4), 6)
        return tuple(pool[:count])

    def size(self) -> int:
        return self.sizes(1)[0]

    def one_of(self, *options: Any) -> Any:
        return self.random.choice(options)

    def dim(self, rank: int) -> int:
        return self.random.randint(-rank, rank - 1)

    def dims(self, rank: int) -> list[int]:
        """Return one or more dims, each once."""
        return [d - rank * self.one_of(0, 1) for d in self.random.sample(range(rank), self.random.randint(1, rank))]

    def some_dims(self, rank: int) -> list[int]:
        """Return one or more dims, each once, but not all."""
        return self.dims(rank)[: rank - 1]

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def unit(self, *shape: int) -> Tensor:
        """Return numbers between 0.1 and 0.9."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * 0.8 + 0.1

    def ids(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(bound, shape, generator=self.generator)

    def bools(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < 0.6

    def distinct(self, bound: int, count: int, dim: int = 0, *shape: int) -> Tensor:
        """Return numbers below `bound` that differ along a dim, where there are `count`."""
        order = torch.rand((*shape[:dim], bound, *shape[dim:]), generator=self.generator).argsort(dim)
        return order.narrow(dim, 0, count)

    def x(self, least: int = 1, most: int = 3) -> Tensor:
        return self.floats(*self.sizes(least, most))

    def narrowed(self, shape: Shape) -> Shape:
        """Return a shape that broadcasts to this one: dims of size 1, leading dims left out."""
        ones = tuple(self.one_of(n, n, 1) for n in shape)
        return ones[self.one_of(0, 0, self.random.randint(0, len(shape))) :]

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return two operands that broadcast, of one shape most often."""
        shape = self.sizes(1, 3)
        both = [self.unit(*shape), self.unit(*self.narrowed(shape))]
        return tuple(self.random.sample(both, 2))  # type: ignore[return-value]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


@dataclass(frozen=True)
class Sample:
    """How to draw a call of `source`, which is what a model calls; normalization may make another operator of it."""

    source: str
    make: Callable[[Draw], Call]


Row = tuple[str, Callable[[Draw], Call]]


def _elementwise() -> list[Row]:
    return [
        (
            """neg abs exp exp2 expm1 tanh sigmoid sin cos tan sinh cosh erf erfc gelu silu relu relu6 leaky_relu elu
            selu celu hardtanh hardswish hardsigmoid softplus mish log_sigmoid floor ceil round trunc sign sgn isnan
            isinf isfinite logical_not nan_to_num detach frac square atan asinh hardshrink""",
            lambda d: call(d.x(0)),
        ),
        (
            "log log2 log10 log1p sqrt rsqrt reciprocal asin acos atanh lgamma logit",
            lambda d: call(d.unit(*d.sizes(0, 3))),
        ),
        ("acosh", lambda d: call(d.unit(*d.sizes(0, 3)) + 1)),
        ("bitwise_not", lambda d: call(d.ids(9, *d.sizes(1, 3)))),
        ("clamp", lambda d: call(d.x(), -0.5, d.one_of(None, 0.5))),
        ("clamp_min clamp_max", lambda d: call(d.x(), 0.25)),
        ("threshold", lambda d: call(d.x(), 0.1, 20.0)),
        ("round.decimals", lambda d: call(d.x(), decimals=1)),
        # Multiples of a quarter are exact in every dtype.
        ("_to_copy", lambda d: call((d.x() * 4).round() / 4, dtype=d.one_of(torch.float32, torch.int64, torch.bool))),
        ("fill.Scalar", lambda d: call(d.x(), 2.0)),
        ("fill.Tensor", lambda d: call(d.x(), d.floats())),
        ("add.Tensor sub.Tensor rsub.Tensor", lambda d: call(*d.pair(), **d.one_of({}, {"alpha": 3}))),
        ("add.Tensor sub.Tensor", lambda d: call(d.x(), d.one_of(0, 0.0, 0.5))),
        (
            """mul.Tensor div.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor remainder.Tensor
            fmod.Tensor xlogy.Tensor pow.Tensor_Tensor logical_and logical_or logical_xor maximum minimum atan2
            max.other min.other fmax fmin hypot logaddexp isclose copysign.Tensor""",
            lambda d: call(*d.pair()),
        ),
        (
            """add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar
            ge.Scalar remainder.Scalar fmod.Scalar pow.Tensor_Scalar xlogy.Scalar_Other""",
            lambda d: call(d.unit(*d.sizes(1, 3)), 0.5),
        ),
        ("pow.Scalar xlogy.Scalar_Self", lambda d: call(0.5, d.unit(*d.sizes(1, 3)))),
        ("div.Tensor_mode", lambda d: call(*d.pair(), rounding_mode=d.one_of("floor", "trunc", None))),
        ("div.Scalar_mode", lambda d: call(d.x(), 0.3, rounding_mode=d.one_of("floor", "trunc"))),
        (
            """bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor
            floor_divide""",
            lambda d: call(*((t * 8).long() + 1 for t in d.pair())),
        ),
        (
            """bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar __xor__.Scalar
            floor_divide.Scalar""",
            lambda d: call(d.ids(9, *d.sizes(1, 3)), 5),
        ),
        ("lerp.Tensor addcmul addcdiv", lambda d: call(d.unit(*(s := d.sizes(1, 3))), d.unit(*s), d.unit(*s))),
        ("lerp.Scalar", lambda d: call(*d.pair(), 0.3)),
        ("where.self", lambda d: call((p := d.pair())[0] > 0.5, p[1], d.floats(*p[0].shape))),
        ("where.ScalarOther", lambda d: call((p := d.pair())[0] > 0.5, p[1], 2.0)),
        ("where.ScalarSelf", lambda d: call((p := d.pair())[0] > 0.5, 2.0, p[1])),
        ("where.Scalar", lambda d: call(d.bools(*d.sizes(1, 3)), 2.0, 3.0)),
        ("masked_fill.Scalar", lambda d: call(x := d.x(), d.bools(*d.narrowed(x.shape)), -2.0)),
        ("masked_fill.Tensor", lambda d: call(x := d.x(), d.bools(*d.narrowed(x.shape)), d.floats())),
        ("clamp.Tensor", lambda d: call(x := d.x(), d.floats(*d.narrowed(x.shape)), None)),
        ("_prelu_kernel", lambda d: call(x := d.x(), d.floats(*d.narrowed(x.shape)))),
        ("bucketize.Tensor", lambda d: call(d.x(), torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64))),
        ("glu", lambda d: call(d.floats(*d.sizes(0, 2), d.one_of(4, 6)), -1)),
    ]


def _contractions() -> list[Row]:
    return [
        ("linear", lambda d: call(x := d.x(), d.floats(n := d.size(), x.shape[-1]), d.one_of(None, d.floats(n)))),
        ("mm", lambda d: call(d.floats(*(s := d.sizes(3))[:2]), d.floats(*s[1:]))),
        ("bmm", lambda d: call(d.floats(*(s := d.sizes(4))[:3]), d.floats(s[0], s[2], s[3]))),
        ("mv", lambda d: call(x := d.x(2, 2), d.floats(x.shape[1]))),
        ("dot vdot", lambda d: call(x := d.x(1, 1), d.floats(*x.shape))),
        ("outer", lambda d: call(d.floats(d.size()), d.floats(d.size()))),
        ("matmul", _matmul),
        ("einsum", _einsum),
        ("aten.mm.default addmm", lambda d: _added(d, "mn", "mk", "kn")),
        ("aten.bmm.default baddbmm", lambda d: _added(d, "bmn", "bmk", "bkn")),
        ("aten.mv.default addmv", lambda d: _added(d, "m", "mk", "k")),
        ("aten.outer.default addr", lambda d: _added(d, "mn", "m", "n")),
        ("bilinear", lambda d: call(d.floats(3, 4, 2), d.floats(3, 4, 5), d.floats(6, 2, 5), d.floats(6))),
        ("cdist", lambda d: call(d.floats(*(s := d.sizes(4))[:3]), d.floats(s[0], s[3], s[2]), d.one_of(1.0, 2.0))),
    ]


def _matmul(d: Draw) -> Call:
    m, k, n, *batch = d.sizes(3, 5)
    left = (*d.narrowed(tuple(batch)), m, k) if d.one_of(True, True, False) else (k,)
    right = (*(batch if len(left) > 1 else d.one_of(batch, ())), k, n)
    return call(d.floats(*left), d.floats(*d.one_of(right, right, (k,))))


def _einsum(d: Draw) -> Call:
    equation = d.one_of(
        "ij,jk->ik", "bij,bjk", "bhid,bhjd->bhij", "i,j->ij", "bij->bi", "...ij,...jk->...ik", "abc,cd,ae->ebd",
        "ij,ij", "bsrd,csr->bcd", "...i,ij->...j", "biX,bX->Xi",
    )  # fmt: skip
    known = dict(zip("abcdehijkrsX.", d.random.sample((2, 3, 4, 5, 6, 2, 3, 4, 5, 6, 2, 3, 4), 13), strict=True))
    terms = equation.replace("...", ".").split("->")[0].split(",")
    return call(equation, [d.floats(*(known[c] for c in term)) for term in terms])


def _added(d: Draw, *operands: str) -> Call:
    """Return a product of the second and third operand, added to the first, which broadcasts; both may be scaled."""
    sizes = dict(zip("bmkn", d.sizes(4), strict=True))
    bias, x, y = ([sizes[c] for c in operand] for operand in operands)
    return call(d.floats(*d.narrowed(tuple(bias))), d.floats(*x), d.floats(*y), **d.one_of({}, {"beta": 2, "alpha": 3}))


def _attention(d: Draw, p: float = 0.0) -> Call:
    batch, kv_heads, queries, keys, width, value_width = d.random.sample((2, 3, 4, 5, 6, 2), 6)
    groups, causal = d.one_of(1, 1, 2), d.one_of(True, False)
    outer = () if groups == 1 and d.one_of(True, False, False) else (batch,)
    q = d.floats(*outer, kv_heads * groups, queries, width)
    k, v = d.floats(*outer, kv_heads, keys, width), d.floats(*outer, kv_heads, keys, value_width)
    mask = None if causal else d.one_of(None, _mask(d, (*outer, kv_heads * groups, queries, keys)))
    return call(q, k, v, mask, p, causal, scale=d.one_of(None, 0.3), enable_gqa=groups > 1)


def _documents(d: Draw) -> Call:
    """Return attention inside documents, in one piece or not, of as many queries as keys or not."""
    batch, kv_heads, queries, keys, width, value_width = d.random.sample((2, 3, 4, 5, 6, 2), 6)
    groups, causal = d.one_of(1, 1, 2), d.one_of(True, False)
    q, k = d.floats(batch, kv_heads * groups, queries, width), d.floats(batch, kv_heads, keys, width)
    v, rows = d.floats(batch, kv_heads, keys, value_width), d.one_of(batch, batch, 1)
    numbers = d.ids(3, rows, max(queries, keys))
    numbers = numbers.cumsum(-1) if d.one_of(True, False) else numbers
    mine, theirs = numbers[:, None, :queries, None].clone(), numbers[:, None, None, :keys].clone()
    return call(q, k, v, mine, theirs, causal, d.one_of(None, 0.3))


def _mask(d: Draw, shape: Shape) -> Tensor:
    """Return a mask, bool or added, that broadcasts to the scores and lets every query see the first key."""
    shape = d.one_of(shape, shape[-2:], (*(1 for _ in shape[:-2]), *shape[-2:]), (*shape[:-3], 1, *shape[-2:]))
    mask = d.bools(*shape) | (torch.arange(shape[-1]) == 0)
    return mask if d.one_of(True, False) else d.floats(*shape)


def _experts(d: Draw) -> Call:
    tokens, chosen, hidden, count, width = d.size(), 2, d.size(), d.one_of(2, 4), d.size()
    ids = d.distinct(count, chosen, 1, tokens)
    up, down = d.floats(count, 2 * width, hidden), d.floats(count, hidden, width)
    return call(d.floats(tokens, hidden), ids, d.unit(tokens, chosen), up, down, d.one_of("silu", "gelu"))


def _networks() -> list[Row]:
    return [
        ("embedding",
         lambda d: call(d.floats(v := d.size(), d.size()), d.ids(v, *d.sizes(1, 3)), d.one_of(-1, v - 1, 0))),
        ("layer_norm", lambda d: call(x := d.x(2), s := x.shape[d.one_of(-1, -2) :], d.floats(*s), d.floats(*s))),
        ("rms_norm", lambda d: call(x := d.x(2), s := x.shape[d.one_of(-1, -2) :], d.floats(*s))),
        ("group_norm",
         lambda d: call(d.floats(d.size(), 6, *d.sizes(0, 2)), d.one_of(1, 2, 3), d.floats(6), d.floats(6))),
        ("_weight_norm", lambda d: call(x := d.x(2), d.unit(*_others_one(x, k := d.one_of(0, x.dim() - 1))), k)),
        ("lstm.input", lambda d: _recurrent(d, 4, 2)),
        ("gru.input", lambda d: _recurrent(d, 3)),
        ("rnn_tanh.input rnn_relu.input", lambda d: _recurrent(d, 1)),
        ("lstm_cell", lambda d: _cell(d, 4, 2)),
        ("gru_cell", lambda d: _cell(d, 3)),
        ("rnn_tanh_cell rnn_relu_cell", lambda d: _cell(d, 1)),
        ("instance_norm",
         lambda d: call(x := d.x(3, 4), *(d.floats(x.shape[1]) for _ in "wb"), None, None, True, 0.1, 1e-5, False)),
        ("batch_norm", _batch_norm),
        ("aten.batch_norm.default _native_batch_norm_legit_no_training", _given_norm),
        ("softmax.int log_softmax.int", lambda d: call(x := d.x(), d.dim(x.dim()))),
        ("_softmax _log_softmax", lambda d: call(x := d.x(), d.dim(x.dim()), False)),
        ("scaled_dot_product_attention", _attention),
        ("ss.attention_dropout scaled_dot_product_attention", lambda d: _attention(d, 0.4)),
        ("ss.attention_documents ss.attention_documents.default", _documents),
        ("ss.uniform rand", lambda d: call(d.sizes(1, 3))),
        ("ss.normal randn", lambda d: call(d.sizes(1, 3))),
        ("ss.experts ss.experts.default", _experts),
        ("ss.histc histc", lambda d: call(d.unit(*d.sizes(1, 3)), d.size(), 0.0, 1.0)),
        ("ss.dropout dropout", lambda d: call(d.x(), 0.4, True)),
        ("ss.count_labels cross_entropy_loss", lambda d: _labelled(d, 1, d.one_of(False, True))),
        ("ss.cross_entropy cross_entropy_loss", lambda d: _labelled(d, 1)),
        ("ss.nll_loss nll_loss_nd", lambda d: _labelled(d, 1)),
        ("cross_entropy_loss nll_loss_nd", lambda d: _labelled(d, d.one_of(0, 2), d.one_of(False, True))),
        ("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits",
         lambda d: call(x := d.x(), d.floats(*x.shape), reduction=d.one_of(0, 1, 2))),
        ("soft_margin_loss", lambda d: call(x := d.x(), d.ids(2, *x.shape) * 2 - 1, reduction=d.one_of(0, 1, 2))),
        ("binary_cross_entropy",
         lambda d: call(x := d.unit(*d.sizes(1, 3)), d.unit(*x.shape), reduction=d.one_of(0, 1, 2))),
        ("multi_margin_loss", lambda d: _margins(d, d.ids)),
        ("multilabel_margin_loss", lambda d: _margins(d, lambda n, rows: d.distinct(n, n, 1, rows))),
        ("ss.ctc_losses ctc_loss.Tensor", _ctc),
        ("cosine_similarity", lambda d: call(x := d.x(2), d.floats(*x.shape), d.one_of(0, 1))),
    ]  # fmt: skip


def _others_one(x: Tensor, dim: int) -> list[int]:
    """Return the shape of a tensor with size 1 in all dims but one."""
    return [n if k == dim else 1 for k, n in enumerate(x.shape)]


def _recurrent(d: Draw, gates: int, states: int = 0) -> Call:
    steps, n, width, hidden = d.sizes(4)
    directions, batch_first = d.one_of(1, 2), d.one_of(True, False)
    x = d.floats(*((n, steps) if batch_first else (steps, n)), width)
    given = [d.floats(directions, n, hidden) for _ in range(states or 1)]
    shapes = (gates * hidden, width), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)
    weights = [d.floats(*shape) for _ in range(directions) for shape in shapes]
    return call(x, given if states else given[0], weights, True, 1, 0.0, True, directions == 2, batch_first)


def _cell(d: Draw, gates: int, states: int = 0) -> Call:
    n, width, hidden = d.sizes(3)
    given = [d.floats(n, hidden) for _ in range(states or 1)]
    shapes = (gates * hidden, width), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)
    return call(d.floats(n, width), given if states else given[0], *(d.floats(*shape) for shape in shapes))


def _batch_norm(d: Draw) -> Call:
    x, training = d.x(2, 4), d.one_of(True, False)
    weight, bias, mean, variance = (d.unit(x.shape[1]) for _ in range(4))
    statistics = (None, None) if training else (Buffer(mean), Buffer(variance))
    return call(x, weight, bias, *statistics, training, 0.1, 1e-5, False)


def _given_norm(d: Draw) -> Call:
    x = d.x(2, 4)
    weight, bias, mean, variance = (d.unit(x.shape[1]) for _ in range(4))
    return call(x, weight, bias, Buffer(mean), Buffer(variance), 0.1, 1e-5)


def _ctc(d: Draw) -> Call:
    n, classes, most = d.sizes(3)
    labels, few = d.ids(classes - 1, n, most) + 1, d.ids(most, n) + 1
    return call(d.floats(12, n, classes).log_softmax(-1), labels, d.ids(2, n) + 11, few, 0, d.one_of(0, 1, 2))


def _margins(d: Draw, labels: Callable[[int, int], Tensor]) -> Call:
    n, classes = d.sizes(2, 2)
    return call(d.floats(n, classes), labels(classes, n), reduction=d.one_of(0, 1, 2))


def _labelled(d: Draw, reduction: int, is_weighted: bool = False) -> Call:
    n, classes, *rest = d.sizes(2, 4)
    ignored = d.one_of(-100, 1)
    labels = d.ids(classes, n, *rest).masked_fill(d.unit(n, *rest) < 0.3, ignored)
    labels.view(-1)[0] = 0
    weight = Buffer(d.unit(classes)) if is_weighted else None
    return call(d.floats(n, classes, *rest), labels, weight, reduction, ignored)


def _shapes() -> list[Row]:
    return [
        ("view _unsafe_view", _view),
        ("unsqueeze", lambda d: call(x := d.x(), d.dim(x.dim() + 1))),
        ("permute", lambda d: call(x := d.x(), d.random.sample(range(x.dim()), x.dim()))),
        ("transpose.int", lambda d: call(x := d.x(), d.dim(x.dim()), d.dim(x.dim()))),
        ("t", lambda d: call(d.x(0, 2))),
        ("expand", lambda d: call(d.floats(*d.narrowed((s := d.sizes(2, 4))[1:])), s)),
        ("repeat", lambda d: call(x := d.x(), [*d.one_of((), (2,)), *(d.one_of(1, 2, 3) for _ in x.shape)])),
        ("split.Tensor", lambda d: _split(d, lambda n, dim: (n // d.one_of(1, 2), dim))),
        ("split_with_sizes", lambda d: _split(d, lambda n, dim: ([n // 2] * 2, dim))),
        ("unbind.int", lambda d: call(x := d.x(2), d.dim(x.dim()))),
        ("aten.slice.Tensor slice.Tensor", lambda d: call(d.floats(4, 6, 3), d.one_of(0, 1), d.one_of(0, 1), None, 2)),
        ("slice.Tensor", lambda d: call(x := d.x(2), k := d.dim(x.dim()), n := d.one_of(0, 1), x.shape[k] - 1 + n)),
        ("cumsum cumprod cummax cummin logcumsumexp", lambda d: call(x := d.x(2), d.dim(x.dim()))),
        ("roll", lambda d: call(x := d.x(2), [1] * len(k := d.some_dims(x.dim())), k)),
        ("flip", lambda d: call(x := d.x(2), d.some_dims(x.dim()))),
        ("diff", lambda d: call(x := d.x(2), 1, d.dim(x.dim()))),
        ("topk", lambda d: call(x := d.x(2), 2, d.dim(x.dim()))),
        ("sort argsort", lambda d: call(x := d.x(2), d.dim(x.dim()), d.one_of(True, False))),
        ("sort.stable", lambda d: call(x := d.x(2), stable=True, dim=d.dim(x.dim()))),
        ("linalg_cross cross", lambda d: call(d.floats(3, *(s := d.sizes(1, 2))), d.floats(3, *s), dim=0)),
        ("slice_scatter", lambda d: call(x := d.x(2), d.floats(1, *x.shape[1:]), 0, 1, 2)),
        ("select.int", lambda d: call(x := d.x(2), d.dim(x.dim()), 1)),
        ("select_scatter", lambda d: call(x := d.x(2), d.floats(*x.select(k := d.dim(x.dim()), 0).shape), k, 1)),
        ("diagonal", lambda d: call(x := d.x(3), 0, *d.random.sample(range(x.dim()), 2))),
        ("unfold", lambda d: call(x := d.x(2), d.dim(x.dim()), 2, 1)),
        ("pad", lambda d: call(d.x(2), [d.one_of(0, 1, -1), 1, *d.one_of((), (0, 0))], "constant", 2.0)),
        ("constant_pad_nd", lambda d: call(d.x(2), [d.one_of(0, 1), 1, *d.one_of((), (0, 0))], 2.0)),
        ("cat", _concatenation),
        ("stack", lambda d: call([d.floats(*(s := d.sizes(1, 3))), d.floats(*s)], d.dim(len(s) + 1))),
        ("tril triu", lambda d: call(d.x(3, 4), d.one_of(-1, 0, 1))),
        ("one_hot", lambda d: call(d.ids(5, *d.sizes(1, 2)), 5)),
    ]


def _view(d: Draw) -> Call:
    x = d.floats(*d.one_of((4, 6), (2, 12), (3, 2, 4), (6, 4), (4, 3, 5), (2, 2, 3, 5)))
    return call(x, d.one_of((x.numel(),), (x.shape[0], -1), (-1, x.shape[-1]), (-1, 2, 2), (2, 1, -1)))


def _split(d: Draw, arguments: Callable[[int, int], tuple[Any, int]]) -> Call:
    shape = list(d.sizes(1, 3))
    dim = d.dim(len(shape))
    shape[dim] = d.one_of(4, 6)
    return call(d.floats(*shape), *arguments(shape[dim], dim))


def _concatenation(d: Draw) -> Call:
    shape = list(d.sizes(2, 3))
    dim = d.dim(len(shape))
    first = d.floats(*shape)
    shape[dim] = d.size()
    return call([first, d.floats(*shape)], dim)


def _lookups() -> list[Row]:
    return [
        ("index.Tensor", _index),
        ("index_put", _index_put),
        ("aten.where.self index_put", _masked_put),
        ("index_select", lambda d: call(x := d.x(), k := d.dim(x.dim()), d.ids(x.shape[k], d.size()))),
        ("index_add index_copy", _index_write),
        ("index_fill.int_Scalar", lambda d: call(x := d.x(2), k := d.dim(x.dim()), d.ids(x.shape[k], 2), 3.0)),
        ("index_fill.int_Tensor", lambda d: call(x := d.x(2), k := d.dim(x.dim()), d.ids(x.shape[k], 2), d.floats())),
        ("gather", _gather),
        ("scatter.src scatter_add", lambda d: _scatter(d, lambda src: (src,))),
        ("scatter.value", lambda d: _scatter(d, lambda src: (2.0,))),
        ("scatter_reduce.two", lambda d: _scatter(d, lambda src: (src, d.one_of("sum", "amax", "mean")))),
    ]


def _index(d: Draw) -> Call:
    x = d.x(2, 4)
    count = d.random.randint(1, x.dim() - 1)
    first = d.random.randint(0, x.dim() - count)
    shape = d.sizes(1, 2)
    indices = [d.ids(x.shape[first + k], *(shape if k == 0 else d.narrowed(shape))) for k in range(count)]
    return call(x, [None] * first + indices)


def _index_put(d: Draw) -> Call:
    """Return x[:, i] = values with each row of i once, or accumulated."""
    x, first = d.x(2), d.one_of(0, 1)
    rows = d.distinct(x.shape[first], 2)
    result = (*x.shape[:first], 2, *x.shape[first + 1 :])
    return call(x, [None] * first + [rows], d.floats(*d.narrowed(result)), d.one_of(True, False))


def _masked_put(d: Draw) -> Call:
    x = d.x(2)
    rank = d.random.randint(1, x.dim())
    return call(x, [d.bools(*x.shape[:rank])], d.floats(*d.one_of((), x.shape[rank:])))


def _index_write(d: Draw) -> Call:
    x = d.x(2)
    k = d.dim(x.dim())
    shape = list(x.shape)
    shape[k] = 2
    return call(x, k, d.distinct(x.shape[k], 2), d.floats(*shape))


def _gather(d: Draw) -> Call:
    x = d.x()
    k = d.dim(x.dim())
    shape = [n - d.one_of(0, 0, 1) for n in x.shape]
    shape[k] = d.size()
    return call(x, k, d.ids(x.shape[k], *shape))


def _scatter(d: Draw, source: Callable[[Tensor], tuple[Any, ...]]) -> Call:
    """Return a write along a dim to places that differ, of all or some of the other dims."""
    x = d.x(2)
    k = d.dim(x.dim())
    shape = [n - d.one_of(0, 0, 0, 1) for n in x.shape]
    others = [n for dim, n in enumerate(shape) if dim != k % x.dim()]
    places = d.distinct(x.shape[k], 2, k % x.dim(), *others)
    return call(x, k, places, *source(d.floats(*places.shape)))


def _reductions() -> list[Row]:
    return [
        ("sum max min prod var std count_nonzero", lambda d: call(d.x(1))),
        ("mean", lambda d: d.one_of(call(d.x()), call(d.ids(9, *d.sizes(2)), dtype=torch.float64))),
        ("any all", lambda d: call(d.bools(*d.sizes(1, 3)))),
        ("norm.Scalar", lambda d: call(d.x())),
        (
            """sum.dim_IntList mean.dim amax amin var.correction var.dim std.dim std.correction logsumexp var_mean.dim
            var_mean.correction std_mean.dim std_mean.correction""",
            lambda d: call(x := d.x(2), d.some_dims(x.dim()), keepdim=d.one_of(True, False)),
        ),
        ("count_nonzero.dim_IntList", lambda d: call(d.bools(*d.sizes(2, 3)), d.one_of([0], [-1], [0, 1]))),
        ("max.dim min.dim prod.dim_int argmax argmin median.dim",
         lambda d: call(x := d.x(2), d.dim(x.dim()), d.one_of(True, False))),
        ("any.dim all.dim", lambda d: call(x := d.bools(*d.sizes(2, 3)), d.dim(x.dim()), d.one_of(True, False))),
        ("any.dims all.dims",
         lambda d: call(x := d.bools(*d.sizes(2, 3)), d.some_dims(x.dim()), d.one_of(True, False))),
        ("linalg_vector_norm norm.ScalarOpt_dim",
         lambda d: call(x := d.x(2), 2.0, d.some_dims(x.dim()), d.one_of(True, False))),
    ]  # fmt: skip


def _space() -> list[Row]:
    return [
        ("conv1d", lambda d: _convolution(d, 1)),
        ("conv2d", lambda d: _convolution(d, 2)),
        ("conv3d", lambda d: _convolution(d, 3)),
        ("conv1d.padding", lambda d: _convolution(d, 1, d.one_of("same", "valid"))),
        ("conv2d.padding", lambda d: _convolution(d, 2, d.one_of("same", "valid"))),
        ("conv3d.padding", lambda d: _convolution(d, 3, d.one_of("same", "valid"))),
        ("conv_transpose1d", lambda d: _transposed(d, 1)),
        ("conv_transpose2d.input", lambda d: _transposed(d, 2)),
        ("conv_transpose3d.input", lambda d: _transposed(d, 3)),
        ("convolution", _general_convolution),
        ("max_pool1d avg_pool1d", lambda d: call(d.floats(*d.sizes(1, 2), 5), [2])),
        ("adaptive_avg_pool1d adaptive_max_pool1d", lambda d: call(d.floats(*d.sizes(1, 2), 5), [2])),
        ("max_pool2d avg_pool2d max_pool2d_with_indices", lambda d: call(d.floats(*d.sizes(1, 2), 5, 4), [2, 2])),
        ("max_pool1d avg_pool1d", lambda d: call(d.floats(*d.sizes(1, 2), 6), [k := d.one_of(1, 2, 3)], [k])),
        ("max_pool2d avg_pool2d", lambda d: call(d.floats(*d.sizes(1, 2), 6, 5), [d.one_of(2, 3), 2])),
        ("adaptive_avg_pool2d adaptive_max_pool2d", lambda d: call(d.floats(*d.sizes(1, 2), 6, 4), [3, 2])),
        ("conv1d", lambda d: _patches(d, d.one_of(1, 2))),
        ("conv2d", lambda d: _patches(d, 2, d.one_of(1, 3))),
        ("conv2d.padding", lambda d: _patches(d, 1, 1, padding="same")),
        ("conv_transpose2d.input", lambda d: call(d.floats(2, 3, 4, 3), d.floats(3, 2, 2, 3), None, [2, 3])),
        ("adaptive_avg_pool2d adaptive_max_pool2d", lambda d: call(d.floats(*d.sizes(1, 2), 5, 4), [2, 1])),
        ("max_pool3d avg_pool3d", lambda d: call(d.floats(*d.sizes(1, 2), 2, 5, 4), [2, 2, 1])),
        ("adaptive_avg_pool3d adaptive_max_pool3d", lambda d: call(d.floats(*d.sizes(1, 2), 2, 5, 4), [1, 2, 1])),
        ("upsample_nearest1d.vec", lambda d: call(d.x(3, 3), [7], None)),
        ("upsample_nearest2d.vec", lambda d: call(d.x(4, 4), None, [2.0, 1.5])),
        ("upsample_nearest3d.vec", lambda d: call(d.floats(2, 3, 2, 4, 3), None, [2.0, 2.0, 1.5])),
        ("upsample_linear1d.vec", lambda d: call(d.x(3, 3), [7], False, None)),
        ("upsample_bilinear2d.vec upsample_bicubic2d.vec", lambda d: call(d.x(4, 4), [5, 7], False, None)),
        ("upsample_trilinear3d.vec", lambda d: call(d.floats(2, 3, 2, 4, 3), [3, 5, 4], True, None)),
        ("im2col", lambda d: call(d.floats(*d.sizes(2), 4, 5), [2, 3], [1, 1], [0, 1], [1, 1])),
        ("col2im", lambda d: call(d.floats(2, d.one_of(2, 3) * 6, 9), [4, 5], [2, 3], [1, 1], [0, 0], [1, 1])),
        ("pixel_shuffle", lambda d: call(d.floats(*d.sizes(0, 1), d.one_of(4, 12), *d.sizes(2)), 2)),
        ("pixel_unshuffle", lambda d: call(d.floats(*d.sizes(0, 1), d.size(), 4, 6), 2)),
        (
            "grid_sampler",
            lambda d: call(
                d.floats(n := d.size(), d.size(), 4, 5), d.unit(n, *d.sizes(2), 2), 0, 0, d.one_of(True, False)
            ),
        ),
    ]


def _channels(d: Draw) -> tuple[int, int, int]:
    """Return groups, and input and output channels per group."""
    return d.one_of((1, 3, 4), (1, 4, 2), (2, 3, 2), (3, 2, 4), (4, 1, 1), (3, 1, 2), (2, 2, 1))


def _convolution(d: Draw, rank: int, padding: str = "") -> Call:
    groups, inner, outer = _channels(d)
    space = d.random.sample((4, 5, 3), rank)
    x, weight = d.floats(d.size(), groups * inner, *space), d.floats(groups * outer, inner, *(2 for _ in space))
    bias = d.one_of(None, d.floats(groups * outer))
    return call(x, weight, bias, [1] * rank, padding or [1] * rank, [1] * rank, groups)


def _transposed(d: Draw, rank: int) -> Call:
    groups, inner, outer = _channels(d)
    x = d.floats(d.size(), groups * inner, *d.random.sample((4, 2, 3), rank))
    bias = d.one_of(None, d.floats(groups * outer))
    return call(x, d.floats(groups * inner, outer, *[2] * rank), bias, [2] * rank, [1] * rank, [0] * rank, groups)


def _patches(d: Draw, *kernel: int, padding: Any = 0) -> Call:
    """Return a convolution whose windows touch and do not overlap."""
    places = d.random.sample((4, 2, 3), len(kernel))
    x = d.floats(d.size(), 3, *(n * k for n, k in zip(places, kernel, strict=True)))
    bias = d.one_of(None, d.floats(4))
    return call(x, d.floats(4, 3, *kernel), bias, list(kernel), padding or [0] * len(kernel))


def _general_convolution(d: Draw) -> Call:
    (groups, inner, outer), transposed = _channels(d), d.one_of(True, False)
    x, bias = d.floats(d.size(), groups * inner, 4, 5), d.one_of(None, d.floats(groups * outer))
    shape = (groups * inner, outer, 2, 3) if transposed else (groups * outer, inner, 2, 3)
    return call(x, d.floats(*shape), bias, [2, 1], [1, 0], [1, 1], transposed, [0, 0], groups)


# Reductions of everything whose parts do not add up: no index of theirs can be cut.
FROZEN = frozenset(f"aten.{name}" for name in (
    "max.default", "min.default", "any.default", "all.default", "prod.default", "var.default", "std.default",
    "norm.Scalar",
))  # fmt: skip


def _name(word: str) -> str:
    return word if word.startswith(("ss.", "aten.")) else f"aten.{word}" if "." in word else f"aten.{word}.default"


def _table() -> dict[str, list[Sample]]:
    """Return the samples of each operator. A row that begins with ss. or aten. says after it what becomes of it."""
    found: dict[str, list[Sample]] = {}
    for names, make in (
        *_elementwise(), *_contractions(), *_networks(), *_shapes(), *_lookups(), *_reductions(), *_space()
    ):  # fmt: skip
        words = [_name(word) for word in names.split()]
        is_rewritten = names.startswith(("ss.", "aten."))
        for name, source in [(words[0], words[1])] if is_rewritten else [(w, w) for w in words]:
            found.setdefault(name, []).append(Sample(source, make))
    return found


SAMPLES = _table()
