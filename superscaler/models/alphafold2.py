"""The Evoformer of AlphaFold2 (Jumper et al. 2021, supplementary algorithms 3 to 15 and 32), with two of its losses.

Tokens of a multiple sequence alignment (MSA) become an MSA representation (batch, sequences, residues, hidden) and a
pair representation (batch, residues, residues, pair). `layers` Evoformer blocks refine both, `passes` times: all passes
but the last run without gradients, and each starts from the results of the one before (recycling). The loss is 2.0
times the cross entropy of the masked tokens and 0.3 times that of the distances between residues (distogram).

Sizes are those of the paper's table: layers, hidden and heads. The others (pair, pair_heads and outer, the width of the
outer product mean) are chosen to meet its parameter counts (87.9 and 947 million, 2.41 and 3.21 billion), and are
AlphaFold2's own for 87m. Transitions are 4 times as wide. Other parts of AlphaFold2 (templates, extra MSA, structure
module, recycled positions) are left out.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superscaler.errors import InputError
from superscaler.models import family
from superscaler.specs.options import Options, check_divides

_FAMILY = {"sequences": 128, "residues": 256, "batch": 128, "passes": 3, "dropout": 0.15, "pair_dropout": 0.25}
_LARGE = {"hidden": 1024, "heads": 32, "pair": 384, "pair_heads": 16, "outer": 64, **_FAMILY}
_MIDDLE = {"hidden": 512, "heads": 16, "pair": 512, "pair_heads": 16, "outer": 64, **_FAMILY}
_SMALL = {"hidden": 256, "heads": 8, "pair": 128, "pair_heads": 4, "outer": 32, **_FAMILY}
_TINY = {"hidden": 40, "heads": 4, "pair": 24, "pair_heads": 4, "outer": 8, "sequences": 6, "residues": 12, "batch": 8}
_SIZES = {
    "tiny": {"layers": 2, **_TINY, "passes": 3, "dropout": 0.0, "pair_dropout": 0.0},
    "87m": {"layers": 48, **_SMALL},
    "930m": {"layers": 64, **_MIDDLE},
    "2.4b": {"layers": 96, **_LARGE},
    "3.2b": {"layers": 128, **_LARGE},
}
# 20 amino acids, unknown, gap, and the mask; bins of distances; residues further apart than this share one bin.
_TOKENS, _BINS, _FAR = 23, 64, 32
_MASK = _TOKENS - 1


class Attention(nn.Module):
    """Gated self-attention along dim 2, biased by the pair representation if given (algorithms 7, 8, 13)."""

    def __init__(self, width: int, heads: int, pair: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.bias = nn.Linear(pair, heads, bias=False) if pair else None
        self.gate = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, pair: Tensor | None = None) -> Tensor:
        """Return the residual of `x` (batch, rows, length, width), given `pair` (batch, length, length, pair)."""
        packed = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = packed.permute(3, 0, 1, 4, 2, 5).unbind()
        bias = self.bias(pair).permute(0, 3, 1, 2).unsqueeze(1) if self.bias is not None else None
        mixed = F.scaled_dot_product_attention(q, k, v, bias).transpose(2, 3).flatten(-2)
        return self.out(self.gate(x).sigmoid() * mixed)


class Transition(nn.Sequential):
    """A multilayer perceptron, 4 times as wide inside (algorithms 9 and 15)."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class OuterProductMean(nn.Module):
    """The mean over the sequences of the outer products of two residues (algorithm 10)."""

    def __init__(self, hidden: int, outer: int, pair: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.left, self.right = nn.Linear(hidden, outer), nn.Linear(hidden, outer)
        self.out = nn.Linear(outer * outer, pair)

    def forward(self, m: Tensor) -> Tensor:
        m = self.norm(m)
        products = torch.einsum("bsic,bsjd->bijcd", self.left(m), self.right(m)) / m.shape[1]
        return self.out(products.flatten(-2))


class TriangleMultiplication(nn.Module):
    """Gated products of the two other edges of each triangle, as an einsum (algorithms 11 and 12)."""

    def __init__(self, pair: int, edges: str) -> None:
        super().__init__()
        self.edges = edges
        self.norm = nn.LayerNorm(pair)
        self.project, self.project_gate = nn.Linear(pair, 2 * pair), nn.Linear(pair, 2 * pair)
        self.out_norm = nn.LayerNorm(pair)
        self.out, self.gate = nn.Linear(pair, pair), nn.Linear(pair, pair)

    def forward(self, z: Tensor) -> Tensor:
        z = self.norm(z)
        left, right = (self.project_gate(z).sigmoid() * self.project(z)).chunk(2, -1)
        return self.gate(z).sigmoid() * self.out(self.out_norm(torch.einsum(self.edges, left, right)))


class Block(nn.Module):
    """One Evoformer block (algorithm 6)."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        hidden, pair = options["hidden"], options["pair"]
        self.rates = options["dropout"], options["pair_dropout"]
        self.row_norm, self.row_pair_norm = nn.LayerNorm(hidden), nn.LayerNorm(pair)
        self.row = Attention(hidden, options["heads"], pair)
        self.column_norm, self.column = nn.LayerNorm(hidden), Attention(hidden, options["heads"])
        self.transition = Transition(hidden)
        self.outer = OuterProductMean(hidden, options["outer"], pair)
        self.outgoing = TriangleMultiplication(pair, "bikc,bjkc->bijc")
        self.incoming = TriangleMultiplication(pair, "bkic,bkjc->bijc")
        self.start_norm, self.start = nn.LayerNorm(pair), Attention(pair, options["pair_heads"], pair)
        self.end_norm, self.end = nn.LayerNorm(pair), Attention(pair, options["pair_heads"], pair)
        self.pair_transition = Transition(pair)

    def forward(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return both representations, refined; their shapes stay."""
        m = m + self._drop(self.row(self.row_norm(m), self.row_pair_norm(z)), self.rates[0], 1)
        m = m + self.column(self.column_norm(m).transpose(1, 2)).transpose(1, 2)
        m = m + self.transition(m)
        z = z + self.outer(m)
        z = z + self._drop(self.outgoing(z), self.rates[1], 1)
        z = z + self._drop(self.incoming(z), self.rates[1], 1)
        normed = self.start_norm(z)
        z = z + self._drop(self.start(normed, normed), self.rates[1], 1)
        normed = self.end_norm(z).transpose(1, 2)
        z = z + self._drop(self.end(normed, normed).transpose(1, 2), self.rates[1], 2)
        return m, z + self.pair_transition(z)

    def _drop(self, x: Tensor, rate: float, shared: int) -> Tensor:
        """Drop the same elements at every place of the dim `shared`: 1 is dropout by row, 2 by column."""
        if not rate or not self.training:
            return x
        ones = x.new_ones([1 if d == shared else size for d, size in enumerate(x.shape)])
        return x * F.dropout(ones, rate)


class AlphaFold2(nn.Module):
    """Embedders, `layers` Evoformer blocks that run `passes` times, and two heads; `forward` gives the loss."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        hidden, pair = options["hidden"], options["pair"]
        self.widths, self.passes = (hidden, pair), options["passes"]
        # An embedding is a linear on one-hot features.
        self.embed_msa, self.embed_target = nn.Embedding(_TOKENS, hidden), nn.Embedding(_TOKENS, hidden)
        self.embed_left, self.embed_right = nn.Embedding(_TOKENS, pair), nn.Embedding(_TOKENS, pair)
        self.embed_position = nn.Embedding(2 * _FAR + 1, pair)
        self.recycled_row, self.recycled_pair = nn.LayerNorm(hidden), nn.LayerNorm(pair)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options["layers"]))
        self.msa_head = nn.Linear(hidden, _TOKENS)
        self.distance_head = nn.Linear(pair, _BINS)

    def forward(self, target: Tensor, msa: Tensor, labels: Tensor, distances: Tensor) -> Tensor:
        """Return the loss of the tokens `msa` (batch, sequences, residues) of the chain `target` (batch, residues).

        `labels` are the tokens behind the mask, of the shape of `msa`, and `distances` the bins of pairs of residues
        (batch, residues, residues); both leave out -100.
        """
        m, z = self.embed(target, msa)
        row, pair = (m.new_zeros(width) for width in self.widths)
        with torch.no_grad():
            for _ in range(self.passes - 1):
                last, pair = self.refine(m, z, row, pair)
                row = last[:, :1]
        m, z = self.refine(m, z, row, pair)
        logits = self.distance_head(z)
        logits = logits + logits.transpose(1, 2)
        return 2.0 * _cross_entropy(self.msa_head(m), labels) + 0.3 * _cross_entropy(logits, distances)

    def embed(self, target: Tensor, msa: Tensor) -> tuple[Tensor, Tensor]:
        """Return both representations before the first pass (algorithms 3 to 5)."""
        place = torch.arange(target.shape[1], device=target.device)
        offset = (place[:, None] - place).clamp(-_FAR, _FAR) + _FAR
        z = self.embed_left(target).unsqueeze(2) + self.embed_right(target).unsqueeze(1)
        z = z + self.embed_position(offset)
        return self.embed_msa(msa) + self.embed_target(target).unsqueeze(1), z

    def refine(self, m: Tensor, z: Tensor, row: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Return both representations after one pass, given the results of the last: the first row of m, and z.

        The first pass starts from zeros, which may have fewer dims (algorithm 32).
        """
        row = self.recycled_row(row).expand(m[:, :1].shape)
        m, z = m + F.pad(row, (0, 0, 0, 0, 0, m.shape[1] - 1)), z + self.recycled_pair(pair)
        for block in self.blocks:
            m, z = block(m, z)
        return m, z


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def build(name: str, options: Options) -> nn.Module:
    """Return the module. Raises InputError for widths that heads do not divide, and for a rate of dropout above 1."""
    check_divides(name, "hidden", "heads", options)
    check_divides(name, "pair", "pair_heads", options)
    if not 0 <= options["pair_dropout"] < 1:
        raise InputError(f"{name}: pair_dropout is {options['pair_dropout']}, but it must be at least 0, below 1.")
    return AlphaFold2(options)


def make_batch(options: Options, step: int) -> dict[str, Tensor]:
    """Return random tokens. Each chain masks more of them than the chain before, and knows fewer distances."""
    draw = family.generator(options["seed"], step)
    chains, sequences, residues = options["batch"], options["sequences"], options["residues"]
    count = torch.arange(1, chains + 1, device="cpu")
    tokens = torch.randint(_MASK, (chains, sequences, residues), generator=draw, device="cpu")
    masked = torch.rand(tokens.shape, generator=draw, device="cpu") < (0.3 * count / chains)[:, None, None]
    masked[:, 0, 0] = True
    distances = torch.randint(_BINS, (chains, residues, residues), generator=draw, device="cpu")
    unknown = torch.arange(residues, device="cpu") >= residues - (count[:, None] - 1) * residues // (2 * chains)
    return {
        "target": tokens[:, 0].clone(),
        "msa": tokens.masked_fill(masked, _MASK),
        "labels": tokens.masked_fill(~masked, family.IGNORED),
        "distances": distances.masked_fill(unknown[:, None] | unknown[:, :, None], family.IGNORED),
    }


FAMILY = family.Family("87m", _SIZES, build, make_batch)
