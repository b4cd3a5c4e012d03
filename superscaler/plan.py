"""The public face: capture a training step, compile a plan for it, verify, save and load it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from superscaler import explain
from superscaler.account import account, manifest, microbatches
from superscaler.checks import CHECKS
from superscaler.cluster import Cluster
from superscaler.compiler import Compiled, compile_graph
from superscaler.errors import InputError
from superscaler.frontend.capture import capture as capture_model
from superscaler.ir.program import Backward, Bucket, Collective, Forward, Send
from superscaler.ir.transformed import Graph
from superscaler.package import initial_values, write
from superscaler.plans import resolve
from superscaler.runtime.step import Step, load
from superscaler.verify import verify


class Plan:
    """A compiled plan: one program per device that computes what the model computes."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per phase, capture included; `export` is torch's own, `total` the sum."""
        phases = {**self.compiled.graph.captured.seconds, **self.compiled.seconds}
        phases["total"] = sum(s for name, s in phases.items() if name != "total")
        return phases

    @cached_property
    def counts(self) -> dict[str, int]:
        return self.compiled.counts

    def validate(self) -> dict[str, Any]:
        """Check conservation, completeness and deadlock freedom. Raises ScheduleError at the first that fails."""
        for check in CHECKS.values():
            check(self.compiled)
        return {**dict.fromkeys(CHECKS, True), **self.counts}

    def verify(
        self, backend: str = "threads", batch: Mapping[str, torch.Tensor] | None = None, shapes: str = "auto"
    ) -> dict[str, Any]:
        """Compare one step with the model in float64; see `superscaler.verify.verify`."""
        return verify(self.compiled, backend, batch, shapes)

    def save(self, directory: str | Path, seed: int = 0) -> bool:
        """Write the plan with the initial weights into a directory, which `torchrun .../run.py` trains.

        Returns False where the directory holds the same plan already: nothing is written then.
        """
        model = self.compiled.graph.model
        values = initial_values(model, self.compiled.graph.captured.values, seed)
        return write(self.compiled, Path(directory), values, seed)

    def explain(self) -> str:
        """Return the plan in words: per block its splits, weights and communication; the order; the totals."""
        return explain.words(self._account)

    def diff(self, other: Plan) -> str:
        """Return what differs between this plan and another, nothing when they are equal."""
        return "\n".join(explain.difference(self._account, other._account))

    @cached_property
    def _account(self) -> dict[str, Any]:
        values = self.compiled.graph.captured.values
        return {"manifest": manifest(self.compiled, values), "seed": 0, **account(self.compiled)}

    def summary(self) -> str:
        """Return one line per distinct program: who runs it, its segments, its communication per step."""
        groups: dict[str, list[int]] = {}
        for rank, name in enumerate(self.compiled.emitted.programs):
            groups.setdefault(name, []).append(rank)
        lines = [f"{len(groups)} distinct programs for {self.compiled.cluster}"]
        for name, ranks in groups.items():
            code = self.compiled.program.devices[ranks[0]].instructions
            kinds = Counter(i.kind for i in code if isinstance(i, Collective | Bucket))
            kinds["send"] = sum(isinstance(i, Send) for i in code)
            work = f"{sum(isinstance(i, Forward) for i in code)} F, {sum(isinstance(i, Backward) for i in code)} B"
            told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()) if count) or "no communication"
            modules = list(dict.fromkeys(i.module for i in code if isinstance(i, Forward) and i.module))
            shown = f"{modules[0]} .. {modules[-1]}" if len(modules) > 1 else "".join(modules)
            order = microbatches(code)
            lines.append(f"  {name}: devices {_ranges(ranks)}: {work}; {told}; {shown}")
            lines += [f"    {order}"] if order else []
        return "\n".join(lines)


def _ranges(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown + (f", ... ({len(ranks)})" if len(ranks) > 16 else "")


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    autocast: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    cache: bool = False,
) -> Graph:
    """Return the graph of a training step: `module(*args, **kwargs)` gives the loss (or an object with `.loss`).

    `autocast` is "bf16" or "fp16" (default: the `torch.autocast` region around this call); `scaler` scales the loss.
    With `cache`, a capture of the same code, shapes and options is read from disk.
    """
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"capture needs a torch.nn.Module, not {module!r}.")
    captured = capture_model(module, args, kwargs, optimizer, autocast, scaler, cache)
    return Graph(captured.model, captured)


def compile(graph: Graph, sprogram: Callable[[Graph, Cluster], Any] | str, cluster: Cluster | str) -> Plan:
    """Return the plan that `sprogram` makes of (a copy of) the graph. Raises PlanError with the reason.

    Both may also be what the command line takes: "hybrid:dp=2,tp=2" and "local:4".
    """
    program = resolve(sprogram) if isinstance(sprogram, str) else sprogram
    devices = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if not callable(program) or not isinstance(devices, Cluster):
        raise InputError(f"compile needs an sProgram and a Cluster, not {program!r} and {devices!r}.")
    return Plan(compile_graph(graph, program, devices))


__all__ = ["Plan", "Step", "capture", "compile", "load"]
