"""Collectives that are alike travel as one: the gathers of weights cut at rest, and the sums of their gradients."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

import superscaler as ss
from superscaler.ir.communication import bytes_moved
from superscaler.ir.program import Backward, Collective, Forward, Program, Send, Wait
from superscaler.materialize import buckets
from superscaler.schedule import segments
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal, exact
from tests.helpers.sweeps import slow


@ss.sprogram
def zero(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """ZeRO-1: the batch is split, and so are the updates of all weights, each on the last index that can be."""
    n = len(cluster.devices)
    for op in graph.ops:
        even = [i.factor for i in op.indices if i.size % n == 0]
        algorithm = ss.Split("batch", n) if op.is_forward else ss.Split(even[-1], n) if even else ss.Replicate(n)
        ss.op_assign(graph, ss.op_trans(graph, op, algorithm), cluster.devices)


def count(program: Program) -> list[tuple[Counter[str], Counter[str]]]:
    """Return per device how many collectives there are of each kind, and how many tensors travel in them."""
    found = []
    for device in program.devices:
        code = [i for i in device.instructions if isinstance(i, Collective)]
        tensors = Counter({k: sum(len(i.works) for i in code if i.kind == k) for k in {i.kind for i in code}})
        found.append((Counter(i.kind for i in code), tensors))
    return found


def test_weights_cut_at_rest_travel_in_a_few_collectives() -> None:
    world = 2
    program = equal(graph_of("gpt2:size=tiny"), zero, world).program
    for kinds, tensors in count(program):
        assert tensors["all_gather"] == tensors["reduce_scatter"] == 28
        assert kinds["all_gather"] == kinds["reduce_scatter"] == 1
    for device in program.devices:
        code = device.instructions
        gather = next(at for at, i in enumerate(code) if isinstance(i, Collective) and i.kind == "all_gather")
        first = next(at for at, i in enumerate(code) if isinstance(i, Forward) and program.functions[i.function].grads)
        waited = next(at for at, i in enumerate(code) if isinstance(i, Wait) and i.work in code[gather].works)
        assert gather < waited < first


@pytest.mark.parametrize("limit", [*slow(1), 10**9])
def test_any_size_of_buckets_gives_the_same_step(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", limit)
    monkeypatch.setattr(buckets, "SEGMENT_BYTES", limit)
    for device in equal(graph_of("gpt2:size=tiny"), zero).program.devices:
        shared = [i for i in device.instructions if isinstance(i, Collective) and len(i.works) > 1]
        assert bool(shared) == (limit > 1)
        assert all(i.bytes <= 2 * limit for i in shared)


@pytest.mark.parametrize("less", [0, 1])
def test_a_bucket_may_be_full(less: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("gpt2:size=tiny")
    monkeypatch.setattr(buckets, "BUCKET_BYTES", sum(t.nbytes for t in graph.model.parameters()) - less)
    assert [kinds["reduce_scatter"] for kinds, _ in count(exact(graph, zero).program)] == [1 + less] * 2


def test_uneven_slices_travel_in_collectives_too() -> None:
    """ZeRO-1 on three devices, which divide next to no dim: each chunk is padded to the largest of its tensor."""
    graph = graph_of("gpt2:size=tiny,batch=6")
    program = equal(graph, "zero", 3).program
    for device in program.devices:
        assert not any(isinstance(i, Send) for i in device.instructions)
    # Gathered and reduced once each, in float64; slices differ by one row at most.
    weight = 8 * sum(prod(weight.shape) for weight in graph.model.parameters())
    assert 4 * weight <= bytes_moved(program) <= 4.2 * weight


def test_sums_travel_between_servers_while_the_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are summed inside of each server; those of a layer go on while the next layer computes."""
    for module in (buckets, segments):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 2000)
    links = "links: {network: {bandwidth: 1e8}}"
    cluster = f"{{name: slow, preset: local, servers: 2, devices_per_server: 2, {links}}}"
    program = equal(graph_of("mlp:layers=4,hidden=24,batch=12"), "data_parallel", cluster).program
    for rank, device in enumerate(program.devices):
        code = [i for i in device.instructions if isinstance(i, Backward | Collective)]
        last = max(at for at, i in enumerate(code) if isinstance(i, Backward))
        across = [i for i in code[:last] if isinstance(i, Collective) and i.group == (rank % 2, rank % 2 + 2)]
        assert len(across) == 2
