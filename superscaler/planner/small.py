"""What a small model costs: the seconds and bytes of a microbatch, by its simulated step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from math import prod

from superscaler.ir.mask import extents
from superscaler.ir.model import Model, width
from superscaler.ir.program import Program, Role, calls, names
from superscaler.materialize.buckets import buckets
from superscaler.planner.costs import Cost
from superscaler.planner.memory import kept_bytes
from superscaler.simulate.predict import Simulation, check_speeds, share_of
from superscaler.simulate.rates import seconds as seconds_of
from superscaler.simulate.system import System
from superscaler.simulate.timetable import COMPUTE
from superscaler.simulate.works import Kernel

# Devices of a cluster whose slowest one is the slowest of its kind.
ALL = 10**9


def costs_of(found: Simulation, blocks: Set[str], several: int, system: System) -> tuple[Cost, Cost]:
    """Return the cost of a small model on slow devices, on which it was simulated, and on fast ones. `blocks`: the
    names of their ops; `several`: the microbatches of its step.
    """
    p, (copied, added), ends = found.prediction, _sums(found, system), _ends(found)
    update, memory, step = p.mean("optimizer"), p.fullest.memory, p.step_seconds
    sums, end = (several - 1) * (copied + added), ends[0] - (several - 1) * copied
    seconds, host = max(end - _idle(found, ends[0]), 0.0), float(found.table.starts.mean()) / several
    work = min((p.mean("compute") + p.mean("launch") - p.mean("host") - sums) / several, seconds)
    weights = memory["weights"] + memory["gathered"]
    slow = Cost(
        seconds=seconds, work=work, once=max(step - update - sums - several * end, 0.0), copied=copied, added=added,
        # The host also starts what the step does once.
        update=update, host=min(host, ends[1] - ends[0]) if several > 1 else host, idle=end - seconds,
        weights=weights, gradients=weights * _gradients(found.program.model), optimizer=memory["optimizer"],
        kept=kept_bytes(found), pieces=pieces(found.program), early=min(_early(found, blocks, ends[0]), seconds),
    )  # fmt: skip
    saved = step - p.low if share_of(found.cluster, ALL) < share_of(found.cluster, 1) else 0.0
    return slow, slow.faster(1 - saved / (several * slow.work + sums + update))


def _sums(found: Simulation, system: System) -> tuple[float, float]:
    """Return the seconds in which a device copies the gradients of a microbatch to sums, and adds them, beyond
    those of a step of one microbatch: it copies gradients to a wider dtype, and sums those of weights that are read
    in several segments.
    """
    kind, share, program = check_speeds(found.cluster), share_of(found.cluster, ALL), found.program
    code = (i for i in program.devices[0].instructions[:] if i.task is not None and i.task.microbatch <= 0)
    counts, copied, added = Counter(total.name for i in code for total in names(i, Role.SUM)), 0.0, 0.0
    # Products of fused systems add to the sums.
    for weight in (w for w in program.devices[0].weights if w.trained and not system.fused):
        tensor = program.model.tensors[weight.tensor]
        own, wide = ((extents(weight.box), dtype) for dtype in (tensor.dtype, tensor.wide_dtype))
        # Compiled backwards make the first sums, but for their dtype.
        has_copy = own != wide or not system.is_compiled
        copy = seconds_of(Kernel("copy_", (own,), (wide,)), kind, share) if has_copy else 0.0
        is_copied = own != wide or counts[weight.name.name] > 1
        copied += 0.0 if is_copied else copy
        added += seconds_of(Kernel("add_.Tensor", (wide, own), (wide,)), kind, share) - is_copied * copy
    return copied, added


def _ends(found: Simulation) -> list[float]:
    """Return the end of the last backward of each microbatch on the first device."""
    lane, ends = found.table.lanes[0], dict[int, float]()
    for n, at in enumerate(lane.instruction.tolist()):
        if lane.code[at].is_mirror and (task := lane.code[at].task):
            ends[task.microbatch] = float(lane.end[n, 0])
    return [*ends.values()] or [found.prediction.step_seconds - found.prediction.mean("optimizer")]


def _idle(found: Simulation, end: float) -> float:
    """Return the seconds until some time in which the first device waits for its host."""
    lane = found.table.lanes[0]
    is_work = (lane.waited < 0) & (lane.stream == COMPUTE) & (lane.start[:, 0] < end)
    return float((lane.met - lane.start)[is_work, 0].sum())


def _early(found: Simulation, blocks: Set[str], last: float) -> float:
    """Return the seconds of the first device before its first block, and after the backward of that. `blocks`: the
    names of the ops of all blocks; `last`: the end of the last backward of the first microbatch.
    """
    lane, program = found.table.lanes[0], found.program
    tasks = {
        call.task
        for _, call in calls(lane.code)
        if call.task.microbatch <= 0 and any(op.name in blocks for op in program.functions[call.function].ops)
    }
    numbers = [n for n, at in enumerate(lane.instruction.tolist()) if getattr(lane.code[at], "task", None) in tasks]
    events = [n for n in numbers if lane.code[lane.instruction[n]].runs_segment]
    if not events:
        return 0.0
    end = max((lane.end[n, 0] for n in events if lane.code[lane.instruction[n]].is_mirror), default=last)
    return float(lane.start[events, 0].min() + last - end)


def pieces(program: Program) -> float:
    """Return the number of collectives in which a device sends the gradients of all weights, the last ones first."""
    tensors = program.model.tensors
    weights = [(w, tensors[w.tensor]) for w in program.devices[0].weights if w.trained]
    sizes = [prod(extents(w.box)) * width(tensor.wide_dtype) for w, tensor in weights]
    return float(buckets(sizes[::-1]))


def _gradients(model: Model) -> float:
    """Return the bytes of gradients for each byte of weights."""
    return sum(t.gradient_bytes for t in model.trained_parameters()) / max(sum(t.nbytes for t in model.parameters()), 1)
