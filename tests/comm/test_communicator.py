"""Every operation against the same operation on the whole tensors, in threads and over gloo processes.

Run as a program, this file is one rank of the gloo test.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from superscaler.comm import buckets
from superscaler.comm.communicator import Communicator, Group, Handle, from_plan_order
from superscaler.comm.distributed import DistributedCommunicator, connect
from superscaler.comm.threads import run_ranks
from superscaler.errors import InputError, RuntimeFailure

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def brought(rank: int, shape: tuple[int, ...] = (12, 24), dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank brings: small integers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2 if dtype == torch.bool else 8, shape, generator=generator).to(dtype)


def groups(world: int) -> list[Group]:
    if world == 4:
        return [(2,), (3, 1), (1, 2), (2, 0, 3), (0, 1, 2, 3), (2, 0, 3, 1)]
    return [g for size in range(1, world + 1) for g in permutations(range(world), size)]


def check_collectives(comm: Communicator, group: Group) -> None:
    if comm.rank not in group:
        return
    n, k = len(group), group.index(comm.rank)
    for dtype in DTYPES:
        inputs = {rank: brought(rank, dtype=dtype) for rank in group}
        x = inputs[comm.rank]
        kept = x.clone()
        for dim in (0, 1):
            gathered = comm.all_gather(x, group, dim)
            exchanged = comm.all_to_all(x, group, 1 - dim, dim)
            assert torch.equal(gathered.wait(), torch.cat([inputs[r] for r in group], dim))
            expected = torch.cat([inputs[r].chunk(n, 1 - dim)[k] for r in group], dim)
            assert torch.equal(exchanged.wait(), expected)
            assert exchanged.wait() is exchanged.wait()
        # Nothing before dim 1 is above 1: chunks lie as they are joined.
        row, rows = comm.all_gather(x[None], group, 1).wait(), torch.cat([inputs[r] for r in group])[None]
        assert torch.equal(row, rows)
        if isinstance(comm, DistributedCommunicator) and len(group) > 1 and group == tuple(sorted(group)):
            assert row._is_view()
        given = x if comm.rank == group[-1] else None
        assert torch.equal(comm.broadcast(given, group[-1], group, x.shape, dtype).wait(), inputs[group[-1]])
        if dtype != torch.bool:
            check_sums(comm, group, inputs)
        assert torch.equal(x, kept)
        check_buckets(comm, group, dtype)
        check_uneven(comm, group, inputs)
        check_rooted(comm, group, inputs)


def check_buckets(comm: Communicator, group: Group, dtype: torch.dtype) -> None:
    """Several tensors as one give what each gives alone."""
    shapes, dims = [(12, 24), (24,), (2, 12, 3)], (1, 0, 1)
    tensors = [brought(comm.rank + 10 * n, shape, dtype) for n, shape in enumerate(shapes)]
    works = buckets.all_gather(comm, tensors, group, dims)
    for x, dim, work in zip(tensors, dims, works, strict=True):
        assert torch.equal(work.wait(), comm.all_gather(x, group, dim).wait())
    if dtype != torch.bool:
        works = buckets.reduce_scatter(comm, tensors, group, dims)
        for x, dim, work in zip(tensors, dims, works, strict=True):
            alone = comm.reduce_scatter(x, group, dim).wait()
            assert torch.equal(work.wait().reshape(alone.shape), alone)


def check_uneven(comm: Communicator, group: Group, inputs: dict[int, Tensor]) -> None:
    """Chunks of other sizes than each other, alone and in buckets; each rank's part of what travels is padded."""
    n, k, x = len(group), group.index(comm.rank), inputs[comm.rank]
    works: list[tuple[Handle, Tensor]] = []
    mine, wholes, along = list[Tensor](), list[Tensor](), list[tuple[int, ...]]()
    for dim in (0, 1):
        sizes = (x.shape[dim] - 2 * (n - 1), *[2] * (n - 1))
        mine.append(x.narrow(dim, 1, sizes[k] - 1))
        along.append((sizes[0] - 1, *(size - 1 for size in sizes[1:])))
        wholes.append(
            torch.cat([inputs[r].narrow(dim, 1, size - 1) for r, size in zip(group, sizes, strict=True)], dim)
        )
        before = comm.moved
        works.append((comm.all_gather(mine[-1], group, dim, along[-1]), wholes[-1]))
        padded = x.nbytes // x.shape[dim] * (sizes[0] - 1)
        assert comm.moved - before == (n - 1) * padded
        if x.dtype != torch.bool:
            total = sum(inputs[r] for r in group[1:]) + inputs[group[0]]
            works.append((comm.reduce_scatter(x, group, dim, sizes), total.split(sizes, dim)[k]))
            pair = buckets.reduce_scatter(comm, [x, x], group, (dim, 0), [sizes, ()])
            works += [(pair[0], total.split(sizes, dim)[k]), (pair[1], total.chunk(n, 0)[k].reshape(-1))]
    whole = torch.cat([inputs[r] for r in group], 1)
    together = buckets.all_gather(comm, [*mine, x], group, (0, 1, 1), [*along, ()])
    works += zip(together, [*wholes, whole], strict=True)
    for work, expected in works:
        assert torch.equal(work.wait(), expected)


def check_rooted(comm: Communicator, group: Group, inputs: dict[int, Tensor]) -> None:
    """Sums and chunks for one rank, each in its turn; the others need not wait before they leave."""
    x, before = inputs[comm.rank], comm.moved
    for root, rank in enumerate(group):
        gathered = comm.rd_gather(x, group, root, 1)
        assert comm.moved - before == (len(group) - 1) * x.nbytes // len(group)
        if comm.rank == rank:
            assert torch.equal(gathered.wait(), torch.cat([inputs[r] for r in group], 1))
        if x.dtype != torch.bool:
            total = sum(inputs[r] for r in group[1:]) + inputs[group[0]]
            alone, together = comm.reduce(x.t(), group, root), buckets.reduce(comm, [x, x[0]], group, root)
            if comm.rank == rank:
                assert torch.equal(alone.wait(), total.t())
                assert torch.equal(together[0].wait().reshape(x.shape), total)
                assert torch.equal(together[1].wait(), total[0])
        before = comm.moved
    comm.flush()


def check_sums(comm: Communicator, group: Group, inputs: dict[int, Tensor]) -> None:
    n, k, x = len(group), group.index(comm.rank), inputs[comm.rank]
    total = sum(inputs[r] for r in group[1:]) + inputs[group[0]]
    assert torch.equal(comm.all_reduce(x, group).wait(), total)
    assert torch.equal(comm.all_reduce(x.clone(), group, owned=True).wait(), total)
    largest = torch.stack([inputs[r] for r in group]).amax(0)
    assert torch.equal(comm.all_reduce(x, group, largest=True).wait(), largest)
    for dim in (0, 1):
        assert torch.equal(comm.reduce_scatter(x, group, dim).wait(), total.chunk(n, dim)[k])
        added = comm.reduce_scatter(x.bfloat16(), group, dim, into=torch.float64).wait()
        wide = [inputs[r].bfloat16().double().chunk(n, dim)[k] for r in group]
        assert torch.equal(added, sum(wide[1:], wide[0]))
    strided = x.t()
    assert torch.equal(comm.all_reduce(strided, group).wait(), total.t())
    assert torch.equal(comm.reduce_scatter(strided, group, 1).wait(), total.t().chunk(n, 1)[k])
    assert torch.equal(comm.all_reduce(x[0, 0], group).wait(), total[0, 0])


def check_counts(comm: Communicator, group: Group) -> None:
    """Each rank puts its share of a ring's bytes on links; of a message, the sender all."""
    p, x, k = len(group), brought(comm.rank), group.index(comm.rank)
    size, given = x.nbytes, x if comm.rank == group[0] else None
    calls: list[tuple[Callable[[], Handle | None], int]] = [
        (lambda: comm.all_reduce(x, group), 2 * (p - 1) * size // p),
        (lambda: comm.all_gather(x, group, 0), (p - 1) * size),
        (lambda: comm.reduce_scatter(x, group, 0), (p - 1) * size // p),
        (lambda: comm.all_to_all(x, group, 0, 1), (p - 1) * size // p),
        (lambda: comm.broadcast(given, group[0], group, x.shape, x.dtype), (p - 1) * size // p),
        (lambda: comm.send(x, group[1], 3) if k == 0 else None, 0 if k else size),
        (lambda: comm.recv(x.shape, x.dtype, group[0], 3) if k == 1 else None, 0),
    ]
    for call, expected in calls if p > 1 else calls[:5]:
        before = comm.moved
        if (work := call()) is not None:
            work.wait()
        assert comm.moved - before == expected
    before, outside = comm.moved, comm.bytes_outside_plan
    comm.all_reduce(x, group, planned=False).wait()
    assert (comm.moved, comm.bytes_outside_plan) == (before, outside + 2 * (p - 1) * size // p)


def check_messages(comm: Communicator) -> None:
    """Two messages around a ring in each direction, received in another order than waited for; two at once."""
    for stride in (1, comm.world - 1):
        to, source = ((comm.rank + stride) % comm.world, (comm.rank - stride) % comm.world)
        for dtype in DTYPES:
            first, second = (brought(comm.rank, dtype=dtype), brought(comm.rank + 10, (3, 5), dtype))
            incoming = [comm.recv((24, 12), dtype, source, 1), comm.recv((3, 5), dtype, source, 2)]
            comm.send(first.t(), to, 1)
            comm.send(second, to, 2)
            second.zero_()
            assert torch.equal(incoming[1].wait(), brought(source + 10, (3, 5), dtype))
            assert torch.equal(incoming[0].wait(), brought(source, dtype=dtype).t())
        with comm.together():
            mine = brought(comm.rank)
            comm.send(mine, to, 3)
            mine.zero_()
            there = comm.recv((12, 24), torch.float32, source, 3)
            comm.send(brought(comm.rank + 10, (3, 5)), to, 4)
            more = comm.recv((3, 5), torch.float32, source, 4)
        assert torch.equal(more.wait(), brought(source + 10, (3, 5)))
        assert torch.equal(there.wait(), brought(source))
        with comm.together():
            pass
    comm.send(torch.empty(0, 3), (comm.rank + 1) % comm.world, 7)
    assert comm.recv((0, 3), torch.float32, (comm.rank - 1) % comm.world, 7).wait().shape == (0, 3)
    if isinstance(comm, DistributedCommunicator):
        deadline = time.monotonic() + 20
        while comm._sends.pending and time.monotonic() < deadline:
            time.sleep(0.01)
        assert comm._sends.pending == 0
    comm.flush()


def check_one_element(comm: Communicator) -> None:
    """A tensor of one element has any strides and counts as contiguous: an expanded gradient, a column of a row."""
    everyone, last = tuple(range(comm.world)), comm.world - 1
    for value in (lambda r: torch.full((), 1.0 + r).expand(1, 1), lambda r: torch.full((3,), 1.0 + r)[::3]):
        x, total = value(comm.rank), sum(value(r) for r in everyone)
        assert x.is_contiguous()
        assert x.stride(-1) != 1
        incoming = comm.recv(x.shape, x.dtype, (comm.rank - 1) % comm.world, 8)
        comm.send(x, (comm.rank + 1) % comm.world, 8, owned=True)
        assert torch.equal(incoming.wait(), value((comm.rank - 1) % comm.world))
        assert torch.equal(comm.all_gather(x, everyone, 0).wait(), torch.cat([value(r) for r in everyone]))
        given = x if comm.rank == last else None
        assert torch.equal(comm.broadcast(given, last, everyone, x.shape, x.dtype).wait(), value(last))
        assert torch.equal(comm.all_reduce(x, everyone).wait(), total)
        assert torch.equal(comm.all_reduce(value(comm.rank), everyone, owned=True).wait(), total)
    comm.flush()


def check_memory(comm: DistributedCommunicator) -> None:
    """Chunks of an exchange that has ended are freed when the next one begins, though nobody has read its result."""
    everyone = tuple(range(comm.world))
    sent = brought(comm.rank).reshape(comm.world, -1)
    chunks, first = StorageWeakRef(sent.untyped_storage()), comm.reduce_scatter(sent, everyone, 0)
    del sent
    deadline = time.monotonic() + 20
    while not next(iter(comm._exchanges))._work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not chunks.expired()
    second = comm.reduce_scatter(torch.ones(comm.world), everyone, 0)
    assert chunks.expired()
    expected = sum(brought(r).reshape(comm.world, -1)[comm.rank] for r in everyone)
    torch.testing.assert_close(first.wait().reshape(-1), expected)
    assert second.wait() == comm.world


def check_everything(comm: Communicator) -> int:
    everyone = groups(comm.world)
    comm.prepare(everyone)
    for group in everyone:
        check_collectives(comm, group)
        if comm.rank in group:
            check_counts(comm, group)
    check_messages(comm)
    check_one_element(comm)
    if isinstance(comm, DistributedCommunicator):
        check_memory(comm)
    scalar = comm.all_gather(torch.ones(2) * comm.rank, tuple(range(comm.world)), -1).wait()
    assert scalar.shape == (2 * comm.world,)
    comm.barrier()
    return comm.rank


@pytest.mark.parametrize("world", [1, 3])
def test_threads_compute_what_the_whole_tensors_do(world: int) -> None:
    if world == 1:
        assert run_ranks(1, lambda comm: check_collectives(comm, (0,))) == [None]
    else:
        assert run_ranks(world, check_everything) == list(range(world))


@pytest.mark.dist
def test_gloo_computes_what_the_whole_tensors_do_and_names_the_operation_when_a_rank_is_gone() -> None:
    *others, (gone, _) = run_processes(4)
    assert gone == 7
    lost = "all_reduce of (3,) torch.float32 over ranks (0, 1, 2, 3) failed, because another rank ended"
    for rank, (code, text) in enumerate(others):
        assert (code, f"PeerLost: rank {rank}: {lost}" in text) == (1, True), text


def run_processes(world: int) -> list[tuple[int, str]]:
    """Run this file once a rank, warnings being errors; return exit codes and what was printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command, piped = [sys.executable, "-W", "error", __file__], subprocess.PIPE
    ranks = []
    for rank in map(str, range(world)):
        own = {**env, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(subprocess.Popen(command, env=own, stdout=piped, stderr=subprocess.STDOUT, text=True))
    try:
        texts = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, text) for process, text in zip(ranks, texts, strict=True)]


def check_and_leave(comm: Communicator) -> None:
    """Check everything; then the last rank ends, and the others meet without it."""
    check_everything(comm)
    if comm.rank == comm.world - 1:
        os._exit(7)
    comm.all_reduce(torch.ones(3), tuple(range(comm.world))).wait()


def test_sums_have_the_same_bits_on_all_ranks() -> None:
    def total(comm: Communicator) -> Tensor:
        x = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank)) * 10.0**comm.rank
        whole = comm.all_reduce(x, (2, 0, 3, 1)).wait()
        pieces = comm.reduce_scatter(x, (2, 0, 3, 1), 0).wait()
        assert torch.equal(comm.all_gather(pieces, (2, 0, 3, 1), 0).wait(), whole)
        return whole

    results = run_ranks(4, total)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("out of cheese"), RuntimeFailure, "rank 2 failed: ValueError: out of cheese"),
        (InputError("no such batch"), InputError, "rank 2: no such batch"),
    ],
)
def test_a_failing_rank_ends_the_others_and_is_named(error: Exception, kind: type[Exception], text: str) -> None:
    def fail(comm: Communicator) -> None:
        if comm.rank == 2:
            raise error
        comm.barrier()

    with pytest.raises(kind, match=f"^{text}$"):
        run_ranks(3, fail)


def test_a_deadlock_is_reported_at_once_with_what_each_rank_waits_for() -> None:
    def wait(comm: Communicator) -> None:
        if comm.rank < 2:
            comm.recv((2,), torch.float32, 1 - comm.rank, 5).wait()

    started = time.monotonic()
    with pytest.raises(RuntimeFailure) as caught:
        run_ranks(3, wait, timeout=60)
    assert time.monotonic() - started < 30
    assert "no rank can go on" in str(caught.value)
    assert "rank 0 waits for recv from rank 1, message 0, tag 5" in str(caught.value)
    assert "rank 1 waits for recv from rank 0, message 0, tag 5" in str(caught.value)
    assert "rank 2 has ended" in str(caught.value)


def test_a_slow_rank_is_a_timeout() -> None:
    def wait(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(1)
        comm.all_reduce(torch.ones(2), (0, 1)).wait()

    with pytest.raises(RuntimeFailure, match=r"within 0.2 s:\n.*rank 0 waits for all_reduce(.|\n)*rank 1 computes"):
        run_ranks(2, wait, timeout=0.2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: c.reduce_scatter(torch.ones(7), (0, 1), 0).wait(), "size 7, which 2 ranks do not divide"),
        (lambda c: c.all_reduce(torch.ones(2), (0, 0)).wait(), "every rank once"),
        (lambda c: c.all_reduce(torch.ones(2 + c.rank), (0, 1)).wait(), "of another rank"),
        (lambda c: c.send(torch.ones(2), c.rank, 0), "must be another of the 2 ranks"),
        (lambda c: c.broadcast(None, c.rank, (0, 1), (2,), torch.float32).wait(), "not nothing"),
        (lambda c: c.prepare([(0, 1)] if c.rank else []), "meets prepare of"),
        (
            lambda c: c.recv((3, 2), torch.float32, 0, 4).wait() if c.rank else c.send(torch.ones(2, 3), 1, 4),
            "expected (3, 2) torch.float32, but (2, 3) torch.float32 with tag 4 came",
        ),
    ],
)
def test_wrong_calls_are_refused(call: Callable[[Communicator], object], text: str) -> None:
    with pytest.raises(RuntimeFailure, match=re.escape(text)):
        run_ranks(2, call, timeout=5)


if __name__ == "__main__":
    check_and_leave(connect(timeout=60))


def test_chunks_that_lie_in_order_are_sent_without_a_copy() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    for group, is_copied in (((0, 1, 2), False), ((2, 0, 1), True)):
        sent = from_plan_order(x.chunk(3), group)
        assert (sent.data_ptr() != x.data_ptr()) == is_copied
        assert torch.equal(sent, torch.stack([x.chunk(3)[group.index(rank)] for rank in range(3)]))
    assert torch.equal(from_plan_order(x.chunk(2, 1), (0, 1)), torch.stack(x.chunk(2, 1)))
