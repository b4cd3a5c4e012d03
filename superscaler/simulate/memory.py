"""The memory of each device in a step after the first: its peak, the live tensors then, a curve over its program."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import nlargest

import numpy as np
import torch
from torch import Tensor

from superscaler.ir.grid import Ints
from superscaler.ir.loops import weighted
from superscaler.ir.model import Optimizer
from superscaler.ir.parts import block_of
from superscaler.ir.program import Program, Weight
from superscaler.ops.table import ops_of_lines
from superscaler.runtime.optimizer import LISTED, is_listed
from superscaler.simulate.kernels import Segments
from superscaler.simulate.liveness import Liveness
from superscaler.simulate.storages import CATEGORIES, OPTIMIZER, TEMPORARY, Storage, elements
from superscaler.simulate.works import block
from superscaler.specs.options import kind_of
from superscaler.timing import without_garbage_collection

MB, GB = 10**6, 10**9


@dataclass(frozen=True, slots=True)
class Overheads:
    """Bytes of a process on a GPU beside the tensors of the program. `context` and `group` are coarse: they depend on
    versions and on the machine.

    context        of CUDA, with the kernels of torch and NCCL: 1.06 GB on 8 H100 before the first collective
                   (NVIDIA/nccl#1685)
    group          of a group of devices in NCCL: 0.54 to 0.69 GB on 4 A100 (NVIDIA/nccl#964); more with all_to_all
    workspace      of cuBLAS, per stream: 32 MiB on Hopper, 8,519,680 bytes before (torch, CublasHandlePool.cpp)
    listed         of weights that a GPU updates at once, by kernels that make temporary tensors (runtime/optimizer.py)
    fragmentation  the share of the peak that torch's allocator reserves and cannot use. Blocks above 1 MB are cut from
                   segments of 20 MB and more, and few other blocks fit the parts between them. An estimate for a
                   program that repeats its shapes in each step
    """

    context: int = 1060 * MB
    group: int = 550 * MB
    workspace: int = 32 * 2**20
    fragmentation: float = 0.03
    listed: int = LISTED


# Of a process that computes on a CPU.
NO_OVERHEADS = Overheads(0, 0, 0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Held:
    """A live tensor at the peak: its bytes, its name, the module or the instruction that made it.

    `microbatch`: -1 for a tensor of none.
    """

    bytes: int
    name: str
    made_by: str
    microbatch: int


@dataclass(frozen=True, eq=False)
class DeviceMemory:
    """The memory of a device, and of `count` others that run the same program, in bytes.

    peak      the most bytes of tensors, in blocks of the allocator; `at`: the number of the instruction that runs, and
              `place`: its work in words
    parts     of the peak, by category; `largest`: its largest tensors; `kept`: activations of each block of the model
    excess    the first tensor beyond the capacity of the device, in words
    curve     the bytes after each instruction: [instructions, categories]; `during`: the most in each
    on_host   the most bytes in the memory of the host
    overhead  the bytes beside tensors
    """

    rank: int
    count: int
    peak: int
    at: int
    place: str
    parts: Mapping[str, int]
    largest: Sequence[Held]
    kept: Mapping[str, int]
    excess: str
    curve: Ints
    during: Ints
    on_host: int
    overhead: int

    @property
    def total(self) -> int:
        """Return the bytes that the device needs, with overhead."""
        return self.peak + self.overhead


def memories(
    program: Program,
    segments: Segments | None = None,
    *,
    states: Callable[[Weight], int] | None = None,
    overheads: Overheads = NO_OVERHEADS,
    clips: bool = False,
    largest: int = 10,
    capacity: int | None = None,
) -> list[DeviceMemory]:
    """Return the memory of each distinct program of a plan.

    `states`: the bytes of the optimizer for a weight (default: those of torch's optimizer, see `state_bytes`); `clips`:
    gradients are scaled to a norm, for which one at a time is copied. `capacity`: the bytes of a device.
    """
    known = segments or Segments(program, overheads.listed > 0)
    update = _update_of(program.model.optimizer, overheads.listed, known.fuses)
    sized = states or (lambda weight: state_bytes(program, weight))
    found = []
    with without_garbage_collection():
        for device, count in program.distinct:
            run = Liveness(program, known, device, sized, update, clips=clips)
            run.run()
            found.append(_Summary(program, run).memory(device.rank, count, overheads, largest, capacity))
    return found


def state_bytes(program: Program, weight: Weight) -> int:
    """Return the bytes of torch's optimizer states for a weight, its float32 copy included: 12 a parameter for
    AdamW.
    """
    optimizer, count = program.model.optimizer, elements(weight.box)
    dtype = program.model.tensors[weight.tensor].dtype
    is_copied = optimizer.has_copy(dtype)
    name, options = kind_of(dict(optimizer.groups[weight.group]), optimizer.name)
    sizes = _states(name, json.dumps(options, sort_keys=True), "float32" if is_copied else dtype)
    return sum(block(size * count) if size else block(1) for size in sizes) + is_copied * block(4 * count)


@cache
def _states(name: str, options: str, dtype: str) -> tuple[int, ...]:
    """Return the bytes per element of each state of torch's optimizer, 0 for a scalar, measured by one step of it."""
    weight = torch.zeros(1, 2, dtype=getattr(torch, dtype), requires_grad=True)
    optimizer = getattr(torch.optim, name)([weight], **json.loads(options))
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = (x for x in optimizer.state[weight].values() if isinstance(x, Tensor))
    return tuple(x.element_size() if x.shape == weight.shape else 0 for x in states)


def _update_of(optimizer: Optimizer, listed: int, fuses: bool) -> Callable[[Sequence[int]], int]:
    """Return the function from the bytes of weights to the bytes that their update makes and frees.

    A fused update makes none. One weight after the other makes two tensors like it; a list makes one like all weights,
    on a GPU (`listed` above 0) like those that are updated at once.
    """
    options = [dict(group) for group in optimizer.groups]
    if listed and any(is_listed(optimizer.name, group, fuses) for group in options):
        return lambda sizes: min(sum(sizes), max((listed, *sizes)))
    if any(o.get("foreach") for o in options):
        return lambda sizes: sum(sizes)
    is_fused = {"Adam", "AdamW", "SGD"}.issuperset(map(optimizer.kind, range(len(options)))) and all(
        o.get("fused") is not False and o.get("foreach") is None for o in options
    )
    return lambda sizes: 0 if is_fused else 2 * max(sizes, default=0)


class _Summary:
    """What a device holds, in words and sums, after its liveness has run."""

    def __init__(self, program: Program, run: Liveness) -> None:
        self.program, self.run = program, run
        self.curve = np.array(run.rows, dtype=np.int64).reshape(len(run.rows), len(CATEGORIES))
        self.during = np.array(run.during, dtype=np.int64)
        self.ops_of = {n: ops_of_lines(program.functions[n], program.model.tensors) for n in {*run.functions.values()}}

    def memory(self, rank: int, count: int, overheads: Overheads, largest: int, capacity: int | None) -> DeviceMemory:
        run, at = self.run, int(self.during.argmax()) if len(self.during) else 0
        peak = int(self.during[at]) if len(self.during) else 0
        before = self.curve[at - 1].tolist() if at else [0] * len(CATEGORIES)
        parts = dict(zip(CATEGORIES, before, strict=True))
        parts[CATEGORIES[TEMPORARY]] = peak - sum(before)
        groups = {i.group for i, _ in weighted(run.code) if len(i.group) > 1}
        overhead = overheads.context + overheads.workspace + overheads.group * len(groups)
        overhead += round(overheads.fragmentation * peak)
        alive = [s for s in run.every if not s.is_on_host and s.born < at and (s.died is None or s.died >= at)]
        every, kept = list[Held](), dict[str, int]()
        for storage in alive:
            own = list(self._held(storage))
            every += own
            for h in own if storage.tape is not None else ():
                kept[block_of(h.made_by)] = kept.get(block_of(h.made_by), 0) + h.bytes
        held = nlargest(largest, every, key=lambda h: h.bytes)
        return DeviceMemory(
            rank,
            count,
            peak,
            at,
            self._place(at) if run.code else "nothing",
            parts,
            held,
            kept,
            "" if capacity is None else self._excess(capacity - overhead),
            self.curve,
            self.during,
            run.most_on_host,
            overhead,
        )

    def _excess(self, capacity: int) -> str:
        """Return the first tensor beyond so many bytes of tensors, and where it is made; nothing if all fit."""
        above = np.flatnonzero(self.during > capacity)
        if not len(above):
            return ""
        at = int(above[0])
        total, first = (int(self.curve[at - 1].sum()), at) if at else (0, -1)
        # The results of a segment are made last.
        for storage in sorted(self.run.every, key=lambda s: s.born == at and s.tape is None):
            if first <= storage.born <= at and not storage.is_on_host:
                for held in self._held(storage):
                    total += held.bytes
                    if total > capacity:
                        where = f", in {self._place(at)}" if storage.born >= 0 else ", before the step"
                        return f"{held.name} of {held.made_by}{where}"
        return f"a temporary tensor in {self._place(at)}"

    def _place(self, at: int) -> str:
        """Return the work of an instruction in words, as `the backward of transformer.h.31 (microbatch 0)`."""
        i = self.run.code[at]
        if not i.runs_segment or i.task is None:
            return self.program.describe(i)
        function = self.program.functions[self.run.functions[i.task]]
        blocks = [b for b in dict.fromkeys(block_of(op.module) or op.module for op in function.ops) if b]
        where = " to ".join(blocks[:: max(1, len(blocks) - 1)]) or function.ops[-1].name
        number = f" (microbatch {i.task.microbatch})" if i.task.microbatch >= 0 else ""
        return f"the {type(i).__name__.lower()} of {where}{number}"

    def _held(self, storage: Storage) -> Iterator[Held]:
        """Yield the tensors of a storage; of a tape those that autograd keeps, with the ops that made them."""
        made = self.run.code[storage.born] if storage.born >= 0 else None
        made_by = type(made).__name__ if made is not None else "at rest"
        if made is not None and made.task is not None and storage.tape is not None:
            number = self.run.functions[made.task]
            function, ops = self.program.functions[number], self.ops_of[number]
            for size, n in storage.tape.others:
                name, module = (ops[n].name, ops[n].module) if n >= 0 else ("a tensor", "")
                yield Held(size, name, module or function.module or made_by, made.task.microbatch)
            return
        module = self.program.functions[made.function].module if made is not None and made.function >= 0 else ""
        made_by = "optimizer" if storage.category == OPTIMIZER else module or made_by
        name_of = storage.name
        yield Held(storage.bytes, str(name_of or ""), made_by, name_of.microbatch if name_of else -1)
