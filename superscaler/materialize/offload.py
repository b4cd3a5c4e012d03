"""Tapes on the host: of the code of a device, the tapes whose backward is far are copied to the host and back.

While a device works, it keeps the tape of that work, and of the others those that it needs first. So a tape is copied
back while the device does the work before its backward.
"""

from collections.abc import Container, Mapping, Sequence
from itertools import groupby, pairwise

from superscaler.groups import collect
from superscaler.ir.program import Fetch, Forward, Function, Instruction, Offload, Value, calls, ended


def with_offload(
    code: Sequence[Instruction], functions: Sequence[Function], weights: Container[Value], most: int
) -> list[Instruction]:
    """Return the code of a device with transfers to and from its host, so that it holds `most` tapes, or as many as one
    work needs.
    """
    taped = {i.task: i for _, i in calls(code) if _is_kept(functions[i.function])}
    # The second half of a split backward reads no tape.
    is_work = (i.runs_segment and i.half != "weight" for i in code)
    works = [
        (at, i.task, i.is_mirror) for (at, i), k in zip(enumerate(code), is_work, strict=True) if k and i.task in taped
    ]
    runs = [list(run) for _, run in groupby(works, lambda work: (work[2], work[1].microbatch))]
    forwards = [[taped[task] for _, task, is_mirror in run if not is_mirror] for run in runs]
    tape_of = {i.task: number for number, own in enumerate(forwards) for i in own}
    kept = _kept([{tape_of[task] for _, task, _ in run} for run in runs], most)
    ends = {name: at for at, i in enumerate(code) for name in ended(i)}
    last = {task: number for number, run in enumerate(runs) for _, task, _ in run}
    found: dict[int, list[Instruction]] = {}
    for number, (before, now) in enumerate(pairwise(kept), 1):
        at = runs[number - 1][-1][0] + 1
        at += code[at].frees
        for tape in before - now:
            back = next((n for n in range(number, len(kept)) if tape in kept[n]), None)
            if back is not None:
                # A part of a tape may have ended.
                own = (i for i in forwards[tape] if last[i.task] >= number)
                until = runs[back][0][0]
                found.setdefault(at, []).extend(Offload(i.task, _alive(i, weights, ends, until)) for i in own)
        for tape in now - before - {number}:
            found.setdefault(runs[number][0][0], []).extend(
                Fetch(i.task) for i in reversed(forwards[tape]) if last[i.task] >= number
            )
    return [i for at, one in enumerate(code) for i in (*found.get(at, ()), one)]


def _is_kept(function: Function) -> bool:
    """Return whether a forward keeps a tape on the device: copies between a device and its host do not."""
    return bool(function.grads) and not all(op.is_copy for op in function.ops)


def _kept(runs: Sequence[set[int]], most: int) -> list[set[int]]:
    """Return the tapes on the device while it does each work, given the tapes of all works."""
    uses = collect((tape, number) for number, own in enumerate(runs) for tape in own)
    found = []
    for number, own in enumerate(runs):
        # The first use after this work of each tape that exists.
        later = {n: [use for use in some if use > number] for n, some in uses.items() if n < number}
        others = sorted((some[0], n) for n, some in later.items() if some and n not in own)
        found.append(own | {n for _, n in others[: max(0, most - len(own))]})
    return found


def _alive(i: Forward, weights: Container[Value], ends: Mapping[Value, int], until: int) -> tuple[Value, ...]:
    """Return the values of a forward that exist until an instruction, without weights at rest."""
    own = dict.fromkeys((*i.inputs, *i.outputs))
    return tuple(name for name in own if name not in weights and ends.get(name, until) >= until)
