"""Readable names of factors, and what the user calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import InputError
from superscaler.frontend.base.captured import Captured
from superscaler.frontend.capture import capture
from tests.frontend.examples import Mlp
from tests.helpers.graphs import assert_equal, step_of
from tests.helpers.ran import Around, equal, kinds


def names(captured: Captured | ss.Graph, tensor: str) -> tuple[tuple[str, ...], ...]:
    return captured.model.tensors[tensor].slots


H, ATTENTION = "h.1.attn.heads", "aten.scaled_dot_product_attention.default"
PACKED = ("h.1.attn.c_attn.packed", H, "h.1.attn.head_dim")
KV, GROUPS = "layers.1.self_attn.kv_heads", "layers.1.self_attn.groups"
# The slots of tensors of a model, and the marks of factors of its ops.
SLOTS = {
    "gpt2": {
        "input_ids": (("batch",), ("sequence",)),
        "transformer.wte.weight": (("vocabulary",), ("hidden",)),
        "transformer.wpe.weight": (("wpe.rows",), ("hidden",)),
        "transformer.h.1.attn.c_attn.weight": (("hidden",), PACKED),
        "transformer.h.1.attn.c_attn.bias": (PACKED,),
        "transformer.h.1.attn.c_proj.weight": (PACKED[1:], ("hidden",)),
        "transformer.h.1.mlp.c_fc.weight": (("hidden",), ("h.1.mlp",)),
        "transformer.h.1.mlp.c_proj.weight": (("h.1.mlp",), ("hidden",)),
    },
    "llama": {
        "model.layers.1.self_attn.q_proj.weight": ((KV, GROUPS, "head_dim"), ("hidden",)),
        "model.layers.1.self_attn.k_proj.weight": ((KV, "head_dim"), ("hidden",)),
        "model.layers.1.self_attn.v_proj.weight": ((KV, "layers.1.self_attn.value_dim"), ("hidden",)),
        "model.layers.1.self_attn.o_proj.weight": (("hidden",), (KV, GROUPS, "layers.1.self_attn.value_dim")),
        "model.layers.1.mlp.gate_proj.weight": (("layers.1.mlp",), ("hidden",)),
        # The head of this model is not tied: what it predicts are classes of their own.
        "lm_head.weight": (("classes",), ("hidden",)),
        "model.embed_tokens.weight": (("vocabulary",), ("hidden",)),
    },
}
MARKS = {
    "gpt2": [
        ("aten.mm.default", "h.1.attn.c_attn", H, "spatial"), ("aten.split.Tensor", "h.1.attn", H, "spatial"),
        (ATTENTION, "h.1.attn", H, "spatial"), ("aten.mm.default", "h.1.attn.c_proj", H, "summed"),
    ],
    "llama": [
        *((ATTENTION, "layers.1.self_attn", f, "spatial") for f in (KV, GROUPS)),
        *(("aten.linear.default", "layers.1.self_attn.o_proj", f, "summed") for f in (KV, GROUPS)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SLOTS)
def test_dims_of_models_are_named_and_cut(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(f"{name}_captured").model
    assert {tensor: model.tensors[tensor].slots for tensor in SLOTS[name]} == SLOTS[name]
    for target, module, factor, mark in MARKS[name]:
        op = next(op for op in model.ops if op.target == target and op.module.endswith(module))
        assert {index.factor: index.mark for index in op.indices}[factor] == mark, op.notation()
        assert target != ATTENTION or op.args[3:6] == (None, 0.0, True)


class Stages(nn.Module):
    """Two stages of two blocks each, with attention by hand, and a second encoder with blocks of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(self.block(8) for _ in range(2))
        self.right = nn.ModuleList(self.block(12) for _ in range(2))
        self.between = nn.Linear(8, 12)

    @staticmethod
    def block(width: int) -> nn.ModuleDict:
        dims = {"q": (width, width), "v": (width, width), "out": (width, width), "up": (width, 20), "down": (20, width)}
        return nn.ModuleDict({name: nn.Linear(*d, bias=False) for name, d in dims.items()})

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate([*self.left, *self.right]):
            x = self.between(x) if k == 2 else x
            q, v = (block[n](x).unflatten(-1, (2, -1)).transpose(1, 2) for n in ("q", "v"))
            x = x + block["out"](((q @ q.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + block["down"](torch.relu(block["up"](x)))
        return x.square().mean()


def test_each_stage_has_its_hidden_and_each_block_its_heads() -> None:
    captured = capture(Stages(), (torch.randn(4, 3, 8),))
    # The first stage flows in from the input, which names its dims.
    assert names(captured, "left.1.q.weight") == (("left.1.heads", "left.1.q.head_dim"), ("x.2",))
    assert names(captured, "left.1.out.weight") == (("x.2",), ("left.1.heads", "left.1.head_dim"))
    assert names(captured, "right.0.v.weight") == (("right.0.heads", "right.0.head_dim"), ("hidden",))
    assert names(captured, "right.0.up.weight") == (("right.0.mlp",), ("hidden",))
    assert names(captured, "between.weight") == (("hidden",), ("x.2",))


def test_inputs_of_one_batch_size_share_the_factor() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return self.left(x).square().mean() + self.right(y).square().mean() + self.third(z).square().mean()

    towers = step_of(Towers(), torch.randn(4, 6), torch.randn(4, 6), torch.randn(3, 6))
    assert [names(towers, n)[0] for n in ("x", "y", "z")] == [("batch",), ("batch",), ("batch.2",)]
    grids = ss.compile(towers, "data_parallel", "local:4").compiled.graph.grids
    cut = {op.module for op in towers.ops if any(axis.index is not None for axis in grids[op.name].axes)}
    assert {"left", "right"} <= cut
    assert "third" not in cut
    assert_equal(towers, cluster=4)


def graph() -> ss.Graph:
    return step_of(Mlp(), torch.randn(4, 12), torch.randn(4, 12))


def test_a_renamed_factor_is_cut_by_its_new_name() -> None:
    mine = graph()
    before = mine.ops
    hidden = mine.model.tensors["second.weight"].slots[1][0]
    mine.rename_factor(hidden, "width")
    assert hidden not in mine.factors
    assert mine.factors["width"].size == 12
    assert mine.model.tensors["first.weight"].slots[0] == ("width",)
    assert mine.journal[-1].where.startswith(__file__)
    assert f"rename_factor {hidden} to width" in str(mine.journal[-1])

    def plan(inner: ss.Graph, cluster: ss.Cluster) -> None:
        # The handles are older than the name.
        for op in before:
            algorithm = ss.Split("width", 2) if op.is_forward else ss.Replicate(2)
            ss.op_assign(inner, ss.op_trans(inner, op, algorithm), cluster.devices)

    compiled = ss.compile(mine, plan, "local:2")
    assert any("width" in str(e) and "replicated" not in str(e) for e in compiled.compiled.graph.journal)
    assert sum(axis.index is not None for g in compiled.compiled.graph.grids.values() for axis in g.axes) > 2
    assert compiled.verify()["equal"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bach", "b", r"unknown factor 'bach'; did you mean 'batch'\?"),
        ("batch", "x.1", r"'x\.1' is the name of another factor; choose another"),
        ("batch", "two words", r"'two words' is no name \(letters, digits, _ and \.\)"),
    ],
)
def test_wrong_names_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        graph().rename_factor(old, new)


def _views(how: str) -> Callable[..., Tensor]:
    """Return a step on two views of each sample, which are in the two halves of its rows."""
    halves: dict[str, Callable[[Tensor], Any]] = {
        "chunk": lambda z: z.chunk(2),
        "split": lambda z: z.split(8),
        "view": lambda z: z.view(2, -1, 6),
        "unbind": lambda z: z.view(2, 8, 6).unbind(),
        "contrastive": lambda z: z.chunk(2),
    }

    def step(m: Around, x: Tensor) -> Tensor:
        pair = halves[how](m.inner(x))
        if how == "contrastive":
            return F.cross_entropy(pair[0] @ pair[1].t(), torch.arange(8))
        return (1 - F.cosine_similarity(pair[0], pair[1], dim=-1)).mean()

    return step


@pytest.mark.parametrize("how", ["chunk", "split", "view", "unbind", "contrastive"])
def test_pairs_in_the_halves_of_a_batch_are_cut_by_samples(how: str) -> None:
    """The batch is the 8 samples, not the 2 views: 4 devices have 2 samples each, with both views."""
    torch.manual_seed(0)
    module = Around(_views(how), inner=nn.Linear(6, 6))
    graph = ss.capture(module, (torch.randn(16, 6),), optimizer=torch.optim.SGD(module.parameters(), 0.1))
    assert graph.model.tensors[graph.model.inputs[0]].slots[0] == ("batch.2", "batch")
    for plan in ("data_parallel", "pipeline_1f1b:2,microbatches=2 x data_parallel:2"):
        if how != "contrastive" or plan == "data_parallel":
            ran = equal(graph, plan, 4)
            # Gradients travel, and no row of a sample.
            assert how == "contrastive" or plan != "data_parallel" or kinds(ran.program).keys() == {"all_reduce"}
