"""The plans that a search compiles whole."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from superscaler.certify.certificate import certify
from superscaler.cluster import Cluster
from superscaler.errors import PlanError
from superscaler.ir.graph import Graph
from superscaler.ir.parts import Block
from superscaler.ir.program import Program
from superscaler.planner.space import Choice
from superscaler.planner.whole import predicted
from superscaler.simulate.prediction import Prediction
from superscaler.simulate.system import System


@dataclass(frozen=True)
class Found:
    """A plan that was compiled whole: its text, what it decides, and its prediction."""

    spec: str
    choice: Choice
    prediction: Prediction

    @property
    def a_row(self) -> float:
        """Return the seconds of a step for each row of its batch."""
        return self.prediction.step_seconds / self.choice.batch


@dataclass
class Programs:
    """The plans that are compiled whole, the best first, and the program of the best, which alone gets a certificate;
    None if it was not compiled with all microbatches and blocks. `runs`: of equal blocks. `refused`: the plans that the
    model does not allow.
    """

    graph: Graph
    cluster: Cluster
    memory: int | None
    system: System
    runs: Sequence[Sequence[Block]] = ()
    found: list[Found] = field(default_factory=list)
    refused: set[Choice] = field(default_factory=set)
    best: Program | None = None

    def compiled(self, choice: Choice, certified: bool = False) -> Found | None:
        """Return a plan that is compiled whole; None if the model does not allow it."""
        way = self.memory, self.system, choice, certified, self.runs
        try:
            prediction, program = predicted(self.graph, self.cluster, *way)
        except PlanError:
            self.refused.add(choice)
            return None
        self.found.append(found := Found(choice.spec, choice, prediction))
        self.found.sort(key=_order)
        self.best = program if self.found[0] is found else self.best
        return found

    def prediction(self, choice: Choice) -> Prediction | None:
        """Return the prediction of a plan that was compiled whole."""
        return next((f.prediction for f in self.found if f.choice == choice), None)

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


def _order(f: Found) -> tuple[bool, float]:
    """Return a key: plans that fit come first, by the seconds of a row of the batch, others by their bytes."""
    return not f.prediction.fits, f.a_row if f.prediction.fits else f.prediction.fullest.peak_bytes
