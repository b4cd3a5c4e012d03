"""Bounds of plans with estimates: those that were compiled whole say more than their estimates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from superscaler.groups import collect
from superscaler.planner.estimate import Estimate, Estimator
from superscaler.planner.own.chains import Ways
from superscaler.planner.own.stages import CLOSE, is_free
from superscaler.planner.space import Choice
from superscaler.planner.whole.programs import Programs
from superscaler.simulate.prediction import Prediction

# Estimates of bytes above so many times those of a device do not fit.
ALMOST = 1.04


def least_of(estimates: Sequence[Estimate], programs: Programs, estimator: Estimator, room: float) -> Iterator[float]:
    """Yield the least seconds of a row of the batch of plans with estimates, where they could be below the best step:
    those of the whole plan, if its stages have no other blocks. `room`: the bytes of a device.
    """
    limit = programs.found[0].a_row / CLOSE
    near = (e for e in estimates if e.bound < limit * e.choice.batch)
    for plan, own in collect((replace(e.choice, blocks=()), e) for e in near).items():
        wholes = [(e, whole) for e in own if (whole := programs.prediction(e.choice))]
        # Other blocks have the largest error of the bytes of some.
        e, whole = max(wholes, key=lambda pair: pair[1].fullest.peak_bytes / pair[0].peak, default=(own[0], None))
        if whole is None or plan != e.choice:
            yield least_beside(estimator, e, whole, room) / plan.batch
        elif whole.fits:
            yield whole.step_seconds / plan.batch


def least_beside(estimator: Estimator, e: Estimate, whole: Prediction | None, room: float) -> float:
    """Return the least seconds of a plan with any blocks in its stages, by the estimate of some. `room`: the bytes of a
    device. `whole`: the plan of that estimate, if it was compiled: with other blocks, bytes have the same error, and
    works take as much longer as those of one of its devices.
    """
    c = replace(e.choice, blocks=())
    if is_free(c):
        most = room * e.peak / whole.fullest.peak_bytes if whole else ALMOST * room
        pace = _pace(estimator, e.choice, whole) if whole else 1.0
        return Ways(estimator, [c], most, is_bound=True, pace=pace).bound()
    if whole is None and e.peak > ALMOST * room:
        return inf
    other = estimator.of(c, pace=_pace(estimator, e.choice, whole)) if whole and c.schedule == "zbv" else e
    return other.bound if other else inf


def _pace(estimator: Estimator, c: Choice, whole: Prediction) -> float:
    """Return the seconds of the works of a whole plan in those of its estimate, of the device where that is least: with
    waits for copies from the host, but for those of an update.
    """
    costs, each = estimator.menu.costs(c.use), c.dp * c.tp
    assert costs is not None
    stages, paces = estimator.stage_costs(c, [costs] * c.stages, estimator.cuts.of(c)), list[float]()
    for device in range(c.pp):
        own = estimator.of_device(c, stages, device)
        times = next(times for times in whole.devices if device * each in times.devices)
        copies = max(times.copies - sum(float(estimator.update(c, stage)) for stage in own), 0.0)
        seconds = sum(c.microbatches * stage.work + estimator.sums(c, stage) for stage in own)
        paces.append((times.compute + times.launch - times.host + copies) / seconds)
    return min(paces)
