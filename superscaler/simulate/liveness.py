"""The liveness of a device: its instructions hold and drop storages, as the executor does in a step after the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

from superscaler.collectives import KINDS, ONE
from superscaler.ir import program as p
from superscaler.ir.loops import kinds_of
from superscaler.ir.model import width
from superscaler.ir.program import Backward, Device, Forward, Instruction, Program, Value, Weight
from superscaler.ir.running.machine import Domain, Lap
from superscaler.materialize.local_tensors import unique_identifiers
from superscaler.simulate.holders import Handle, Holders
from superscaler.simulate.kernels import Segment, Segments
from superscaler.simulate.repeats.held import Held, held, skip
from superscaler.simulate.repeats.steady import Pace
from superscaler.simulate.storages import (
    ACTIVATIONS,
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    VALUES,
    WEIGHTS,
    Storage,
    buffers,
    elements,
    is_view,
)
from superscaler.simulate.works import block


class Liveness(Holders, Domain[Instruction, Pace]):
    """The storages of a device, instruction by instruction.

    `states`: the bytes of the optimizer for a weight; `update`: from the bytes of weights to the bytes that their
    update makes and frees. `clips`: gradients are scaled before an update.
    """

    def __init__(
        self,
        program: Program,
        segments: Segments,
        device: Device,
        states: Callable[[Weight], int],
        update: Callable[[Sequence[int]], int],
        *,
        clips: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.rank, self.update, self.clips = program.model, device.rank, update, clips
        self.code = device.instructions
        self.segments, self.functions = segments.tasks(device), segments.functions(device)
        self._walk = partial(segments.walk, device)
        self.parameters = parameters(program)
        # The bytes of the gradient that the optimizer takes for each weight.
        self.wanted: dict[Value, int] = {}
        self._views: dict[object, bool] = {}
        self._rest(device.weights, states)
        if p.Give in set(kinds_of(self.code)):
            for i in self.code:
                if isinstance(i, p.Give):
                    size = block(prod(i.shape) * self._width(i.tensor))
                    self.outputs.setdefault(i.tensor, []).append(self.hold(Storage(size, VALUES, i.value)))

    def run(self) -> None:
        self._walk(self)

    def step(self, at: int, i: Instruction) -> bool:
        self.begin(at)
        _RUN[type(i)](self, i)
        self.end()
        return True

    def state(self, lap: Lap[Pace], turns: int) -> Held:
        return held(self, lap.step, turns)

    def skip(self, lap: Lap[Pace], turns: int, before: Held, now: Held) -> None:
        skip(self, lap.step, turns, before, now)

    def _rest(self, weights: Sequence[Weight], states: Callable[[Weight], int]) -> None:
        for w in weights:
            tensor = self.model.tensors[w.tensor]
            self.sizes[w.name] = elements(w.box) * width(tensor.dtype)
            has_copy = self.model.optimizer.has_copy(tensor.dtype)
            self.wanted[w.name] = elements(w.box) * (width("float32") if has_copy else width(tensor.dtype))
            storage = self.hold(Storage(block(self.sizes[w.name]), WEIGHTS, w.name, w.host))
            self.bind(w.name, storage)
            if w.trained and (size := states(w)):
                self.hold(Storage(size, OPTIMIZER, w.name, w.host))

    def _width(self, tensor: str) -> int:
        return width(self.model.tensors[tensor].dtype)

    def category(self, name: Value) -> int:
        if name.name not in self.parameters:
            return VALUES
        return GRADIENTS if name.is_gradient else GATHERED

    def make(self, name: Value, size: int, *, is_on_host: bool = False) -> None:
        """Let a name hold a storage of its own."""
        self.sizes[name] = size
        self.bind(name, Storage(block(size), self.category(name), name, is_on_host))

    def load(self, i: p.Load) -> None:
        if i.out not in self.names:
            self.make(i.out, elements(i.box) * self._width(i.tensor))

    def forward(self, i: Forward) -> None:
        segment = self.segments[i.task]
        known = {n: self.names[name] for n, name in enumerate(i.inputs) if name in self.names}
        on_host = any(s.is_on_host for s in known.values())
        self.reach(0 if on_host else segment.forward.peak)
        self.strided |= {name for name, strides in zip(i.outputs, segment.strides, strict=True) if strides}
        for name, number, size in zip(i.outputs, segment.results, segment.bytes, strict=True):
            known.setdefault(number, Storage(segment.sizes[number], self.category(name), name, on_host))
            self.sizes[name] = size
            self.bind(name, known[number])
        if segment.backward:
            self.keep_tape(i.task, segment, known, segment.tapes[0])

    def offload(self, i: p.Offload) -> None:
        """Move the storages of a tape to the host but for weights and what stays. The largest is copied last, and is in
        flight.
        """
        tape = self.tapes[i.task]
        stays = {id(self.names[name]) for name in i.alive if name in self.names}
        moved = {n: s for n, s in tape.held.items() if s.category != WEIGHTS and id(s) not in stays}
        every = {id(s): s for s in moved.values()}.values()
        size = tape.others.bytes + sum(s.bytes for s in every)
        tape.away, tape.moved = self.hold(Storage(size, ACTIVATIONS, None, is_on_host=True)), moved
        for number in moved:
            self.release(tape.held.pop(number))
        self.drop(tape.others)
        sizes = [*(s.bytes for s in every), *(size for size, _ in tape.segment.tapes[0].others)]
        if sizes:
            self.drop_all(self.copied)
            self.copied = [self.hold(Storage(max(sizes), COMMUNICATION))]

    def fetch(self, i: p.Fetch) -> None:
        tape = self.tapes[i.task]
        assert tape.away is not None
        self.drop(tape.away)
        made = {id(s): Storage(s.bytes, ACTIVATIONS) for s in tape.moved.values()}
        for number, storage in tape.moved.items():
            tape.known[number] = tape.held[number] = made[id(storage)]
            self.keep(made[id(storage)])
        tape.others = self.hold(Storage(tape.others.bytes, ACTIVATIONS, tape=tape.others.tape))
        tape.away = None

    def backward(self, i: Backward) -> None:
        tape = self.tapes.pop(i.task)
        segment, known, half = tape.segment, tape.known, int(i.half == "weight")
        given = zip(i.gradients, segment.given, strict=False)
        known |= {n: self.names[name] for name, n in given if name is not None and name in self.names}
        own = tape.own(segment.backward[half].ended)
        self.reach(segment.backward[half].peak_of(own))
        if i.half == "input":
            gradients = segment.gradients[half]
            known |= {n: self._gradient(segment, i, a, n) for a, n in gradients.items() if n not in known}
            self.keep_tape(i.task, segment, known, segment.tapes[1])
        for storage in tape.held.values():
            self.release(storage)
        self.drop(tape.others)
        self._made(i, segment, known, segment.gradients[half])

    def _gradient(self, segment: Segment, i: Backward, alias: int, number: int) -> Storage:
        name = i.outputs[alias] or (i.sums[alias] if i.sums else None)
        return Storage(segment.sizes[number], VALUES if name is None else self.category(name), name)

    def _made(self, i: Backward, segment: Segment, known: dict[int, Storage], gradients: Mapping[int, int]) -> None:
        """Bind the gradients of a backward; add others to their sums, or start these sums."""
        temporary, copies = dict[int, int](), [0]
        for alias, number in gradients.items():
            known.setdefault(number, self._gradient(segment, i, alias, number))
            name, total = i.outputs[alias], i.sums[alias] if i.sums else None
            if name is not None:
                self.sizes[name] = segment.elements[alias]
                self.bind(name, known[number])
            elif total is not None and not known[number].holders:
                temporary[number] = known[number].bytes
        self.reach(sum(temporary.values()))
        for alias in gradients:
            total = i.sums[alias] if i.sums else None
            if i.outputs[alias] is None and total is not None and total not in self.names:
                # Copied one after the other, each before its source is freed.
                copies.append(block(segment.elements[alias]))
                self.make(total, segment.elements[alias])
        self.reach(max(copies))

    def slice(self, i: p.Slice) -> None:
        size = self.sizes.get(i.source, 0) * prod(i.shape) // max(1, prod(i.view))
        if is_view(i.view, i.ranges, i.shape, self._views):
            self.alias(i.out, i.source)
            self.sizes[i.out] = size
        else:
            self.make(i.out, size)

    def combine(self, i: p.Combine) -> None:
        # Zeros without pieces take the memory of one.
        size = prod(i.shape if i.pieces else ()) * width(i.dtype)
        is_whole = bool(i.pieces) and all(box == tuple((0, n) for n in i.view) for box in i.boxes)
        if is_whole and len(i.pieces) == 1:
            self.alias(i.out, i.pieces[0])
            return
        # A sum of three and more makes one more tensor on the way.
        self.reach(2 * block(size) if is_whole and len(i.pieces) > 2 else 0)
        self.make(i.out, size)

    def accumulate(self, i: p.Accumulate) -> None:
        if i.in_place:
            self.alias(i.out, i.into)
        else:
            self.make(i.out, max(self.sizes.get(i.into, 0), self.sizes.get(i.value, 0)))

    def collective(self, i: p.Collective) -> None:
        found = buffers(i, i.group.index(self.rank))
        sources = [self.source_of(s) for s in i.sources if s is not None and s in self.names]
        shared = [Storage(found.shared, COMMUNICATION, i.works[0])] * bool(found.shared)
        shared += sources if found.sources else []
        last = [Storage(found.last, COMMUNICATION, i.works[0])] * bool(found.last)
        result = Storage(found.result, COMMUNICATION, i.works[0]) if found.result else None
        self.reach(found.inside + found.shared + found.last + found.result)
        if not any(i.works):
            # Only another device has a result: the source is held as that of a message.
            self.send_all(-1 - self.at, sources if found.sources else [result] if result else [])
            return
        if found.source and sources:
            result = sources[0]
            self.send_all(-1 - self.at, sources if KINDS[i.kind].held is ONE and len(i.group) > 1 else [])
        for storage in shared:
            self.hold(storage)
        for work, way in zip(i.works, i.ways, strict=True):
            if work is not None:
                size = prod(way.shape) * width(i.wide or i.dtype)
                kept = None if result is None else self.hold(result)
                self.handles[work] = Handle(size, kept, shared, [self.hold(x) for x in last])

    def send(self, i: p.Send) -> None:
        self.send_all(i.point, [self.source_of(i.source)] if i.source in self.names else [])
        self.reach(0)

    def recv(self, i: p.Recv) -> None:
        self.handles[i.work] = Handle(i.bytes, self.hold(Storage(block(i.bytes), COMMUNICATION, i.work)))

    def copy(self, i: p.Copy) -> None:
        size = self.sizes[i.source]
        self.handles[i.work] = Handle(size, self.hold(Storage(block(size), COMMUNICATION, i.work, i.to_host)))
        if i.to_host:
            # Copies to the host are done in order: one is in flight.
            self.drop_all(self.copied)
            self.copied = [self.hold(self.names[i.source])]

    def wait(self, i: p.Wait) -> None:
        handle = self.handles.pop(i.work)
        self.sizes[i.out] = handle.size
        if handle.result is None:
            self.bind(i.out, Storage(block(handle.size), self.category(i.out), i.out))
            self.reach(0)
        else:
            self.bind(i.out, handle.result)
            self.become(handle.result, self.category(i.out), i.out)
            self.drop(handle.result)
        self.drop_all(handle.shared)
        handle.shared.clear()
        self.drop_all(handle.held)

    def updated(self, i: p.Update) -> None:
        pairs = [
            (self.wanted[w], self.sizes[g], self.names[g], self.names[w].is_on_host)
            for w, g in zip(i.weights, i.gradients, strict=True)
            if g in self.names
        ]
        here = [(block(w), block(g), self.hold(storage)) for w, g, storage, is_on_host in pairs if not is_on_host]
        self.waiting += here
        if i.is_early and self.clips:
            return
        for _, storage in self.sent:
            self.drop(storage)
        self.drop_all(self.copied)
        self.sent, self.copied = [], []
        # Gradients of another dtype than the optimizer wants are copied. Their norm is that of two float64 copies of
        # one at a time, four times as large as in float32; then all are scaled in place.
        copied = sum(w if w != g else 0 for w, g, _ in self.waiting)
        sizes = [w for w, _, _ in self.waiting]
        norm = 4 * max(sizes, default=0) if self.clips else 0
        self.reach(copied + max(norm, self.update(sizes)))
        self.drop_all([storage for *_, storage in self.waiting])
        self.waiting = []

    def give(self, i: p.Give) -> None:
        if i.value in self.names and i.tensor in self.outputs:
            self.drop(self.outputs[i.tensor].pop(0))
            self.outputs[i.tensor].append(self.hold(self.names[i.value]))

    def freed(self, i: p.Free) -> None:
        for name in i.names:
            self.free(name)
            self.sizes.pop(name, None)
            self.strided.discard(name)

    def nothing(self, i: Instruction) -> None:
        """Run an instruction without memory."""


_RUN: Mapping[type, Callable[..., None]] = {
    p.Load: Liveness.load,
    p.Forward: Liveness.forward,
    p.Backward: Liveness.backward,
    p.Slice: Liveness.slice,
    p.Combine: Liveness.combine,
    p.Accumulate: Liveness.accumulate,
    p.Collective: Liveness.collective,
    p.Send: Liveness.send,
    p.Recv: Liveness.recv,
    p.Copy: Liveness.copy,
    p.Offload: Liveness.offload,
    p.Fetch: Liveness.fetch,
    p.Wait: Liveness.wait,
    p.Update: Liveness.updated,
    p.Give: Liveness.give,
    p.Loss: Liveness.nothing,
    p.Free: Liveness.freed,
}


def parameters(program: Program) -> set[str]:
    """Return the names of weights and buffers, and of copies of these."""
    tensors = program.model.tensors
    names, kinds = unique_identifiers(tensors), ("parameter", "buffer", "next")
    return {names[t] for t, tensor in tensors.items() if tensors[tensor.origin or t].kind in kinds}
