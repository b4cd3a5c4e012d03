"""Seconds and bytes of a step of a program on a cluster, from its own instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from superscaler.cluster import Cluster
from superscaler.cluster.devices import DeviceKind
from superscaler.cluster.links import LOCAL
from superscaler.errors import InputError
from superscaler.ir.cohorts import Cohort, cohorts
from superscaler.ir.grid import Ints
from superscaler.ir.model import Model
from superscaler.ir.program import Meets, Program, Task
from superscaler.materialize.joined.join import joined
from superscaler.simulate.clock import Behavior, clock
from superscaler.simulate.kernels import Kernel, Kernels, Works
from superscaler.simulate.memory import NO_OVERHEADS, DeviceMemory, Overheads, memories
from superscaler.simulate.prediction import DeviceTimes, Prediction, fit_line
from superscaler.simulate.rates import (
    Launched,
    flops_of,
    launched,
    needed_of,
    rate_of,
    seconds,
)
from superscaler.simulate.segments import Segments, count, products
from superscaler.simulate.system import PLAIN, System, attention_of, reads_documents
from superscaler.simulate.times import Floats
from superscaler.simulate.timetable import Timetable
from superscaler.simulate.transfers.beside import Beside, Overlap

# The shares of the slowest devices of a kind, and of the fastest.
_SLOW, _FAST = 0.0, 1.0
# The number of tensors that are named.
_SHOWN = 3


@dataclass(frozen=True, eq=False)
class Simulation:
    """The prediction for a step of a program, with the segments, the times and the memory behind it."""

    program: Program
    cluster: Cluster
    segments: Segments
    table: Timetable
    memories: Sequence[DeviceMemory]
    prediction: Prediction


def predict(
    program: Program,
    cluster: Cluster,
    capacity: int | None = None,
    system: System = PLAIN,
) -> Prediction:
    """Return the prediction for a step. `capacity`: bytes of a device, in place of the cluster's. `system`: how the
    step is loaded, and other kernels.

    Raises InputError if the speeds of the cluster's devices are unknown, and for a step that no CUDA graph replays.
    """
    return simulate(program, cluster, capacity, system).prediction


def simulate(
    program: Program,
    cluster: Cluster,
    capacity: int | None = None,
    system: System = PLAIN,
    among: int | None = None,
) -> Simulation:
    """Return the prediction for a step with its timetable and memories; see `predict`. That of a compiled step is of
    the program with longer segments. `among`: the slowest device of so many sets the pace; default: of the cluster's.
    """
    with system.run(program):
        return _simulated(program, cluster, capacity, system, among)


def _simulated(
    program: Program, cluster: Cluster, capacity: int | None, system: System, among: int | None
) -> Simulation:
    kind, targets = check_speeds(cluster), {op.target for op in program.model.ops}
    assert kind.speeds is not None
    system.check(targets, cluster, kind.speeds.units > 0)
    given, program = program, system.summed(program)
    system = replace(system, sum_halves=program is not given)
    speeds, program = system.speeds(kind.speeds, cluster), joined(program) if system.is_compiled else program
    kind = replace(kind, speeds=speeds)
    if system.cuda_graph:
        _check_replayed(program)
        # The host starts kernels and communication of a step at once.
        speeds = replace(speeds, issue=0.0)
        kind = replace(kind, speeds=speeds)
    works = Works(program, speeds.units > 0, system.is_compiled, system.cuda_graph, system.fused, system.balance)
    work = _Work(works, kind, share_of(cluster, among))
    weights = (weight.name.name for cohort in cohorts(program) for weight in cohort.weights)
    work.overlap = system.overlaps(work.kernel, speeds.slowdown, weights, speeds.units > 0)
    how = Behavior(
        launch=speeds.issue,
        slowdown=speeds.slowdown,
        cores=shared_cores(cluster, program.world),
        starts=work.starts,
        moved=work.moved,
        hidden=work.hidden,
        awaited=system.awaited(program),
        owned=system.owned(program),
    )
    table = clock(program, cluster, work.seconds, how)
    made = products(program.model)
    flops, needed = count(made, flops_of), count(made, needed_of)
    dtype = max(flops, key=lambda d: flops[d], default="float32")
    overheads = overheads_of(cluster)
    has = capacity or kind.memory
    found = memories(program, work.works.segments, overheads=overheads, capacity=has)
    # Devices that share cores have lanes of their own.
    alike = [c.devices for c in cohorts(program)] if how.cores else [lane.devices for lane in table.lanes]
    samples, tokens = _batch(program.model)
    prediction = Prediction(
        cluster=str(cluster),
        precision=precision_of(program.model),
        step_seconds=table.seconds,
        low=table.seconds - work.saved(table, _FAST),
        high=table.seconds - work.saved(table, _SLOW),
        samples=samples,
        tokens=tokens,
        model_flops=sum(flops.values()),
        peak_flops=kind.flops.get(dtype, 0.0),
        bound=sum(needed.values()) / rate_of(speeds, dtype, 0.5) / program.world,
        devices=tuple(_times(table, some, found) for some in alike),
        capacity=has,
        reserved=overheads.context,
        links=table.bytes,
        assumed=", ".join(system.words(speeds.units > 0, targets)),
        attention=attention_of(table, work.known, work.kernel) if system.documents else None,
    )
    return Simulation(program, cluster, work.works.segments, table, found, prediction)


def check_speeds(cluster: Cluster) -> DeviceKind:
    """Return the kind of a cluster's devices. Raises InputError if their speeds are unknown."""
    kind = cluster.device_kind
    if kind is None or kind.speeds is None:
        raise InputError(
            f"--cluster {cluster}: nothing is known about the speed of {cluster}; measure this machine with "
            "superscaler doctor --measure --out machine.yaml and give --cluster machine.yaml, or name a preset, as "
            "a100:1x8."
        )
    return kind


def shared_cores(cluster: Cluster, world: int) -> int:
    """Return the cores of a server that has fewer than devices, of so many in all; 0 if none of them shares one."""
    speeds = cluster.device_kind.speeds if cluster.device_kind else None
    return speeds.cores if speeds and speeds.cores < min(cluster.devices_per_server, world) else 0


def unshared(cluster: Cluster) -> DeviceKind | None:
    """Return the kind of a cluster's devices, each with a core of its own."""
    kind = cluster.device_kind
    return replace(kind, speeds=replace(kind.speeds, cores=0)) if kind and kind.speeds and kind.speeds.cores else kind


def check_system(model: Model, cluster: Cluster, system: System) -> DeviceKind:
    """Return the kind of a cluster's devices. Raises InputError if their speeds are unknown, and for a system that
    these or the model cannot have, whatever the plan is.
    """
    kind = check_speeds(cluster)
    assert kind.speeds is not None
    system.check({op.target for op in model.ops}, cluster, kind.speeds.units > 0)
    system.speeds(kind.speeds, cluster)
    system.check_documents(any(map(reads_documents, model.ops)))
    return kind


def _check_replayed(program: Program) -> None:
    """Raise InputError for a step that no CUDA graph replays."""
    is_away = any(weight.host for cohort in cohorts(program) for weight in cohort.samples[0].weights)
    if is_away or any(i.meets is Meets.HOST for cohort in cohorts(program) for i in cohort.code[:]):
        raise InputError(
            "--cuda-graph replays no step that copies to the host, as this plan does; leave it out, or take a plan "
            "without swap and offload."
        )


def fullest(program: Program, cluster: Cluster) -> DeviceMemory:
    """Return the memory of the device with the largest need."""
    return max(memories(program, overheads=overheads_of(cluster)), key=lambda m: m.total)


def memory_line(found: DeviceMemory, program: Program, cluster: Cluster) -> str:
    """Return in one line the largest memory that a plan needs on a device, and whether the cluster's have it."""
    where = "every device" if found.count == program.world > 1 else f"device {found.rank}"
    capacity = cluster.device_kind.memory if cluster.device_kind else None
    return fit_line(found.total, where, capacity, overheads_of(cluster).context)


def share_of(cluster: Cluster, among: int | None = None) -> float:
    """Return the expected `share` of the slowest device, for which all others wait. Devices of a kind are spread evenly
    over its range; the processes of a machine were measured together.
    """
    return 0.5 if cluster.kind == LOCAL else 1 / ((among or len(cluster.devices)) + 1)


def overheads_of(cluster: Cluster) -> Overheads:
    """Return the bytes of a process of a cluster beside the tensors of its program."""
    speeds = cluster.device_kind.speeds if cluster.device_kind else None
    is_gpu = cluster.kind != LOCAL or (speeds is not None and speeds.units > 0)
    return Overheads() if is_gpu else NO_OVERHEADS


def _times(table: Timetable, own: Ints, found: Sequence[DeviceMemory]) -> DeviceTimes:
    """Return the times of devices that run one program, and the memory of the fullest one."""
    devices = set(own.tolist())
    fullest = max((m for m in found if m.rank in devices), key=lambda m: m.total)

    def mean(times: Floats) -> float:
        return float(times[own].mean())

    return DeviceTimes(
        devices=tuple(sorted(devices)),
        compute=mean(table.compute),
        host=mean(table.host),
        optimizer=mean(table.optimizer),
        launch=mean(table.launch),
        communication=mean(table.exposed),
        copies=mean(table.copies),
        bubble=mean(table.bubble),
        peak_bytes=fullest.total,
        memory={**fullest.parts, "overhead": fullest.overhead},
        peak_at=fullest.place,
        kept=fullest.kept,
        excess=fullest.excess,
        largest=[(f"{held.name} of {held.made_by}", held.bytes) for held in fullest.largest[:_SHOWN]],
    )


@dataclass(eq=False)
class _Work:
    """The seconds of instructions on devices of a kind. Instructions with the same kernels are priced once."""

    works: Works
    kind: DeviceKind
    share: float
    # By cohort and variant, and the variant of each device; by cohort, of all its devices.
    known: dict[int, tuple[list[list[Kernels]], Ints]] = field(default_factory=dict)
    costs: dict[int, list[tuple[float | Floats, ...]]] = field(default_factory=dict)
    priced: dict[tuple[int, float], Launched] = field(default_factory=dict)
    # What hides communication, and which: by cohort and instruction.
    overlap: Overlap | None = None
    behind: dict[int, Mapping[int, Beside]] = field(default_factory=dict)

    def seconds(self, cohort: Cohort, at: int) -> float | Floats:
        """Return the seconds of an instruction on all devices of a cohort."""
        return self._costs(cohort)[at][0]

    def starts(self, cohort: Cohort, at: int) -> tuple[float | Floats, float | Floats]:
        """Return `late` and `host` of an instruction on all devices of a cohort."""
        _, late, host = self._costs(cohort)[at]
        return late, host

    def _costs(self, cohort: Cohort) -> list[tuple[float | Floats, ...]]:
        if cohort.number not in self.costs:
            devices, like = self.works.segments.variants(cohort)
            self.known[cohort.number] = known = list(map(self.works.of, devices)), like
            rows = zip(*(map(self.price, own) for own in known[0]), strict=True)
            self.costs[cohort.number] = [row[0] if len({*row}) == 1 else _columns(row, like) for row in rows]
        return self.costs[cohort.number]

    def kernel(self, kernel: Kernel) -> float:
        return seconds(kernel, self.kind, self.share)

    def hidden(self, cohort: Cohort, at: int) -> Beside | None:
        """Return the products beside a collective of a cohort, None for none."""
        if self.overlap is None:
            return None
        if cohort.number not in self.behind:
            self.behind[cohort.number] = self.overlap.of(cohort.code[:], self.known[cohort.number][0][0])
        return self.behind[cohort.number].get(at)

    def moved(self, cohort: Cohort, task: Task) -> int:
        return self.works.segments.moved(cohort.samples[0])[task]

    def price(self, kernels: Kernels, share: float | None = None) -> Launched:
        share = self.share if share is None else share
        if (id(kernels), share) not in self.priced:
            self.priced[id(kernels), share] = launched(kernels, self.kind, share)
        return self.priced[id(kernels), share]

    def saved(self, table: Timetable, share: float) -> float:
        """Return the seconds of the critical path that devices of the kind save at this share."""
        cohort = {
            int(d): (number, row) for number, lane in enumerate(table.lanes) for row, d in enumerate(lane.devices)
        }
        found, slowdown = 0.0, self.kind.speeds.slowdown if self.kind.speeds else 1.0
        for link in table.path:
            number, row = cohort[link.device]
            works, like = self.known[number]
            kernels = () if link.is_transfer else works[like[row]][link.instruction]
            if kernels:
                # Not of waits for the host.
                own, other = self.price(kernels).device, self.price(kernels, share).device
                found += min(link.seconds, own * slowdown) * (1 - other / own) if own else 0.0
        return found


def _columns(rows: Sequence[Launched], like: Ints) -> tuple[float | Floats, ...]:
    return tuple(np.array(column)[like] for column in zip(*rows, strict=True))


def _batch(model: Model) -> tuple[int, int]:
    """Return the samples of a batch, and their tokens if the first input has token numbers."""
    first = model.tensors[model.inputs[0]] if model.inputs else None
    if first is None or not first.shape:
        return 1, 0
    is_tokens = first.dtype == "int64" and len(first.shape) == 2
    return first.shape[0] * model.iterations, prod(first.shape) * model.iterations if is_tokens else 0


def precision_of(model: Model) -> str:
    """Return the dtypes of most products and of most weights, in words."""
    made, weights = Counter[str](), Counter[str]()
    for op in model.forward_ops:
        dtypes = [model.tensors[o.tensor].dtype for o in op.inputs]
        made[next((d for d in dtypes if "float" in d), "float32")] += op.flops
    for tensor in model.parameters():
        weights[tensor.dtype] += prod(tensor.shape)
    dtype = max(made, key=lambda d: made[d], default="float32")
    return f"products in {dtype}, weights in {max(weights, key=lambda d: weights[d], default=dtype)}"
