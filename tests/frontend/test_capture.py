"""What capture finds on unmodified models."""

from __future__ import annotations

import re
from math import pi, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler
from superscaler.errors import CaptureError
from superscaler.frontend.base.captured import Captured
from superscaler.frontend.base.oracle import reference_step
from superscaler.frontend.base.trace import innermost
from superscaler.frontend.capture import capture
from superscaler.ir.model import Model, Op
from tests.frontend.examples import Block, Contractions, Function, Mlp, Regrouped, gpt2, tokens
from tests.helpers.graphs import assert_equal, captured_with, graph_of, step_of
from tests.helpers.sweeps import slow


def op_named(model: Model, target: str, module: str = "") -> Op:
    return next(op for op in model.ops if op.target == target and op.module.endswith(module))


@pytest.mark.parametrize("name", ["gpt2_captured", *slow("llama_captured")])
def test_batch_cuts_everything_between_embedding_and_loss(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name).model
    assert not model.unsupported
    assert model.inputs == ("input_ids", "labels")
    for op in model.ops:
        if op.is_forward and not op.from_weights:
            index = op.find("batch")
            assert index is not None, op.notation()
            expected = "summed" if op.target in ("ss.count_labels", "ss.cross_entropy") else "spatial"
            assert op.indices[index].mark == expected


def test_tied_weights_are_one_tensor(gpt2_captured: Captured) -> None:
    model = gpt2_captured.model
    assert model.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in model.tensors
    assert [op.module for op, _ in model.uses["transformer.wte.weight"]] == ["transformer.wte", "lm_head"]
    assert [op.name for op in model.ops].count("update.transformer.wte.weight") == 1


def test_square_weights_and_self_attention_keep_two_indices() -> None:
    model = capture(Mlp(), (torch.randn(6, 12), torch.randn(6, 12))).model
    linear = op_named(model, "aten.linear.default", "second")
    assert len(linear.indices) == 3
    assert linear.inputs[1].slots[0] != linear.inputs[1].slots[1]
    model = capture(Block(), (torch.zeros(4, 6, dtype=torch.long), torch.zeros(4, 6, dtype=torch.long))).model
    scores = op_named(model, "aten.matmul.default")
    queries, keys = scores.outputs[0].slots[-2:]
    assert queries is not None
    assert keys is not None
    assert queries != keys
    assert scores.indices[queries].factor == scores.indices[keys].factor


def test_conflicting_view_freezes_its_dim_only() -> None:
    model = capture(Regrouped(), (torch.randn(6, 12),)).model
    view = next(op for op in model.ops if op.target == "aten.view.default" and None in op.inputs[0].slots)
    batch = view.find("batch")
    assert batch is not None
    assert [i.mark for k, i in enumerate(view.indices) if k != batch] == ["frozen"] * (len(view.indices) - 1)
    assert view.inputs[0].slots[0] == batch
    assert all(op.find("batch") is not None for op in model.ops if op.is_forward)
    # The product before it is still cut on what it computes.
    assert "spatial" in {i.mark for i in op_named(model, "aten.linear.default").indices if i.factor != "batch"}


def test_operator_without_rule_is_frozen_and_counted() -> None:
    model = capture(Function(lambda h: torch.cholesky_inverse(h).sum()), (torch.randn(4, 4),)).model
    assert model.unsupported
    for op in model.ops:
        if op.target in model.unsupported:
            assert {i.mark for i in op.indices} <= {"frozen"}
            assert all(slot is None for operand in op.inputs for slot in operand.slots)


def test_mean_losses_become_sums_and_counts_and_no_bias_is_on_a_contraction(gpt2_captured: Captured) -> None:
    model = gpt2_captured.model
    count, loss = op_named(model, "ss.count_labels"), op_named(model, "ss.cross_entropy")
    assert {i.mark for i in count.indices} == {"summed"}
    assert (count.from_data, count.has_mirror) == (True, False)
    assert model.tensors[count.outputs[0].tensor].dtype == "float32"
    assert loss.args[-1] == -100
    assert loss.outputs[0].tensor == model.loss
    for op in model.ops:
        reads_bias = any(o.tensor.endswith("bias") for o in op.inputs)
        assert not (op.is_forward and reads_bias and any(i.mark == "summed" for i in op.indices)), op.notation()


def test_constants_fold_and_equal_ones_are_stored_once(llama_captured: Captured) -> None:
    model = llama_captured.model
    constants = [t for t in model.tensors.values() if t.kind == "constant"]
    assert [t.shape for t in constants] == [(1, 1, 16, 8), (1, 1, 16, 8)]
    assert all(t.name in llama_captured.values for t in constants)
    assert not [t for t in model.tensors.values() if t.kind == "buffer"]


def test_weights_only_ops_and_no_grad_regions() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))
            self.scale, self.unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
            self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                offset = x @ self.weight
            return (x @ (self.weight * self.scale[:, None]) * self.fixed + offset).mean()

    module, x = Scaled(), torch.randn(6, 4)
    captured = capture(module, (x,))
    model = captured.model
    scaled = next(op for op in model.ops if op.target == "aten.mul.Tensor" and op.from_weights)
    assert scaled.has_mirror
    products = [op for op in model.ops if op.target == "aten.matmul.default"]
    assert [op.has_mirror for op in products] == [False, True]
    assert [t.name for t in model.parameters() if t.requires_grad] == ["weight", "scale"]
    assert [op.name for op in model.ops if not op.is_forward] == ["update.weight", "update.scale"]
    assert set(captured.values) == {"weight", "scale", "fixed", "unused"}


def test_dropout_has_one_op_and_vanishes_at_zero(gpt2_captured: Captured) -> None:
    with_dropout = capture(gpt2(layers=1, dropout=0.1), (), tokens()).model
    targets = [op.target for op in with_dropout.ops]
    assert targets.count("ss.dropout") == 3
    assert targets.count("ss.attention_dropout") == 1
    assert not [op for op in gpt2_captured.model.ops if "dropout" in op.target]


def test_each_op_says_where_it_comes_from_and_names_are_unique(gpt2_captured: Captured) -> None:
    model = gpt2_captured.model
    op = op_named(model, "aten.mm.default", "h.0.attn.c_attn")
    assert op.module == "transformer.h.0.attn.c_attn"
    assert re.fullmatch(r"transformers/pytorch_utils\.py:\d+", op.source)
    # Two per multiply and add: 64 tokens, 32 wide, 96 results.
    assert op.flops == 2 * 64 * 32 * 96
    names = [op.name for op in model.ops]
    assert len(set(names)) == len(names)
    assert not [f for f in model.factors if " " in f]
    used = {i.factor for op in model.ops for i in op.indices}
    assert used | {f for t in model.tensors.values() for d in t.slots for f in d} == set(model.factors)
    for op in model.ops:
        for operand in (*op.inputs, *op.outputs):
            extents = model.tensors[operand.tensor].extents
            assert all(s is None or op.indices[s].size == e for s, e in zip(operand.slots, extents, strict=True))


def test_the_line_of_a_call_is_outside_of_torch_and_of_the_package() -> None:
    ours = Path(superscaler.__file__).parent
    frames = [("/home/me/model.py", 7), (str(ours / "ops" / "table.py"), 3), (torch.__file__, 1), ("<string>", 1)]
    assert innermost(frames) == "/home/me/model.py:7"


@pytest.mark.parametrize("sizes", slow((2,), ((4, 16),)))
def test_large_models_are_captured_without_memory_in_linear_time(sizes: tuple[int, ...]) -> None:
    def seconds(layers: int) -> float:
        with torch.device("meta"):
            module = gpt2(layers)
        captured = capture(module, (), tokens())
        assert not [name for name in captured.values if name.startswith("transformer")]
        assert len([op for op in captured.model.ops if "dot_product" in op.target]) == layers
        return captured.seconds["capture"]

    # The factor of two more is for noise, of which other processes make more now and then.
    assert any(seconds(sizes[-1]) < 2 * sizes[-1] / sizes[0] * max(seconds(sizes[0]), 0.05) for _ in sizes * 2)


def test_same_tensor_twice_is_two_inputs() -> None:
    x = torch.randn(6, 12)
    captured = capture(Mlp(), (x, x))
    assert op_named(captured.model, "aten.linear.default").inputs[0].tensor == "x"
    assert set(captured.batch) == {"x", "target"}


@pytest.mark.parametrize("optimizer", ["SGD", "momentum"])
def test_graphs_of_another_optimizer_are_its_captures(optimizer: str) -> None:
    assert graph_of("mlp", optimizer).model == captured_with("mlp", optimizer).model


def test_optimizer_groups() -> None:
    module = Mlp()
    groups = [{"params": module.first.parameters(), "lr": torch.tensor(0.5)}, {"params": [module.second.weight]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9))
    model = capture(module, (torch.randn(6, 12), torch.randn(6, 12)), optimizer=optimizer).model
    assert model.optimizer.name == "AdamW"
    assert [dict(g)["lr"] for g in model.optimizer.groups] == [0.5, 1e-3]
    assert dict(model.optimizer.groups[1])["betas"] == (0.8, 0.9)
    updates = {op.name: op.group for op in model.ops if op.kind == "optimizer"}
    assert updates == {"update.first.weight": 0, "update.first.bias": 0, "update.second.weight": 1}
    assert not model.tensors["second.bias"].requires_grad


def test_lookup_of_every_element_is_a_view() -> None:
    rows, columns = torch.arange(4)[:, None], torch.arange(6)[None, :]
    module = Function(lambda h, mask: (h * mask[rows, columns]).sum(), 6)
    model = capture(module, (torch.randn(4, 6), torch.ones(4, 6))).model
    assert not [op for op in model.ops if op.target == "aten.index.Tensor"]
    assert [o.slots for o in op_named(model, "aten.mul.Tensor").inputs] == [(0, 1), (0, 1)]


A, K = torch.arange(4), torch.arange(5)


@pytest.mark.parametrize(
    ("pick", "is_gather"),
    [
        (lambda h, i: h[A, i[:, 0]], True),
        (lambda h, i: h[A[:, None], i], True),
        (lambda h, i: h.mT[A, :, i[:, 0] - 6], False),
        (lambda h, i: h.transpose(0, 1)[i[:, 0].int() - 6, A], True),
        (lambda h, i: h.expand(3, 4, 6, 8)[:, A[:, None], i], True),
        (lambda h, i: h[:, :5][A[:, None], K, i], True),
        (lambda h, i: h[A.flip(0), i[:, 0]], False),
        (lambda h, i: h[A, i[:, 0], i[:, 1]], False),
    ],
)
def test_rows_that_are_paired_by_a_range_stay_rows(pick: Any, is_gather: bool) -> None:
    module = Function(lambda h, i: pick(h, i).square().mean(), 8)
    graph = step_of(module, torch.randn(4, 6, 8), torch.randint(6, (4, 5)))
    target = "aten.gather.default" if is_gather else "aten.index.Tensor"
    (op,) = [op for op in graph.model.ops if op.target == target]
    batch = op.find("batch")
    assert (batch is not None and batch in op.inputs[0].slots) == is_gather
    assert_equal(graph, "gradient_accumulation:microbatches=2")


def test_what_cannot_be_captured() -> None:
    class Same(nn.Linear):
        def forward(self, weight: Tensor) -> Tensor:
            return (self.weight * weight).sum()

    with pytest.raises(
        CaptureError, match=r"test_capture\.py:\d+ reads the input weight, which has the name of a parameter"
    ):
        capture(Same(6, 1), (torch.randn(6),))
    module, x = Mlp(), torch.randn(6, 12)
    adamm = type("Adamm", (torch.optim.Optimizer,), {})
    with pytest.raises(CaptureError, match=r"unknown optimizer 'Adamm'; did you mean"):
        capture(module, (x, x), optimizer=adamm(module.parameters(), {}))
    with pytest.raises(CaptureError, match=r"group 0 of SGD holds a parameter of shape \(5, 5\) that is none of the 4"):
        capture(module, (x, x), optimizer=torch.optim.SGD(Mlp(5).parameters()))


def test_the_module_is_left_as_it_was() -> None:
    module, x = Mlp(), torch.randn(6, 12)
    capture(module, (x, x))
    assert "forward" not in module.__dict__
    assert not [p for p in module.parameters() if p.grad is not None]


def test_einsum_has_the_indices_of_its_equation() -> None:
    model = capture(Contractions(), (torch.randn(6, 5, 4),)).model
    products = {op.args[0]: op for op in model.ops if op.target == "aten.einsum.default"}

    def shown(equation: str) -> list[tuple[str, int]]:
        return [(i.mark, i.size) for i in products[equation].indices]

    spatial, summed = "spatial", "summed"
    assert shown("bic,bjc->bij") == [(spatial, 6), (spatial, 5), (spatial, 5), (summed, 6)]
    assert shown("b...c,b...d->bcd") == [(spatial, 6), (spatial, 6), (spatial, 6), (summed, 5)]
    # Without an arrow the result has the letters that stand once, in order.
    assert shown("bik, kc") == [(spatial, 6), (spatial, 6), (spatial, 5), (summed, 4)]
    assert {i.mark for i in products["bii->b"].indices} <= {"frozen"}
    assert products["bic,cd,bid->bi"].linear == ((0,), (1,), (2,))


def test_ops_without_gradients_keep_their_modules() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for layer in self.layers:
                    x = layer(x)
                with torch.enable_grad():
                    x = x * self.layers[0].weight.sum()
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    module, x = Twice(), torch.randn(3, 4)
    captured = capture(module, (x,))
    found = [(op.module, op.has_mirror) for op in captured.model.ops if op.target == "aten.linear.default"]
    assert found == [("layers.0", False), ("layers.1", False), ("layers.0", True), ("layers.1", True)]
    loss, gradients, *_ = reference_step(captured, captured.batch, captured.values)
    module(x).backward()
    assert torch.equal(loss, module(x))
    assert all(torch.equal(gradients[name], p.grad) for name, p in module.named_parameters())


def test_a_constant_of_one_number_is_a_scalar_that_is_expanded() -> None:
    def masked(h: Tensor) -> Tensor:
        drop = nn.functional.dropout(h.new_ones((h.shape[0], 1, h.shape[2])), 0.5)
        return (h * drop + torch.full_like(h, 2.5)).mean()

    captured = capture(Function(masked), (torch.randn(6, 3, 4),))
    constants = {n: v.tolist() for n, v in captured.values.items() if captured.model.tensors[n].kind == "constant"}
    assert sorted(constants.values()) == [1.0, 2.5]
    expanded = [op for op in captured.model.ops if op.target in ("aten.expand.default", "ss.dropout")]
    assert {op.indices[op.find("batch")].mark for op in expanded} == {"spatial"}  # type: ignore[index]


class Written(nn.Module):
    """Gelu by tanh, as a model may write it out; with another number it is another function."""

    def __init__(self, cubic: float, shows: bool = False) -> None:
        super().__init__()
        self.linear, self.cubic, self.shows = nn.Linear(4, 4), cubic, shows

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        tanh = torch.tanh(sqrt(2.0 / pi) * (x + self.cubic * torch.pow(x, 3.0)))
        y = 0.5 * x * (1.0 + tanh)
        return (y + tanh if self.shows else y).sum()


@pytest.mark.parametrize(
    ("module", "is_fused"),
    [(Written(0.044715), True), (Written(0.05), False), (Written(0.044715, shows=True), False)],
    ids=["gelu", "another number", "what is inside is read"],
)
def test_gelu_that_is_written_out_is_one_operator(module: nn.Module, is_fused: bool) -> None:
    graph = step_of(module, torch.randn(6, 4))
    targets = [op.target for op in graph.model.ops]
    assert ("aten.gelu.default" in targets, "aten.tanh.default" in targets) == (is_fused, not is_fused)
    assert_equal(graph)
