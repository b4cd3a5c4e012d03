"""The subject of a report: a plan with its account, its simulation, and the timelines of its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from superscaler.cluster import Cluster
from superscaler.cluster.devices import DeviceKind, Speeds
from superscaler.ir.program import Program
from superscaler.report.event_notes import Details
from superscaler.report.journal import Row
from superscaler.report.measured import Difference, differences, measured, ran_compiled
from superscaler.report.timeline import Timeline, predicted
from superscaler.simulate.predict import Simulation, simulate
from superscaler.simulate.system import System

# A core of a CPU, for devices about which nothing is known: 50 Gflop/s, 10 GB/s, 2 us for a kernel.
_CORE = Speeds(units=0, products={"float32": (50e9, 50e9)}, memory=(10e9, 10e9))
_ASSUMED = (
    "Nothing is known about the speed of {cluster}: its times are those of a core with 50 Gflop/s and 10 GB/s. Measure "
    "it with superscaler doctor --measure --out machine.yaml, and compile with --cluster machine.yaml."
)


@dataclass(frozen=True, eq=False)
class Subject:
    """A plan to report on. `account`: its explain.json; `timelines`: the measured one first, if there is one.

    `certificate`: its summary; `notes`: remarks about the times for a reader; `differences`: between the predicted and
    the measured step.
    """

    title: str
    account: Mapping[str, Any]
    simulation: Simulation
    details: Details
    timelines: Sequence[Timeline]
    certificate: Mapping[str, Any]
    notes: Sequence[str] = ()
    differences: Sequence[Difference] = ()


def subject(
    title: str,
    program: Program,
    cluster: Cluster,
    account: Mapping[str, Any],
    journal: Sequence[Row],
    certificate: Mapping[str, Any],
    run: Path | None = None,
    code: str = "",
) -> Subject:
    """Return a plan as the subject of a report, with its step simulated. `run`: the folder of a profile of it; `code`:
    the hash of its code.
    """
    known, notes = _with_speeds(cluster)
    found = simulate(program, known, system=System(torch_compile=run is not None and ran_compiled(run)))
    # Compiled steps have instructions of their own.
    program = found.program
    details = Details(program, account, journal)
    own = predicted(found.table, details)
    if run is None:
        return Subject(title, account, found, details, [own], certificate, notes)
    real, note = measured(run, program, code, details)
    differs = differences(own, real, details, program.world)
    return Subject(title, account, found, details, [real, own], certificate, [*notes, note], differs)


def _with_speeds(cluster: Cluster) -> tuple[Cluster, list[str]]:
    """Return a cluster whose devices have speeds, and a remark if the speeds were assumed."""
    kind = cluster.device_kind
    if kind is not None and kind.speeds is not None:
        return cluster, []
    kind = DeviceKind("core", 0, {}, _CORE) if kind is None else replace(kind, speeds=_CORE)
    return replace(cluster, device_kind=kind), [_ASSUMED.format(cluster=cluster)]
