"""Two grids in a model: superscaler verify multimodal.py:build --plan multimodal.py:two_grids --cluster local:4"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import superscaler as ss


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, width: int, causal: bool, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        wide: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + wide


class Vision(nn.Module):
    """An encoder of images that come as patches."""

    def __init__(self, pixels: int, width: int, layers: int, patches: int) -> None:
        super().__init__()
        self.patch = nn.Linear(pixels, width)
        self.place = nn.Parameter(torch.randn(patches, width) / 10)
        self.blocks = nn.ModuleList(Block(width, causal=False) for _ in range(layers))

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.patch(images) + self.place
        for block in self.blocks:
            x = block(x)
        return x


class VisionLanguage(nn.Module):
    """A language model that predicts the words which follow an image."""

    def __init__(
        self, layers: int = 4, width: int = 64, words: int = 12, vocabulary: int = 128,
        vision_layers: int = 2, vision_width: int = 32, pixels: int = 48, patches: int = 16,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vision = Vision(pixels, vision_width, vision_layers, patches)
        self.projector = nn.Linear(vision_width, width)
        self.words = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(patches + words, width) / 10)
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        seen = self.projector(self.vision(images))
        x = torch.cat([seen, self.words(tokens)], 1) + self.place
        for block in self.blocks:
            x = block(x)
        # The last patch predicts the first word.
        scores = self.head(self.norm(x[:, seen.shape[1] - 1 : -1]))
        return functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


@ss.sprogram
def two_grids(graph: ss.Graph, cluster: ss.Cluster, tp: int = 2, microbatches: int = 4) -> None:
    """Cut images over all devices (data parallelism), and words into stages of `tp` devices (tensor x pipeline)."""
    images = [op for op in graph.forward_ops if op.module.startswith("vision")]
    words = [op for op in graph.forward_ops if not op.module.startswith("vision")]
    ss.op_trans(graph, images, ss.Split("batch", len(cluster.devices), axis="dp"))
    ss.op_assign(graph, images, cluster.mesh(dp=-1))

    grid, cuts = cluster.mesh(pp=-1, tp=tp), ss.tensor_splits(graph, tp, "tp")
    stages = ss.stages(graph, grid.sizes["pp"], ops=words)
    for place, ops in enumerate(stages):
        ss.op_trans(graph, ops, ss.Microbatch(microbatches))
        for op in ops:
            for cut in cuts.get(op.name, ()):
                ss.op_trans(graph, op, cut)
        ss.op_assign(graph, ops, grid.at(pp=place))
    ss.order(graph, ss.schedule_1f1b(len(stages), microbatches), stages)


def build(batch: int = 8) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the module, and inputs of the global batch with which it is captured."""
    torch.manual_seed(0)
    return VisionLanguage(), (torch.randn(batch, 16, 48), torch.randint(0, 128, (batch, 12)))


def rows(count: int = 200, seed: int = 1) -> list[dict[str, Tensor]]:
    """Return images of eight kinds, each with the words of its kind: --data multimodal.py:rows"""
    draw = torch.Generator().manual_seed(seed)
    looks, texts = torch.randn(8, 16, 48, generator=draw), torch.randint(0, 128, (8, 12), generator=draw)
    kinds = torch.randint(0, 8, (count,), generator=draw)
    return [{"images": looks[k] + torch.randn(16, 48, generator=draw) / 4, "tokens": texts[k]} for k in kinds]
