"""Joined programs: segments that run one after the other on a device become one, as a compiler wants them.

A compiler fuses operators of one function only. What is between two segments of a plan for the sake of its text, or of
other devices, is no bound here: only communication, a wait, a copy to the host, or another work is. What a plan keeps
for a backward stays: a recomputed segment and its original are never in one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

from superscaler.errors import ScheduleError
from superscaler.ir.communication import check_rendezvous
from superscaler.ir.loops import Loop, Rolled, runs_of, weighted
from superscaler.ir.program import Backward, Device, Forward, Free, Instruction, Program, Value, ended, writes
from superscaler.materialize.joined.code import Code, Position
from superscaler.materialize.joined.functions import columns_of, function_of
from superscaler.materialize.joined.groups import Form, Group, Run, arranged, groups_of


def joined(program: Program) -> Program:
    """Return a program whose segments are as long as its instructions between them allow; the same one if they are.

    F a; F b; ..; B b; B a -> F ab; ..; B ab. A scalar is waited for before the members of a segment, unless another
    device would then wait for them.
    """
    with suppress(ScheduleError):
        made = _joined(program, moves_waits=True)
        check_rendezvous(made)
        return made
    return _joined(program, moves_waits=False)


def _joined(program: Program, moves_waits: bool) -> Program:
    joiner = _Joiner(program, moves_waits)
    made = program.changed(joiner.device)
    return joiner.finished(made) if joiner.forms else program


def most_works(program: Program) -> int:
    """Return the largest number of forwards and backwards that a device runs in a step."""
    codes = (weighted(device.instructions) for device, _ in program.distinct)
    return max(sum(n for i, n in code if i.runs_segment) for code in codes)


@dataclass
class _Joiner:
    """A joiner of the segments of devices. Until all are known, joined functions are numbered behind the others, and a
    part starts at the starts of all its members.
    """

    program: Program
    moves_waits: bool
    forms: dict[Form, int] = field(default_factory=dict)
    # By form, the starts of its parts.
    starts: dict[Form, list[tuple[int, ...]]] = field(default_factory=dict)

    def device(self, device: Device) -> Device:
        """Return a device with joined works."""
        code, made = Code(device.instructions), dict[Position, tuple[Run, Group]]()
        for group in groups_of(code, self.program.functions, self._is_weight, self.moves_waits):
            self.forms.setdefault(group.form, len(self.program.functions) + len(self.forms))
            made |= {run[0]: (run, group) for run in (*group.forwards, *group.backwards)}
        if not made:
            return device
        sequences = iter([self._sequence(code, number, made) for number in range(len(code.sequences))])
        runs = tuple(
            replace(run, first=next(sequences), second=next(sequences)) if isinstance(run, Loop) else next(sequences)
            for run in runs_of(device.instructions)
        )
        is_rolled = isinstance(device.instructions, Rolled)
        return replace(device, instructions=Rolled(runs) if is_rolled else tuple(runs[0]))

    def _is_weight(self, tensor: str) -> bool:
        producers = self.program.model.producers
        return tensor not in producers or producers[tensor][0].from_weights

    def _sequence(self, code: Code, number: int, made: dict[Position, tuple[Run, Group]]) -> tuple[Instruction, ...]:
        """Return a sequence with joined works, and without the ends of names that are not made any more."""
        before, found, n = code.sequences[number], list[Instruction](), 0
        while n < len(before):
            if (number, n) in made:
                run, group = made[number, n]
                first, last = arranged(code, run, group)
                found += [*first, self._one(code, run, group), *last]
                n = run[-1][1]
            else:
                found.append(before[n])
            n += 1
        gone = {name for i in before for name in writes(i)}.difference(*map(writes, found))
        return tuple(_without(found, gone))

    def _one(self, code: Code, run: Run, group: Group) -> Instruction:
        if code[run[0]].function >= 0:
            return self._forward([code.forward(at) for at in run], group.form)
        first = code.forward(group.forwards[0][0]).task
        made = self._backward(
            {k: code.backward(at) for k, at in zip(reversed(group.mirrored), run, strict=True)}, group
        )
        left = group.left[run[0]]
        taken = () if made.half == "weight" else tuple(map(left.get, group.form.saved))
        return replace(made, task=first._replace(microbatch=made.task.microbatch), gradients=taken)

    def _forward(self, own: Sequence[Forward], form: Form) -> Forward:
        at = tuple(x for i in own for x in i.at)
        self.starts.setdefault(form, []).append(at)
        inputs = tuple(own[k].inputs[n] for (k, n), *_ in form.inputs)
        return Forward(own[0].task, self.forms[form], at, inputs, tuple(own[k].outputs[o] for k, o in form.outputs))

    def _backward(self, own: dict[int, Backward], group: Group) -> Backward:
        """Return a backward without its task and what it is given. `own`: those of the members."""
        functions = [self.program.functions[n] for n in group.form.functions]
        ends = [first for first, *_ in group.form.inputs]
        wanted = [(own[k], functions[k].grads.index(n)) for k, n in ends if n in functions[k].grads]
        outputs = tuple(i.outputs[number] for i, number in wanted)
        sums = tuple(i.sums[number] if i.sums else None for i, number in wanted)
        regathered = [(own[k], functions[k].again.index(n)) for k, n in ends if n in functions[k].again]
        again = tuple(i.again[number] for i, number in regathered if i.again)
        one = next(iter(own.values()))
        return Backward(one.task, (), outputs, one.half, again, sums if any(sums) else ())

    def finished(self, program: Program) -> Program:
        """Return a program of joined devices with the functions that it runs."""
        columns = {form: columns_of(starts) for form, starts in self.starts.items()}
        functions = [*program.functions, *(function_of(program.functions, f, columns[f]) for f in self.forms)]
        kept = {number: columns[form].kept for form, number in self.forms.items()}
        used = set[int]()

        def use(i: Instruction) -> Instruction:
            if i.function < 0:
                return i
            used.add(i.function)
            run = cast("Forward", i)
            return replace(run, at=tuple(run.at[n] for n in kept[i.function])) if i.function in kept else i

        program = program.changed(lambda device: _changed(device, use))
        number = {old: new for new, old in enumerate(sorted(used))}

        def renumber(i: Instruction) -> Instruction:
            return replace(cast("Forward", i), function=number[i.function]) if i.function >= 0 else i

        program = program.changed(lambda device: _changed(device, renumber))
        return replace(program, functions=tuple(functions[n] for n in number))


def _changed(device: Device, change: Callable[[Instruction], Instruction]) -> Device:
    code = device.instructions
    return replace(device, instructions=code.changed(change) if isinstance(code, Rolled) else tuple(map(change, code)))


def _without(code: Sequence[Instruction], gone: set[Value]) -> Iterator[Instruction]:
    """Yield instructions; names that are gone do not end."""
    for i in code:
        if not i.frees:
            yield i
        elif names := tuple(name for name in ended(i) if name not in gone):
            yield Free(names)
