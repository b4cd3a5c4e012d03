"""The tape of a compiled segment: the list that its forward keeps, and its backward, whole or in halves.

A backward is compiled when it first runs: for the gradients that it gets, and with the sums to which it adds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from superscaler.runtime.compiled import graph_parts as parts
from superscaler.runtime.compiled.inductor import Call, Compiler, Results, plain
from superscaler.runtime.compiled.joint import Joint, results_of
from superscaler.runtime.saved_tensors import Copies, Kept, MovedTape, storage_of, strided
from superscaler.runtime.tapes import List, Sums, Tensors, in_dtypes

# By the number of a gradient, the list and the place of its sum.
Targets = Mapping[int, tuple[List, int]]


class Gradient(NamedTuple):
    """The gradient of an input: its shape, the dtype of the input, and its device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass
class Compiled:
    """A compiled segment. `saved`: the outputs whose gradients its backward gets; `ends`: the dtypes of those that it
    reads. `again`: of what the forward keeps, the number, among the regathered weights, of each that is one, and its
    dtype and strides. `wide`: whether each gradient is float32.
    """

    name: str
    joint: Joint
    saved: Sequence[int]
    ends: Sequence[torch.dtype]
    again: Mapping[int, tuple[int, torch.dtype, tuple[int, ...]]]
    gradients: Sequence[Gradient]
    wide: list[bool]
    compiler: Compiler
    # The forward, but for results that depend on no input, by their numbers.
    run: Call
    constants: Mapping[int, Tensor]
    # Parts of the backward, each with the numbers of results that share memory.
    calls: dict[Hashable, tuple[Call, frozenset[int]]] = field(default_factory=dict)
    halves: dict[Hashable, parts.Halves] = field(default_factory=dict)
    _without: dict[tuple[bool, ...], fx.GraphModule] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        joint: Joint,
        facts: Mapping[str, Any],
        given: Sequence[Tensor],
        wants: Sequence[bool],
        compiler: Compiler,
    ) -> Compiled:
        """Return a segment whose graphs are not compiled yet."""
        saved, wide = facts.get("saved"), facts.get("wide", ())
        number = {n: k for k, n in enumerate(facts.get("again", ()))}
        again = {k: (number[n], given[n].dtype, given[n].stride()) for k, n in enumerate(joint.kept) if n in number}
        wanted = [n for n, is_wanted in enumerate(wants) if is_wanted]
        gradients = [Gradient(tuple(x.shape), x.dtype, x.device) for x in (given[n] for n in wanted)]
        ends = [n.meta["val"].dtype for n in joint.gradients]
        numbers = range(joint.outputs) if saved is None else saved
        is_wide = [n in wide for n in wanted]
        return cls(name, joint, numbers, ends, again, gradients, is_wide, compiler, plain(joint.forward), {})

    def compile(self, given: Sequence[Tensor]) -> None:
        """Compile the forward, for inputs of these forms."""
        graph, self.constants = parts.without_constants(self.joint.forward)
        self.run = self.compiler(self.name, graph, given, self.joint.mode, False)

    def forward(self, given: list[Tensor]) -> list[Tensor]:
        """Return the results of the forward; it empties the list of inputs."""
        found = [x for x in self.run(given) if x is not None]
        for k, x in self.constants.items():
            found.insert(k, x)
        return found

    def call(
        self, key: Hashable, build: Callable[[], fx.GraphModule], given: list[Tensor]
    ) -> tuple[Results, frozenset[int]]:
        """Run a part of the backward, which is built and compiled for inputs of these forms when it first runs. Return
        its results, and the numbers of those that share memory with others.
        """
        key = key, *((x.stride(), x.dtype) for x in given)
        with torch.no_grad():
            if key in self.calls:
                call, shared = self.calls[key]
                return call(given), shared
            with _disable_current_modes():
                call = self.compiler(f"the backward of {self.name}", build(), given, self.joint.mode, True)
            known = set(map(storage_of, given))
            found = call(given)
            self.calls[key] = call, _shared(known, found)
            return found, self.calls[key][1]

    def whole(self, missing: tuple[bool, ...], added: Sequence[int]) -> fx.GraphModule:
        """Return the graph of the backward without some gradients of outputs, some of its results added to sums."""
        return parts.with_sums(self.without(missing), added)

    def in_halves(self, missing: tuple[bool, ...], first: tuple[int, ...]) -> parts.Halves:
        """Return the backward in halves: the first gives the gradients with these numbers."""
        key = missing, first
        if key not in self.halves:
            self.halves[key] = parts.halves(self.without(missing), first)
        return self.halves[key]

    def without(self, missing: tuple[bool, ...]) -> fx.GraphModule:
        """Return the graph of the backward without some gradients of outputs."""
        if missing not in self._without:
            graph = self.joint.backward
            assert graph is not None
            self._without[missing] = parts.without_gradients(graph, missing) if any(missing) else graph
        return self._without[missing]

    def kind(self, n: int) -> torch.dtype:
        """Return the dtype of a gradient."""
        return torch.float32 if self.wide[n] else self.gradients[n].dtype

    def zeros(self, n: int) -> Tensor:
        """Return a gradient where nothing arrives."""
        return torch.zeros(self.gradients[n].shape, dtype=self.kind(n), device=self.gradients[n].device)


def _shared(known: set[int], found: Results) -> frozenset[int]:
    """Return the numbers of results that share memory with known ones, an earlier result or themselves."""
    shared = set[int]()
    for n, x in enumerate(found):
        if x is not None:
            shared |= {n} if storage_of(x) in known or 0 in x.stride() else set()
            known.add(storage_of(x))
    return frozenset(shared)


class CompiledTape:
    """What the forward of a compiled segment keeps. It does what `tapes.Tape` does."""

    def __init__(self, made: Compiled, values: Sequence[Tensor]) -> None:
        """Take the inputs and the results of the forward."""
        self._made = made
        self._kept = [None if k in made.again else values[n] for k, n in enumerate(made.joint.kept)]
        # What is kept while some of it is on the host.
        self._moved: tuple[MovedTape, list[Kept | None]] | None = None
        # Of the second half of a backward: the numbers of its gradients, and how it is run.
        self._rest: tuple[Sequence[int], _Rest | None] | None = None

    @property
    def wide(self) -> list[bool]:
        return self._made.wide

    def backward(self, gradients: Sequence[Tensor | None], again: Sequence[Tensor], into: Sums | None) -> Tensors:
        """Return the gradients of all inputs that want one; see `Rank.backward`."""
        made, numbers = self._made, range(len(self._made.gradients))
        given, missing = self._given(gradients, again)
        targets = _targets(into, numbers)
        if all(missing):
            return self._filled([None] * len(numbers), numbers, targets)
        added = self._added(targets, numbers, missing)
        # The list has the only names of what was kept and of the sums: each tensor ends where it is read last.
        given += _taken(targets, numbers, added)
        found, shared = made.call(("whole", missing, added), lambda: made.whole(missing, added), given)
        return self._filled(found, numbers, targets, added, shared)

    def first_half(self, gradients: Sequence[Tensor | None], first: Sequence[int]) -> Tensors:
        """Return the gradients with these numbers; keep what the second half needs."""
        made, numbers = self._made, tuple(first)
        rest = [n for n in range(len(made.gradients)) if n not in numbers]
        given, missing = self._given(gradients, ())
        if all(missing):
            self._rest = rest, None
            return self._filled([None] * len(numbers), numbers, {})
        now, later, kept = made.in_halves(missing, numbers)
        values = list(given)
        found, _ = made.call(("first", missing, numbers), lambda: now, given)
        values += [x for x in found if x is not None]
        self._rest = rest, _Rest(later, (missing, numbers), [values[n] for n in kept])
        return self._filled(found[: len(numbers)], numbers, {})

    def second_half(self, into: Sums | None) -> Tensors:
        """Return the gradients of the other inputs."""
        assert self._rest is not None
        made, (numbers, rest) = self._made, self._rest
        self._rest, targets = None, _targets(into, numbers)
        if rest is None:
            return self._filled([None] * len(numbers), numbers, targets)
        added = self._added(targets, numbers, rest.key[0])
        rest.given += _taken(targets, numbers, added)
        key, graph = ("second", rest.key, added), rest.graph
        found, shared = made.call(key, lambda: parts.with_sums(graph, added), rest.given)
        return self._filled(found, numbers, targets, added, shared)

    def offload(self, copies: Copies, alive: Iterable[Tensor]) -> None:
        """Copy the kept tensors to the host, but not those that are `alive`: others hold them."""
        if self._moved is None:
            held = [None if x is None else Kept(x) for x in self._kept]
            self._moved, self._kept = (MovedTape([k for k in held if k is not None]), held), []
        self._moved[0].offload(copies, alive)

    def fetch(self, copies: Copies) -> None:
        """Start to copy it back from the host."""
        assert self._moved is not None
        self._moved[0].fetch(copies)

    def _given(
        self, gradients: Sequence[Tensor | None], again: Sequence[Tensor]
    ) -> tuple[list[Tensor], tuple[bool, ...]]:
        """Return the tensors that the backward reads, in a list with their only names, and the missing gradients."""
        if self._moved is not None:
            moved, held = self._moved
            moved.arrive()
            self._moved, self._kept = None, [None if k is None else k.x for k in held]
        made, kept = self._made, self._kept
        self._kept = []
        for k, (n, dtype, strides) in made.again.items():
            kept[k] = strided(again[n].to(dtype), strides)
        given = dict(zip(made.saved, gradients, strict=True))
        ends = [given.get(k) for k in made.joint.ends]
        arrived = [x.to(dtype) for x, dtype in zip(ends, made.ends, strict=True) if x is not None]
        return [*(x for x in kept if x is not None), *arrived], tuple([x is None for x in ends])

    def _added(self, targets: Targets, numbers: Sequence[int], missing: tuple[bool, ...]) -> tuple[int, ...]:
        """Return the places, among the numbers, of gradients that are added to a sum. Not all arrive."""
        if not targets:
            return ()
        results = results_of(self._made.without(missing))
        known = (k for k, n in enumerate(numbers) if n in targets and results[n] is not None)
        return tuple([k for k in known if _sum(*targets[numbers[k]]) is not None])

    def _filled(
        self,
        found: Results,
        numbers: Iterable[int],
        targets: Targets,
        added: Sequence[int] = (),
        shared: frozenset[int] = frozenset(),
    ) -> Tensors:
        """Return gradients, zeros for missing ones, but for those with a sum: `added` ones are stored as this. A first
        one is copied if it shares memory.
        """
        made, fresh = self._made, list[tuple[int, int, Tensor]]()
        for k, (n, g) in enumerate(zip(numbers, found, strict=True)):
            if k in added:
                own, at = targets[n]
                own[at] = g
            elif n not in targets or _sum(*targets[n]) is None:
                fresh.append((k, n, made.zeros(n) if g is None else g))
        cast, whole = in_dtypes([g for *_, g in fresh], [made.kind(n) for _, n, _ in fresh]), list[Tensor]()
        for (k, n, before), g in zip(fresh, cast, strict=True):
            if n in targets:
                own, at = targets[n]
                own[at] = g.clone() if g is before and k in shared else g
            else:
                whole.append(g)
        return tuple(whole)


@dataclass
class _Rest:
    """The second half of a backward: its graph, with the missing gradients and the numbers of those in the first half
    as a key, and what it reads.
    """

    graph: fx.GraphModule
    key: tuple[tuple[bool, ...], tuple[int, ...]]
    given: list[Tensor]


def _targets(into: Sums | None, numbers: Sequence[int]) -> Targets:
    """Return the list and the place of the sum of each gradient that has one."""
    found = dict[int, tuple[List, int]]()
    for first, sums in (into or {}).items():
        own, start, stop = sums if isinstance(sums, tuple) else (sums, 0, len(sums))
        found |= {numbers[first + k]: (own, start + k) for k in range(stop - start)}
    return found


def _taken(targets: Targets, numbers: Sequence[int], added: Iterable[int]) -> list[Tensor]:
    """Return sums, which their lists no longer have."""
    taken = list[Tensor]()
    for k in added:
        own, at = targets[numbers[k]]
        total, own[at] = own[at], None
        assert total is not None
        taken.append(total)
    return taken


def _sum(own: List, at: int) -> Tensor | None:
    return own[at]
