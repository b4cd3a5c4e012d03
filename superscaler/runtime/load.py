"""The code and the step of a rank, from a plan directory."""

import linecache
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from torch import Tensor

from superscaler.cluster import Cluster
from superscaler.errors import InputError
from superscaler.launch.jobs import how_to_start
from superscaler.runtime.replay.cuda import CudaGraphs, check_device, prepare_nccl
from superscaler.runtime.shapes.forms import Saved
from superscaler.runtime.step import Evaluation, Step, build_step
from superscaler.specs.user_file import locating
from superscaler.store.folder import named_path
from superscaler.store.operators import import_operators
from superscaler.store.plan import (
    code_of,
    constants_of,
    of_compiled,
    open_plan,
    shapes_in,
    warn_versions,
    weights_of,
)
from superscaler.store.plan_head import COMPILED, EVALUATION, PLAN_FILE, REFUSED_FILE, RUN_FILE


def load(directory: str | Path, manifest: bool = True, torch_compile: bool = False, cuda_graph: bool = False) -> Step:
    """Return this rank's step of a saved plan; `superscaler.plan.load` describes the arguments."""
    from superscaler.comm.distributed import connect, world_size
    from superscaler.launch.watch import watch

    path = named_path("load", directory)
    saved = open_plan(path, manifest)
    plan, world = saved.head, world_size()
    if world != plan["world"]:
        run = "1 process runs" if world == 1 else f"{world} processes run"
        hint = how_to_start(Cluster.parse(plan["cluster"]), path / RUN_FILE)
        raise InputError(f"{path} is a plan for {plan['world']} devices, but {run} it; {hint}")
    prefix = COMPILED if torch_compile and "compiled" in plan else ""
    plan, code = of_compiled(plan) if prefix else plan, code_of(saved, prefix)
    import_operators(plan["operators"], path, manifest)
    if cuda_graph:
        prepare_nccl()
    communicator = connect()
    if cuda_graph:
        check_device(communicator.device)
    if communicator.rank == 0:
        warn_versions(saved)
    weights, fixed = weights_of(saved, communicator.rank)
    # The code and tables without hashes may be what a user wrote.
    with nullcontext() if manifest else locating(path / PLAN_FILE, "cannot be run"):
        made = modules(code, f"{path}/{prefix}")
        recorder = CudaGraphs(communicator.device) if cuda_graph else None
        step = build_step(plan, made, weights, communicator, fixed, torch_compile=torch_compile, recorder=recorder)
    step.form.directory = path
    # Not the step's, which would be in a cycle: it ends once nothing uses it.
    rank = step.rank
    step.choice.saved = lambda: _shapes_of(path, rank, manifest, prefix)
    if (path / EVALUATION / REFUSED_FILE).exists():
        step.evaluation = lambda: refuse_evaluation(path)
    elif (path / EVALUATION / PLAN_FILE).exists():
        step.evaluation = lambda: _read_evaluation(path / EVALUATION, rank, manifest)
    state = step.state
    step.watch = watch(step.rank, step.world, f"{path}/", lambda: (state.steps, state.works), communicator.start)
    return step


def refuse_evaluation(path: Path) -> NoReturn:
    """Raise InputError with the reason why a plan directory has no plan of evaluation."""
    why = (path / EVALUATION / REFUSED_FILE).read_text().strip()
    raise InputError(
        f"{path} has no plan of evaluation: {why} Give one: plan.save(directory, evaluation=ss.compile(ss.capture("
        "module.eval(), ..., optimizer=None), ...))."
    )


def _shapes_of(path: Path, rank: int, manifest: bool, prefix: str = "") -> list[Saved]:
    """Return the plans of other shapes in a plan directory."""
    return [_shape_of(folder, rank, manifest, prefix) for folder in shapes_in(path)]


def _shape_of(path: Path, rank: int, manifest: bool, prefix: str) -> Saved:
    saved = open_plan(path, manifest)
    own = prefix if "compiled" in saved.head else ""

    def read() -> tuple[dict[str, ModuleType], dict[str, Tensor]]:
        import_operators(saved.head["operators"], path, manifest)
        return modules(code_of(saved, own), f"{path}/{own}"), constants_of(saved, rank)

    return Saved(of_compiled(saved.head) if own else saved.head, read, path)


def _read_evaluation(path: Path, rank: int, manifest: bool) -> Evaluation:
    """Return the plan of evaluation in a folder, its code, its weights on a rank, and its plans of other shapes."""
    saved = open_plan(path, manifest)
    import_operators(saved.head["operators"], path, manifest)
    code, weights = modules(code_of(saved), f"{path}/"), weights_of(saved, rank)[0]
    return Evaluation(saved.head, code, weights, lambda: _shapes_of(path, rank, manifest))


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
        # Tracebacks show it, also where the file is not there any more.
        linecache.cache[prefix + name] = len(text), None, text.splitlines(keepends=True), prefix + name
        exec(compile(text, prefix + name, "exec"), module.__dict__)
        made[module.__name__] = module
    return made
