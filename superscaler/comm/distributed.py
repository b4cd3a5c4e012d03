"""The communicator over `torch.distributed`: gloo on CPUs, NCCL on GPUs.

Process groups always have ascending ranks (the meaning of other orders depends on the version of `new_group`); chunks
are permuted here. Data that is only moved is sent as bytes, so that every dtype can be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any
from uuid import uuid4
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from superscaler.bits import bytes_of
from superscaler.comm import communicator as c
from superscaler.comm.allocator import keep_freed_memory
from superscaler.comm.communicator import Group, Handle
from superscaler.comm.network import Launched, interface, launched, meet
from superscaler.comm.operations import Exchange, Operation, Sends, fail
from superscaler.errors import RuntimeFailure

# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def connect(timeout: float = 1800.0) -> DistributedCommunicator:
    """Join the ranks that `torchrun` started; without it, be the only one. NCCL on GPU number LOCAL_RANK, or gloo.

    `timeout`: seconds that an operation may wait. Raises InputError for inconsistent variables of torchrun, and
    RuntimeFailure if the ranks do not find each other.
    """
    device = _device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    store, start = None, ""
    if not dist.is_initialized():
        launch = launched()
        store, start = meet(launch)
        backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        given: dict[str, Any] = {"store": PrefixStore(start, store), "rank": launch.rank, "world_size": launch.world}
        with _network(launch, f"{backend.upper()}_SOCKET_IFNAME"):
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=bound, **given)
    else:
        # Ranks that another library connected, or that load another plan.
        name = [uuid4().hex]
        dist.broadcast_object_list(name)
        start = name[0]
    return DistributedCommunicator(device, start, store)


@contextmanager
def _network(launch: Launched, variable: str) -> Iterator[None]:
    """Let gloo connect over the interface to the other ranks, unless the user chose one; later groups do the same.

    A single rank makes no groups, and its process may belong to a user who starts others: it sets nothing.
    """
    name = interface(launch) if variable.startswith("GLOO") and variable not in os.environ else None
    if name:
        os.environ[variable] = name
    try:
        yield
    except RuntimeError as error:
        fail(f"rank {launch.rank}: connecting with {variable}={os.environ.get(variable, '')}", error)
    finally:
        if name and launch.world == 1:
            del os.environ[variable]


def world_size() -> int:
    """Return the number of ranks, connected or not."""
    return dist.get_world_size() if dist.is_initialized() else launched().world


def _device() -> torch.device:
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return torch.device("cpu")
    local, count = launched().local_rank, torch.cuda.device_count()
    if local >= count:
        raise RuntimeFailure(
            f"local rank {local} needs GPU {local}, but only {count} are visible; start {count} ranks."
        )
    return torch.device("cuda", local)


class DistributedCommunicator(c.Communicator):
    """A rank of the default process group. `device`: of its tensors; `start`: the name of this start."""

    def __init__(self, device: torch.device, start: str = "", store: Store | None = None) -> None:
        self.start = start
        self._store = store
        self.rank: int = dist.get_rank()
        self.world: int = dist.get_world_size()
        self.device = device
        self.prefix = f"rank {self.rank}: "
        self._is_gloo = dist.get_backend() == "gloo"
        self._groups: dict[Group, Any] = {tuple(range(self.world)): dist.group.WORLD}
        self._sends = Sends(can_poll=not self._is_gloo)
        # The exchanges of chunks by gloo.
        self._exchanges: WeakSet[Exchange] = WeakSet()
        # The messages of a batch.
        self._together: list[tuple[dist.P2POp, Operation]] | None = None

    def set_if_unset(self, name: str, value: str) -> str:
        # compare_set expects the empty text for a missing key.
        return value if self._store is None else self._store.compare_set(f"first {name}", "", value).decode()

    def prepare(self, groups: Sequence[Group]) -> None:
        """Create a process group for each new set of ranks; the whole world is the default group."""
        for members in sorted({tuple(sorted(group)) for group in groups if len(group) > 1}):
            if members not in self._groups:
                self._groups[members] = self._call(f"{self.prefix}connecting", dist.new_group, list(members))

    def _reduce(
        self, what: str, group: Group, x: Tensor, owned: bool, largest: bool = False, root: int | None = None
    ) -> Handle:
        # gloo reduces in place, on all ranks.
        buffer = x.detach().contiguous() if owned else x.detach().clone(memory_format=torch.contiguous_format)
        if root is not None:
            return self._rooted(what, group, root, dist.reduce, buffer, group[root]).giving(lambda: buffer)
        kind = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        return self._begin(what, group, dist.all_reduce, buffer, kind).giving(lambda: buffer)

    def _gather(self, what: str, group: Group, x: Tensor, dim: int, root: int | None = None) -> Handle:
        is_mine = root is None or group[root] == self.rank
        gathered = torch.empty((len(group) * is_mine, *x.shape), dtype=x.dtype, device=x.device)
        mine = bytes_of(x)

        def finish() -> Tensor:
            # Chunks with nothing above 1 before their dim lie as they are joined.
            if x.dim() and prod(x.shape[:dim]) == 1 and group == tuple(sorted(group)):
                return gathered.view([-1 if at == dim % x.dim() else size for at, size in enumerate(x.shape)])
            return c.join(c.to_plan_order(gathered, group), dim)

        if root is None:
            return self._begin(what, group, _all_gather, bytes_of(gathered), mine).giving(finish)
        incoming = list(map(bytes_of, gathered)) if is_mine else None
        return self._rooted(what, group, root, dist.gather, mine, incoming, group[root]).giving(finish)

    def settle(self) -> None:
        for begun in list(self._exchanges):
            begun.finish_if_ended()

    def _swap(self, what: str, group: Group, chunks: Sequence[Tensor], finish: c.Finish) -> Handle:
        self.settle()
        outgoing = c.from_plan_order(chunks, group)
        incoming = torch.empty_like(outgoing)
        operation = self._begin(what, group, dist.all_to_all_single, bytes_of(incoming), bytes_of(outgoing))
        handle = Exchange(operation, lambda: finish(c.to_plan_order(incoming, group)))
        if self._is_gloo:
            self._exchanges.add(handle)
        return handle

    def _scatter(self, what: str, group: Group, chunks: Sequence[Tensor]) -> Handle:
        # The reduce_scatter of gloo is its slowest collective: exchanging the chunks and adding them is twice as fast.
        if self._is_gloo:
            return super()._scatter(what, group, chunks)
        outgoing, chunk = c.from_plan_order(chunks, group), torch.empty_like(chunks[0])
        return self._begin(what, group, _reduce_scatter, chunk.view(-1), outgoing.view(-1)).giving(lambda: chunk)

    def _rooted(self, what: str, group: Group, root: int, function: Callable[..., Any], *args: Any) -> Operation:
        """Start an operation for whose result only the rank at place `root` waits."""
        operation = self._begin(what, group, function, *args)
        if self.rank != group[root]:
            self._sends.add(operation)
        return operation

    def _spread(self, what: str, group: Group, buffer: Tensor, source: int) -> Handle:
        operation = self._begin(what, group, dist.broadcast, bytes_of(buffer), source)
        if source == self.rank:
            # The source holds the result already, and need not wait.
            self._sends.add(operation)
        return operation.giving(lambda: buffer)

    def _send(self, what: str, x: Tensor, peer: int, tag: int, owned: bool) -> None:
        buffer = x.detach().clone() if x.is_contiguous() and not owned else x.detach().contiguous()
        self._post(dist.isend, Operation(what, buffer), peer, tag)

    def _recv(self, what: str, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int) -> Handle:
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        operation = Operation(what, buffer)
        self._post(dist.irecv, operation, peer, tag)
        return operation.giving(lambda: buffer)

    @contextmanager
    def together(self) -> Iterator[None]:
        self._together = []
        try:
            yield
            self._launch(self._together)
        finally:
            self._together = None

    def _post(self, function: Callable[..., Any], operation: Operation, peer: int, tag: int) -> None:
        message = dist.P2POp(function, bytes_of(operation.buffers[0]), peer, tag=tag if self._is_gloo else 0)
        entry = message, operation
        if self._together is None:
            self._launch([entry])
        else:
            self._together.append(entry)

    def _launch(self, batch: Sequence[tuple[dist.P2POp, Operation]]) -> None:
        """Start messages. NCCL has one handle for all, and other connections for messages outside of batches."""
        if batch:
            what = f"{self.prefix}messages with ranks {sorted({op.peer for op, _ in batch})}"
            works = self._call(what, dist.batch_isend_irecv, [op for op, _ in batch])
            for (op, operation), work in zip(batch, works * (len(batch) // len(works)), strict=True):
                operation.work = work
                if op.op is dist.isend:
                    self._sends.add(operation)

    def barrier(self) -> None:
        self._call(f"{self.prefix}barrier", dist.barrier)

    def flush(self) -> None:
        self._sends.flush()

    def close(self) -> None:
        if dist.is_initialized():
            self._sends.close()
            # No rank may close its connections while another still reads from them.
            self.barrier()
            self._groups.clear()
            dist.destroy_process_group()

    def _begin(self, what: str, group: Group, function: Callable[..., Any], *args: Any) -> Operation:
        members = tuple(sorted(group))
        if members not in self._groups:
            raise RuntimeFailure(f"{what}: the group is not prepared; pass it to prepare() before the first step.")
        work = self._call(what, function, *args, async_op=True, group=self._groups[members])
        return Operation(what, *args, work=work)

    def _call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            fail(what, error)
