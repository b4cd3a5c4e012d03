"""Losses in steps that are cut on the classes: exact, with three numbers a row on links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import InputError, PlanError, TransformError
from superscaler.ir.program import Accumulate, Collective, Combine, Send
from superscaler.ir.text.model import parse_model, print_model
from superscaler.plans import SProgram
from superscaler.runtime import functional
from tests.helpers.graphs import assert_equal, step_of
from tests.helpers.ran import equal
from tests.helpers.sweeps import few

ROWS, CLASSES = (4, 6), 24


def flat(loss: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss of all rows together; label 3 does not count unless options say so."""
    options = options or {"ignore_index": 3}
    return lambda scores, labels: loss(scores.view(-1, CLASSES), labels.view(-1), **options)


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": flat(F.cross_entropy),
    "classes in the middle": lambda scores, labels: F.cross_entropy(scores.mT, labels, ignore_index=3),
    "scaled": lambda scores, labels: 0.5 * flat(F.cross_entropy)(scores, labels),
    "nll of log_softmax": lambda scores, labels: flat(F.nll_loss)(scores.log_softmax(-1), labels),
    "smooth": flat(F.cross_entropy, label_smoothing=0.1),
}


class Model(nn.Module):
    """Scores of 24 classes for 4 x 6 rows, and a loss of them."""

    def __init__(self, loss: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.loss = KINDS[loss]
        self.embedding = nn.Embedding(CLASSES, 8, dtype=dtype)
        self.head = nn.Linear(8, CLASSES, dtype=dtype)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.embedding(ids).tanh()), labels)


def captured(loss: str, dtype: torch.dtype = torch.float32) -> ss.Graph:
    return step_of(Model(loss, dtype), torch.randint(0, CLASSES, ROWS), torch.randint(0, CLASSES, ROWS))


def losses(graph: ss.Graph) -> list[ss.verbs.Op]:
    return [op for op in graph.forward_ops if "loss" in op.target or "entropy" in op.target or "softmax" in op.target]


def classes(graph: ss.Graph) -> str:
    """Return the factor of the rows of the head's weight."""
    (factor,) = graph.model.tensors["head.weight"].slots[0]
    return factor


@ss.sprogram
def by_class(graph: ss.Graph, cluster: ss.Cluster, dp: int = 1) -> None:
    n = len(cluster.devices) // dp
    ss.op_trans(graph, losses(graph), ss.Decompose())
    for op in graph.forward_ops:
        parts = ss.op_trans(graph, ss.op_trans(graph, op, ss.Split("batch", dp)), ss.Split(classes(graph), n))
        ss.op_assign(graph, parts, torch.arange(dp * n).reshape(dp, n).numpy())


LOSSES = [name for name in KINDS if name != "smooth"]


@pytest.mark.parametrize(
    ("loss", "world", "dp"), few([("scaled", 1, 1), ("cross entropy", 8, 2), *((loss, 4, 2) for loss in LOSSES)], 0)
)
def test_a_loss_that_is_cut_on_its_classes_is_equal(loss: str, world: int, dp: int) -> None:
    assert_equal(captured(loss), partial(by_class, dp=dp), world)


def test_the_steps_have_the_parts_of_their_op() -> None:
    """Cut and ordered before it is decomposed: a pipeline of two stages, of two batches each."""
    loss = "nll of log_softmax"

    @ss.sprogram
    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        stages = [graph.forward_ops[:3], graph.forward_ops[3:]]
        for stage, ops in enumerate(stages):
            for op in ops:
                parts = ss.op_trans(graph, ss.op_trans(graph, op, ss.Microbatch(2)), ss.Split("batch", 2))
                ss.op_assign(graph, parts, [2 * stage, 2 * stage + 1])
        ss.order(graph, ss.schedule_1f1b(2, 2), stages)
        for parts in ss.op_trans(graph, losses(graph), ss.Decompose()):
            assert parts.cells.shape == (2, 2)

    assert_equal(captured(loss), plan, 4)


def test_three_numbers_a_row_travel_and_no_scores() -> None:
    plan = ss.compile(captured("cross entropy"), by_class, "local:4")
    for device in plan.compiled.program.devices:
        sent = Counter[str]()
        for i in device.instructions:
            assert not isinstance(i, Send)
            if isinstance(i, Collective) and any("loss" in note.tensor for note in i.notes):
                assert i.kind == "all_reduce"
                sent["largest" if i.largest else "sums"] += i.bytes
        rows = 4 * ROWS[0] * ROWS[1]
        assert sent == {"largest": rows, "sums": 2 * rows}


def test_a_program_that_adds_up_what_has_a_largest_is_refused() -> None:
    program = ss.compile(captured("cross entropy"), by_class, "local:2").compiled.program
    devices = [
        replace(d, instructions=tuple(replace(i, largest=False) if is_largest(i) else i for i in d.instructions))
        for d in program.devices
    ]
    with pytest.raises(PlanError, match=r"adds up the parts of cross_entropy_loss\.largest"):
        check_program(replace(program, devices=devices))


def is_largest(i: object) -> bool:
    return getattr(i, "largest", False)


@ss.sprogram
def several_on_one(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Uneven parts of the classes, two of them on one device."""
    ss.op_trans(graph, losses(graph), ss.Decompose())
    for op in graph.forward_ops:
        if op.find(classes(graph)) is None:
            ss.op_assign(graph, op, 0)
        else:
            ss.op_assign(graph, ss.op_trans(graph, op, ss.Split(classes(graph), sizes=(5, 7, 8, 4))), [0, 1, 1, 2])


@ss.sprogram
def far_apart(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """The largest of each half of the rows and of the classes, on a device each, for one that has all the rest."""
    ss.op_trans(graph, losses(graph), ss.Decompose())
    for op in graph.forward_ops:
        ss.op_assign(graph, op, 0)
        if op.target == "ss.largest":
            parts = ss.op_trans(graph, ss.op_trans(graph, op, ss.Split("batch", 2)), ss.Split(classes(graph), 2))
            ss.op_assign(graph, parts, [[0, 1], [2, 3]])


@pytest.mark.parametrize(("plan", "joined"), [(several_on_one, Accumulate), (far_apart, Combine)])
def test_parts_that_meet_on_a_device_are_joined_by_their_largest(plan: SProgram, joined: type) -> None:
    found = equal(captured("cross entropy"), plan, 4)
    assert joined in {type(i) for d in found.program.devices for i in d.instructions if is_largest(i)}


def test_the_model_prints_and_parses_back() -> None:
    graph = captured("nll of log_softmax", torch.bfloat16)
    ss.op_trans(graph, losses(graph), ss.Decompose())
    assert sum(t.largest for t in graph.model.tensors.values()) == 1
    assert parse_model(print_model(graph.model)) == graph.model


def recomputed(graph: ss.Graph, loss: ss.verbs.Op) -> None:
    ss.op_trans(graph, loss, ss.Recompute())
    ss.op_trans(graph, graph.op(f"{loss.name}.r"), ss.Decompose())


def ordered(graph: ss.Graph, loss: ss.verbs.Op) -> None:
    ss.op_assign(graph, graph.ops, 0)
    ss.op_trans(graph, loss, ss.Decompose())
    ss.op_order(graph, graph.forward_ops[0], loss)


def twice(graph: ss.Graph, loss: ss.verbs.Op) -> None:
    ss.op_trans(graph, loss, ss.Decompose())
    ss.op_trans(graph, loss, ss.Recompute())


HERE = r"at \S*test_losses\.py:\d+"
REFUSED = [
    ("smooth", lambda g, op: ss.op_trans(g, op, ss.Decompose()), rf"{HERE}: Decompose of .*without smoothing"),
    ("scaled", recomputed, rf"op_trans {HERE}: Decompose\(\) of \S+loss\.r comes after its Recompute; do it before"),
    ("scaled", ordered, rf"op_order {HERE}: \S+loss was replaced by Decompose\(\) {HERE}; use what op_trans returned"),
    ("scaled", twice, rf"\S+loss was replaced by Decompose\(\) {HERE}; use what op_trans returned"),
]


@pytest.mark.parametrize(("loss", "ask", "told"), REFUSED)
def test_what_has_no_steps_or_other_ones_is_refused_in_one_line(loss: str, ask: Any, told: str) -> None:
    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        ask(graph, losses(graph)[0])

    with pytest.raises((InputError, TransformError), match=told) as raised:
        ss.compile(captured(loss), plan, "local:1")
    assert "\n" not in str(raised.value)


def test_a_loss_that_is_to_be_cut_on_its_classes_asks_for_its_steps() -> None:
    graph = captured("cross entropy")
    (loss,) = losses(graph)
    asked = r"cross_entropy\) needs that factor whole; op_trans it with ss.Decompose\(\) first"
    with pytest.raises(TransformError, match=asked):
        ss.op_trans(graph, loss, ss.Split(classes(graph), 2, required=True))
    ss.op_trans(graph, loss, ss.Split(classes(graph), 2))
    assert "(replicated: it needs that factor whole; op_trans it with ss.Decompose()" in graph.journal[-1].detail


@pytest.mark.parametrize("parts", [1, 3])
def test_the_gradient_of_halves_is_rounded_once(parts: int) -> None:
    scores = (torch.randn(8, CLASSES) * 4).bfloat16()
    labels = torch.cat([torch.randint(0, CLASSES, (7,)), torch.tensor([-100])])
    size = CLASSES // parts
    leaves = [s.clone().requires_grad_() for s in scores.split(size, 1)]
    boxes = [((k * size, (k + 1) * size),) for k in range(parts)]
    most = torch.stack([functional.largest(x, 1, torch.float32) for x in leaves]).amax(0)
    sums = [functional.class_sums(x, labels, most, b, (CLASSES,)) for x, b in zip(leaves, boxes, strict=True)]
    total, picked = (sum(some) for some in zip(*sums, strict=True))
    count = functional.count_labels(labels, -100, torch.float32)
    loss = functional.row_losses(labels, count, picked, most, total, ignore_index=-100)
    loss.backward()
    whole = scores.clone().requires_grad_()
    want = functional.cross_entropy(whole, labels, count, -100)
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    found = torch.cat([x.grad for x in leaves], 1)
    # Either may round the other way.
    assert ((found - whole.grad).abs() <= 2**-7 * whole.grad.abs()).all()
