"""The plans that a search compiles whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from superscaler.certify.certificate import certify
from superscaler.cluster import Cluster
from superscaler.compiler import compile_graph
from superscaler.errors import PlanError
from superscaler.ir.graph import Graph
from superscaler.ir.program import Program
from superscaler.planner.kinds import of_batch
from superscaler.planner.space import Choice
from superscaler.plans import resolve
from superscaler.simulate.predict import predict
from superscaler.simulate.prediction import Prediction


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
    """The plans that are compiled whole, the best first, and the program of the best: it alone gets a certificate."""

    graph: Graph
    cluster: Cluster
    memory: int | None
    torch_compile: bool
    found: list[Found] = field(default_factory=list)
    best: Program | None = None

    def compiled(self, choice: Choice, certified: bool = False) -> Found | None:
        """Return a plan that is compiled whole; None if the model does not allow it."""
        try:
            graph, plan = of_batch(self.graph, choice.batch), resolve(choice.spec)
            program = compile_graph(graph, plan, self.cluster, certified).program
            found = Found(choice.spec, choice, predict(program, self.cluster, self.memory, self.torch_compile))
        except PlanError:
            return None
        self.found.append(found)
        self.found.sort(key=_order)
        self.best = program if self.found[0] is found else self.best
        return found

    def prediction(self, choice: Choice) -> Prediction | None:
        """Return the prediction of a plan that was compiled whole."""
        return next((f.prediction for f in self.found if f.choice == choice), None)

    def certify(self) -> None:
        """Certify the best plan. One whose microbatches do not repeat as they seemed to is compiled anew, with all of
        them, and has its place by that.
        """
        assert self.best is not None
        try:
            certify(self.best)
        except PlanError:
            self.compiled(self.found.pop(0).choice, certified=True)


def _order(f: Found) -> tuple[bool, float]:
    """Return a key: plans that fit come first, by the seconds of a row of the batch, others by their bytes."""
    return not f.prediction.fits, f.a_row if f.prediction.fits else f.prediction.fullest.peak_bytes
