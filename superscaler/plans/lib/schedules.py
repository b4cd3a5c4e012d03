"""Schedules of pipelines as tables: per device the work of its stages, in order (`0F0 0F1 0B0 0B1`).

A table is made by a rule below, or parsed from text; `tables.check` refuses one that cannot run. Stage s runs on device
s % devices in round-robin schedules; in a V, the second half of the stages runs on the devices in reverse. F is a
forward, B a backward; I and W are its halves, for the gradients of activations and of weights. The idle time and the
activations that each rule keeps are in docs/pipelines.md.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

from superscaler.plans.lib.order_text import is_order, table_of_order
from superscaler.plans.lib.tables import Table, fill, finish
from superscaler.specs.arguments import checked
from superscaler.specs.file_errors import reading
from superscaler.verbs import Action, InputError, parse_schedule, unknown

# Forwards of a table: 1,024 devices with as many microbatches.
MOST_WORKS = 2**20


def gpipe(devices: int, microbatches: int) -> Table:
    """All forwards, then all backwards (Huang et al., 2019)."""
    return breadth_first(devices, microbatches, 1)


def terapipe(devices: int, microbatches: int, slices: int = 2) -> Table:
    """GPipe of slices of the sequence, each a shorter microbatch: the bubble is shorter too (Li et al., 2021).

    The backward of a slice needs those of all later slices, so backwards run in reverse.
    """
    _check_counts(devices=devices, microbatches=microbatches, slices=slices)
    order = _slices_back(microbatches, slices)
    return [
        [Action(d, kind, k) for kind in "FB" for k in (sorted(order) if kind == "F" else order)] for d in range(devices)
    ]


def seq1f1b(devices: int, microbatches: int, slices: int = 2) -> Table:
    """1F1B of slices of the sequence, which flow forward in order and back in reverse (Sun et al., 2024)."""
    _check_counts(devices=devices, microbatches=microbatches, slices=slices)
    forward, backward = (
        [(0, k) for k in own] for own in (range(microbatches * slices), _slices_back(microbatches, slices))
    )
    return [_alternate(d, devices, devices - d - 2 + slices, forward, backward) for d in range(devices)]


def _slices_back(microbatches: int, slices: int) -> list[int]:
    return [k * slices + s for k in range(microbatches) for s in reversed(range(slices))]


def breadth_first(devices: int, microbatches: int, chunks: int = 2) -> Table:
    """All microbatches through one chunk of stages, then through the next (Lamy-Poirier, 2023)."""
    _check_counts(devices=devices, microbatches=microbatches, chunks=chunks)
    stages = [range(d, devices * chunks, devices) for d in range(devices)]
    forward = ([Action(s, "F", k) for s in own for k in range(microbatches)] for own in stages)
    backward = ([Action(s, "B", k) for s in own[::-1] for k in range(microbatches)] for own in stages)
    return [[*f, *b] for f, b in zip(forward, backward, strict=True)]


@checked
def schedule_1f1b(devices: int, microbatches: int) -> Table:
    """One forward, one backward in turn, after a warm-up that fills the pipeline (Narayanan et al., 2019).

    Returns a row of actions for each device, for `order`. Device i keeps `devices` - i microbatches. Raises InputError
    for a count below 1.

    >>> " ".join(map(str, schedule_1f1b(2, 3)[0]))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    _check_counts(devices=devices, microbatches=microbatches)
    numbers = [(0, k) for k in range(microbatches)]
    return [_alternate(d, devices, devices - d - 1, numbers, numbers) for d in range(devices)]


def interleaved(devices: int, microbatches: int, chunks: int = 2) -> Table:
    """1F1B with several chunks on a device; groups of `devices` microbatches pass a chunk in turn (Megatron-LM)."""
    _check_counts(devices=devices, microbatches=microbatches, chunks=chunks)
    check_rounds(devices, microbatches)
    starts = range(0, microbatches, devices)
    forward = [(c, first + k) for first in starts for c in range(chunks) for k in range(devices)]
    backward = [(chunks - 1 - c, k) for c, k in forward]
    warm = (2 * (devices - d - 1) + (chunks - 1) * devices for d in range(devices))
    return [_alternate(d, devices, ahead, forward, backward) for d, ahead in enumerate(warm)]


def check_rounds(devices: int, microbatches: int) -> None:
    """Raise InputError unless the microbatches of an interleaved schedule come in rounds of as many as devices."""
    if microbatches % devices:
        rounds = microbatches // devices
        choice = f"{devices * rounds} or {devices * (rounds + 1)}" if rounds else devices
        raise InputError(
            f"interleaved: {microbatches} microbatches do not come in rounds of {devices}, the number of pipeline "
            f"devices; choose {choice}."
        )


def _alternate(
    device: int, devices: int, warm: int, forward: Sequence[tuple[int, int]], backward: Sequence[tuple[int, int]]
) -> list[Action]:
    """Return `warm` forwards, then one forward and one backward in turn, of (chunk, microbatch) in these orders."""
    ahead = min(warm, len(forward))
    kinds = "F" * ahead + "FB" * (len(forward) - ahead) + "B" * ahead
    numbers = {"F": iter(forward), "B": iter(backward)}
    return [Action(c * devices + device, kind, k) for kind in kinds for c, k in [next(numbers[kind])]]


def zb_h1(devices: int, microbatches: int) -> Table:
    """1F1B whose weight gradients fill the bubble, with no more activations than 1F1B (Qi et al., 2023)."""
    return _zero_bubble(devices, microbatches, 1)


def zb_h2(devices: int, microbatches: int) -> Table:
    """Twice the warm-up of ZB-H1: no bubble between a device's first and last work (Qi et al., 2023)."""
    return _zero_bubble(devices, microbatches, 2)


def _zero_bubble(devices: int, microbatches: int, depth: int) -> Table:
    """Device d computes `depth` x (devices - d - 1) forwards ahead, and weight gradients `depth` x d behind."""
    _check_counts(devices=devices, microbatches=microbatches)
    table = []
    for d in range(devices):
        warm, behind = min(depth * (devices - d - 1), microbatches), min(depth * d, microbatches)
        row = [Action(d, "F", k) for k in range(warm)]
        for k in range(microbatches):
            row += [Action(d, "F", warm + k)] if warm + k < microbatches else []
            row += [Action(d, "I", k)] + ([Action(d, "W", k - behind)] if k >= behind else [])
        table.append(row + [Action(d, "W", k) for k in range(microbatches - behind, microbatches)])
    return table


class _Writer:
    """A writer of the row of a device with two stages of a V: aF is a forward of the first, bI a half of the second.

    W is the other half of the oldest I that lacks one. Actions beyond the last microbatch are left out.
    """

    def __init__(self, device: int, devices: int, microbatches: int) -> None:
        self.stages = {"a": device, "b": 2 * devices - 1 - device}
        self.microbatches = microbatches
        self.row: list[Action] = []
        self.count: Counter[tuple[int, bool]] = Counter()
        self.halves: deque[Action] = deque()

    def do(self, works: str, times: int = 1) -> None:
        for work in works.split() * times:
            if work == "W":
                half = self.halves.popleft()
                self.row.append(Action(half.stage, "W", half.microbatch))
                continue
            stage, kind = self.stages[work[0]], work[1]
            numbered = stage, kind == "F"
            if self.count[numbered] < self.microbatches:
                self.row.append(Action(stage, kind, self.count[numbered]))
                self.count[numbered] += 1
                self.halves += [self.row[-1]] if kind == "I" else []


def zbv(devices: int, microbatches: int) -> Table:
    """Two chunks a device in a V, without bubbles and with the memory of 1F1B on every device (Qi et al., 2024)."""
    table = []
    for d, writer in enumerate(_writers("zbv", devices, microbatches)):
        writer.do("aF", 2 * (devices - d) - 1)
        writer.do("bF aF", d)
        writer.do("bF bI W", devices - d)
        writer.do("aF aI W bF bI W", microbatches - devices)
        writer.do("aI bI", d)
        writer.do("aI W", devices - d)
        writer.do("W", 2 * d)
        table.append(writer.row)
    return table


def dualpipe_v(devices: int, microbatches: int) -> Table:
    """Two chunks a device in a V, forwards and backwards of different microbatches side by side (DeepSeek, 2025)."""
    table = []
    for d, writer in enumerate(_writers("dualpipe_v", devices, microbatches)):
        rest, half = devices - d - 1, (d + 1) // 2
        writer.do("aF", 2 * rest)
        writer.do("aF bF", d + 1)
        writer.do("bI W bF", rest)
        writer.do("aF bB bF aB", microbatches - 2 * devices + d + 1)
        writer.do("bB bF aB", rest)
        writer.do("bB aB", half)
        writer.do("bI aI" if d % 2 else "bB aI")
        writer.do("bI aI", d - half)
        writer.do("W aI", rest)
        writer.do("W", d + 1)
        table.append(writer.row)
    return table


def _writers(name: str, devices: int, microbatches: int) -> list[_Writer]:
    _check_counts(devices=devices, microbatches=microbatches)
    if microbatches < 2 * devices:
        raise InputError(
            f"{name}: {microbatches} microbatches do not fill two chunks on each of {devices} pipeline devices; "
            f"choose at least {2 * devices}."
        )
    return [_Writer(d, devices, microbatches) for d in range(devices)]


def chimera(devices: int, microbatches: int) -> Table:
    """Two pipelines in opposite directions, every other microbatch in each; each stage is on two devices (Li, 2021)."""
    _check_counts(devices=devices, microbatches=microbatches)
    if devices % 2 or microbatches % 2:
        raise InputError(
            f"chimera: {devices} pipeline devices and {microbatches} microbatches; its two pipelines need even numbers."
        )

    def place(work: Action) -> int:
        return devices - 1 - work.stage if work.microbatch % 2 else work.stage

    works = [Action(s, kind, k) for s in range(devices) for kind in "FB" for k in range(microbatches)]
    found = [fill(works, place, rank, devices) for rank in (_backward_first, _forward_first)]
    return min(found, key=lambda table: max(finish(table).values()))


def three_f_one_b(devices: int, microbatches: int, passes: int = 3) -> Table:
    """Several forward passes through the same stages; only the last one has a backward (as in AlphaFold2).

    Backwards go first, then the earliest pass: the idle time is that of 1F1B, the least possible.
    """
    _check_counts(devices=devices, microbatches=microbatches, passes=passes)
    stages = range(passes * devices)
    works = [Action(s, "F", k) for s in stages for k in range(microbatches)]
    works += [Action(s, "B", k) for s in stages[-devices:] for k in range(microbatches)]

    def rank(work: Action) -> tuple[object, ...]:
        return work.kind == "F", work.stage // devices, work.microbatch

    return fill(works, lambda work: work.stage % devices, rank, devices)


def interlaced(devices: int, microbatches: int) -> Table:
    """A pipeline of stages 1 to `devices`, whose devices meet once a round to compute the first and the last stage
    together.

    Between two meetings a device does a forward and a backward; at even places from the end the backward is first. So
    forwards pass two stages a round, backwards one, and no device waits for a neighbour while all have work.
    """
    _check_counts(devices=devices, microbatches=microbatches)
    forward = [(d + devices % 2) // 2 for d in range(devices)]
    backward = [forward[-1] + devices - d for d in range(devices)]
    # Stage, kind, and how many rounds after the first stage of its microbatch.
    last, head = backward[0] + 1, forward[-1] + 1
    together = [(0, "B", last), (devices + 1, "F", head), (devices + 1, "B", head), (0, "F", 0)]
    table = []
    for d in range(devices):
        own = [(d + 1, "F", forward[d]), (d + 1, "B", backward[d])]
        turn = [*together, *(own if (devices - d) % 2 == 0 else own[::-1])]
        works = (Action(s, kind, r - late) for r in range(microbatches + last) for s, kind, late in turn)
        table.append([work for work in works if 0 <= work.microbatch < microbatches])
    return table


def _backward_first(work: Action) -> tuple[object, ...]:
    return work.kind == "F", work.microbatch


def _forward_first(work: Action) -> tuple[object, ...]:
    return work.kind != "F", work.microbatch


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"a schedule needs 1 or more {name}, but {count} were given.")
    if (works := prod(counts.values())) > MOST_WORKS:
        shown = " x ".join(f"{count} {name}" for name, count in counts.items())
        raise InputError(f"a schedule of {shown} has {works} forwards; choose at most {MOST_WORKS}.")


# By name; each is a plan, too.
RULES: Mapping[str, Callable[..., Table]] = {
    "breadth_first": breadth_first,
    "chimera": chimera,
    "dualpipe_v": dualpipe_v,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "pipeline_1f1b": schedule_1f1b,
    "seq1f1b": seq1f1b,
    "terapipe": terapipe,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
}


def table_of(schedule: str, n: int, options: Mapping[str, int]) -> tuple[Table, int]:
    """Return the table of a rule, an order or a file on `n` devices, and the number of slices in one of its
    microbatches.

    Raises InputError for an option that a rule does not have, and for a file of another number of devices.
    """
    if schedule in RULES:
        rule = RULES[schedule]
        known = inspect.signature(rule).parameters
        for name in options.keys() - known.keys():
            raise InputError(f"{schedule}:{name}={options[name]}: this schedule has no choice of {name}; leave it out.")
        slices = options.get("slices", known["slices"].default if "slices" in known else 1)
        return rule(n, **options), slices
    file = Path(schedule)
    if is_text(schedule):
        if "chunks" in options:
            raise InputError(f"schedule={schedule} has its stages in it, and no choice of chunks; leave chunks out.")
        slices = options.get("slices", 1)
        return table_of_order(schedule, n, slices * options["microbatches"]), slices
    if not file.is_file():
        message = unknown("schedule", schedule, RULES)
        raise InputError(f"{message} Or give an order, as F(FB)B/(FB), or a file with a row of work for each device.")
    if own := options.keys() - {"slices"}:
        raise InputError(f"{file} is a whole table, which has no choice of {' and '.join(sorted(own))}; leave it out.")
    with reading(file, "give a file with a row of work for each device"):
        table = parse_schedule(file.read_text(errors="replace"))
    if len(table) != n:
        raise InputError(f"{file} has {len(table)} rows, but the pipeline {n} devices; make the two numbers equal.")
    return table, options.get("slices", 1)


def is_text(schedule: str) -> bool:
    """Return whether a schedule is an order as text, and no file."""
    return is_order(schedule) and not Path(schedule).is_file()
