"""An independent count of the memory of a device: the storages that its emitted code makes, while they live.

One process runs one rank over a group of torch that exchanges nothing, so that buffers are those of NCCL, and the
numbers are not those of the model. What a GPU does otherwise than a CPU is put in its place: inputs are copied to the
device, a message is over when the next one starts, and copies to the host leave the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from superscaler.artifact import describe, initial_values
from superscaler.comm.communicator import Handle, Later
from superscaler.comm.distributed import DistributedCommunicator
from superscaler.plan import Plan
from superscaler.runtime.load import modules
from superscaler.runtime.step import Step, build_step

# Plans whose predicted memory is compared with the count, and their devices.
PLANS = [
    ("single", 1),
    ("recompute", 1),
    ("co_shard", 1),
    ("swap:what=both", 1),
    ("gradient_accumulation:microbatches=4", 1),
    ("data_parallel", 2),
    ("tensor_parallel", 2),
    ("sequence_parallel", 2),
    ("sequence_parallel:regather=true", 2),
    ("ulysses", 2),
    ("ring_attention", 2),
    ("terapipe", 2),
    ("seq1f1b:recompute=late", 2),
    ("gpipe", 2),
    ("pipeline_1f1b", 4),
    ("pipeline_1f1b:recompute=early", 2),
    ("interleaved", 2),
    ("zb_h1", 4),
    ("zb_h2", 2),
    ("zbv", 2),
    ("dualpipe_v", 2),
    ("chimera", 2),
    ("pipedream_2bw", 2),
    ("interlaced", 2),
    ("zero:stage=1", 2),
    ("zero:stage=2,microbatches=2", 2),
    ("zero:stage=3", 2),
    ("zero:stage=3,microbatches=2", 2),
    ("zero:stage=3,shard=2", 4),
    ("swap:what=optimizer", 2),
    ("hybrid:dp=2,pp=2,tp=2", 8),
]


def blocks(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of storages in blocks of 512 bytes, as torch's CUDA allocator gives them out."""
    sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(-(-size // 512) * 512 for size in sizes.values())


class Counter(TorchDispatchMode):
    """Counts the storages that operators make; not those of `before`."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.known = weakref.WeakSet[Any](x.untyped_storage() for x in before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.untyped_storage() not in self.known:
                self.known.add(x.untyped_storage())
                self._add(blocks([x]))
                weakref.finalize(x.untyped_storage(), self._add, -blocks([x]))
        return made

    def leave(self, x: Tensor) -> None:
        """Count a storage no more: it is on the host."""
        size = blocks([x])
        self._add(-size)
        # Its end is counted, too.
        weakref.finalize(x.untyped_storage(), self._add, size)

    def _add(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)


class _Sends:
    """Messages that are over when the next ones start."""

    pending = 0

    def __init__(self) -> None:
        self.batch, self.held = 0, list[tuple[int, Any]]()

    def add(self, operation: Any) -> None:
        self.held = [*(x for x in self.held if x[0] == self.batch), (self.batch, operation)]

    def flush(self) -> None:
        self.held.clear()

    close = flush


class _Communicator(DistributedCommunicator):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._sends: Any = _Sends()

    def _launch(self, batch: Any) -> None:
        self._sends.batch += 1
        super()._launch(batch)
        self._sends.batch += 1

    def _rooted(self, *args: Any) -> Any:
        self._sends.batch += 1
        return super()._rooted(*args)

    def _spread(self, *args: Any) -> Any:
        self._sends.batch += 1
        return super()._spread(*args)


def counted(plan: Plan, rank: int, clip: float | None = None) -> int:
    """Return the peak of a device in its second step, with what rests on it, in bytes."""
    compiled = plan.compiled
    captured = compiled.graph.captured
    values = initial_values(compiled.graph.model, captured.values)
    if dist.is_initialized():
        # A step on one device joins a group of its own.
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=compiled.program.world, store=FakeStore())
    try:
        step = build_step(describe(compiled), modules(compiled.emitted.files), values, _Communicator())
        # Some bytes in the first steps, which no prediction has.
        step.alike = None
        batch = [captured.batch] * step.iterations if step.iterations > 1 else captured.batch
        step(batch, clip)
        return _peak(step, lambda: step(batch, clip), captured.batch.values())
    finally:
        dist.destroy_process_group()


def _peak(step: Step, run: Callable[[], Any], batch: Iterable[Tensor]) -> int:
    state = step.state
    hosts = {w["name"] for w in state.tables["weights"] if w.get("host")}
    here = [w for name, w in state.weights.items() if name not in hosts]
    states = state.updates.optimizer.state if state.updates.optimizer else {}
    rest = [*here, *(x for w in here if w in states for x in states[w].values() if isinstance(x, Tensor))]
    away = [x for some in states.values() for x in some.values() if isinstance(x, Tensor)]
    with Counter([*rest, *away, *state.weights.values(), *batch]) as counter:
        given, start, copied = state.input, state._copies.start, list[Tensor]()

        def copy(x: Tensor, to_host: bool) -> Handle:
            copied[:] = [x] if to_host else copied
            peak = counter.peak
            made = start(x, to_host).wait()
            if to_host:
                counter.leave(made)
                counter.peak = peak
            return Later(lambda: made)

        state.input = lambda number: given(number).clone()  # type: ignore[method-assign]
        state._copies.start = copy  # type: ignore[method-assign]
        run()
    return blocks(rest) + counter.peak
