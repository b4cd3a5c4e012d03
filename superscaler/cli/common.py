"""Requests of the commands that take a model or a plan: from text to both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from superscaler.cli.options import completion
from superscaler.cli.options.declare import option
from superscaler.cli.options.lengths import read_mixture
from superscaler.cli.printing import Printer
from superscaler.errors import InputError, unknown
from superscaler.specs.options import FULL, HALVES, OPTIMIZERS
from superscaler.timing import phase

if TYPE_CHECKING:
    from superscaler.cluster import Cluster
    from superscaler.models import BuiltModel
    from superscaler.plan import Plan
    from superscaler.simulate.system import System
    from superscaler.verbs import Graph


# The optimizer of a model that is not trained.
_NONE = "none"


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A model to capture, as text. Its fields are options of the commands that take one."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=completion.models,
            help="NAME[:key=value,...] of `superscaler models`, or FILE.py:FUNCTION[:key=value,...], which returns "
            "(module, args) or (module, args, kwargs)",
        ),
    ]
    optimizer: Annotated[
        str | None,
        option(
            "--optimizer",
            "adamw (default where MODEL gives a loss), adam, sgd, adadelta, adagrad, adamax, asgd, nadam, radam, "
            "rmsprop, rprop, muon (weights are matrices); none: inference, nothing is trained; FILE.py:FUNCTION that "
            "takes the module and --lr, and returns one, or several that share the parameters out.",
            completion=completion.optimizers,
        ),
    ] = None
    lr: Annotated[float, option("--lr", "Learning rate of the optimizer.")] = 1e-3
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the optimizer, as weight_decay=0.1; repeatable."),
    ] = None
    autocast: Annotated[
        str | None, option("--autocast", "bf16, or fp16 with loss scaling; weights keep their dtype.", "NAME")
    ] = None
    precision: Annotated[
        str | None,
        option(
            "--precision",
            "bf16, or fp16 with loss scaling: of the weights, whose updates are float32; fp32: as they are. Default: "
            "that of the fastest products where --cluster names GPUs, else fp32.",
            "NAME",
        ),
    ] = None
    no_cache: Annotated[bool, option("--no-cache", "Capture anew, and keep nothing of it on disk.")] = False

    no_check: Annotated[bool, option("--no-check", "Do not compare two steps of the module with the graph.")] = False

    def check(self) -> None:
        """Raise InputError for an unknown optimizer, autocast or precision, for autocast and precision together, or a
        learning rate that is not a positive number.
        """
        for kind, name, known in (
            ("autocast", self.autocast, [*HALVES]),
            ("precision", self.precision, [*HALVES, FULL]),
        ):
            if name is not None and name not in known:
                raise InputError(unknown(kind, name, known))
        if self.autocast and self.precision in HALVES:
            raise InputError(
                "--autocast and --precision exclude each other: autocast casts float32 weights in the graph, precision "
                "has 16-bit weights with float32 copies; give one of them."
            )
        name = self.optimizer or "adamw"
        is_own = ".py:" in name
        if name not in (*OPTIMIZERS, _NONE) and not is_own:
            text = unknown("optimizer", name, (*OPTIMIZERS, _NONE))
            raise InputError(f"{text} Or give a file: path/to/file.py:function.")
        if self.options and (is_own or name == _NONE):
            why = f"{name}; give it keys, as {name}:key=value" if is_own else "none"
            raise InputError(
                f"--set {self.options[0]} is an option of an optimizer of torch, but --optimizer is {why}."
            )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"--lr is {self.lr}, but a learning rate is a finite number above 0.")

    def on(self, cluster: Cluster) -> Self:
        """Return the request in the precision of a cluster, unless it asks for one."""
        return self if self.precision or self.autocast else replace(self, precision=cluster.precision)

    def capture(self) -> tuple[Graph, BuiltModel]:
        """Build and capture the model with an optimizer over its trained parameters, for fp16 with a default scaler.

        Inference is captured on request, and for a model that has no such parameter, or no loss.
        """
        self.check()
        with phase("import"):
            import torch

            import superscaler.plan  # noqa: F401
            from superscaler.frontend.base.results import NoLossError
            from superscaler.models import build

        with phase("model"):
            built = build(self.model)
        captured = self._captured(built)
        parameters = [p for p in built.module.parameters() if p.requires_grad]
        if not parameters and self.optimizer not in (None, _NONE):
            raise InputError(
                f"model '{built.name}' has no parameter that requires a gradient, so there is nothing to train; "
                "leave --optimizer out for inference."
            )
        if parameters and self.optimizer != _NONE:
            scaler = torch.amp.GradScaler("cpu") if "fp16" in (self.autocast, self.precision) else None
            try:
                return captured(self._optimizer(built, parameters), scaler=scaler), built
            except NoLossError:
                if self.optimizer is not None:
                    raise
        return captured(None), built

    def _optimizer(self, built: BuiltModel, parameters: Sequence[Any]) -> Any:
        """Return torch's optimizer of a name over parameters, or the result of a file's function for the module."""
        from superscaler.frontend.base.training import named_optimizer
        from superscaler.specs.user_file import from_file

        name = self.optimizer or "adamw"
        if ".py:" in name:
            return from_file(name, "optimizer", ("module", "lr"), is_new=False)(built.module, self.lr)
        return named_optimizer(name, parameters, self.lr, self.options or ())

    def _captured(self, built: BuiltModel) -> Callable[..., Graph]:
        """Return a function that captures a built model with an optimizer."""
        from superscaler.plan import capture, capture_named

        # Only its author knows what a model of a file depends on.
        is_kept = built.is_named and not self.no_cache
        return partial(
            partial(capture_named, built.name) if is_kept else capture, built.module, built.args, built.kwargs,
            autocast=self.autocast, precision=None if self.precision == FULL else self.precision,
            check=not self.no_check,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlanRequest(ModelRequest):
    """A plan to compile, as text."""

    plan: Annotated[
        str,
        option(
            "--plan",
            "NAME[:key=value,...] of `superscaler plans`, FILE.py:FUNCTION[:key=value,...], or 'NAME:2 x NAME'",
            "PLAN",
            completion.plans,
        ),
    ]
    cluster: Annotated[
        str,
        option("--cluster", "local:4, v100:4x8 (servers x devices), or a YAML file", "CLUSTER", completion.clusters),
    ]
    no_overlap: Annotated[
        bool, option("--no-overlap", "Send gradients of weights after the backward of a device, not during it.")
    ] = False

    lengths: Annotated[
        str,
        option(
            "--lengths",
            "Lengths of further batches, as 512,1024: the step has a program for each, over the same weights. Of "
            "simulate with shares of the steps, as 512:0.6,2048:0.4.",
            "LENGTHS",
        ),
    ] = ""

    def read(
        self, memory: int | None = None, system: System | None = None
    ) -> tuple[Callable[[Graph, Cluster], Any], Cluster]:
        """Return the sProgram and the cluster. Both are checked, with the sizes of the model, before that is built.
        A search for the plan is for devices of so much memory, and for this system.
        """
        from superscaler.cluster import Cluster
        from superscaler.planner.auto import is_auto, plan_of
        from superscaler.plans import check

        self.check()
        read_mixture(self.lengths)
        sprogram, cluster = plan_of(self.plan, memory, system), Cluster.parse(self.cluster)
        with phase("import"):
            from superscaler.models import sizes_of

        if is_auto(self.plan):
            from superscaler.simulate.predict import check_speeds

            check_speeds(cluster)
        else:
            check(self.plan, sizes_of(self.model), cluster)
        if self.no_overlap:
            sprogram = partial(_last, sprogram)
            vars(sprogram).update(spec=self.plan)
        return sprogram, cluster

    def __str__(self) -> str:
        return f"{self.model} under {self.plan} on {self.cluster}"

    def compile(self, system: System | None = None) -> tuple[Plan, BuiltModel]:
        """Build, capture and compile. `system`: of a search for the plan. Raises PlanError with the reason."""
        sprogram, cluster = self.read(system=system)
        from superscaler.plan import compile as compile_graph

        graph, built = self.on(cluster).capture()
        return compile_graph(graph, sprogram, cluster, [*read_mixture(self.lengths)]), built


def _last(sprogram: Callable[[Graph, Cluster], Any], graph: Graph, cluster: Cluster) -> Any:
    """Run an sProgram, and send the gradients of weights last."""
    graph.send_gradients_last()
    return sprogram(graph, cluster)


def warn_of_servers(printer: Printer, plan: str, cluster: Cluster) -> None:
    """Print a line if a plan communicates in each layer over servers."""
    from superscaler.plans import over_servers

    if line := over_servers(plan, cluster):
        printer.show(line)
