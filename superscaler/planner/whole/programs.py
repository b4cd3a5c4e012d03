"""The plans that a search compiles whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from superscaler.certify.certificate import certify
from superscaler.cluster import Cluster
from superscaler.errors import PlanError
from superscaler.ir.graph import Graph
from superscaler.ir.model import Model
from superscaler.ir.parts import Block
from superscaler.ir.program import Program
from superscaler.launch.second import Job, Second
from superscaler.planner.menu import Menu, Pair
from superscaler.planner.orders.works import Works
from superscaler.planner.space import Choice, Use
from superscaler.planner.whole.lines import Whole, predicted
from superscaler.simulate.prediction import Prediction
from superscaler.simulate.system import System

# The works of a plan that is not compiled whole are those of a step of so many microbatches for each stage.
_FEW = 2


@dataclass(frozen=True)
class Found:
    """A plan that was compiled whole: its text, what it decides, its prediction, and its works if it is a pipeline."""

    spec: str
    choice: Choice
    prediction: Prediction
    works: Works | None = None

    @property
    def a_row(self) -> float:
        """Return the seconds of a step for each row of its batch."""
        return self.prediction.step_seconds / self.choice.batch


@dataclass
class Programs:
    """The plans that are compiled whole, the best first, and the program of the best, which alone gets a certificate;
    None if it was not compiled with all microbatches and blocks. `runs`: of equal blocks. `refused`: the plans that the
    model does not allow. `second`: compiles plans, too; `spare`: what is done while it does (`Second.result`).
    """

    graph: Graph
    cluster: Cluster
    memory: int | None
    system: System
    runs: Sequence[Sequence[Block]] = ()
    second: Second = field(default_factory=Second)
    found: list[Found] = field(default_factory=list)
    refused: set[Choice] = field(default_factory=set)
    best: Program | None = None
    spare: Callable[[], bool] = bool
    # Those of plans that were compiled ahead.
    _compiled: dict[Job, Program | None] = field(default_factory=dict)

    def compiled(
        self, choice: Choice, certified: bool = False, ahead: Callable[[], Iterable[Choice]] = tuple
    ) -> Found | None:
        """Return a plan that is compiled whole; None if the model does not allow it. `ahead`: what may be asked for
        next, which another process compiles meanwhile.
        """
        whole = self._whole(_job(choice, certified), ahead)
        if whole is None:
            self.refused.add(choice)
            return None
        self.found.append(found := Found(choice.spec, choice, whole.prediction, whole.works))
        self.found.sort(key=_order)
        self.best = whole.program if self.found[0] is found else self.best
        return found

    def works(self, choice: Choice, ahead: Iterable[Choice] = ()) -> Works | None:
        """Return the works of a plan, as they are in a step of few microbatches; None if it does not hold. `ahead`: see
        `compiled`.
        """
        few, *others = (replace(c, microbatches=min(c.microbatches, _FEW * c.pp)) for c in (choice, *ahead))
        whole = self._whole(_job(few), lambda: others)
        return whole and whole.works and whole.works.of(choice.microbatches)

    def _whole(self, job: Job, ahead: Callable[[], Iterable[Choice]]) -> Whole | None:
        whole: Whole | None = self.second.result(job, self._here, lambda: map(_job, ahead()), self.spare)
        return whole and whole._replace(program=self._compiled.pop(job, None))

    def _here(self, job: Job) -> Whole | None:
        whole = self.done(job)
        self._compiled[job] = whole and whole.program
        return whole and whole._replace(program=None)

    def done(self, job: Job) -> Whole | None:
        """Return a plan that is compiled whole; None if the model does not allow it."""
        certified = job.name == "certified"
        with suppress(PlanError):
            return predicted(self.graph, self.cluster, self.memory, self.system, job.of, certified, self.runs)
        return None

    def prediction(self, choice: Choice) -> Prediction | None:
        """Return the prediction of a plan that was compiled whole."""
        return next((f.prediction for f in self.found if f.choice == choice), None)

    def certify_ahead(self, others: Iterable[Choice] = ()) -> None:
        """Certify the best plan beside the second process, if it is to be compiled anew for that: here if that process
        has whole plans to compile, then these `others`, too.
        """
        if not self.found or self.best is not None or not self.found[0].prediction.fits:
            return
        job = _job(self.found[0].choice, certified=True)
        if self.second.is_busy and not self.second.has(job):
            self.second.fill("whole", lambda: map(_job, others))
            self.second.result(job, self._here, spare=self.spare)
        else:
            self.second.ask(job)

    def certify(self) -> None:
        """Certify the best plan. One that was not compiled with all microbatches and blocks, or whose microbatches do
        not repeat as they seemed to, is compiled anew with all of them, and has its place by that.
        """
        certain = set[Choice]()
        while self.found and (choice := self.found[0].choice) not in certain:
            certain.add(choice)
            with suppress(PlanError):
                if self.best is not None:
                    certify(self.best)
                    return
            self.best = None
            self.found.pop(0)
            self.compiled(choice, certified=True)


def _job(choice: Choice, certified: bool = False) -> Job:
    return Job("certified" if certified else "whole", choice)


def _order(f: Found) -> tuple[bool, float]:
    """Return a key: plans that fit come first, by the seconds of a row of the batch, others by their bytes."""
    return not f.prediction.fits, f.a_row if f.prediction.fits else f.prediction.fullest.peak_bytes


class Work:
    """The jobs of a search in a second process, on its own copy of the model."""

    # Torch loads it at the first graph.
    modules = ("torch._dynamo",)

    def __init__(self, model: Model, cluster: Cluster, memory: int | None, system: System) -> None:
        self.menu = Menu(Graph(model), cluster, system)
        self.programs = Programs(self.menu.graph, cluster, memory, system, self.menu.runs)

    def costs(self, use: Use) -> Pair | None:
        """Return the costs of a use on slow and on fast devices; None if the model does not allow it."""
        return self.menu.measured(use)

    def whole(self, choice: Choice) -> Whole | None:
        """Return a plan that is compiled whole, without its program; None if the model does not allow it."""
        found = self.programs.done(_job(choice))
        return found and found._replace(program=None)

    def certified(self, choice: Choice) -> Whole | None:
        """Return a plan that has a certificate, without its program; None if the model does not allow it."""
        found = self.programs.done(_job(choice, certified=True))
        return found and found._replace(program=None)
