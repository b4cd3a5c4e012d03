"""The menu: what a block of each kind, and what is outside of the blocks, takes on the devices of a stage.

The model with one block of each run, and with one more of a run, or without the only one of a run, is compiled with the
real verbs and simulated. Differences are the seconds and the bytes of a block. They are kept on disk: a model is not
measured again on more or fewer servers, or under other constraints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch

from superscaler.cluster import Cluster
from superscaler.cluster.links import Link
from superscaler.compiler import compile_graph
from superscaler.errors import PlanError, ScheduleError
from superscaler.ir.graph import Graph
from superscaler.ir.program import Program
from superscaler.ir.text.model import print_model
from superscaler.launch.second import Job, Second
from superscaler.planner.costs import Cost, Costs, between, differences, is_busy
from superscaler.planner.kinds import bypass, has_own, reduced, runs
from superscaler.planner.memory import Beyond, beyond
from superscaler.planner.small import ALL, costs_of
from superscaler.planner.space import BY_SEQUENCE, SPLIT, Choice, Use
from superscaler.plans import resolve
from superscaler.plans.lib.shared import batch_of, inner_blocks
from superscaler.simulate.predict import share_of, simulate, unshared
from superscaler.simulate.system import PLAIN, System
from superscaler.store import cache

# The rows of the microbatches that are measured. Where kernels, not their starts, take the time of these, costs of
# others are on the line through those of few and many, and what saves memory changes them in the same ratio.
_FEW, _MANY, _MOST = 1, 4, 16
# The seconds of more rows in those on the line, at least: large products are a little faster.
_LARGER = 0.96
# A link that takes no time.
_FREE = Link(0.0, 1e30)
# The costs of a use on slow devices, and on fast ones.
Pair = tuple[Costs, Costs]
# The least seconds of rows that were not measured, in those on the line through few and many; those of all devices of a
# group, in those of a smaller one.
_LEAST_OF_ROWS, _LEAST_OF_GROUPS = 0.85, 0.98
# So many uses that come next, and are not measured, are looked at.
_NEAR = 8


class Small(NamedTuple):
    """A small model: its cost on slow devices, and on fast ones, and its bytes beyond weights."""

    slow: Cost
    fast: Cost
    beyond: Beyond


class _LackingError(Exception):
    """Uses are not measured."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self.jobs = jobs


class Menu:
    """The costs of uses, each measured when it is first asked for. `second`: measures, too."""

    def __init__(self, graph: Graph, cluster: Cluster, system: System = PLAIN, second: Second | None = None) -> None:
        self.graph, self.cluster, self.system = graph, cluster, system
        self.second = second or Second()
        # The plans that come next, as far as that is known: those whose uses are not measured, and the rest.
        self._near, self._ahead = list[Choice](), iter(list[Choice]())
        self._could: Callable[[Choice], bool] = bool
        self._is_asking = False
        self.runs = runs(graph)
        self.key = self._content()
        # Of slow devices, and of fast ones.
        self._measured: dict[Use, Pair | None] = self._stored()
        self._count, self._known = len(self._measured), dict[Use, Costs | None]()
        self._least = dict[Use, Costs | None]()

    @property
    def batch(self) -> int:
        """Return the rows of the batch."""
        return batch_of(self.graph)

    @cached_property
    def coupling(self) -> str:
        """Return why no microbatch of a step can have its backward before the next one's forward; "" if it can: a
        mixture whose loss balances experts over the batch reads all of them.
        """
        graph = reduced(self.graph, self.runs, [1 for _ in self.runs], 2)
        try:
            compile_graph(graph, resolve(Choice(1, 1, 1, 1, 2).spec), Cluster.parse("local:1"), certified=False)
        except ScheduleError as error:
            return str(error).partition(", but ")[0]
        return ""

    def sizes(self) -> list[int]:
        """Return the number of blocks, as `blocks=` of a pipeline counts them, in each block of the runs."""
        counted = [block.ops[0].name for block in inner_blocks(self.graph)]
        names = ({op.name for op in block.ops} for block in chain.from_iterable(self.runs))
        return [sum(name in own for name in counted) for own in names]

    def costs(self, use: Use) -> Costs | None:
        """Return the costs of a use; None if the model does not allow it."""
        if use not in self._known:
            self._known[use] = self._plain(use) if use == use.plain else self._variant(use)
            self._least.clear()
        return self._known[use]

    def known(self, use: Use) -> Costs | None:
        """Return the costs of a use if they were asked for before."""
        return self._known.get(use)

    def begin(self, use: Use) -> None:
        """Measure few and many rows of a use that saves no memory, by which the least costs of others are known."""
        for rows in (_FEW, _MANY):
            self.costs(use.plain._replace(rows=rows))

    def least(self, use: Use) -> Costs | None:
        """Return the costs of a use if they were asked for; else costs that they are not below, by those of fewer rows,
        of smaller groups, and of what saves no memory. None if nothing is known.
        """
        if use not in self._least:
            known = self.known(use)
            lower = self._below(use) if known is None and use not in self._known else known
            # Costs at hand may be known now.
            self._least[use] = self._known.get(use, lower)
        return self._least[use]

    def _below(self, use: Use) -> Costs | None:
        if use != use.plain:
            plain = self.least(use.plain)
            return plain and plain.unkept()
        few, many = (self._at_hand(use._replace(rows=rows)) for rows in (_FEW, _MANY))
        if few and many:
            return few.towards(many, (use.rows - _FEW) / (_MANY - _FEW)).least(_LEAST_OF_ROWS)
        if use.tp == 1 or use.layout not in SPLIT:
            return None
        tp = next(n for n in range(use.tp // 2, 0, -1) if use.tp % n == 0)
        group = self.least(use._replace(tp=tp, layout=use.layout if tp > 1 else "tensor"))
        return group and group.least(_LEAST_OF_GROUPS * tp / use.tp)

    def holds(self, use: Use) -> bool:
        """Return whether the model allows a use."""
        try:
            self._compiled(use, [1 for _ in self.runs])
        except PlanError:
            return False
        return True

    def _plain(self, use: Use) -> Costs | None:
        few, many = self._owns(use, _FEW, _MANY)
        if few is None or many is None:
            # One row cannot be divided among experts.
            return None if use.rows == _FEW else self._own(use)
        if use.rows in (_FEW, _MANY) or not is_busy(few, many):
            return self._between(use)
        found = few.towards(many, (use.rows - _FEW) / (_MANY - _FEW))
        return found if use.rows < _MANY else found.faster(_LARGER).of_rows(many, use.rows / _MANY)

    def _variant(self, use: Use) -> Costs | None:
        """Return the costs of a use that saves memory: those of a plainer one, changed as with some rows. That is the
        same without gathered weights, if it has these.
        """
        plainer = use._replace(is_gathered=False) if use.is_gathered else use.plain
        plain, few, many = (self.costs(plainer._replace(rows=rows)) for rows in (use.rows, _FEW, _MANY))
        if plain is None or many is None:
            return None
        if few is not None and is_busy(few, many):
            own = self._own(use._replace(rows=_MANY))
            return self._own(use) if own is None else plain.changed(many, own, use.is_gathered)
        own = self._between(use)
        return own if own is None or not use.is_gathered else plain.changed(plain, own, is_added=True)

    def _between(self, use: Use) -> Costs | None:
        """Return the costs of a use where kernels are too short to make a line of few rows."""
        if use.rows <= _MANY:
            return self._own(use)
        less, more = self._owns(use, _MANY, _MOST)
        if less is None or more is None:
            # So many parts of a loss need as many rows.
            return self._own(use)
        return less.towards(more, (use.rows - _MANY) / (_MOST - _MANY))

    def _owns(self, use: Use, *rows: int) -> list[Costs | None]:
        """Return the costs of a use with several rows."""
        found, lacking = list[Costs | None](), list[Job]()
        for n in rows:
            try:
                found.append(self._own(use._replace(rows=n)))
            except _LackingError as error:
                lacking += error.jobs
        if lacking:
            raise _LackingError(lacking)
        return found

    def _own(self, use: Use) -> Costs | None:
        if use.layout in BY_SEQUENCE and any(
            found is None and (known.tp, known.layout) == (use.tp, use.layout)
            for known, found in self._measured.items()
        ):
            # The model cannot be cut so, whatever else is done.
            return None
        if use not in self._measured:
            self._measured[use] = self._shared(Job("costs", use, is_short=True))
        found = self._measured[use]
        return None if found is None else between(*found, share_of(self.cluster))

    def _shared(self, job: Job) -> Pair | None:
        """Return the costs of a use, measured here or by the second process."""
        if self._is_asking and not self.second.has_done(job):
            raise _LackingError([job])
        found: Pair | None = self.second.result(job, lambda job: self.measured(job.of), self._lacking)
        return found

    def look(self, ahead: Iterable[Choice], could: Callable[[Choice], bool] = bool) -> None:
        """Take plans whose costs will be asked for, for the second process. `could`: whether they will, by then."""
        self._ahead, self._near, self._could = iter(ahead), [], could
        self.second.take_back()
        self.fill()

    def fill(self) -> None:
        """Give the second process work."""
        self.second.fill("costs", self._lacking)

    def _lacking(self) -> list[Job]:
        """Return the jobs that plans which come next need, one of each use."""
        found = dict[Use, tuple[Choice, Sequence[Job]]]()
        for c in chain(self._near, self._ahead):
            if c.use not in found and self._could(c) and (jobs := self._lack(c.use)):
                found[c.use] = c, jobs
            if len(found) == _NEAR:
                break
        self._near = [c for c, _ in found.values()]
        return [job for _, jobs in found.values() for job in jobs]

    def _at_hand(self, use: Use) -> Costs | None:
        """Return the costs of a use if nothing is to be measured for that."""
        return None if self._lack(use) else self._known[use]

    def _lack(self, use: Use) -> Sequence[Job]:
        """Return the first jobs that a use needs; none if its costs are known."""
        self._is_asking = True
        try:
            self.costs(use)
        except _LackingError as error:
            return error.jobs
        finally:
            self._is_asking = False
        return ()

    def measured(self, use: Use) -> Pair | None:
        """Return the costs of a use on the slowest devices of the kind, and on the fastest."""
        count = range(len(self.runs))
        try:
            base = self._simulated(use, [1 for _ in count])
            pairs = [self._beside(use, n, base) for n in count]
        except PlanError:
            return None
        held = [base.beyond, *(more.beyond for more, _ in pairs)]
        slow = differences(base.slow, [(more.slow, less.slow) for more, less in pairs], held)
        return slow, differences(base.fast, [(more.fast, less.fast) for more, less in pairs], held)

    def _beside(self, use: Use, run: int, base: Small) -> tuple[Small, Small]:
        """Return the costs of two small models that differ in a block of a run; `base` has one block of each. A block
        that no model can be without is a part of the rest, and costs nothing by itself.
        """
        if len(self.runs[run]) > 1:
            return self._simulated(use, [1 + (n == run) for n in range(len(self.runs))]), base
        return base, self._without(use, run) or base

    def _without(self, use: Use, run: int) -> Small | None:
        """Return the costs of a small model without the only block of a run; None if it needs the block."""
        if len(self.runs) == 1 or bypass(self.graph.model, self.runs[run][0]) is None:
            return None
        with suppress(PlanError):
            return self._simulated(use, [int(n != run) for n in range(len(self.runs))])
        return None

    def _simulated(self, use: Use, counts: Sequence[int]) -> Small:
        program, cluster, several = self._compiled(use, counts)
        found = simulate(program, cluster, None, self.system, among=ALL)
        inside = {op.name for run in self.runs for block in run for op in block.ops}
        return Small(*costs_of(found, inside, several, self.system), beyond(found, inside, use.is_gathered))

    def _compiled(self, use: Use, counts: Sequence[int]) -> tuple[Program, Cluster, int]:
        """Return the program of a small model, its cluster, and the microbatches of its step."""
        dp = 1 + use.is_gathered
        # The gradients of all weights are on the way beside the backward of the last microbatch, not of the first.
        several = 2 if use.layout in BY_SEQUENCE and not (use.is_gathered or self.coupling) else 1
        graph, links = reduced(self.graph, self.runs, counts, dp * use.rows * several), self.cluster.links
        devices = type(self.cluster.devices)([*self.cluster.devices][: dp * use.tp])
        if use.is_gathered:
            # Their communication has its place in the estimate.
            links = replace(links, pair=_FREE, intra=_FREE, network=_FREE, curves={}, starts={})
        per_server = min(dp * use.tp, self.cluster.devices_per_server)
        # So has the sharing of cores.
        kind = unshared(self.cluster)
        cluster = replace(self.cluster, devices=devices, devices_per_server=per_server, links=links, device_kind=kind)
        zero = 3 if use.is_gathered else 0
        spec = Choice(dp, use.tp, 1, use.rows, several, use.layout, use.recompute, zero, loss=use.loss).spec
        return compile_graph(graph, resolve(spec), cluster, certified=False).program, cluster, several

    def _content(self) -> str:
        """Return the hash of all that costs depend on; "" with operators of the user."""
        if has_own(self.graph):
            return ""
        small = reduced(self.graph, self.runs, [min(len(run), 2) for run in self.runs], 1).model
        kind, links, per_server = self.cluster.device_kind, self.cluster.links, self.cluster.devices_per_server
        seen = [print_model(small), kind, links, per_server, self.cluster.kind, self.system]
        return hashlib.sha256(repr([*seen, torch.__version__, cache.sources(), "menu"]).encode()).hexdigest()

    def _stored(self) -> dict[Use, Pair | None]:
        data = cache.read(self.key) if self.key else None
        return {} if data is None else {Use(*use): _read(pair) for use, pair in json.loads(data)}

    def keep(self) -> None:
        """Write the costs that were measured to the disk, with those that another process measured."""
        if self.key and len(self._measured) > self._count:
            self._measured = {**self._stored(), **self._measured}
            cache.write(self.key, json.dumps([*self._measured.items()]).encode())
            self._count = len(self._measured)


def _read(pair: Any) -> Pair | None:
    if pair is None:
        return None
    slow, fast = (Costs(tuple(Cost(*cost) for cost in runs), Cost(*rest), Beyond(*held)) for runs, rest, held in pair)
    return slow, fast
