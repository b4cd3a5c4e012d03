"""The whole pipeline: a captured graph and an sProgram become one program per device, in the order of the paper."""

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from superscaler.certify.certificate import certify
from superscaler.cluster import Cluster
from superscaler.emit.device import Emitted, emit
from superscaler.errors import InputError, PlanError
from superscaler.ir.communication import TransferRow, bytes_moved, moves
from superscaler.ir.fold import KEPT, Fold, Folded, Unfoldable
from superscaler.ir.graph import Graph
from superscaler.ir.grid import HOSTS, place_name
from superscaler.ir.loops import Rolled, weighted
from superscaler.ir.model import Op
from superscaler.ir.program import Program
from superscaler.materialize.build import materialize
from superscaler.materialize.joined.join import joined
from superscaler.materialize.loops import Aperiodic
from superscaler.schedule.dependencies import Schedule
from superscaler.schedule.fold import find_fold, restrict
from superscaler.schedule.order import check_assigned, complete
from superscaler.schedule.residents import check_copies, place_updates
from superscaler.schedule.steady_state import SteadyState, first_microbatches, steady_states
from superscaler.timing import phase, timed, without_garbage_collection
from superscaler.transform.place import check_axes_cut, check_cut_first, place_twins
from superscaler.transform.recompute import keep_slices, recompute_checkpoints
from superscaler.translation.check import check_translation

SProgram = Callable[[Graph, Cluster], Any]
# A line of a plan of the library.
_LIBRARY = re.compile(rf" (?:at )?{re.escape(str(Path(__file__).parent / 'plans'))}{re.escape(os.sep)}\S+?\.py:\d+")


@dataclass(frozen=True)
class Compiled:
    """The result of compiling.

    For a folded plan, `schedule` covers the sampled places only; `full_fold` is the fold before any axis was given up.
    For a plan with loops, `schedule` covers the first microbatches only. `seconds`: of each phase. `checked`: a program
    that was certified when it was compiled, with the seconds of each check.
    """

    graph: Graph
    cluster: Cluster
    schedule: Schedule
    full_fold: Fold | None
    program: Program
    seconds: dict[str, float]
    checked: tuple[Program, Mapping[str, float]] | None = None

    @property
    def certified(self) -> Mapping[str, float]:
        """Return the seconds of each check of the certificate if the program has one already, as plans with loops."""
        return self.checked[1] if self.checked is not None and self.checked[0] is self.program else {}

    @cached_property
    def emitted(self) -> Emitted:
        """Return the source of the program, which is written, and checked against the program, when this is first
        read.

        Raises TranslationError if the source does something else.
        """
        with without_garbage_collection():
            with timed(self.seconds, "emit"):
                emitted = emit(self.program)
            with timed(self.seconds, "translation"):
                check_translation(self.program, emitted)
        return emitted

    @cached_property
    def joined(self) -> "Compiled":
        """Return the plan as steps under `torch_compile` run it, with segments as long as its instructions allow; the
        same plan if they are.
        """
        with without_garbage_collection(), timed(self.seconds, "materialize"):
            program = joined(self.program)
        return self if program is self.program else replace(self, program=program)

    @property
    def fold(self) -> Fold | None:
        """Return the fold whose sampled places the schedule covers, None if it covers all parts."""
        return self.program.devices.fold if isinstance(self.program.devices, Folded) else None

    @cached_property
    def whole_schedule(self) -> Schedule:
        """Return the schedule of all parts on all devices, at a cost that grows with their number."""
        rolls = any(isinstance(device.instructions, Rolled) for device, _ in self.program.distinct)
        return complete(self.graph, self.full_fold) if rolls or self.fold is not None else self.schedule

    @cached_property
    def moves(self) -> list[TransferRow]:
        """Return the traffic of the program: each transfer, its way and the reason."""
        return moves(self.program)

    @property
    def counts(self) -> dict[str, int]:
        code = self.program.distinct
        return {
            "parts": sum(len(self.graph.grids[op.name]) * (1 + op.has_mirror) for op in self.graph.model.ops),
            "instructions": sum(n * w for d, n in code for i, w in weighted(d.instructions) if not i.frees),
            "distinct_programs": len(set(self.emitted.programs)),
            "emitted_bytes": sum(len(text) for text in self.emitted.files.values()),
            "bytes_moved": bytes_moved(self.program),
        }


def compile_graph(graph: Graph, sprogram: SProgram, cluster: Cluster, certified: bool = True) -> Compiled:
    """Transform, place and order a copy of `graph` by `sprogram`; then complete and materialize it.

    `certified=False`: a program of all microbatches has no certificate yet, for a prediction. Raises PlanError with the
    reason when the plan cannot hold.
    """
    try:
        planned, seconds = transform(graph, sprogram, cluster)
        return finish(planned, cluster, seconds, certified)
    except PlanError as error:
        spec = getattr(sprogram, "spec", "")
        if not spec or not _LIBRARY.search(str(error)):
            raise
        # Lines of the library say nothing to those who wrote its plan as text.
        raise type(error)(_LIBRARY.sub(lambda _: f" of '{spec}'", str(error))) from error


def transform(graph: Graph, sprogram: SProgram, cluster: Cluster) -> tuple[Graph, dict[str, float]]:
    """Return a copy of `graph`, transformed, placed and ordered by `sprogram`, and the seconds by phase."""
    seconds = {"plan": 0.0}
    with without_garbage_collection(), timed(seconds, "plan"):
        planned = graph.copy()
        _run(sprogram, planned, cluster)
        recompute_checkpoints(planned)
        keep_slices(planned)
        complete_placement(planned, cluster)
    return planned, seconds


def _run(sprogram: SProgram, graph: Graph, cluster: Cluster) -> None:
    name = getattr(sprogram, "__name__", "the sProgram")
    try:
        inspect.signature(sprogram).bind(graph, cluster)
    except TypeError as error:
        raise InputError(
            f"{name} is called as {name}(graph, cluster): {error}; write def {name}(graph, cluster)."
        ) from None
    except ValueError:
        # The signature of a function in C is unknown.
        pass
    returned = sprogram(graph, cluster)
    if inspect.isgenerator(returned) or inspect.isawaitable(returned) or inspect.isasyncgen(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise InputError(f"{name} is a generator or async, so none of it has run; make it a plain function.")


def complete_placement(planned: Graph, cluster: Cluster) -> Graph:
    """Place the updates that no op_assign placed. Raises PlanError if any other part is on no device of the cluster."""
    place_twins(planned)
    check_assigned(planned)
    check_cut_first(planned)
    check_axes_cut(planned)
    place_updates(planned, len(cluster.devices))
    last = len(cluster.devices) - 1
    for op in planned.model.ops:
        if op.name in planned.policy.hosted:
            planned.grids[op.name] = planned.grids[op.name].on_hosts()
        grid = planned.grids[op.name]
        _, host = grid.ends()
        device = host if host < HOSTS else max(d % HOSTS for d in grid.used())
        if device > last:
            has = f"devices 0 to {last}" if last else "device 0 only"
            raise InputError(
                f"{_assigned(planned, op)}{op.name} is assigned to device {device}, but {cluster} has {has}."
            )
        if op.is_output and (count := len(grid.used())) < len(planned.rows(op).device):
            raise InputError(
                f"{_assigned(planned, op)}output {op.name} has {len(planned.rows(op).device)} parts on {count} "
                "devices, but a device returns one part of it; assign each part to a device of its own."
            )
        if host >= HOSTS and ((op.is_forward and not op.is_copy) or op.is_output):
            raise InputError(
                f"{_assigned(planned, op)}{op.name} is assigned to {place_name(host)}, but only copies (Insert) and "
                "updates can be there; assign it to the device, and a copy of its inputs or outputs to the host."
            )
    check_copies(planned)
    return planned


def _assigned(planned: Graph, op: Op) -> str:
    """Return the line of the last op_assign of an op, as the start of an error."""
    entry = planned.last("op_assign", op.name)
    return f"op_assign at {entry.where}: " if entry else ""


def finish(
    planned: Graph, cluster: Cluster, seconds: Mapping[str, float] | None = None, certified: bool = True
) -> Compiled:
    """Compile a graph whose parts are already made, all placed, and ordered. `certified`: see `compile_graph`."""
    phases = {**(seconds or {}), "schedule": 0.0, "materialize": 0.0, "emit": 0.0, "translation": 0.0}
    with without_garbage_collection():
        with timed(phases, "schedule"):
            full_fold = find_fold(planned)
        schedule, program, seconds_of_checks = _compiled(planned, cluster, full_fold, phases, certified)
    checked = (program, seconds_of_checks) if seconds_of_checks else None
    return Compiled(planned, cluster, schedule, full_fold, program, phases, checked)


def _compiled(
    planned: Graph, cluster: Cluster, full_fold: Fold | None, phases: dict[str, float], certified: bool
) -> tuple[Schedule, Program, Mapping[str, float]]:
    """Compile the first microbatches and certify the program of all; compile more of them if these do not determine
    it, and all if the plan does not hold.
    """
    with contextlib.suppress(PlanError):
        for steady in steady_states(planned):
            with contextlib.suppress(Aperiodic):
                schedule, program = _folded(planned, cluster, full_fold, phases, steady)
                return schedule, program, _certified(program) if certified else {}
    return *_folded(planned, cluster, full_fold, phases), {}


def _certified(program: Program) -> Mapping[str, float]:
    """Certify a program of all microbatches that was made from the first ones; return the seconds of each check. Raises
    Aperiodic if it does not hold.
    """
    try:
        with phase("certify"):
            return certify(program)
    except PlanError as error:
        raise Aperiodic from error


def _folded(
    planned: Graph,
    cluster: Cluster,
    full_fold: Fold | None,
    phases: dict[str, float],
    steady: SteadyState | None = None,
) -> tuple[Schedule, Program]:
    """Compile the sampled places of each fold axis; all places of an axis that proves neither to fold nor to divide
    into axes that do.
    """
    fold, kept = full_fold, planned if steady is None else first_microbatches(planned, steady)
    while True:
        fold = None if fold is None or max(fold.widths, default=0) <= KEPT else fold
        try:
            with timed(phases, "schedule"):
                schedule = complete(kept if fold is None else restrict(kept, fold), full_fold)
            with timed(phases, "materialize"):
                return schedule, materialize(schedule, len(cluster.devices), cluster, fold, steady)
        except Unfoldable as error:
            assert fold is not None
            fold = fold.divided(error.axis, error.parts) if error.parts else fold.without(error.axis)
