"""A plan directory as a rank reads it: all of it is checked, then the weights of the rank are loaded."""

from __future__ import annotations

import inspect
import warnings
from math import prod
from pathlib import Path

import torch
from torch import Tensor

import superscaler
from superscaler.errors import InputError, unknown
from superscaler.specs.file_errors import refuse
from superscaler.specs.options import OPTIMIZERS
from superscaler.store.folder import Whole
from superscaler.store.plan import OPERATORS, PLAN_FILE, REWRITE, WEIGHTS_FILE, read_plan
from superscaler.store.tensor_file import kinds, opened


def open_plan(path: Path, has_hashes: bool) -> Whole:
    """Open a plan directory, its weights unread. Raises InputError if it cannot be run; see `load`."""
    plan = read_plan(path, has_hashes)
    # Also files that no rank needs: an incomplete directory is not run.
    plan.check(name for name in plan.stamps if name != WEIGHTS_FILE)
    _check_torch(path / PLAN_FILE, plan)
    return plan


def code_of(plan: Whole) -> dict[str, str]:
    """Return the emitted code of a plan directory by file."""
    names = ("segments", *sorted(set(plan.head["programs"])))
    return {f"{name}.py": plan.text(f"{name}.py") for name in names}


def operators_of(plan: Whole) -> dict[str, bytes]:
    """Return the copies of the user's operators in a plan directory by file."""
    return {n: plan.bytes(n) for n in plan.head["manifest"]["files"] if n.startswith(f"{OPERATORS}/")}


def weights_of(plan: Whole, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the whole tensors of a rank's weights, and on rank 0 also those that no device holds."""
    placed = [{w["tensor"] for w in device["weights"]} for device in plan.head["devices"]]
    fixed = plan.head["manifest"]["tensors"].keys() - set[str]().union(*placed) if rank == 0 else set()
    if plan.stamps:
        plan.check_tensors(WEIGHTS_FILE, placed[rank] | fixed)
    with opened(plan.path / WEIGHTS_FILE, REWRITE) as stored:
        found = {name: stored.get_tensor(name) for name in sorted(placed[rank] | fixed)}
        shown = kinds(stored)
    for name in sorted(placed[rank]):
        shape, dtype = shown[name]
        planned = plan.head["tensors"].get(name, {"dtype": dtype})["dtype"]
        sizes = tuple(map(prod, plan.head["slots"].get(name, ())))
        if (dtype, shape) != (planned, sizes):
            fault = f"has {name} as {dtype} {shape}, but the plan as {planned} {sizes}"
            refuse(plan.path / WEIGHTS_FILE, fault, REWRITE)
    return {name: found[name] for name in placed[rank]}, {name: found[name] for name in fixed}


def _check_torch(file: Path, saved: Whole) -> None:
    """Raise InputError for a dtype, an optimizer or an option that torch lacks."""
    plan = saved.head
    dtypes = [plan["loss_dtype"] or "float32", *(dtype for _, dtype in plan["inputs"].values())]
    if odd := [name for name in dtypes if not isinstance(getattr(torch, name, None), torch.dtype)]:
        raise InputError(f"{file} has the dtype '{odd[0]}', which torch {torch.__version__} has not; {REWRITE}.")
    name = plan["optimizer"]["name"]
    if not name:
        return
    if name not in OPTIMIZERS.values():
        raise InputError(f"{file}: {unknown('optimizer', name, OPTIMIZERS.values())}")
    known = inspect.signature(getattr(torch.optim, name)).parameters
    for option in (option for group in plan["optimizer"]["groups"] for option in group):
        if option not in known:
            raise InputError(f"{file}: {unknown(f'option of torch.optim.{name}', option, known)}")


def warn_versions(saved: Whole) -> None:
    """Warn if another torch, or another superscaler, compiled a plan: its numbers may differ in the last bits."""
    versions = {"torch": torch.__version__, "superscaler": superscaler.__version__}
    kept = saved.head["manifest"]
    if changed := [f"{name} {kept[name]}, not {now}" for name, now in versions.items() if kept[name] != now]:
        warnings.warn(
            f"{saved.path} was compiled by {' and '.join(changed)}; {REWRITE} where that matters.", stacklevel=3
        )
