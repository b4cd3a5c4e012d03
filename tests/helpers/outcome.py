"""What becomes of a mutant: which check refuses it, or whether two steps of it give other numbers than the plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from superscaler.artifact import describe, initial_values
from superscaler.certify.certificate import check_program
from superscaler.comm.threads import ThreadCommunicator, run_ranks
from superscaler.compiler import Compiled
from superscaler.errors import ScheduleError
from superscaler.ir.communication import check_rendezvous
from superscaler.ir.program import Program
from superscaler.runtime.load import modules
from superscaler.runtime.step import build_step
from tests.helpers.mutants import Mutant, mutants
from tests.helpers.small_plans import exact

# Of what is compared, relative to its largest element, or to a thousandth of the largest of all.
TOLERANCE, FLOOR = 1e-9, 1e-3
# So small that gradients are always clipped: wrong global norms show.
CLIP = 0.01
# A step that hangs must not take long.
TIMEOUT = 5.0
FAILS = "fails"
# Which parts of a plan are changed, by the name of the plan in the table.
SCOPES = {"folded": ("all places", "place 1", "one device")}


@dataclass
class Row:
    """What became of the mutants of one class: refused by which check, or run, and then equal or not.

    `raised` has what a check raised that is no ScheduleError; of those that nothing refused `failed` has what does not
    run to its end, and `missed` what does and gives other numbers.
    """

    mutants: int = 0
    caught: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    ran: int = 0
    equal: int = 0
    raised: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


def added(rows: Iterable[Row]) -> Row:
    """Return the sum of rows."""
    total = Row()
    for row in rows:
        for f in fields(Row):
            setattr(total, f.name, getattr(total, f.name) + getattr(row, f.name))
    return total


def sweep(name: str, scope: str = "one device", most: int | None = None, numbers: int = 30) -> dict[str, Row]:
    """Return what became of (at most `most` of each class of) the mutants of a plan, at most `numbers` of them run."""
    rows: dict[str, Row] = {}
    left: dict[str, list[Mutant]] = {}
    for mutant in drawn(mutants(exact(name), scope), most, f"{name} {scope}"):
        row = rows.setdefault(mutant.kind, Row())
        row.mutants += 1
        caught, text = judge(mutant.program)
        if caught:
            row.caught[caught] += 1
        else:
            row.survived += 1
            left.setdefault(mutant.kind, []).append(mutant)
        if text:
            row.raised.append(f"{mutant.what}: {text}")
    for kind, some in left.items():
        for mutant in drawn(some, numbers, f"{name} {scope} numbers"):
            difference = differs(name, mutant.program)
            rows[kind].ran += 1
            if difference:
                where = rows[kind].failed if difference.startswith(FAILS) else rows[kind].missed
                where.append(f"{mutant.what}: {difference}")
            else:
                rows[kind].equal += 1
    return rows


def drawn(found: Iterable[Mutant], most: int | None, seed: str) -> Iterator[Mutant]:
    """Yield at most so many mutants of each class, drawn at random from a seed, in their order."""
    if most is None:
        yield from found
        return
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in found:
        by_kind.setdefault(mutant.kind, []).append(mutant)
    for kind, some in by_kind.items():
        kept = sorted(random.Random(f"{seed} {kind}").sample(range(len(some)), min(most, len(some))))
        yield from (some[k] for k in kept)


def judge(program: Program) -> tuple[str, str]:
    """Return which check refuses a program, if any does, and what it raised where that is no ScheduleError."""
    for name, check in (("certificate", check_program), ("deadlock", rendezvous)):
        try:
            check(program)
        except ScheduleError:
            return name, ""
        except Exception as error:
            return name, f"the {name} raises {type(error).__name__}: {error}"
    return "", ""


def rendezvous(program: Program) -> None:
    check_rendezvous(program)
    check_rendezvous(replace(program, devices=tuple(program.devices)))


# Numbers.

# What one rank has after a step: the loss, the norm of the gradients, gradients and weights by name.
State = Mapping[str, Tensor]


def differs(name: str, program: Program) -> str:
    """Return what two steps of a mutant of a plan give that is not as the plan has it, or an empty string."""
    try:
        found = _run(exact(name), program)
    except Exception as error:
        return f"{FAILS} with {type(error).__name__}: {str(error).splitlines()[0]}"
    floor = FLOOR * max(float(t.abs().max()) for s in _intact(name) for t in s.values() if t.numel())
    for rank, (mine, its) in enumerate(zip(found, _intact(name), strict=True)):
        for key in sorted({*mine, *its}):
            if key not in mine or key not in its or mine[key].shape != its[key].shape:
                return f"{key} of rank {rank} is there for one only, or has another shape"
            scale = max(float(its[key].abs().max()), floor) if its[key].numel() else 1.0
            error = float((mine[key] - its[key]).abs().max()) / scale if its[key].numel() else 0.0
            if not error <= TOLERANCE:
                return f"{key} of rank {rank} is off by {error:.2g}"
    return ""


@cache
def _intact(name: str) -> Sequence[State]:
    return _run(exact(name), exact(name).program)


def _run(compiled: Compiled, program: Program) -> Sequence[State]:
    """Return what each rank has after each of two steps."""
    whole = replace(program, devices=tuple(program.devices))
    changed = replace(compiled, program=whole)
    captured = compiled.graph.captured
    values = {k: _double(v) for k, v in initial_values(compiled.graph.model, captured.values).items()}
    batch = {k: _double(v) for k, v in captured.batch.items()}
    plan, code = describe(changed), modules(changed.emitted.files)

    def run(communicator: ThreadCommunicator) -> State:
        step = build_step(plan, code, values, communicator)
        step.state.updates.keep_gradients = True
        state: dict[str, Tensor] = {}
        for number in range(2):
            now: dict[str, Any] = {"loss": step(batch, CLIP), "norm": torch.tensor(step.last_norm or 0.0)}
            now |= {f"gradient {n}": g for n, g in step.state.updates.gradients.items()}
            now |= {f"weight {n}": w for n, w in step.state.weights.items()}
            state |= {f"{n} after step {number}": _double(x.detach().clone()) for n, x in now.items()}
        return state

    return run_ranks(program.world, run, TIMEOUT)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
