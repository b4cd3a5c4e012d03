"""The runtime of emitted code: segments under autograd, slices and sums, communication, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from superscaler.collectives import KINDS, ONE, TILE
from superscaler.comm import buckets
from superscaler.comm.communicator import Communicator, Handle
from superscaler.runtime import functional
from superscaler.runtime.compiled.segments import CompiledSegments
from superscaler.runtime.compiled.tape import CompiledTape
from superscaler.runtime.saved_tensors import Copies
from superscaler.runtime.tapes import Segment, Sums, Tape, Tensors, record
from superscaler.runtime.updates import Chosen, Updates

Box = Sequence[Sequence[int]]
# Weights at rest by the paths of modules and tensors.
Found = dict[tuple[str, ...], list[Tensor]]
T = TypeVar("T")


def _with_ways(function: Callable[..., T]) -> Callable[..., T]:
    """Return a method of `Rank` for a bucket of tensors with ways. It also accepts the number of these ways in a table,
    which has the shape of each in slots, the gathered or scattered slot, and the sizes of uneven chunks.
    """
    run = _over_group(function)

    def started(rank: Rank, tensors: Tensors, group: int, *more: Any, ways: int | None = None, **options: Any) -> T:
        if ways is None:
            return run(rank, tensors, group, *more, **options)
        shapes, dims, sizes = zip(*rank.tables["ways"][ways], strict=True)
        tensors = tuple(x.reshape(shape) for x, shape in zip(tensors, shapes, strict=True))
        return run(rank, tensors, group, *more, dims, sizes if any(sizes) else (), **options)

    return started


def _over_group(function: Callable[..., T]) -> Callable[..., T]:
    """Return a method of `Rank` for a function of (communicator, what, group, ...); it takes the number of a group."""

    def run(rank: Rank, what: Any, group: int, *more: Any, **options: Any) -> T:
        return function(rank.communicator, what, tuple(rank.tables["groups"][group]), *more, **options)

    return run


def _from_first(function: Callable[..., Handle]) -> Callable[..., Handle]:
    """Return a method of `Rank` for a function of (communicator, what, source, group, ..., shape, dtype), by which the
    first of a group gives a value to the others.
    """

    def run(rank: Rank, x: Tensor | None, group: int, *more: Any) -> Handle:
        *slots, shape, dtype = more
        ranks = tuple(rank.tables["groups"][group])
        return function(rank.communicator, x, ranks[0], ranks, *slots, tuple(shape), getattr(torch, dtype))

    return run


class Held(Protocol):
    """The tensors that a recorded step reads in place of those of one step: the pieces of its batch, and its words."""

    inputs: list[Tensor]
    words: list[Tensor]


@dataclass(eq=False, repr=False)
class Rank:
    """One device of a plan while it runs: its weights, the tapes of its segments, its communicator.

    `tables`: the device's tables in plan.json. `weights`: its slices by local name. `chosen`: the optimizer's name and
    the options of its groups, and whether it updates float32 copies of 16-bit weights (see `Updates`). `seed`: of all
    random numbers.
    """

    communicator: Communicator
    tables: Mapping[str, Any]
    weights: dict[str, Tensor]
    chosen: InitVar[Chosen]
    dtype: torch.dtype
    seed: int = 0
    steps: int = 0
    # The number of segments that ran, forward or backward.
    works: int = 0
    # The number of iterations in a step.
    iterations: int = 1
    batch: Mapping[str, Tensor] = field(default_factory=dict)
    # The outputs of the last step, by name.
    outputs: dict[str, Tensor] = field(default_factory=dict)
    # Numbers that travel with the loss, and their sums over all ranks after it; None: there are none.
    beside: Tensor | None = None
    # Called for each segment that ran, with its kind (F, B), tag, inputs and outputs.
    watch: Callable[[str, str, Sequence[Tensor | None], Sequence[Tensor]], None] | None = None
    # Runs segments as Inductor compiles them; None: they run as they are.
    compiled: CompiledSegments | None = None
    # What a recorded step reads, while one runs.
    static: Held | None = None
    # Makes what emitted code gets in the place of this rank; None: itself.
    shown: Callable[[Rank], Any] | None = None

    def __post_init__(self, chosen: Chosen) -> None:
        self.device = self.communicator.device
        self._copies = Copies(self.device)
        self.updates = Updates(self.communicator, self._copies, self.tables["weights"], self.weights, chosen)
        self._tapes: dict[str, Tape | CompiledTape] = {}
        # The names of weights at rest, by the identity of their tensors; lists of them, by paths.
        self._names = {id(weight): name for name, weight in self.weights.items()}
        self._found: Found = {}

    @property
    def one(self) -> Tensor:
        """Return the gradient of the loss, a tensor of its own: one, or the loss scale. The gradient of a scalar weight
        may be this very tensor, which is scaled in place.
        """
        scaler = self.updates.scaler
        one = torch.ones((), device=self.device) if scaler is None else scaler.scale
        return one.to(self.dtype, copy=True)

    def input(self, number: int) -> Tensor:
        return self.piece(number).to(self.device) if self.static is None else self.static.inputs[number]

    def piece(self, number: int) -> Tensor:
        """Return a piece of the batch, where the batch is."""
        name, box = self.tables["inputs"][number]
        return take(self.batch[name], self.tables["slots"][name], box)

    @contextmanager
    def under(self, tables: Mapping[str, Any], weights: dict[str, Tensor], found: Found) -> Iterator[None]:
        """Read other tables in the block, and weights by their local names. Updates are of the rank's own names."""
        own = self.tables, self.weights, self._found
        self.tables, self.weights, self._found = tables, weights, found
        try:
            yield
        finally:
            self.tables, self.weights, self._found = own

    def hold(self, constants: Mapping[str, Tensor]) -> None:
        """Take further tensors for ones at rest: no step changes them."""
        self._names = {**{id(x): name for name, x in constants.items()}, **self._names}

    def weight(self, name: str) -> Tensor:
        return self.weights[name]

    def weights_of(self, *paths: str) -> list[Tensor]:
        """Return the weights at rest of some tensors, and of all in some modules, in order."""
        if paths not in self._found:
            pairs = [(w["tensor"], self.weights[w["name"]]) for w in self.tables["weights"]]
            self._found[paths] = [x for path in paths for t, x in pairs if t == path or t.startswith(f"{path}.")]
        return self._found[paths]

    def forward(
        self,
        tag: str,
        function: Segment,
        inputs: Sequence[Tensor],
        tape: bool = True,
        draws: int | None = None,
        parts: int | None = None,
    ) -> Tensors:
        """Run a segment on detached aliases and return detached outputs. A `tape` stays under `tag`."""
        facts = function.__dict__
        extra: dict[str, Any] = {} if draws is None else {"random": self.random(draws)}
        extra |= {} if parts is None else {"parts": self.tables["parts"][parts]}
        if tape:
            run = record if self.compiled is None else self.compiled.record
            outputs, self._tapes[tag] = run(function, inputs, extra, facts, self._names)
        elif self.compiled is not None:
            outputs = self.compiled.run(function, inputs, extra)
        else:
            with torch.no_grad():
                outputs = function(*(x.detach() for x in inputs), **extra)
        return self._done("F", tag, inputs, tuple(x.detach() for x in outputs))

    def _done(self, kind: str, tag: str, given: Sequence[Tensor | None], made: Tensors) -> Tensors:
        self.works += 1
        if self.watch is not None:
            self.watch(kind, tag, given, made)
        return made

    def backward(
        self, tag: str, gradients: Sequence[Tensor | None], again: Sequence[Tensor] = (), into: Sums | None = None
    ) -> Tensors:
        """Return the gradients of a segment's aliases, given those of its saved outputs (None: not read).

        `again`: the weights that the forward did not keep. With `into`, gradients are added to these sums instead, from
        the number of their first one on.
        """
        return self._done("B", tag, gradients, self._tapes.pop(tag).backward(gradients, again, into))

    def backward_input(self, tag: str, gradients: Sequence[Tensor | None], first: Sequence[int]) -> Tensors:
        """Return the gradients of the aliases with these numbers; keep what `backward_weight` needs."""
        return self._done("B", tag, gradients, self._tapes[tag].first_half(gradients, first))

    def backward_weight(self, tag: str, into: Sums | None = None) -> Tensors:
        """Return the gradients of the other aliases, without those that are added to sums."""
        return self._tapes.pop(tag).second_half(into)

    def offload(self, tag: str, alive: Sequence[Tensor] = ()) -> None:
        """Copy the tape of a forward to the host. What the rank holds itself stays, and tensors that are `alive`."""
        self._tapes[tag].offload(self._copies, (*alive, *self.weights.values(), *self.batch.values()))

    def fetch(self, tag: str) -> None:
        """Copy a tape back from the host."""
        self._tapes[tag].fetch(self._copies)

    def sums(self, count: int) -> list[Tensor | None]:
        """Return a list for `count` sums of gradients; the first addition makes each sum."""
        return [None] * count

    def random(self, number: int) -> functional.Draws:
        """Return the random tensors of a segment on this device; called with k, they draw the k-th."""
        words = None if self.static is None else self.static.words[number]
        return functional.Draws(self.seed, self.steps, self.tables["draws"][number], self.device, words)

    def slice(self, x: Tensor, view: Sequence[int], box: int, shape: Sequence[int]) -> Tensor:
        return _narrow(x.reshape(view), self.tables["boxes"][box]).reshape(shape)

    def combine(
        self, pieces: Sequence[Tensor], boxes: int, view: Sequence[int], shape: Sequence[int], dtype: str,
        largest: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the sum of pieces, each placed at its box of a tensor of zeros; or the largest of them."""
        none = -math.inf if largest else 0
        out = torch.full(tuple(view), none, dtype=getattr(torch, dtype), device=pieces[0].device)
        for piece, box in zip(pieces, self.tables["boxes"][boxes], strict=True):
            part = _narrow(out, box)
            if largest:
                torch.maximum(part, piece.reshape(part.shape), out=part)
            elif out.dtype == torch.bool:
                part |= piece.reshape(part.shape)
            else:
                part += piece.reshape(part.shape)
        return out.reshape(shape)

    def zeros(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Return zeros that take no memory."""
        return torch.zeros((), dtype=getattr(torch, dtype), device=self.device).expand(shape)

    def wait_all(self, works: Sequence[Handle], shapes: int) -> list[Tensor]:
        """Return the results of started operations, in the shapes with a number in a table."""
        return [work.wait().reshape(shape) for work, shape in zip(works, self.tables["shapes"][shapes], strict=True)]

    def together(self) -> AbstractContextManager[None]:
        return self.communicator.together()

    def send(self, x: Tensor, message: int) -> None:
        peer, tag = self.tables["messages"][message]
        # Emitted code never changes a sent tensor in place, and updates of weights wait for sends.
        self.communicator.send(x, peer, tag, owned=True)

    def recv(self, message: int, shape: Sequence[int], dtype: str) -> Handle:
        peer, tag = self.tables["messages"][message]
        return self.communicator.recv(tuple(shape), getattr(torch, dtype), peer, tag)

    def to_host(self, x: Tensor) -> Handle:
        return self._copies.start(x, to_host=True)

    def to_device(self, x: Tensor) -> Handle:
        return self._copies.start(x, to_host=False)

    def update(self, weights: Sequence[Tensor] = (), gradients: Sequence[Tensor] = (), early: bool = False) -> None:
        """Give each weight its gradient and run the optimizer; see `Updates.update`."""
        self.updates.update(self._named(weights, gradients), early)

    def weights_at(self, number: int) -> list[Tensor]:
        """Return the weights at rest in an entry of a table."""
        return [self.weights[name] for name in self.tables["updates"][number]]

    def name_of(self, weight: Tensor) -> str:
        return self._names[id(weight)]

    def _named(self, weights: Sequence[Tensor], values: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        return [(self.name_of(weight), value) for weight, value in zip(weights, values, strict=True)]

    def write(self, buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Set buffers to their new values."""
        self.updates.write(self._named(buffers, values))

    def give(self, name: str, value: Tensor, shape: Sequence[int]) -> None:
        """Store an output of the step on this rank."""
        self.outputs[name] = value.detach().reshape(shape)

    def finish(self) -> None:
        """End a step without training."""
        self.steps += 1

    def loss(self, parts: Sequence[Tensor], counted: int, of: Sequence[int] = ()) -> Tensor:
        """Return the sum of the counted parts of all devices, equal on all. `of`: their iterations, a loss each."""
        kept: list[list[Tensor]] = [[] for _ in range(self.iterations)]
        for part, counts, turn in zip(parts, self.tables["counted"][counted], of or (0,) * len(parts), strict=True):
            if counts:
                kept[turn].append(part.reshape(()).to(self.dtype))
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        here = [torch.stack(some).sum() if some else zero for some in kept]
        self.steps += self.iterations
        if self.beside is None:
            return self.communicator.sum_of_all(torch.stack(here) if self.iterations > 1 else here[0])
        found = self.communicator.sum_of_all(torch.cat([torch.stack(here), self.beside]))
        self.beside = found[self.iterations :]
        # A loss may be kept, the numbers need not be.
        return found[: self.iterations].clone() if self.iterations > 1 else found[0].clone()


# The collectives of emitted code, as the communicator runs them; those with `_bucket` are of several tensors.
for _kind in KINDS.values():
    _alone = _from_first if _kind.held is ONE else _over_group
    setattr(Rank, _kind.name, _alone(getattr(Communicator, _kind.name)))
    if _kind.is_bucketed:
        _joined = _with_ways if TILE in _kind.ends else _over_group
        setattr(Rank, f"{_kind.name}_bucket", _joined(getattr(buckets, _kind.name)))


def take(x: Tensor, slots: Sequence[Sequence[int]], box: Box) -> Tensor:
    """Return the sub-box (in slots) of a whole tensor, in local shape. `slots`: per dim, the sizes of its slots."""
    if all(lo == 0 and hi == size for (lo, hi), size in zip(box, _flat(slots), strict=True)):
        return x
    sizes = [hi - lo for lo, hi in box]
    shape, at = [], 0
    for dim in slots:
        size = 1
        for _ in dim:
            size, at = size * sizes[at], at + 1
        shape.append(size)
    return _narrow(x.reshape(_flat(slots)), box).reshape(shape).contiguous()


def put(x: Tensor, slots: Sequence[Sequence[int]], box: Box, piece: Tensor) -> None:
    """Write a piece of `take` into a whole, contiguous tensor."""
    inner = _narrow(x.view(_flat(slots)), box)
    inner.copy_(piece.reshape(inner.shape))


def _flat(slots: Sequence[Sequence[int]]) -> list[int]:
    return [size for dim in slots for size in dim]


def _narrow(x: Tensor, box: Box) -> Tensor:
    for dim, (lo, hi) in enumerate(box):
        if hi - lo != x.shape[dim]:
            x = x.narrow(dim, lo, hi - lo)
    return x
