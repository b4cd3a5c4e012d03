"""Values written as one list: weights of a module, and gradients or handles with one fate.

transformer = rt.weights_of("transformer") d_transformer = rt.sums(24)
"""

from bisect import bisect
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, takewhile
from keyword import iskeyword
from typing import Any, NamedTuple

from superscaler.groups import collect, group_by
from superscaler.ir import program as p
from superscaler.ir.loops import NONE
from superscaler.ir.names import RESERVED, family, unlike_gradient
from superscaler.ir.program import FIELDS, VALUES, Facts, Role, Shape, Value, Weight

Modules = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Waits(Facts):
    """Waits one after the other, which end their handles."""

    outs: tuple[Value, ...]
    works: tuple[Value, ...]
    shapes: tuple[Shape, ...]


Instruction = p.Instruction | Waits
# An instruction on each of the sampled devices of a program.
Row = tuple[Instruction, ...]
# The fields of each role. After an update, the names of weights still hold them.
_FIELDS: dict[tuple[type, Role | None], tuple[str, ...]] = {
    **FIELDS,
    **{(Waits, role): () for role in VALUES},
    (Waits, Role.READ): ("works",),
    (Waits, Role.WRITE): ("outs",),
    (Waits, Role.END): ("works",),
    (p.Update, Role.WRITE): (),
}


class Run(NamedTuple):
    """Values one after the other in the list `of`."""

    of: Value
    start: int
    size: int


Item = Value | Run | None


# Looked up many times for each instruction.
@lru_cache(1 << 16)
def fields(i: Instruction, role: Role) -> list[tuple[str, tuple[Value | None, ...]]]:
    """Return the fields of an instruction with a role, each with its values."""
    found = []
    for name in _FIELDS[type(i), role]:
        value = getattr(i, name)
        found.append((name, (value,) if type(value) is Value else value))
    return found


def names(i: Instruction, role: Role) -> tuple[Value, ...]:
    """Return the values in the fields of an instruction with a role."""
    known = _FIELDS[type(i), role]
    if len(known) != 1:
        return tuple([v for _, some in fields(i, role) for v in some if v is not None]) if known else ()
    value = getattr(i, known[0])
    if type(value) is Value:
        return (value,)
    return tuple([v for v in value if v is not None]) if None in value else value


_NAMES = {kind: [name for role in VALUES for name in _FIELDS[kind, role]] for kind in {kind for kind, _ in _FIELDS}}


def values_of(i: Instruction) -> list[Value]:
    """Return the values in all fields of an instruction, by role."""
    found = list[Value]()
    for name in _NAMES[type(i)]:
        value = getattr(i, name)
        found += [value] if type(value) is Value else [v for v in value if v is not None]
    return found


# The instruction that makes each value, by number, and the place there.
Makers = dict[Value, tuple[int, int]]


def tidied(rows: Iterable[tuple[Any, ...]], at_rest: Container[Value], makers: Makers) -> list[Row]:
    """Return rows without loads and ends of weights at rest. Successive waits for one collective are one row. Values
    that end together, or that one row waits for, are in the order of their making. `makers`: of values that were made
    before; those of the rows are added.
    """
    found, made = list[Row](), dict[Value, int]()
    for row in rows:
        i = row[0]
        if isinstance(i, p.Load) and i.out in at_rest:
            continue
        # What ends with the step needs no line.
        if isinstance(i, p.Loss) and found and isinstance(found[-1][0], p.Free):
            found.pop()
        if isinstance(i, p.Free):
            kept = [k for k, v in enumerate(i.names) if v not in at_rest]
            kept.sort(key=lambda k: made.get(i.names[k], -1))
            found += [tuple(p.Free(tuple(j.names[k] for k in kept)) for j in row)] * bool(kept)
        elif isinstance(i, p.Wait):
            one, k = tuple(Waits((j.out,), (j.work,), (j.shape,)) for j in row), len(found) - 1
            while k >= 0 and isinstance(w := found[k][0], Waits) and not _is_made_with(w.works[0], i.work, makers):
                k -= 1
            if k < 0 or not isinstance(w := found[k][0], Waits):
                found.append(one)
            else:
                at = bisect([makers[work] for work in w.works], makers[i.work])
                found[k] = tuple(_joined(a, at, b) for a, b in zip(found[k], one, strict=True))
        else:
            found.append(row)
        made |= {v: len(made) + k for k, v in enumerate(names(i, Role.WRITE))}
        number = len(makers)
        makers |= {v: (number, k) for k, v in enumerate(names(i, Role.WRITE))}
    return found


def _is_made_with(one: Value, other: Value, makers: Makers) -> bool:
    """Return whether one instruction makes two values."""
    return one in makers and other in makers and makers[one][0] == makers[other][0]


def _joined(some: Instruction, at: int, others: Waits) -> Waits:
    """Return some waits with others at a place among them."""
    assert isinstance(some, Waits)
    return Waits(
        (*some.outs[:at], *others.outs, *some.outs[at:]),
        (*some.works[:at], *others.works, *some.works[at:]),
        (*some.shapes[:at], *others.shapes, *some.shapes[at:]),
    )


class Lists:
    """The lists of a program: for each value without its microbatch, its list and its place there.

    Weights share a list if their paths start with the same word. Gradients of weights, handles, and received values
    share a list if they are read by the same instructions, in the same order, and end together. A sum of gradients
    always has a list.
    """

    def __init__(self, rows: Sequence[Instruction], weights: Mapping[Value, str]) -> None:
        self.places: dict[Value, tuple[Value, int]] = {}
        self._owners: dict[Value, Value] = {}
        self.size = Counter[Value]()
        values = {v for i in rows for v in values_of(i)}
        self._whole = {str(v) for v in values}
        # A list or a family is named without the microbatch that is written behind its name.
        self.taken = self._whole | {_bare(v) for v in values}
        for own in group_by(weights, lambda value: weights[value].split(".")[0]).values():
            self._add(own)
        of_weights = {v.name for v in weights}
        for own in _groups(rows, of_weights):
            if len(own) > 2 or own[0].name in of_weights:
                self._add(own)
        for value in (family(v) for i in rows for v in names(i, Role.SUM)):
            if value not in self.places:
                self.places[value], self.size[value] = (value, 0), 1
        # The lists that no instruction makes as a whole; these are made before.
        self.written = [[run.of for run in self.parts(i)] for i in rows]
        self.filled = {of for some in self.written for of in some}

    def _add(self, own: Sequence[Value]) -> None:
        if len(own) > 1:
            left = self.taken - ({*map(_bare, own)} - self._whole)
            name = _name(own, left)._replace(microbatch=family(own[0]).microbatch)
            self.taken.add(_bare(name))
            self.places |= {family(v): (name, place) for place, v in enumerate(own)}
            self.size[name] = len(own)

    def place(self, value: Value) -> int:
        """Return the place of a value in its list; 0 for a value without one."""
        return self.places.get(family(value), (value, 0))[1]

    def owner(self, value: Value) -> Value:
        """Return the list that a value is in, else the value."""
        if value not in self._owners:
            found = self.places.get(family(value))
            self._owners[value] = value if found is None else found[0]._replace(microbatch=value.microbatch)
        return self._owners[value]

    def in_order(self, i: Instruction) -> Instruction:
        """Return an update with the gradients of one list one after the other; any other instruction as it is."""
        if not isinstance(i, p.Update) or not i.weights:
            return i
        lists = {v: n for n, v in reversed([*enumerate(map(self.owner, i.gradients))])}
        pairs = sorted(
            zip(i.gradients, i.weights, strict=True),
            key=lambda pair: (lists[self.owner(pair[0])], self.place(pair[0])),
        )
        gradients, weights = zip(*pairs, strict=True)
        return replace(i, weights=weights, gradients=gradients)

    def parts(self, i: Instruction) -> list[Run]:
        """Return the existing lists that an instruction writes to."""
        runs = [run for _, some in fields(i, Role.WRITE) for run in self.items(some) if isinstance(run, Run)]
        # A list of one is written in its place: in another microbatch it is a sum.
        runs = [run for n, run in enumerate(runs) if n or run.size < max(2, self.size[family(run.of)])]
        return runs + [run for _, some in fields(i, Role.SUM) for run in self.items(some) if isinstance(run, Run)]

    def items(self, values: Iterable[Value | None]) -> list[Item]:
        """Return values in order, those one after the other in a list as one item."""
        found: list[Item] = []
        for value in values:
            if value is None or family(value) not in self.places:
                found.append(value)
                continue
            of, place = self.owner(value), self.places[family(value)][1]
            last = found[-1] if found else None
            if isinstance(last, Run) and last.of == of and last.start + last.size == place:
                found[-1] = last._replace(size=last.size + 1)
            else:
                found.append(Run(of, place, 1))
        return found


def _groups(rows: Sequence[Instruction], weights: Collection[str]) -> list[list[Value]]:
    """Return the gradients of weights, handles and waited values, without their microbatch, that share lists."""
    reads: dict[Value, list[tuple[int, str]]] = {}
    order: dict[tuple[int, str], list[Value]] = {}
    # The instruction that makes a value, but for backwards; and the order in which such values are made.
    ends, makers, made, waited = dict[Value, int](), dict[Value, int](), dict[Value, int](), set[Value]()
    for n, i in enumerate(rows):
        makers |= {v: n for v in names(i, Role.WRITE) if not isinstance(i, p.Backward)}
        made |= {v: len(made) + k for k, v in enumerate(names(i, Role.WRITE)) if v in makers}
        waited |= set(i.outs) if isinstance(i, Waits) else set()
        ends |= dict.fromkeys(names(i, Role.END), n)
        for name, values in fields(i, Role.READ):
            order[n, name] = [v for v in values if v is not None]
            for value in order[n, name]:
                reads.setdefault(value, []).append((n, name))

    def may_share(v: Value) -> bool:
        return v.is_handle or v in waited or (v.is_gradient and v.name in weights and v not in makers)

    def fate(v: Value) -> Any:
        """Return a key that is equal for the values of a list; None for a value without one."""
        if not may_share(v):
            return None
        return tuple(reads[v]), ends.get(v), v.microbatch, makers.get(v)

    found: dict[Value, dict[tuple[Value, ...], None]] = {}
    for at, some in order.items():
        # An update may read its gradients in any order.
        is_update = isinstance(rows[at[0]], p.Update)
        for key, run in groupby(sorted(some, key=lambda v: str(fate(v))) if is_update else some, fate):
            group = sorted(run, key=lambda v: made.get(v, 0))
            if key is None or reads[group[0]][0] != at:
                continue
            is_one = all(isinstance(rows[place[0]], p.Update) or _is_run(group, order[place]) for place in key[0])
            for own in [group] if is_one else [[v] for v in group]:
                families = tuple(map(family, own))
                for v in families:
                    found.setdefault(v, {families: None})[families] = None
    # A value that shares no list keeps those of other microbatches out of theirs: they have one name.
    for v in {**reads, **ends, **makers}:
        if not may_share(v):
            found.setdefault(family(v), {})[family(v),] = None
    # In all microbatches the same values share a list.
    every = {id(own): own for some in found.values() for own in some if len(some) == 1}
    return [list(own) for own in every.values() if all(len(found[v]) == 1 for v in own)]


def _bare(value: Value) -> str:
    return str(value._replace(microbatch=NONE))


def _is_run(own: Sequence[Value], some: list[Value]) -> bool:
    at = some.index(own[0])
    return some[at : at + len(own)] == own


def _name(own: Sequence[Value], taken: set[str]) -> Value:
    """Return a name for a list: the common words of the names of its values."""
    columns = zip(*(v.name.split("_") for v in own), strict=False)
    shared = "_".join(first for first, *_ in takewhile(lambda words: len({*words}) == 1, columns)).strip("_")
    return free_name(own[0]._replace(name=shared if shared.isidentifier() else "weights", microbatch=NONE), taken)


def _is_name(value: Value) -> bool:
    """Return whether the name of a value reads back, and is neither Python's, nor another of emitted code."""
    text = str(value)
    is_free = text not in RESERVED and not iskeyword(text) and value.name[-2:] not in ("_m", "_l")
    return is_free and Value.parse(text) == value


def free_name(value: Value, taken: set[str]) -> Value:
    """Return a value with a name that no other value has."""
    value = value._replace(name=unlike_gradient(value.name))
    while str(value) in taken or not _is_name(value):
        value = value._replace(name=value.name + "_")
    taken.add(str(value))
    return value


def modules_of(tensors: Sequence[str]) -> Modules:
    """Return the tensors of each name, and those in each module, in order."""
    words = ((tensor, tensor.split(".")) for tensor in tensors)
    return collect((".".join(own[:n]), tensor) for tensor, own in words for n in range(1, len(own) + 1))


def named_weights(weights: Sequence[Weight], rows: Sequence[p.Instruction], modules: Modules) -> dict[Value, str]:
    """Return the tensors of loaded weights that share their name in the model with no other weight of a device."""
    loaded = {i.out for i in rows if isinstance(i, p.Load)}
    return {w.name: w.tensor for w in weights if w.name in loaded and modules[w.tensor] == [w.tensor]}


def paths_of(own: Sequence[str], modules: Modules) -> list[str]:
    """Return the fewest paths of modules and tensors that stand for some tensors, in order.

    >>> paths_of(["h.0.a", "h.0.b", "h.1.a"], modules_of(["w", "h.0.a", "h.0.b", "h.1.a", "h.1.b"]))
    ['h.0', 'h.1.a']
    """
    found, left = list[str](), list(own)
    while left:
        words = left[0].split(".")
        paths = (".".join(words[:n]) for n in range(1, len(words) + 1))
        found.append(next(path for path in paths if modules[path] == left[: len(modules[path])]))
        del left[: len(modules[found[-1]])]
    return found
