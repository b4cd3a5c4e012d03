"""The estimate of a plan from the menu: seconds, bytes, and a bound that no plan of these decisions goes below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from superscaler.cluster import Cluster
from superscaler.ir.graph import Graph
from superscaler.planner.constraints import Limit
from superscaler.planner.costs import NOTHING, Cost, Costs, outside, spans, total_of
from superscaler.planner.memory import NONE, moments, overhead
from superscaler.planner.menu import Menu
from superscaler.planner.space import Choice
from superscaler.planner.stages.cuts import Cuts
from superscaler.planner.traffic import Traffic, backward_of
from superscaler.simulate.predict import overheads_of, shared_cores
from superscaler.simulate.rates import HOST

# The idle time of zero-bubble schedules in that of 1F1B: the halves of a backward are as long as a forward.
IDLE = {"zb_h1": 1 / 3, "zbv": 0.0}


class Estimate(NamedTuple):
    """The estimate of a plan: its seconds, the bytes of its fullest device, and its least seconds, where work hides all
    the communication that it can.
    """

    choice: Choice
    seconds: float
    peak: float
    bound: float

    @property
    def a_row(self) -> float:
        """Return the seconds for each row of the batch."""
        return self.seconds / self.choice.batch


class Estimator:
    """Estimates of plans of a graph on a cluster. `limits`: on the blocks of stages."""

    def __init__(self, graph: Graph, cluster: Cluster, menu: Menu, limits: Sequence[Limit] = ()) -> None:
        self.cluster, self.menu = cluster, menu
        # The run of each block, and the number of the model's blocks in it, as `blocks=` counts them.
        self.run_of = np.array([n for n, run in enumerate(menu.runs) for _ in run], dtype=int)
        self.has_passes = any(len(block.calls) > 1 for block in graph.blocks)
        self.traffic = Traffic(menu)
        self.cuts = Cuts(menu, self.run_of, limits, self._tails)
        self.overheads = overheads_of(cluster)
        # Of all servers, if devices share them.
        self.cores = shared_cores(cluster, len(cluster.devices)) * cluster.servers

    def of(self, choice: Choice, limit: float = inf, pace: float = 1.0) -> Estimate | None:
        """Return the estimate of a plan with its best stages; None if the model does not allow it. Where none could
        take less than `limit` seconds a row, they are those whose slowest device is fastest. `pace`: the seconds of
        work in those that are known.
        """
        costs, least = self.menu.costs(choice.use), self.cuts.least(choice)
        if costs is None or least is None:
            return None
        costs = costs.faster(pace)
        other = self.with_stages(choice, [costs] * (len(least) - 1), least)
        bounds = self.cuts.best(choice) if other.bound < limit * choice.batch else least
        if bounds is None or bounds == least:
            return other
        e = self.with_stages(choice, [costs] * (len(bounds) - 1), bounds)
        return e._replace(bound=min(e.bound, other.bound))

    def with_stages(self, choice: Choice, costs: Sequence[Costs], bounds: Sequence[int]) -> Estimate:
        """Return the estimate of a plan with stages of these costs, each from one bound to the next."""
        stages = self.stage_costs(choice, costs, bounds)
        is_whole = choice.pp == 1 or choice.is_even
        chosen = replace(
            choice, blocks=() if is_whole else tuple(sum(self.cuts.sizes[a:b]) for a, b in pairwise(bounds))
        )
        largest = max(range(len(stages)), key=lambda k: stages[k].gradients)
        works, late = self._steady(choice, stages, costs[-1].rest.seconds)
        first, last = (self.traffic.exposed(choice.stage(k), stages[k]) for k in (0, largest))
        updates = [
            sum(self.update(choice.stage(k), stage) for stage in (own, stages[-1 - k])[: choice.directions])
            for k, own in enumerate(stages)
        ]
        ends = pairwise(map(choice.stage, range(choice.pp))) if choice.own else [(choice, choice)] * (choice.pp > 1)
        send = max((self.traffic.send(a, b) for a, b in ends), default=0.0)
        sends = 2 * (choice.microbatches + choice.pp) * choice.chunks * send
        # Of two directions, the devices in the middle are the last to begin.
        passes = 0.0 if choice.schedule == "zbv" else (2 * choice.pp // choice.directions - 2) * send
        peak = max(self.bytes_at(choice.stage(k), costs[k], stages, k) for k in range(choice.pp))
        # Later stages of 1F1B are done while the first one has its last backward, after all others.
        drained = sum(stage.turn for stage in stages[:largest]) * backward_of(choice) * (choice.schedule == "1f1b")
        update, tail = (updates[0], updates[largest] - drained) if drained else (max(updates),) * 2
        busy = self.shared(self._busy(choice, stages))
        least = max(works + first + updates[0] + passes, busy)
        seconds = works + late + max(first + update, last + tail) + max(sends, passes)
        if busy:
            seconds = max(seconds, busy + self.shared(self._started(choice)) + first + passes)
        return Estimate(chosen, max(seconds, least), peak, least)

    def shared(self, seconds: float) -> float:
        """Return the least seconds of work of all devices on the cores that they share; 0 if each has its own."""
        return seconds / self.cores if self.cores else 0.0

    def _busy(self, c: Choice, stages: Sequence[Cost]) -> float:
        """Return the seconds in which devices work, added up."""
        total = 0.0
        for k, stage in enumerate(stages):
            own = c.stage(k)
            update = self.update(own, stage) / own.chunks if own.swap == "none" else 0.0
            total += own.dp * own.tp * own.microbatches * stage.work
            total += own.copies * own.tp * (self.sums(own, stage) + update)
        return total

    def _started(self, c: Choice) -> float:
        """Return the seconds in which devices start messages between stages, at both ends, added up."""
        start = self.cluster.links.start("send", self.traffic.sent(c, c))
        return 4 * c.microbatches * (c.stages - 1) * c.dp * c.tp * start

    def least(self, c: Choice, is_work: bool = False) -> float:
        """Return the least seconds of the work of a plan, as if its devices were busy alike, by the least costs of its
        use. `is_work`: communication takes no time.
        """
        costs = self.menu.least(c.use)
        if costs is None:
            return 0.0
        total = total_of(costs, tuple(map(len, self.menu.runs)))
        # Each device has a share of what is outside of an interlaced pipeline's blocks.
        idle = 0.0 if c.schedule in ("interlaced", "chimera") else IDLE.get(c.schedule, 1.0 / c.chunks)
        works = ((c.microbatches - idle) / c.pp + idle) * max(total.work if is_work else total.seconds, total.host)
        return works + (self.sums(c, total) + float(self.update(c, total)) if c.pp == 1 else 0.0)

    def least_bytes(self, c: Choice) -> float:
        """Return the least bytes of the fullest device of a plan that saves memory, by the costs of one that does not:
        no activations are kept where some are recomputed, and none of the loss where that is in parts. Those of a use
        that was not measured are 0.
        """
        plain = replace(c, recompute="none", loss="whole", zero=min(c.zero, 1))
        costs = self.menu.known(plain.use)
        bounds = None if costs is None else self.cuts.best(plain)
        if costs is None or bounds is None:
            return 0.0
        least = costs._replace(beyond=NONE) if c.recompute == "none" else costs.unkept()
        stages = self.stage_costs(c, [least] * (len(bounds) - 1), bounds)
        return max(self.bytes_at(c, least, stages, device) for device in range(c.pp))

    def stage_costs(self, c: Choice, costs: Sequence[Costs], bounds: Sequence[int]) -> list[Cost]:
        """Return the costs of the stages: of their blocks, and of the rest. That is on the last one, and the weights of
        the embedding on the first; an interlaced pipeline has a share of it on each device.
        """
        stages = []
        for k, (own, (first, end)) in enumerate(zip(costs, pairwise(bounds), strict=True)):
            total = NOTHING
            for n, run in enumerate(own.runs):
                total = total.plus(run, int((self.run_of[first:end] == n).sum()))
            if c.schedule == "interlaced" or len(costs) == 1:
                stages.append(total.plus(own.rest, 1 / c.pp))
            else:
                stages.append(self.with_ends(total, own.rest, k, len(costs)))
        return stages

    def with_ends(self, blocks: Cost, rest: Cost, stage: int, stages: int) -> Cost:
        """Return the cost of the blocks of a stage, one of several, with what the first and the last have beside these.
        Costs may be arrays, of stages of all blocks.
        """
        if stage not in (0, stages - 1):
            return blocks
        is_last = stage > 0
        return blocks.plus(outside(rest, self.traffic.shares[is_last], is_last), 1)

    def _tails(self, c: Choice, costs: Costs) -> list[Any]:
        """Return the seconds of each stage of a plan after its last work, by first block and end."""
        inner = spans(costs, self.run_of)
        return [self.tail(c, self.with_ends(inner, costs.rest, k, c.pp)) for k in range(c.pp)]

    def tail(self, c: Choice, stage: Cost) -> Any:
        """Return the seconds of the update of a stage, and of the gradients that no work hides. Costs may be arrays, of
        stages of all blocks.
        """
        return self.update(c, stage) + self.traffic.exposed(c, stage) + stage.once

    def of_device(self, c: Choice, stages: Sequence[Cost], device: int) -> Sequence[Cost]:
        """Return the stages of a device of the pipeline."""
        if c.schedule == "zbv":
            return stages[device], stages[2 * c.pp - 1 - device]
        if c.schedule == "chimera":
            return [stages[k] for k in sorted((device, c.pp - 1 - device))]
        return stages[device :: c.pp]

    def update(self, c: Choice, stage: Cost) -> Any:
        """Return the seconds of a stage's update: over the links of the hosts, if the optimizer is there. Costs may be
        arrays, of stages of all blocks.
        """
        if c.swap != "none":
            moved = (stage.gradients + stage.weights) * c.chunks
            # It reads weights, gradients and state, and writes weights and state. That has copies of weights in halves.
            others = np.clip(2 * stage.weights - stage.gradients, 0.0, stage.gradients)
            updated = (stage.gradients + 2 * stage.optimizer + 2 * others) * c.chunks
            return np.maximum(moved / self.cluster.links.host.bandwidth, updated / HOST)
        return stage.update * c.chunks / (c.dp if c.zero else 1)

    def _steady(self, c: Choice, stages: Sequence[Cost], rest: float) -> tuple[float, float]:
        """Return the seconds in which the slowest device works, or waits for the others, and those after these in which
        a device of a V still works. `rest`: the seconds of what is outside of the blocks.
        """
        own = [self.of_device(c, stages, device) for device in range(c.pp)]
        devices = [reduce(lambda a, b: a.plus(b, 1), some) for some in own]
        works = [float(device.turn) / c.directions for device in devices]
        slowest, total = max(works), sum(works)
        if c.schedule == "interlaced":
            # All devices do their share of it at a time.
            total -= rest * (1 - 1 / c.pp)
        # Devices that wait for their hosts add gradients meanwhile.
        count, sums = c.microbatches, (sum(self.sums(c, stage) for stage in some) for some in own)
        busy = [count * device.seconds / c.directions + added for device, added in zip(devices, sums, strict=True)]
        if c.pp == 1:
            # Its first microbatch waits for the host, which may be in time later.
            busy[0] += stages[0].idle
        # 1F1B fills and drains once through all other stages.
        share = IDLE.get(c.schedule, 1.0 / c.chunks)
        pairs = ((max(count * work, least), share * (total - work)) for work, least in zip(works, busy, strict=True))
        spent, idle = max(pairs, key=sum)
        if c.schedule in IDLE:
            # Few microbatches cannot fill it: the first goes through all stages both ways before other backwards.
            idle = max(idle, (2 * total + (2 * count - 1) * stages[0].seconds) / 3 - count * slowest)
        if c.schedule == "chimera":
            # The first microbatch comes from the nearer end; a device waits for backwards where others have forwards.
            ahead = (sum(stage.seconds for stage in stages[: min(d, c.pp - 1 - d)]) for d in range(c.pp))
            late = 2 * backward_of(c)
            ends = (count * work + late * before for work, before in zip(works, ahead, strict=True))
            idle = max(*ends, total) - count * slowest
        # Of the last gradients, only those of the first device have nothing beside them.
        once = sum(stage.once for stage in own[0])
        step = spent + once + idle
        if c.schedule != "zbv":
            return step, 0.0
        # It waits for the forwards before its first. Other stages may have less of these, so that no bound has them.
        waits = ((1 - backward_of(c)) * sum(s.seconds for s in stages[:d]) for d in range(c.pp))
        return step, max(max(wait + end for wait, end in zip(waits, busy, strict=True)) + once - step, 0.0)

    def sums(self, c: Choice, stage: Cost) -> float:
        """Return the seconds in which the gradients of microbatches are added."""
        count = c.microbatches // c.directions
        return (stage.copied + (count - 1) * stage.added) / (c.dp if c.zero == 3 else 1) if count > 1 else 0.0

    def bytes_at(self, c: Choice, costs: Costs, stages: Sequence[Cost], device: int) -> float:
        """Return the bytes of a device of the pipeline at its peak: while it has most activations, at the end of its
        last backward, or in the update.
        """
        own, beyond, shards = self.of_device(c, stages, device), costs.beyond, c.dp if c.zero else 1
        weights = sum(stage.weights for stage in own) * (1 + 1 / shards if c.zero == 1 else 1 / shards)
        rest = weights + (sum(stage.optimizer for stage in own) / shards if c.swap == "none" else 0.0)
        gradients = sum(stage.gradients for stage in own) / (c.dp if c.zero == 3 else 1)
        # Those of one microbatch are divided at once.
        last = gradients / shards if c.zero == 1 and c.microbatches == 1 else gradients
        outer, again = beyond.outer / (c.pp if c.schedule == "interlaced" else 1), self._again(c, costs)
        works = [
            sum((a + again * b) * stage.kept for a, b, stage in zip(moment.alive, moment.between, own, strict=True))
            + (max(outer, beyond.inner) if moment.is_last else beyond.inner) + gradients * moment.has_gradients
            for moment in moments(c)[device]
        ]  # fmt: skip
        ends = last + max((run.kept for run in costs.runs), default=0.0) + beyond.inner
        # The numbers may be arrays, of stages of all blocks.
        peak = rest + reduce(np.maximum, [*works, ends, last + beyond.update / shards])
        return (1 + self.overheads.fragmentation) * peak + overhead(c, bool(beyond.added), self.overheads)

    def _again(self, c: Choice, costs: Costs) -> float:
        """Return the activations of blocks after they are computed again, in those that they keep until then."""
        plain = self.menu.known(c.use.plain) if c.recompute != "none" else None
        if plain is None:
            return 1.0
        kept, every = (sum(own.runs[n].kept for n in self.run_of) for own in (costs, plain))
        return every / kept if kept else 1.0
