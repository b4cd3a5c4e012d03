"""What a rank keeps of a segment, copies to its host, and does at the end of a step."""

from __future__ import annotations

import copy
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.comm.threads import ThreadCommunicator
from superscaler.runtime.executor import Rank, Segment
from superscaler.runtime.saved_tensors import Copies
from superscaler.runtime.step import Step
from tests.helpers.live import Live
from tests.helpers.ran import Around, on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).sum()


@ss.sprogram
def lent(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """All runs on device 1, whose loss counts, and on device 0, where the weights rest and are sent from."""
    for op in graph.forward_ops:
        ss.op_assign(graph, ss.op_trans(graph, op, ss.Replicate(2)), [1, 0])
    for op in [op for op in graph.ops if not op.is_forward]:
        ss.op_assign(graph, op, 0)


def test_an_update_waits_for_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Net()
    graph = ss.capture(
        module, (torch.randn(3, 4),), optimizer=torch.optim.SGD(module.parameters(), lr=0.1), check=False
    )
    plan = ss.compile(graph, lent, ss.Cluster.local(2))
    opened = []

    def late(self: ThreadCommunicator, *args: Any) -> Tensor:
        opened.append(self.rank)
        time.sleep(0.1)
        return receive(self, *args)

    receive = ThreadCommunicator._open
    monkeypatch.setattr(ThreadCommunicator, "_open", late)
    assert plan.verify()["equal"]
    assert set(opened) == {1}


@pytest.mark.parametrize(("function", "kept"), [(lambda x: (x + 1,), 1), (lambda x: (x * x,), 2)])
def test_of_inputs_only_what_backwards_read_is_kept(function: Segment, kept: int) -> None:
    communicator: Any = SimpleNamespace(device=torch.device("cpu"))
    rank = Rank(communicator, {"weights": []}, {}, ("SGD", [], False), torch.float32)
    with Live() as live:
        x = torch.full((1000,), 3.0)
        (y,) = rank.forward("s0", function, (x,))
        del x
        assert live.live // y.nbytes == kept
        (gradient,) = rank.backward("s0", (torch.ones_like(y),))
    assert torch.equal(gradient, torch.full((1000,), 1.0 if kept == 1 else 6.0))


def test_sums_of_gradients_share_no_memory() -> None:
    """Torch gives both operands of an addition one gradient, the one that it was given."""
    communicator: Any = SimpleNamespace(device=torch.device("cpu"))
    rank = Rank(communicator, {"weights": []}, {}, ("SGD", [], False), torch.float32)
    sums, given = rank.sums(2), torch.ones(3)
    for tag in ("s0_m0", "s0_m1", "s0_m2"):
        rank.forward(tag, lambda x, a, b: (x * 2 + a + b,), (given, given, given))
        (gradient,) = rank.backward(tag, (given,), into={1: sums})
        assert torch.equal(gradient, 2 * given)
    assert [total is not None and total.tolist() for total in sums] == [[3.0] * 3] * 2
    assert given.tolist() == [1.0] * 3


def test_on_a_cpu_a_copy_is_apart_from_what_it_is_of() -> None:
    copies, x = Copies(torch.device("cpu")), torch.arange(6.0).reshape(2, 3).T.requires_grad_()
    work = copies.start(x, to_host=True)
    with torch.no_grad():
        x.zero_()
    copies.flush()
    assert torch.equal(work.wait(), torch.arange(6.0).reshape(2, 3).T)
    assert not work.wait().requires_grad


@pytest.mark.gpu
def test_on_a_gpu_copies_are_pinned_and_in_time() -> None:
    device = torch.device("cuda", 0)
    copies = Copies(device)
    for size in (1 << 20, 1 << 24):
        x = torch.rand(size, device=device)
        expected = (x * 3).sum()
        there = copies.start(x * 3, to_host=True).wait()
        assert there.is_pinned()
        assert there.device.type == "cpu"
        work = copies.start(there, to_host=False)
        back = work.wait()
        assert back.device == device
        assert torch.equal(back.sum(), expected)
    copies.flush()


def test_a_gradient_that_is_not_finite_is_clipped_as_by_torch() -> None:
    """Torch multiplies all gradients by the limit over the norm, also where that is nan, or infinite."""
    module = Around(lambda self, x, y: self.a(x).sum() + self.b(y).sum(), a=nn.Linear(2, 1), b=nn.Linear(2, 1))
    given = torch.ones(2, 2), torch.ones(2, 2)
    graph = ss.capture(module, given, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), check=False)
    plan = ss.compile(graph, "single", "local:1")
    for bad in (torch.nan, torch.inf):
        plain, x = copy.deepcopy(module), torch.full((2, 2), bad)
        plain(x, given[1]).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.optim.SGD(plain.parameters(), lr=0.1).step()

        def work(step: Step, x: Tensor = x) -> dict[str, Tensor]:
            step({"inputs_0": x, "inputs_1": given[1]}, clip=1.0)
            return {w["tensor"]: step.state.weights[w["name"]].detach() for w in step.state.tables["weights"]}

        (found,) = on_ranks(plan, work)
        for name, want in plain.named_parameters():
            torch.testing.assert_close(found[name], want.detach(), equal_nan=True)
