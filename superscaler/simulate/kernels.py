"""The kernels and the memory of a program. Segments are recorded once for equal calls; other instructions of a device,
and the work of the executor itself, are computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache

from superscaler.collectives import KINDS
from superscaler.ir import program as p
from superscaler.ir.mask import extents
from superscaler.ir.program import Backward, Device, Forward, Instruction, Program, Value
from superscaler.ir.running.machine import Domain, Lap
from superscaler.runtime.optimizer import is_listed
from superscaler.simulate.repeats.steady import Pace
from superscaler.simulate.segments import Segments, input_metas, output_metas
from superscaler.simulate.storages import Buffers, buffers
from superscaler.simulate.works import Kernel, Meta, Segment, Work

__all__ = ["Kernel", "Kernels", "Meta", "Segment", "Segments", "Work", "Works", "input_metas"]

Kernels = Sequence[Kernel]
# The steps of torch.optim.Muon by default.
_NEWTON_SCHULZ = 5
# The kernels of Adam over lists, the first for AdamW only: tensors like the weights that each reads and makes.
_LISTED = (("mul_", 1, 1), ("lerp_", 2, 1), ("mul_", 1, 1), ("addcmul_", 2, 1), ("sqrt", 1, 1), ("div_", 1, 1),
           ("add_", 1, 1), ("addcdiv_", 3, 1))  # fmt: skip


class Works:
    """The kernels of the devices of a program. Equal segments are recorded once. `on_gpu`: the updates are those of a
    GPU; `torch_compile`: Inductor compiles segments, whose backward makes the first sums of gradients itself;
    `cuda_graph`: the step is replayed. `adds`: products add their gradients to sums themselves; `balance`: see
    `Segments`.
    """

    def __init__(
        self,
        program: Program,
        on_gpu: bool = False,
        torch_compile: bool = False,
        cuda_graph: bool = False,
        adds: bool = False,
        balance: float = 1.0,
    ) -> None:
        self.program, self.on_gpu = program, on_gpu
        self.segments = Segments(program, on_gpu, torch_compile, cuda_graph, balance)
        self.torch_compile, self.adds = torch_compile, adds
        self._metas: dict[int, tuple[list[Meta], list[Meta]]] = {}
        # Equal kernels are one object, priced once: of backwards by their additions to sums, of buckets.
        self._backwards: dict[tuple[object, ...], Kernels] = {}
        self._buckets: dict[Hashable, tuple[object, tuple[Kernels, list[Kernels]]]] = {}

    def of(self, device: Device) -> list[Kernels]:
        """Return the kernels of each instruction of a device."""
        run = _Device(self, device)
        self.segments.walk(device, run)
        return run.found

    def backward(self, work: Kernels, added: tuple[tuple[Meta, Meta, bool], ...]) -> Kernels:
        """Return the kernels of a backward and of its sums (gradient, sum, whether the sum exists already)."""
        if self.adds:
            return work
        key = id(work), added
        if key not in self._backwards:
            first = _cast if self.torch_compile else _copied
            sums = (_added(total, own) if is_old else first(total, own) for own, total, is_old in added)
            self._backwards[key] = *work, *(k for some in sums for k in some)
        return self._backwards[key]

    def bucket(self, i: p.Collective, rank: int) -> tuple[Kernels, list[Kernels]]:
        """Return the copies into the buffer of a collective, and for each of its results the work after the wait."""
        key = id(i.ways), i.kind, i.group
        if key not in self._buckets:
            # With the ways: an object that is freed gives its number to another one.
            self._buckets[key] = i.ways, _moved(i, buffers(i, i.group.index(rank)))
        return self._buckets[key][1]

    def metas(self, function: int) -> tuple[list[Meta], list[Meta]]:
        """Return shape and dtype of the inputs and of the outputs of a function."""
        if function not in self._metas:
            model, f = self.program.model, self.program.functions[function]
            self._metas[function] = [*input_metas(model, f)], [*output_metas(model, f)]
        return self._metas[function]


class _Device(Domain[Instruction, Pace]):
    """A device that runs its instructions in order. `metas`: of the values; `started`: results of communication, and
    `after`: the work on these after their wait.
    """

    def __init__(self, works: Works, device: Device) -> None:
        self.works, self.tensors, self.optimizer = works, works.program.model.tensors, works.program.model.optimizer
        self.segments, self.functions = works.segments.tasks(device), works.segments.functions(device)
        self.found: list[Kernels] = []
        self.metas: dict[Value, Meta] = {p.ONE: ((), "float32")}
        self.started: dict[Value, Meta] = {}
        self.rank, self.after = device.rank, dict[Value, Kernels]()
        for weight in device.weights:
            tensor = self.tensors[weight.tensor]
            self.metas[weight.name] = tensor.local_shape(extents(weight.box)), tensor.dtype
        # The optimizer of each weight, and its kernels.
        options = map(dict, self.optimizer.groups)
        name = self.optimizer.name
        ways = ["foreach" if works.on_gpu and is_listed(name, o, works.segments.fuses) else "fused" for o in options]
        trained = [w for w in device.weights if w.trained]
        self.kinds = {
            w.name: (self.optimizer.kind(w.group).lower(), "host" if w.host else ways[w.group]) for w in trained
        }

    def step(self, at: int, i: Instruction) -> bool:
        self.found.append(self.kernels(i))
        return True

    def state(self, lap: Lap[Pace], turns: int) -> object:
        return [lap.step.names(held, turns) for held in (self.metas, self.started, self.after)]

    def skip(self, lap: Lap[Pace], turns: int, before: object, now: object) -> None:
        self.found += self.found[-lap.length :] * turns
        self.metas = lap.step.names(self.metas, turns)
        self.started = lap.step.names(self.started, turns)
        self.after = lap.step.names(self.after, turns)

    def kernels(self, i: Instruction) -> Kernels:
        """Return the kernels of an instruction, and record its results."""
        metas = self.metas
        match i:
            case p.Load():
                metas[i.out] = self.tensors[i.tensor].local_shape(extents(i.box)), self.tensors[i.tensor].dtype
            case Forward():
                metas.update(zip(i.outputs, self.works.metas(i.function)[1], strict=True))
                return self.segments[i.task].forward.kernels
            case Backward():
                return self._backward(i)
            case p.Slice():
                metas[i.out] = i.shape, metas[i.source][1]
                return _copied(metas[i.out])
            case p.Combine():
                metas[i.out] = i.shape, i.dtype
                pieces = (k for piece in i.pieces for k in _added(metas[piece]))
                return Kernel("fill_.Scalar", (), (metas[i.out] if i.pieces else ((), i.dtype),)), *pieces
            case p.Accumulate():
                metas[i.out] = metas[i.into]
                return _added(metas[i.value])
            case p.Collective():
                pairs = zip(i.works, i.ways, strict=True)
                self.started |= {work: (way.shape, i.wide or i.dtype) for work, way in pairs if work is not None}
                before, after = self.works.bucket(i, self.rank)
                self.after |= {
                    work: some for work, some in zip(i.works, after, strict=True) if work is not None and some
                }
                return before
            case p.Recv():
                self.started[i.work] = i.shape, i.dtype
            case p.Copy():
                self.started[i.work] = metas[i.source]
            case p.Wait():
                metas[i.out] = i.shape, self.started.pop(i.work)[1]
                return self.after.pop(i.work, ())
            case p.Free():
                for name in i.names:
                    metas.pop(name, None)
            case p.Update():
                return self._update(i)
        return ()

    def _backward(self, i: Backward) -> Kernels:
        segment, number = self.segments[i.task], self.functions[i.task]
        kernels = segment.backward[-1 if i.half == "weight" else 0].kernels if segment.backward else ()
        function, (inputs, *_) = self.works.program.functions[number], self.works.metas(number)
        made = [(inputs[n][0], "float32" if n in function.wide else inputs[n][1]) for n in function.grads]
        self.metas |= {out: meta for out, meta in zip(i.outputs, made, strict=True) if out is not None}
        totals = [(n, total) for n, total in enumerate(i.sums) if total is not None]
        added = tuple((inputs[function.grads[n]], made[n], total in self.metas) for n, total in totals)
        self.metas |= {total: made[n] for n, total in totals}
        return self.works.backward(kernels, added)

    def _update(self, i: p.Update) -> Kernels:
        weights = [self.metas[name] for name in i.weights]
        # Halves are updated as their float32 copies.
        updated = tuple((s, "float32") if self.optimizer.has_copy(d) else (s, d) for s, d in weights)
        pairs = zip(updated, (self.metas[name] for name in i.gradients), strict=True)
        casts = [meta for meta, gradient in pairs if meta[1] != gradient[1]]
        casts += [meta for meta, weight in zip(updated, weights, strict=True) if meta != weight]
        copies = [k for meta in (*casts, *(self.metas[name] for name in i.buffers)) for k in _copied(meta)]
        owned: dict[tuple[str, str], tuple[Meta, ...]] = {}
        for name, meta in zip(i.weights, updated, strict=True):
            owned[self.kinds[name]] = *owned.get(self.kinds[name], ()), meta
        products = (
            k for (kind, _), metas in owned.items() if kind == "muon" for s, _ in metas for k in _orthogonal(*s)
        )
        updates = (k for kind, metas in owned.items() for k in _updates(*kind, metas))
        return (*copies, *updates, *products)


def _updates(kind: str, way: str, weights: tuple[Meta, ...]) -> Iterator[Kernel]:
    """Yield the update of weights by an optimizer: one kernel, also on the host, or those of torch's lists for Adam."""
    if way == "foreach":
        for name, read, made in _LISTED[kind != "adamw" :]:
            yield Kernel(f"_foreach_{name}", weights * read, weights * made)
        return
    states = weights * (2 if kind.startswith("adam") else 1)
    yield Kernel(f"_{way}_{kind}_", (*weights, *weights, *states), (*weights, *states))


def _moved(i: p.Collective, found: Buffers) -> tuple[Kernels, list[Kernels]]:
    """Return the copies into the buffer of a collective, and the work on each result, as `comm/buckets.py` has them."""
    # A bucket is a copy of its tensors; so are chunks that do not lie one after the other.
    is_read = KINDS[i.kind].gathers and not found.shared
    first = i.ways[0]
    is_plain = len(i.ways) == 1 and first.leads(first.gather_slot if first.scatter_slot < 0 else first.scatter_slot)
    copied = [_copied(((way.elements,), i.dtype), ((way.elements,), i.given or i.dtype)) for way in i.ways]
    into = () if is_read or (is_plain and not i.given) else tuple(k for some in copied for k in some)
    after = [_copied((way.shape, i.dtype)) if found.made else () for way in i.ways]
    if i.wide and KINDS[i.kind].sums:
        # The first wait adds the chunks of all results.
        chunk = (sum(way.elements for way in i.ways) // len(i.group),)
        after[0] = _summed((chunk, i.wide), (chunk, i.dtype), len(i.group))
    return into, after


@cache
def _summed(total: Meta, part: Meta, count: int) -> Kernels:
    return (*_copied(total, part), *(k for _ in range(count - 1) for k in _added(total, part)))


@cache
def _orthogonal(rows: int, columns: int) -> Kernels:
    """Return the products of torch's Muon for a matrix: Newton-Schulz in bfloat16, by its smaller side."""
    n, k = sorted((rows, columns))
    wide, tall, square = ((n, k), "bfloat16"), ((k, n), "bfloat16"), ((n, n), "bfloat16")
    step = (
        Kernel("mm", (wide, tall), (square,)),
        Kernel("addmm", (square, square, square), (square,)),
        Kernel("addmm", (wide, square, wide), (wide,)),
    )
    return step * _NEWTON_SCHULZ


@cache
def _copied(meta: Meta, source: Meta | None = None) -> Kernels:
    return (Kernel("copy_", (source or meta,), (meta,)),)


@cache
def _added(meta: Meta, value: Meta | None = None) -> Kernels:
    return (Kernel("add_.Tensor", (meta, value or meta), (meta,)),)


@cache
def _cast(meta: Meta, source: Meta) -> Kernels:
    """Return the kernel that makes a gradient the first of a sum, where it is not made so."""
    return () if meta[1] == source[1] else _copied(meta, source)
