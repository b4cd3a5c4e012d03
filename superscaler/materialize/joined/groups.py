"""Groups of segments that one function can run: what is inside of them, and what remains of the gradients there.

A group is checked at every place where it runs: each microbatch, and both bodies of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from superscaler.ir.names import family
from superscaler.ir.program import (
    Accumulate,
    Backward,
    Combine,
    Free,
    Function,
    Instruction,
    Load,
    Slice,
    Value,
    Wait,
    reads,
    writes,
)  # fmt: skip
from superscaler.materialize.joined.code import Code, Key, Position

# An input or an output of a member: the number of the member, and its own number there.
End = tuple[int, int]
# A gradient: what of it comes from outside, and the inputs whose gradients are in it.
Held = tuple[Value | None, frozenset[End]]
# The positions of the members at one place.
Run = list[Position]
_LOCAL = Load | Slice | Combine | Accumulate


class Apart(Exception):
    """Works that must stay apart."""


@dataclass(frozen=True)
class Form:
    """How members make one function. `functions`: theirs. `inputs`: those that it reads from outside, equal values
    together; `outputs` that others read, or whose gradients others make; `saved`: the latter.
    """

    functions: tuple[int, ...]
    inputs: tuple[tuple[End, ...], ...]
    outputs: tuple[End, ...]
    saved: tuple[End, ...]


@dataclass(frozen=True)
class Group:
    """Members that run as one. `mirrored`: the numbers of those with a backward. `left`: by the first position of a
    backward, the gradients that come from outside; `dropped`: additions of gradients that happen inside.
    """

    form: Form
    mirrored: tuple[int, ...]
    forwards: list[Run]
    backwards: list[Run]
    left: Mapping[Position, Mapping[End, Value]]
    dropped: frozenset[Position]
    moves_waits: bool


def groups_of(
    code: Code, functions: Sequence[Function], is_weight: Callable[[str], bool], moves_waits: bool
) -> list[Group]:
    """Return the longest groups of at least two families, in order. `is_weight`: whether a tensor is made of weights
    alone. `moves_waits`: a wait for a scalar may be before all members instead of between them.
    """
    found, taken = list[Group](), set[Key]()
    for key in code.forwards:
        keys: tuple[Key, ...] = (key,)
        group: Group | None = None
        while key not in taken and (more := code.after(keys[-1])) is not None and more not in taken | {*keys}:
            try:
                group = _Check(code, functions, (*keys, more), moves_waits).group(is_weight)
            except Apart:
                break
            keys = (*keys, more)
        taken |= {*keys}
        if group is not None:
            found.append(group)
    return found


class _Check:
    """A check of families that run one after the other. Raises Apart if they must stay apart."""

    def __init__(self, code: Code, functions: Sequence[Function], keys: tuple[Key, ...], moves_waits: bool) -> None:
        self.code, self.moves_waits = code, moves_waits
        self.mirrored = tuple(n for n, key in enumerate(keys) if key in code.backwards)
        self.forwards = self._runs([code.forwards[key] for key in keys], keys)
        self.backwards = list[Run]()
        if self.mirrored:
            back = [keys[n] for n in reversed(self.mirrored)]
            kinds = {tuple(code.backwards[key]) for key in back}
            _require(len(kinds) == 1 and code.moved.isdisjoint(keys))
            for half in kinds.pop():
                self.backwards += self._runs([code.backwards[key][half] for key in back], back)
        self.numbers = tuple(code.forward(at).function for at in self.forwards[0])
        self.functions = [functions[n] for n in self.numbers]
        _require(all(bool(f.grads) == (n in self.mirrored) for n, f in enumerate(self.functions)))
        # The member and the output that an input is.
        self.inner = self._inner(self.forwards[0])
        # What happens inside: gradients of the members, and their additions, by position.
        self.left, self.dropped = dict[Position, dict[End, Value]](), set[Position]()
        self.inside = set[Value]()

    def _runs(self, own: Sequence[Sequence[Position]], keys: Sequence[Key]) -> list[Run]:
        """Return the positions of the members at each place."""
        found = [run for at in own[0] if (run := self.code.following(at, keys)) is not None]
        _require(all(len(found) == len(some) for some in own))
        return found

    def group(self, is_weight: Callable[[str], bool]) -> Group:
        """Return the group."""
        for run in self.backwards:
            self._follow(run)
        self._check_readers()
        form = self._form(self.forwards[0], is_weight)
        for run in self.forwards:
            _require(self._inner(run) == self.inner and self._form(run, is_weight) == form)
            _require(tuple(self.code.forward(at).function for at in run) == self.numbers)
        group = Group(
            form, self.mirrored, self.forwards, self.backwards, self.left, frozenset(self.dropped), self.moves_waits
        )
        for run in (*self.forwards, *self.backwards):
            arranged(self.code, run, group)
        return group

    def _inner(self, run: Run) -> dict[End, End]:
        """Return the member and the output that an input is, for each that a member before makes."""
        found, made = dict[End, End](), dict[Value, End]()
        for k, (at, own) in enumerate(zip(run, self.functions, strict=True)):
            i = self.code.forward(at)
            for n, name in enumerate(i.inputs):
                if name in made:
                    j, o = found[k, n] = made[name]
                    _require(own.inputs[n] == self.functions[j].outputs[o])
                    _require(n not in own.wide and n not in own.again)
            made |= {name: (k, o) for o, name in enumerate(i.outputs)}
        return found

    def _form(self, run: Run, is_weight: Callable[[str], bool]) -> Form:
        slots, outputs = dict[object, list[End]](), list[End]()
        saved = {end for own in self.left.values() for end in own}
        for k, (at, own) in enumerate(zip(run, self.functions, strict=True)):
            i = self.code.forward(at)
            for n, name in enumerate(i.inputs):
                if (k, n) not in self.inner:
                    # Equal values with gradients are one input where these are added to one sum.
                    total = self._total(k, n) if n in own.grads else None
                    is_one = n not in own.again and (total is not None or n not in own.grads)
                    slots.setdefault((name, own.inputs[n], total) if is_one else (k, n), []).append((k, n))
            outputs += [(k, o) for o, name in enumerate(i.outputs) if (k, o) in saved or self._is_read(name)]
        # Weights with a gradient come last, one after the other.
        ends = sorted(map(tuple, slots.values()), key=lambda own: self._is_trained(own[0], is_weight))
        return Form(self.numbers, tuple(ends), tuple(outputs), tuple(end for end in outputs if end in saved))

    def _is_trained(self, end: End, is_weight: Callable[[str], bool]) -> bool:
        function = self.functions[end[0]]
        return end[1] in function.grads and is_weight(function.inputs[end[1]])

    def _is_read(self, name: Value) -> bool:
        """Return whether others read a value that a member makes."""
        members = {at for own in self.forwards for at in own}
        return not self.code.readers.get(family(name), set[Position]()) <= members

    def _total(self, k: int, n: int) -> Value | None:
        """Return the sum to which the gradient of an input is added in each backward, None if there is none."""
        found = set[Value | None]()
        for run in self.backwards:
            i = self._of(run, k)
            number = self.functions[k].grads.index(n)
            if i.half != "input":
                found.add(family(total) if i.sums and (total := i.sums[number]) is not None else None)
        return found.pop() if len(found) == 1 else None

    def _of(self, run: Run, k: int) -> Backward:
        """Return the backward of a member at a place."""
        return self.code.backward(run[len(run) - 1 - self.mirrored.index(k)])

    def _follow(self, run: Run) -> None:
        """Follow the gradients inside of a backward: what each member gets, and which part of it comes from outside."""
        held = dict[Value, Held]()
        members = dict(zip(run, reversed(self.mirrored), strict=True))
        left = self.left.setdefault(run[0], {})
        sequence = self.code.sequences[run[0][0]]
        for n in range(run[0][1], run[-1][1] + 1):
            i, at = sequence[n], (run[0][0], n)
            if at in members:
                assert isinstance(i, Backward)
                self._take(members[at], i, held, left)
                self._make(members[at], i, held)
            elif isinstance(i, Accumulate | Combine) and any(name in held for name in reads(i)):
                parts = [held.pop(name, (name, frozenset[End]())) for name in reads(i)]
                given = [name for name, _ in parts if name is not None]
                _require(_is_sum(i) and len(given) < 2)
                held[i.out] = next(iter(given), None), frozenset[End]().union(*(ends for _, ends in parts))
                self.dropped.add(at)
                self.inside.add(family(i.out))

    def _take(self, k: int, i: Backward, held: Mapping[Value, Held], left: dict[End, Value]) -> None:
        """Note what comes from outside of the gradients that a member gets."""
        for o, name in zip(self.functions[k].saved, i.gradients, strict=True) if i.half != "weight" else ():
            wanted = {end for end, made in self.inner.items() if made == (k, o)}
            outside, ends = (name, frozenset[End]()) if name is None else held.get(name, (name, frozenset[End]()))
            _require(ends == wanted)
            if outside is not None:
                left[k, o] = outside

    def _make(self, k: int, i: Backward, held: dict[Value, Held]) -> None:
        """Note the gradients that a member makes for others inside."""
        for number, n in enumerate(self.functions[k].grads):
            name = i.outputs[number]
            if (k, n) in self.inner:
                _require((name is None) == (i.half == "weight") and not (i.sums and i.sums[number]))
                if name is not None:
                    held[name] = None, frozenset({(k, n)})
                    self.inside.add(family(name))

    def _check_readers(self) -> None:
        """Raise Apart if anything after a backward, or between its members, reads a gradient that is inside."""
        known = self.dropped.union(*self.backwards)
        firsts = [run[0] for run in self.backwards]
        for name in self.inside:
            for at in self.code.readers.get(name, set()) - known:
                same = [first for first in firsts if first[0] == at[0]]
                _require(bool(same) and at < min(same))


def _is_sum(i: Accumulate | Combine) -> bool:
    """Return whether an instruction adds whole tensors."""
    whole = () if isinstance(i, Accumulate) else {tuple((0, extent) for extent in i.view)}
    return not i.largest and (isinstance(i, Accumulate) or {*i.boxes} == whole)


def arranged(code: Code, run: Run, group: Group) -> tuple[list[Instruction], list[Instruction]]:
    """Return the instructions between members, as those before and those after the joined one. Raises Apart if a
    member needs some after another member, or if they do not stay on the device. A scalar that is on its way is waited
    for before: it has arrived, as labels that are counted, or it takes less time than what a compiler saves.
    """
    members, before, after = {*run}, list[Instruction](), list[Instruction]()
    used = {name for at in run for name in (*reads(code[at]), *writes(code[at]))}
    given = {*group.left.get(run[0], {}).values()}
    used |= given
    made, late = set[Value](), set[Value]()
    for n in range(run[0][1], run[-1][1] + 1):
        i, at = code.sequences[run[0][0]][n], (run[0][0], n)
        if at in members:
            _require(late.isdisjoint(reads(i)))
            made |= {*writes(i)}
        elif isinstance(i, Free):
            kept = tuple(name for name in i.names if name in used)
            rest = tuple(name for name in i.names if name not in used)
            after += [Free(kept)] if kept else []
            before += [Free(rest)] if rest else []
        elif at not in group.dropped:
            _require(isinstance(i, _LOCAL) or (isinstance(i, Wait) and group.moves_waits and not i.shape))
            if made.isdisjoint(reads(i)):
                _require(i.grows not in used)
                before.append(i)
            else:
                after.append(i)
                late |= {*writes(i)}
                made |= late
                used |= {*reads(i)}
    # What comes from outside is not made of what a member makes.
    _require(made.isdisjoint(given))
    return before, after


def _require(holds: bool) -> None:
    if not holds:
        raise Apart
