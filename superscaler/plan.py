"""The public face: capture a training step, compile a plan for it, verify, save and load it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from superscaler.artifact import initial_values, write
from superscaler.certify.certificate import CHECKS, certify
from superscaler.cluster import Cluster
from superscaler.compiler import Compiled, SProgram, compile_graph
from superscaler.errors import InputError, PlanError, brief
from superscaler.frontend.base.captured import Captured
from superscaler.frontend.graphs import capture as capture
from superscaler.frontend.graphs import capture_named as capture_named
from superscaler.ir.graph import Graph
from superscaler.launch.process import say_once
from superscaler.materialize.joined.join import most_works
from superscaler.planner.auto import plan_of
from superscaler.recapture.evaluation import evaluated, refuse
from superscaler.recapture.shapes import Listed, Shape, compiled_at, listed, of_others, resized, sizes_of
from superscaler.report import words as explain
from superscaler.report.block_summary import account, summary
from superscaler.report.identity import manifest
from superscaler.report.journal import rows
from superscaler.report.page.write import save as save_pages
from superscaler.report.picture import save
from superscaler.report.subject import Subject, subject
from superscaler.runtime.load import load as load_step
from superscaler.runtime.shapes.forms import words
from superscaler.runtime.step import Step
from superscaler.simulate.memory import DeviceMemory
from superscaler.simulate.predict import fullest, memory_line, precision_of, predict
from superscaler.simulate.prediction import Prediction
from superscaler.simulate.system import PLAIN, System
from superscaler.specs.arguments import checked
from superscaler.store.folder import named_path
from superscaler.store.plan import remove_evaluation, remove_shapes
from superscaler.store.plan_head import EVALUATION, REFUSED_FILE, SHAPES, WEIGHTS_FILE
from superscaler.timing import phase
from superscaler.verify import verify
from superscaler.verify.plan_dir import known_directory


class Plan:
    """A compiled plan: one program per device that computes what the model computes.

    plan = ss.compile(graph, "data_parallel", "local:4")
    plan.verify()["equal"]; plan.simulate().step_seconds; plan.peak_bytes; print(plan.explain()); plan.save("plan")
    """

    def __init__(self, compiled: Compiled, sprogram: SProgram | None = None, shapes: Sequence[Listed] = ()) -> None:
        self.compiled = compiled
        self.sprogram, self.listed = sprogram, shapes
        self._certified = compiled.certified
        self._is_joined_certified = False

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase: `export` is torch's own, `certify` once done; `total` is their sum.

        The source is written when it is first read; `emit` is 0 until then.
        """
        phases = {**self.compiled.graph.captured.seconds, **self.compiled.seconds}
        if self._certified:
            phases["certify"] = sum(self._certified.values())
        return {**phases, "total": sum(phases.values())}

    @cached_property
    def counts(self) -> dict[str, int]:
        return self.compiled.counts

    @cached_property
    def others(self) -> tuple[Plan, ...]:
        """Return the plans of the other listed shapes, captured and compiled when this is first read. Raises InputError
        for one that the module does not take or the plan does not divide, or where weights would rest in other pieces.
        """
        if not self.listed or self.sprogram is None:
            return ()
        return tuple(Plan(one, self.sprogram) for one in compiled_at(self.compiled, self.listed, self.sprogram))

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs, by name."""
        return sizes_of(self.compiled.graph.model)

    @property
    def trains(self) -> bool:
        """Return whether the plan trains; an inference plan only computes the module's outputs."""
        return bool(self.compiled.graph.model.loss)

    def validate(self) -> dict[str, Any]:
        """Certify the whole program, and that of compiled steps: conservation and deadlock freedom; and check that the
        emitted code does what the programs say. Raises ScheduleError or TranslationError if it does not hold.

        `compiled_works`: the most forwards and backwards of a device in a compiled step; `works`: in another one.
        """
        self.certify()
        plain, joined = self.compiled, self.compiled.joined
        if joined is not plain and not self._is_joined_certified:
            with phase("certify"):
                certify(joined.program)
            _, self._is_joined_certified = joined.emitted, True
        for one in self.others:
            one.validate()
        works = {"works": most_works(plain.program), "compiled_works": most_works(joined.program)}
        return {**dict.fromkeys(CHECKS, True), **self.counts, **works}

    def certify(self) -> None:
        """Certify the program and check its code, once."""
        if not self._certified:
            with phase("certify"):
                self._certified = certify(self.compiled.program)
        _ = self.compiled.emitted

    def verify(
        self,
        backend: str = "threads",
        batch: Mapping[str, torch.Tensor] | None = None,
        shapes: str = "auto",
        torch_compile: bool = False,
    ) -> dict[str, Any]:
        """Compare two steps with the model, in float64 and as trained; see `superscaler.verify.run`.

        The programs of other shapes are compared with it too: `other_shapes` has the result of each.
        """
        with phase("verify"):
            found = verify(self.compiled, backend, batch, shapes, torch_compile)
        for one in self.others:
            given = None if batch is None else {n: resized(x, one.sizes[n]) for n, x in batch.items()}
            own, at = one.verify(backend, given, shapes, torch_compile), words(one.sizes)
            found["other_shapes"] = {**found.get("other_shapes", {}), at: own}
            if found["equal"] and not own["equal"]:
                found |= {"equal": False, "first_difference": f"at the shape {at}: {own['first_difference']}"}
        return found

    @checked
    def save(self, directory: str | Path, seed: int = 0, evaluation: Plan | bool = True) -> bool:
        """Certify the plan and write it with the initial weights into a directory. `torchrun .../run.py` trains it.

        `evaluation`: what `step.evaluate` and `step.infer` run: the captured module in eval mode, which is captured and
        compiled now (True), nothing (False), or another plan for the same cluster. Returns False, and writes nothing,
        if the directory holds the same plan already. Raises InputError for a directory that holds something else than
        a plan.
        """
        folder = named_path("save", directory)
        is_new = self._write(folder, seed)
        own = self._in_eval_mode() if evaluation is True else evaluation
        if not isinstance(own, Plan) or (folder / EVALUATION / REFUSED_FILE).exists():
            remove_evaluation(folder)
        if isinstance(own, str):
            refuse(folder, own)
        return (isinstance(own, Plan) and own._write(folder / EVALUATION, seed, folder / WEIGHTS_FILE)) or is_new

    def _in_eval_mode(self) -> Plan | str | None:
        """Return the plan of the captured module in eval mode, a text that says why there is none, or None if nothing
        is trained.
        """
        if not self.trains or self.sprogram is None:
            return None
        try:
            return evaluation_of(self.compiled.graph.captured, self.sprogram, self.compiled.cluster, self.listed)
        except InputError as error:
            return str(error)

    def _write(self, folder: Path, seed: int, weights: Path | None = None, is_shape: bool = False) -> bool:
        """Certify the plan and write it, with those of its other shapes. `weights`: a file that may have its weights
        already. `is_shape`: it is of another shape, and has no weights of its own.
        """
        self.validate()
        model = self.compiled.graph.model
        with phase("save"):
            values = initial_values(model, self.compiled.graph.captured.values, seed)
            is_new = write(self.compiled, folder, values, seed, weights, is_shape)
        if not is_shape:
            written = [one.write_shape(folder, number, seed) for number, one in enumerate(self.others)]
            is_new = is_new or any(written)
            remove_shapes(folder, len(self.others))
        return is_new

    def write_shape(self, folder: Path, number: int, seed: int) -> bool:
        """Write the plan into the directory of the one whose weights it shares, as that of a further shape."""
        return self._write(folder / SHAPES / str(number), seed, is_shape=True)

    @checked
    def simulate(self, capacity: int | None = None, system: System = PLAIN) -> Prediction:
        """Return the predicted seconds and bytes of a step. `capacity`: bytes of a device, in place of the cluster's.
        `system`: how the step is loaded, and what differs in the system that runs it: `ss.System(torch_compile=True)`.

        Raises InputError if the speeds of the cluster's devices are unknown, and if no CUDA graph replays the step.
        """
        with phase("simulate"):
            return predict(self.compiled.program, self.compiled.cluster, capacity, system)

    @property
    def precision(self) -> str:
        """Return the dtypes of most products and of most weights, in words."""
        return precision_of(self.compiled.graph.model)

    def memory(self) -> str:
        """Return the predicted memory of the plan in one line, and whether the cluster's devices have it."""
        plan = self._largest
        compiled, found = plan.compiled, plan._fullest
        line = found if isinstance(found, str) else memory_line(found, compiled.program, compiled.cluster)
        return f"{line}, at the shape {words(plan.sizes)}" if self.others else line

    @property
    def peak_bytes(self) -> int:
        """Return the predicted peak bytes of tensors on the fullest device; 0 if no prediction is possible. Of several
        shapes it is that of the largest.
        """
        found = self._largest._fullest
        return 0 if isinstance(found, str) else found.peak

    @property
    def _largest(self) -> Plan:
        """Return the plan of the shape that needs most memory."""
        return max((self, *self.others), key=lambda plan: 0 if isinstance(plan._fullest, str) else plan._fullest.peak)

    @cached_property
    def _fullest(self) -> DeviceMemory | str:
        try:
            with phase("memory"):
                return fullest(self.compiled.program, self.compiled.cluster)
        except Exception as error:
            # An operator of a user may not run on tensors without data. The plan holds all the same.
            return f"memory: not predicted ({brief(error)})"

    def explain(self) -> str:
        """Return the plan in words: splits, weights and communication of each block; the order; the totals."""
        return explain.words(self._account)

    def draw(self, path: str | Path) -> None:
        """Draw the timeline of a predicted step, and the exchanges that take several steps, into an SVG file."""
        save(self._subject, named_path("draw", path))

    def report(self, path: str | Path) -> None:
        """Write a page about the plan, which a browser opens offline (docs/report.md)."""
        file = named_path("report", path)
        save_pages([self._subject], file)

    @cached_property
    def _subject(self) -> Subject:
        self.certify()
        compiled, journal = self.compiled, rows(self.compiled.graph.journal)
        title = f"{compiled.program.world} devices of {compiled.cluster.name}"
        return subject(title, compiled.program, compiled.cluster, self._account, journal, self._certified)

    @checked
    def diff(self, other: Plan) -> str:
        """Return the differences between this plan and another, empty if they are equal."""
        return "\n".join(explain.difference(self._account, other._account))

    @cached_property
    def _account(self) -> dict[str, Any]:
        values = self.compiled.graph.captured.values
        return {"manifest": manifest(self.compiled, values), "seed": 0, **account(self.compiled)}

    def summary(self) -> str:
        """Return one line per distinct program: its devices, its segments, its communication per step."""
        return summary(self.compiled)


def evaluation_of(captured: Captured, sprogram: SProgram, cluster: Cluster, shapes: Sequence[Listed]) -> Plan:
    """Return the plan of a captured module in eval mode, with the shapes that it has among some. Raises InputError with
    the reason if there is none.
    """
    compiled, own = evaluated(captured, sprogram, cluster)
    plan = Plan(compiled, own, of_others(compiled.graph.model, shapes))
    try:
        _ = plan.others
    except PlanError as error:
        logging.getLogger(__name__).warning("evaluation has the shape %s only: %s", words(plan.sizes), error)
        return Plan(compiled, own)
    return plan


def save_evaluation(
    graph: Graph, sprogram: SProgram, cluster: Cluster, directory: Path, seed: int, shapes: Sequence[Listed] = ()
) -> None:
    """Write the plan of a captured module in eval mode into the plan directory of the trained one, as `Plan.save` does.
    Raises InputError with the reason if there is none.
    """
    own = evaluation_of(graph.captured, sprogram, cluster, shapes)
    if (directory / EVALUATION / REFUSED_FILE).exists():
        remove_evaluation(directory)
    own._write(directory / EVALUATION, seed, directory / WEIGHTS_FILE)


def compile(graph: Graph, sprogram: SProgram | str, cluster: Cluster | str, shapes: Iterable[Shape] = ()) -> Plan:
    """Return the plan of a copy of the graph under an sProgram.

    Both arguments may also be texts of the command line: "hybrid:dp=2,tp=2" or "auto", and "local:4". `shapes`: other
    shapes of batches, each a length (512), rows and a length ((8, 512)), or a shape or an example by input; the step
    has a program for each, over the same weights.

    Raises TransformError for a cut that cannot be made, ScheduleError for an order in which devices wait for each
    other, InputError for an unknown plan, option or cluster: each a PlanError.
    """
    program = plan_of(sprogram) if isinstance(sprogram, str) else sprogram
    devices = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(graph, Graph):
        raise InputError(f"compile needs the graph that ss.capture returns, not {type(graph).__name__}; capture it.")
    if not callable(program) or isinstance(program, type):
        raise InputError(
            f"compile needs an sProgram, not {brief(repr(program))}; give a function of a graph and a cluster, or text "
            "as 'data_parallel'."
        )
    if not isinstance(devices, Cluster):
        raise InputError(f"compile needs a Cluster, not {brief(repr(devices))}; give text as 'local:4'.")
    others = listed(graph.captured, shapes)
    return Plan(compile_graph(graph, program, devices), program, others)


@checked
def load(directory: str | Path, manifest: bool = True, torch_compile: bool = False, cuda_graph: bool = False) -> Step:
    """Return this rank's step of a saved plan. Rank and world come from torchrun's environment (alone: rank 0 of 1).

    `manifest=False` skips the hashes: it runs an edited plan. With `torch_compile` segments are as long as the plan
    allows, and each is compiled by torch's Inductor when it first runs; results then differ by rounding. With
    `cuda_graph` the third step is captured as a CUDA graph, and replayed from then on. Raises InputError for a
    directory that is damaged, of another version, or edited, and where no CUDA graph can replay its steps.
    """
    step = load_step(directory, manifest, torch_compile, cuda_graph)
    step.known = lambda form: known_directory(form.directory or Path(directory))
    if step.watch is not None:
        say_once(step.watch.is_first_to_fail)
    return step


__all__ = ["Plan", "Step", "capture", "compile", "load"]
