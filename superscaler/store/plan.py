"""Plan directories: reading without running any code, and replacing an older plan.

A new plan is written aside, into a folder in its directory, and then replaces the files of the older one. While its
files are moved, the directory holds neither plan. Its hashes show this; the next writer finishes the move.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superscaler.errors import InputError, unknown
from superscaler.specs.file_errors import reading, refuse
from superscaler.specs.options import OPTIMIZERS, kind_of
from superscaler.specs.whole_file import sync
from superscaler.store import folder as disk
from superscaler.store.folder import Draft
from superscaler.store.plan_head import (
    EVALUATION,
    EXPLAIN_FILE,
    NEW,
    OURS,
    PLAN_FILE,
    REFUSED_FILE,
    REWRITE,
    RUN_FILE,
    SHAPES,
    WEIGHTS_FILE,
    PlanHead,
)
from superscaler.store.tensor_file import kinds, opened

if TYPE_CHECKING:
    from torch import Tensor


def read_plan(directory: Path, has_hashes: bool = True) -> disk.Whole:
    """Open a plan directory: plan.json, checked for its version and types, with `has_hashes` also by its hashes."""
    with reading(directory / PLAN_FILE, REWRITE):
        is_there = (directory / PLAN_FILE).exists()
    if not is_there:
        raise InputError(
            f"{directory} is not a plan directory (it has no {PLAN_FILE}); name one that superscaler compile --out has "
            "written."
        )
    return disk.read(directory, PlanHead, has_hashes)


def open_plan(path: Path, has_hashes: bool) -> disk.Whole:
    """Open a plan directory, its weights unread. Raises InputError if it cannot be run; see `load`."""
    plan = read_plan(path, has_hashes)
    # Also files that no rank needs: an incomplete directory is not run.
    plan.check(name for name in plan.stamps if name != WEIGHTS_FILE)
    _check_torch(plan)
    return plan


def code_of(plan: disk.Whole, prefix: str = "") -> dict[str, str]:
    """Return the emitted code of a plan directory by file, whose names there have a prefix."""
    programs = plan.head["compiled"]["programs"] if prefix else plan.head["programs"]
    return {f"{name}.py": plan.text(f"{prefix}{name}.py") for name in ("segments", *sorted(set(programs)))}


def of_compiled(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return plan.json with the programs and the tables of compiled steps."""
    own = plan["compiled"]
    devices = [{**plain, **changes} for plain, changes in zip(plan["devices"], own["devices"], strict=True)]
    return {**plan, "programs": own["programs"], "devices": devices}


def weights_of(plan: disk.Whole, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the whole tensors of a rank's weights, and on rank 0 also the tensors that no device holds."""
    placed = [{w["tensor"] for w in device["weights"]} for device in plan.head["devices"]]
    fixed = plan.head["manifest"]["tensors"].keys() - set[str]().union(*placed) if rank == 0 else set()
    found = _tensors(plan, placed[rank], fixed)
    return {name: found[name] for name in placed[rank]}, {name: found[name] for name in fixed}


def constants_of(plan: disk.Whole, rank: int) -> dict[str, Tensor]:
    """Return the whole constants that a rank holds under a plan of another shape, which has no file of weights."""
    placed = {entry["tensor"] for entry in plan.head["devices"][rank]["weights"]} - plan.head["tensors"].keys()
    return _tensors(plan, placed, set())


def _tensors(plan: disk.Whole, placed: set[str], fixed: set[str]) -> dict[str, Tensor]:
    """Return tensors of a plan directory; those that are `placed` have the shapes of the plan."""
    if plan.stamps:
        plan.check_tensors(WEIGHTS_FILE, placed | fixed)
    with opened(plan.path / WEIGHTS_FILE, REWRITE) as stored:
        found = {name: stored.get_tensor(name) for name in sorted(placed | fixed)}
        shown = kinds(stored)
    for name in sorted(placed):
        shape, dtype = shown[name]
        planned = plan.head["tensors"].get(name, {"dtype": dtype})["dtype"]
        sizes = tuple(map(prod, plan.head["slots"].get(name, ())))
        if (dtype, shape) != (planned, sizes):
            fault = f"has {name} as {dtype} {shape}, but the plan as {planned} {sizes}"
            refuse(plan.path / WEIGHTS_FILE, fault, REWRITE)
    return found


def _check_torch(saved: disk.Whole) -> None:
    """Raise InputError for a dtype, an optimizer or an option that torch lacks."""
    import torch

    plan, file = saved.head, saved.path / PLAN_FILE
    dtypes = [plan["loss_dtype"] or "float32", *(dtype for _, dtype in plan["inputs"].values())]
    if odd := [name for name in dtypes if not isinstance(getattr(torch, name, None), torch.dtype)]:
        raise InputError(f"{file} has the dtype '{odd[0]}', which torch {torch.__version__} lacks; {REWRITE}.")
    for group in plan["optimizer"]["groups"]:
        name, options = kind_of(group, plan["optimizer"]["name"])
        if name not in OPTIMIZERS.values():
            raise InputError(f"{file}: {unknown('optimizer', name, OPTIMIZERS.values())}")
        known = inspect.signature(getattr(torch.optim, name)).parameters
        for option in (option for option in options if option not in known):
            raise InputError(f"{file}: {unknown(f'option of torch.optim.{name}', option, known)}")


def warn_versions(saved: disk.Whole) -> None:
    """Warn if another torch, or another superscaler, compiled a plan: its numbers may differ in the last bits."""
    import torch

    import superscaler

    versions = {"torch": torch.__version__, "superscaler": superscaler.__version__}
    kept = saved.head["manifest"]
    if changed := [f"{name} {kept[name]}, not {now}" for name, now in versions.items() if kept[name] != now]:
        warnings.warn(
            f"{saved.path} was compiled by {' and '.join(changed)}; {REWRITE} where that matters.", stacklevel=3
        )


def plan_files(directory: Path) -> frozenset[str]:
    """Return the names of the plan's files in a directory, also of an unfinished plan; none if it is empty or missing.
    Raises InputError for a file, and for a directory that holds something, but no plan of ours.
    """
    with reading(directory, "choose another directory"):
        if directory.exists() and not directory.is_dir():
            raise InputError(f"{directory} is a file; choose a directory.")
        there = {entry.name for entry in directory.iterdir()} if directory.exists() else set()
        plans = [folder for folder in (directory, directory / NEW) if (folder / PLAN_FILE).is_file()]
    if there - {NEW} and not plans:
        raise InputError(f"{directory} is not empty and is not a plan directory; choose another --out.")
    return frozenset[str]().union(*map(_listed, plans))


def _listed(folder: Path) -> frozenset[str]:
    """Return the names of all files of the plan of any version whose plan.json is in a folder."""
    hint = "nothing beside it is replaced; choose another --out, or empty that directory yourself"
    with reading(folder / PLAN_FILE, hint, kind="plan that compile writes"):
        names = json.loads((folder / PLAN_FILE).read_bytes())["manifest"]["files"].keys()
        if not {EXPLAIN_FILE, RUN_FILE} <= names or not all(re.fullmatch(OURS, n) for n in names):
            raise ValueError("it lists other files")
    return frozenset((PLAN_FILE, WEIGHTS_FILE, *names))


@contextmanager
def staged(directory: Path) -> Iterator[Draft]:
    """Yield a draft of a new plan, which replaces the older plan of a directory; after an error the older one stays."""
    recover(directory)
    with disk.written(directory / NEW) as folder:
        yield Draft(folder, PlanHead)
    recover(directory)


def remove_evaluation(directory: Path) -> None:
    """Remove the plan of evaluation in a plan directory, or the reason why there is none; a folder of others stays."""
    own = directory / EVALUATION
    if any((own / name).exists() for name in (PLAN_FILE, REFUSED_FILE)):
        shutil.rmtree(own)


def shapes_in(directory: Path) -> list[Path]:
    """Return the plans of other shapes in a plan directory, in order."""
    folder = directory / SHAPES
    names = [own.name for own in folder.iterdir() if (own / PLAN_FILE).exists()] if folder.is_dir() else []
    return [folder / name for name in sorted((name for name in names if name.isdigit()), key=int)]


def remove_shapes(directory: Path, kept: int = 0) -> None:
    """Remove the plans of other shapes in a plan directory but for the first ones; a folder of others stays."""
    for own in shapes_in(directory)[kept:]:
        shutil.rmtree(own)
    with suppress(OSError):
        (directory / SHAPES).rmdir()


def recover(directory: Path) -> None:
    """Move a whole plan that is aside into its place; remove an unfinished one. It may be repeated from any point."""
    folder = directory / NEW
    if (folder / PLAN_FILE).is_file():
        _move(folder, directory)
    if folder.exists():
        shutil.rmtree(folder)


def _move(folder: Path, directory: Path) -> None:
    names = _listed(folder)
    older = _listed(directory) if (directory / PLAN_FILE).is_file() else frozenset[str]()
    for name in sorted(names - {PLAN_FILE}):
        if (folder / name).is_file():
            os.replace(folder / name, directory / name)
    for name in older - names:
        (directory / name).unlink(missing_ok=True)
    sync(directory)
    # Last: this file shows that the plan is whole.
    os.replace(folder / PLAN_FILE, directory / PLAN_FILE)
    sync(directory)
