"""The code and the step of a rank, from a plan directory."""

import linecache
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from superscaler.cluster import Cluster
from superscaler.errors import InputError, RuntimeFailure, brief
from superscaler.launch.jobs import how_to_start
from superscaler.runtime.step import Step, build_step
from superscaler.runtime.tapes import Segment
from superscaler.specs.arguments import checked
from superscaler.specs.user_file import locating
from superscaler.store.folder import named_path
from superscaler.store.operators import import_operators
from superscaler.store.plan import (
    EVALUATION,
    PLAN_FILE,
    RUN_FILE,
    code_of,
    open_plan,
    warn_versions,
    weights_of,
)


@checked
def load(directory: str | Path, manifest: bool = True, torch_compile: bool = False) -> Step:
    """Return this rank's step of a saved plan. Rank and world come from torchrun's environment (alone: rank 0 of 1).

    `manifest=False` skips the hashes: it runs an edited plan. With `torch_compile` each segment is compiled by
    `torch.compile` when it first runs; results then differ by rounding. Raises InputError for a directory that is
    damaged, of another version, or edited, and for a plan with split backwards that is to be compiled.
    """
    from superscaler.comm.distributed import connect, world_size
    from superscaler.launch.watch import watch

    path = named_path("load", directory)
    saved = open_plan(path, manifest)
    plan, world = saved.head, world_size()
    if world != plan["world"]:
        run = "1 process runs" if world == 1 else f"{world} processes run"
        hint = how_to_start(Cluster.parse(plan["cluster"]), path / RUN_FILE)
        raise InputError(f"{path} is a plan for {plan['world']} devices, but {run} it; {hint}")
    code = code_of(saved)
    if torch_compile and any("rt.backward_input(" in text for text in code.values()):
        raise InputError(
            f"{path} runs backwards in two halves, which torch.compile makes one; leave torch_compile "
            "(--torch-compile) out, or take a plan without split backwards, as pipeline_1f1b."
        )
    import_operators(plan["operators"], path, manifest)
    communicator = connect()
    if communicator.rank == 0:
        warn_versions(saved)
    weights, fixed = weights_of(saved, communicator.rank)
    # The code and tables without hashes may be what a user wrote.
    with nullcontext() if manifest else locating(path / PLAN_FILE, "cannot be run"):
        step = build_step(plan, modules(code, f"{path}/"), weights, communicator, fixed)
    step.directory = path
    step.state.compiled = CompiledSegments() if torch_compile else None
    if (path / EVALUATION / PLAN_FILE).exists():
        step.evaluation = lambda: _read_evaluation(path / EVALUATION, step.rank, manifest)
    state = step.state
    step.watch = watch(step.rank, step.world, f"{path}/", lambda: (state.steps, state.works), communicator.start)
    return step


def _read_evaluation(
    path: Path, rank: int, manifest: bool
) -> tuple[Mapping[str, Any], Mapping[str, ModuleType], Mapping[str, Tensor]]:
    """Return the plan of evaluation in a folder, its code, and its weights on a rank."""
    saved = open_plan(path, manifest)
    import_operators(saved.head["operators"], path, manifest)
    return saved.head, modules(code_of(saved), f"{path}/"), weights_of(saved, rank)[0]


def modules(files: Mapping[str, str], prefix: str = "") -> dict[str, ModuleType]:
    """Return the emitted files as modules, `segments` first. `prefix` is shown in tracebacks."""
    made: dict[str, ModuleType] = {}
    for name in sorted(files, key=lambda n: n != "segments.py"):
        module = ModuleType(name.removesuffix(".py"))
        text = files[name]
        if made:
            # A plan is not on the path of modules; the line stays, so that tracebacks show the right one.
            text = text.replace("import segments\n", "\n", 1)
            module.__dict__["segments"] = made["segments"]
        module.__dict__["__source__"] = text
        # Tracebacks show it, and torch.compile tells functions apart, also where the file is not there any more.
        linecache.cache[prefix + name] = len(text), None, text.splitlines(keepends=True), prefix + name
        exec(compile(text, prefix + name, "exec"), module.__dict__)
        made[module.__name__] = module
    return made


class CompiledSegments:
    """The segments of a rank as `torch.compile` runs them, each compiled when it first runs.

    Blocks of equal layers are one segment, so that they are compiled once. Random numbers are drawn outside of compiled
    code, which would have their seed, the number of the step, as a constant.
    """

    def __init__(self) -> None:
        # Torch looks at the gradients of inputs, some of which are no leaves.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
        self._made: dict[Segment, Segment] = {}
        self._random: Callable[[int], Tensor]
        # One function for all steps: torch compiles a segment again for another function.
        self._draw = torch.compiler.disable(lambda k: self._random(k))

    def __call__(self, segment: Segment, extra: dict[str, Any]) -> tuple[Segment, dict[str, Any]]:
        if segment not in self._made:
            # Without the name of its module, which torch would import, but which is not on its path. Torch finds what
            # it compiled by the code, in these globals: those of this rank alone.
            names = {name: value for name, value in segment.__globals__.items() if name != "__name__"}
            own = FunctionType(segment.__code__.replace(), names, segment.__name__, segment.__defaults__)
            self._made[segment] = partial(_run, torch.compile(own, dynamic=False), segment)
        if "random" in extra:
            self._random = extra["random"]
            extra = {**extra, "random": self._draw}
        return self._made[segment], extra


def _run(compiled: Segment, segment: Segment, *inputs: Tensor, **extra: Any) -> tuple[Tensor, ...]:
    """Run a compiled segment. Raises RuntimeFailure if torch cannot compile it."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        return compiled(*inputs, **extra)
    except TorchDynamoException as error:
        cause = getattr(error, "inner_exception", error)
        raise RuntimeFailure(
            f"torch.compile fails on {segment.__name__} of segments.py ({type(cause).__name__}: {brief(cause)}); "
            "leave torch_compile (--torch-compile) out."
        ) from error
