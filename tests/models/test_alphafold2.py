"""AlphaFold2: its sizes, its recycling, where its factors can be cut, and that cutting them changes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import superscaler as ss
from superscaler.errors import InputError
from superscaler.frontend.base.oracle import reference_step
from superscaler.ir.graph import Graph
from superscaler.ir.model import Op
from superscaler.models import build
from superscaler.models.alphafold2 import AlphaFold2, Attention, OuterProductMean, TriangleMultiplication
from superscaler.plan import Plan, compile
from tests.helpers.graphs import assert_equal, graph_of
from tests.helpers.ran import on_ranks
from tests.helpers.sweeps import few, slow

TINY = "alphafold2:size=tiny"
RECYCLING = f"{TINY},layers=1,passes=2,dropout=0.15,pair_dropout=0.25"
RESIDUES, SEQUENCES, CHANNELS = "sequence", "msa.1", ("hidden", "hidden.2")


@pytest.mark.parametrize(
    ("size", "published", "parameters"),
    [
        *slow(
            ("87m", 87e6, 87_878_615),
            ("930m", 930e6, 947_228_759),
            ("2.4b", 2.4e9, 2_405_774_807),
            ("3.2b", 3.2e9, 3_207_652_823),
        ),
    ],
)
def test_sizes_are_those_of_the_papers_table(size: str, published: float, parameters: int) -> None:
    built = build(f"alphafold2:size={size},device=meta")
    assert sum(p.numel() for p in built.module.parameters()) == parameters
    assert parameters == pytest.approx(published, rel=0.05)
    assert built.kwargs["msa"].shape == (128, 128, 256)
    assert built.kwargs["distances"].shape == (128, 256, 256)
    assert {t.device.type for t in [*built.module.parameters(), *built.kwargs.values()]} == {"meta"}


def test_the_loss_reaches_every_parameter_and_batches_differ_in_what_they_leave_out() -> None:
    built = build(RECYCLING)
    loss = built.module(**built.kwargs)
    loss.backward()
    assert loss.shape == ()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in built.module.parameters())
    assert built.make_batch is not None
    for name in ("labels", "distances"):
        counts = (built.kwargs[name] != -100).flatten(1).sum(1)
        assert len(set(counts.tolist())) > 4
        assert counts.min() > 0
    first, again, other = built.make_batch(1), built.make_batch(1), built.make_batch(2)
    assert all(torch.equal(first[n], again[n]) and not torch.equal(first[n], other[n]) for n in first)


@pytest.mark.parametrize(
    ("keys", "message"),
    [("heads=3", "hidden=40 is not divisible by heads=3"), ("pair_heads=5", "pair=24 is not divisible by pair_heads=5"),
     ("pair_dropout=1", "pair_dropout is 1.0")],
)  # fmt: skip
def test_bad_keys_are_told_what_is_wrong(keys: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        build(f"{TINY},{keys}")


def doubles(module: torch.nn.Module, *shapes: tuple[int, ...]) -> tuple[torch.nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return module.double(), [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_attention_follows_the_published_algorithms() -> None:
    module, (x, pair) = doubles(Attention(12, 3, 5), (2, 4, 6, 12), (2, 6, 6, 5))
    q, k, v = module.qkv(x).view(2, 4, 6, 3, 3, 4).unbind(3)
    scores = torch.einsum("brihc,brjhc->brijh", q, k) / 2 + module.bias(pair)[:, None]
    mixed = torch.einsum("brijh,brjhc->brihc", scores.softmax(3), v)
    gate = module.gate(x).sigmoid().view(2, 4, 6, 3, 4)
    torch.testing.assert_close(module(x, pair), module.out((gate * mixed).reshape(x.shape)))


@pytest.mark.parametrize(("edges", "outgoing"), [("bikc,bjkc->bijc", True), ("bkic,bkjc->bijc", False)])
def test_triangles_follow_the_published_algorithms(edges: str, outgoing: bool) -> None:
    module, (z,) = doubles(TriangleMultiplication(5, edges), (2, 6, 6, 5))
    normed = F.layer_norm(z, (5,))
    a, b = (module.project(normed) * module.project_gate(normed).sigmoid()).split(5, -1)
    if not outgoing:
        a, b = a.transpose(1, 2), b.transpose(1, 2)
    summed = sum(a[:, :, None, k] * b[:, None, :, k] for k in range(6))
    torch.testing.assert_close(module(z), module.gate(normed).sigmoid() * module.out(F.layer_norm(summed, (5,))))


def test_outer_products_are_averaged_over_the_sequences() -> None:
    module, (m,) = doubles(OuterProductMean(8, 3, 5), (2, 4, 6, 8))
    normed = F.layer_norm(m, (8,))
    left, right = module.left(normed), module.right(normed)
    outer = (left[:, :, :, None, :, None] * right[:, :, None, :, None, :]).mean(1)
    torch.testing.assert_close(module(m), module.out(outer.flatten(-2)))


def test_the_ending_node_attends_along_columns() -> None:
    """Algorithm 14: edge ij attends to the edges kj, biased by ki."""
    block = build(f"{TINY},layers=1").module.double().blocks[0]
    torch.manual_seed(0)
    z = torch.randn(2, 6, 6, 24, dtype=torch.float64)
    z, end = block.end_norm(z), block.end
    q, k, v = end.qkv(z).view(2, 6, 6, 3, 4, 6).unbind(3)
    scores = torch.einsum("bijhc,bkjhc->bijkh", q, k) / 6**0.5 + end.bias(z).transpose(1, 2)[:, :, None]
    mixed = torch.einsum("bijkh,bkjhc->bijhc", scores.softmax(3), v).flatten(-2)
    turned = z.transpose(1, 2)
    torch.testing.assert_close(end(turned, turned).transpose(1, 2), end.out(end.gate(z).sigmoid() * mixed))


def test_gradients_flow_through_the_last_pass_only() -> None:
    passes = 1
    built = build(f"{TINY},passes={passes}")
    module: AlphaFold2 = built.module.double()  # type: ignore[assignment]
    module(**built.kwargs).backward()
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    loss = recycled_by_hand(module, **built.kwargs, passes=passes)
    expected = torch.autograd.grad(loss, list(module.parameters()))
    torch.testing.assert_close(module(**built.kwargs), loss)
    torch.testing.assert_close(found, list(expected), rtol=1e-10, atol=1e-14)


def recycled_by_hand(
    module: AlphaFold2, target: Tensor, msa: Tensor, labels: Tensor, distances: Tensor, passes: int
) -> Tensor:
    """Run all passes with gradients, and cut them by detaching what is handed on."""
    m0, z0 = module.embed(target, msa)
    row, pair = torch.zeros_like(m0[:, 0]), torch.zeros_like(z0)
    for _ in range(passes):
        first = m0[:, :1] + module.recycled_row(row.detach()).unsqueeze(1)
        m, z = torch.cat([first, m0[:, 1:]], 1), z0 + module.recycled_pair(pair.detach())
        for block in module.blocks:
            m, z = block(m, z)
        row, pair = m[:, 0], z
    logits = module.distance_head(z)
    logits = logits + logits.permute(0, 2, 1, 3)
    tokens = F.cross_entropy(module.msa_head(m).permute(0, 3, 1, 2), labels)
    return 2.0 * tokens + 0.3 * F.cross_entropy(logits.permute(0, 3, 1, 2), distances)


@pytest.mark.parametrize(("dim", "shared"), [(1, "rows"), (2, "columns")])
def test_dropout_drops_the_same_at_all_rows_or_columns(dim: int, shared: str) -> None:
    block = build(f"{TINY},layers=1").module.blocks[0]
    dropped = block._drop(torch.ones(2, 5, 7, 9), 0.25, dim)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert torch.equal(dropped, dropped.narrow(dim, 0, 1).expand_as(dropped)), shared
    assert not torch.equal(dropped, dropped.narrow(3 - dim, 0, 1).expand_as(dropped))
    assert torch.equal(block.eval()._drop(dropped, 0.25, dim), dropped)


def inside(graph: Graph) -> list[Op]:
    return [op for block in graph.blocks for op in block.ops]


def test_nothing_in_a_block_is_whole_but_what_the_algorithm_needs_whole() -> None:
    graph = graph_of(RECYCLING)
    assert not graph.model.unsupported
    for op in inside(graph):
        whole = {i.factor for i in op.indices if i.mark == "frozen"}
        keys = {"aten.scaled_dot_product_attention.default": {RESIDUES, SEQUENCES}}.get(op.target, set())
        if op.target == "aten.layer_norm.default":
            keys = {op.indices[i].factor for i in op.inputs[1].slots if i is not None}
        # The channels of the products q k, and the three of q, k, v or the two of a triangle.
        own = {f for f in whole - keys if f in CHANNELS or f.endswith((".packed", ".head_dim")) or ".project.0." in f}
        assert whole - keys == own, op.notation()
        assert op.find("batch") is not None, op.notation()


def test_pair_tensors_hold_residues_twice_and_one_of_them_is_cut() -> None:
    def factors(op: Op) -> list[str]:
        return [op.indices[i].factor for i in op.outputs[0].slots if i is not None]

    ops = inside(graph_of(RECYCLING))
    pairs = [op for op in ops if op.outputs[0].slots and factors(op).count(RESIDUES) == 2]
    assert len(pairs) > 80
    for op in pairs:
        cut = op.find(RESIDUES)
        first = next(i for i in op.outputs[0].slots if i is not None and op.indices[i].factor == RESIDUES)
        assert (cut, op.indices[first].mark) == (first, "spatial")
    products = [op for op in ops if op.target == "aten.einsum.default"]
    summed = [next(i.factor for i in op.indices if i.mark == "summed") for op in products]
    assert summed == [SEQUENCES, RESIDUES, RESIDUES] * (len(products) // 3)


def test_heads_are_one_factor_and_the_ones_of_dropout_a_number() -> None:
    graph = graph_of(RECYCLING)
    slots = {name: tensor.slots for name, tensor in graph.model.tensors.items()}
    for name in ("row", "column", "start", "end"):
        block = f"blocks.0.{name}"
        heads = slots[f"{block}.qkv.weight"][0][1]
        assert graph.factors[heads].size == 4
        assert slots[f"{block}.out.weight"][1][0] == heads
        assert name == "column" or slots[f"{block}.bias.weight"][0] == (heads,)
    values = graph.captured.values
    assert max(v.numel() for n, v in values.items() if graph.model.tensors[n].kind == "constant") == 12 * 12
    assert [op.has_mirror for op in graph.ops if op.target == "ss.dropout"] == [False] * (2 * 5)


def test_recycled_passes_have_no_mirrors() -> None:
    # What dropout draws is of no tensor that has a gradient.
    ops = [op for op in inside(graph_of(RECYCLING)) if op.target != "aten.detach.default" and not op.from_weights]
    first, last = ops[: len(ops) // 2], ops[len(ops) // 2 :]
    assert [op.target for op in first] == [op.target for op in last]
    assert [{op.has_mirror for op in part} for part in (first, last)] == [{False}, {True}]


def split(factor: str, parts: int):  # type: ignore[no-untyped-def]
    """Return the plan that cuts every forward op on a factor, as dynamic axial parallelism does."""

    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        for op in graph.ops:
            algorithm = ss.Split(factor, parts) if op.is_forward else ss.Replicate(parts)
            ss.op_assign(graph, ss.op_trans(graph, op, algorithm), cluster.devices)

    return plan


PLANS: Mapping[str, object] = {
    "data_parallel": "data_parallel",
    "tensor_parallel": "tensor_parallel",
    "residues": split(RESIDUES, 2),
    "sequences": split(SEQUENCES, 2),
}


def plan_of(spec: str, name: str) -> Plan:
    return compile(graph_of(spec), PLANS[name], "local:2")


@pytest.mark.parametrize("name", few(PLANS, 2))
def test_a_step_equals_the_model(name: str) -> None:
    assert_equal(graph_of(RECYCLING), PLANS[name])


@pytest.mark.parametrize(
    ("name", "modules"),
    [("residues", ("",)), *slow(("sequences", ("column", "transition", "row.qkv", "row.gate", "row.out")))],
)
def test_what_holds_the_factor_is_cut_and_not_replicated(name: str, modules: tuple[str, ...]) -> None:
    graph = plan_of(RECYCLING, name).compiled.graph
    replicated = {entry.op for entry in graph.journal if "replicated" in entry.detail}
    paths = tuple(f"{block.path}.{module}".rstrip(".") for block in graph.blocks for module in modules)
    held = [op.name for op in graph.forward_ops if op.module.startswith(paths)]
    assert len(held) > 30
    assert not replicated.intersection(held)


def step_loss(plan: Plan) -> float:
    """Return the loss of one step, dropout on, which is the same on all ranks."""
    (loss,) = set(on_ranks(plan, lambda step: float(step(plan.compiled.graph.captured.batch))))
    return loss


@pytest.mark.slow
def test_dropout_draws_the_same_numbers_under_every_plan() -> None:
    graph = graph_of(RECYCLING)
    alone = step_loss(compile(graph, "single", "local:1"))
    found = graph.captured
    assert alone != pytest.approx(float(reference_step(found, found.batch, found.values).loss), abs=1e-5)
    for name in ("residues", "sequences"):
        assert step_loss(plan_of(RECYCLING, name)) == pytest.approx(alone, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_smallest_published_size_is_captured_without_memory() -> None:
    graph = graph_of("alphafold2:device=meta")
    assert len(graph.blocks) == 48
    assert {len(block.ops) for block in graph.blocks[1:-1]} == {len(graph.blocks[1].ops)}
    assert not graph.model.unsupported
    assert sum(v.numel() for v in graph.captured.values.values()) < 1e6
